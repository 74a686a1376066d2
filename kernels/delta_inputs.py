"""Inputs of the gated delta rule: a short convolution over channels, unit keys and queries, gates.

A recurrent layer projects each token to C channels: those of all query heads, then of all key heads
and all value heads. Each channel is convolved with the same channel of the J - 1 rows before it. In
a tree, these are the ancestors of the row. Before the first row of a request they are in a window,
which holds the last J - 1 rows of the text as they were projected.

Axes: W rows of a pass, B requests, T rows per request, C channels, J taps, Hk query and key heads
of size K, Hv value heads of size V (C = 2 Hk K + Hv V), L layers, S slots, of which 0 is padding.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from specjax.kernels.backend import load, power_of_two, resolve, store, triton_call

HEIGHT = 4  # rows per program, one per warp, so that no sum crosses a warp
EPSILON = 1e-6  # added to the squared length of a query or key


class RequestRows(NamedTuple):
    """The rows of B requests among the W rows of a pass, and the slots of their states.

    A request in slot 0 has no rows, and nothing is read or written for it.
    """

    slots: Array  # i32 [B], where states are written; distinct, except for 0
    sources: Array  # i32 [B], slots where they are read; -1: zeros, at the start of a text
    starts: Array  # i32 [B], the first row of each request
    counts: Array  # i32 [B], its number of rows

    def live(self) -> "RequestRows":
        """The same, with counts of 0 in slot 0."""
        return self._replace(counts=jnp.where(self.slots > 0, self.counts, 0))

    def owners(self, num_rows: int) -> tuple[Array, Array]:
        """The request of each row, i32 ``[W]``, and whether it has one, bool ``[W]``."""
        row, ends = jnp.arange(num_rows, dtype=jnp.int32), self.starts + self.live().counts
        is_owner = (row[:, None] >= self.starts) & (row[:, None] < ends)
        return jnp.argmax(is_owner, axis=1).astype(jnp.int32), is_owner.any(axis=1)


class Taps(NamedTuple):
    """Where the J - 1 rows before each row are, oldest first; the same for all layers."""

    rows: Array  # i32 [W, J - 1]; -n is the n-th last row of the window
    sources: Array  # i32 [W], the slot of the window; -1 if it holds zeros

    @classmethod
    def of(
        cls, rows: RequestRows, num_rows: int, num_taps: int, parents: Array | None = None
    ) -> "Taps":
        """Find the rows before each of W rows, of which ``parents`` are those of trees.

        Args:
            rows: the rows of requests.
            num_rows: W.
            num_taps: J.
            parents: i32 ``[B, T]``, -1 or the number of an earlier row of the request; ``None``:
                each row follows the one before it.
        """
        owner, is_real = rows.owners(num_rows)
        row, start = jnp.arange(num_rows, dtype=jnp.int32), rows.starts[owner]
        parent = row - start - 1
        if parents is not None:
            number = jnp.clip(row - start, 0, parents.shape[1] - 1)
            parent = parents[owner, number]
        # a row without a request has an empty window before it
        parent = jnp.where(is_real & (parent >= 0), start + parent, -1)
        before = [parent]
        for _ in range(num_taps - 2):
            after = before[-1]
            before.append(jnp.where(after >= 0, parent[jnp.maximum(after, 0)], after - 1))
        sources = jnp.where(is_real, rows.sources[owner], -1)
        return cls(jnp.stack(before[::-1], axis=1), sources)


class ReplayRows(NamedTuple):
    """Values that a pass over W rows leaves for the replay of those that are accepted.

    Arrays, or references to them, for the L layers of a pool, or for one layer (L is 1).
    """

    mixed: Any  # [L, W, C], channels before the convolution
    keys: Any  # [L, W, Hk, K]
    log_decays: Any  # f32 [L, W, Hv]
    # f32 [L, W, Hv, V], which ``delta_verify`` writes; None if nothing will be replayed
    deltas: Any = None

    @classmethod
    def zeros(cls, shape: tuple[int, int], heads: tuple[int, ...], dtype: Any) -> "ReplayRows":
        """Make rows of ``shape`` (L, W) and ``heads`` (Hk, K, Hv, V)."""
        key_heads, key_dim, value_heads, value_dim = heads
        num_channels = 2 * key_heads * key_dim + value_heads * value_dim
        return cls(
            jnp.zeros((*shape, num_channels), dtype),
            jnp.zeros((*shape, key_heads, key_dim), dtype),
            jnp.zeros((*shape, value_heads), jnp.float32),
            jnp.zeros((*shape, value_heads, value_dim), jnp.float32),
        )


class DeltaInputs(NamedTuple):
    """Inputs of the recurrence that no replay needs; arrays or references."""

    queries: Any  # [W, Hk, K] of length K ** -0.5
    values: Any  # [W, Hv, V]
    betas: Any  # f32 [W, Hv], from 0 to 1


class DeltaGates(NamedTuple):
    """Sources of the gates of each value head; arrays or references."""

    products: Any  # f32 [W, 2 Hv], those of beta, then those of the decay
    log_rates: Any  # f32 [Hv]
    biases: Any  # f32 [Hv]


def _silu(x: Array) -> Array:
    return x / (1.0 + jnp.exp(-x))


def _unit(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPSILON)


def _gates(of_beta: Array, of_decay: Array, log_rate: Array, bias: Array) -> tuple[Array, Array]:
    """The weight of a delta, and the logarithm of the factor that decays the state."""
    x = of_decay + bias
    softplus = jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
    return 1.0 / (1.0 + jnp.exp(-of_beta)), -jnp.exp(log_rate) * softplus


def _reference(
    mixed: Array,
    gates: DeltaGates,
    weights: Array,
    windows: Array,
    layer: int | Array,
    taps: Taps,
    heads: tuple[int, ...],
) -> tuple[DeltaInputs, Array, Array]:
    key_heads, key_dim, value_heads, value_dim = heads
    index, num_before = taps.rows, windows.shape[2]
    number = jnp.clip(num_before + index, 0, num_before - 1)
    window = windows[layer, jnp.maximum(taps.sources, 0)[:, None], number]
    window = jnp.where((taps.sources >= 0)[:, None, None], window, 0)
    before = jnp.where((index >= 0)[..., None], mixed[jnp.maximum(index, 0)], window)
    total = sum(
        before[:, j].astype(jnp.float32) * weights[:, j].astype(jnp.float32)
        for j in range(num_before)
    )
    total += mixed.astype(jnp.float32) * weights[:, num_before].astype(jnp.float32)
    size = key_heads * key_dim
    queries, keys, values = jnp.split(_silu(total), (size, 2 * size), axis=1)
    queries, keys = (_unit(x.reshape(-1, key_heads, key_dim)) for x in (queries, keys))
    betas, log_decays = _gates(
        gates.products[:, :value_heads],
        gates.products[:, value_heads:],
        gates.log_rates,
        gates.biases,
    )
    queries, values = queries * key_dim**-0.5, values.reshape(-1, value_heads, value_dim)
    inputs = DeltaInputs(queries.astype(mixed.dtype), values.astype(mixed.dtype), betas)
    return inputs, keys.astype(mixed.dtype), log_decays


def specjax_delta_inputs(*refs: Any) -> None:
    """Kernel body: one program per (tile of rows, head of queries, keys or values)."""
    layer_ref, mixed_ref, gates, weights_ref, windows_ref, taps, replay_in, replay, outputs = refs
    del replay_in
    (num_rows, key_heads, key_dim), num_before = outputs.queries.shape, windows_ref.shape[2]
    value_heads, value_dim = outputs.values.shape[1:]
    layer, head = layer_ref[0], pl.program_id(1)
    is_kept, place = replay.mixed is not None, layer % replay.keys.shape[0]
    row = pl.program_id(0) * HEIGHT + jnp.arange(HEIGHT, dtype=jnp.int32)
    # stores do not clip the row, because no two lanes of a store may have one index
    is_row, inner = row < num_rows, jnp.minimum(row, num_rows - 1)
    source = taps.sources[inner]

    def convolved(first_channel: Array, size: int) -> tuple[Array, Array, Array]:
        """A head's channels after the convolution, their places in a head and their mask."""
        lane = jnp.arange(power_of_two(size), dtype=jnp.int32)
        channel, shape = first_channel + lane, (HEIGHT, len(lane))
        is_lane = jnp.broadcast_to((lane < size)[None], shape)
        mask = is_row[:, None] & is_lane

        def weight(tap: int) -> Array:
            values = load(weights_ref.at[channel, tap], mask=lane < size, other=0)
            return values.astype(jnp.float32)[None]

        total = jnp.zeros(shape, jnp.float32)
        for j in range(num_before):
            index = taps.rows[inner, j]
            of_row = is_lane & (index >= 0)[:, None]
            of_window = is_lane & ((index < 0) & (source >= 0))[:, None]
            before = mixed_ref.at[jnp.maximum(index, 0)[:, None], channel[None]]
            values = load(before, mask=of_row, other=0)
            slot, number = jnp.maximum(source, 0), jnp.clip(num_before + index, 0, num_before - 1)
            window = windows_ref.at[layer, slot[:, None], number[:, None], channel[None]]
            stored = load(window, mask=of_window, other=0)
            total += jnp.where(of_row, values, stored).astype(jnp.float32) * weight(j)
        values = load(mixed_ref.at[inner[:, None], channel[None]], mask=is_lane, other=0)
        if is_kept:
            store(replay.mixed.at[place, row[:, None], channel[None]], values, mask=mask)
        return _silu(total + values.astype(jnp.float32) * weight(num_before)), lane, mask

    @pl.when(head < 2 * key_heads)
    def query_or_key() -> None:
        vectors, lane, mask = convolved(head * key_dim, key_dim)
        vectors, is_query = _unit(vectors), head < key_heads
        number = row[:, None], head % key_heads, lane[None]
        queries = (vectors * key_dim**-0.5).astype(outputs.queries.dtype)
        store(outputs.queries.at[number], queries, mask=mask & is_query)
        keys = vectors.astype(replay.keys.dtype)
        store(replay.keys.at[place, *number], keys, mask=mask & ~is_query)

    @pl.when(head >= 2 * key_heads)
    def value() -> None:
        number = head - 2 * key_heads
        first_channel = 2 * key_heads * key_dim + number * value_dim
        vectors, lane, mask = convolved(first_channel, value_dim)
        target = outputs.values.at[row[:, None], number, lane[None]]
        store(target, vectors.astype(outputs.values.dtype), mask=mask)
        of_beta, of_decay = (gates.products[inner, i * value_heads + number] for i in range(2))
        beta, log_decay = _gates(of_beta, of_decay, gates.log_rates[number], gates.biases[number])
        store(outputs.betas.at[row, number], beta, mask=is_row)
        store(replay.log_decays.at[place, row, number], log_decay, mask=is_row)


