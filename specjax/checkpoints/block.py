"""Open block drafters: six published formats, resolved to one :class:`BlockConfig`.

:func:`open_block` finds and opens a drafter; :func:`block_config` reads its ``config.json`` and its
tensor shapes. The formats differ in four ways: where the keys are, whether ``block_size`` counts
the last token, which rows predict which tokens, and how target layers are numbered.
"""

import dataclasses
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.checkpoints.checkpoint import Checkpoint
from specjax.checkpoints.draft import canonical_source, check_vocabulary
from specjax.checkpoints.huggingface import (
    ANOTHER_HEAD,
    DEFAULTS,
    MASK_KEYS,
    check_fc,
    check_feature_layers,
    draft_sizes,
    draft_windows,
    has_tensor,
    with_plain,
)
from specjax.checkpoints.keys import ReadFields, refuse_unread
from specjax.checkpoints.packed_files import open_weights
from specjax.checkpoints.target import TargetCheckpoint, default_block_draft, locate
from specjax.checkpoints.tensors import TensorSource
from specjax.checks import check_integer
from specjax.config import MAX_STEPS, BlockConfig, Count
from specjax.json_file import Fields, Flag, PositiveSize, Size
from specjax.models.block import BlockDraft

logger = logging.getLogger(__name__)

DFLASH, DFLASH_DEEPSPEC = "DFlash", "DFlash of DeepSpec"
DSPARK_DEEPSPEC, DSPARK_SPECFORGE = "DSpark of DeepSpec", "DSpark of SpecForge"
DFLASH_SPECULATORS, DSPARK_SPECULATORS = "DFlash of speculators", "DSpark of speculators"
_SPECULATORS = {"dflash": DFLASH_SPECULATORS, "dspark": DSPARK_SPECULATORS}
# unsupported format -> its architectures, values of other keys, and keys that only its files have
_REFUSED = {
    "Domino": "DominoDraftModel domino",
    "DFlash2": "DFlash2DraftModel DFlash2BeamDraftModel MiniMaxDFlash2DraftModel conv_kernel_size "
    "selector_rank",
    "LiLiCorr": "LiLiCorrDraftModel lilicorr_hidden_size",
    "XPress": "Qwen3XPressModel xpress xpress_block_size",
    "Nemotron": "has_embed_tokens",
}
_EAGLE_IDS = "eagle_aux_hidden_state_layer_ids"
_ALIASES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
_COPIES = ("t2d", "rotary_emb.", "verifier_norm.", "verifier_lm_head.", "embed_tokens.")


@dataclass(frozen=True)
class BlockCheckpoint(Checkpoint[BlockConfig]):
    """A block drafter on disk. The target decides the dtype and open settings of ``config``."""

    _network = BlockDraft
    quantises_drafts = False

    def describe(self) -> str:
        config = self.config
        kinds = [
            ("causal " if causal else "") + (f"sliding ({window})" if window else "full")
            for window, causal in zip(config.windows, config.causal, strict=True)
        ]
        layers = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        extra = f", {config.markov_head} Markov head of rank {config.markov_rank}"
        return (
            f"{config.checkpoint_format} {self.path}: {config.layout}, layers {layers}, features "
            f"of layers {list(config.feature_layers)}, rope_theta={config.rope_theta:g}, "
            f"vocabulary {config.draft_vocab_size} of {config.vocab_size}"
            f"{extra if config.markov_head else ''}"
            f"{', confidence head' if config.has_confidence_head else ''}, dtype {config.dtype}"
        )

    def canonical_name(self, name: str) -> str:
        return canonical_name(name)

    def check_values(self, source: TensorSource) -> None:
        check_vocabulary(source, self.config)

    @property
    def copies(self) -> tuple[tuple[str, str], ...]:
        return (("embed_tokens.weight", "lm_head.weight"),)

    def is_ignored(self, name: str) -> bool:
        """Whether the tensor is a vocabulary map or a copy of a target tensor."""
        return name in ("d2t", "lm_head.weight") or name.startswith((*_COPIES, "confidence_head."))


