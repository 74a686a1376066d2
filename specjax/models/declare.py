"""Declare caches, and weights: the tensors that fill each one, the axis to split, initial values.

A declaration of a weight is metadata of a variable. :class:`~specjax.models.flat.FlatModel` reads
both, so that loading, exporting, updates, quantised formats and KV pools need no other description
of a network.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.kernels.backend import WORD
from specjax.models.shards import Split
from specjax.models.weights import QuantArray, QuantLayout

# A quantised matrix X has its scales in X_scale, and for zero points -zero * scale in X_offset.
SCALE, OFFSET = "_scale", "_offset"
# standard deviation of random quantised values by their bits; their scale is divided by it
RANDOM_VALUES = {8: 24.0, 4: 2.0}


class Stored(NamedTuple):
    """Tensors of a file, with their shapes, and the function that makes a part of them."""

    shapes: Mapping[str, tuple[int, ...]]
    make: Callable[..., np.ndarray]
    dtype: str | None = None  # of the result, if not that of the first tensor


@dataclass(frozen=True)
class Part:
    """A checkpoint tensor that fills a slice of a weight; ``shape`` is that of the tensor.

    ``rows`` is the order in which the weight has the tensor's rows, if it differs. ``factor``, a
    power of two, multiplies it. Files may have the tensors of one of ``made_of`` instead.
    """

    name: str
    shape: tuple[int, ...]
    rows: np.ndarray | None = field(default=None, compare=False)
    factor: float = 1.0
    made_of: tuple[Stored, ...] = field(default=(), compare=False)

    def of(self, leaf: str, *inner: int, **changes: Any) -> "Part":
        """The tensor ``leaf`` of a projection, with further axes ``inner``."""
        return replace(self, name=f"{self.name}.{leaf}", shape=(*self.shape, *inner), **changes)

    def arranged(self, tensor: np.ndarray) -> np.ndarray:
        """The tensor with its rows in the order of the weight, times the factor."""
        ordered = tensor if self.rows is None else tensor[self.rows]
        return ordered if self.factor == 1.0 else ordered * np.asarray(self.factor, ordered.dtype)


@dataclass(frozen=True)
class Recipe:
    """How to build a weight: its parts are concatenated on the output axis.

    A transposed weight is ``[in, out]`` and consists of parts ``[out_i, in]``. Any other weight
    concatenates its parts unchanged on the first axis, and ``layout`` cuts the result if it belongs
    to a quantised matrix. ``dtype`` is the dtype of the weight.

    Some files have other tensors instead of the parts, those of one entry of ``stacks``: a stack
    ``[E, out, in]`` of each projection of E modules, or one of all projections of a module. The
    parts are then in the order of the modules.
    """

    # not compared: layers of one kind must have equal structures, so that one trace serves all
    parts: tuple[Part, ...] = field(compare=False)
    transpose: bool = False
    dtype: str = "float32"
    layout: QuantLayout | None = None
    stacks: tuple[tuple[str, ...], ...] = field(default=(), compare=False)
    # sizes of projections that a mesh cuts one by one, which files may join; empty: of the parts
    widths: tuple[int, ...] = ()
    unit: int = 1  # each device has a multiple of it, but for the last part of a projection
    axis: int | None = None  # that a mesh cuts, unless the weight is a matrix

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, before ``layout`` cuts it."""
        width, inner = sum(tensor.shape[0] for tensor in self.parts), self.parts[0].shape[1:]
        return (*inner, width) if self.transpose else (width, *inner)

    def split(self, kind: str, count: int) -> Split | None:
        """How ``count`` devices share the weight, for a ``kind`` as in :func:`weight`."""
        if kind == "in" and (layout := self.layout) is not None:
            groups = layout.parts * layout.groups
            # each device needs a scale of all inputs
            is_shared = self.shape[1] == groups == 1
            parts = math.gcd(layout.parts, groups // count)
            return None if is_shared else Split(0, self.shape[1:], parts=parts)
        is_transposed = self.transpose or self.layout is not None
        axis = int(is_transposed == (kind != "in")) if self.axis is None else self.axis
        of_parts = tuple(part.shape[0] for part in self.parts)
        sizes = (self.shape[axis],) if kind == "in" else of_parts
        return Split(axis, self.widths or sizes, self.unit)


Recipes = Mapping[str, Recipe]


def joined(name: str, tensors: Sequence[Part]) -> Part:
    """The rows of projections that are stored as one tensor; they have no factors."""
    starts = np.cumsum([0, *(tensor.shape[0] for tensor in tensors)])
    if all(x.rows is None for x in tensors):
        return Part(name, (int(starts[-1]),))
    orders = [np.arange(*x.shape) if x.rows is None else x.rows for x in tensors]
    pairs = zip(starts, orders, strict=False)
    return Part(name, (int(starts[-1]),), np.concatenate([start + order for start, order in pairs]))


def weight(
    stored: str | tuple[Part, ...],
    shape: tuple[int, ...],
    dtype: Any,
    *,
    split: str | None = None,
    mean: float = 0.0,
    stddev: float = 0.0,
    kind: type[nnx.Variable[Any]] = nnx.Param,
    **options: Any,
) -> Any:
    """Declare a weight: a variable with this shape and dtype, and no values.

    Args:
        stored: the tensors that fill it, or the name of one that has its shape.
        split: the axis that a mesh may cut: ``"out"`` or ``"in"`` of a matrix, between heads of
            attention; ``"vocab"``; ``None`` if each device needs all values.
        mean: mean of random initial values.
        stddev: their standard deviation.
        kind: class of the variable.
        options: those of :class:`Recipe`.
    """
    tensors = (Part(stored, shape),) if isinstance(stored, str) else stored
    metadata: dict[str, Any] = {"split": split, "mean": mean, "stddev": stddev}
    recipe = Recipe(tensors, **options)
    return kind(jax.ShapeDtypeStruct(shape, dtype), recipe=recipe, **metadata)


class Cache(NamedTuple):
    """Values that a layer keeps of a text. Layers with equal caches share a pool."""

    per_token: jax.ShapeDtypeStruct | None  # of one token, for example [2, KV, H]
    window: int | None = None  # number of last tokens that a row reads; None: all
    per_request: tuple[jax.ShapeDtypeStruct, ...] = ()  # of a text of any length
    # of the whole model, not of a layer: a pool after all others, with the pages of the first
    is_extra: bool = False
    # how many layers of the pool it fills, if its values of a token are those of several
    num_places: int = 1


def token_kv(dtype: jnp.dtype, kv_heads: int, dim: int) -> jax.ShapeDtypeStruct:
    """The key and value of a token as a layer stores them, see ``kernels/kv_format.py``."""
    if dtype.itemsize == 1:
        return jax.ShapeDtypeStruct((2, kv_heads, dim // 2), WORD)
    return jax.ShapeDtypeStruct((2, kv_heads, dim), dtype)


def pool_windows(caches: Sequence[Cache]) -> tuple[int, ...]:
    """The windows for which layers may have pools of their own, after the first pool."""
    return tuple(sorted({cache.window for cache in caches if cache.window is not None}))


def pool_layers(caches: Sequence[Cache], num_pools: int) -> tuple[list[int], ...]:
    """The caches of each pool of tokens, of which ``num_pools`` have pages of their own.

    The first has the layers without a window, or if its pages are the only ones, those that keep
    equal shapes of a token; other shapes have pools after it. Each extra cache has a pool. A layer
    is repeated for each of its places.
    """
    stored = ([i] * x.num_places for i, x in enumerate(caches) if x.per_token and not x.is_extra)
    layers = [i for places in stored for i in places]
    extra = ([i] for i, cache in enumerate(caches) if cache.is_extra)
    if num_pools == 1:  # in the order that pools for windows would have
        ordered = sorted(layers, key=lambda i: caches[i].window or 0)
        shapes = dict.fromkeys(caches[i].per_token for i in ordered) or {None: None}
        return (*([i for i in layers if caches[i].per_token == x] for x in shapes), *extra)
    windows = None, *pool_windows(caches)
    return (*([i for i in layers if caches[i].window == window] for window in windows), *extra)


def num_extra(caches: Sequence[Cache], num_pools: int) -> int:
    """Number of pools, after ``num_pools``, that have the pages of the first."""
    return len(pool_layers(caches, num_pools)) - num_pools


def num_whole(caches: Sequence[Cache]) -> int:
    """Number of the last pools, which are whole on each device of a mesh: those of routes."""
    return sum(cache.is_extra for cache in caches)


def pool_shapes(caches: Sequence[Cache], num_kv: Sequence[int]) -> tuple[Any, ...]:
    """Shapes ``[L, KV indices, *per_token]`` of pools with ``num_kv`` KV indices each.

    Extra pools follow, with as many as the first. A pool without layers is ``None``. Raises
    ValueError if its layers keep different shapes.
    """

    def shape(layers: Sequence[int], count: int) -> jax.ShapeDtypeStruct | None:
        tokens = [token for i in layers if (token := caches[i].per_token) is not None]
        if not tokens:
            return None
        token, *others = dict.fromkeys(tokens)
        if others:
            shapes = [each.shape for each in (token, *others)]
            raise ValueError(
                f"layers {list(layers)} share a KV pool but keep shapes {shapes} of a token; their "
                "mixers must declare equal ones"
            )
        return jax.ShapeDtypeStruct((len(layers), count, *token.shape), token.dtype)

    counts = [*num_kv, *[num_kv[0]] * num_extra(caches, len(num_kv))]
    return tuple(map(shape, pool_layers(caches, len(num_kv)), counts))


def request_layers(caches: Sequence[Cache]) -> list[int]:
    """The layers that keep something of each request, which share one pool."""
    return [i for i, cache in enumerate(caches) if cache.per_request]


def request_shapes(caches: Sequence[Cache], num_slots: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes ``[L, num_slots, *per_request]`` of the pool of requests; empty if no layer has one.

    Raises ValueError if layers keep different shapes, or values of tokens too.
    """
    for i in request_layers(caches):
        if caches[i].per_token is not None:
            raise ValueError(f"layer {i} keeps values of requests and of tokens; it may keep one")
    shapes = list(dict.fromkeys(caches[i].per_request for i in request_layers(caches)))
    if len(shapes) > 1:
        raise ValueError(
            f"layers {request_layers(caches)} keep different values of a request, {shapes}; their "
            "mixers must declare equal ones"
        )
    count = len(request_layers(caches))
    return tuple(
        jax.ShapeDtypeStruct((count, num_slots, *x.shape), x.dtype) for y in shapes for x in y
    )


class Leaf(NamedTuple):
    """An array of a network; a quantised matrix has two or three."""

    path: tuple[Any, ...]
    initial: tuple[float, float]  # mean and standard deviation of random values
    split: str | None
    recipe: Recipe | None  # None if the variable has no declaration


def leaves(state: Any) -> Iterator[Leaf]:
    """The arrays of a module's state, in the order in which JAX flattens it."""
    for path, variable in nnx.to_flat_state(state):
        stated, value = variable.get_metadata(), variable.get_value()
        mean, stddev = stated.get("mean", 0.0), stated.get("stddev", 0.0)
        split, recipe = stated.get("split"), stated.get("recipe")
        if not isinstance(value, QuantArray):
            if recipe is not None:
                recipe = replace(recipe, dtype=value.dtype.name)
            yield Leaf(path, (mean, stddev), split, recipe)
            continue
        spread = RANDOM_VALUES[value.format.bits]
        initial = {"values": (0.0, spread), "scale": (stddev / spread, 0.0), "offset": (0.0, 0.0)}
        for name in initial:
            if (array := getattr(value, name)) is not None:
                of_leaf = recipe and _quantised(recipe, name, array.dtype.name, value.layout)
                yield Leaf((*path, name), initial[name], split, of_leaf)


def _quantised(recipe: Recipe, leaf: str, dtype: str, layout: QuantLayout) -> Recipe:
    """The recipe of an array of a quantised matrix; its scales have the factors."""

    def part_of(tensor: Part) -> Part:
        if leaf == "values":
            return replace(tensor, factor=1.0)
        name = tensor.name + {"scale": SCALE, "offset": OFFSET}[leaf]
        shape = tensor.shape[0], layout.parts * layout.groups
        return replace(tensor, name=name, shape=shape, made_of=())

    stacks = recipe.stacks if leaf == "values" else ()
    parts = tuple(map(part_of, recipe.parts))
    joint: dict[str, Any] = {"widths": recipe.widths, "unit": recipe.unit}
    return Recipe(parts, dtype=dtype, layout=layout, stacks=stacks, **joint)
