"""Saving and restoring converted weights with orbax.

A saved directory holds ``config.json`` (one of our configurations), ``weights/`` (an orbax
checkpoint of a plain dict of arrays by flat name) and, for a target, its tokenizer.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from specjax.config import DraftConfig, ModelConfig, RopeScaling
from specjax.json_file import read_json
from specjax.text.tokenizer import Tokenizer

C = TypeVar("C", ModelConfig, DraftConfig)
_KEY = "specjax_config"
_WEIGHTS = "weights"


def save_orbax(
    path: str | os.PathLike[str],
    config: ModelConfig | DraftConfig,
    weights: Mapping[str, Any],
    *,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write converted weights so that they load again without conversion.

    Args:
        path: directory to create or overwrite.
        config: of the target or draft head.
        weights: arrays by flat name.
        tokenizer: of a target, saved beside the weights.
    """
    from orbax.checkpoint import v1 as ocp

    directory = Path(path).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    ocp.save(directory / _WEIGHTS, dict(weights), overwrite=True)
    write_config(directory, config)
    if tokenizer is not None:
        tokenizer.save(directory)


def write_config(directory: Path, config: ModelConfig | DraftConfig) -> None:
    """Write the ``config.json`` of a saved directory."""
    body = {_KEY: type(config).__name__, **dataclasses.asdict(config)}
    (directory / "config.json").write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def is_orbax_directory(path: Path) -> bool:
    """Whether a directory was written by :func:`save_orbax`."""
    file = path / "config.json"
    return file.is_file() and _KEY in read_json(file)


def orbax_config(path: Path, kind: type[C]) -> C:
    """The configuration of a saved directory.

    Raises:
        ValueError: if it holds another kind of model or keys that the configuration lacks.
    """
    file = path / "config.json"
    body = read_json(file)
    found = body.pop(_KEY)
    if found != kind.__name__:
        raise ValueError(f"{file} holds a {found}, expected a {kind.__name__}")
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(set(body) - known):
        raise ValueError(f"{file} has unknown keys {unknown}; known: {sorted(known)}")
    if body.get("rope_scaling") is not None:
        body["rope_scaling"] = RopeScaling(**body["rope_scaling"])
    values: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in body.items()
    }
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{file} lacks a required key: {error}") from error


def load_orbax(path: Path, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, np.ndarray]:
    """Weights of a saved directory, cast to the dtypes of ``abstract``.

    Raises:
        ValueError: naming the tensor and both shapes if they do not fit, or if the checkpoint is
            incomplete.
    """
    from orbax.checkpoint import v1 as ocp

    directory = (path / _WEIGHTS).absolute()
    try:
        stored = ocp.metadata(directory).metadata
    except Exception as error:  # orbax raises several unrelated types
        raise ValueError(f"{directory} is not a complete orbax checkpoint: {error}") from error
    missing, unknown = sorted(set(abstract) - set(stored)), sorted(set(stored) - set(abstract))
    if missing or unknown:
        raise ValueError(
            f"{directory} does not fit its configuration: missing {missing}, unknown {unknown}"
        )
    for name, expected in abstract.items():
        if tuple(stored[name].shape) != expected.shape:
            raise ValueError(
                f"tensor {name!r} in {directory} has shape {tuple(stored[name].shape)}, but the "
                f"configuration asks for {expected.shape}"
            )
    # numpy placeholders make orbax return numpy arrays, off any device, cast as needed
    like = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in abstract.items()}
    return dict(ocp.load(directory, like))
