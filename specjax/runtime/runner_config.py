"""The static sizes of a runner, and the device memory that it needs."""

import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, product, takewhile
from typing import Any, NamedTuple

import jax

from specjax.kernels.backend import resolve
from specjax.kernels.delta_scan import GROUP
from specjax.kv.holding import KVWrites
from specjax.kv.recurrent import abstract_pool
from specjax.kv.window_pages import pages_wanted
from specjax.models.declare import Cache, num_whole, pool_shapes, pool_windows
from specjax.models.flat import Networks
from specjax.models.placement import Placement
from specjax.sampling.accept_draws import COUPLED, Acceptance
from specjax.speculative.algorithm import SpeculativeAlgorithm, StateSizes
from specjax.types import DraftShape


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """The static sizes of a runner; ``num_slots`` includes padding slot 0.

    ``shapes`` are the tiers in ascending order; the largest tier determines all sizes. With Pallas
    kernels (GPU), rounds for greedy batches are compiled separately, because a conditional around
    the sampler would make the host read a value in the middle of a round. Without the conditional,
    a plain round of 32 rows takes 5.44 ms instead of 6.23 (Llama-3.1-8B shape, H200).
    """

    algorithm: SpeculativeAlgorithm
    shapes: tuple[DraftShape, ...]
    page_size: int
    num_pages: int
    pages_per_request: int
    num_slots: int
    batch_buckets: tuple[int, ...]
    prefill_buckets: tuple[int, ...]
    rounds_per_dispatch: int = 1
    simulate_accept_length: float | None = None
    simulates_acceptance: bool = False  # by the requests' probabilities
    acceptance: Acceptance = COUPLED  # rule that accepts drafts above temperature 0
    max_top_logprobs: int = 20
    processed_logprobs: bool = False  # report log-probabilities after penalties and filters
    mixed_prefill_tokens: int = 512  # maximum prompt tokens in a step that also runs a round
    implementation: str | None = None  # implementation of all kernels, as in backend.resolve
    reads_confidence: bool = False  # report confidences of drafts; needed by packed tiers
    deterministic: bool = False  # bits of a row do not depend on other rows
    # window, and pages with the padding page, of each pool after the first; see models/declare.py
    window_pages: tuple[tuple[int, int], ...] = ()
    has_grammars: bool = False  # rounds can be split, so that the host can mask tokens
    num_snapshots: int = 0  # states of recurrent layers that the prefix cache may keep

    def __post_init__(self) -> None:
        shapes = self.shapes
        if list(shapes) != sorted(set(shapes)) or not shapes or shapes[0].steps < 0:
            raise ValueError(f"{shapes=} must ascend, not be empty and have no negative steps")
        for shape in shapes:
            if not shape.packed:
                continue
            if not 1 <= shape.packed < shape.nodes or not self.reads_confidence:
                raise ValueError(
                    f"packed={shape.packed} must be from 1 to {shape.nodes - 1}, below nodes="
                    f"{shape.nodes}, and needs reads_confidence=True"
                )
            # to verify a draft only if the drafter is sure of it would bias the residual draws
            if not self.acceptance.is_coupled:
                raise ValueError(f"packed={shape.packed} needs acceptance=COUPLED")

    @property
    def num_states(self) -> int:
        """Number of slots in the pool of states: those of requests, then those of snapshots."""
        return self.num_slots + self.num_snapshots

    @property
    def chunk_step(self) -> int:
        """Chunks of prompts end at multiples of this many tokens if possible.

        States then do not depend on how a prompt is cut, or on where it continues from a snapshot.
        """
        return GROUP if self.num_snapshots else 1

    @property
    def on_gpu(self) -> bool:
        return resolve(self.implementation) == "pallas"

    @property
    def has_greedy(self) -> bool:
        """Whether greedy batches have functions of their own."""
        return self.on_gpu

    @property
    def largest(self) -> DraftShape:
        return self.shapes[-1]

    @property
    def kv_writes(self) -> KVWrites:
        # a round in which grammars limit requests drafts for the next one
        return KVWrites.of(self.shapes, self.rounds_per_dispatch, drafts_ahead=self.has_grammars)

    @property
    def rounds(self) -> list[tuple[DraftShape, int]]:
        """Tiers with their batch buckets; a packed tier needs several requests to share rows."""
        pairs = product(self.shapes, self.batch_buckets)
        return [(tier, batch) for tier, batch in pairs if batch > 1 or not tier.packed]

    def max_chunks(self, width: int) -> int:
        """Maximum number of chunks (one per request) in a prefill of ``width`` tokens."""
        least = PADDED_ROWS if self.on_gpu else 1  # for the output head, as in rounds
        return max(least, min(self.num_slots - 1, width // MIN_CHUNK))

    def prefill_width(self, num_tokens: int, *, with_logprobs: bool = False) -> int:
        """Pick the smallest bucket that holds all ``num_tokens`` waiting tokens.

        If more than a quarter of it would be padding, or the padding would cost more than another
        call, pick the largest bucket that they fill. The other tokens then wait.
        """
        buckets = self.logprob_buckets if with_logprobs else self.prefill_buckets
        fitting = next((width for width in buckets if width >= num_tokens), buckets[-1])
        full = [width for width in buckets if width <= num_tokens]
        padding = fitting - num_tokens
        return full[-1] if full and padding > min(fitting // 4, MOST_PADDING) else fitting

    @property
    def logprob_buckets(self) -> tuple[int, ...]:
        """Widths of prefills that report log-probabilities, which need the logits of all rows."""
        small = tuple(width for width in self.prefill_buckets if width <= MAX_LOGPROB_ROWS)
        return small or self.prefill_buckets[:1]

    @property
    def context(self) -> int:
        """Maximum number of tokens that the pages of a request hold."""
        return self.pages_per_request * self.page_size

    @property
    def max_total_tokens(self) -> int:
        """Number of tokens that all pages hold, without the padding page."""
        return (self.num_pages - 1) * self.page_size

    @property
    def max_window_tokens(self) -> int | None:
        """The same for the pools of layers with windows, if there are any."""
        windowed = self.num_kv[1:]
        return sum(windowed) - len(windowed) * self.page_size if windowed else None

    @property
    def num_kv(self) -> tuple[int, ...]:
        """Number of KV indices in each pool: pages times page size, with padding pages."""
        counts = self.num_pages, *(count for _, count in self.window_pages)
        return tuple(count * self.page_size for count in counts)

    @property
    def sizes(self) -> StateSizes:
        return StateSizes(self.num_slots, self.num_kv[0], self.context, self.largest)


# number of padding tokens that cost as much as another call (Llama-3.1-8B: 150)
MOST_PADDING = 256
# average number of tokens per chunk in a prefill with the maximum number of chunks
MIN_CHUNK = 8
# float32 logits of this many rows take 0.26 GB with a vocabulary of 128,256 tokens
MAX_LOGPROB_ROWS = 512

# fraction of memory for weights and KV; activations, and on a CPU other processes, use the rest
DEFAULT_MEM_FRACTION, DEFAULT_MEM_FRACTION_CPU = 0.85, 0.5


class MemoryNeeds(NamedTuple):
    """The memory of a runner on each device in bytes."""

    weight_bytes: int  # weights, and state whose size does not depend on the KV pool
    token_bytes: int  # state per token in the KV pool
    temporary_bytes: int  # while a function runs and KV arrives from a prefill worker
    # KV pools of the layers with windows, if they have their own
    window_bytes: int = 0


def memory_needs(
    networks: Networks, config: RunnerConfig, temporary_bytes: int = 0, transit_tokens: int = 0
) -> MemoryNeeds:
    """Compute the memory of a runner that receives KV of ``transit_tokens`` while functions run.

    ``temporary_bytes`` are those of its compiled functions, which do not depend on the number of
    pages. ``config.num_pages`` is ignored.
    """
    single, double = (_state_bytes(networks, config, num_kv) for num_kv in (1, 2))
    token_bytes = double - single
    window_bytes = _pool_bytes(networks, (0, *config.num_kv[1:]))
    fixed = networks.weight_bytes + single - token_bytes - window_bytes
    temporary = temporary_bytes + transit_tokens * token_bytes
    return MemoryNeeds(fixed, token_bytes, temporary, window_bytes)


def _state_bytes(networks: Networks, config: RunnerConfig, num_kv: int) -> int:
    sizes = config.sizes._replace(num_kv=num_kv)
    requests = abstract_pool(networks.target.caches, config.num_states)
    drafted = tree_bytes(config.algorithm.abstract_state(networks, sizes)) // networks.draft.shards
    state = drafted + tree_bytes(requests) // networks.target.shards
    return state + _pool_bytes(networks, (num_kv, *config.num_kv[1:]))


def _pool_bytes(networks: Networks, num_kv: Sequence[int]) -> int:
    """Bytes of the target's KV pools on a device."""
    caches = networks.target.caches
    pools = pool_shapes(caches, num_kv)
    cut = len(pools) - num_whole(caches)  # others are whole on each device
    return tree_bytes(pools[:cut]) // networks.target.shards + tree_bytes(pools[cut:])


def tree_bytes(arrays: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


def window_pages(caches: Sequence[Cache], config: RunnerConfig) -> tuple[tuple[int, int], ...]:
    """Windows and numbers of pages of pools for them; empty if these would save little."""
    slots, form = config.num_slots - 1, (config.kv_writes, config.page_size)
    sizes: Any = {"num_requests": slots, "chunk": config.prefill_buckets[-1]}
    pools = tuple((window, pages_wanted(window, *form, **sizes)) for window in pool_windows(caches))
    most = 3 * slots * config.pages_per_request
    return pools if all(4 * count < most for _, count in pools) else ()


def grown_window_pages(
    caches: Sequence[Cache], config: RunnerConfig, spare: int
) -> tuple[tuple[int, int], ...]:
    """Add the pages that ``spare`` bytes hold to each pool for windows, up to ``num_pages``."""
    pools = config.window_pages
    page_bytes = tree_bytes(pool_shapes(caches, (0, *[config.page_size] * len(pools))))
    added = spare // max(1, page_bytes)
    return tuple((window, min(count + added, config.num_pages)) for window, count in pools)


def device_memory(device: jax.Device) -> int:
    """Number of bytes that the process can allocate on a device; on a CPU, physical memory."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def least_memory(placement: Placement) -> int:
    """Number of bytes that the process can allocate on each of the devices.

    Several devices of a CPU share its memory.
    """
    memory = min(map(device_memory, placement.devices))
    return memory // placement.count if placement.on_cpu else memory


def plan_pages(
    needs: MemoryNeeds,
    config: RunnerConfig,
    *,
    memory: int,
    max_total_tokens: int | None,
    mem_fraction_static: float | None,
) -> tuple[int, int]:
    """Decide the number of pages, including the padding page, and return it with the spare bytes.

    ``config.num_pages`` is ignored. Bytes are spare if requests could not use another page.

    If ``max_total_tokens`` is set, it is rounded up to pages. Otherwise, as in SGLang, weights and
    KV together take the fraction ``mem_fraction_static`` of ``memory``, but there are never more
    pages than all requests can use. In both cases, enough memory for temporaries stays free.
    """
    default = DEFAULT_MEM_FRACTION if config.on_gpu else DEFAULT_MEM_FRACTION_CPU
    fraction = mem_fraction_static or default
    weight_bytes, token_bytes, temporary, window_bytes = needs
    page_bytes = token_bytes * config.page_size
    available, spare = memory - temporary - weight_bytes - window_bytes, 0
    kinds, lower = "weights", ""
    if config.num_snapshots:
        kinds, lower = "weights and states", f"max_state_snapshots={config.num_snapshots}"
    if available < 2 * page_bytes:
        raise ValueError(
            f"no KV page fits into {memory / 1e9:.2f} GB with {weight_bytes / 1e9:.2f} GB of "
            f"{kinds} and {temporary / 1e9:.2f} GB of temporary memory; lower "
            f"max_running_requests, {lower and f'{lower}, '}context_length, "
            "speculative_num_steps, speculative_num_draft_tokens or chunked_prefill_size; if the "
            "weights alone do not fit, set dtype='bfloat16' or quantization='fp8', or choose a "
            "smaller model"
        )
    if max_total_tokens is not None:
        num_pages = 1 - (-max_total_tokens // config.page_size)
        if num_pages * page_bytes > available:
            raise ValueError(
                f"max_total_tokens={max_total_tokens} needs {num_pages * page_bytes / 1e9:.2f} GB "
                f"of KV, but {kinds} and {temporary / 1e9:.2f} GB of temporary memory leave "
                f"{available / 1e9:.2f} GB; lower max_total_tokens"
            )
    else:
        budget = min(int(memory * fraction) - weight_bytes - window_bytes, available)
        usable = (config.num_slots - 1) * config.pages_per_request
        num_pages = min(budget // max(1, page_bytes), usable + 1)
        if num_pages < 2:
            raise ValueError(
                f"no KV page fits: mem_fraction_static={fraction} of {memory / 1e9:.2f} GB, less "
                f"{weight_bytes / 1e9:.2f} GB of {kinds}, leaves {budget / 1e9:.2f} GB; raise "
                f"mem_fraction_static{lower and f' or lower {lower}'}"
            )
        spare = budget - num_pages * page_bytes
    return num_pages, spare if spare >= page_bytes else 0


# On a GPU, XLA computes products of one row with a matrix-vector path, which launches more kernels.
# On an H200, plain rounds take 1.09 ms at one row and 0.94 at two (SmolLM2-135M), or 5.05 and 4.31
# (Llama-3.1-8B shape). With drafts, only the head has products of one row; padding then changes a
# round with five drafts from 1.04 to 0.98 ms (135M), and one with seven from 5.78 to 5.91 ms (8B).
PADDED_ROWS = 2
# chosen between these models; below it, launches limit a round (an H200 reads 1 GB in 0.25 ms)
LAUNCH_BOUND_BYTES = 1e9
# minimum width in tokens; a smaller prefill takes as long, because it reads all weights
LEAST_PREFILL, LEAST_PREFILL_CPU = 128, 32
# maximum prompt tokens per step on a CPU
DEFAULT_CHUNK_CPU = 512

# Prompt tokens per step if nothing decodes: 42,500 tokens/s (Llama-3.1-8B shape) instead of 39,400
# in chunks of 2,048.
IDLE_CHUNK = 8192
# the same for models with windows and few slots
LEAST_IDLE_CHUNK = 2048


def prefill_tokens(
    chunk: int | None, context: int, slots: int, window: int, *, on_cpu: bool
) -> tuple[int, int]:
    """Maximum prompt tokens in a step that also runs a round, and in one that does not.

    ``chunk`` is the maximum that the user set. ``window`` is the largest window of layers with
    their own pool, or 0: a prefill needs pages of that pool for its tokens, at most a quarter.
    """
    if on_cpu:
        most = min(chunk or DEFAULT_CHUNK_CPU, context)
        return most, most
    idle = min(IDLE_CHUNK, max(LEAST_IDLE_CHUNK, slots * window // 4)) if window else IDLE_CHUNK
    most = min(max(chunk or 0, idle), context * slots)
    return min(chunk or IDLE_CHUNK, most), most


def smallest_bucket(*, on_gpu: bool, drafts: bool, weight_bytes: int) -> int:
    """Number of rows to which a batch of one is padded."""
    pays = on_gpu and (not drafts or weight_bytes < LAUNCH_BOUND_BYTES)
    return PADDED_ROWS if pays else 1


def batch_buckets(
    sizes: Sequence[int] | None, max_running_requests: int, smallest: int = 1
) -> tuple[int, ...]:
    """Return the batch sizes for which rounds are compiled, in ascending order.

    Without ``sizes``: the powers of two from ``smallest`` up, and ``max_running_requests``.
    """
    if sizes is None:
        doubled = (smallest << i for i in count())
        fewer = takewhile(lambda size: size < max_running_requests, doubled)
        return (*fewer, max(smallest, max_running_requests))
    ordered = tuple(sorted(set(sizes)))
    if not ordered or ordered[0] < 1 or ordered[-1] < max_running_requests:
        raise ValueError(
            f"batch_buckets={tuple(sizes)} must be at least 1, and the largest at least "
            f"max_running_requests={max_running_requests}"
        )
    return ordered


def prefill_buckets(largest: int, *, on_cpu: bool = False) -> tuple[int, ...]:
    """Widths of prefills: ``largest``, half of it, and so on, as long as this saves time.

    A prompt then needs few calls and little padding. On a CPU, where compiling takes longer than
    computing, each width is a quarter of the next.
    """
    least, divisor = (LEAST_PREFILL_CPU, 4) if on_cpu else (LEAST_PREFILL, 2)
    widths = [largest]
    while (width := widths[-1] // divisor) >= least:
        widths.append(width)
    return tuple(reversed(widths))


def pick_bucket(size: int, buckets: Sequence[int]) -> int:
    """Pick the smallest of ascending buckets that holds ``size``."""
    at = bisect_left(buckets, size)
    if at == len(buckets):
        raise ValueError(f"size={size} exceeds the largest bucket of {(*buckets,)}")
    return buckets[at]
