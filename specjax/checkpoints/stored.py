"""Tensors that files store in another layout than weights have, see ``Stored``."""

from collections.abc import Iterator

import numpy as np

from specjax.checkpoints.tensors import TensorInfo, TensorSource
from specjax.models.declare import Part, Recipes, Stored


def assembled(source: TensorSource, recipes: Recipes) -> TensorSource:
    """Offer the parts of recipes that a file has in another layout.

    Raises ValueError if the shape of a stored tensor is wrong.
    """
    parts = {part.name: (part, stored) for part, stored in _found(source, recipes)}
    if not parts:
        return source
    replaced = {name for _, stored in parts.values() for name in stored.shapes}
    infos = {name: info for name, info in source.infos.items() if name not in replaced}
    for name, (part, stored) in parts.items():
        for stored_name, shape in stored.shapes.items():
            if (info := source.infos[stored_name]).shape != shape:
                raise ValueError(
                    f"tensor {stored_name!r} in {info.path} has shape {info.shape}, but the "
                    f"configuration requires {shape}"
                )
        first = source.infos[next(iter(stored.shapes))]
        infos[name] = TensorInfo(part.shape, first.path, stored.dtype or first.dtype)

    def read(name: str) -> np.ndarray:
        if name not in parts:
            return source.read(name)
        _, stored = parts[name]
        try:
            return stored.make(*map(source.read, stored.shapes))
        except ValueError as error:
            names = " and ".join(map(repr, stored.shapes))
            raise ValueError(f"{source.path}: {names}: {error}") from error

    return TensorSource(source.path, infos, read)


def _found(source: TensorSource, recipes: Recipes) -> Iterator[tuple[Part, Stored]]:
    """The parts that a file lacks, and the tensors that it has instead."""
    for part in (part for recipe in recipes.values() for part in recipe.parts):
        if part.name in source.infos and source.infos[part.name].shape == part.shape:
            continue
        stored = next((x for x in part.made_of if x.shapes.keys() <= source.infos.keys()), None)
        if stored is not None:
            yield part, stored
