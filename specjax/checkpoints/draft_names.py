"""Which published tensors make up each weight of a draft head."""

import re
from pathlib import Path

import numpy as np

from specjax.checkpoints.assemble import Part, Recipe
from specjax.checkpoints.names import (
    attention_recipes,
    linear_recipes,
    mlp_recipes,
    vector,
)
from specjax.checkpoints.tensors import TensorInfo, TensorSource
from specjax.config import DraftConfig


def canonical_name(name: str, *, is_eagle3: bool) -> str:
    """A stored name without ``model.`` prefix, the EAGLE-3 layer always called ``midlayer``."""
    name = name.removeprefix("model.")
    return re.sub(r"^layers\.0\.", "midlayer.", name) if is_eagle3 else name


class DraftSource:
    """Tensors of a draft head under canonical names.

    Raises:
        ValueError: if two stored tensors have the same canonical name.
    """

    def __init__(self, source: TensorSource) -> None:
        self.path: Path = source.path
        self._source = source
        stored = sorted(source.names())
        is_eagle3 = any(name.endswith("hidden_norm.weight") for name in stored)
        self._stored: dict[str, str] = {}
        for name in stored:
            canonical = canonical_name(name, is_eagle3=is_eagle3)
            if canonical in self._stored:
                raise ValueError(
                    f"{source.path} stores both {self._stored[canonical]!r} and {name!r}, which "
                    "are the same tensor"
                )
            self._stored[canonical] = name

    def names(self) -> set[str]:
        """Canonical names of all tensors."""
        return set(self._stored)

    def info(self, name: str) -> TensorInfo:
        """What is known of a tensor without reading it."""
        return self._source.info(self._stored[name])

    def read(self, name: str) -> np.ndarray:
        """The tensor, in its stored dtype."""
        return self._source.read(self._stored[name])


def draft_recipes(config: DraftConfig) -> dict[str, Recipe]:
    """Recipes of all weights of a draft head, by flat name."""
    is_eagle3 = config.algorithm == "EAGLE3"
    size = config.hidden_size
    table = (config.vocab_size, size)
    recipes = {}
    if config.has_own_embedding:
        recipes["embedding.table"] = Recipe((Part("embed_tokens.weight", table),))
    if config.has_own_lm_head and not config.ties_lm_head:
        recipes |= linear_recipes("lm_head", "lm_head", config.draft_vocab_size, size, bias=False)
    if config.draft_vocab_size != config.vocab_size:
        recipes["d2t"] = vector("d2t", config.draft_vocab_size)
    fc_in = config.feature_size + (0 if is_eagle3 else size)
    recipes |= linear_recipes("fc", "fc", size, fc_in, bias=config.fc_bias)
    return recipes | (_eagle3_recipes(config) if is_eagle3 else _eagle_recipes(config))


def _eagle3_recipes(config: DraftConfig) -> dict[str, Recipe]:
    size = config.hidden_size
    recipes = {
        "input_norm.scale": vector("midlayer.input_layernorm.weight", size),
        "hidden_norm.scale": vector("midlayer.hidden_norm.weight", size),
        "post_attention_norm.scale": vector("midlayer.post_attention_layernorm.weight", size),
        "norm.scale": vector("norm.weight", size),
    }
    if config.norm_before_fc:
        recipes["feature_norm.scale"] = vector("input_norm.weight", config.feature_size)
    if config.has_fc_norm:
        for i in range(len(config.feature_layers)):
            recipes[f"fc_norms.{i}.scale"] = vector(
                f"fc_norm.{i}.weight", config.target_hidden_size
            )
    return recipes | _block_recipes(config, "", "midlayer", in_size=2 * size)


def _eagle_recipes(config: DraftConfig) -> dict[str, Recipe]:
    recipes: dict[str, Recipe] = {}
    for i in range(config.num_layers):
        layer, size = f"layers.{i}", config.hidden_size
        recipes[f"{layer}.post_attention_norm.scale"] = vector(
            f"{layer}.post_attention_layernorm.weight", size
        )
        if i:  # the first layer has no input norm
            recipes[f"{layer}.input_norm.scale"] = vector(f"{layer}.input_layernorm.weight", size)
        recipes |= _block_recipes(config, f"{layer}.", layer, in_size=size)
    return recipes


def _block_recipes(
    config: DraftConfig, flat: str, prefix: str, *, in_size: int
) -> dict[str, Recipe]:
    return attention_recipes(
        config,
        f"{flat}attention",
        f"{prefix}.self_attn",
        in_size=in_size,
        qkv_bias=config.qkv_bias,
        output_bias=False,
        qk_norm=False,
    ) | mlp_recipes(config, f"{flat}mlp", f"{prefix}.mlp", bias=False)


def is_ignored_draft_tensor(name: str, config: DraftConfig) -> bool:
    """Whether a stored tensor may be left unread.

    Those are vocabulary maps (checked separately), rotary buffers, copies of the target's tensors
    that trainers leave in, and the embeddings and output head that EAGLE-1/2 shares.
    """
    shared = ("embed_tokens.weight", "lm_head.weight") if config.algorithm == "EAGLE" else ()
    return (
        name in ("d2t", "t2d", *shared)
        or name.endswith("rotary_emb.inv_freq")
        or (name.startswith(("verifier_norm.", "verifier_lm_head.")))
    )
