"""The model families by ``model_type``. To add one, write a file and add a line here."""

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import entry_points

import jax

from specjax.checks import refused
from specjax.compiling.digest import source_facts
from specjax.config import ModelConfig
from specjax.models.ernie import ERNIE
from specjax.models.exaone import EXAONE4
from specjax.models.family import Family
from specjax.models.gemma import GEMMA, GEMMA2, GEMMA3
from specjax.models.gemma4 import GEMMA4, GEMMA4_UNIFIED
from specjax.models.glm import GLM, GLM4
from specjax.models.gpt_oss import GPT_OSS
from specjax.models.granite_swa import GRANITE_SWA
from specjax.models.hunyuan import HUNYUAN
from specjax.models.layers import LayerKind
from specjax.models.lfm2 import LFM2, LFM2_MOE
from specjax.models.llama import GRANITE, LLAMA, MINISTRAL, MINISTRAL3, MISTRAL
from specjax.models.mixtures import (
    GLM4_MOE,
    GRANITE_MOE,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
)
from specjax.models.muse import MUSE
from specjax.models.olmo import OLMO2, OLMO3
from specjax.models.phi import PHI3
from specjax.models.qwen import MIMO, QWEN2, QWEN3
from specjax.models.qwen35 import QWEN35, QWEN35_MOE
from specjax.models.seed_oss import SEED_OSS
from specjax.models.smollm3 import SMOLLM3

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "ministral": MINISTRAL,
    "ministral3": MINISTRAL3,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mimo": MIMO,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4_UNIFIED,
    "phi3": PHI3,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "granite": GRANITE,
    "smollm3": SMOLLM3,
    "glm": GLM,
    "glm4": GLM4,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
    "olmoe": OLMOE,
    "granitemoe": GRANITE_MOE,
    "glm4_moe": GLM4_MOE,
    "gpt_oss": GPT_OSS,
    "qwen3_5_text": QWEN35,
    "qwen3_5_moe_text": QWEN35_MOE,
    "seed_oss": SEED_OSS,
    "exaone4": EXAONE4,
    "granite_swa": GRANITE_SWA,
    "ernie4_5": ERNIE,
    "hunyuan_v1_dense": HUNYUAN,
    "lfm2": LFM2,
    "lfm2_moe": LFM2_MOE,
    "muse_glimmer_text": MUSE,
}
# models that also read images, and the family of their text model, which alone is loaded
WRAPPERS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "mistral3": "mistral",
    "muse_glimmer": "muse_glimmer_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
# group of entry points: each has a model type and the module that adds it to FAMILIES
GROUP = "specjax.families"
HOW_TO_ADD = "docs/models.md shows how to add a model family"
UNKNOWN = f"must be one of {sorted({*FAMILIES, *WRAPPERS})}; {HOW_TO_ADD}"
# what is missing for families that people ask for
_REASONS = {
    "mixtures of experts of another kind": "deepseek_v2 deepseek_v3 ernie4_5_moe llama4 "
    "llama4_text phimoe",
    "recurrent layers of another kind": "bamba falcon_h1 falcon_mamba granitemoehybrid jamba "
    "mamba mamba2 nemotron_h qwen3_next recurrent_gemma zamba2",
    "LayerNorm layers": "cohere cohere2 falcon gpt2 gpt_neox nemotron olmo opt phi stablelm "
    "starcoder2",
    "images, or text alone from other files": "idefics3 internvl llava llava_next mllama pixtral "
    "qwen2_vl qwen2_5_vl qwen3_vl",
    "per-layer embeddings": "gemma3n gemma3n_text",
}


def refusal(model_type: str | None, unknown: str = UNKNOWN) -> str:
    """Say why a family is not supported, and what else to use: ``unknown``."""
    bare = re.sub("[_-]", "", model_type or "")  # GGUF files write gpt-oss and qwen3moe
    for reason, names in _REASONS.items():
        if bare in names.replace("_", "").split():
            return f"needs {reason}, which are not supported yet; it {unknown}"
    return unknown


def load_family(model_type: str | None) -> None:
    """Import the module with which another package adds a family, if one is installed.

    Raises ValueError if the module cannot be loaded or does not add the family.
    """
    for point in entry_points(group=GROUP, name=model_type or ""):
        if model_type in FAMILIES:
            return
        owner = f"is from {point.value} of {point.dist and point.dist.name}, which"
        try:
            point.load()
        except Exception as error:
            demand = f"{owner} cannot be loaded: {error!r}"
            raise refused("model_type", model_type, demand) from error
        if model_type not in FAMILIES:
            raise refused("model_type", model_type, f"{owner} does not add it to FAMILIES")


def family_of(config: ModelConfig) -> Family:
    if config.model_type not in FAMILIES:
        raise refused("model_type", config.model_type, refusal(config.model_type))
    return FAMILIES[config.model_type]


def refusals(config: ModelConfig, device: jax.Device, *, deterministic: bool) -> Iterator[str]:
    """Why the layers of a model cannot run on a device."""
    for options in (kind.attention_options for kind in layer_kinds(config) if deterministic):
        if options:
            yield (
                "enable_deterministic_inference=True does not support the attention options "
                f"{sorted(options)} of the model's layers"
            )


def layer_kinds(
    config: ModelConfig, implementation: str | None = None, shards: int = 1
) -> tuple[LayerKind, ...]:
    """The kinds of the layers, with the exponents of their stored keys and values."""
    kinds = family_of(config).layers(config)
    exponents = config.kv_exponents or ((0, 0),) * len(kinds)
    return tuple(
        replace(kind, implementation=implementation, shards=shards, exponents=pair)
        for kind, pair in zip(kinds, exponents, strict=True)
    )


def cache_facts(config: ModelConfig) -> tuple[str, ...]:
    """Cache-key entries for the modules of layers that other packages define."""
    modules = [m for kind in layer_kinds(config) for m in (kind.mixer, kind.feed_forward)]
    classes = {getattr(module, "func", module) for module in modules}  # of partial functions
    return tuple(sorted({fact for each in classes for fact in source_facts(each)}))
