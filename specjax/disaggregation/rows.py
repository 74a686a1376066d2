"""Reads KV rows of tokens and the inputs of a first round from a runner, or writes them.

Rows are per token, not per page, so the page sizes of the two sides may differ. An array of an
algorithm's state is sent only if it has KV per token, that is, an axis of KV indices. The states of
recurrent layers are sent once, with the inputs of a first round.

Sent arrays are whole: on a mesh, its first device has the KV of all heads, once. The devices of the
other side, of any number, get their heads of it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from specjax.checks import check_integer
from specjax.disaggregation.fingerprints import add_functions, fingerprint_of
from specjax.disaggregation.heads import Cut, cuts_of, of_all_heads
from specjax.kernels.kv_rows import finite_or_zero, gather_rows, scatter_rows
from specjax.kv.recurrent import abstract_pool
from specjax.models.declare import pool_shapes
from specjax.runtime.runner import ModelRunner
from specjax.runtime.runner_config import pick_bucket
from specjax.sampling.table import SLOT, pack_sampling, unpack_sampling
from specjax.speculative.algorithm import SpeculativeAlgorithm
from specjax.speculative.future_map import (
    DeviceState,
    record_cached,
    resolve,
    restart,
    stash_handover,
)
from specjax.types import KVPools

# tokens per piece: 67 MB for the Llama-3.1-8B shape, which does not slow down a round
MOST_TOKENS, FEW_TOKENS = 512, 64
MARK = 2**31 - 1  # a prime: an axis of this size is that of KV indices
KV = tuple[Any, ...]


def token_axes(runner: ModelRunner) -> tuple[int | None, ...]:
    """Return, for each array in the KV pools, its axis of KV indices or ``None``."""
    config, nets = runner.config, runner.networks
    sizes = config.sizes._replace(num_kv=MARK)
    draft = config.algorithm.abstract_state(nets, sizes)
    requests = abstract_pool(nets.target.caches, config.num_states)
    pools = KVPools(pool_shapes(nets.target.caches, (MARK,)), draft, requests)
    shapes = (leaf.shape for leaf in jax.tree.leaves(pools))
    return tuple(shape.index(MARK) if MARK in shape else None for shape in shapes)


def check_facts(here: dict[str, Any], there: Any) -> None:
    """Raise ValueError with both values if the descriptions of two sides differ."""
    if not isinstance(there, dict):
        raise ValueError(f"the other side did not describe its model: {there!r:.80}")
    names = sorted({*here, *there})
    differing = [
        f"{name}: {here.get(name)} here, {there.get(name)} there"
        for name in names
        if here.get(name) != there.get(name)
    ]
    if differing:
        listed = "; ".join(differing)
        raise ValueError(f"start both sides with equal models and options; they differ in {listed}")


def _described(name: str, config: Any) -> dict[str, str]:
    """Split a configuration into fields, so that an error names those that differ."""
    if not is_dataclass(config):
        return {name: repr(config)}
    return {f"{name}.{field.name}": repr(getattr(config, field.name)) for field in fields(config)}


def _layered(leaf: jax.Array, axis: int) -> jax.Array:
    """Merge all axes before the axis of KV indices into one."""
    return leaf.reshape(-1, *leaf.shape[axis:])


def take_rows(
    pools: KVPools, index: jax.Array, *, axes: Sequence[int | None], implementation: str | None
) -> KV:
    """Gather KV at the indices i32 ``[W]`` from each array that has an axis of KV indices."""
    gathered = []
    for leaf, axis in zip(jax.tree.leaves(pools), axes, strict=True):
        if axis is not None:
            rows = gather_rows(_layered(leaf, axis), index, implementation=implementation)
            gathered.append(rows.reshape(*leaf.shape[:axis], *rows.shape[1:]))
    return tuple(gathered)


def put_rows(
    state: DeviceState,
    index: jax.Array,
    kv: KV,
    *,
    axes: Sequence[int | None],
    implementation: str | None,
) -> DeviceState:
    """Write KV from :func:`take_rows` at the indices i32 ``[W]``; skip indices beyond a pool.

    Indices must be unique. Values that are not finite become 0 to protect later requests.
    """
    leaves, structure = jax.tree.flatten(state.pools)
    arrays = iter(kv)
    for i, axis in enumerate(axes):
        if axis is not None:
            leaf, values = leaves[i], _layered(next(arrays), axis)
            rows = scatter_rows(_layered(leaf, axis), index, values, implementation=implementation)
            leaves[i] = rows.reshape(leaf.shape)
    return replace(state, pools=jax.tree.unflatten(structure, leaves))


def take_states(pools: KVPools, slot: jax.Array) -> tuple[jax.Array, ...]:
    """Return the states ``[L, ...]`` of recurrent layers in slot i32 ``[]``."""
    return tuple(leaf[:, slot] for leaf in jax.tree.leaves(pools.requests))


def take_first(state: DeviceState, slot: jax.Array) -> tuple[jax.Array, ...]:
    """Return the algorithm's rows ``[1, ...]`` of request slot i32 ``[]``, then its states."""
    rows = jax.tree.leaves(resolve(state.future, slot[None]))
    return (*rows, *take_states(state.pools, slot))


