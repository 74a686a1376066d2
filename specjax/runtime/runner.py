"""What lives on the device: weights, KV pools, rows between rounds, and the compiled functions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.config import DraftConfig, ModelConfig, TransformerConfig
from specjax.models.decoder import CausalLM
from specjax.models.eagle import build_head
from specjax.models.flat import FlatModel, Weights
from specjax.runtime.buckets import pick_bucket
from specjax.runtime.compile_pool import CompilePool
from specjax.runtime.paging import PageView
from specjax.sampling_params import SamplingParams
from specjax.speculative.future_map import FutureMap
from specjax.speculative.prefill import prefill_chunk
from specjax.speculative.round import (
    RoundConfig,
    draft_stage,
    extend_stage,
    spec_rounds,
    verify_stage,
)
from specjax.types import KVPools, SamplingTable

# end tokens of a request that the device knows; models have one to four
MAX_END_TOKENS = 8
UNLIMITED = 2**31 - 1
GREEDY = SamplingParams(temperature=0.0)
STAGES = {"draft": draft_stage, "verify": verify_stage, "extend": extend_stage}


@dataclass(frozen=True)
class Networks:
    """Structures of target and draft, without weights."""

    target: FlatModel[CausalLM]
    head: FlatModel[Any] | None
    target_config: ModelConfig
    head_config: DraftConfig | None

    @classmethod
    def of(
        cls, target: ModelConfig, head: DraftConfig | None, kernels: str = "xla"
    ) -> "Networks":
        """Structures of two configurations; ``kernels`` as :class:`RMSNorm` has it."""
        return cls(
            FlatModel.of(partial(CausalLM, target, kernels=kernels)),
            None if head is None else FlatModel.of(partial(build_head, head, kernels=kernels)),
            target,
            head,
        )

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers that the head reads."""
        return () if self.head_config is None else self.head_config.feature_layers


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """Static sizes of a runner; ``num_slots`` counts the padding slot 0."""

    num_steps: int
    page_size: int
    num_pages: int
    pages_per_request: int
    num_slots: int
    batch_buckets: tuple[int, ...]
    prefill_buckets: tuple[int, ...]
    attention: str
    rounds_per_dispatch: int = 1
    simulate_accept_length: float | None = None


@dataclass(frozen=True)
class Dispatched:
    """What a dispatch leaves on the device for the host, on its way there."""

    tokens: jax.Array

    def __post_init__(self) -> None:
        self.tokens.copy_to_host_async()

    def read(self) -> np.ndarray:
        """Wait for the tokens."""
        return np.asarray(self.tokens)


@dataclass
class HostTables:
    """Host copies of the per-slot tables; a change is uploaded before the next dispatch."""

    page_table: np.ndarray  # i32 [R, P]
    temperatures: np.ndarray  # f32 [R]
    top_ks: np.ndarray  # i32 [R]
    top_ps: np.ndarray  # f32 [R]
    seeds: np.ndarray  # u32 [R, 2]
    end_token_ids: np.ndarray  # i32 [R, E]
    pages_dirty: bool = True
    sampling_dirty: bool = True

    @property
    def sampling(self) -> tuple[np.ndarray, ...]:
        """The arrays of a :class:`SamplingTable`, in its order."""
        return self.temperatures, self.top_ks, self.top_ps, self.seeds, self.end_token_ids

    @classmethod
    def empty(cls, num_slots: int, pages_per_request: int, vocab_size: int) -> "HostTables":
        """Tables of greedy rows without pages."""
        return cls(
            page_table=np.zeros((num_slots, pages_per_request), np.int32),
            temperatures=np.zeros(num_slots, np.float32),
            top_ks=np.full(num_slots, vocab_size, np.int32),
            top_ps=np.ones(num_slots, np.float32),
            seeds=np.zeros((num_slots, 2), np.uint32),
            end_token_ids=np.full((num_slots, MAX_END_TOKENS), -1, np.int32),
        )


def _pool_shape(config: TransformerConfig, slots: int) -> jax.ShapeDtypeStruct:
    shape = (config.num_layers, slots, 2, config.num_kv_heads, config.head_dim)
    return jax.ShapeDtypeStruct(shape, config.jnp_dtype)


