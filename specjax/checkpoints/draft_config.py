"""Configuration of a draft head from its ``config.json`` and the tensors it stores.

Three spellings are read: the original EAGLE repository's, the one of SGLang and SpecForge
(``eagle_config``) and that of speculators (a nested ``transformer_layer_config``).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.checkpoints.rope_config import read_rope
from specjax.checkpoints.target_config import refuse_unsupported, require_size
from specjax.checkpoints.tensors import TensorSource
from specjax.config import DraftConfig, ModelConfig
from specjax.json_file import read_json

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def draft_config(
    directory: Path,
    source: TensorSource,
    target: ModelConfig,
    *,
    algorithm: str | None,
    rope_theta: float | None,
) -> DraftConfig:
    """The head's configuration, resolved against its target.

    Args:
        directory: holds ``config.json``.
        source: the head's tensors under canonical names (``midlayer.*``, no ``model.`` prefix).
        target: the model that the head drafts for.
        algorithm: ``"EAGLE3"``, ``"EAGLE"``, or None for what the tensors say.
        rope_theta: replaces the configured rotary base.

    Raises:
        ValueError: if the head is not supported or cannot serve this target.
    """
    head = _Head(directory, source, target)
    found = "EAGLE3" if "midlayer.hidden_norm.weight" in head.names else "EAGLE"
    if algorithm not in (None, found):
        raise ValueError(
            f"{directory} is an {found} head, but speculative_algorithm={algorithm!r} was asked for"
        )
    values = _eagle3_values(head) if found == "EAGLE3" else _eagle_values(head)
    if rope_theta is not None:
        values["rope_theta"] = rope_theta
    try:
        return DraftConfig(**values)
    except ValueError as error:
        raise ValueError(f"{head.path}: {error}") from None


class _Head:
    """What both kinds of head read from the configuration."""

    def __init__(self, directory: Path, source: TensorSource, target: ModelConfig) -> None:
        self.path = directory / "config.json"
        self.source, self.target = source, target
        self.names = source.names()
        self.body = read_json(self.path)
        self.eagle: Mapping[str, Any] = self.body.get("eagle_config") or {}
        nested = self.body.get("transformer_layer_config")
        self.is_speculators = nested is not None
        self.layer: Mapping[str, Any] = self.body if nested is None else nested
        refuse_unsupported({**self.layer, **self.body}, self.path)

    def flag(self, name: str, default: bool = False) -> bool:
        """A switch of the top level or of ``eagle_config``."""
        value = self.body.get(name, self.eagle.get(name))
        return default if value is None else bool(value)

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that must be there."""
        if name not in self.names:
            raise ValueError(f"{self.source.path} has no tensor {name!r}")
        return self.source.info(name).shape

    def common(self) -> dict[str, Any]:
        """Sizes and rotary settings; the context is at least the target's."""
        layer, path, target = self.layer, self.path, self.target
        hidden = require_size(layer, "hidden_size", path)
        heads = require_size(layer, "num_attention_heads", path)
        vocab_size = layer.get("vocab_size", target.vocab_size)
        if vocab_size != target.vocab_size:
            raise ValueError(
                f"{path}: vocab_size={vocab_size} of the draft head differs from the target's "
                f"{target.vocab_size}; they must share one tokenizer"
            )
        stated = self.body.get("target_hidden_size")
        if stated not in (None, target.hidden_size):
            raise ValueError(
                f"{path}: target_hidden_size={stated} differs from the target's hidden_size="
                f"{target.hidden_size}; the head was trained for another model"
            )
        theta, scaling = read_rope(layer, path)
        first = "midlayer" if "midlayer.self_attn.q_proj.weight" in self.names else "layers.0"
        return {
            "vocab_size": vocab_size,
            "hidden_size": hidden,
            "intermediate_size": require_size(layer, "intermediate_size", path),
            "num_layers": layer.get("num_hidden_layers", 1),
            "num_heads": heads,
            "num_kv_heads": layer.get("num_key_value_heads") or heads,
            "head_dim": layer.get("head_dim") or hidden // heads,
            "rms_norm_eps": float(layer.get("rms_norm_eps", 1e-6)),
            "rope_theta": theta,
            "rope_scaling": scaling,
            # published heads often state 2048, which is how far they were trained, not a bound
            "max_position_embeddings": max(
                int(layer.get("max_position_embeddings") or 1), target.max_position_embeddings
            ),
            "dtype": target.dtype,
            "target_hidden_size": target.hidden_size,
            "qkv_bias": f"{first}.self_attn.q_proj.bias" in self.names,
        }


