"""Split a network over the devices of a mesh: each has some heads, inner columns and tokens.

A function over a mesh runs once per device, with the own piece of every weight that is split and
the whole of all other values. Modules therefore have the sizes of one device. Products whose inputs
are split are added up over all devices.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

AXIS = "tp"  # of the mesh


@dataclass(frozen=True)
class Split:
    """How a weight is cut on ``axis``, where projections of these ``widths`` are joined.

    Each device has its share of every projection, so pieces are not contiguous if there are
    several. Shares are multiples of ``unit`` and of one size: zeros follow the end of a projection.
    If there are fewer units than devices, such as KV heads, neighbours store the same one. If the
    inputs of a quantised matrix are split, ``[P, out, J]``, a piece has that many ``parts`` of its
    own inputs, and pieces are joined on axis 0.
    """

    axis: int
    widths: tuple[int, ...]
    unit: int = 1
    parts: int | None = None

    def piece(self, weight: np.ndarray, device: int, count: int) -> np.ndarray:
        """The piece of a whole weight that device number ``device`` of ``count`` has."""
        if self.parts is not None:
            matrix = weight.swapaxes(0, 1).reshape(weight.shape[1], -1)
            inputs = replace(self, axis=1, parts=None).piece(matrix, device, count)
            return inputs.reshape(len(inputs), self.parts, -1).swapaxes(0, 1)
        pieces, start = [], 0
        for width in self.widths:
            begin, end = self._share(width, device, count)
            index = (slice(None),) * self.axis + (slice(start + begin, start + end),)
            pieces.append(weight[index])
            if missing := self._size(width, count) - (end - begin):
                shape = list(weight.shape)
                shape[self.axis] = missing
                pieces.append(np.zeros(shape, weight.dtype))
            start += width
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=self.axis)

    def stored(self, shape: tuple[int, ...], count: int) -> tuple[int, ...]:
        """The shape of the pieces of ``count`` devices, joined, of a weight with this shape."""
        if self.parts is not None:
            return count * self.parts, shape[1], self.widths[0] // count // self.parts
        sizes = list(shape)
        sizes[self.axis] = count * sum(self._size(width, count) for width in self.widths)
        return tuple(sizes)

    def _share(self, width: int, device: int, count: int) -> tuple[int, int]:
        units = -(-width // self.unit)
        size = -(-units // count)
        begin = min(device * size, units)
        if units < count:  # neighbours store the same one
            begin = device * units // count
        return min(begin * self.unit, width), min((begin + size) * self.unit, width)

    def _size(self, width: int, count: int) -> int:
        """The largest share."""
        begin, end = self._share(width, 0, count)
        return end - begin


def all_sum(x: Array, count: int) -> Array:
    """The sum of ``x`` over ``count`` devices, in its dtype; one device returns ``x``."""
    return x if count == 1 else jax.lax.psum(x, AXIS)


def once(x: Array, count: int) -> Array:
    """``x`` on the first of ``count`` devices, and zeros on others, which a sum leaves out."""
    return x if count == 1 else jnp.where(jax.lax.axis_index(AXIS) == 0, x, 0)


def all_columns(x: Array, count: int) -> Array:
    """Join the own columns ``[..., W]`` of ``count`` devices to ``[..., count * W]``."""
    return x if count == 1 else jax.lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True)


def rows_of(table: Array, index: Array, count: int) -> Array:
    """Rows ``[..., D]`` of a table ``[V, D]``, of which each device has an equal number of rows.

    An index outside the table reads the first or the last row.
    """
    if count == 1:
        return table.at[index].get(mode="clip")
    size = table.shape[0]
    place = jnp.clip(index, 0, count * size - 1) - jax.lax.axis_index(AXIS) * size
    is_own = (place >= 0) & (place < size)
    rows = jnp.where(is_own[..., None], table.at[place].get(mode="clip"), 0)
    return all_sum(rows, count)


def over_mesh(function: Any, mesh: jax.sharding.Mesh, common: tuple[Any, ...]) -> Any:
    """Run a function ``(*common, *inputs) -> (state, outputs)`` on every device of a mesh.

    ``common`` has the abstract leading arguments, placed as the devices hold them. The third one is
    the state. All other inputs and outputs are whole on each device, except rows that a later call
    of recurrent layers replays: a device has those of its own heads.
    """
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, common)
    whole = jax.sharding.PartitionSpec()

    def per_device(*inputs: Any) -> Any:
        of_inputs = (*specs, *[whole] * (len(inputs) - len(specs)))
        run = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=of_inputs,
            out_specs=(specs[2], whole),
            check_vma=False,  # kernels have no rules for it
        )
        return run(*inputs)

    per_device.__name__ = function.__name__
    return per_device
