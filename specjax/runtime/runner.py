"""ModelRunner: holds weights, KV pools and rows on the device, and runs compiled functions."""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import refused
from specjax.compiling.cache import CompileCache
from specjax.compiling.pool import CompilePool
from specjax.kernels.delta_rule import DeltaPool
from specjax.kv.pages import PageView
from specjax.kv.recurrent import abstract_pool
from specjax.models.declare import num_extra, num_whole, pool_shapes
from specjax.models.flat import Networks, Weights
from specjax.models.routes import MAX_PIECES, ROUTES_PER_CALL, RoutesPiece
from specjax.runtime.functions import Job, RoundFunctions
from specjax.runtime.runner_config import RunnerConfig, pick_bucket
from specjax.sampling.logit_processor import abstract_states, mask_words, needs_history
from specjax.sampling.params import SamplingParams
from specjax.sampling.table import HostTables, check_slot_limits, pack_sampling
from specjax.speculative.future_map import DeviceState, FutureMap
from specjax.speculative.prefill import Chunk, pack_chunks
from specjax.speculative.round import SlotInputs, TargetPass
from specjax.types import (
    NO_DRAFTS,
    DraftShape,
    KVPools,
    Logprobs,
    RoundOutput,
    VerifyInput,
    VerifyOutput,
)

HEADS = 3  # the axis of a KV pool that a mesh cuts
HEADS_OF_STATES = DeltaPool(2, 3)  # those of states and windows of recurrent layers
# called with request slots i32 [B] including padding, the drafts, and the accepted tokens
Watch = Callable[[jax.Array, VerifyInput, VerifyOutput], None]


@dataclass(frozen=True)
class Dispatched:
    """Results on the device that are being copied to the host."""

    tokens: jax.Array
    # [rounds, bucket, A] or [chunks]; 0 after the accepted tokens, and if not requested
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None  # [W], for the token after each packed token
    hidden_states: jax.Array | None = None  # [rounds, bucket, A, D] or [chunks, D]
    tier: DraftShape = NO_DRAFTS  # the tier of the rounds

    def __post_init__(self) -> None:
        reports = self.logprobs, self.prompt_logprobs, self.hidden_states
        for array in jax.tree.leaves((self.tokens, reports)):
            array.copy_to_host_async()

    @property
    def is_ready(self) -> bool:
        """Whether the device has the results, so that reading them does not wait for it."""
        tokens: Any = self.tokens
        return bool(tokens.is_ready())

    def read(self) -> np.ndarray:
        return np.asarray(self.tokens)


def _pages_of(runner: "ModelRunner") -> PageView:
    config, tables = runner.config, runner.tables
    pages: Any = tuple(tables.page_tables.copy())
    extra = num_extra(runner.networks.target.caches, len(config.num_kv))
    return PageView(pages, config.page_size, config.implementation, extra)


# How to read each of the SlotInputs on the host, to upload it before a dispatch of a slot in
# ``HostTables.stale``. Arrays are copies, because the host may change its tables meanwhile.
SLOT_INPUTS: dict[str, Callable[["ModelRunner"], Any]] = {
    "pages": _pages_of,
    "sampling": lambda runner: pack_sampling(runner.tables.sampling),
    "calibration": lambda runner: runner._calibration,
    "masks": lambda runner: runner.tables.masks.copy() if runner.config.has_grammars else None,
}


