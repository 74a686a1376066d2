"""Feed-forward experts of a mixture: each row goes through the k experts that its router chose.

A slot is one choice of a row: slot ``row * k + j`` is its j-th. If rows are many, slots are grouped
by expert first, so that the weights of an expert are read once for up to a tile of its rows. If
rows are few, each slot is a group, which saves a launch. Weights of other experts are not read.

A row has the same bits in any batch: each sum adds its inputs in ascending steps, and the size of a
step follows from the matrix only. Groups and tiles choose which rows share a program. Matrices of 4
and 8 bits need tiles of at most 32 rows for this, which only invariant implementations have.

Axes: R rows, k choices, S = R k slots, E experts, D hidden, I inner, G groups of inputs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from specjax.kernels.backend import (
    INVARIANT,
    load,
    power_of_two,
    resolve,
    row_dot,
    store,
    triton_call,
    widen,
)
from specjax.kernels.mxfp4 import PackedMatrix

Activation = Callable[[Array, Array], Array]
Body = Callable[[Array, Array], None]  # takes slots i32 [height], and whether each is live
Loop = Callable[[Body], None]

MIN_HEIGHT, MAX_HEIGHT = 16, 128  # rows per tile; tensor cores need 16
# Up to this height, products take the tensor cores' instructions for one warp. Those for four warps
# add the products with matrices of 8 bits in another order.
MAX_WARP_HEIGHT = 32
MAX_DEPTH_BYTES = 256  # of a row of inputs per loop step
SHARED_BYTES = 192 * 1024  # of shared memory for loads in flight
MAX_LANES = 16  # programs that share the tiles of an expert
# Up to as many rows, slots are not grouped: they would rarely share an expert, and a plain round of
# one request has two rows, one of which is padding. Drafts do share: 4 rows of a chain read 11 of
# 128 experts, not 32, and took as long as 8 grouped rows (H200, random weights).
MAX_LONE_ROWS = 2
MAX_CHUNK = 1024  # slots that a program groups at a time
# Above it, partial sums have the dtype of x: they are k times as large as the rows.
MAX_FLOAT32_ROWS = 512


@dataclass(frozen=True)
class ExpertTiles:
    """Launch shape; sizes are powers of two.

    A width that does not divide its axis is replaced by the largest power of two that does.
    """

    height: int  # slots per tile
    inner_width: int  # gates, and as many ups, per tile
    width: int  # outputs per tile
    lanes: int  # programs that share the tiles of an expert
    num_warps: int  # warps (of 32 threads) per program
    max_stages: int  # loads in flight in the software pipeline, if shared memory holds them

    @classmethod
    def choose(
        cls, num_rows: int, top_k: int, num_experts: int, max_height: int, *, is_packed: bool
    ) -> "ExpertTiles":
        """Tiles by the mean number of rows of an expert.

        For layers of Qwen3-30B-A3B (H200), they were within 5 % of the fastest of 24 to 48 in
        bfloat16 with 1 to 8,192 rows, and within 9 % of 8 to 10 in FP8 with 1 to 2,048. For layers
        of gpt-oss-20b, they were within 4 % of 12 to 23 in MXFP4 with 2 to 512.
        """
        mean = num_rows * top_k / num_experts
        # half of the experts have more rows than the mean
        height = min(max_height, max(MIN_HEIGHT, power_of_two(math.ceil(1.5 * mean))))
        # programs that run at the same time read the same weights from the L2 cache
        lanes = min(MAX_LANES, max(1, math.ceil(mean / height)))
        if is_packed:
            if num_rows <= MAX_LONE_ROWS:
                return cls(MIN_HEIGHT, 32, 32, 1, 2, 4)
            if height == MIN_HEIGHT:
                return cls(height, 32, 64, lanes, 2, 3)
            # the matrix is the first operand, so that four warps take instructions for four warps
            return cls(height, 64, 64, lanes, 4 if max_height > MAX_WARP_HEIGHT else 2, 3)
        if height > MAX_WARP_HEIGHT:
            return cls(height, 64, 128, lanes, 8 if height == MAX_HEIGHT else 4, 3)
        return cls(height, 64 if num_rows > 32 else 32, 64, lanes, 4, 4)


class _Matrix(NamedTuple):
    """The matrices ``[E, outputs, inputs]`` of all experts, or that of one; arrays or references.

    A scale is for ``group_size`` inputs of an output; the last group may have fewer.
    """

    values: Any
    scales: Any  # [E, outputs, G] or None
    biases: Any  # [E, outputs] or None

    @property
    def num_outputs(self) -> int:
        return self.values.shape[1]

    @property
    def group_size(self) -> int:
        size, num_groups = self.values.shape[-1], self.num_groups
        return power_of_two(pl.cdiv(size, num_groups)) if num_groups > 1 else size

    @property
    def num_groups(self) -> int:
        return 1 if self.scales is None else self.scales.shape[-1]

    def depth(self, itemsize: int) -> int:
        """Inputs per loop step; the number of rows does not choose it."""
        return min(_divisor(MAX_DEPTH_BYTES // itemsize, self.values.shape[-1]), self.group_size)

    def step_bytes(self, height: int, num_outputs: int, itemsize: int) -> int:
        """Bytes that a loop step reads for a tile of rows and outputs."""
        per_input = num_outputs * self.values.dtype.itemsize + height * itemsize
        return per_input * self.depth(itemsize)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError if they are not matrices ``[E, outputs, inputs]`` of this shape."""
        values, scales, group = self.values, self.scales, self.group_size
        if values.shape != shape:
            raise ValueError(f"{name} {values.shape} must be {shape}")
        if values.dtype.itemsize == 1 and 2**31 <= values.size <= 2**32:
            # JAX uses 32-bit offsets up to 2**32 bytes, and Triton reads them as signed numbers
            raise ValueError(f"{name} has {values.size} values of 8 bits; the limit is 2**31 - 1")
        counts = {1, pl.cdiv(shape[2], group)}
        if scales is not None and (
            scales.shape not in {(*shape[:2], count) for count in counts} or group < 16
        ):
            raise ValueError(
                f"the scales {scales.shape} of {name} must be {(*shape[:2], 'G')}, each for all "
                f"inputs or for 2^n of them, at least 16"
            )

    def product(self, x: Array) -> Array:
        """Products f32 of rows ``[R, inputs]`` with the matrix of one expert, by XLA."""
        matrix = self.values.astype(jnp.float32)
        if self.scales is not None:
            scales = jnp.repeat(self.scales.astype(jnp.float32), self.group_size, axis=1)
            matrix = matrix * scales[:, : matrix.shape[1]]
        return jnp.matmul(x.astype(jnp.float32), matrix.T, precision=jax.lax.Precision.HIGHEST)

    def products(
        self,
        x_ref: Any,
        rows: Array,
        is_live: Array,
        expert: Array,
        outputs: tuple[Array, ...],
        implementation: str,
    ) -> list[Array]:
        """Products f32 ``[height, width]`` of rows with some outputs of an expert's matrix."""
        depth, size = self.depth(x_ref.dtype.itemsize), self.values.shape[2]
        mask = jnp.broadcast_to(is_live[:, None], (len(rows), depth))

        def scale_of(columns: Array, group: Array | int) -> Array:
            return self.scales[expert, columns, group].astype(jnp.float32)[None]

        def step(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            inputs = i * depth + jnp.arange(depth, dtype=jnp.int32)
            lhs = load(x_ref.at[rows[:, None], inputs[None, :]], mask=mask, other=0.0)
            totals = list(sums)
            for j, columns in enumerate(outputs):
                # scales are read before the product, which hides their latency
                group = i * depth // self.group_size
                scale = scale_of(columns, group) if self.num_groups > 1 else None
                stored = self.values[expert, columns[:, None], inputs[None, :]]
                product = row_dot(lhs, widen(stored, lhs.dtype, implementation), transpose=True)
                totals[j] += product if scale is None else product * scale
            return tuple(totals)

        zeros = (jnp.zeros((len(rows), len(outputs[0])), jnp.float32),) * len(outputs)
        sums = jax.lax.fori_loop(0, size // depth, step, zeros)
        if self.scales is None or self.num_groups > 1:
            return list(sums)
        return [x * scale_of(columns, 0) for x, columns in zip(sums, outputs, strict=True)]


Matrices: TypeAlias = _Matrix | PackedMatrix


def _divisor(limit: int, size: int) -> int:
    """The largest power of two up to ``limit``, which is one, that divides ``size``."""
    return min(limit, size & -size)


def _reference(
    x: Array,
    experts: Array,
    weights: Array,
    matrices: tuple[Matrices, Matrices],
    activation: Activation,
    dtype: jnp.dtype | type,
) -> Array:
    """All rows go through one expert after the other, and those that chose it keep the result."""

    def product(matrix: Matrices, x: Array) -> Array:
        sums = matrix.product(x)
        return sums if matrix.biases is None else sums + matrix.biases.astype(jnp.float32)

    def step(sums: Array, inputs: tuple[Array, Matrices, Matrices]) -> tuple[Array, None]:
        expert, matrix_in, matrix_out = inputs
        hidden = activation(*jnp.split(product(matrix_in, x), 2, axis=1)).astype(x.dtype)
        out = (product(matrix_out, hidden) * weights.T[..., None]).astype(dtype)
        return jnp.where((experts.T == expert)[..., None], out, sums), None

    sums = jnp.zeros((*experts.T.shape, x.shape[1]), dtype)
    numbers = jnp.arange(matrices[0].values.shape[0], dtype=jnp.int32)
    return jax.lax.scan(step, sums, (numbers, *matrices))[0]


def specjax_group_rows(
    experts_ref: Any, slots_ref: Any, starts_ref: Any, *, num_experts: int, chunk: int
) -> None:
    """Kernel body: program e lists the slots that chose expert e, in ascending order.

    Program E lists the slots without an expert, which are the last.
    """
    number, num_slots = pl.program_id(0), experts_ref.shape[0]
    lane = jnp.arange(chunk, dtype=jnp.int32)

    def group_of(slot: Array) -> Array:
        inside = slot < num_slots
        expert = load(experts_ref.at[slot], mask=inside, other=0)
        is_expert = (expert >= 0) & (expert < num_experts)
        return jnp.where(inside, jnp.where(is_expert, expert, num_experts), num_experts + 1)

    def count(i: Array, total: Array) -> Array:
        return total + jnp.sum((group_of(i * chunk + lane) < number).astype(jnp.int32))

    def write(i: Array, start: Array) -> Array:
        slot = i * chunk + lane
        is_own = group_of(slot) == number
        place = start + jnp.cumsum(is_own.astype(jnp.int32)) - 1
        # other lanes have indices after the list, so no index occurs twice
        store(slots_ref.at[jnp.where(is_own, place, num_slots + lane)], slot, mask=is_own)
        return start + jnp.sum(is_own.astype(jnp.int32))

    num_chunks = pl.cdiv(num_slots, chunk)
    start = jax.lax.fori_loop(0, num_chunks, count, jnp.int32(0))
    jax.lax.fori_loop(0, num_chunks, write, start)
    starts_ref[number] = start


def _program(
    groups: tuple[Any, ...], num_experts: int, num_slots: int, width: int, tiles: ExpertTiles
) -> tuple[Array, Array, Loop, Loop]:
    """The expert and columns of this program, and loops over slots with and without an expert.

    ``groups`` are the lists of ``specjax_group_rows``, or only the experts of all slots, each of
    which is then a group. A loop calls ``body(slot, is_live)`` for tiles, both ``[height]``. Slots
    that are not live are numbered after the last one. They are neither read nor written.
    """
    group, column, lane, lanes = pl.program_id(0), pl.program_id(1), jnp.int32(0), tiles.lanes
    if lanes > 1:
        # the lanes of a group, which share weights, run at the same time
        group, column, lane = column, group // lanes, group % lanes
    offset = jnp.arange(tiles.height, dtype=jnp.int32)

    def loop(start: Array, end: Any, lane: Array, lanes: int, body: Body) -> None:
        def step(i: Array, _: None) -> None:
            slot = start + (i * lanes + lane) * tiles.height + offset
            is_live = slot < end
            if len(groups) > 1:
                slot = load(groups[0].at[slot], mask=is_live, other=0)
            body(jnp.where(is_live, slot, num_slots + offset), is_live)

        num_tiles = pl.cdiv(end - start, tiles.height)
        jax.lax.fori_loop(0, pl.cdiv(num_tiles - lane, lanes), step, None)

    columns = column * width + jnp.arange(width, dtype=jnp.int32)
    if len(groups) == 1:
        expert = groups[0][group]
        end = group + ((expert >= 0) & (expert < num_experts)).astype(jnp.int32)
        spans: Any = (group, end, lane, 1), (end, group + 1, lane, 1)
    else:
        expert, starts = group, groups[1]
        spans = (
            (starts[group], starts[group + 1], lane, lanes),
            # all programs of these columns take turns
            (starts[num_experts], num_slots, group * lanes + lane, num_experts * lanes),
        )
    return expert, columns, partial(loop, *spans[0]), partial(loop, *spans[1])


def _products(
    x_ref: Any,
    rows: Array,
    is_live: Array,
    matrix: Matrices,
    expert: Array,
    outputs: tuple[Array, ...],
    implementation: str,
) -> list[Array]:
    """Products f32 ``[height, width]`` of rows with some outputs of an expert, with biases."""
    sums = matrix.products(x_ref, rows, is_live, expert, outputs, implementation)
    if matrix.biases is None:
        return sums
    biases = [matrix.biases[expert, columns].astype(jnp.float32) for columns in outputs]
    return [x + bias[None] for x, bias in zip(sums, biases, strict=True)]


def specjax_experts_in(
    *refs: Any, tiles: ExpertTiles, activation: Activation, implementation: str
) -> None:
    """Kernel body: activations of gate and up for the slots of a group, in some inner columns.

    Slots without an expert are not written, and nothing reads them.
    """
    x_ref, matrix, groups, hidden_ref = refs
    num_slots, inner = hidden_ref.shape
    top_k, num_experts = num_slots // x_ref.shape[0], matrix.values.shape[0]
    width = _divisor(tiles.inner_width, inner)
    expert, columns, with_expert, _ = _program(groups, num_experts, num_slots, width, tiles)

    def body(slot: Array, is_live: Array) -> None:
        outputs = columns, inner + columns
        rows = slot // top_k
        gate, up = _products(x_ref, rows, is_live, matrix, expert, outputs, implementation)
        mask = jnp.broadcast_to(is_live[:, None], gate.shape)
        hidden = activation(gate, up).astype(hidden_ref.dtype)
        store(hidden_ref.at[slot[:, None], columns[None, :]], hidden, mask=mask)

    with_expert(body)


def specjax_experts_out(*refs: Any, tiles: ExpertTiles, implementation: str) -> None:
    """Kernel body: weighted outputs for the slots of a group, zeros for those without an expert."""
    hidden_ref, weights_ref, matrix, groups, out_ref = refs
    (top_k, _, size), num_slots = out_ref.shape, hidden_ref.shape[0]
    width = _divisor(tiles.width, size)
    expert, columns, with_expert, without_expert = _program(
        groups, matrix.values.shape[0], num_slots, width, tiles
    )

    def write(slot: Array, is_live: Array, values: Array) -> None:
        place = (slot % top_k)[:, None], (slot // top_k)[:, None], columns[None, :]
        mask = jnp.broadcast_to(is_live[:, None], values.shape)
        store(out_ref.at[place], values.astype(out_ref.dtype), mask=mask)

    def body(slot: Array, is_live: Array) -> None:
        inputs = hidden_ref, slot, is_live, matrix, expert, (columns,)
        (sums,) = _products(*inputs, implementation)
        write(slot, is_live, sums * load(weights_ref.at[slot], mask=is_live, other=0.0)[:, None])

    with_expert(body)
    without_expert(partial(write, values=jnp.zeros((tiles.height, width), jnp.float32)))


def _check(x: Array, experts: Array, weights: Array, *matrices: Matrices) -> None:
    """Raise ValueError if shapes do not fit, or if the kernels do not support a size."""
    (num_rows, size), num_outputs = x.shape, matrices[0].num_outputs
    num_experts = matrices[0].values.shape[0]
    if experts.shape != weights.shape or experts.shape[0] != num_rows:
        raise ValueError(
            f"experts {experts.shape} and weights {weights.shape} must be [R, k]; x is {x.shape}"
        )
    shapes = (num_experts, num_outputs, size), (num_experts, size, num_outputs // 2)
    for name, shape, matrix in zip(("w_in", "w_out"), shapes, matrices, strict=True):
        matrix.check(name, shape)
        if matrix.biases is not None and matrix.biases.shape != shape[:2]:
            raise ValueError(f"the biases {matrix.biases.shape} of {name} must be {shape[:2]}")


def grouped_experts(
    x: Array,
    experts: Array,
    weights: Array,
    w_in: Array,
    w_out: Array,
    *,
    activation: Activation,
    scales: tuple[Array, Array] | None = None,
    biases: tuple[Array, Array] | None = None,
    implementation: str | None = None,
    tiles: ExpertTiles | None = None,
) -> Array:
    """Weighted outputs of the experts that each row chose, as partial sums.

    Args:
        x: ``[R, D]``.
        experts: i32 ``[R, k]``; -1, and any other number outside ``[0, E)``, chooses none.
        weights: f32 ``[R, k]``, by which outputs are multiplied.
        w_in: ``[E, 2 I, D]``, the rows of gate before those of up. Values are cast to the dtype of
            ``x``, also those of 8 bits.
        w_out: ``[E, D, I]``. Both may be words of MXFP4 instead, as ``mxfp4.pack`` makes them.
        activation: maps gate and up, f32 of equal shape, to f32. It must be hashable.
        scales: of ``w_in`` and ``w_out``, ``[E, outputs, G]``. A scale is for all inputs if G is 1,
            and otherwise for 2^n inputs, of which the last group may have fewer. ``pack_scales``
            makes those of MXFP4.
        biases: of ``w_in`` and ``w_out``, ``[E, 2 I]`` and ``[E, D]``. The weights multiply the
            latter too.
        tiles: launch shape of the Pallas kernels; ``None`` chooses one.

    Returns:
        ``[k, R, D]``: added in ascending order, they are the output of the mixture. Entries of no
        expert are zeros. The dtype is float32 up to 512 rows and in invariant implementations, and
        that of ``x`` otherwise.

    Raises:
        ValueError: for shapes that do not fit, and in invariant implementations for a D or I that
            is not a multiple of 16; with such sizes, XLA computes the others.
    """
    is_invariant = implementation in INVARIANT
    is_long = len(x) > MAX_FLOAT32_ROWS and not is_invariant
    dtype = x.dtype if is_long else jnp.dtype(jnp.float32)
    implementation = resolve(implementation)
    leaves = (w_in, w_out), scales or (None, None), biases or (None, None)
    is_packed = w_in.dtype == jnp.uint16
    form: Any = PackedMatrix if is_packed else _Matrix
    matrix_in, matrix_out = (form(*matrix) for matrix in zip(*leaves, strict=True))
    _check(x, experts, weights, matrix_in, matrix_out)
    (num_rows, size), (num_slots, top_k) = x.shape, (experts.size, experts.shape[1])
    num_experts, inner = len(w_out), matrix_in.num_outputs // 2
    fits = size % 16 == inner % 16 == 0
    if is_invariant and not fits:
        raise ValueError(f"{size=} and {inner=} of experts must be multiples of 16")
    if implementation == "xla" or num_slots == 0 or not fits:
        return _reference(x, experts, weights, (matrix_in, matrix_out), activation, dtype)
    if tiles is None:
        is_narrow = is_packed or w_in.dtype.itemsize == 1
        limit = MAX_WARP_HEIGHT if is_invariant and is_narrow else MAX_HEIGHT
        tiles = ExpertTiles.choose(num_rows, top_k, num_experts, limit, is_packed=is_packed)
    groups: tuple[Array, ...] = (experts.reshape(-1),)
    is_grouped = num_rows > MAX_LONE_ROWS
    num_groups = num_experts if is_grouped else num_slots
    if is_grouped:
        lengths = num_slots, num_experts + 1
        chunk = min(MAX_CHUNK, max(16, power_of_two(num_slots)))
        groups = triton_call(
            partial(specjax_group_rows, num_experts=num_experts, chunk=chunk),
            grid=(num_experts + 1,),
            out_shape=tuple(jax.ShapeDtypeStruct((length,), jnp.int32) for length in lengths),
            num_warps=4,
            implementation=implementation,
        )(*groups)

    def launch(
        body: Any, inputs: tuple[Array, ...], matrix: Matrices, out: Any, width: int
    ) -> Array:
        width = _divisor(width, out.shape[-1])
        num_tiles, lanes = out.shape[-1] // width, tiles.lanes
        # of gate and up, two tiles of outputs
        outputs = matrix.num_outputs // num_tiles
        step_bytes = matrix.step_bytes(tiles.height, outputs, x.dtype.itemsize)
        return triton_call(
            partial(body, tiles=tiles, implementation=implementation),
            grid=(num_groups, num_tiles) if lanes == 1 else (num_tiles * lanes, num_groups),
            out_shape=out,
            num_warps=tiles.num_warps,
            num_stages=max(1, min(tiles.max_stages, SHARED_BYTES // step_bytes)),
            implementation=implementation,
        )(*inputs, matrix, groups)

    out = jax.ShapeDtypeStruct((num_slots, inner), x.dtype)
    body = partial(specjax_experts_in, activation=activation)
    hidden = launch(body, (x,), matrix_in, out, tiles.inner_width)
    out = jax.ShapeDtypeStruct((top_k, num_rows, size), dtype)
    return launch(specjax_experts_out, (hidden, weights.reshape(-1)), matrix_out, out, tiles.width)