def begin(
    state: DeviceState,
    slot: jax.Array,
    numbers: jax.Array,
    history: jax.Array,
    sampling: jax.Array,
    rows: tuple[jax.Array, ...] | None,
    *,
    algorithm: SpeculativeAlgorithm,
) -> DeviceState:
    """Set up a request slot i32 ``[]`` as after a local prefill, except for the KV pools.

    Args:
        numbers: i32 ``[2]``, tokens in the pool and tokens that the request may still generate.
        history: i32 ``[C]``, the text with its bonus token.
        sampling: i32 ``[1, K]``, packed parameters of the request.
        rows: result of :func:`take_first` on the prefill side; ``None`` if it sent none.
    """
    seq_lens, remaining, slots = numbers[:1], numbers[1:], slot[None]
    bonus_tokens = history[seq_lens]
    future = record_cached(state.future, slot, history)
    future = replace(
        future,
        seq_lens=future.seq_lens.at[slots].set(seq_lens),
        bonus_tokens=future.bonus_tokens.at[slots].set(bonus_tokens),
        remaining=future.remaining.at[slots].set(remaining),
    )
    table = unpack_sampling(sampling, jnp.zeros_like(slots))
    future = restart(future, slots, seq_lens + 1, table)
    pools, (drafter, structure) = state.pools, jax.tree.flatten(future.rows)
    if rows is not None:
        values, count = [*map(finite_or_zero, rows)], len(drafter)
        leaves, of_pool = jax.tree.flatten(pools.requests)
        pairs = zip(leaves, values[count:], strict=True)
        leaves = [leaf.at[:, slot].set(states) for leaf, states in pairs]
        pools = replace(pools, requests=jax.tree.unflatten(of_pool, leaves))
        rows = jax.tree.unflatten(structure, values[:count])
    handed_over = algorithm.build_disagg_draft_input(rows, bonus_tokens, seq_lens, slots, future)
    return DeviceState(pools, stash_handover(future, slots, handed_over))


