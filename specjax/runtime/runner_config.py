"""Static sizes of a runner, and the device memory that it needs."""

import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import NamedTuple

import jax

from specjax.config import TransformerConfig
from specjax.kernels.backend import resolve
from specjax.kv.budget import KVWrites
from specjax.models.flat import Networks
from specjax.sampling.accept_draws import COUPLED, Acceptance
from specjax.speculative.algorithm import SpeculativeAlgorithm, StateSizes, kv_pool
from specjax.types import DraftShape


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """Static sizes of a runner; ``num_slots`` counts the padding slot 0.

    ``shapes`` are the tiers, ascending; everything is sized for the largest.
    Pallas kernels go with what pays on a GPU only: rounds of greedy batches apart from the others.
    A conditional there is a read-back by the host in the middle of a round: without the one around
    the sampler a plain round of 32 rows takes 5.44 ms instead of 6.23 (Llama-3.1-8B shape, H200).
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
    acceptance: Acceptance = COUPLED  # of drafts above temperature 0
    max_top_logprobs: int = 20
    processed_logprobs: bool = False  # those of the distribution that is drawn from
    mixed_prefill_tokens: int = 512  # of a step with a round
    implementation: str | None = None  # of all kernels, as backend.resolve has it

    def __post_init__(self) -> None:
        shapes = self.shapes
        if list(shapes) != sorted(set(shapes)) or not shapes or shapes[0].steps < 0:
            raise ValueError(f"{shapes=} must ascend, from 0 steps on")

    @property
    def on_gpu(self) -> bool:
        """Whether functions are compiled as for a GPU."""
        return resolve(self.implementation) == "pallas"

    @property
    def largest(self) -> DraftShape:
        return self.shapes[-1]

    @property
    def kv_writes(self) -> KVWrites:
        """Maximum KV write of a dispatch, which pages are planned by."""
        return KVWrites.of(self.shapes, self.rounds_per_dispatch)

    def max_chunks(self, width: int) -> int:
        """Chunks, each of another request, that a prefill of ``width`` tokens takes."""
        return max(1, min(self.num_slots - 1, width // MIN_CHUNK))

    def prefill_width(self, num_tokens: int, *, with_logprobs: bool = False) -> int:
        """The bucket for tokens that wait: one that they nearly fill, or the largest that is full.

        What does not fit a full one waits for the next call. At most a quarter is padding, and no
        more than what a further call costs.
        """
        buckets = self.logprob_buckets if with_logprobs else self.prefill_buckets
        fitting = next((width for width in buckets if width >= num_tokens), buckets[-1])
        full = [width for width in buckets if width <= num_tokens]
        padding = fitting - num_tokens
        return full[-1] if full and padding > min(fitting // 4, MOST_PADDING) else fitting

    @property
    def logprob_buckets(self) -> tuple[int, ...]:
        """Widths of prefills that report log-probabilities, with the logits of all rows."""
        small = tuple(width for width in self.prefill_buckets if width <= MAX_LOGPROB_ROWS)
        return small or self.prefill_buckets[:1]

    @property
    def context(self) -> int:
        """Tokens that a request's pages hold at most."""
        return self.pages_per_request * self.page_size

    @property
    def max_total_tokens(self) -> int:
        """Tokens that all pages hold, except the padding page."""
        return (self.num_pages - 1) * self.page_size

    @property
    def sizes(self) -> StateSizes:
        """What the algorithm's state is sized by."""
        num_kv = self.num_pages * self.page_size
        return StateSizes(self.num_slots, num_kv, self.context, self.largest)


# padded tokens that take as long as another call: its weights alone are 150 (Llama-3.1-8B shape)
MOST_PADDING = 256
# tokens of a chunk, on average, where a prefill is full of chunks
MIN_CHUNK = 8
# logits of a vocabulary of 128,256 in float32: 0.26 GB
MAX_LOGPROB_ROWS = 512

