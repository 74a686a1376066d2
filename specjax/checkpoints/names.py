"""Which Hugging Face tensors make up each weight of a target model."""

from specjax.checkpoints.assemble import Part, Recipe
from specjax.config import ModelConfig, TransformerConfig


def _linear(flat: str, parts: tuple[Part, ...], bias: bool) -> dict[str, Recipe]:
    recipes = {f"{flat}.kernel": Recipe(parts, transpose=True)}
    if bias:
        biases = tuple(
            Part(part.name.removesuffix("weight") + "bias", part.shape[:1]) for part in parts
        )
        recipes[f"{flat}.bias"] = Recipe(biases)
    return recipes


def vector(name: str, size: int) -> Recipe:
    """A one-dimensional weight that is stored as it is used."""
    return Recipe((Part(name, (size,)),))


def linear_recipes(
    flat: str, name: str, out_size: int, in_size: int, *, bias: bool
) -> dict[str, Recipe]:
    """One projection ``{name}.weight [out, in]`` and its bias."""
    return _linear(flat, (Part(f"{name}.weight", (out_size, in_size)),), bias)


def attention_recipes(
    config: TransformerConfig,
    flat: str,
    prefix: str,
    *,
    in_size: int,
    qkv_bias: bool,
    output_bias: bool,
    qk_norm: bool,
) -> dict[str, Recipe]:
    """Self-attention: ``{prefix}.{q,k,v,o}_proj`` and the query and key norms."""
    dim = config.head_dim
    q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
    qkv = tuple(
        Part(f"{prefix}.{letter}_proj.weight", (size, in_size))
        for letter, size in (("q", q_size), ("k", kv_size), ("v", kv_size))
    )
    recipes = _linear(f"{flat}.qkv", qkv, qkv_bias)
    recipes |= linear_recipes(
        f"{flat}.output", f"{prefix}.o_proj", config.hidden_size, q_size, bias=output_bias
    )
    if qk_norm:
        recipes[f"{flat}.q_norm.scale"] = vector(f"{prefix}.q_norm.weight", dim)
        recipes[f"{flat}.k_norm.scale"] = vector(f"{prefix}.k_norm.weight", dim)
    return recipes


def mlp_recipes(
    config: TransformerConfig, flat: str, prefix: str, *, bias: bool
) -> dict[str, Recipe]:
    """SwiGLU feed-forward: ``{prefix}.{gate,up,down}_proj``."""
    hidden, inner = config.hidden_size, config.intermediate_size
    gate_up = tuple(
        Part(f"{prefix}.{name}_proj.weight", (inner, hidden)) for name in ("gate", "up")
    )
    return _linear(f"{flat}.gate_up", gate_up, bias) | linear_recipes(
        f"{flat}.down", f"{prefix}.down_proj", hidden, inner, bias=bias
    )


def target_recipes(config: ModelConfig) -> dict[str, Recipe]:
    """Recipes of all weights of a target model, by flat name."""
    size = config.hidden_size
    table = (config.vocab_size, size)
    recipes = {"embedding.table": Recipe((Part("model.embed_tokens.weight", table),))}
    for i in range(config.num_layers):
        flat, prefix = f"layers.{i}", f"model.layers.{i}"
        recipes[f"{flat}.input_norm.scale"] = vector(f"{prefix}.input_layernorm.weight", size)
        recipes |= attention_recipes(
            config,
            f"{flat}.attention",
            f"{prefix}.self_attn",
            in_size=size,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            qk_norm=config.qk_norm,
        )
        recipes[f"{flat}.post_attention_norm.scale"] = vector(
            f"{prefix}.post_attention_layernorm.weight", size
        )
        recipes |= mlp_recipes(config, f"{flat}.mlp", f"{prefix}.mlp", bias=config.mlp_bias)
    recipes["norm.scale"] = vector("model.norm.weight", size)
    if not config.tie_word_embeddings:
        recipes["lm_head.kernel"] = Recipe((Part("lm_head.weight", table),), transpose=True)
    return recipes


def is_ignored_target_tensor(name: str, *, tied: bool) -> bool:
    """Whether a checkpoint tensor may be left unread: rotary buffers, and a tied output head."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")
