"""``specjax inspect``: describe a draft or a model, and check whether a draft fits a target."""

import argparse
import dataclasses
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specjax.checkpoints.assistant import MODEL_TYPES, open_assistant
from specjax.checkpoints.block import open_block
from specjax.checkpoints.checkpoint import Checkpoint
from specjax.checkpoints.draft import module_prefixes, open_draft, open_draft_model, open_mtp
from specjax.checkpoints.packed_files import open_weights
from specjax.checkpoints.quantization import PACKED
from specjax.checkpoints.target import TargetCheckpoint, fetch_headers, locate, open_target
from specjax.checkpoints.tensors import TensorSource
from specjax.config import FeatureConfig, ModelConfig
from specjax.json_file import Fields, Size
from specjax.models.declare import SCALE
from specjax.models.experts import MixtureConfig
from specjax.models.gated_delta import DeltaConfig, GatedDelta
from specjax.models.gemma4 import Gemma4Config
from specjax.models.gemma4_assistant import AssistantConfig
from specjax.models.registry import family_of, layer_kinds
from specjax.models.short_conv import ConvConfig
from specjax.speculative.block import DFLASH, DSPARK
from specjax.speculative.eagle import EAGLE, EAGLE3
from specjax.speculative.frozen_kv_mtp import FROZEN_KV_MTP
from specjax.speculative.multi_layer_eagle import MULTI_LAYER_EAGLE
from specjax.speculative.standalone import STANDALONE
from specjax.text.tokenizer import Tokenizer

_NESTED = ("transformer_layer_config", "eagle_config", "dflash_config", "dspark_config")
_LAYER_IDS = "target_layer_ids aux_hidden_state_layer_ids eagle_aux_hidden_state_layer_ids".split()
_AS_DRAFT = f"{STANDALONE.name}, if it drafts for another model"
_MODEL = "language model"
_MANY_LAYERS = 1000  # assumed if the files do not describe the target; default layers depend on it


def run_inspect(args: argparse.Namespace, *_: Any) -> int:
    """Print one property per line; return 0, or 1 if the draft is refused or does not fit."""
    target = args.target
    with TemporaryDirectory() as folder:
        name = fetch_headers(args.checkpoint, "draft", Path(folder, "draft"))
        path, opened = locate(name, "draft", takes_files=True), None
        if target is not None:
            stored = fetch_headers(target, "model", Path(folder, "target"))
            opened = dataclasses.replace(open_target(stored), name=target)
        facts, reason = _try(path, opened)
        if opened is not None and not facts:
            facts = _try(path, None, does_fit=False)[0]
    is_model = target is None and facts.get("format", "").startswith(_MODEL)
    kind = "model" if is_model else "draft"
    for name, value in {kind: args.checkpoint, **facts}.items():
        print(f"{name}: {value}")
    if target is not None or reason:
        answer = f"no: {reason}" if reason else "yes"
        print(f"{'supported' if target is None else f'fits {target}'}: {answer}")
    return 1 if reason else 0


def _try(
    path: Path, target: TargetCheckpoint | None, *, does_fit: bool = True
) -> tuple[dict[str, Any], str]:
    """Return the properties of a draft and "", or {} and the reason to refuse the draft."""
    try:
        return dict(_facts(path, target, does_fit)), ""
    except ValueError as error:
        return {}, " ".join(str(error).split())


