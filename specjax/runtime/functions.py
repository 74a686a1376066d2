"""The functions that a runner compiles: rounds of each tier and batch bucket, and prefill."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from specjax.compiling.pool import CompilerOptions
from specjax.kv.pages import PageView
from specjax.models.flat import Weights
from specjax.models.networks import Networks
from specjax.runtime.runner_config import PREFILL_OPTIONS, RunnerConfig, compiler_options
from specjax.sampling.packed import unpack_sampling
from specjax.sampling.table import neutral_sampling
from specjax.speculative.future_map import FutureMap, record_cached
from specjax.speculative.prefill import prefill_chunk
from specjax.speculative.round import (
    RoundConfig,
    draft_stage,
    extend_stage,
    spec_rounds,
    verify_stage,
)
from specjax.types import KVPools

STAGES = {"draft": draft_stage, "verify": verify_stage, "extend": extend_stage}
Key = tuple[str, ...] | tuple[str, int] | tuple[str, int, int]


@dataclass(frozen=True)
class Job:
    """A jitted function with abstract arguments, to be compiled under ``key``."""

    key: Key
    function: Any
    arguments: tuple[Any, ...]
    options: CompilerOptions = None


@dataclass(frozen=True)
class TierRounds:
    """The compiled rounds of a tier, each by batch bucket.

    Attributes:
        any: for all requests.
        greedy: for batches of which no row asks for more than the best token; ``None`` where it
            would be no faster.
        drafting: with a head and step count 0, where ``any`` and ``greedy`` leave nothing to draft
            from, the one that does; else ``None``.
    """

    any: dict[int, Any]
    greedy: dict[int, Any] | None
    drafting: dict[int, Any] | None


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    """Abstract int32."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


class RoundFunctions:
    """Functions over flat weights, for the sizes of one runner.

    Args:
        networks: structures of target and draft.
        config: sizes.
        max_top_logprobs: most likely tokens that a request may ask for at each position.
        common: abstract weights, pools, rows by slot, pages and packed sampling parameters: the
            first arguments of all.
    """

    def __init__(
        self,
        networks: Networks,
        config: RunnerConfig,
        max_top_logprobs: int,
        common: tuple[Any, ...],
    ) -> None:
        self._networks = networks
        self._config = config
        self._max_top_logprobs = max_top_logprobs
        self._common = common

    def bind(self, function: Any, num_steps: int, **options: bool) -> Any:
        """Jit a function of the round over flat weights, with the pools and the rows donated."""
        nets = self._networks
        config = RoundConfig(
            num_steps=num_steps,
            feature_layers=nets.feature_layers,
            num_rounds=self._config.rounds_per_dispatch,
            max_top_logprobs=self._max_top_logprobs,
            simulate_accept_length=self._config.simulate_accept_length,
            **options,
        )

        def flat(
            target: Weights,
            head: Weights,
            pools: KVPools,
            future: FutureMap,
            view: PageView,
            packed: jax.Array,
            *rest: Any,
        ) -> Any:
            model = nets.target.rebuild(target)
            draft = None if nets.head is None else nets.head.rebuild(head)
            sampling = unpack_sampling(packed, neutral_sampling(1, 1))
            return function(model, draft, pools, future, view, sampling, *rest, config=config)

        flat.__name__ = f"specjax_{function.__name__}"
        return jax.jit(flat, donate_argnums=(2, 3))

    def jobs(self, *, stages: bool) -> Iterator[Job]:
        """Everything that serving dispatches; with ``stages`` those on their own as well."""
        for steps in self._config.tiers:
            yield from self._rounds(steps)
            if stages:
                yield from self._stages(steps)
        prefill = self.bind(prefill_chunk, self._config.num_steps)
        options = PREFILL_OPTIONS if self._config.on_gpu else None
        for width in self._config.prefill_buckets:
            arguments = (*self._common, ints(width + 1), ints(5))
            yield Job(("prefill", width), prefill, arguments, options)
        record = jax.jit(record_cached, donate_argnums=0)
        future = self._common[3]
        yield Job(("record_cached",), record, (future, ints(), ints(self._config.context)))

    def _rounds(self, steps: int) -> Iterator[Job]:
        on_gpu = self._config.on_gpu
        is_off = steps == 0 and self._networks.head is not None
        rounds = self.bind(spec_rounds, steps, drafts_next=not is_off)
        greedy = self.bind(spec_rounds, steps, drafts_next=not is_off, greedy=True)
        ready = self.bind(spec_rounds, steps)
        for batch in self._config.batch_buckets:
            arguments = (*self._common, ints(batch))
            options = compiler_options(batch * (steps + 1)) if on_gpu else None
            if on_gpu:
                yield Job(("greedy_round", steps, batch), greedy, arguments, options)
            yield Job(("round", steps, batch), rounds, arguments, options)
            if is_off:
                # seldom run, so one form of it has to do
                yield Job(("drafting_round", steps, batch), ready, arguments, options)

    def _stages(self, steps: int) -> Iterator[Job]:
        for batch in self._config.batch_buckets:
            arguments: tuple[Any, ...] = (*self._common, ints(batch))
            for name, function in STAGES.items():
                stage = self.bind(function, steps)
                yield Job((name, steps, batch), stage, arguments)
                passed = jax.eval_shape(stage, *arguments)[2]
                arguments = (*self._common, ints(batch), passed)