def _eagle_values(head: _Head) -> dict[str, Any]:
    """EAGLE-1/2: embeddings and output head are the target's, copies in the file are ignored."""
    values, target = head.common(), head.target
    if values["hidden_size"] != target.hidden_size:
        raise ValueError(
            f"{head.path}: hidden_size={values['hidden_size']} differs from the target's "
            f"{target.hidden_size}; an EAGLE-1/2 head uses the target's output head and must match"
        )
    _check_fc(head, 2 * target.hidden_size, "the embedding and the target's hidden state")
    return dict(
        algorithm="EAGLE",
        draft_vocab_size=target.vocab_size,
        # the original code builds the projection with a bias unless the configuration denies it
        fc_bias=bool(head.body.get("bias", True)),
        has_own_embedding=False,
        has_own_lm_head=False,
        **values,
    )


def _eagle3_values(head: _Head) -> dict[str, Any]:
    values, target = head.common(), head.target
    layers = _feature_layers(head)
    if not head.flag("use_aux_hidden_state", True):
        raise ValueError(f"{head.path}: use_aux_hidden_state=false is not supported")
    _check_fc(
        head,
        len(layers) * target.hidden_size,
        f"{len(layers)} features of the target's hidden_size={target.hidden_size}",
    )
    draft_vocab_size = _draft_vocab_size(head)
    same_width = values["hidden_size"] == target.hidden_size
    own_embedding = "embed_tokens.weight" in head.names
    if not own_embedding and not same_width:
        raise ValueError(
            f"{head.source.path} has no tensor 'embed_tokens.weight', and the target's embeddings "
            f"do not fit: hidden_size={values['hidden_size']} of the head, {target.hidden_size} of "
            "the target"
        )
    own_head = "lm_head.weight" in head.names
    tied = not own_head and bool(
        head.body.get("tie_word_embeddings", head.layer.get("tie_word_embeddings", False))
    )
    full_vocabulary = draft_vocab_size == target.vocab_size
    if not own_head and not (full_vocabulary and (same_width or (tied and own_embedding))):
        raise ValueError(
            f"{head.source.path} has no tensor 'lm_head.weight', and no other output head fits: "
            f"draft_vocab_size={draft_vocab_size} of {target.vocab_size}, hidden_size="
            f"{values['hidden_size']} (target {target.hidden_size})"
        )
    return dict(
        algorithm="EAGLE3",
        draft_vocab_size=draft_vocab_size,
        feature_layers=layers,
        fc_bias="fc.bias" in head.names,
        has_own_embedding=own_embedding,
        # a configuration may call the head tied although the file has one: the tensor decides
        has_own_lm_head=own_head,
        ties_lm_head=tied,
        norm_before_residual=head.flag("norm_before_residual", head.is_speculators),
        # where a configuration has no switch, the tensors decide
        norm_before_fc=head.flag("norm_before_fc", "input_norm.weight" in head.names),
        has_fc_norm=head.flag("fc_norm", "fc_norm.0.weight" in head.names),
        norm_output=head.flag("norm_output"),
        **values,
    )


def _check_fc(head: _Head, in_size: int, meaning: str) -> None:
    shape = head.stored_shape("fc.weight")
    if len(shape) != 2 or shape[1] != in_size:
        raise ValueError(
            f"tensor 'fc.weight' in {head.source.info('fc.weight').path} has shape {shape}, but "
            f"{meaning} make {in_size} inputs; the head was trained for another target or other "
            "layers"
        )


def _feature_layers(head: _Head) -> tuple[int, ...]:
    """Target layers whose outputs are captured.

    In ``eagle_config`` the ids name layers whose output is read. At the top level, where
    speculators writes them, they index hidden states counted from the embedding, so id ``k`` is the
    output of layer ``k - 1``.
    """
    n = head.target.num_layers
    ids = head.eagle.get(_LAYER_IDS) or head.body.get(_LAYER_IDS)
    if ids and not (isinstance(ids, list) and all(isinstance(i, int) for i in ids)):
        raise ValueError(f"{head.path}: {_LAYER_IDS}={ids!r} must be a list of integers")
    if ids := head.eagle.get(_LAYER_IDS):
        layers, where = tuple(ids), f"eagle_config.{_LAYER_IDS}={ids}"
    elif ids := head.body.get(_LAYER_IDS):
        layers, where = tuple(i - 1 for i in ids), f"{_LAYER_IDS}={ids}"
    else:
        layers = head.target.default_feature_layers
        where = f"the default for {n} layers, {layers}"
    if not all(0 <= i < n for i in layers):
        raise ValueError(
            f"{head.path}: feature layers {where} are not layers of the target, which has {n}"
        )
    return layers


def _draft_vocab_size(head: _Head) -> int:
    """The configured size; without one, that of the tensors, else the target's."""
    size = head.body.get("draft_vocab_size", head.layer.get("draft_vocab_size"))
    if size is None:
        for name in ("d2t", "lm_head.weight"):
            if name in head.names:
                return head.source.info(name).shape[0]
        return head.target.vocab_size
    if not isinstance(size, int) or not 1 <= size <= head.target.vocab_size:
        raise ValueError(
            f"{head.path}: draft_vocab_size={size!r} must be an integer between 1 and the target's "
            f"vocab_size={head.target.vocab_size}"
        )
    return size