def canonical_name(name: str) -> str:
    """Strip the ``model.`` prefix of a stored name and replace aliases."""
    name = name.removeprefix("model.")
    for alias, canonical in _ALIASES.items():
        if name.startswith(alias):
            return canonical + name.removeprefix(alias)
    return name


def open_block(
    draft: str | os.PathLike[str] | None,
    target: TargetCheckpoint,
    *,
    rope_theta: float | None = None,
) -> BlockCheckpoint:
    """Find a block drafter and read its configuration.

    Args:
        draft: a directory (one of six published formats), a repository id, or None for the folder
            ``dspark`` of the target's checkpoint, or the drafter that ships with an embedded
            target.
        rope_theta: replaces the drafter's rotary base.

    Raises:
        ValueError: if the drafter is not found, not supported, ambiguous or for another target.
    """
    path = default_block_draft(target) if draft is None else locate(draft, "draft")
    source = canonical_source(open_weights(path), canonical_name)
    config = block_config(path, source, target)
    if rope_theta is not None:
        config = dataclasses.replace(config, rope_theta=rope_theta)
    return BlockCheckpoint(with_plain(config, lambda: source, BlockDraft), path, lambda: source)


class _File:
    """Settings and tensors of a drafter. Nested settings override those at the top level."""

    def __init__(self, directory: Path, source: TensorSource) -> None:
        self.path, self.source = directory / "config.json", source
        self.top = ReadFields(Fields.read(self.path).values, self.path)
        self.layer = self.top.fields("transformer_layer_config")
        dspark, dflash = self.top.fields("dspark_config"), self.top.fields("dflash_config")
        self.sections = (dspark, dflash, self.top, self.layer)
        self.kind = self.top.get("speculators_model_type", str, None)
        stated: dict[str, Any] = {}
        for section in reversed(self.sections):
            stated |= {key: value for key, value in section.values.items() if value is not None}
        values = {**(DEFAULTS["qwen3"] if self.kind else {}), **stated}
        self.body = ReadFields(values, self.path, self.top.keys)
        stored = source.infos.get("markov_head.markov_w1.weight")
        rank = next(reversed(stored.shape), 0) if stored else 0
        self.markov_rank: int = self.get("markov_rank", Size, rank)

    def get(self, key: str, kind: Any, default: Any = ...) -> Any:
        """Return the value of a key from the nested settings, else from the top level."""
        section = next((section for section in self.sections if key in section), self.top)
        return section.get(key, kind, default)

    def has(self, tensor: str) -> bool:
        return has_tensor(self.source, tensor)

    def refused(self, feature: str) -> ValueError:
        supported = "DFlash, DSpark and, with speculative_algorithm='EAGLE3', P-EAGLE"
        return ValueError(f"{self.path}: {feature} is not supported; supported: {supported}")


def block_format(file: _File) -> str:
    """Return the published format of a file, or raise ValueError if it is not supported."""
    names = file.top.get("architectures", list[str], [])
    projector = file.get("projector_type", str, "")
    keys = (key for section in file.sections for key, value in section.values.items() if value)
    marks = {*names, file.kind, projector, *keys}
    formats = [name for name, words in _REFUSED.items() if not marks.isdisjoint(words.split())]
    if file.kind == "peagle" or "PEagleDraftModel" in names or file.has("mask_hidden"):
        raise ValueError(
            f"{file.path} is a P-EAGLE head; set speculative_algorithm='EAGLE3' to draft with it"
        )
    if "pard_token" in file.top and not file.has("fc.weight"):
        formats.append("PARD")
    if formats:
        raise file.refused(f"the format {formats[0]}")
    if file.kind is not None:
        if file.kind not in _SPECULATORS:
            raise file.refused(f"speculators_model_type={file.kind!r}")
        return _SPECULATORS[file.kind]
    is_nested = "dflash_config" in file.top or "dspark_config" in file.top
    has_markov, stated = file.markov_rank > 0, file.get("sample_from_anchor", Flag, None)
    if "DSparkDraftModel" in names or projector == "dspark":
        return DSPARK_SPECFORGE
    if "Qwen3DSparkModel" in names:
        return DSPARK_DEEPSPEC if has_markov else DFLASH_DEEPSPEC
    if "DFlashDraftModel" in names and not has_markov:
        return DFLASH
    if stated is not None or (not names and (is_nested or has_markov)):
        if has_markov:
            return DSPARK_SPECFORGE if is_nested else DSPARK_DEEPSPEC
        return DFLASH_DEEPSPEC if stated else DFLASH
    if not (file.has("fc.weight") and file.has("hidden_norm.weight")):
        raise file.refused(f"architectures={names}")
    raise ValueError(
        f"{file.path}: architectures={names} with markov_rank={file.markov_rank} may be DFlash (a "
        "mask row predicts the token at its own position) or DSpark (each row predicts the next "
        "token); set sample_from_anchor to false or true in this file"
    )


