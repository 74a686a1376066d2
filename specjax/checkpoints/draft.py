"""Opening draft heads: published EAGLE-1/2 and EAGLE-3 checkpoints, orbax, the embedded head."""

import dataclasses
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specjax.checkpoints.assemble import Checkpoint
from specjax.checkpoints.draft_config import check_feature_layers, check_pair, draft_config
from specjax.checkpoints.orbax import is_orbax_directory, orbax_config
from specjax.checkpoints.target import TargetCheckpoint, download, embedded_head, open_target
from specjax.checkpoints.tensors import TensorSource, open_directory
from specjax.config import DraftConfig, ModelConfig
from specjax.models.recipes import Recipes, draft_recipes


@dataclass(frozen=True)
class DraftCheckpoint(Checkpoint[DraftConfig]):
    """A draft head on disk, whose ``config`` is resolved against the target, in its dtype."""

    def describe(self) -> str:
        """One line with what was resolved: rotary base, layers, vocabularies, shared tensors."""
        config, scaling = self.config, self.config.rope_scaling
        layers = f", features of layers {list(config.feature_layers)}"
        owner = {True: "own", False: "the target's"}
        embedding, output = owner[config.has_own_embedding], owner[config.has_own_lm_head]
        if config.ties_lm_head:
            output = f"tied to {embedding} embedding"
        return (
            f"{config.checkpoint_format} head {self.path}: rope_theta={config.rope_theta:g}"
            f"{f' ({scaling.rope_type} x{scaling.factor:g})' if scaling else ''}"
            f"{layers if config.feature_layers else ''}, "
            f"vocabulary {config.draft_vocab_size} of {config.vocab_size}, "
            f"embedding {embedding}, output head {output}, dtype {config.dtype}"
        )

    def recipes(self) -> Recipes:
        return draft_recipes(self.config)

    def canonical_name(self, name: str) -> str:
        return canonical_name(name, is_eagle3=self.config.fuses_features)

    def check_values(self, source: TensorSource) -> None:
        check_vocabulary(source, self.config)

    def _is_ignored(self, name: str) -> bool:
        """Vocabulary maps, and copies of the target's tensors."""
        shared = () if self.config.fuses_features else ("embed_tokens.weight", "lm_head.weight")
        copies = ("verifier_norm.", "verifier_lm_head.")
        return name in ("d2t", "t2d", *shared) or name.startswith(copies)


def canonical_name(name: str, *, is_eagle3: bool) -> str:
    """A stored name without ``model.`` prefix, the EAGLE-3 layer always called ``midlayer``."""
    name = name.removeprefix("model.")
    return re.sub(r"^layers\.0\.", "midlayer.", name) if is_eagle3 else name


def canonical_source(source: TensorSource) -> TensorSource:
    """The tensors of a draft head under canonical names, of which there may be one each."""
    is_eagle3 = any(name.endswith("hidden_norm.weight") for name in source.infos)
    stored: dict[str, str] = {}
    for name in sorted(source.infos):
        canonical = canonical_name(name, is_eagle3=is_eagle3)
        if canonical in stored:
            both = f"{stored[canonical]!r} and {name!r}"
            raise ValueError(f"{source.path} stores both {both}, which are the same tensor")
        stored[canonical] = name
    infos = {canonical: source.infos[name] for canonical, name in stored.items()}
    return TensorSource(source.path, infos, lambda name: source.read(stored[name]))


def check_vocabulary(source: TensorSource, config: DraftConfig) -> None:
    """Check the vocabulary maps of a head against each other and against the target."""
    if "d2t" not in source.infos:
        return
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    offsets = _read_map(source, "d2t", size).astype(np.int64)
    ids = offsets + np.arange(size)
    place = f"tensor 'd2t' in {source.infos['d2t'].path}"
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(
            f"{place} maps draft ids to target ids {ids.min()}..{ids.max()}, but the target has "
            f"vocab_size={vocab_size}"
        )
    if size == vocab_size and offsets.any():
        raise ValueError(f"{place} reorders a vocabulary as large as the target's ({vocab_size})")
    if "t2d" not in source.infos:
        return
    if not np.array_equal(np.flatnonzero(_read_map(source, "t2d", vocab_size)), ids):
        raise ValueError(
            f"tensor 't2d' in {source.infos['t2d'].path} does not mark the {size} target ids that "
            "'d2t' maps to, in ascending order"
        )


