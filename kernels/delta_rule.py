"""The gated delta rule row by row: verification of drafted rows, and replay of accepted ones.

A value head has a state, a matrix ``[V, K]``. Each row decays it, and moves the value that it holds
for the row's key towards the row's value, by the weight beta. It then reads the value of its query.
States between rounds are those after the last accepted row: verification reads each state once and
writes none, and the replay of the accepted path writes states and windows of the convolution.

All kernels take the same steps in the same order, here and in ``delta_scan``. So an output and a
state have the same bits whether their row is verified in a chain or a tree, replayed or computed in
order, and whatever other rows and requests there are. Sums are over K, which is in 8 lanes: over
more, shuffles between lanes would take longer than the products.

Axes: W rows of a pass, B requests, T rows per request, A rows of an accepted path, Hk query and key
heads of size K, Hv value heads of size V, C channels, J taps, L layers, S slots.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from specjax.kernels.backend import load, power_of_two, resolve, store, triton_call
from specjax.kernels.delta_inputs import DeltaInputs, ReplayRows, RequestRows, layer_operand

MAX_ROWS = 16  # of a request; a program holds all of them in registers
NUM_WARPS = 2  # per program
PART = 32  # elements of a key in 8 lanes, 4 in each; all parts are in the same lanes


class DeltaPool(NamedTuple):
    """The states of requests in all layers; arrays or references."""

    states: Any  # f32 [L, S, Hv, V, K]
    windows: Any  # [L, S, J - 1, C], the last rows before the convolution

    @property
    def num_taps(self) -> int:
        return self.windows.shape[2] + 1

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """Hk, K, Hv and V."""
        value_heads, value_dim, key_dim = self.states.shape[2:]
        num_channels = self.windows.shape[3] - value_heads * value_dim
        return num_channels // (2 * key_dim), key_dim, value_heads, value_dim

    @property
    def has_kernels(self) -> bool:
        """Whether the Pallas kernels support the sizes of heads: powers of two of at least 16."""
        return all(size >= 16 and size.bit_count() == 1 for size in self.states.shape[3:])


def choose_width(key_dim: int, value_dim: int, num_states: int = 1) -> int:
    """Rows of a state per program, which holds ``num_states`` states if its rows are a tree.

    Lanes must have 4 neighbours of a key: with fewer, sums would add in another order.
    """
    fewest = 32 * NUM_WARPS * 4 // min(key_dim, PART)
    return min(value_dim, max(16 if num_states <= 4 else 8, fewest))


Parts = tuple[Array, ...]  # P arrays, each with K / P elements of keys


class HeadRow(NamedTuple):
    """A row of a value head in float32; leading axes are optional."""

    query: Any  # [..., K], or parts [..., 1, K / P]
    key: Any  # [..., K], or parts [..., 1, K / P]
    value: Array  # [..., V], or some of its elements
    beta: Array  # [...]
    log_decay: Array  # [...]

    def in_parts(self) -> "HeadRow":
        """The same with queries and keys in one part."""
        query, key = ((x[..., None, :],) for x in (self.query, self.key))
        return self._replace(query=query, key=key)


def moved(state: Parts, key: Parts, log_decay: Array, delta: Array) -> Parts:
    """The state, of parts ``[..., V, K / P]``, after a row."""
    decay, delta = jnp.exp(log_decay)[..., None, None], delta[..., None]
    return tuple(x * decay + delta * y for x, y in zip(state, key, strict=True))


def step(state: Parts, row: HeadRow) -> tuple[Parts, Array, Array]:
    """The state after a row, its delta ``[..., V]`` and its output ``[..., V]``.

    Both sums over the state read the one before the row, so that neither waits for the other.
    """

    def sums(x: Parts, y: Parts) -> Array:
        first, *others = (a * b for a, b in zip(x, y, strict=True))
        return jnp.sum(sum(others, first), axis=-1)

    query, key, decay = row.query, row.key, jnp.exp(row.log_decay)[..., None]
    delta = row.beta[..., None] * (row.value - decay * sums(state, key))
    out = decay * sums(state, query) + sums(query, key) * delta
    return moved(state, key, row.log_decay, delta), delta, out


def chosen(condition: Array, x: Parts, y: Parts) -> Parts:
    return jax.tree.map(partial(jnp.where, condition), x, y)


def _verified(
    state: Parts, rows: Iterable[HeadRow], parents: Sequence[Array]
) -> list[tuple[Array, Array]]:
    """Deltas and outputs of the rows of a chain, or of a tree if there are ``parents``."""
    after: list[Parts] = []
    results = []
    for i, row in enumerate(rows):
        before = after[-1] if after and not parents else state
        for j in range(i if parents else 0):
            before = chosen(parents[i] == j, after[j], before)
        state_after, delta, out = step(before, row)
        after.append(state_after)
        results.append((delta, out))
    return results


def _replayed(state: Parts, count: Array, rows: Sequence[tuple[Parts, Array, Array]]) -> Parts:
    """The state after the first ``count`` rows, of which each is a key, a decay and a delta."""
    for i, row in enumerate(rows):
        state = chosen(i < count, moved(state, *row), state)
    return state


def read_slots(array: Array, layer: int | Array, rows: RequestRows) -> Array:
    """Values ``[B, ...]`` before the rows of each request, of a layer of ``array [L, S, ...]``."""
    is_stored = (rows.sources >= 0).reshape(-1, *(1,) * (array.ndim - 2))
    return jnp.where(is_stored, array[layer, jnp.maximum(rows.sources, 0)], 0)


def write_slots(array: Array, layer: Any, rows: RequestRows, values: Array) -> Array:
    """Write ``values [B, ...]`` to the slots of requests that have rows."""
    slots = jnp.where(rows.counts > 0, rows.slots, array.shape[1])
    return array.at[layer, slots].set(values, mode="drop")


def head_rows(inputs: DeltaInputs, keys: Array, log_decays: Array) -> HeadRow:
    """All rows of all value heads, ``[W, Hv, ...]``."""
    shared = inputs.values.shape[1] // keys.shape[1]
    queries, keys = (jnp.repeat(x, shared, axis=1) for x in (inputs.queries, keys))
    row = HeadRow(queries, keys, inputs.values, inputs.betas, log_decays)
    return HeadRow(*(x.astype(jnp.float32) for x in row))


def slid(before: Array, mixed: Array, rows: RequestRows, path: Array | None = None) -> Array:
    """Windows ``[B, J - 1, C]`` after all rows of each request, or those of ``path [B, A]``."""
    size = before.shape[1]
    position = rows.counts[:, None] + jnp.arange(-size, 0, dtype=jnp.int32)
    number = jnp.maximum(position, 0)
    if path is not None:
        number = jnp.take_along_axis(path, jnp.minimum(number, path.shape[1] - 1), axis=1)
    row = jnp.clip(rows.starts[:, None] + number, 0, len(mixed) - 1)
    index = jnp.clip(size + position, 0, size - 1)[..., None]
    stored = jnp.take_along_axis(before, index, axis=1)
    return jnp.where((position >= 0)[..., None], mixed[row], stored)


def _verify_reference(
    every: HeadRow, before: Array, rows: RequestRows, num_rows: int, parents: Array | None
) -> tuple[Array, ...]:
    """Deltas and outputs f32 ``[W, Hv, V]``; zeros in rows without a request."""
    number, last = jnp.arange(num_rows, dtype=jnp.int32), len(every.value) - 1
    row = rows.starts[:, None] + number
    index = jnp.clip(row, 0, last).T
    drafted = (HeadRow(*(x[i] for x in every)).in_parts() for i in index)
    of_rows = range(0 if parents is None else num_rows)
    numbers = [parents[:, i, None, None, None] for i in of_rows]  # type: ignore[index]
    results = _verified((before,), drafted, numbers)
    target = jnp.where(number < rows.counts[:, None], row, last + 1)
    zeros = jnp.zeros(every.value.shape, jnp.float32)
    stacked = (jnp.stack(x, axis=1) for x in zip(*results, strict=True))
    return tuple(zeros.at[target].set(x, mode="drop") for x in stacked)


def _replay_reference(
    pool: DeltaPool, replay: ReplayRows, rows: RequestRows, path: Array
) -> DeltaPool:
    def of_layer(layer: Array, of_rows: ReplayRows) -> tuple[Array, Array]:
        mixed, keys, *others = of_rows
        shared = pool.states.shape[2] // keys.shape[1]
        keys = jnp.repeat(keys, shared, axis=1)[:, :, None].astype(jnp.float32)
        index = jnp.clip(rows.starts[:, None] + path, 0, len(keys) - 1).T
        accepted: Any = [((keys[row],), *(x[row] for x in others)) for row in index]
        before, windows = (read_slots(x, layer, rows) for x in pool)
        (states,) = _replayed((before,), rows.counts[:, None, None, None], accepted)
        return states, slid(windows, mixed, rows, path)

    layers = jnp.arange(len(pool.states), dtype=jnp.int32)
    values = jax.vmap(of_layer)(layers, replay)
    pairs = zip(pool, values, strict=True)
    return DeltaPool(*(write_slots(x, slice(None), rows, y) for x, y in pairs))


def parts_of(key_dim: int, part: int = PART) -> list[Array]:
    """Numbers i32 ``[1, part]`` of the elements of a key, for each part."""
    size = min(key_dim, part)
    lane = jnp.arange(size, dtype=jnp.int32)[None]
    return [at + lane for at in range(0, key_dim, size)]


class Tile(NamedTuple):
    """The share of a program in a request and a layer: some rows of a value head's state."""

    head: Array
    columns: Array  # i32 [width], elements of values
    number: Array  # of the tile among all of a layer

    @classmethod
    def of_program(cls, width: int, value_dim: int) -> "Tile":
        head, part = pl.program_id(1), pl.program_id(2)
        columns = part * width + jnp.arange(width, dtype=jnp.int32)
        return cls(head, columns, head * (value_dim // width) + part)

    def load_state(self, states: Any, layer: Array, source: Array, part: int = PART) -> Parts:
        """Parts f32 ``[width, part]`` of the state in a slot, or zeros if this is negative."""
        at = layer, jnp.maximum(source, 0), self.head, self.columns[:, None]

        def load_part(lanes: Array) -> Array:
            mask = jnp.broadcast_to(source >= 0, (len(self.columns), lanes.shape[1]))
            return load(states.at[*at, lanes], mask=mask, other=0.0)

        return tuple(map(load_part, parts_of(states.shape[4], part)))

    def store_state(self, states: Any, layer: Array, slot: Array, state: Parts) -> None:
        lanes = parts_of(states.shape[4], state[0].shape[1])
        for lane, values in zip(lanes, state, strict=True):
            store(states.at[layer, slot, self.head, self.columns[:, None], lane], values)

    def load_key(self, replay: ReplayRows, place: Array, row: Array) -> Parts:
        _, _, key_heads, key_dim = replay.keys.shape
        head = self.head // (replay.log_decays.shape[2] // key_heads)
        lanes = parts_of(key_dim)
        return tuple(load(replay.keys.at[place, row, head, x]).astype(jnp.float32) for x in lanes)

    def load_row(
        self, inputs: DeltaInputs, replay: ReplayRows, place: Array, row: Array
    ) -> HeadRow:
        (_, key_heads, key_dim), value_heads = inputs.queries.shape, inputs.values.shape[1]
        key_head = self.head // (value_heads // key_heads)
        queries = (load(inputs.queries.at[row, key_head, x]) for x in parts_of(key_dim))
        return HeadRow(
            tuple(x.astype(jnp.float32) for x in queries),
            self.load_key(replay, place, row),
            load(inputs.values.at[row, self.head, self.columns]).astype(jnp.float32),
            inputs.betas[row, self.head],
            replay.log_decays[place, row, self.head],
        )

    def slide_window(
        self,
        pool: DeltaPool,
        mixed: Any,
        layer: Array,
        request: RequestRows,
        row_of: Callable[[Array], Array],
    ) -> None:
        """Write the tile's share of the channels of the window of a request that has rows.

        ``row_of(i)`` is the row in ``mixed [L, W, C]`` of the i-th row that the text keeps.
        """
        size, num_channels = pool.windows.shape[2:]
        _, _, value_heads, value_dim, _ = pool.states.shape
        num_tiles = value_heads * (value_dim // len(self.columns))
        block = power_of_two(pl.cdiv(num_channels, num_tiles))
        channel = self.number * block + jnp.arange(block, dtype=jnp.int32)
        inside, source = channel < num_channels, jnp.maximum(request.sources, 0)
        values = []
        # tiles share no channels, and each loads all rows before it stores any
        for i in range(size):
            position = request.counts - size + i
            is_new = position >= 0
            is_old = ~is_new & (request.sources >= 0)
            row = row_of(jnp.maximum(position, 0))
            after = load(
                mixed.at[layer % mixed.shape[0], row, channel], mask=inside & is_new, other=0
            )
            number = jnp.minimum(request.counts + i, size - 1)
            before = load(
                pool.windows.at[layer, source, number, channel], mask=inside & is_old, other=0
            )
            values.append(jnp.where(is_new, after, before))
        for i, value in enumerate(values):
            store(pool.windows.at[layer, request.slots, i, channel], value, mask=inside)


def specjax_delta_verify(*refs: Any, num_rows: int, width: int) -> None:
    """Kernel body. It stores after all rows, because a store would delay the loads after it."""
    layer_ref, rows, inputs, states_ref, parents_ref, replay, deltas_ref, outs_ref = refs
    request, layer = pl.program_id(0), layer_ref[0]
    rows = RequestRows(*(ref[request] for ref in rows))
    place, last = layer % deltas_ref.shape[0], outs_ref.shape[0] - 1
    tile = Tile.of_program(width, outs_ref.shape[2])

    @pl.when(rows.counts > 0)
    def _() -> None:
        state = tile.load_state(states_ref, layer, rows.sources)
        index = [jnp.minimum(rows.starts + i, last) for i in range(num_rows)]
        drafted = (tile.load_row(inputs, replay, place, row) for row in index)
        of_rows = range(0 if parents_ref is None else num_rows)
        parents = [parents_ref[request, i] for i in of_rows]
        for i, (delta, out) in enumerate(_verified(state, drafted, parents)):
            mask = jnp.broadcast_to(i < rows.counts, (width,))
            store(deltas_ref.at[place, index[i], tile.head, tile.columns], delta, mask=mask)
            store(outs_ref.at[index[i], tile.head, tile.columns], out, mask=mask)


def specjax_delta_replay(*refs: Any, width: int) -> None:
    """Kernel body, in which the first axis of programs is that of layers and requests."""
    rows, path_ref, replay, pool_in, pool = refs
    del pool_in
    batch, num_rows = path_ref.shape
    layer, request = pl.program_id(0) // batch, pl.program_id(0) % batch
    rows = RequestRows(*(ref[request] for ref in rows))
    tile = Tile.of_program(width, pool.states.shape[3])

    def row_of(i: Array) -> Array:
        return rows.starts + path_ref[request, jnp.minimum(i, num_rows - 1)]

    @pl.when(rows.counts > 0)
    def _() -> None:
        state, accepted = tile.load_state(pool.states, layer, rows.sources), []
        for i in range(num_rows):
            row = row_of(jnp.minimum(i, rows.counts - 1))
            delta = load(replay.deltas.at[layer, row, tile.head, tile.columns])
            log_decay = replay.log_decays[layer, row, tile.head]
            accepted.append((tile.load_key(replay, layer, row), log_decay, delta))
        state = _replayed(state, rows.counts, accepted)
        tile.store_state(pool.states, layer, rows.slots, state)
        tile.slide_window(pool, replay.mixed, layer, rows, row_of)


def check(pool: DeltaPool, replay: ReplayRows, inputs: DeltaInputs | None = None) -> None:
    """Raise ValueError if shapes do not fit the states."""
    (layers, slots, *heads), num_rows = pool.states.shape, replay.keys.shape[1]
    fits = {
        "windows": (pool.windows.shape[:2], (layers, slots)),
        "mixed": (replay.mixed.shape[1:], (num_rows, pool.windows.shape[3])),
        "keys": (replay.keys.shape[3:], (heads[2],)),
        "log_decays": (replay.log_decays.shape[1:], (num_rows, heads[0])),
    }
    if inputs is not None:
        fits["queries"] = inputs.queries.shape, replay.keys.shape[1:]
        fits["values"] = inputs.values.shape, (num_rows, *heads[:2])
        fits["betas"] = inputs.betas.shape, (num_rows, heads[0])
    for name, (shape, expected) in fits.items():
        if shape != expected:
            raise ValueError(f"{name} {shape} must be {expected} for states {pool.states.shape}")


def delta_verify(
    inputs: DeltaInputs,
    replay: ReplayRows,
    pool: DeltaPool,
    layer: int | Array,
    rows: RequestRows,
    num_rows: int,
    parents: Array | None = None,
    *,
    implementation: str | None = None,
    width: int | None = None,
) -> tuple[Array, ReplayRows]:
    """Compute the rows of drafted chains or trees from states that stay as they are.

    Args:
        inputs: queries, values and betas of the W rows.
        replay: their keys and decays in ``layer``, or in the only layer. The deltas are written, in
            place if it is donated.
        pool: the states, of which each is read once.
        layer: the layer of the pool.
        rows: the rows of each request, at most T.
        num_rows: T, up to ``MAX_ROWS``.
        parents: i32 ``[B, T]``, the row of the request after which each row comes, or -1; ``None``
            for chains.

    Returns:
        Outputs f32 ``[W, Hv, V]``, zeros in rows without a request; and ``replay`` with deltas.

    Raises:
        ValueError: for mismatched shapes, too many rows or an unknown implementation.
    """
    check(pool, replay, inputs)
    batch, (total, value_heads, value_dim) = len(rows.slots), inputs.values.shape
    if not 1 <= num_rows <= MAX_ROWS:
        raise ValueError(f"{num_rows=} per request must be from 1 to {MAX_ROWS}")
    if parents is not None and parents.shape != (batch, num_rows):
        raise ValueError(f"parents {parents.shape} must be {(batch, num_rows)}")
    implementation, rows = resolve(implementation), rows.live()
    if implementation == "xla" or not pool.has_kernels:
        place = layer % len(replay.keys)
        every = head_rows(inputs, replay.keys[place], replay.log_decays[place])
        before = read_slots(pool.states, layer, rows)
        deltas, outs = _verify_reference(every, before, rows, num_rows, parents)
        return outs, replay._replace(deltas=replay.deltas.at[place].set(deltas))
    num_states = 1 if parents is None else num_rows
    width = width or choose_width(pool.states.shape[4], value_dim, num_states)
    out = jax.ShapeDtypeStruct((total, value_heads, value_dim), jnp.float32)
    operands = layer_operand(layer), rows, inputs, pool.states, parents, replay._replace(mixed=None)
    deltas, outs = triton_call(
        partial(specjax_delta_verify, num_rows=num_rows, width=width),
        grid=(batch, value_heads, value_dim // width),
        out_shape=(jax.ShapeDtypeStruct(replay.deltas.shape, jnp.float32), out),
        num_warps=NUM_WARPS,
        implementation=implementation,
        input_output_aliases={len(jax.tree.leaves(operands)) - 1: 0},
    )(*operands)
    return cleared(outs, rows), replay._replace(deltas=deltas)


def cleared(outs: Array, rows: RequestRows) -> Array:
    """``outs [W, Hv, V]`` with zeros in rows without a request, which no kernel writes."""
    return jnp.where(rows.owners(len(outs))[1][:, None, None], outs, 0)


def delta_replay(
    pool: DeltaPool,
    replay: ReplayRows,
    rows: RequestRows,
    path: Array,
    *,
    implementation: str | None = None,
    width: int | None = None,
) -> DeltaPool:
    """Move states and windows to the last accepted row, of all layers in one launch.

    Args:
        pool: written in place if it is donated. Slots that are not in ``rows`` stay as they are.
        replay: what ``delta_inputs`` and ``delta_verify`` wrote for all L layers.
        rows: the rows of requests.
        path: i32 ``[B, A]``, the accepted rows of each request in order, then -1. A request without
            accepted rows stays as it is.

    Raises:
        ValueError: for mismatched shapes or an unknown implementation.
    """
    check(pool, replay)
    num_layers, _, value_heads, value_dim, key_dim = pool.states.shape
    if (len(replay.keys), len(path)) != (num_layers, batch := len(rows.slots)):
        raise ValueError(
            f"replay rows of {len(replay.keys)} layers and paths {path.shape} must be of "
            f"{num_layers} layers and {batch} requests"
        )
    implementation = resolve(implementation)
    rows = rows._replace(counts=jnp.sum(path >= 0, axis=1, dtype=jnp.int32)).live()
    if implementation == "xla" or not pool.has_kernels:
        return _replay_reference(pool, replay, rows, path)
    width = width or choose_width(key_dim, value_dim)
    operands = rows, path, replay, pool
    first = len(jax.tree.leaves(operands)) - 2
    (pool,) = triton_call(
        partial(specjax_delta_replay, width=width),
        grid=(num_layers * batch, value_heads, value_dim // width),
        out_shape=(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), pool),),
        num_warps=NUM_WARPS,
        implementation=implementation,
        input_output_aliases={first: 0, first + 1: 1},
    )(*operands)
    return pool
