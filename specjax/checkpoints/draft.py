"""Opening draft heads: published EAGLE-1/2 and EAGLE-3 checkpoints, orbax, the embedded head."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specjax.checkpoints.assemble import Progress, assemble, check_recipes
from specjax.checkpoints.draft_config import draft_config
from specjax.checkpoints.draft_names import DraftSource, draft_recipes, is_ignored_draft_tensor
from specjax.checkpoints.embedded import EMBEDDED_MODELS, embedded_head
from specjax.checkpoints.hub import download
from specjax.checkpoints.orbax_store import is_orbax_directory, load_orbax, orbax_config
from specjax.checkpoints.target import TargetCheckpoint
from specjax.checkpoints.tensors import open_directory
from specjax.config import DraftConfig
from specjax.models.eagle import build_head
from specjax.models.flat import FlatModel


@dataclass(frozen=True)
class DraftCheckpoint:
    """A draft head on disk, of which only the configuration has been read.

    Attributes:
        config: resolved against the target, in the target's dtype.
        path: the directory.
    """

    config: DraftConfig
    path: Path
    _source: DraftSource | None

    def load_weights(self, progress: Progress | None = None) -> dict[str, np.ndarray]:
        """All weights by flat name (``FlatModel.of(build_head).names``).

        They have ``config.dtype``, except ``d2t`` (int32).

        Raises:
            ValueError: naming tensor, shapes and file if the checkpoint does not fit its
                configuration, or if its vocabulary maps are inconsistent.
        """
        config = self.config
        flat = FlatModel.of(lambda rngs: build_head(config, rngs))
        abstract = dict(zip(flat.names, flat.abstract, strict=True))
        if self._source is None:
            return load_orbax(self.path, abstract)
        recipes = draft_recipes(config)
        check_recipes(recipes, self._source, lambda name: is_ignored_draft_tensor(name, config))
        check_vocabulary(self._source, config)
        return assemble(recipes, self._source, abstract, progress)

    def describe(self) -> str:
        """One line with what was resolved: rotary base, layers, vocabularies, shared tensors."""
        config = self.config
        layers = f", features of layers {list(config.feature_layers)}"
        scaling = config.rope_scaling
        embedding = "own" if config.has_own_embedding else "the target's"
        if config.ties_lm_head:
            output = f"tied to {embedding} embedding"
        else:
            output = "own" if config.has_own_lm_head else "the target's"
        return (
            f"{config.algorithm} head {self.path}: rope_theta={config.rope_theta:g}"
            f"{f' ({scaling.rope_type} x{scaling.factor:g})' if scaling else ''}"
            f"{layers if config.feature_layers else ''}, "
            f"vocabulary {config.draft_vocab_size} of {config.vocab_size}, "
            f"embedding {embedding}, output head {output}, dtype {config.dtype}"
        )


def check_vocabulary(source: DraftSource, config: DraftConfig) -> None:
    """Check the vocabulary maps of a head against each other and against the target.

    Raises:
        ValueError: if a draft id maps outside the target's vocabulary, or ``t2d`` disagrees.
    """
    if "d2t" not in source.names():
        return
    file = source.info("d2t").path
    size = config.draft_vocab_size
    offsets = source.read("d2t").astype(np.int64)
    if offsets.shape != (size,):
        raise ValueError(
            f"tensor 'd2t' in {file} has shape {offsets.shape}, but draft_vocab_size={size} asks "
            f"for {(size,)}"
        )
    ids = offsets + np.arange(size)
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ValueError(
            f"tensor 'd2t' in {file} maps draft ids to target ids {ids.min()}..{ids.max()}, but "
            f"the target has vocab_size={config.vocab_size}"
        )
    if size == config.vocab_size and offsets.any():
        raise ValueError(
            f"tensor 'd2t' in {file} reorders a vocabulary as large as the target's "
            f"({size}), which is not supported"
        )
    if "t2d" in source.names():
        mask = source.read("t2d").astype(bool)
        if mask.shape != (config.vocab_size,) or not np.array_equal(np.flatnonzero(mask), ids):
            raise ValueError(
                f"tensor 't2d' in {source.info('t2d').path} {mask.shape} does not mark the "
                f"{size} target ids that 'd2t' maps to, in ascending order"
            )


def open_draft(
    draft: str | os.PathLike[str] | None,
    target: TargetCheckpoint,
    *,
    algorithm: str | None = None,
    rope_theta: float | None = None,
) -> DraftCheckpoint:
    """Find a draft head and read its configuration.

    Args:
        draft: a directory (published format, or written by :func:`save_orbax`), a Hugging Face
            repository id, or None for the head that ships with an embedded target.
        target: the model that it drafts for.
        algorithm: ``"EAGLE3"``, ``"EAGLE"`` (versions 1 and 2), or None for what the head is.
        rope_theta: replaces the head's rotary base; some published heads accept more with another
            base than the configured one.

    Raises:
        ValueError: if there is no such head, or it cannot serve the target.
    """
    if algorithm not in (None, "EAGLE3", "EAGLE"):
        raise ValueError(f"algorithm={algorithm!r} is not 'EAGLE3' or 'EAGLE'")
    if draft is None:
        if target.name not in EMBEDDED_MODELS:
            raise ValueError(
                f"draft=None, but only {sorted(EMBEDDED_MODELS)} come with a draft head; pass "
                f"draft=DIRECTORY for model={target.name!r}"
            )
        path = embedded_head(target.name)
    else:
        name = os.fspath(draft)
        path = Path(name).expanduser()
        if path.is_file():
            raise ValueError(f"draft={name!r} is a file; expected a directory")
        if not path.is_dir():
            path = download(name, "draft")
    if is_orbax_directory(path):
        return DraftCheckpoint(_restore_config(path, target, algorithm, rope_theta), path, None)
    source = DraftSource(open_directory(path))
    config = draft_config(path, source, target.config, algorithm=algorithm, rope_theta=rope_theta)
    return DraftCheckpoint(config, path, source)


def _restore_config(
    path: Path, target: TargetCheckpoint, algorithm: str | None, rope_theta: float | None
) -> DraftConfig:
    config, model = orbax_config(path, DraftConfig), target.config
    if algorithm not in (None, config.algorithm):
        raise ValueError(
            f"{path} is an {config.algorithm} head, but speculative_algorithm={algorithm!r} was "
            "asked for"
        )
    for name, found, wanted in (
        ("vocab_size", config.vocab_size, model.vocab_size),
        ("target_hidden_size", config.target_hidden_size, model.hidden_size),
    ):
        if found != wanted:
            raise ValueError(f"{path}: {name}={found} of the head, but the target has {wanted}")
    if any(layer >= model.num_layers for layer in config.feature_layers):
        raise ValueError(
            f"{path}: feature_layers={config.feature_layers} are not layers of the target, which "
            f"has {model.num_layers}"
        )
    return dataclasses.replace(
        config,
        dtype=model.dtype,
        max_position_embeddings=max(config.max_position_embeddings, model.max_position_embeddings),
        rope_theta=config.rope_theta if rope_theta is None else rope_theta,
    )
