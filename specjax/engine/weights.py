"""Other weights for a running engine: under which names, what fits, and how they are put in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checkpoints import DraftCheckpoint, TargetCheckpoint, open_draft, open_target
from specjax.checkpoints.assemble import Recipe, make_weight
from specjax.checkpoints.draft import check_vocabulary
from specjax.checkpoints.draft_names import DraftSource, canonical_name, draft_recipes
from specjax.checkpoints.names import target_recipes
from specjax.checkpoints.tensors import TensorInfo
from specjax.models.networks import Networks
from specjax.runtime.runner import ModelRunner


@dataclass(frozen=True)
class NewWeights:
    """Weights by flat name that fit the running ones; those not named stay."""

    target: Mapping[str, Any]
    draft: Mapping[str, Any]


def weights_from_disk(
    target: TargetCheckpoint,
    draft: DraftCheckpoint | None,
    model_path: str | PathLike[str] | None,
    draft_path: str | PathLike[str] | None,
    *,
    draft_rope_theta: float | None,
) -> tuple[TargetCheckpoint, DraftCheckpoint | None, NewWeights]:
    """Read other checkpoints of the same configurations.

    Args:
        target: the running target.
        draft: the running draft head, if there is one.
        model_path: in the place of the target, ``None`` to keep it.
        draft_path: in the place of the draft head, ``None`` to keep it.
        draft_rope_theta: the rotary base that the engine was told to use for its head.

    Returns:
        Target, draft head and weights to go on with.

    Raises:
        ValueError: if a checkpoint cannot be read, or has another configuration.
    """
    if model_path is None and draft_path is None:
        raise ValueError("give model_path, draft_path or both")
    new_target, new_draft = target, draft
    if model_path is not None:
        new_target = open_target(model_path, dtype=target.config.dtype)
        _check_same_config(new_target, target)
    if draft_path is not None:
        if draft is None:
            raise ValueError(
                f"draft_path={draft_path!r}, but the engine decodes plainly; set "
                "speculative_algorithm at its start"
            )
        new_draft = open_draft(
            draft_path, new_target, algorithm=draft.config.algorithm, rope_theta=draft_rope_theta
        )
        _check_same_config(new_draft, draft)
    weights = NewWeights(
        {} if model_path is None else new_target.load_weights(),
        {} if draft_path is None or new_draft is None else new_draft.load_weights(),
    )
    return new_target, new_draft, weights


class TensorMap:
    """Tensors in memory, as a :class:`~specjax.checkpoints.tensors.TensorSource`."""

    path = Path("named_tensors")

    def __init__(self, tensors: Mapping[str, np.ndarray]) -> None:
        self._tensors = tensors

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of a tensor."""
        tensor = self._tensors[name]
        return TensorInfo(tensor.shape, self.path, str(tensor.dtype))

    def read(self, name: str) -> np.ndarray:
        """The tensor."""
        return self._tensors[name]


def weights_from_tensors(
    networks: Networks,
    named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    *,
    draft: bool,
) -> NewWeights:
    """Weights by flat name from tensors under flat or under Hugging Face names.

    Args:
        networks: structures of target and draft.
        named_tensors: arrays or CPU tensors. Flat names are those of ``FlatModel.names``, with
            matrices as ``[in, out]``; Hugging Face names those of the checkpoint, with matrices as
            ``[out, in]``. Of a weight that is made of several checkpoint tensors, such as the
            projections to queries, keys and values, all have to be given.
        draft: they are of the draft head.

    Raises:
        ValueError: naming the tensor that is unknown, missing or of another shape or dtype.
    """
    flat = networks.head if draft else networks.target
    if flat is None:
        raise ValueError("draft=True, but the engine decodes plainly and has no draft head")
    tensors = {name: _as_array(name, value) for name, value in dict(named_tensors).items()}
    if not tensors:
        raise ValueError("named_tensors are empty; give the weights to replace")
    abstract = dict(zip(flat.names, flat.abstract, strict=True))
    weights = {name: tensor for name, tensor in tensors.items() if name in abstract}
    rest = {name: tensor for name, tensor in tensors.items() if name not in abstract}
    if draft and networks.head_config is not None:
        is_eagle3 = networks.head_config.algorithm == "EAGLE3"
        rest = {canonical_name(name, is_eagle3=is_eagle3): rest[name] for name in rest}
        recipes = draft_recipes(networks.head_config)
    else:
        recipes = target_recipes(networks.target_config)
    for name, recipe in recipes.items():
        weights |= _from_checkpoint_names(name, recipe, abstract[name], rest)
    if rest:
        raise ValueError(f"named_tensors {sorted(rest)[:5]} are not weights of the model")
    _check_weights(abstract, weights)
    if "d2t" in weights and networks.head_config is not None:
        vocabulary = TensorMap({"d2t": np.asarray(weights["d2t"])})
        check_vocabulary(DraftSource(vocabulary), networks.head_config)
    return NewWeights({}, weights) if draft else NewWeights(weights, {})