# share of a device's memory for weights and KV together; the rest serves activations, on a CPU also
# everything else of the machine
DEFAULT_MEM_FRACTION, DEFAULT_MEM_FRACTION_CPU = 0.85, 0.5

# Arrays of logits in float32 that live at once. In a round those of the target, and as they are
# after penalties and temperature, which the kernels of sampling read; without these kernels noise
# and what filters keep too. What is drafted in one pass has its logits, their noise and their
# probabilities. A prefill has few rows of logits, but its output head adds up partial sums.
ROUND_LOGITS, ROUND_LOGITS_CPU, DRAFT_LOGITS, PREFILL_LOGITS = 2, 6, 3, 6
# where drafts are judged by probabilities: both models', the residual and its logarithm
ACCEPT_LOGITS = 4
# bytes per token of a context that penalties count: its id twice, and indices of two scatters
HISTORY_BYTES = 32
# what products of few rows add up
PARTIAL_SUMS = 2**27


class MemoryNeeds(NamedTuple):
    """Device memory of a runner in bytes."""

    weight_bytes: int  # with state whose size does not depend on the KV pool
    token_bytes: int  # state per token of the KV pool
    temporary_bytes: int  # upper bound while a function runs and KV arrives from a prefill worker


def memory_needs(networks: Networks, config: RunnerConfig, transit_tokens: int = 0) -> MemoryNeeds:
    """What a runner needs if KV of ``transit_tokens`` arrives while functions run.

    ``config.num_pages`` is not read.
    """
    algorithm, model = config.algorithm, networks.target_config

    def state_bytes(num_kv: int) -> int:
        sizes = config.sizes._replace(num_kv=num_kv)
        state = algorithm.abstract_state(networks, sizes), kv_pool(model, num_kv)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))

    token_bytes = state_bytes(2) - state_bytes(1)
    num_features = len(algorithm.feature_layers(networks))
    # the draft may be the wider one
    temporary = max(temporary_bytes(one, config, num_features) for one in networks.configs)
    fixed = networks.weight_bytes + state_bytes(1) - token_bytes
    return MemoryNeeds(fixed, token_bytes, temporary + transit_tokens * token_bytes)


