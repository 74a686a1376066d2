"""Which published tensors make up each weight of a target or draft model, and their shapes."""

from collections.abc import Mapping
from dataclasses import dataclass

from specjax.config import DraftConfig, ModelConfig, MtpConfig


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor that fills a stripe of a weight. ``shape`` is the checkpoint's."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """How one weight is made: its parts, concatenated on the output axis.

    A transposed weight is ``[in, out]`` made of parts ``[out_i, in]``; any other is the parts as
    they are, concatenated on their first axis. An integer weight is int32.
    """

    parts: tuple[Part, ...]
    transpose: bool = False
    is_integer: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        width, rest = sum(part.shape[0] for part in self.parts), self.parts[0].shape[1:]
        return (*rest, width) if self.transpose else (width, *rest)


Recipes = Mapping[str, Recipe]
# what the tensors of modules of multi-token prediction begin with
MTP_PREFIX = "model.mtp_layers."


def target_recipes(config: ModelConfig) -> Recipes:
    size, table = config.hidden_size, (config.vocab_size, config.hidden_size)
    recipes = _vectors(size, {"norm": "model.norm"})
    recipes["embedding.table"] = Recipe((Part("model.embed_tokens.weight", table),))
    if not config.tie_word_embeddings:
        recipes |= _linear("lm_head", {"lm_head": config.vocab_size}, size)
    for i in range(config.num_layers):
        recipes |= _decoder_layer(config, f"layers.{i}.", f"model.layers.{i}.")
    return recipes


def mtp_recipes(config: MtpConfig) -> Recipes:
    """Recipes of modules of multi-token prediction, under the names of MiMo's checkpoints."""
    size, recipes = config.hidden_size, dict[str, Recipe]()
    for i in range(config.num_layers):
        flat, prefix = f"modules.{i}.", f"{MTP_PREFIX}{i}."
        names = {"hidden_norm": "hidden", "token_norm": "token", "norm": "final"}
        recipes |= _vectors(size, {flat + a: f"{prefix}{b}_layernorm" for a, b in names.items()})
        recipes |= _linear(f"{flat}fc", {f"{prefix}input_proj": size}, 2 * size)
        recipes |= _decoder_layer(config, f"{flat}layer.", prefix)
    return recipes


def draft_recipes(config: DraftConfig) -> Recipes:
    """Recipes of all weights of a draft head, by flat name; tensors have canonical names."""
    size = config.hidden_size
    fc_in = config.feature_size + (0 if config.fuses_features else size)
    recipes = _linear("fc", {"fc": size}, fc_in, bias=config.fc_bias)
    if config.has_own_embedding:
        part = Part("embed_tokens.weight", (config.vocab_size, size))
        recipes["embedding.table"] = Recipe((part,))
    if config.has_own_lm_head and not config.ties_lm_head:
        recipes |= _linear("lm_head", {"lm_head": config.draft_vocab_size}, size)
    if config.draft_vocab_size != config.vocab_size:
        recipes["d2t"] = Recipe((Part("d2t", (config.draft_vocab_size,)),), is_integer=True)
    if config.fuses_features:
        norms = {"input_norm": "midlayer.input_layernorm", "hidden_norm": "midlayer.hidden_norm"}
        recipes |= _vectors(size, norms | {"norm": "norm"})
        recipes |= _layer(config, "", "midlayer.", 2 * size)
        if config.norm_before_fc:
            recipes |= _vectors(config.feature_size, {"feature_norm": "input_norm"})
        if config.has_fc_norm:
            each = {f"fc_norms.{i}": f"fc_norm.{i}" for i in range(len(config.feature_layers))}
            recipes |= _vectors(config.target_hidden_size, each)
        return recipes
    for i in range(config.num_layers):
        prefix = f"layers.{i}."
        recipes |= _layer(config, prefix, prefix, size)
        if i:  # the first layer has no input norm
            recipes |= _vectors(size, {f"{prefix}input_norm": f"{prefix}input_layernorm"})
    return recipes


def _vectors(size: int, names: Mapping[str, str]) -> dict[str, Recipe]:
    """Scales of norms: flat name to stored name."""
    return {
        f"{flat}.scale": Recipe((Part(f"{name}.weight", (size,)),)) for flat, name in names.items()
    }


def _linear(
    flat: str, parts: Mapping[str, int], in_size: int, *, bias: bool = False
) -> dict[str, Recipe]:
    """A projection made of stored projections ``[out_i, in]``, given with their widths."""
    kernels = tuple(Part(f"{name}.weight", (size, in_size)) for name, size in parts.items())
    recipes = {f"{flat}.kernel": Recipe(kernels, transpose=True)}
    if bias:
        biases = tuple(Part(f"{name}.bias", (size,)) for name, size in parts.items())
        recipes[f"{flat}.bias"] = Recipe(biases)
    return recipes


def _decoder_layer(config: ModelConfig | MtpConfig, flat: str, prefix: str) -> dict[str, Recipe]:
    """A layer as targets have it, with its input norm."""
    size = config.hidden_size
    recipes = _vectors(size, {f"{flat}input_norm": f"{prefix}input_layernorm"})
    biases = {"output_bias": config.output_bias, "mlp_bias": config.mlp_bias}
    recipes |= _layer(config, flat, prefix, size, **biases)
    if config.qk_norm:
        norms = {f"{flat}attention.{x}_norm": f"{prefix}self_attn.{x}_norm" for x in "qk"}
        recipes |= _vectors(config.head_dim, norms)
    return recipes


def _layer(
    config: ModelConfig | MtpConfig | DraftConfig,
    flat: str,
    prefix: str,
    in_size: int,
    *,
    output_bias: bool = False,
    mlp_bias: bool = False,
) -> dict[str, Recipe]:
    size, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    widths = {"q": q_size, "k": kv_size, "v": kv_size}
    qkv = {f"{prefix}self_attn.{letter}_proj": width for letter, width in widths.items()}
    gate_up = {f"{prefix}mlp.{name}_proj": inner for name in ("gate", "up")}
    output, down = {f"{prefix}self_attn.o_proj": size}, {f"{prefix}mlp.down_proj": size}
    norm = {f"{flat}post_attention_norm": f"{prefix}post_attention_layernorm"}
    return (
        _linear(f"{flat}attention.qkv", qkv, in_size, bias=config.qkv_bias)
        | _linear(f"{flat}attention.output", output, q_size, bias=output_bias)
        | _linear(f"{flat}mlp.gate_up", gate_up, size, bias=mlp_bias)
        | _linear(f"{flat}mlp.down", down, inner, bias=mlp_bias)
        | _vectors(size, norm)
    )
