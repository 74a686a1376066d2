"""The functions that a runner compiles: rounds for each tier and batch bucket, and prefill."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from specjax.compiling.pool import CompilerOptions
from specjax.config import Quantization
from specjax.kernels.dot import MAX_SPLIT_ROWS
from specjax.models.declare import num_whole
from specjax.models.flat import Networks, Weights
from specjax.models.routes import ROUTES_PER_CALL, take_routes
from specjax.models.shards import over_mesh
from specjax.models.weights import MAX_FUSED_ROWS
from specjax.runtime.runner_config import RunnerConfig
from specjax.sampling.accept_draws import COUPLED
from specjax.sampling.draw import SamplingConfig
from specjax.sampling.logit_processor import mask_words
from specjax.speculative import round as spec_round
from specjax.speculative.future_map import DeviceState, record_cached
from specjax.speculative.prefill import HEADER, prefill_chunks
from specjax.types import DraftShape

Key = tuple[str, ...] | tuple[str, int] | tuple[str, DraftShape, int]
# key in the compile pool, jitted function, abstract arguments, XLA options
Job = tuple[Key, Any, tuple[Any, ...], CompilerOptions]

# Autotuning Triton kernels for the products takes 25 s of CPU time for each number of rows
# (Llama-3.1-8B shape). It pays off for few rows: a round takes 4.26 ms at one row (cuBLAS: 4.65)
# and 5.65 ms at 32 (5.91), but 7.34 ms at 128 (7.11). In bfloat16, prefill is as fast without it.
WITHOUT_TRITON: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
LEAST_ROWS_WITHOUT_TRITON = 128
# XLA options for prefill on a GPU: no CUDA graphs. Prefill runs rarely and with different buffers
# each time, so its graph would be rebuilt. Measurements: docs/performance.md, "Changes".
WITHOUT_GRAPHS: dict[str, str | bool] = {"xla_gpu_graph_min_graph_size": "1000000"}
# With more than the declared precision between operations, a result would depend on their fusion.
DETERMINISTIC: dict[str, str | bool] = {"xla_allow_excess_precision": False}
# XLA scales groups of a quantised matrix in the kernel of a product, if it does not split it.
SCALED_GROUPS: dict[str, str | bool] = {
    "xla_gpu_experimental_enable_subchannel_dequantisation_fusion": True,
    "xla_gpu_experimental_force_split_k": "1",
}


def compiler_options(
    rows: int, formats: Sequence[Quantization | None] = ()
) -> dict[str, str | bool]:
    """XLA options for a round that verifies ``rows`` rows on a GPU.

    ``formats`` are those of the matrices of target and draft.

    By default, XLA splits small products along their inner axis before it autotunes them. It then
    misses cuBLAS kernels that are faster from 64 rows on. Without the split, the products take
    4.72 ms instead of 5.02 at 64 rows (Llama-3.1-8B shape, H200, jax 0.11.2). Quantised matrices
    that products convert need the split: a chain of 7 takes 7.67 ms at B=8 without it, not 5.11.
    """
    if any(format is not None and format.group is not None for format in formats):
        return SCALED_GROUPS if rows <= MAX_FUSED_ROWS else SCALED_GROUPS | WITHOUT_TRITON
    if rows <= MAX_SPLIT_ROWS or converts_in_products(rows, formats):
        return {}
    options = WITHOUT_TRITON if rows >= LEAST_ROWS_WITHOUT_TRITON else {}
    return {"xla_gpu_experimental_force_split_k": "1", **options}


def converts_in_products(rows: int, formats: Sequence[Quantization | None]) -> bool:
    """Whether products of this many rows read quantised matrices in kernels of XLA's own.

    cuBLAS cannot if activations have more bits, so XLA would convert each matrix first.
    """
    return rows <= MAX_FUSED_ROWS and any(
        format is not None and not format.rounds_activations for format in formats
    )


def prefill_options(
    width: int, formats: Sequence[Quantization | None] = ()
) -> dict[str, str | bool]:
    """XLA options for a prefill of ``width`` tokens on a GPU.

    A prompt of 100 tokens takes 8 ms with quantised matrices that products convert, and 18 with
    those that are converted first (Llama-3.1-8B shape in FP8, H200).
    """
    if converts_in_products(width, formats):
        return WITHOUT_GRAPHS | compiler_options(width, formats)
    return WITHOUT_GRAPHS | WITHOUT_TRITON


@dataclass(frozen=True)
class RoundFunctions:
    """Makes functions for the sizes of one runner; they take weights as flat tuples."""

    _networks: Networks
    _config: RunnerConfig
    _max_top_logprobs: int
    _common: tuple[Any, ...]  # leading arguments of all functions: abstract weights, state, inputs

    def bind(
        self,
        function: Callable[..., Any],
        shape: DraftShape,
        *,
        greedy: bool = False,
        donated: tuple[int, ...] = (2,),
        **options: Any,
    ) -> Any:
        """Jit a round function so that it takes weights as flat tuples and donates its state."""
        nets, algorithm = self._networks, self._config.algorithm
        sampling = SamplingConfig(
            max_top_logprobs=self._max_top_logprobs,
            greedy=greedy,
            processed=self._config.processed_logprobs,
            implementation=self._config.implementation,
            acceptance=COUPLED if greedy else self._config.acceptance,
            reads_confidence=self._config.reads_confidence,
        )
        config = spec_round.RoundConfig(
            algorithm=algorithm,
            shape=shape,
            feature_layers=algorithm.feature_layers(nets),
            num_rounds=self._config.rounds_per_dispatch,
            sampling=sampling,
            simulate_accept_length=self._config.simulate_accept_length,
            simulates_acceptance=self._config.simulates_acceptance,
        )

        def flat(target: Weights, draft: Weights, state: DeviceState, *inputs: Any) -> Any:
            by_slot, *arguments = inputs
            models = nets.target.rebuild(target), nets.draft.rebuild(draft)
            resident = spec_round.Resident(*models, by_slot)
            return function(resident, state, *arguments, config=config, **options)

        flat.__name__ = f"specjax_{function.__name__}"
        place = nets.placement
        whole = flat if place.count == 1 else over_mesh(flat, place.mesh, self._common)
        return jax.jit(whole, donate_argnums=donated)

    def jobs(self) -> Iterator[Job]:
        """Jobs for all functions that serving dispatches.

        XLA autotunes each product once per process, but functions that are compiled at the same
        time would each autotune it. The order therefore begins with one round for each number of
        verified rows. Prefill follows, then the other rounds, and prefill with log-probabilities.
        """
        config = self._config
        rounds = [entry for shape in reversed(config.shapes) for entry in self._rounds(shape)]
        deepest = dict(reversed(rounds))  # the deepest tier for each number of rows
        yield from deepest.values()
        yield from (self._prefill("prefill", width) for width in config.prefill_buckets)
        record = jax.jit(partial(record_cached), donate_argnums=0)
        ints = self._networks.placement.ints
        arguments = (self._common[2].future, ints(), ints(config.context))
        yield ("record_cached",), record, arguments, None
        if num_whole(self._networks.target.caches):
            inputs = self._common[2].pools.target[-1], ints(ROUTES_PER_CALL)
            yield ("take_routes",), jax.jit(partial(take_routes)), inputs, None
        yield from (job for rows, job in rounds if job is not deepest[rows])
        yield from (self._prefill("prefill_logprobs", width) for width in config.logprob_buckets)
        if config.has_grammars:
            for shape, batch in config.rounds:
                if not shape.packed:
                    yield from self.split_round(shape, batch)

    def _prefill(self, name: str, width: int) -> Job:
        limit, logs = self._config.max_chunks(width), name == "prefill_logprobs"
        shape = self._config.largest
        prefill = self.bind(prefill_chunks, shape, limit=limit, with_logprobs=logs)
        options = self._options(prefill_options(width, self._formats))
        return (name, width), prefill, self._with(limit * HEADER + width), options

    def split_round(self, shape: DraftShape, batch: int, *, watched: bool = False) -> Iterator[Job]:
        """Jobs for the three calls of a round with a grammar, or of one that is ``watched``."""
        options = self._options(compiler_options(batch * shape.verified, self._formats))
        place, arguments = self._networks.placement, self._with(batch)
        draft = self.bind(spec_round.draft_stage, shape)
        target = self.bind(spec_round.target_stage, shape)
        yield ("draft", shape, batch), draft, arguments, options
        tree = place.abstract(jax.eval_shape(draft, *arguments)[1])
        yield ("target", shape, batch), target, (*arguments, tree), options
        passed = place.abstract(jax.eval_shape(target, *arguments, tree)[1])
        widths = mask_words(self._networks.target_config.vocab_size), 1 + shape.steps
        limits = (place.ints(batch, shape.nodes, width) for width in widths)
        # The drafts of the next round replace those of this one, because a graph whose buffers move
        # is rebuilt.
        donated = 2, len(arguments)
        arguments = (*arguments, tree, passed, *limits)
        finish = partial(self.bind, spec_round.finish_stage, shape)
        if watched:
            yield ("watched", shape, batch), finish(watched=True), arguments, options
            return
        for greedy in self._greedy_kinds:
            name = f"{'greedy_' * greedy}finish"
            yield (name, shape, batch), finish(greedy=greedy, donated=donated), arguments, options

    @property
    def _formats(self) -> list[Quantization | None]:
        return [config.quantization for config in self._networks.configs]

    @property
    def _greedy_kinds(self) -> list[bool]:
        return [True, False] if self._config.has_greedy else [False]

    def _rounds(self, shape: DraftShape) -> Iterator[tuple[int, Job]]:
        """Jobs for the rounds of a tier, each with its number of verified rows."""
        kinds = self._greedy_kinds
        functions = [self.bind(spec_round.spec_rounds, shape, greedy=kind) for kind in kinds]
        names = [f"{'greedy_' * kind}round" for kind in kinds]
        for batch in [batch for tier, batch in self._config.rounds if tier == shape]:
            rows = batch * shape.verified
            options = self._options(compiler_options(rows, self._formats))
            for name, function in zip(names, functions, strict=True):
                yield rows, ((name, shape, batch), function, self._with(batch), options)

    def _options(self, options: dict[str, str | bool]) -> CompilerOptions:
        """Options for a GPU in the mode of the runner; none on a CPU."""
        if not self._config.on_gpu:
            return None
        return {**options, **DETERMINISTIC} if self._config.deterministic else options

    def _with(self, *shape: int) -> tuple[Any, ...]:
        return (*self._common, self._networks.placement.ints(*shape))
