"""Padded sizes for which functions are compiled."""

from collections.abc import Sequence


def batch_buckets(max_running_requests: int) -> tuple[int, ...]:
    """Powers of two below ``max_running_requests``, and that number itself."""
    sizes = []
    size = 1
    while size < max_running_requests:
        sizes.append(size)
        size *= 2
    return (*sizes, max_running_requests)


def checked_buckets(buckets: Sequence[int] | None, max_running_requests: int) -> tuple[int, ...]:
    """Batch buckets as given, sorted, or the default ones for ``None``.

    Raises:
        ValueError: if they do not end at ``max_running_requests``.
    """
    if buckets is None:
        return batch_buckets(max_running_requests)
    ordered = tuple(sorted(set(buckets)))
    if not ordered or ordered[0] < 1 or ordered[-1] != max_running_requests:
        raise ValueError(
            f"batch_buckets={tuple(buckets)} must be at least 1 and their largest equal "
            f"max_running_requests={max_running_requests}"
        )
    return ordered


def prefill_buckets(chunked_prefill_size: int, context_length: int) -> tuple[int, ...]:
    """Prompt chunk widths: the chunk size, and an eighth of it for short prompts and remainders."""
    largest = min(chunked_prefill_size, context_length)
    small = max(1, chunked_prefill_size // 8)
    return (small, largest) if small < largest else (largest,)


def pick_bucket(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds ``size``.

    Raises:
        ValueError: if none does.
    """
    for bucket in buckets:
        if bucket >= size:
            return bucket
    raise ValueError(f"size={size} exceeds the largest bucket {max(buckets)} of {tuple(buckets)}")
