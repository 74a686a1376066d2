"""Stacked tensors: files that have the matrices of a layer's experts as slices of one tensor."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from threading import Lock
from typing import NamedTuple

import numpy as np

from specjax.checkpoints.quantization import SUFFIXES
from specjax.checkpoints.stored import assembled
from specjax.checkpoints.tensors import TensorInfo, TensorSource
from specjax.models.declare import Part, Recipe, Recipes


class _Slice(NamedTuple):
    stack: str
    info: TensorInfo  # of the slice
    cut: tuple[int | slice, ...]  # of the stack


def unstacked(source: TensorSource, recipes: Recipes) -> TensorSource:
    """Offer slices of stacked tensors under the names that recipes use.

    The scales of quantised stacks are cut like their values, in proportion. A stack is in memory
    from the first to the last of its slices that is read. Raises ValueError if its shape is wrong.
    Parts that are made of other tensors are offered too, see :func:`assembled`.
    """
    source = assembled(source, recipes)
    slices = {name: x for recipe in recipes.values() for name, x in _slices(source, recipe)}
    if not slices:
        return source
    uses = Counter(x.stack for x in slices.values())
    infos = {name: info for name, info in source.infos.items() if name not in uses}
    infos |= {name: x.info for name, x in slices.items()}
    locks, held, remaining = {x: Lock() for x in uses}, dict[str, np.ndarray](), dict(uses)

    def read(name: str) -> np.ndarray:
        if name not in slices:
            return source.read(name)
        stack, _, cut = slices[name]
        with locks[stack]:
            tensor = held[stack] if stack in held else held.setdefault(stack, source.read(stack))
            remaining[stack] -= 1
            if not remaining[stack]:
                del held[stack]
                remaining[stack] = uses[stack]
        return tensor[cut]

    return TensorSource(source.path, infos, read)


def _slices(source: TensorSource, recipe: Recipe) -> Iterator[tuple[str, _Slice]]:
    """The slices, by the names of a recipe's parts, of the stacks that a file has instead."""
    if not recipe.stacks or recipe.parts[0].name in source.infos:
        return
    width = max(map(len, recipe.stacks))  # projections of a module
    modules = [recipe.parts[i : i + width] for i in range(0, len(recipe.parts), width)]
    for names in recipe.stacks:
        for column, name in enumerate(names):
            columns = slice(column, column + 1) if len(names) == width else slice(None)
            for ending in ("", *SUFFIXES):
                info = source.infos.get(name + ending)
                if info is None:
                    continue
                if len(recipe.parts) == 1 and len(info.shape) < 3:  # another name of the tensor
                    yield recipe.parts[0].name + ending, _Slice(name + ending, info, ())
                    continue
                stack = [module[columns] for module in modules]
                yield from _slices_of(name + ending, info, stack, ending)


def _slices_of(
    name: str, info: TensorInfo, modules: Sequence[tuple[Part, ...]], ending: str
) -> Iterator[tuple[str, _Slice]]:
    """The slices of one stack, which has a matrix of all ``modules``' parts, one below the other.

    The ``ending`` of its name is that of scales, or nothing.
    """
    shape = (len(modules), sum(part.shape[0] for part in modules[0]), modules[0][0].shape[1])
    for number, module in enumerate(modules):
        for part, stop in zip(module, accumulate(part.shape[0] for part in module), strict=True):
            rows = slice(stop - part.shape[0], stop)
            cut = _cut(name, info, shape, number, rows, is_scale=bool(ending))
            yield part.name + ending, cut


def _cut(
    name: str,
    info: TensorInfo,
    shape: tuple[int, int, int],
    number: int,
    rows: slice,
    *,
    is_scale: bool,
) -> _Slice:
    """Rows of a matrix of a stack, which must have this ``shape``, or of its scales."""
    # scales may be of several outputs and inputs
    count, size = info.shape[1:] if is_scale and len(info.shape) == 3 else shape[1:]
    start, stop = (row * count / shape[1] for row in (rows.start, rows.stop))
    if info.shape != (shape[0], count, size) or start % 1 or stop % 1:
        raise ValueError(
            f"tensor {name!r} in {info.path} has shape {info.shape}, but the configuration "
            f"requires {'scales of ' * is_scale}{shape}"
        )
    rows = slice(int(start), int(stop))
    cut = TensorInfo((rows.stop - rows.start, size), info.path, info.dtype)
    return _Slice(name, cut, (number, rows))