def _facts(
    path: Path, target: TargetCheckpoint | None, does_fit: bool
) -> Iterator[tuple[str, Any]]:
    """Open a draft for a target (default: the one in its files) and yield its properties."""
    opened, algorithm, kind = _open(path, target)
    opened.check_weights()
    config = opened.config
    yield "format", kind
    yield "algorithm", algorithm
    if layout := getattr(config, "layout", ""):
        yield "layout", layout
    yield "layers", f"{config.num_layers} of width {config.hidden_size}"
    if isinstance(config, MixtureConfig):
        count = f"{config.num_experts}, of which a token uses {config.num_experts_per_tok}"
        yield "experts", f"{count}, of width {config.moe_intermediate_size}"
    vocabulary = f"{config.vocab_size}, the target's" if does_fit else config.vocab_size
    if isinstance(config, FeatureConfig):
        layers = ", ".join(map(str, config.feature_layers)) or "the last, after the final norm"
        is_known = max(config.feature_layers, default=0) < _MANY_LAYERS // 4
        yield "target layers", layers if is_known else "follow from the target; pass --model"
        if config.draft_vocab_size < config.vocab_size:
            vocabulary = f"{config.draft_vocab_size} of {config.vocab_size}, mapped by d2t"
    yield "vocabulary", vocabulary
    yield "rope_theta", f"{config.rope_theta:g}"
    if isinstance(config, FeatureConfig) and (length := _stated_length(path, target)):
        yield "stated length", length
    if any(windows := getattr(config, "windows", ())):
        sizes = ", ".join(map(str, sorted(set(windows) - {0})))
        yield "windows", f"{sizes} in {sum(map(bool, windows))} of {config.num_layers} layers"
    is_packed = isinstance(config, MixtureConfig) and config.has_packed_experts
    if isinstance(opened, TargetCheckpoint) and (opened.stored or is_packed):
        yield "matrices", opened.matrices
    elif config.quantization is not None:
        yield "matrices", str(config.quantization)
    if recurrent := _count_recurrent(config):
        _, key_dim, heads, value_dim = config.delta_heads
        size = f"{4 * recurrent * heads * key_dim * value_dim} bytes per request"
        yield "states", f"{size} in {recurrent} of {config.num_layers} layers"
    convs = len(config.conv_layers) if isinstance(config, ConvConfig) else 0
    if convs:
        size = f"of {config.conv_L_cache} tokens"
        yield "convolutions", f"{size} in {convs} of {config.num_layers} layers"
    if isinstance(config, AssistantConfig):
        yield "KV memory", "none; it reads that of the target"
        return
    num_attentive = config.num_layers - recurrent - convs
    values = 2 * num_attentive * config.num_kv_heads * config.head_dim
    if isinstance(config, Gemma4Config):
        of_full = config.num_global_key_value_heads * config.global_head_dim
        values += 2 * len(config.full_layers) * (of_full - config.num_kv_heads * config.head_dim)
    plain = f"{values * config.dtypes.kv.itemsize} bytes per token in {config.dtype}"
    yield "KV memory", plain if convs else f"{plain}, {values} in fp8_e4m3"


Opened = tuple[Checkpoint[Any], str, str]


def _open(path: Path, target: TargetCheckpoint | None) -> Opened:
    """Open a draft; its tensor names decide its algorithm and its format."""
    if path.suffix == ".gguf":
        return _language_model(path, target)
    fields, source = Fields.read(path / "config.json"), open_weights(path)
    if fields.get("model_type", str, "") in MODEL_TYPES:
        if target is None:
            raise ValueError(f"{path} is an assistant, which needs its target; pass --model")
        return open_assistant(path, target), FROZEN_KV_MTP.name, "Gemma 4 assistant"
    names = {name.removeprefix("model.").removesuffix(PACKED) for name in source.infos}
    if modules := module_prefixes(source, fields):
        pair = target or open_target(path, knob="draft")
        opened = open_mtp(path, pair, num_modules=len(modules))
        has_several = family_of(opened.config).modules.is_numbered
        algorithm = (MULTI_LAYER_EAGLE if has_several else EAGLE).name
        others = (name for name in source.infos if not name.startswith(modules))
        if target is None and any(re.search(r"\blayers\.0\.", name) for name in others):
            return pair, f"{algorithm}, without a draft", f"{_MODEL} ({pair.config.model_type})"
        return opened, algorithm, "multi-token prediction modules"
    kinds = map(fields.values.get, ("architectures", "speculators_model_type"))
    # open_block names missing tensors, and refuses a model with pard_token
    if (
        names & {"hidden_norm.weight", "encoder.output_norm_enc.weight"}
        or re.search("dflash|dspark", str([*fields.values, *kinds]), re.IGNORECASE)
        or ("pard_token" in fields and not names & {"fc.weight", "mask_hidden"})
    ):
        block = open_block(path, target or _stated_target(source, fields))
        algorithm = (DSPARK if block.config.markov_head else DFLASH).name
        return block, algorithm, block.config.checkpoint_format
    if names & {"fc.weight", "mask_hidden"}:
        head = open_draft(path, target or _stated_target(source, fields))
        if not head.config.fuses_features:
            return head, EAGLE.name, "EAGLE-1/2"
        return head, EAGLE3.name, "EAGLE-3" if head.config.mask_token_id is None else "P-EAGLE"
    return _language_model(path, target)


