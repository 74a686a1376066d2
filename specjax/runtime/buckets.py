"""Padded sizes for which functions are compiled."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import count, takewhile

# Products of one row take XLA's matrix-vector path on a GPU, which has more kernels. Plain rounds:
# 1.09 ms at one row and 0.94 at two (SmolLM2-135M), 5.05 and 4.31 (Llama-3.1-8B shape; H200). With
# drafts only what the head computes for one token has one row: padded, a round of SmolLM2-135M with
# five drafts takes 0.98 ms instead of 1.04, one of the 8B shape with seven 5.91 instead of 5.78.
PADDED_ROWS = 2
# between those two models; below it launches bind a round: an H200 reads so much in 0.25 ms
LAUNCH_BOUND_BYTES = 1e9
# tokens: fewer take as long on a GPU, since the weights are read
LEAST_PREFILL, LEAST_PREFILL_CPU = 128, 32
# prompt tokens of a step beside requests that decode: 12 ms of the Llama-3.1-8B shape on an H200
DEFAULT_CHUNK = 512


def smallest_bucket(*, on_gpu: bool, drafts: bool, weight_bytes: int) -> int:
    """Rows that a batch of one is padded to."""
    pays = on_gpu and (not drafts or weight_bytes < LAUNCH_BOUND_BYTES)
    return PADDED_ROWS if pays else 1


def batch_buckets(max_running_requests: int, smallest: int = 1) -> tuple[int, ...]:
    """Powers of two from ``smallest`` up to ``max_running_requests``, and that number itself."""
    doubled = takewhile(lambda size: size < max_running_requests, (smallest << i for i in count()))
    return (*doubled, max(smallest, max_running_requests))


def checked_buckets(
    buckets: Sequence[int] | None, max_running_requests: int, smallest: int = 1
) -> tuple[int, ...]:
    """Batch buckets as given, sorted, or the default ones for ``None``."""
    if buckets is None:
        return batch_buckets(max_running_requests, smallest)
    ordered = tuple(sorted(set(buckets)))
    if not ordered or ordered[0] < 1 or ordered[-1] < max_running_requests:
        raise ValueError(
            f"batch_buckets={tuple(buckets)} must be at least 1 and their largest at least "
            f"max_running_requests={max_running_requests}"
        )
    return ordered


def prefill_buckets(largest: int, *, on_cpu: bool = False) -> tuple[int, ...]:
    """Widths of a prefill: ``largest``, and a quarter of each as long as that saves time.

    On a GPU half of those that run beside rounds, which padding and further calls delay.
    """
    least, halved = (LEAST_PREFILL_CPU, 0) if on_cpu else (LEAST_PREFILL, DEFAULT_CHUNK)
    widths = [largest]
    while (width := widths[-1] // (2 if widths[-1] <= halved else 4)) >= least:
        widths.append(width)
    return tuple(reversed(widths))


def pick_bucket(size: int, buckets: Sequence[int]) -> int:
    """The smallest of ascending buckets that holds ``size``."""
    at = bisect_left(buckets, size)
    if at == len(buckets):
        raise ValueError(f"size={size} exceeds the largest bucket of {(*buckets,)}")
    return buckets[at]
