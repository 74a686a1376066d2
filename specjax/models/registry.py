"""The model families by ``model_type``. To add one, write a file and add a line here."""

from collections.abc import Collection

from specjax.checks import refused
from specjax.config import ModelConfig
from specjax.models.family import MTP_PREFIX, Family, Part, Recipe, Recipes, linear, vectors
from specjax.models.layers import LayerKind
from specjax.models.llama import LLAMA, MISTRAL
from specjax.models.qwen import MIMO, QWEN2, QWEN3

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mimo": MIMO,
}
HOW_TO_ADD = "docs/extending.md shows how to add a model family"
UNKNOWN = f"must be one of {sorted(FAMILIES)}; {HOW_TO_ADD}"


def family_of(config: ModelConfig) -> Family:
    if config.model_type not in FAMILIES:
        raise refused("model_type", config.model_type, UNKNOWN)
    return FAMILIES[config.model_type]


def layer_kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    return family_of(config).layers(config)


def check_attention(config: ModelConfig, computed: Collection[str]) -> None:
    """Raise ValueError if a layer needs an attention option that is not in ``computed``."""
    for i, kind in enumerate(layer_kinds(config)):
        given = kind.attention_options
        if unknown := {name: given[name] for name in given if name not in computed}:
            raise ValueError(
                f"model_type={config.model_type!r}: layer {i} needs attention options {unknown}, "
                f"but paged attention supports only {sorted(computed)}"
            )


def target_recipes(config: ModelConfig) -> Recipes:
    size, table = config.hidden_size, (config.vocab_size, config.hidden_size)
    recipes = vectors(size, {"norm": "model.norm"})
    recipes["embedding.table"] = Recipe((Part("model.embed_tokens.weight", table),))
    if not config.tie_word_embeddings:
        recipes |= linear("lm_head", {"lm_head": config.vocab_size}, size, config.dtypes)
    family = family_of(config)
    for i, kind in enumerate(family.layers(config)):
        recipes |= family.recipe(config, kind, f"layers.{i}.", f"model.layers.{i}.")
    return recipes


def mtp_recipes(config: ModelConfig) -> Recipes:
    """Recipes for multi-token prediction modules, with the tensor names of MiMo's checkpoints."""
    size, recipes, family = config.hidden_size, dict[str, Recipe](), family_of(config)
    for i, kind in enumerate(family.layers(config)):
        flat, prefix = f"modules.{i}.", f"{MTP_PREFIX}{i}."
        names = {"hidden_norm": "hidden", "token_norm": "token", "norm": "final"}
        recipes |= vectors(size, {flat + a: f"{prefix}{b}_layernorm" for a, b in names.items()})
        recipes |= linear(f"{flat}fc", {f"{prefix}input_proj": size}, 2 * size, config.dtypes)
        recipes |= family.recipe(config, kind, f"{flat}layer.", prefix)
    return recipes