def _language_model(path: Path, target: TargetCheckpoint | None) -> Opened:
    opened = open_draft_model(path, target) if target else open_target(path, knob="draft")
    if target and _count_recurrent(opened.config):
        raise ValueError(f"{path} has recurrent layers, which a draft model must not have")
    algorithm = STANDALONE.name if target else _AS_DRAFT
    return opened, algorithm, f"{_MODEL} ({opened.config.model_type})"


def _count_recurrent(config: Any) -> int:
    """Number of recurrent layers, by their mixers."""
    if not isinstance(config, DeltaConfig):
        return 0
    return sum(kind.mixer is GatedDelta for kind in layer_kinds(config))


def _merged(fields: Fields) -> Fields:
    """The keys of a draft's file, also of its sections."""
    nested = {key: x for name in _NESTED for key, x in fields.fields(name).values.items()}
    stated = {key: x for key, x in fields.values.items() if x is not None}
    return Fields(nested | stated, fields.where)


def _stated_length(path: Path, target: TargetCheckpoint | None) -> str:
    """Describe the longest text that the file of a head or drafter states, if it does."""
    fields = _merged(Fields.read(path / "config.json"))
    if not (length := fields.get("max_position_embeddings", Size, 0)):
        return ""
    if target is None:
        return f"{length} tokens"
    limit = target.config.context_limit
    longer = "; for longer texts, see speculative_draft_window_size" if length < limit else ""
    return f"{length} tokens, of up to {limit} in the target's context{longer}"


def _stated_target(source: TensorSource, fields: Fields) -> TargetCheckpoint:
    """Return a stand-in for the target, with the sizes that the draft's files state."""
    keys = _merged(fields)
    tables = ("t2d", "markov_head.markov_w1.weight", "embed_tokens.weight", "lm_head.weight")
    shapes = [source.infos[name].shape for name in tables if name in source.infos]
    sizes = [shape[0] for shape in shapes if shape]
    ids = [i for name in _LAYER_IDS for i in keys.get(name, list[int], [])]
    dtypes = {info.dtype for name, info in source.infos.items() if SCALE not in name}
    config = keys.build(
        ModelConfig,
        {
            "model_type": "llama",
            "vocab_size": keys.get("vocab_size", Size, sizes[0] if sizes else 1),
            "hidden_size": keys.get("target_hidden_size", Size, keys.get("hidden_size", Size, 1)),
            "intermediate_size": 1,
            "num_layers": keys.get("num_target_layers", Size, max([*ids, 3]) + 1)
            if ids or "num_target_layers" in keys
            else _MANY_LAYERS,
            "num_heads": 1,
            "num_kv_heads": 1,
            "head_dim": 2,
            "dtype": "float32" if "float32" in dtypes else "bfloat16",
        },
    )
    tokenizer = partial(Tokenizer.from_pretrained, source.path)
    return TargetCheckpoint(config, source.path, lambda: source, "the target", tokenizer)