def block_config(directory: Path, source: TensorSource, target: TargetCheckpoint) -> BlockConfig:
    """Read ``config.json`` of a drafter and resolve it against its target.

    ``source`` has the drafter's tensors under canonical names. Raises ValueError if the format is
    not supported or ambiguous, or the drafter does not fit the target.
    """
    file, model = _File(directory, source), target.config
    kind = block_format(file)
    if os.path.lexists(directory / "mask_embedding.pt"):
        raise file.refused("a mask embedding in mask_embedding.pt")
    hidden_size = file.body.get("hidden_size", Size)
    stated = file.get("target_hidden_size", Size, model.hidden_size)
    sizes = draft_sizes(file.body, stated, model)
    if hidden_size != model.hidden_size:
        raise ValueError(
            f"{file.path}: hidden_size={hidden_size} differs from the target's "
            f"{model.hidden_size}; a block drafter reads the target's embeddings; {ANOTHER_HEAD}"
        )
    num_layers = file.body.get("num_hidden_layers", Count)
    anchor_first, num_drafts = _layout(file, kind)
    windows, causal = _attention(file, num_layers)
    reduced = next(iter(source.infos["d2t"].shape), 0) if file.has("d2t") else model.vocab_size
    has_bias = file.body.get("attention_bias", Flag, False)
    values = sizes | {
        "checkpoint_format": kind,
        "num_layers": num_layers,
        "draft_vocab_size": file.get("draft_vocab_size", Size, reduced),
        "feature_layers": _feature_layers(file, num_layers, target),
        "num_drafts": num_drafts,
        "anchor_first": anchor_first,
        "mask_token_id": _mask_token(file, target),
        "windows": windows,
        "causal": causal,
        "qkv_bias": has_bias,
        "output_bias": has_bias,
        "mlp_bias": file.body.get("mlp_bias", Flag, False),
    }
    values["has_own_lm_head"] = values["draft_vocab_size"] != model.vocab_size
    values |= _heads(file, hidden_size)
    keys = file.top.keys - {"partial_rotary_factor"}  # keys of the context are not reordered
    refuse_unread(file.sections, keys, sizes["head_dim"], of_draft=True)
    return file.top.build(BlockConfig, values)


def _layout(file: _File, kind: str) -> tuple[bool, int]:
    """Return whether every row predicts the next token, and the number of drafts per round."""
    stated = file.get("sample_from_anchor", Flag, None)
    size = file.get("block_size", PositiveSize, 16 if kind == DFLASH else ...)
    drafts = None
    if file.kind:
        speculators = file.top.fields("speculators_config")
        methods = speculators.get("proposal_methods", list[dict[str, Any]], None) or [{}]
        drafts = Fields(methods[0], file.path).get("speculative_tokens", PositiveSize, None)
    if stated is None and kind == DSPARK_SPECULATORS:
        if drafts not in (size, size - 1):
            raise ValueError(
                f"{file.path}: without sample_from_anchor, block_size={size} and "
                f"speculative_tokens={drafts} may mean {size} drafts (each row predicts the next "
                f"token) or {size - 1} (a mask row predicts the token at its own position); set "
                "sample_from_anchor to true or false in this file"
            )
        stated = drafts == size
    anchor_first = kind not in (DFLASH, DFLASH_SPECULATORS) if stated is None else stated
    max_drafts = size if anchor_first else size - 1
    if drafts is not None and drafts > max_drafts:
        raise ValueError(
            f"{file.path}: speculative_tokens={drafts} exceeds the {max_drafts} drafts of "
            f"block_size={size} with sample_from_anchor={str(anchor_first).lower()}; correct "
            "sample_from_anchor or block_size in this file"
        )
    limits = {"at_least": 2 - anchor_first, "at_most": MAX_STEPS + 1 - anchor_first}
    file.top.build(check_integer, {"name": "block_size", "value": size, **limits})
    return anchor_first, max_drafts