class ModelRunner:
    """Owns the device state and dispatches rounds and prefill chunks.

    Order of use: construct, :meth:`compile`, :meth:`load`, then dispatch. Nothing here waits for
    the device: dispatches return device arrays.
    """

    def __init__(self, networks: Networks, config: RunnerConfig) -> None:
        self.networks = networks
        self.config = config
        self.compiled = CompilePool()
        vocab_size = networks.target_config.vocab_size
        self.tables = HostTables.empty(config.num_slots, config.pages_per_request, vocab_size)
        self._weights: tuple[Weights, Weights] | None = None
        self._view: PageView | None = None
        self._sampling: SamplingTable | None = None
        self._slots_on_device: dict[tuple[int, ...], jax.Array] = {}

    @property
    def abstract_state(self) -> tuple[KVPools, FutureMap]:
        """Shapes of the KV pools and of the rows between rounds."""
        nets, slots = self.networks, self.config.num_pages * self.config.page_size
        head = nets.head_config
        pools = KVPools(
            target=_pool_shape(nets.target_config, slots),  # type: ignore[arg-type]
            draft=None if head is None else _pool_shape(head, slots),  # type: ignore[arg-type]
        )
        width, dtype = (
            (1, nets.target_config.jnp_dtype)
            if head is None
            else (head.hidden_size, head.jnp_dtype)
        )
        return pools, FutureMap.abstract(self.config.num_slots, 1, width, dtype)

    def _bind(self, function: Any) -> Any:
        """Jit a function of the round over flat weights, with the pools and the rows donated."""
        nets = self.networks
        config = RoundConfig(
            num_steps=self.config.num_steps,
            feature_layers=nets.feature_layers,
            num_rounds=self.config.rounds_per_dispatch,
            simulate_accept_length=self.config.simulate_accept_length,
        )

        def flat(
            target: Weights, head: Weights, pools: KVPools, future: FutureMap, *rest: Any
        ) -> Any:
            draft = None if nets.head is None else nets.head.rebuild(head)
            return function(nets.target.rebuild(target), draft, pools, future, *rest, config=config)

        flat.__name__ = f"specjax_{function.__name__}"
        return jax.jit(flat, donate_argnums=(2, 3))

    def compile(self, *, show_progress: bool, stages: bool = False) -> None:
        """Compile the round of every batch bucket and the prefill of every chunk width.

        With ``stages`` also draft, verify and extend on their own, for :meth:`staged_round`.
        """
        config, nets = self.config, self.networks

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        view = jax.eval_shape(lambda: self._view_of(self.tables))
        sampling = jax.eval_shape(lambda: self._sampling_of(self.tables))
        head = () if nets.head is None else nets.head.abstract
        common = (nets.target.abstract, head, *self.abstract_state, view, sampling)
        steps = config.num_steps
        rounds = self._bind(spec_rounds)
        for batch in config.batch_buckets:
            arguments: tuple[Any, ...] = (*common, ints(batch))
            self.compiled.add(("round", steps, batch), rounds, arguments)
            for name, function in STAGES.items() if stages else ():
                stage = self._bind(function)
                self.compiled.add((name, steps, batch), stage, arguments)
                arguments = (*common, ints(batch), jax.eval_shape(stage, *arguments)[2])
        prefill = self._bind(prefill_chunk)
        for width in config.prefill_buckets:
            arguments = (*common, ints(width + 1), ints(5))
            self.compiled.add(("prefill", width), prefill, arguments)
        self.compiled.compile(show_progress=show_progress)

    def load(self, target: Weights, head: Weights) -> None:
        """Take weights (flat, in the order of the networks) and allocate the pools.

        Pools are zeroed, since uninitialised memory could hold NaN, and a masked NaN is still NaN.
        """
        self._weights = (target, head)
        self.pools, self.future = jax.jit(
            lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.abstract_state)
        )()

    def unload(self) -> None:
        """Let weights and pools go."""
        self._weights = None
        self._slots_on_device.clear()
        del self.pools, self.future

    @property
    def weights(self) -> tuple[Weights, Weights]:
        """Flat weights of target and draft on the device."""
        if self._weights is None:
            raise RuntimeError("the runner has no weights yet; call load()")
        return self._weights

    def set_slot(
        self,
        slot: int,
        params: SamplingParams,
        *,
        seed: int,
        end_token_ids: Iterable[int] = (),
    ) -> None:
        """Give a request slot its sampling parameters, noise seed and end tokens."""
        tables, vocab_size = self.tables, self.networks.target_config.vocab_size
        tables.temperatures[slot] = 0.0 if params.is_greedy else params.temperature
        tables.top_ks[slot] = vocab_size if params.top_k == -1 else min(params.top_k, vocab_size)
        tables.top_ps[slot] = params.top_p
        tables.seeds[slot] = (seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF)
        # a checkpoint may name end tokens outside its vocabulary; the model never produces them
        ends = sorted(i for i in end_token_ids if 0 <= i < vocab_size)[:MAX_END_TOKENS]
        tables.end_token_ids[slot] = -1
        tables.end_token_ids[slot, : len(ends)] = ends
        tables.sampling_dirty = True

    def set_pages(self, slot: int, pages: Sequence[int], first: int = 0) -> None:
        """Write a slot's page table from entry ``first`` on; the entries behind become 0."""
        row = self.tables.page_table[slot]
        row[first : first + len(pages)] = pages
        row[first + len(pages) :] = 0
        self.tables.pages_dirty = True

    def clear_slot(self, slot: int) -> None:
        """Detach a slot from its pages; what is still in flight ran before any new owner."""
        self.set_slot(slot, GREEDY, seed=0)
        self.set_pages(slot, ())

    def _view_of(self, tables: HostTables) -> PageView:
        page_table = jax.device_put(tables.page_table.copy())
        return PageView(page_table, self.config.page_size, self.config.attention)

    def _sampling_of(self, tables: HostTables) -> SamplingTable:
        return SamplingTable(*jax.device_put([array.copy() for array in tables.sampling]))

    def _inputs(self) -> tuple[Any, ...]:
        if self.tables.pages_dirty:
            self._view = self._view_of(self.tables)
            self.tables.pages_dirty = False
        if self.tables.sampling_dirty:
            self._sampling = self._sampling_of(self.tables)
            self.tables.sampling_dirty = False
        return (*self.weights, self.pools, self.future, self._view, self._sampling)

    def prefill(
        self,
        slot: int,
        tokens: Sequence[int],
        start: int,
        next_token: int | None,
        max_new_tokens: int = UNLIMITED,
    ) -> Dispatched:
        """Dispatch one prompt chunk of a slot.

        Args:
            slot: request slot.
            tokens: the chunk, at most the largest prefill bucket.
            start: tokens of the prompt already in the pool.
            next_token: the prompt token behind the chunk, ``None`` where the prompt ends.
            max_new_tokens: tokens after which the row stops advancing.

        Returns:
            i32 ``[1]``: the first sampled token, where the prompt ends.
        """
        width = pick_bucket(len(tokens), self.config.prefill_buckets)
        padded = np.zeros(width + 1, np.int32)
        padded[: len(tokens)] = tokens
        padded[len(tokens)] = 0 if next_token is None else next_token
        is_final = next_token is None
        chunk = np.array([slot, start, len(tokens), is_final, max_new_tokens], np.int32)
        self.pools, self.future, token = self.compiled["prefill", width](
            *self._inputs(), *jax.device_put((padded, chunk))
        )
        return Dispatched(token)

    def round(self, slots: Sequence[int]) -> Dispatched:
        """Dispatch the rounds of one call for the given request slots.

        Returns:
            i32 ``[rounds_per_dispatch, bucket, A + 2]``, rows in the order of
            ``slots``, then padding.
        """
        batch = pick_bucket(len(slots), self.config.batch_buckets)
        self.pools, self.future, packed = self.compiled["round", self.config.num_steps, batch](
            *self._inputs(), self._padded_slots(slots, batch)
        )
        return Dispatched(packed)

    def staged_round(self, slots: Sequence[int]) -> Dispatched:
        """One round as three dispatches; equal to :meth:`round`, for tests and profiles.

        Returns:
            i32 ``[1, bucket, A + 2]``.
        """
        batch = pick_bucket(len(slots), self.config.batch_buckets)
        on_device = self._padded_slots(slots, batch)
        passed: tuple[Any, ...] = ()
        for name in STAGES:
            self.pools, self.future, out = self.compiled[name, self.config.num_steps, batch](
                *self._inputs(), on_device, *passed
            )
            passed = (out,)
        return Dispatched(out[None])

    def _padded_slots(self, slots: Sequence[int], batch: int) -> jax.Array:
        padded = (*slots, *(0,) * (batch - len(slots)))
        on_device = self._slots_on_device.get(padded)
        if on_device is None:
            # a batch keeps its slots for many rounds; the newest composition is all that matters
            on_device = jax.device_put(np.array(padded, np.int32))
            self._slots_on_device = {padded: on_device}
        return on_device
