"""Save and restore converted weights with orbax.

A saved directory contains ``config.json`` (our own format), ``weights/`` (an orbax checkpoint that
holds a dict of arrays by the model's names) and, for a target, its tokenizer.
"""

import dataclasses
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from specjax.checkpoints.digests import WEIGHTS, write_digests
from specjax.checkpoints.tensors import TensorInfo, TensorSource
from specjax.config import BlockConfig, DraftConfig, ModelConfig, TransformerConfig
from specjax.json_file import Fields, read_json
from specjax.models.registry import FAMILIES
from specjax.text.tokenizer import Tokenizer

C = TypeVar("C", ModelConfig, DraftConfig, BlockConfig)
_KEY = "specjax_config"


def save_orbax(
    path: str | os.PathLike[str],
    config: ModelConfig | DraftConfig | BlockConfig,
    weights: Mapping[str, Any],
    *,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write configuration, weights (by the model's names) and a target's tokenizer."""
    from orbax.checkpoint import v1 as ocp

    directory = Path(path).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    ocp.save(directory / WEIGHTS, dict(weights), overwrite=True)
    write_digests(directory / WEIGHTS)
    write_config(directory, config)
    if tokenizer is not None:
        tokenizer.save(directory)


def write_config(directory: Path, config: TransformerConfig) -> None:
    body = {_KEY: type(config).__name__, **dataclasses.asdict(config)}
    (directory / "config.json").write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def is_orbax_directory(path: Path) -> bool:
    return _KEY in Fields.read_if_there(path / "config.json")


def orbax_config(path: Path, kind: type[C]) -> C:
    file = path / "config.json"
    body = read_json(file)
    found = body.pop(_KEY)
    family = FAMILIES.get(str(body.get("model_type")))
    if kind is ModelConfig and family is not None:
        kind = family.config  # type: ignore[assignment]
    if found != kind.__name__:
        raise ValueError(f"{file} contains a {found}; expected a {kind.__name__}")
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(set(body) - known):
        raise ValueError(f"{file} has unknown keys {unknown}; known: {sorted(known)}")
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{file}: {error}") from None


def orbax_source(path: Path) -> TensorSource:
    """Return the weights in a saved directory; the first read of one loads all of them."""
    from orbax.checkpoint import v1 as ocp

    directory = (path / WEIGHTS).absolute()
    try:
        infos = {
            name: TensorInfo(tuple(found.shape), directory, np.dtype(found.dtype).name)
            for name, found in ocp.metadata(directory).metadata.items()
        }
    except Exception as error:  # orbax raises several unrelated types
        raise ValueError(f"{directory} is not a complete orbax checkpoint: {error}") from error
    weights: dict[str, np.ndarray] = {}
    lock = threading.Lock()

    def read(name: str) -> np.ndarray:
        with lock:
            if not weights:
                # numpy placeholders make orbax return numpy arrays in host memory
                like = {name: np.empty(info.shape, info.dtype) for name, info in infos.items()}
                weights.update(ocp.load(directory, like))
            return weights[name]

    return TensorSource(directory, infos, read, is_flat=True)
