"""Open drafts: EAGLE heads, draft models and multi-token prediction (MTP) modules."""

import dataclasses
import itertools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from specjax.checkpoints.checkpoint import Checkpoint
from specjax.checkpoints.huggingface import (
    check_pair,
    draft_config,
    huggingface_config,
    with_plain,
)
from specjax.checkpoints.packed_files import open_weights
from specjax.checkpoints.target import TargetCheckpoint, embedded_head, locate, open_target
from specjax.checkpoints.tensors import TensorSource
from specjax.config import BlockConfig, DraftConfig, ModelConfig
from specjax.json_file import Fields, Size
from specjax.models.eagle import MtpHead, build_head
from specjax.models.family import Modules
from specjax.models.registry import FAMILIES, WRAPPERS, family_of


@dataclass(frozen=True)
class DraftCheckpoint(Checkpoint[DraftConfig]):
    """A draft head on disk. The target decides the dtype and open settings of ``config``."""

    _network = build_head

    def describe(self) -> str:
        config, scaling = self.config, self.config.rope_scaling
        layers = f", features of layers {list(config.feature_layers)}"
        owner = {True: "own", False: "the target's"}
        embedding, output = owner[config.has_own_embedding], owner[config.has_own_lm_head]
        if config.ties_lm_head:
            output = f"tied to {embedding} embedding"
        kind = config.checkpoint_format
        if config.mask_token_id is not None:
            kind = f"P-EAGLE ({config.num_layers} layers, mask token {config.mask_token_id})"
        return (
            f"{kind} head {self.path}: rope_theta={config.rope_theta:g}"
            f"{f' ({scaling.rope_type} x{scaling.factor:g})' if scaling else ''}"
            f"{layers if config.feature_layers else ''}, "
            f"vocabulary {config.draft_vocab_size} of {config.vocab_size}, "
            f"embedding {embedding}, output head {output}, dtype {config.dtype}"
        )

    def canonical_name(self, name: str) -> str:
        return canonical_name(name, is_eagle3=self.config.fuses_features)

    def check_values(self, source: TensorSource) -> None:
        check_vocabulary(source, self.config)

    def is_ignored(self, name: str) -> bool:
        """Whether the tensor is a vocabulary map or a copy of a target tensor."""
        shared = () if self.config.fuses_features else ("embed_tokens.weight", "lm_head.weight")
        copies = ("verifier_norm.", "verifier_lm_head.")
        return name in ("d2t", "t2d", *shared) or name.startswith(copies)


def canonical_name(name: str, *, is_eagle3: bool) -> str:
    """Remove ``model.`` from a stored name, and rename an EAGLE-3 layer to ``midlayer``."""
    name = name.removeprefix("model.")
    return re.sub(r"^layers\.0\.", "midlayer.", name) if is_eagle3 else name


def canonical_source(
    source: TensorSource, rename: Callable[[str], str] | None = None
) -> TensorSource:
    """Rename tensors by ``rename`` (default: :func:`canonical_name`); names must be unique."""
    is_eagle3 = any(name.endswith("hidden_norm.weight") for name in source.infos)
    rename = rename or partial(canonical_name, is_eagle3=is_eagle3)
    stored: dict[str, str] = {}
    for name in sorted(source.infos):
        canonical = rename(name)
        if canonical in stored:
            names = f"{stored[canonical]!r} and {name!r}"
            raise ValueError(f"{source.path} stores one tensor under two names: {names}")
        stored[canonical] = name
    infos = {canonical: source.infos[name] for canonical, name in stored.items()}
    if {"hidden_norm.weight", "mask_hidden"} <= infos.keys():
        names = "'hidden_norm.weight' (a block drafter) and 'mask_hidden' (a P-EAGLE head)"
        raise ValueError(f"{source.path} has both {names}; use another draft")
    return TensorSource(source.path, infos, lambda name: source.read(stored[name]))


def check_vocabulary(source: TensorSource, config: DraftConfig | BlockConfig) -> None:
    """Check that the vocabulary maps of a head fit each other and the target."""
    if "d2t" not in source.infos:
        return
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    offsets = _read_map(source, "d2t", size).astype(np.int64)
    ids = offsets + np.arange(size)
    subject = f"tensor 'd2t' in {source.infos['d2t'].path}"
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(
            f"{subject} maps draft ids to target ids {ids.min()}..{ids.max()}, but the target has "
            f"vocab_size={vocab_size}; use a head trained for this target"
        )
    if size == vocab_size and offsets.any():
        raise ValueError(
            f"{subject} maps draft ids to different target ids, although both vocabularies have "
            f"{size} tokens; reordered vocabularies are not supported"
        )
    if "t2d" not in source.infos:
        return
    if not np.array_equal(np.flatnonzero(_read_map(source, "t2d", vocab_size)), ids):
        raise ValueError(
            f"tensor 't2d' in {source.infos['t2d'].path} must mark exactly the {size} target ids "
            "in 'd2t', and 'd2t' must ascend; the head is damaged or inconsistent"
        )


