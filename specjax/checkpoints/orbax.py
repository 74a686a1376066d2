"""Saving and restoring converted weights with orbax.

A saved directory holds ``config.json`` (one of our configurations), ``weights/`` (an orbax
checkpoint of a plain dict of arrays by flat name) and, for a target, its tokenizer.
"""

import dataclasses
import json
import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import file_digest
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from specjax.config import DraftConfig, ModelConfig, RopeScaling, TransformerConfig
from specjax.json_file import Fields, Flag, Size, read_json
from specjax.models.registry import FAMILIES
from specjax.text.tokenizer import Tokenizer

C = TypeVar("C", ModelConfig, DraftConfig)
_KEY = "specjax_config"
_WEIGHTS = "weights"
_DIGESTS = "sha256.json"


def write_digests(folder: Path) -> None:
    """Store the digests of all files of a saved ``folder`` in it."""
    names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    (folder / _DIGESTS).write_text(json.dumps(_digests(folder, names)), encoding="utf-8")


def check_digests(folder: Path) -> None:
    """ValueError naming a file of ``folder`` that has changed since :func:`write_digests`."""
    if not (folder / _DIGESTS).is_file():
        raise ValueError(f"{folder / _DIGESTS} is missing; older versions saved none")
    expected = read_json(folder / _DIGESTS)
    for name, digest in _digests(folder, expected).items():
        if digest != expected[name]:
            raise ValueError(f"{folder / name} is damaged: it is not as it was saved")


def _digests(folder: Path, names: Collection[str]) -> dict[str, str | None]:
    """SHA-256 by name, ``None`` for a file that is missing."""

    def digest(name: str) -> str | None:
        if not (folder / name).is_file():
            return None
        with (folder / name).open("rb") as stream:
            return file_digest(stream, "sha256").hexdigest()

    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


def save_orbax(
    path: str | os.PathLike[str],
    config: ModelConfig | DraftConfig,
    weights: Mapping[str, Any],
    *,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write converted weights to a directory, from which they load without conversion.

    ``weights`` are arrays by flat name; a target's tokenizer is saved beside them.
    """
    from orbax.checkpoint import v1 as ocp

    directory = Path(path).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    ocp.save(directory / _WEIGHTS, dict(weights), overwrite=True)
    write_digests(directory / _WEIGHTS)
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
        raise ValueError(f"{file} holds a {found}, expected a {kind.__name__}")
    if "algorithm" in body:  # what the key was called at first
        body["checkpoint_format"] = {"EAGLE3": "eagle-3"}.get(str(body.pop("algorithm")), "eagle-1")
    return _build(kind, Fields(body, file))


def _build(kind: type[Any], body: Fields) -> Any:
    """A configuration of values that have the types of its fields."""
    known = {field.name: field.type for field in dataclasses.fields(kind)}
    if unknown := sorted(set(body.values) - set(known)):
        raise ValueError(f"{body.where} has unknown keys {unknown}; known: {sorted(known)}")
    kinds: dict[Any, Any] = {int: Size, int | None: Size, bool: Flag}
    kinds[RopeScaling | None] = dict[str, Any]
    values = {n: body.get(n, kinds.get(hint, hint)) for n, hint in known.items() if n in body}
    if "rope_scaling" in values:
        values["rope_scaling"] = _build(RopeScaling, body.fields("rope_scaling"))
    return body.build(kind, values)


def check_orbax(path: Path, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Compare what is stored with what the configuration asks for."""
    from orbax.checkpoint import v1 as ocp

    directory = (path / _WEIGHTS).absolute()
    try:
        stored = dict(ocp.metadata(directory).metadata)
    except Exception as error:  # orbax raises several unrelated types
        raise ValueError(f"{directory} is not a complete orbax checkpoint: {error}") from error
    missing, unknown = sorted(set(abstract) - set(stored)), sorted(set(stored) - set(abstract))
    if missing or unknown:
        raise ValueError(
            f"{directory} does not fit its config: missing {missing}, unknown {unknown}"
        )
    for name, expected in abstract.items():
        if (shape := tuple(stored[name].shape)) != expected.shape:
            raise ValueError(
                f"tensor {name!r} in {directory} has shape {shape}, but the configuration asks "
                f"for {expected.shape}"
            )


def load_orbax(path: Path, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, np.ndarray]:
    """Undamaged weights of a saved directory, cast to the dtypes of ``abstract``."""
    from orbax.checkpoint import v1 as ocp

    if (path / _WEIGHTS / _DIGESTS).is_file():  # older directories have none
        check_digests(path / _WEIGHTS)
    check_orbax(path, abstract)
    # numpy placeholders make orbax return numpy arrays, off any device, cast as needed
    like = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in abstract.items()}
    return dict(ocp.load((path / _WEIGHTS).absolute(), like))