def device_memory(device: jax.Device) -> int:
    """Bytes that the process can allocate on a device (physical memory for a CPU)."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def plan_pages(
    needs: MemoryNeeds,
    config: RunnerConfig,
    *,
    memory: int,
    max_total_tokens: int | None,
    mem_fraction_static: float | None,
) -> int:
    """Decide the number of pages, with the padding page; ``config.num_pages`` is not read.

    ``max_total_tokens`` sets it directly (rounded up to pages). Otherwise weights and KV together
    take ``mem_fraction_static`` of the device's ``memory``, as in SGLang, but never more than all
    requests can use. Temporary memory of functions stays free.
    """
    default = DEFAULT_MEM_FRACTION if config.on_gpu else DEFAULT_MEM_FRACTION_CPU
    fraction = mem_fraction_static or default
    weight_bytes, token_bytes, temporary = needs
    page_bytes = token_bytes * config.page_size
    available = memory - temporary - weight_bytes
    if available < 2 * page_bytes:
        raise ValueError(
            f"no KV page fits: {memory / 1e9:.2f} GB hold {weight_bytes / 1e9:.2f} GB of weights "
            f"and {temporary / 1e9:.2f} GB that functions take; lower max_running_requests, "
            "context_length, speculative_num_steps, speculative_num_draft_tokens or "
            "chunked_prefill_size"
        )
    if max_total_tokens is not None:
        num_pages = 1 - (-max_total_tokens // config.page_size)
        if num_pages * page_bytes > available:
            raise ValueError(
                f"max_total_tokens={max_total_tokens} needs {num_pages * page_bytes / 1e9:.2f} GB "
                f"of KV, but {available / 1e9:.2f} GB are left beside weights and the "
                f"{temporary / 1e9:.2f} GB that functions take; lower max_total_tokens"
            )
    else:
        budget = min(int(memory * fraction) - weight_bytes, available)
        usable = (config.num_slots - 1) * config.pages_per_request
        num_pages = min(budget // page_bytes, usable + 1)
        if num_pages < 2:
            raise ValueError(
                f"no KV page fits: mem_fraction_static={fraction} of {memory / 1e9:.2f} GB leaves "
                f"{budget / 1e9:.2f} GB beside {weight_bytes / 1e9:.2f} GB of weights; raise "
                "mem_fraction_static"
            )
    return num_pages


def temporary_bytes(model: TransformerConfig, config: RunnerConfig, num_features: int) -> int:
    """The most that a round or a prefill takes beside weights and state, estimated from above.

    ``num_features`` of the target's layers are read. XLA takes 0.93 to 1.25 GB of 1.18 to 1.31
    planned (Llama-3.1-8B shape, three drafts, 8 to 256 slots). On a CPU attention comes on top.
    """
    prefills = (
        _prefill_bytes(model, config, width, num_features) for width in config.prefill_buckets
    )
    rounds = (
        _round_bytes(model, config, shape, batch, num_features)
        for shape in config.shapes
        for batch in config.batch_buckets
    )
    return PARTIAL_SUMS + max((*prefills, *rounds))


def _activations(model: TransformerConfig, rows: int, num_features: int) -> int:
    """Of one layer: gate and up, their product, the residual stream, and what is kept of layers."""
    width = 3 * model.intermediate_size + (2 + num_features) * model.hidden_size
    return rows * width * model.dtypes.activations.itemsize


def _round_bytes(
    model: TransformerConfig, config: RunnerConfig, shape: DraftShape, batch: int, num_features: int
) -> int:
    in_one_pass = config.algorithm.supports_target_verify_for_draft()
    rows, width = batch * shape.nodes, max(shape.nodes, shape.steps + 1)
    drafted = batch * (width if in_one_pass else shape.topk)
    copies = ROUND_LOGITS if config.on_gpu else ROUND_LOGITS_CPU
    copies += 0 if config.acceptance.is_coupled else ACCEPT_LOGITS
    logits = max(copies * rows, DRAFT_LOGITS * drafted) * model.vocab_size * 4
    history = HISTORY_BYTES * batch * config.context
    drafting = config.algorithm.draft_bytes(batch, config.context, shape)
    return logits + _activations(model, rows, num_features) + max(history, drafting)


def _prefill_bytes(
    model: TransformerConfig, config: RunnerConfig, width: int, num_features: int
) -> int:
    chunks = config.max_chunks(width)
    logits = chunks * (PREFILL_LOGITS * model.vocab_size * 4 + HISTORY_BYTES * config.context)
    kept = width * (1 + num_features) * model.hidden_size * model.dtypes.activations.itemsize
    if width in config.logprob_buckets:  # every row has logits there
        logits += (1 if config.on_gpu else 2) * width * model.vocab_size * 4
    return max(_activations(model, width, num_features), kept + logits)


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


def batch_buckets(
    given: Sequence[int] | None, max_running_requests: int, smallest: int = 1
) -> tuple[int, ...]:
    """Batch sizes that rounds are compiled for: those given, sorted, or for ``None`` a default.

    That is powers of two from ``smallest`` up to ``max_running_requests``, and that number itself.
    """
    if given is None:
        doubled = (smallest << i for i in count())
        fewer = takewhile(lambda size: size < max_running_requests, doubled)
        return (*fewer, max(smallest, max_running_requests))
    ordered = tuple(sorted(set(given)))
    if not ordered or ordered[0] < 1 or ordered[-1] < max_running_requests:
        raise ValueError(
            f"batch_buckets={tuple(given)} must be at least 1 and their largest at least "
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