def _read_map(source: TensorSource, name: str, size: int) -> np.ndarray:
    info = source.infos[name]
    if info.shape != (size,) or not re.fullmatch(r"bool|u?int\d+", info.dtype):
        raise ValueError(
            f"tensor {name!r} in {info.path} is {info.dtype} and has shape {info.shape}; the "
            f"vocabularies need integers of shape {(size,)}"
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
        draft: a directory or Hugging Face repository id, or None for the head that ships with an
            embedded target.
        checkpoint_format: ``"eagle-3"``, ``"eagle-1"`` (versions 1 and 2), or None for any.
        rope_theta: replaces the head's rotary base. With some published heads, another base than
            the configured one has a higher acceptance rate.

    Raises:
        ValueError: if the head is not found or does not fit the target.
    """
    path = embedded_head(target.name) if draft is None else locate(draft, "draft")
    source = canonical_source(open_weights(path))
    if "hidden_norm.weight" in source.infos:
        raise ValueError(
            f"{path} is a block drafter; set speculative_algorithm='DSPARK' if it has a Markov "
            "head, else 'DFLASH'"
        )
    config = draft_config(path, source, target.config)
    if checkpoint_format not in (None, kind := config.checkpoint_format):
        raise ValueError(
            f"{path} is an {kind} head, but speculative_algorithm drafts with {checkpoint_format} "
            f"heads; set speculative_algorithm={'EAGLE3' if kind == 'eagle-3' else 'EAGLE'!r}"
        )
    if rope_theta is not None:
        config = dataclasses.replace(config, rope_theta=rope_theta)
    return DraftCheckpoint(with_plain(config, lambda: source, build_head), path, lambda: source)


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
        context_length: minimum context in tokens; by default the target's own limit.
        with_tokenizer: compare the tokenizers if both models have one.

    Raises:
        ValueError: if the model is not found or does not fit the target.
    """
    opened = open_target(draft, dtype=target.config.dtype, knob="draft", of_draft=True)
    sizes = opened.config.vocab_size, target.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"draft={opened.name!r} has vocab_size={sizes[0]}, but model={target.name!r} has "
            f"vocab_size={sizes[1]}; a draft model needs the target's vocabulary"
        )
    if getattr(opened.config, "full_layers", ()):
        raise ValueError(
            f"draft={opened.name!r} has layers with KV of two shapes, which a draft model must not "
            "have; use another draft"
        )
    limit, context = opened.config.context_limit, target.config.context_length(context_length)
    if limit < context:
        raise ValueError(
            f"draft={opened.name!r} reads at most {limit} tokens, but the context has {context} "
            f"tokens; set context_length={limit}"
        )
    if with_tokenizer:
        _check_same_tokens(opened, target)
    return dataclasses.replace(opened, config=opened.config.within(context))


def _check_same_tokens(draft: TargetCheckpoint, target: TargetCheckpoint) -> None:
    """Raise ValueError if an id stands for different tokens in the two tokenizers."""
    ours, theirs = _tokens(draft), _tokens(target)
    differing = sorted(i for i in ours.keys() & theirs.keys() if ours[i] != theirs[i])
    if differing:
        i = differing[0]
        raise ValueError(
            f"the tokenizers of draft={draft.name!r} and model={target.name!r} differ in "
            f"{len(differing)} ids: id {i} is {ours[i]!r} in the draft and {theirs[i]!r} in "
            "the target; a draft model needs the target's vocabulary"
        )


def _tokens(model: TargetCheckpoint) -> dict[int, str]:
    """Return tokens by id; none if the model lacks a tokenizer, which is reported elsewhere."""
    try:
        backend = model.load_tokenizer().backend
    except ValueError:
        return {}
    return {i: token for token, i in backend.get_vocab(with_added_tokens=True).items()}