def _attention(file: _File, num_layers: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Return the window (0 for none) and the causality of each layer."""
    forced = file.get("use_swa", Flag, False)
    slides, windows = draft_windows(file.body, num_layers, forced)
    stated = file.get("is_causal", Flag, file.get("causal", Flag, None))
    non_causal = file.get("sliding_window_non_causal", Flag, False)
    causal = [slide and not non_causal if stated is None else stated for slide in slides]
    return windows, tuple(causal)


def _feature_layers(file: _File, num_layers: int, target: TargetCheckpoint) -> tuple[int, ...]:
    """Return the target layers whose outputs the drafter reads; -1 is the embedding."""
    count = target.config.num_layers
    stated = file.get("num_target_layers", Size, count)
    if stated != count:
        raise ValueError(
            f"{file.path}: num_target_layers={stated}, but the target has {count}; {ANOTHER_HEAD}"
        )
    layers: tuple[int, ...] = ()
    # (key, number of the first layer); files from speculators prefer keys that count from 1
    keys = [("target_layer_ids", 0)]
    counted = [(key, 1) for key in ("aux_hidden_state_layer_ids", _EAGLE_IDS)]
    for key, start in counted + keys if file.kind else keys + counted:
        if not layers and (ids := file.get(key, list[int], [])):
            layers = tuple(i - start for i in ids)
    if not layers and num_layers == 1:
        layers = (count // 2,)
    elif not layers and count < 4:
        demand = f"must be set: its default needs a target of 4 or more layers, not of {count}"
        raise file.top.wrong("target_layer_ids", demand)
    elif not layers:
        layers = tuple(round(1 + i * (count - 4) / (num_layers - 1)) for i in range(num_layers))
    wording, size = f"feature layers {list(layers)}", target.config.hidden_size
    check_feature_layers(file.path, layers, wording, target.config, start=-1)
    meaning = f"{len(layers)} features of the target's hidden_size={size}"
    check_fc(file.source, len(layers) * size, meaning)
    return layers


def _mask_token(file: _File, target: TargetCheckpoint) -> int:
    for key in MASK_KEYS:
        if (token_id := file.get(key, Size, None)) is not None:
            return int(token_id)
    token = file.get("mask_token", str, "<|MASK|>")
    try:
        token_id = target.load_tokenizer().backend.token_to_id(token)
    except ValueError:
        token_id = None
    if token_id is None:
        raise ValueError(
            f"{file.path} has none of {list(MASK_KEYS)}, and the target's tokenizer has no token "
            f"{token!r}; set mask_token_id in this file"
        )
    return int(token_id)


def _heads(file: _File, hidden_size: int) -> dict[str, Any]:
    """Return the settings of the Markov and confidence heads, from keys or else from tensors."""
    rank = file.markov_rank
    kind = file.get("markov_head_type", str, "vanilla") if rank else None
    confidence = file.source.infos.get("confidence_head.proj.weight")
    has_confidence = file.get("enable_confidence_head", Flag, confidence is not None)
    width = next(reversed(confidence.shape), 0) if confidence else hidden_size
    with_markov = file.get("confidence_head_with_markov", Flag, width != hidden_size)
    return {
        "markov_head": kind,
        "markov_rank": rank,
        "has_confidence_head": has_confidence,
        "confidence_with_markov": has_confidence and with_markov and rank > 0,
    }