def _read_map(source: TensorSource, name: str, size: int) -> np.ndarray:
    info = source.infos[name]
    if info.shape != (size,) or not re.fullmatch(r"bool|u?int\d+", info.dtype):
        raise ValueError(
            f"tensor {name!r} in {info.path} has shape {info.shape} and is {info.dtype}; the "
            f"vocabularies ask for {(size,)} and integers"
        )
    return source.read(name)


def open_draft(
    draft: str | os.PathLike[str] | None,
    target: TargetCheckpoint,
    *,
    checkpoint_format: str | None = None,
    rope_theta: float | None = None,
) -> DraftCheckpoint:
    """Find a draft head and read its configuration.

    Args:
        draft: a directory (published format, or written by :func:`save_orbax`), a Hugging Face
            repository id, or None for the head that ships with an embedded target.
        checkpoint_format: ``"eagle-3"``, ``"eagle-1"`` (versions 1 and 2), or None for what the
            head is.
        rope_theta: replaces the head's rotary base; some published heads accept more with another
            base than the configured one.

    Raises:
        ValueError: if there is no such head, or it cannot serve the target.
    """
    if draft is None:
        path = embedded_head(target.name)
    else:
        name = os.fspath(draft)
        path = Path(name).expanduser()
        if os.path.isfile(path):
            raise ValueError(f"draft={name!r} is a file; expected a directory")
        if not os.path.isdir(path):
            path = download(name, "draft")
    if is_orbax_directory(path):
        source, config = None, _restored(path, target.config)
    else:
        source = canonical_source(open_directory(path))
        config = draft_config(path, source, target.config)
    if checkpoint_format not in (None, found := config.checkpoint_format):
        raise ValueError(
            f"{path} is an {found} head, but speculative_algorithm drafts with {checkpoint_format} "
            "heads; set another"
        )
    if rope_theta is not None:
        config = dataclasses.replace(config, rope_theta=rope_theta)
    return DraftCheckpoint(config, path, None if source is None else lambda: source)


def _restored(path: Path, target: ModelConfig) -> DraftConfig:
    config = orbax_config(path, DraftConfig)
    check_pair(path, config.vocab_size, config.target_hidden_size, target)
    layers = config.feature_layers
    check_feature_layers(path, layers, f"feature_layers={layers}", target)
    context = max(config.max_position_embeddings, target.max_position_embeddings)
    return dataclasses.replace(config, dtype=target.dtype, max_position_embeddings=context)


def open_draft_model(
    draft: str | os.PathLike[str],
    target: TargetCheckpoint,
    *,
    context_length: int | None = None,
    with_tokenizer: bool = True,
) -> TargetCheckpoint:
    """Find a model as :func:`open_target` does, and check that it can draft for ``target``.

    Args:
        draft: a directory, a GGUF file or a repository id; it is opened in the target's dtype.
        target: whose vocabulary it must share.
        context_length: tokens that it must be able to read; by default the target's own limit.
        with_tokenizer: compare the tokenizers, where both models have one.

    Raises:
        ValueError: if there is no such model, or it does not fit.
    """
    opened = open_target(draft, dtype=target.config.dtype, knob="draft")
    sizes = opened.config.vocab_size, target.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"draft={opened.name!r} has vocab_size={sizes[0]}, but model={target.name!r} has "
            f"{sizes[1]}; a draft model needs the target's vocabulary"
        )
    limit, context = opened.config.context_limit, context_length or target.config.context_limit
    if limit < context:
        raise ValueError(
            f"draft={opened.name!r} reads at most {limit} tokens, but the context has {context}; "
            f"set context_length={limit}"
        )
    if with_tokenizer:
        _check_same_tokens(opened, target)
    return dataclasses.replace(opened, config=opened.config.within(context))


def _check_same_tokens(draft: TargetCheckpoint, target: TargetCheckpoint) -> None:
    """Compare what the ids mean that both tokenizers know."""
    ours, theirs = _tokens(draft), _tokens(target)
    differing = sorted(i for i in ours.keys() & theirs.keys() if ours[i] != theirs[i])
    if differing:
        one = differing[0]
        raise ValueError(
            f"draft={draft.name!r} has another tokenizer than model={target.name!r}: "
            f"{len(differing)} ids differ, of which {one} is {ours[one]!r} and not "
            f"{theirs[one]!r}; a draft model needs the target's vocabulary"
        )


def _tokens(model: TargetCheckpoint) -> dict[int, str]:
    """Tokens by id; none for a model without a tokenizer, which the target's own user is told."""
    try:
        backend = model.load_tokenizer().backend
    except ValueError:
        return {}
    return {i: token for token, i in backend.get_vocab(with_added_tokens=True).items()}