@dataclass(frozen=True)
class MtpCheckpoint(Checkpoint[ModelConfig]):
    """The MTP modules that draft; all other tensors in their files are ignored."""

    _network = MtpHead

    def describe(self) -> str:
        config = self.config
        return (
            f"{config.num_layers} multi-token prediction modules of {self.path}: "
            f"rope_theta={config.rope_theta:g}, dtype {config.dtype}"
        )

    def is_ignored(self, name: str) -> bool:
        """Whether the tensor is not of a module that drafts, or is a copy of a target tensor."""
        return not name.startswith(self._prefixes) or any(name in pair for pair in self.copies)

    @property
    def copies(self) -> tuple[tuple[str, str], ...]:
        if (names := family_of(self.config).modules.copies) is None:
            return ()
        return tuple((at + names[0], at + names[1]) for at in self._prefixes)

    @cached_property
    def _prefixes(self) -> tuple[str, ...]:
        config, stored = self.config, family_of(self.config).modules
        return tuple(stored.prefix(config.first_layer, i) for i in range(config.num_layers))


def module_prefixes(source: TensorSource, config: Fields) -> tuple[str, ...]:
    """Prefixes of the tensors of all multi-token prediction modules in a checkpoint."""
    model_type = config.get("model_type", str, "")
    family = FAMILIES.get(WRAPPERS.get(model_type, model_type))
    stored = Modules() if family is None else family.modules
    first = config.get("num_hidden_layers", Size, 0)
    numbers = itertools.count() if stored.is_numbered else range(1)
    prefixes = (stored.prefix(first, i) for i in numbers)
    counted = itertools.takewhile(lambda at: any(x.startswith(at) for x in source.infos), prefixes)
    return tuple(counted)


def has_modules(draft: str | os.PathLike[str] | None, target: TargetCheckpoint) -> bool:
    """Whether a draft, or without one the target's own checkpoint, has such modules."""
    path = target.path if draft is None else locate(draft, "draft")
    described = path / "config.json"
    if not described.is_file():
        return False
    return bool(module_prefixes(open_weights(path), Fields.read(described)))


def open_mtp(
    draft: str | os.PathLike[str] | None,
    target: TargetCheckpoint,
    *,
    num_modules: int,
    rope_theta: float | None = None,
) -> MtpCheckpoint:
    """Find the first multi-token prediction modules and read their configuration.

    Args:
        draft: a Hugging Face directory or repository id; ``None`` for the target's checkpoint.
        target: the target model, whose family, embeddings and output head the modules share.

    Raises:
        ValueError: if modules are missing or do not fit the target.
    """
    path = target.path if draft is None else locate(draft, "draft")
    if not (path / "config.json").is_file():
        raise ValueError(
            f"draft={draft!r}: multi-token prediction modules can be read only from a Hugging Face "
            f"directory, and {path} is not one; pass draft=DIRECTORY"
        )
    source = open_weights(path)
    fields = Fields.read(path / "config.json")
    model = huggingface_config(path, target.config.dtype, of_draft=True)
    prefixes = module_prefixes(source, fields)
    count, stated = len(prefixes), fields.get("num_nextn_predict_layers", Size, 0)
    if not count or count < stated:
        at = family_of(model).modules.at
        raise ValueError(
            f"{path} has tensors {at}* of {count} multi-token prediction modules, but "
            f"num_nextn_predict_layers={stated}; pass draft=DIRECTORY of a checkpoint with them"
        )
    if num_modules > count:
        raise ValueError(
            f"speculative_num_steps={num_modules} needs {num_modules} modules, but {path} has "
            f"{count}; lower it (with adaptive speculation, candidate_steps) to {count}, or set "
            "speculative_algorithm='NEXTN', which drafts all tokens with the first module"
        )
    check_pair(path / "config.json", model.vocab_size, model.hidden_size, target.config)
    theta = model.rope_theta if rope_theta is None else rope_theta
    if len(set(model.windows)) > 1 or len(set(model.layer_ropes)) > 1:
        raise ValueError(
            f"{path / 'config.json'}: layer_types differs between layers of the target, so that of "
            "the multi-token prediction modules is unknown; use another draft"
        )
    windows, ropes = (values[:1] * num_modules for values in (model.windows, model.layer_ropes))
    if (format := model.quantization) is not None:
        model = dataclasses.replace(model, quantization=dataclasses.replace(format, plain=()))
    sizes: Any = {"num_layers": num_modules, "windows": windows, "layer_ropes": ropes}
    sizes["first_layer"] = model.num_layers
    config = dataclasses.replace(model, rope_theta=theta, kv_exponents=(), **sizes)
    return MtpCheckpoint(with_plain(config, lambda: source, MtpHead), path, lambda: source)
