"""Numbers in configurations: each is refused by file and key, or all scales are finite."""

import json
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax.checkpoints import open_draft, open_target
from specjax.checkpoints.block import open_block
from specjax.config import ModelConfig, Rope, TransformerConfig
from specjax.models.registry import FAMILIES
from specjax.models.rope import rope_frequencies
from specjax.testing.files import write_folder

from ..support.block_files import CASES, BlockCase, target_at, write_block
from ..support.checkpoint_files import CONFIG, HEAD_CONFIG, LAYERS, head_tensors

# with another size, the error may name what it disagrees with
SIZES = ("hidden_size", "block_size", "target_layer_ids", "aux_hidden_state_layer_ids")
WRONG: list[Any] = [0, -1, 1e300, float("nan"), float("inf"), 10**8, True, "x"]
ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0, "mscale": 1.0}
YARN |= {"mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.1}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 2.0}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "attention_factor": 1.2}
GEMMA2 = {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0}
GEMMA2 |= {"final_logit_softcapping": 30.0, "sliding_window": 32}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
GRANITE |= {"attention_multiplier": 0.015625, "logits_scaling": 8.0}
QWEN = {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
# family -> the numbers that only it reads, or that mean more in it
OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 8, "partial_rotary_factor": 0.5},
    "mistral": {"sliding_window": 32, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "ministral3": {"rope_parameters": YARN | {"rope_theta": 1e6}},
    "qwen2": QWEN | {"rope_scaling": YARN},
    "qwen3": QWEN | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "mimo": {"rope_scaling": LLAMA3},
    "gemma": {"head_dim": 8},
    "gemma2": GEMMA2 | {"sliding_window_pattern": 2},
    "gemma3_text": GEMMA2 | {"sliding_window_pattern": 6, "rope_local_base_freq": 1e4},
    "phi3": {"original_max_position_embeddings": 64, "rope_scaling": LONGROPE},
    "olmo3": {
        "rope_parameters": {
            "full_attention": YARN | {"rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    },
    "granite": GRANITE,
    "smollm3": QWEN | {"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 0]},
    "glm4": {"partial_rotary_factor": 0.5, "head_dim": 8},
    "qwen3_moe": EXPERTS | {"num_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": [0]},
    "qwen2_moe": EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 24},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 32},
    "glm4_moe": EXPERTS
    | {"n_routed_experts": 8, "n_shared_experts": 2, "n_group": 2, "topk_group": 1}
    | {"routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
    "exaone4": {"sliding_window": 32, "sliding_window_pattern": 2},
    "granite_swa": GRANITE | {"sliding_window": 32, "layer_rope_theta": [1e6, 0, 1e4]},
    "muse_glimmer_text": {"sliding_window": 32, "layer_rope_theta": [5e3, 0, 5e3]}
    | {"qk_scale_factor": 3.87, "post_norm_eps": 1e-8, "output_multiplier": 0.196}
    | {"final_logit_softcapping": 20.0},
    "lfm2": {"block_ff_dim": 96, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.5}
    | {"conv_L_cache": 3, "norm_eps": 1e-5, "full_attn_idxs": [1]},
    "hunyuan_v1_dense": {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1e3}},
}


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all numbers in a JSON value."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in items:
            yield from paths(entry, (*path, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = list(value) if isinstance(value, list) else dict(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def ropes(config: TransformerConfig) -> Iterator[Rope]:
    for rope in {config.rope, *getattr(config, "layer_ropes", ())} - {None}:
        yield from (rope, rope.within(16), rope.within(2**20))


def check_scales(config: TransformerConfig) -> None:
    """All multipliers are finite in float32, and none is 0."""
    for rope in ropes(config):
        frequencies = rope_frequencies(rope)
        assert np.isfinite(frequencies).all()
        assert (frequencies[: (rope.rotary_dim or rope.head_dim) // 2] > 0).all() or (
            rope.rotary_dim == 0
        )
        scale = rope.scaling.attention_factor if rope.scaling else 1.0
        assert 0 < np.float32(scale) < np.inf
    assert 0 < np.float32(config.rms_norm_eps) <= 1
    if isinstance(config, ModelConfig):
        values = [config.embedding_scale, config.residual_scale, config.logit_scale]
        optional = config.attention_scale, config.attention_softcap, config.logit_softcap
        values += [value for value in optional if value is not None]
        assert all(0 < np.float32(value) < np.inf for value in values)


def check_numbers(file: Path, body: Any, only: Any, act: Callable[[], Any], count: int) -> None:
    """Replace each number of ``only`` by ``count`` of the wrong values, drawn with a fixed seed."""
    rng = random.Random(0)
    file.write_text(json.dumps(body))
    check_scales(act().config)
    for path in paths(only):
        key = next(name for name in reversed(path) if isinstance(name, str))
        for value in rng.sample(WRONG, count):
            file.write_text(json.dumps(replaced(body, path, value)))
            try:
                check_scales(act().config)
                continue
            except ValueError as error:
                refusal = str(error)
            assert str(file) in refusal or "model.safetensors" in refusal
            assert key in refusal or key in SIZES


@pytest.mark.parametrize("model_type", OF_FAMILY)
def test_numbers_of_targets(tmp_path: Path, model_type: str) -> None:
    own, name = OF_FAMILY[model_type], FAMILIES[model_type].architecture
    body = CONFIG | own | {"model_type": model_type, "architectures": [name]}
    only = body if model_type == "llama" else own
    check_numbers(tmp_path / "config.json", body, only, partial(open_target, tmp_path), 3)


@pytest.mark.parametrize("kind", ["eagle-3", "5", "3-gated"])
def test_numbers_of_drafts(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "draft"
    target: Any = target_at(tmp_path)
    if kind == "eagle-3":
        target = open_target(write_folder(tmp_path / "target", CONFIG, {}))
        write_folder(path, HEAD_CONFIG | {"rope_scaling": YARN}, head_tensors())
    else:
        write_block(path, CASES[kind])
    body = json.loads((path / "config.json").read_text())
    act = open_draft if kind == "eagle-3" else open_block
    check_numbers(path / "config.json", body, body, partial(act, path, target), 2)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("qwen2", {"rope_scaling": YARN | {"beta_fast": 0}}, "beta_fast=0 must be at least 1e-06"),
        ("qwen2", {"rope_scaling": YARN | {"beta_slow": 0}}, "beta_slow=0 must be"),
        ("qwen2", {"rope_scaling": YARN, "rope_theta": 1}, "rope_theta=1 must be above 1.0"),
        ("qwen2", {"rope_scaling": YARN | {"attention_factor": 1e300}}, "attention_factor=1e"),
        ("phi3", {"rope_scaling": LONGROPE, ORIGINAL: 1}, f"{ORIGINAL}=1 must be an integer"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 must be at least 1e-06"),
        ("granite", {"logits_scaling": 0}, "logits_scaling=0 must be at least 1e-06"),
        ("llama", {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}}, "head_dim=2"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers=\[1\] must have one value"),
        ("exaone4", {"sliding_window_pattern": "LG"}, "sliding_window_pattern='LG' must be"),
        ("granite_swa", {"layer_rope_theta": [1e4]}, "layer_rope_theta=.* one value for each"),
        ("granite_swa", {"layer_rope_theta": [0, 1, 0]}, "must be 0, for no rotation, or above 1"),
        ("lfm2", {"layer_types": ["conv", "mamba"]}, "layer_types=.* must be conv or full_atten"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache=1 must be at least 2"),
        ("muse_glimmer_text", {"layer_rope_theta": [0, 5, 0]}, "must be 0 or rope_theta=5000"),
        ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm=False is not supported"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla=True is not supported; only false is"),
        ("phi3", {"rope_scaling": LONGROPE | {"short_factor": ["a"]}}, "must be a list of finite"),
    ],
)
def test_refused_numbers(
    tmp_path: Path, model_type: str, changes: dict[str, Any], message: str
) -> None:
    names = {"model_type": model_type, "architectures": [FAMILIES[model_type].architecture]}
    write_folder(tmp_path, CONFIG | names | changes, {})
    with pytest.raises(ValueError, match=rf"config\.json.*{message}"):
        open_target(tmp_path)


SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 4}


def check_fast(act: Any, message: str) -> None:
    before = time.process_time()
    with pytest.raises(ValueError, match=message):
        act()
    assert time.process_time() - before < 0.5  # a loop over 10**8 takes more than 10 s


@pytest.mark.parametrize("model_type", FAMILIES)
def test_claimed_layers_of_targets(tmp_path: Path, model_type: str) -> None:
    """The limit is checked before lists of this length are made."""
    names = {"model_type": model_type, "architectures": [FAMILIES[model_type].architecture]}
    sizes = {"num_hidden_layers": 10**8, "head_dim": 8}
    write_folder(tmp_path, CONFIG | QWEN | names | sizes, {})
    check_fast(lambda: open_target(tmp_path), "num_hidden_layers=100000000 must be .* 1 to 1024")


def test_claimed_layers_of_mixtures(tmp_path: Path) -> None:
    """Of layers outside the model, no list is made."""
    changes = OF_FAMILY["glm4_moe"] | {"model_type": "glm4_moe", "architectures": []}
    folder = partial(write_folder, tmp_path, tensors={})
    folder(CONFIG | changes | {"first_k_dense_replace": 10**8})
    check_fast(lambda: open_target(tmp_path).check_weights(), "lacks .* 'model.embed_tokens.weight")
    folder(CONFIG | changes | {"num_nextn_predict_layers": 10**8})
    check_fast(lambda: open_target(tmp_path), "num_nextn_predict_layers=100000000 must be .* 1024")
    folder(CONFIG | changes | {"num_nextn_predict_layers": 2})
    is_ignored = open_target(tmp_path).is_ignored
    ignored = [i for i in range(8) if is_ignored(f"model.layers.{i}.enorm.weight")]
    assert ignored == [LAYERS, LAYERS + 1]


@pytest.mark.parametrize("key", ["num_attention_heads", "num_key_value_heads", "head_dim"])
def test_claimed_heads(tmp_path: Path, key: str) -> None:
    """Recipes have index arrays of heads and of their dimensions."""
    changes = {"partial_rotary_factor": 0.5, key: 2**24}
    write_folder(tmp_path, CONFIG | changes, {})
    check_fast(lambda: open_target(tmp_path).recipes, f"{key}=16777216 must be .* 1 to 1024")


@pytest.mark.parametrize("model_type", ["glm4", "qwen3_5_text"])
def test_layers_share_the_order_of_rows(tmp_path: Path, model_type: str) -> None:
    """Otherwise, 1,024 layers with as many heads and dimensions would take 20 GB."""
    names = {"model_type": model_type, "architectures": [FAMILIES[model_type].architecture]}
    sizes = {"num_hidden_layers": 2, "partial_rotary_factor": 0.5, "head_dim": 8}
    sizes |= {"full_attention_interval": 1}
    write_folder(tmp_path, CONFIG | names | sizes, {})
    recipes = open_target(tmp_path).recipes.values()
    parts = [x for recipe in recipes for x in recipe.parts if x.rows is not None]
    assert len({x.name for x in parts}) > len({id(x.rows) for x in parts})
    by_layer = [[id(x.rows) for x in parts if f".{i}." in x.name] for i in range(2)]
    assert by_layer[0] == by_layer[1]
    assert not any(x.rows.flags.writeable for x in parts)


@pytest.mark.parametrize("add", [{}, SLIDING])
def test_claimed_layers_of_drafts(tmp_path: Path, add: dict[str, Any]) -> None:
    case = BlockCase(format=1, add={"num_hidden_layers": 10**8, **add})
    path = write_block(tmp_path / "draft", case)
    demand = "num_hidden_layers=100000000 must be .* 1 to 1024"
    check_fast(lambda: open_block(path, target_at(tmp_path)), demand)
    target = open_target(write_folder(tmp_path / "target", CONFIG, {}))
    head = write_folder(
        tmp_path / "head", HEAD_CONFIG | add | {"num_hidden_layers": 10**8}, head_tensors()
    )
    check_fast(lambda: open_draft(head, target), demand)
    tensors = head_tensors(layer="layers.0") | {"layers.99999999.x": np.ones(3)}
    body = {k: v for k, v in (HEAD_CONFIG | add).items() if k != "num_hidden_layers"}
    write_folder(head, body, tensors)
    check_fast(lambda: open_draft(head, target), "num_(hidden_)?layers=100000000 must be .* 1024")