def replace_weights(runner: ModelRunner, new: NewWeights) -> None:
    """Put weights in the place of a runner's own, one after the other.

    Each old weight goes before the next new one comes, so that the device needs no room for two
    models. Dispatches before this still run with the old weights.
    """
    nets = runner.networks
    for is_draft, flat, weights in ((False, nets.target, new.target), (True, nets.head, new.draft)):
        for i, name in enumerate(() if flat is None else flat.names):
            if name in weights:
                weight = jax.device_put(_owned(weights[name]), may_alias=False)
                runner.replace_weight(i, jax.block_until_ready(weight), draft=is_draft)


def _check_same_config(
    new: TargetCheckpoint | DraftCheckpoint, old: TargetCheckpoint | DraftCheckpoint
) -> None:
    if new.config == old.config:
        return
    differing = [
        f"{field.name}={getattr(new.config, field.name)!r} instead of "
        f"{getattr(old.config, field.name)!r}"
        for field in fields(old.config)
        if getattr(new.config, field.name) != getattr(old.config, field.name)
    ]
    raise ValueError(
        f"{new.path} does not fit the running engine: {', '.join(differing)}; make a new engine"
    )


def _check_weights(
    abstract: Mapping[str, jax.ShapeDtypeStruct], weights: Mapping[str, Any]
) -> None:
    for name, value in weights.items():
        want = abstract[name]
        if value.shape != want.shape or value.dtype != want.dtype:
            raise ValueError(
                f"weight {name!r} is {value.dtype} {tuple(value.shape)}, but the engine runs with "
                f"{want.dtype} {want.shape}"
            )


def _owned(value: Any) -> Any:
    """The value, or a copy where the device would share memory with a caller who may write to it.

    On a CPU ``device_put`` takes aligned numpy memory as it is, also with ``may_alias=False``.
    """
    on_cpu = jax.default_backend() == "cpu"
    return np.array(value) if isinstance(value, np.ndarray) and on_cpu else value


def _as_array(name: str, value: Any) -> Any:
    if isinstance(value, jax.Array | np.ndarray):
        return value
    array = np.asarray(value)
    if array.dtype == object:
        raise ValueError(f"named_tensors[{name!r}] is a {type(value).__name__}, not an array")
    return array


def _from_checkpoint_names(
    name: str, recipe: Recipe, want: jax.ShapeDtypeStruct, tensors: dict[str, Any]
) -> dict[str, np.ndarray]:
    """One weight made of its parts, which are taken out of ``tensors``; nothing without any."""
    given = [part for part in recipe.parts if part.name in tensors]
    if not given:
        return {}
    if missing := [part.name for part in recipe.parts if part.name not in tensors]:
        raise ValueError(
            f"named_tensors have {given[0].name!r} without {missing}, which are parts of the same "
            "weight; give all of them"
        )
    parts = {part.name: tensors.pop(part.name) for part in recipe.parts}
    for part in recipe.parts:
        tensor = parts[part.name]
        if tensor.shape != part.shape or tensor.dtype != want.dtype:
            raise ValueError(
                f"tensor {part.name!r} is {tensor.dtype} {tuple(tensor.shape)}, but the engine "
                f"runs with {want.dtype} {part.shape}"
            )
    source = TensorMap({name: np.asarray(tensor) for name, tensor in parts.items()})
    return {name: make_weight(recipe, source, np.dtype(want.dtype))}
