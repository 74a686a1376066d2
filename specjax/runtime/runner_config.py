"""Static sizes of a runner, and how its functions are compiled."""

from dataclasses import dataclass

from specjax.compiling.pool import CompilerOptions
from specjax.kv.budget import Reach
from specjax.models.layers import MAX_SPLIT_ROWS
from specjax.sampling.accept_draws import COUPLED, Acceptance
from specjax.speculative.algorithm import SpeculativeAlgorithm, StateSizes
from specjax.types import DraftShape


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """Static sizes of a runner; ``num_slots`` counts the padding slot 0.

    ``shapes`` are the tiers, by ascending steps; everything is sized for the largest.
    ``on_gpu`` compiles what pays on a GPU only: rounds of greedy batches apart from the others.
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
    attention: str
    rounds_per_dispatch: int = 1
    simulate_accept_length: float | None = None
    acceptance: Acceptance = COUPLED  # of drafts above temperature 0
    max_top_logprobs: int = 20
    processed_logprobs: bool = False  # those of the distribution that is drawn from
    mixed_prefill_tokens: int = 512  # of a step with a round
    on_gpu: bool = False

    def __post_init__(self) -> None:
        if list(self.tiers) != sorted(set(self.tiers)) or not self.tiers or self.tiers[0] < 0:
            raise ValueError(f"shapes={self.shapes} must ascend in steps, from 0 on")

    @property
    def tiers(self) -> tuple[int, ...]:
        """Step counts that rounds are compiled for, ascending."""
        return tuple(shape.steps for shape in self.shapes)

    @property
    def largest(self) -> DraftShape:
        return self.shapes[-1]

    @property
    def reach(self) -> Reach:
        """What pages are planned by."""
        return Reach.of(self.shapes, self.rounds_per_dispatch)

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

# The search for the fastest Triton kernel of a product takes 25 s of CPU time a number of rows
# (Llama-3.1-8B shape). It pays at few rows: a round takes 4.26 ms instead of cuBLAS's 4.65 at one
# row, 5.65 instead of 5.91 at 32, but 7.34 instead of 7.11 at 128. Prefill is as fast without.
WITHOUT_TRITON: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
LEAST_ROWS_WITHOUT_TRITON = 128
# XLA's options for prefill on a GPU: no CUDA graphs. It runs seldom and with other buffers each
# time, for which its graph would be rebuilt. Figures: docs/performance.md, "Changes".
PREFILL_OPTIONS: CompilerOptions = {"xla_gpu_graph_min_graph_size": "1000000", **WITHOUT_TRITON}


def compiler_options(rows: int) -> CompilerOptions:
    """XLA's options for a round that verifies ``rows`` rows on a GPU.

    XLA splits small products along their inner axis before it looks for the fastest kernel, so
    that from 64 rows on cuBLAS's better ones are no candidates: 4.72 ms of products against 5.02
    at 64 rows of the Llama-3.1-8B shape (H200, jax 0.11.2).
    """
    if rows <= MAX_SPLIT_ROWS:
        return None
    others = WITHOUT_TRITON if rows >= LEAST_ROWS_WITHOUT_TRITON else {}
    return {"xla_gpu_experimental_force_split_k": "1", **others}