class ModelRunner:
    """Owns the device state and dispatches rounds and prefill chunks.

    Call :meth:`compile` and :meth:`load` before the first dispatch. Dispatches return device
    arrays; no method waits for the device.
    """

    config: RunnerConfig
    tables: HostTables
    weights: tuple[Weights, Weights]  # flat, of target and draft, on the device
    _calibration: np.ndarray  # f32 [1 + S + R]
    on_device: DeviceState

    def __init__(
        self, networks: Networks, config: RunnerConfig, cache: CompileCache | None = None
    ) -> None:
        """``cache`` loads and stores executables; its key must include networks and config."""
        self.networks = networks
        self.config = config
        self.compiled = CompilePool(cache)
        vocab_size = networks.target_config.vocab_size
        self.tables = HostTables(
            config.num_slots,
            config.pages_per_request,
            vocab_size,
            has_masks=config.has_grammars,
            num_pools=len(config.num_kv),
        )
        depth = max(shape.depth for shape in config.shapes)
        self._calibration = np.zeros(1 + depth + config.num_slots, np.float32)
        self.set_calibration()
        # on the host until the first dispatch uploads them
        self._by_slot = SlotInputs(**{name: read(self) for name, read in SLOT_INPUTS.items()})
        self._slots_on_device: dict[tuple[int, ...], jax.Array] = {}
        self._empty_state: Any = None
        self._watch: Watch | None = None
        self._routes = deque[RoutesPiece]()  # those that may be on the device

    @property
    def abstract_state(self) -> DeviceState:
        """Shapes and dtypes of the device state: KV pools, and rows between rounds."""
        nets, config, sizes = self.networks, self.config, self.config.sizes
        algorithm = config.algorithm
        target = pool_shapes(nets.target.caches, config.num_kv)
        requests = abstract_pool(nets.target.caches, config.num_states)
        pools = KVPools(target, algorithm.abstract_state(nets, sizes), requests)
        future = algorithm.create_future_map(
            config.num_slots - 1,
            config.mixed_prefill_tokens,
            config.context,
            nets.placement.device,
            rows=algorithm.abstract_rows(nets, sizes),
        )
        if type(future) is not FutureMap:
            raise ValueError(
                f"create_future_map of {algorithm.name} must return a FutureMap, not a "
                f"{type(future).__name__}; put additional arrays into its rows"
            )
        states = abstract_states(sizes.num_slots, nets.target_config.vocab_size)
        future = replace(future, logit_states=states)
        placed = nets.placement.abstract(DeviceState(pools, future))
        cut = len(target) - num_whole(nets.target.caches)  # routes are whole on each device
        split: dict[str, Any] = {
            "target": nets.placement.abstract(target[:cut], HEADS) + placed.pools.target[cut:]
        }
        if requests is not None:
            split["requests"] = jax.tree.map(nets.placement.abstract, requests, HEADS_OF_STATES)
        if nets.draft.shards > 1:
            split["draft"] = nets.placement.abstract(pools.draft, HEADS)
        return replace(placed, pools=replace(placed.pools, **split))

    @property
    def max_top_logprobs(self) -> int:
        """Maximum number of most likely tokens per position that a request may ask for."""
        return min(self.config.max_top_logprobs, self.networks.target_config.vocab_size)

    def compile(self, *, show_progress: bool, on_use: bool = False) -> None:
        """Compile the rounds of every tier and batch bucket, and prefill for every width.

        Functions that are already compiled are kept. ``on_use`` compiles each at its first use.
        """
        self._add(self._functions().jobs())
        self.compiled.shows_progress = show_progress
        if not on_use:
            self.compiled.compile(show_progress=show_progress)

    def _add(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if not self.compiled.has(job[0]):
                self.compiled.add(*job)

    def _functions(self) -> RoundFunctions:
        nets = self.networks
        place = nets.placement
        weights = nets.target.placed(place), nets.draft.placed(place)
        common = (*weights, self.abstract_state, place.abstract(self._by_slot))
        return RoundFunctions(nets, self.config, self.max_top_logprobs, common)

    def load(self, target: Weights, draft: Weights) -> None:
        """Set the weights, tuples in the order of the networks, and allocate the pools.

        Pools start as zeros, because new memory may hold NaN, and a masked NaN is still NaN.
        """
        self.networks.placement.reserve(self)
        self.weights = (target, draft)
        # compile this function here, because reset() may run in a thread with other JAX settings
        self._empty_state = self.networks.placement.zeros(self.abstract_state)
        self.on_device = self._empty_state()

    def reset_rows(self) -> None:
        """Set the rows that rounds start from to zero, without compiling anything."""
        shapes = self.abstract_state.future
        zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
        self.on_device = replace(self.on_device, future=self.networks.placement.put(zeros))

    def set_rows(self, **rows: Any) -> None:
        """Replace fields of the rows that rounds start from, for measurements; compiles nothing.

        ``rows`` are arrays on the device, such as ``seq_lens`` i32 ``[R]``; the next call of a
        compiled function donates them.
        """
        self.on_device = replace(self.on_device, future=replace(self.on_device.future, **rows))

    def reset(self) -> None:
        """Set pools and rows to zero, so that no KV from old weights is left; compiles nothing.

        The old pools are freed first, because memory may be too small for both.
        """
        for leaf in jax.tree.leaves(self.on_device):
            leaf.delete()
        self.on_device = self._empty_state()

    def unload(self) -> None:
        self._slots_on_device.clear()
        self.networks.placement.release(self)
        del self.weights, self.on_device

    def replace_weight(self, index: int, weight: jax.Array, *, draft: bool) -> None:
        """Replace weight ``index`` by one of the same shape and dtype; compiles nothing."""
        models = [list(weights) for weights in self.weights]
        models[draft][index] = weight
        self.weights = (tuple(models[0]), tuple(models[1]))

    def check(
        self,
        params: SamplingParams,
        end_token_ids: Collection[int] = (),
        top_logprobs: int | None = None,
    ) -> None:
        """Raise ValueError for parameters that :meth:`set_slot` cannot take."""
        check_slot_limits(params, end_token_ids, self.networks.target_config.vocab_size)
        if top_logprobs is not None and not 0 <= top_logprobs <= self.max_top_logprobs:
            limit = self.max_top_logprobs
            raise refused("top_logprobs_num", top_logprobs, f"must be from 0 to {limit}", limit)

    def set_slot(
        self, slot: int, params: SamplingParams, *, cached_ids: Sequence[int] = (), **options: Any
    ) -> None:
        """Set the sampling parameters of a slot; ``options`` go to ``HostTables.set_sampling``.

        ``cached_ids`` are the first tokens of the text, whose KV is cached and not prefilled.
        """
        self.tables.set_sampling(slot, params, **options)
        is_read = needs_history(params) or self.config.algorithm.needs_history
        if is_read and len(cached_ids) > 0:
            self.record_text(slot, cached_ids)

    def record_text(self, slot: int, token_ids: Sequence[int] | np.ndarray) -> None:
        """Replace the history of a slot by tokens that are not prefilled."""
        history = np.zeros(self.config.context, np.int32)
        history[: len(token_ids)] = token_ids
        arguments = self.networks.placement.put((np.int32(slot), history))
        future = self.call(("record_cached",), self.on_device.future, *arguments)
        self.on_device = replace(self.on_device, future=future)

    def set_pages(self, slot: int, pages: Sequence[int], start: int = 0, pool: int = 0) -> None:
        """Write a slot's page table of a pool from entry ``start`` on; later entries become 0."""
        self.tables.set_pages(slot, pages, start, pool)

    def set_measured_pages(self, slot: int, num_pages: int) -> None:
        """Give a slot pages for a measurement; slots may then have the same window pages."""
        pages = range(1 + (slot - 1) * num_pages, 1 + slot * num_pages)
        self.set_pages(slot, pages)
        for pool, (_, count) in enumerate(self.config.window_pages, start=1):
            self.set_pages(slot, [1 + page % (count - 1) for page in pages], pool=pool)

    def clear_slot(self, slot: int) -> None:
        """Detach a slot from its pages; rounds in flight run before those of the next request."""
        self.tables.clear(slot)

    def call(self, key: Hashable, *inputs: Any) -> Any:
        """Dispatch a compiled function, in an order that all devices of a mesh share."""
        function = self.compiled[key]
        with self.networks.placement.in_order:
            return function(*inputs)

    def _inputs(self, slots: Sequence[int]) -> tuple[Any, ...]:
        """Return the first arguments of every compiled function, for these request slots."""
        for name, read in SLOT_INPUTS.items():
            stale = self.tables.stale[name]
            if stale and not stale.isdisjoint(slots):
                uploaded = self.networks.placement.put(read(self))
                self._by_slot = self._by_slot._replace(**{name: uploaded})
                stale.clear()
        return (*self.weights, self.on_device, self._by_slot)

    def set_calibration(
        self,
        slope: float = 1.0,
        intercepts: Sequence[float] | np.ndarray = (),
        offsets: Sequence[float] | np.ndarray = (),
        slots: Sequence[int] = (),
    ) -> None:
        """Set how packed tiers turn confidences into probabilities, from the next dispatch on.

        ``intercepts`` are by depth, from 1, and ``offsets`` those of ``slots``; missing ones are 0.
        See :func:`~specjax.speculative.packing.survival`. Compiles nothing.
        """
        num_slots, values = self.config.num_slots, np.zeros_like(self._calibration)
        values[0] = slope
        values[1 : 1 + len(intercepts)] = intercepts
        values[[len(values) - num_slots + slot for slot in slots]] = offsets
        if not np.array_equal(values, self._calibration):  # an upload takes longer
            self._calibration = values
            self.tables.stale["calibration"].update(range(num_slots))

    def prefill(self, chunks: Sequence[Chunk], *, with_logprobs: bool = False) -> Dispatched:
        """Dispatch prompt chunks in one call. Raises ValueError if no bucket holds them.

        The result is i32 ``[chunks]`` with padding. If a chunk ends a prompt, its entry is the
        first token. ``with_logprobs`` adds log-probabilities; chunks must fit ``logprob_buckets``.
        """
        config, name = self.config, "prefill_logprobs" if with_logprobs else "prefill"
        buckets = config.logprob_buckets if with_logprobs else config.prefill_buckets
        fitting = [width for width in buckets if config.max_chunks(width) >= len(chunks)]
        width = pick_bucket(sum(len(chunk.tokens) for chunk in chunks), fitting)
        packed = pack_chunks(chunks, width, config.max_chunks(width))
        packed, inputs = (
            self.networks.placement.put(packed),
            self._inputs([chunk.slot for chunk in chunks]),
        )
        self.on_device, out = self.call((name, width), *inputs, packed)
        return self._dispatched(out, [chunk.slot for chunk in chunks if chunk.following is None])

    def take_routes(self, pages: Sequence[int], start: int, end: int) -> list[RoutesPiece]:
        """Dispatch reads of the routes of tokens on these pages, as in ``Routes.pieces``.

        Waits for the oldest ones, of any request, if many are on the device.
        """
        table, size, pieces = np.array(pages, np.int32), self.config.page_size, []
        for begin in range(start, end, ROUTES_PER_CALL):
            places = np.arange(begin, min(begin + ROUTES_PER_CALL, end))
            index = np.zeros(ROUTES_PER_CALL, np.int32)
            index[: len(places)] = table[places // size] * size + places % size
            pool, index_there = self.on_device.pools.target[-1], self.networks.placement.put(index)
            values = self.call(("take_routes",), pool, index_there)
            values.copy_to_host_async()
            pieces.append(RoutesPiece(values, len(places)))
            self._routes.append(pieces[-1])
            if len(self._routes) > MAX_PIECES:
                self._routes.popleft().read()
        return pieces

    def watch_rounds(self, watch: Watch | None) -> None:
        """Call ``watch`` as :meth:`specjax.Engine.watch_rounds` describes; ``None`` stops."""
        self._watch = watch

    def round(self, slots: Sequence[int], tier: DraftShape | None = None) -> Dispatched:
        """Dispatch the rounds of one call for request slots, by default in the largest tier.

        The result is i32 ``[rounds_per_dispatch, bucket, columns]``, in the order of ``slots`` and
        with padding; see :class:`~specjax.types.RoundResults` and ``RoundOutput.packed``.
        """
        config = self.config
        tier = config.largest if tier is None else tier
        if tier not in config.shapes:
            raise ValueError(f"{tier=} is not compiled; compiled tiers: {config.shapes}")
        if self._watch is not None:
            return self._watched_rounds(slots, tier)
        out = self.dispatch(self._greedy_or_not("round", slots), slots, tier)
        return self._dispatched(out, slots, tier)

    def _watched_rounds(self, slots: Sequence[int], tier: DraftShape) -> Dispatched:
        """Run the rounds of one call as if a grammar that allows all tokens limited a request."""
        limits = self.open_limits(pick_bucket(len(slots), self.config.batch_buckets), tier)
        tree, results = self.dispatch("draft", slots, tier), []
        for _ in range(self.config.rounds_per_dispatch):
            passed = self.dispatch("target", slots, tier, tree)
            result, tree = self.finish_round(slots, tier, tree, passed, *limits)
            results.append((result.tokens, result.logprobs, result.hidden_states))
        joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *results)
        return Dispatched(joined[0], joined[1], hidden_states=joined[2], tier=tier)

    def open_limits(self, batch: int, tier: DraftShape) -> tuple[np.ndarray, np.ndarray]:
        """Masks and forced tokens for :meth:`finish_round` that limit nothing."""
        widths = mask_words(self.networks.target_config.vocab_size), 1 + tier.steps
        masks, forced = (np.full((batch, tier.nodes, width), -1, np.int32) for width in widths)
        return masks, forced

    def finish_round(
        self,
        slots: Sequence[int],
        tier: DraftShape,
        tree: VerifyInput,
        passed: TargetPass,
        masks: np.ndarray,
        forced: np.ndarray,
    ) -> tuple[Dispatched, VerifyInput]:
        """Dispatch the second call; also return the drafts of the next round for these slots.

        ``slots`` are those of the first call, or 0 for requests that have ended since then.
        ``masks`` i32 ``[bucket, T, V / 32]`` and ``forced`` i32 ``[bucket, T, 1 + S]`` are as in
        :func:`~specjax.speculative.round.finish_stage`.
        """
        limits = self.networks.placement.put((masks, forced))
        name = "watched" if self._watch else self._greedy_or_not("finish", slots)
        out, following, verified = self.dispatch(name, slots, tier, tree, passed, *limits)
        if self._watch:
            self._watch(self._padded_slots(slots), tree, verified)
        return self._dispatched(out, slots, tier), following

    def _greedy_or_not(self, name: str, slots: Sequence[int]) -> str:
        """The function for greedy batches, if it was compiled and these slots are greedy."""
        is_greedy = self.config.has_greedy and self.tables.is_greedy[list(slots)].all()
        return f"greedy_{name}" if is_greedy else name

    def dispatch(self, name: str, slots: Sequence[int], tier: DraftShape, *inputs: Any) -> Any:
        """Dispatch a function of rounds, such as "draft" or "target" of one that is split."""
        padded = self._padded_slots(slots)
        batch = len(padded)
        if self._watch and not self.compiled.has(("watched", tier, batch)):
            self._add(self._functions().split_round(tier, batch, watched=True))
        inputs = (*self._inputs(slots), padded, *inputs)
        self.on_device, out = self.call((name, tier, batch), *inputs)
        return out

    def _dispatched(
        self, out: RoundOutput, slots: Sequence[int], tier: DraftShape = NO_DRAFTS
    ) -> Dispatched:
        logprobs = out.logprobs if self.tables.wants_logprobs(slots) else None
        states = out.hidden_states if self.tables.wants_hidden_states[list(slots)].any() else None
        return Dispatched(out.packed, logprobs, out.prompt_logprobs, states, tier)

    def _padded_slots(self, slots: Sequence[int]) -> jax.Array:
        batch = pick_bucket(len(slots), self.config.batch_buckets)
        padded = (*slots, *(0,) * (batch - len(slots)))
        on_device = self._slots_on_device.get(padded)
        if on_device is None:
            # a batch has the same slots for many rounds, so it is enough to cache the last ones
            on_device = self.networks.placement.put(np.array(padded, np.int32))
            self._slots_on_device = {padded: on_device}
        return on_device
