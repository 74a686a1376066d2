"""Open assistants of Gemma 4, which draft with the target's own keys and values."""

import os
from dataclasses import dataclass
from functools import partial

from specjax.checkpoints.checkpoint import Checkpoint
from specjax.checkpoints.huggingface import check_pair, layer_sizes
from specjax.checkpoints.packed_files import open_weights
from specjax.checkpoints.target import TargetCheckpoint, locate
from specjax.config import Count
from specjax.json_file import Fields, Flag, PositiveSize
from specjax.models.gemma4 import GEMMA4, Gemma4Config
from specjax.models.gemma4_assistant import AssistantConfig, Gemma4Assistant, read_layers

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


@dataclass(frozen=True)
class AssistantCheckpoint(Checkpoint[AssistantConfig]):
    """An assistant on disk; the target decides its dtype."""

    _network = Gemma4Assistant

    def describe(self) -> str:
        config = self.config
        return (
            f"assistant {self.path}: {config.num_layers} layers of {config.hidden_size} over KV of "
            f"the target, dtype {config.dtype}"
        )

    def canonical_name(self, name: str) -> str:
        return name

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor repeats the tied embeddings."""
        return name == "lm_head.weight"


def open_assistant(draft: str | os.PathLike[str], target: TargetCheckpoint) -> AssistantCheckpoint:
    """Read the configuration of an assistant.

    Raises ValueError if it is not found or not supported, or if it does not fit the target.
    """
    path = locate(draft, "draft")
    top = Fields.read(path / "config.json")
    if top.get("model_type", str, "") not in MODEL_TYPES:
        raise top.wrong("model_type", f"must be {' or '.join(MODEL_TYPES)} for an assistant")
    if top.get("use_ordered_embeddings", Flag, False):
        demand = "is not supported: only assistants of 12B and 31B, whose vocabulary is whole, are"
        raise top.wrong("use_ordered_embeddings", demand)
    if not isinstance(target.config, Gemma4Config):
        demand = f"needs a target of Gemma 4, not one of {target.config.model_type}"
        raise top.wrong("model_type", demand)
    if len(target.config.full_layers) == target.config.num_layers:
        demand = f"needs a layer with a window, which model={target.name!r} does not have"
        raise ValueError(f"draft={os.fspath(draft)!r} {demand}")
    if any(any(pair) for pair in target.config.kv_exponents):
        raise ValueError(f"draft={os.fspath(draft)!r} needs a target without scales of stored KV")
    body = top.fields("text_config")
    # no layer has KV, so that of all is shared
    values = {**GEMMA4.defaults, **body.values, "num_kv_shared_layers": 0}
    config = Fields({key: x for key, x in values.items() if x is not None}, body.where)
    wide = top.get("backbone_hidden_size", PositiveSize)
    sizes = layer_sizes(config) | GEMMA4.read(config)
    sizes |= {
        "model_type": "gemma4_text",
        "vocab_size": config.get("vocab_size", PositiveSize),
        "num_layers": config.get("num_hidden_layers", Count),
        "max_position_embeddings": target.config.max_position_embeddings,
        "dtype": target.config.dtype,
        "tie_word_embeddings": True,
        "target_hidden_size": wide,
    }
    opened = config.build(AssistantConfig, sizes)
    check_pair(path / "config.json", opened.vocab_size, wide, target.config)
    _check_heads(opened, target.config, path / "config.json")
    return AssistantCheckpoint(opened, path, partial(open_weights, path))


def _check_heads(config: AssistantConfig, target: Gemma4Config, path: object) -> None:
    """Raise ValueError if the target's layers have other keys than the assistant expects."""
    names = "head_dim", "num_kv_heads", "global_head_dim", "num_global_key_value_heads"
    pairs = {name: (getattr(config, name), getattr(target, name)) for name in names}
    window = target.windows[read_layers(target)[0]] if target.windows else 0
    pairs["sliding_window"] = max(config.windows, default=0), window
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise ValueError(
                f"{path}: the assistant has {name}={ours}, but the target's layers, whose KV it "
                f"reads, have {theirs}; use the assistant of this target"
            )
