"""Static sizes of a runner, and how its functions are compiled."""

from dataclasses import dataclass

from specjax.compiling.pool import CompilerOptions
from specjax.kv.budget import Reach
from specjax.models.layers import MAX_SPLIT_ROWS
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
    max_top_logprobs: int = 20
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

    @property
    def context(self) -> int:
        """Tokens that a request's pages hold at most."""
        return self.pages_per_request * self.page_size

    @property
    def sizes(self) -> StateSizes:
        """What the algorithm's state is sized by."""
        num_kv = self.num_pages * self.page_size
        return StateSizes(self.num_slots, num_kv, self.context, self.largest)


# XLA's options for prefill on a GPU: no CUDA graphs. It runs seldom and with other buffers each
# time, for which its graph would be rebuilt. Figures: docs/performance.md, "Changes".
PREFILL_OPTIONS: CompilerOptions = {"xla_gpu_graph_min_graph_size": "1000000"}


def compiler_options(rows: int) -> CompilerOptions:
    """XLA's options for a round that verifies ``rows`` rows on a GPU.

    XLA splits small products along their inner axis before it looks for the fastest kernel, so
    that from 64 rows on cuBLAS's better ones are no candidates: 4.72 ms of products against 5.02
    at 64 rows of the Llama-3.1-8B shape (H200, jax 0.11.2).
    """
    return {"xla_gpu_experimental_force_split_k": "1"} if rows > MAX_SPLIT_ROWS else None