def delta_inputs(
    mixed: Array,
    gates: DeltaGates,
    weights: Array,
    windows: Array,
    layer: int | Array,
    taps: Taps,
    heads: tuple[int, ...],
    replay: ReplayRows | None = None,
    *,
    implementation: str | None = None,
) -> tuple[DeltaInputs, ReplayRows]:
    """Convolve the channels of W rows, normalise queries and keys, and compute the gates.

    All sums are float32. A row has the same bits in any pass.

    Args:
        mixed: ``[W, C]``, the channels of all rows.
        gates: what makes beta, ``sigmoid(product)``, and the logarithm of the decay,
            ``-exp(log_rate) * softplus(product + bias)``.
        weights: ``[C, J]``; the last tap multiplies the row itself.
        windows: ``[L, S, J - 1, C]`` in the dtype of ``mixed``.
        layer: the layer whose windows are read, and whose replay rows are written.
        taps: where the rows before each row are.
        heads: Hk, K, Hv and V.
        replay: rows of all layers, of which this layer's are written in place if it is donated;
            ``None`` makes rows of this layer alone, which share ``mixed``.

    Raises:
        ValueError: for mismatched shapes or an unknown implementation.
    """
    num_rows, (key_heads, key_dim, value_heads, value_dim) = len(mixed), heads
    num_channels = 2 * key_heads * key_dim + value_heads * value_dim
    shapes = {
        "mixed": (mixed.shape, (num_rows, num_channels)),
        "products of gates": (gates.products.shape, (num_rows, 2 * value_heads)),
        "weights": (weights.shape, (num_channels, windows.shape[2] + 1)),
        "windows": (windows.shape[3:], (num_channels,)),
        "taps": (taps.rows.shape, (num_rows, windows.shape[2])),
    }
    for name, (shape, expected) in shapes.items():
        if shape != expected:
            raise ValueError(f"{name} {shape} must be {expected} for heads {heads}")
    implementation = resolve(implementation)
    if implementation == "xla" or num_rows == 0:
        inputs, keys, log_decays = _reference(mixed, gates, weights, windows, layer, taps, heads)
        if replay is None:
            return inputs, ReplayRows(mixed[None], keys[None], log_decays[None])
        place = layer % len(replay.keys)
        return inputs, ReplayRows(
            replay.mixed.at[place].set(mixed),
            replay.keys.at[place].set(keys),
            replay.log_decays.at[place].set(log_decays),
            replay.deltas,
        )
    spec = jax.ShapeDtypeStruct
    outputs = DeltaInputs(
        spec((num_rows, key_heads, key_dim), mixed.dtype),
        spec((num_rows, value_heads, value_dim), mixed.dtype),
        spec((num_rows, value_heads), jnp.float32),
    )
    operands = layer_operand(layer), mixed, gates, weights, windows, taps
    of_keys = spec((1, num_rows, key_heads, key_dim), mixed.dtype)
    written = ReplayRows(None, of_keys, spec((1, num_rows, value_heads), jnp.float32))
    aliases, kept_rows = {}, None
    if replay is not None:
        kept_rows, first = replay._replace(deltas=None), len(jax.tree.leaves(operands))
        written = jax.tree.map(lambda x: spec(x.shape, x.dtype), kept_rows)
        aliases = {first + i: i for i in range(3)}
    written, inputs = triton_call(
        specjax_delta_inputs,
        grid=(pl.cdiv(num_rows, HEIGHT), 2 * key_heads + value_heads),
        out_shape=(written, outputs),
        num_warps=HEIGHT,
        implementation=implementation,
        input_output_aliases=aliases,
    )(*operands, kept_rows)
    if replay is None:
        return inputs, written._replace(mixed=mixed[None])
    return inputs, written._replace(deltas=replay.deltas)


def layer_operand(layer: int | Array) -> Array:
    return jnp.asarray(layer, jnp.int32).reshape(1)
