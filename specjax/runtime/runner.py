"""What lives on the device: weights, KV pools, rows between rounds, and the compiled functions."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.adaptive.controller import SpecRuntimeState
from specjax.compiling.pool import CompilePool
from specjax.config import TransformerConfig
from specjax.kv.pages import PageView
from specjax.models.flat import Weights
from specjax.models.networks import Networks as Networks
from specjax.runtime.buckets import pick_bucket
from specjax.runtime.dispatched import Dispatched as Dispatched
from specjax.runtime.functions import STAGES, RoundFunctions, TierRounds
from specjax.runtime.runner_config import RunnerConfig as RunnerConfig
from specjax.sampling.packed import pack_sampling
from specjax.sampling.params import SamplingParams
from specjax.sampling.table import HostTables as HostTables
from specjax.sampling.table import check_slot_limits
from specjax.speculative.future_map import FutureMap
from specjax.types import KVPools, RoundOutput

UNLIMITED = 2**31 - 1


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
        self._sampling: jax.Array | None = None
        self._slots_on_device: dict[tuple[int, ...], jax.Array] = {}
        self._state: Any = None
        # slots whose last round left nothing to draft from, and the state that it ran with
        self._resting: Any = None
        self._rested: set[int] = set()

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
        config = self.config
        return pools, FutureMap.abstract(config.num_slots, 1, width, dtype, config.context)

    @property
    def max_top_logprobs(self) -> int:
        """Most likely tokens that a request may ask for at each position."""
        return min(self.config.max_top_logprobs, self.networks.target_config.vocab_size)

    def compile(self, *, show_progress: bool, stages: bool = False) -> None:
        """Compile the rounds of every tier and batch bucket and the prefill of every chunk width.

        With ``stages`` also draft, verify and extend on their own, for :meth:`staged_round`.
        """
        nets = self.networks
        view = jax.eval_shape(lambda: self._view_of(self.tables))
        sampling = jax.eval_shape(lambda: self._sampling_of(self.tables))
        head = () if nets.head is None else nets.head.abstract
        common = (nets.target.abstract, head, *self.abstract_state, view, sampling)
        functions = RoundFunctions(nets, self.config, self.max_top_logprobs, common)
        for job in functions.jobs(stages=stages):
            self.compiled.add(job.key, job.function, job.arguments, job.options)
        self.compiled.compile(show_progress=show_progress)
        steps = self.config.num_steps
        self._state = self.build_adaptive_runtime_state(steps, steps + 1)

    def load(self, target: Weights, head: Weights) -> None:
        """Take weights (flat, in the order of the networks) and allocate the pools.

        Pools are zeroed, since uninitialised memory could hold NaN, and a masked NaN is still NaN.
        """
        self._weights = (target, head)
        self.pools, self.future = jax.jit(
            lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.abstract_state)
        )()

    def reset_rows(
        self, seq_lens: np.ndarray | None = None, remaining: np.ndarray | None = None
    ) -> None:
        """Forget what is between rounds; nothing compiles.

        Args:
            seq_lens: i32 ``[R]``, tokens that the rows have in the pool, for measurements.
            remaining: i32 ``[R]``, tokens that they may still produce.
        """
        future = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), self.abstract_state[1])
        if seq_lens is not None and remaining is not None:
            rows = replace(future.rows, seq_lens=seq_lens)
            future = replace(future, rows=rows, remaining=remaining)
        self.future = jax.device_put(future)
        self._rested.clear()

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

    def replace_weight(self, index: int, weight: jax.Array, *, draft: bool) -> None:
        """Put a weight of the same shape and dtype in the place of weight ``index``.

        Dispatches from now on read it; nothing compiles.
        """
        target, head = self.weights
        changed = list(head if draft else target)
        changed[index] = weight
        self._weights = (target, tuple(changed)) if draft else (tuple(changed), head)

    def check(
        self, params: SamplingParams, end_token_ids: Collection[int] = (), top_logprobs: int = -1
    ) -> None:
        """Refuse what :meth:`set_slot` cannot take.

        Raises:
            ValueError: with the value and the limit.
        """
        check_slot_limits(params, end_token_ids, self.networks.target_config.vocab_size)
        if not -1 <= top_logprobs <= self.max_top_logprobs:
            raise ValueError(
                f"top_logprobs_num={top_logprobs} must be from 0 to {self.max_top_logprobs}"
            )

    def set_slot(
        self,
        slot: int,
        params: SamplingParams,
        *,
        seed: int,
        end_token_ids: Collection[int] = (),
        prompt_len: int = 0,
        top_logprobs: int = -1,
        cached_ids: Sequence[int] = (),
    ) -> None:
        """Give a request slot its sampling parameters.

        Args:
            slot: request slot.
            params: sampling parameters, which passed :meth:`check`.
            seed: of the request's noise.
            end_token_ids: tokens that end it.
            prompt_len: tokens of its own prompt; what is prefilled behind them counts as produced.
            top_logprobs: most likely tokens to report at each position; -1 for no
                log-probabilities at all.
            cached_ids: the start of the text that no prefill brings, since its KV is cached.
        """
        vocab_size = self.networks.target_config.vocab_size
        self.tables.set_sampling(
            slot,
            params,
            vocab_size,
            seed=seed,
            end_token_ids=end_token_ids,
            prompt_len=prompt_len,
            top_logprobs=top_logprobs,
        )
        if params.has_penalties and len(cached_ids) > 0:
            history = np.zeros(self.config.context, np.int32)
            history[: len(cached_ids)] = cached_ids
            arguments = jax.device_put((np.int32(slot), history))
            self.future = self.compiled["record_cached",](self.future, *arguments)

    def set_pages(self, slot: int, pages: Sequence[int], first: int = 0) -> None:
        """Write a slot's page table from entry ``first`` on; the entries behind become 0."""
        self.tables.set_pages(slot, pages, first)

    def clear_slot(self, slot: int) -> None:
        """Detach a slot from its pages; what is still in flight ran before any new owner."""
        self.tables.clear(slot)
        self._rested.discard(slot)

    def _view_of(self, tables: HostTables) -> PageView:
        # the copy stays as it is while the host goes on writing
        page_table = jax.device_put(tables.page_table.copy())
        return PageView(page_table, self.config.page_size, self.config.attention)

    def _sampling_of(self, tables: HostTables) -> jax.Array:
        return jax.device_put(pack_sampling(tables.sampling))

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
        self._rested.discard(slot)
        width = pick_bucket(len(tokens), self.config.prefill_buckets)
        padded = np.zeros(width + 1, np.int32)
        padded[: len(tokens)] = tokens
        padded[len(tokens)] = 0 if next_token is None else next_token
        is_final = next_token is None
        chunk = np.array([slot, start, len(tokens), is_final, max_new_tokens], np.int32)
        self.pools, self.future, out = self.compiled["prefill", width](
            *self._inputs(), *jax.device_put((padded, chunk))
        )
        return self._dispatched(out, [slot] if is_final else [])

    @property
    def speculative_num_steps(self) -> int:
        """Drafted tokens of the rounds to come."""
        return self._state.speculative_num_steps

    def build_adaptive_runtime_state(self, steps: int, draft_tokens: int) -> SpecRuntimeState:
        """What a tier runs with: its compiled functions, by batch bucket.

        Raises:
            ValueError: for a step count that is not compiled.
        """
        if steps not in self.config.tiers or draft_tokens != steps + 1:
            raise ValueError(
                f"steps={steps} with {draft_tokens} rows is not one of the compiled tiers "
                f"{self.config.tiers}, of one row more than steps each"
            )

        def by_bucket(name: str) -> Any:
            found = {
                batch: self.compiled[name, steps, batch]
                for batch in self.config.batch_buckets
                if (name, steps, batch) in self.compiled
            }
            return found or None

        rounds = map(by_bucket, ("round", "greedy_round", "drafting_round"))
        return SpecRuntimeState(
            speculative_num_steps=steps,
            speculative_num_draft_tokens=draft_tokens,
            topk=1,
            round=TierRounds(*rounds),
            **{name: by_bucket(name) for name in STAGES},
        )

    def apply_runtime_state(self, state: SpecRuntimeState) -> None:
        """Run rounds with this state from the next dispatch on."""
        self._state = state

    def round(self, slots: Sequence[int]) -> Dispatched:
        """Dispatch the rounds of one call for the given request slots.

        Between rounds that leave nothing to draft from and the first one that drafts, one more
        runs without drafts.

        Returns:
            i32 ``[rounds_per_dispatch, bucket, A + 2]``, rows in the order of
            ``slots``, then padding.
        """
        batch = pick_bucket(len(slots), self.config.batch_buckets)
        state = self._state
        if state.speculative_num_steps > 0 and not self._rested.isdisjoint(slots):
            state = self._resting
            functions = state.round.drafting
            self._rested.difference_update(slots)
        else:
            is_plain = self.tables.is_plain[list(slots)].all()
            functions = (state.round.greedy if is_plain else None) or state.round.any
            if state.round.drafting is not None:
                self._resting = state
                self._rested.update(slots)
        self.pools, self.future, out = functions[batch](
            *self._inputs(), self._padded_slots(slots, batch)
        )
        return self._dispatched(out, slots, state.speculative_num_steps)

    def staged_round(self, slots: Sequence[int]) -> Dispatched:
        """One round as three dispatches; equal to :meth:`round`, for tests and profiles.

        It needs the stages to be compiled.

        Returns:
            i32 ``[1, bucket, A + 2]``.
        """
        batch = pick_bucket(len(slots), self.config.batch_buckets)
        on_device = self._padded_slots(slots, batch)
        passed: tuple[Any, ...] = ()
        for name in STAGES:
            self.pools, self.future, out = getattr(self._state, name)[batch](
                *self._inputs(), on_device, *passed
            )
            passed = (out,)
        out = jax.tree.map(lambda leaf: leaf[None], out)
        return self._dispatched(out, slots, self.speculative_num_steps)

    def _dispatched(self, out: RoundOutput, slots: Sequence[int], num_steps: int = 0) -> Dispatched:
        wants_logprobs = self.tables.wants_logprobs(slots)
        return Dispatched(out.packed, out.logprobs if wants_logprobs else None, num_steps)

    def _padded_slots(self, slots: Sequence[int], batch: int) -> jax.Array:
        padded = (*slots, *(0,) * (batch - len(slots)))
        on_device = self._slots_on_device.get(padded)
        if on_device is None:
            # a batch keeps its slots for many rounds; the newest composition is all that matters
            on_device = jax.device_put(np.array(padded, np.int32))
            self._slots_on_device = {padded: on_device}
        return on_device