class KVTransfer:
    """Reads rows from a runner and writes rows to it; all functions are compiled at the start.

    Only the thread that dispatches the runner's rounds may use it, except for :meth:`placed`.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._axes = token_axes(runner)
        self._axis = next(axis for axis in self._axes if axis is not None)
        self._place = runner.networks.placement
        # independent of the context length: both sides need the same widths
        self.widths = (FEW_TOKENS, MOST_TOKENS)
        state = runner.abstract_state
        self._rows = jax.eval_shape(take_first, state, self._place.ints())
        self._states = jax.eval_shape(take_states, state.pools, self._place.ints())
        forms: Any = {"axes": self._axes, "implementation": runner.config.implementation}
        self._take: Any = partial(take_rows, **forms)
        self._put: Any = partial(put_rows, **forms)
        self._cuts: list[Cut] = []
        if self._place.count > 1:
            self._cuts = cuts_of(runner.networks, state, self._axes)
            pair = self._take, self._put
            self._take, self._put = of_all_heads(*pair, runner.networks, state, self._cuts)
        ints = self._place.ints
        self._kv = {w: jax.eval_shape(self._take, state.pools, ints(w)) for w in self.widths}

    @property
    def facts(self) -> dict[str, Any]:
        """JSON values: ``both`` must be equal on both sides; ``rows`` has shapes and dtypes."""
        nets, config = self._runner.networks, self._runner.config
        axes = [axis for axis in self._axes if axis is not None]
        kv = [
            [[size for i, size in enumerate(leaf.shape) if i != axis], str(leaf.dtype)]
            for leaf, axis in zip(self._kv[self.widths[0]], axes, strict=True)
        ]
        common = {
            **_described("target", nets.target_config),
            **_described("draft", nets.draft_config),
            "algorithm": config.algorithm.name,
            "lookahead": config.algorithm.lookahead,
            "processed_logprobs": config.processed_logprobs,
            "enable_deterministic_inference": config.deterministic,
            "grammar_backend": config.has_grammars,
            "kv": kv,
            "states": [[list(leaf.shape), str(leaf.dtype)] for leaf in self._states],
            # devices have states in an order of their own
            "tp_size": self._place.count if self._states else 1,
        }
        rows = [[list(row.shape), str(row.dtype)] for row in self._rows]
        return {"both": common, "rows": rows}

    @property
    def token_bytes(self) -> int:
        width = self.widths[-1]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self._kv[width]) // width

    def sent_bytes(self, num_tokens: int) -> int:
        """Return the bytes that are sent for a prompt: KV with padding, and states.

        A prompt of several pieces counts one padded piece more, for a chunk that ends within one.
        """
        pieces, remainder = divmod(max(num_tokens, 0), self.widths[-1])
        padded = pick_bucket(remainder, self.widths) if remainder else 0
        states = sum(leaf.size * leaf.dtype.itemsize for leaf in self._states)
        return ((pieces + (pieces > 0)) * self.widths[-1] + padded) * self.token_bytes + states

    @property
    def most_bytes(self) -> int:
        """Maximum bytes of arrays in one message from a prefill side."""
        config = self._runner.config
        leaves = *self._kv[self.widths[-1]], *self._rows
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        # log-probabilities (a value, top ids and values) and hidden states
        size += 4 * config.context * (1 + 2 * config.max_top_logprobs)
        return size + 2**20

    def compile(self, *, gives: bool, show_progress: bool) -> None:
        """Compile the functions of a prefill side (``gives``) or of a decode side."""
        runner, state = self._runner, self._runner.abstract_state
        add = runner.compiled.add
        add_functions(runner)
        of_rows = self._results(self._place.sharding())
        of_state = self._results(_shardings(state))
        for width in self.widths:
            index = self._place.ints(width)
            if gives:
                take = jax.jit(partial(self._take), **of_rows)
                add(("take_rows", width), take, (state.pools, index))
            else:
                put = jax.jit(partial(self._put), donate_argnums=0, **of_state)
                add(("put_rows", width), put, (state, index, self._placed_rows(width)))
        if gives and self._rows:
            take = jax.jit(partial(take_first), **of_rows)
            add(("take_first",), take, (state, self._place.ints()))
        if not gives:
            if not self._states:
                self._add_begin(None)
            self._add_begin(self._rows)
        runner.compiled.compile(show_progress=show_progress)

    def _results(self, shardings: Any) -> dict[str, Any]:
        """Options of ``jit``: where results are, on a mesh."""
        return {} if self._place.count == 1 else {"out_shardings": shardings}

    def _placed_rows(self, width: int) -> Any:
        """Shapes of rows on the devices, which get their own heads unless several have the same."""
        if self._place.count == 1:
            return self._place.abstract(self._kv[width])
        pairs = zip(self._kv[width], self._cuts, strict=True)
        return tuple(self._place.abstract(leaf, cut.axis) for leaf, cut in pairs)

    def _add_begin(self, rows: tuple[Any, ...] | None) -> None:
        runner, state = self._runner, self._runner.abstract_state
        how = self._results(_shardings(state)) | {"donate_argnums": 0}
        start = jax.jit(partial(begin, algorithm=runner.config.algorithm), **how)
        shapes = (), (2,), (runner.config.context,), (1, SLOT.itemsize // 4)
        ints = [self._place.ints(*shape) for shape in shapes]
        runner.compiled.add(_begin_key(rows), start, (state, *ints, self._place.abstract(rows)))

    def expect(self, facts: dict[str, Any]) -> None:
        """Compile functions for a prefill side's rows; raise ValueError if its ``facts`` differ."""
        check_facts(self.facts["both"], facts.get("both"))
        rows: Any = facts.get("rows")
        try:
            shapes = tuple(
                jax.ShapeDtypeStruct([check_integer("width", n, 1) for n in shape], jnp.dtype(kind))
                for shape, kind in rows
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"rows={rows!r} must be shapes and dtypes: {error}") from error
        kinds, ours = ([(len(row.shape), row.dtype) for row in r] for r in (shapes, self._rows))
        size = sum(math.prod(row.shape) * row.dtype.itemsize for row in shapes)
        states = [(x.shape, x.dtype) for x in shapes[len(shapes) - len(self._states) :]]
        is_other = states != [(x.shape, x.dtype) for x in self._states]
        if kinds != ours or is_other or size > self.most_bytes:
            ours = self.facts["rows"]
            raise ValueError(f"rows={rows!r} of the peer differ from those of this side, {ours}")
        if _begin_key(shapes) not in self._runner.compiled:
            self._add_begin(shapes)
            self._runner.compiled.compile(show_progress=False)

    def weights(self) -> str:
        """Return a fingerprint of the current weights; other weights almost surely have another."""
        return fingerprint_of(self._runner)

    def _index(self, pages: Sequence[int], start: int, index: np.ndarray, count: int) -> jax.Array:
        """Write KV indices of ``count`` tokens to ``index`` i32 ``[W]``; return it on device."""
        size = self._runner.config.page_size
        places = np.arange(start, start + count)
        index[:count] = np.asarray(pages, np.int32)[places // size] * size + places % size
        return self._place.put(index)

    def take(self, pages: Sequence[int], start: int, end: int) -> Iterator[tuple[int, int, KV]]:
        """Yield KV of the tokens on these pages in pieces: first token, token count and arrays."""
        runner = self._runner
        while start < end:
            count = min(end - start, self.widths[-1])
            width = pick_bucket(count, self.widths)
            index = self._index(pages, start, np.zeros(width, np.int32), count)
            kv = runner.call(("take_rows", width), runner.on_device.pools, index)
            yield start, count, self._of_first_device(kv)
            start += count

    def take_first(self, slot: int) -> tuple[jax.Array, ...]:
        if not self._rows:
            return ()
        there = self._place.put(np.int32(slot))
        rows = self._runner.call(("take_first",), self._runner.on_device, there)
        return self._of_first_device(rows)

    def _of_first_device(self, arrays: Any) -> Any:
        """Arrays that are whole on each device, of the first one only."""
        if self._place.count == 1:
            return arrays
        return jax.tree.map(lambda array: array.addressable_data(0), arrays)

    def placed(self, kv: KV) -> KV:
        """Put KV from the other side on this side's devices, if it has the shapes of these pools.

        Otherwise :meth:`check_kv` will refuse it.
        """
        if self._place.count == 1:
            return self._place.put(kv)
        try:
            self.check_kv(kv, 0)
        except ValueError:
            return kv
        return jax.device_put(kv, _shardings(self._placed_rows(kv[0].shape[self._axis])))

    def hosted(self, arrays: Any) -> Any:
        """Start to copy arrays to pinned host memory (30 GB/s on an H200; pageable: 1.3 GB/s)."""
        if self._place.on_cpu:
            return arrays
        pinned = SingleDeviceSharding(self._place.device, memory_kind="pinned_host")
        return jax.device_put(arrays, pinned)

    def check_kv(self, kv: KV, count: int) -> None:
        """Raise ValueError if the arrays are not ``count`` rows of these pools."""
        width = kv[0].shape[self._axis] if kv and len(kv[0].shape) > self._axis else 0
        expected = [(leaf.shape, str(leaf.dtype)) for leaf in self._kv.get(width, ())]
        received = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in kv]
        if not received or received != expected or count > width:
            raise ValueError(f"{count} rows of {received} do not fit pools of {expected}")

    def check_rows(self, rows: tuple[Any, ...] | None) -> None:
        """Raise ValueError if rows do not match the shapes that the peer announced."""
        if _begin_key(rows) not in self._runner.compiled:
            raise ValueError(f"rows {_begin_key(rows)[1]} were not announced")

    def put(self, pages: Sequence[int], start: int, count: int, kv: KV) -> None:
        """Write KV, which :meth:`check_kv` has accepted, for the tokens on these pages."""
        width, runner = kv[0].shape[self._axis], self._runner
        none = np.arange(width, dtype=np.int32) + runner.config.sizes.num_kv
        index = self._index(pages, start, none, count)
        placed = self.placed(kv)
        runner.on_device = runner.call(("put_rows", width), runner.on_device, index, placed)

    def begin(
        self, slot: int, text: Sequence[int], remaining: int, rows: tuple[Any, ...] | None
    ) -> None:
        """Prepare a slot to decode a text whose last token is the bonus token."""
        history = np.zeros(self._runner.config.context, np.int32)
        history[: len(text)] = text
        numbers = np.array([len(text) - 1, remaining], np.int32)
        sampling = pack_sampling(self._runner.tables.sampling[slot : slot + 1])
        arguments = self._place.put((np.int32(slot), numbers, history, sampling, rows))
        runner = self._runner
        runner.on_device = runner.call(_begin_key(rows), runner.on_device, *arguments)


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _begin_key(rows: tuple[Any, ...] | None) -> tuple[str, str]:
    shapes = None if rows is None else [(tuple(row.shape), str(row.dtype)) for row in rows]
    return "begin", str(shapes)
