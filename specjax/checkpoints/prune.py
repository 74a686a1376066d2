"""Smaller models out of larger ones: a target with fewer layers, for instance as a draft model."""

import dataclasses
import os
from collections.abc import Sequence

from specjax.checkpoints.orbax import save_orbax
from specjax.checkpoints.target import TargetCheckpoint
from specjax.checks import is_integer


def save_layers(
    path: str | os.PathLike[str], model: TargetCheckpoint, layers: Sequence[int]
) -> None:
    """Write a model that has only some of another one's layers, everything else as it is.

    Args:
        path: directory to create, which :func:`open_target` opens.
        model: whose weights and tokenizer are read.
        layers: indices of the layers to keep, ascending.

    Raises:
        ValueError: for layers that the model does not have, or weights that cannot be read.
    """
    count, kept = model.config.num_layers, list(layers)
    if (
        not kept
        or not all(map(is_integer, kept))
        or kept != sorted(set(kept))
        or not 0 <= kept[0] <= kept[-1] < count
    ):
        raise ValueError(f"layers={kept} must ascend, from 0 to {count - 1} at most")
    given = model.load_weights()
    weights = {name: weight for name, weight in given.items() if not name.startswith("layers.")}
    for place, layer in enumerate(kept):
        prefix = f"layers.{layer}."
        for name in given:
            if name.startswith(prefix):
                weights[f"layers.{place}.{name.removeprefix(prefix)}"] = given[name]
    config = dataclasses.replace(model.config, num_layers=len(kept))
    save_orbax(path, config, weights, tokenizer=model.load_tokenizer())
