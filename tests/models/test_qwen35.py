"""Qwen3.5: what its configurations say, and the order of the rows of queries and gates."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.kernels.delta_inputs import RequestRows

from specjax.checkpoints import open_target
from specjax.kv.pages import PageView
from specjax.kv.recurrent import abstract_pool, recur_in_order
from specjax.models.declare import pool_shapes
from specjax.models.decoder import CausalLM
from specjax.models.eagle import build_head
from specjax.models.flat import FlatModel, recipes_of
from specjax.models.gated_delta import GatedDelta
from specjax.models.layers import Attention, LayerKind
from specjax.models.qwen35 import GatedAttention, Qwen35Config, Qwen35MoeConfig
from specjax.models.registry import layer_kinds
from specjax.models.rope import rope_tables
from specjax.speculative.algorithm import kv_pool
from specjax.testing.dense import dense_attend

from ..support.lowering import lower_for_cuda

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
DENSE = SIZES | {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "intermediate_size": 48,
    "dtype": "bfloat16",
}
MIXTURE = SIZES | {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": False,
    "dtype": "bfloat16",
}


def read(path: Path, values: dict[str, Any]) -> Any:
    (path / "config.json").write_text(json.dumps(values))
    return open_target(str(path)).config


def test_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, DENSE)
    assert isinstance(config, Qwen35Config)
    assert config.linear_layers == (0, 1, 2, 4, 5, 6)
    assert (config.rope_theta, config.rotary_dim) == (1e7, 2)
    assert config.delta_heads == (16, 128, 32, 128)
    kinds = [kind.mixer for kind in layer_kinds(config)]
    assert kinds == [GatedDelta, GatedDelta, GatedDelta, GatedAttention] * 2


def test_stated_values(tmp_path: Path) -> None:
    """``layer_types`` wins over the interval; keys of multimodal rotation change nothing."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    rope |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    kinds = ["full_attention", "linear_attention"] * 4
    changes = {"rope_parameters": rope, "layer_types": kinds, "full_attention_interval": 4}
    changes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
    changes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 8}
    switches = {"output_gate_type": "swish", "mamba_ssm_dtype": "float32"}
    config = read(tmp_path, DENSE | changes | switches | {"attn_output_gate": True})
    assert config.linear_layers == (1, 3, 5, 7)
    assert (config.rope_theta, config.rotary_dim) == (1e6, 4)
    assert config.delta_heads == (2, 16, 6, 8)
    other = {"partial_rotary_factor": 0.25, "rope_theta": 1e5, "full_attention_interval": 2}
    config = read(tmp_path, DENSE | other)
    assert (config.rope_theta, config.rotary_dim) == (1e5, 2)
    assert config.linear_layers == (0, 2, 4, 6)


def test_mixture(tmp_path: Path) -> None:
    config = read(tmp_path, MIXTURE)
    assert isinstance(config, Qwen35MoeConfig)
    assert config.norm_topk_prob
    assert config.has_shared_expert_gate
    assert config.shared_expert_intermediate_size == 512
    names = {x.name for recipe in recipes_of(CausalLM, config).values() for x in recipe.parts}
    assert {f"model.layers.7.mlp.{x}.weight" for x in ("gate", "shared_expert_gate")} <= names


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_output_gate", False),
        ("output_gate_type", "sigmoid"),
        ("mamba_ssm_dtype", "bfloat16"),
        ("mtp_use_dedicated_embeddings", True),
        ("hidden_act", "gelu"),
        ("layer_types", ["linear_attention"] * 7),
        ("layer_types", ["linear_attention"] * 7 + ["sliding_attention"]),
        ("linear_num_value_heads", 17),
        ("linear_conv_kernel_dim", 1),
    ],
)
def test_refused(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=key):
        read(tmp_path, DENSE | {key: value})


def test_small_products_stay_whole(tmp_path: Path) -> None:
    """Quantising on load leaves the rates of decay, norms and convolutions as they are."""
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    config = open_target(str(tmp_path)).quantised("fp8").config
    names = FlatModel.of(partial(CausalLM, config)).names
    first = {name for name in names if name.startswith("layers.0.attention.")}
    prefix = "layers.0.attention."
    assert {f"{prefix}products.kernel", f"{prefix}mixed_and_gate.kernel.values"} <= first
    assert f"{prefix}output.kernel.values" in first


def test_gates_multiply_the_output() -> None:
    """Stored rows are a head's query and then its gate; the result is that of plain attention."""
    config = Qwen35Config(
        model_type="qwen3_5_text",
        vocab_size=8,
        hidden_size=32,
        intermediate_size=8,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rotary_dim=4,
        linear_layers=(),
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    kind = LayerKind.of(config, qk_norm=True, implementation="xla")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 32)).astype(np.float32)
    queries, gates = rng.normal(size=(2, 4, 8, 32)).astype(np.float32) / 6
    stored = {
        "k_proj.weight": rng.normal(size=(16, 32)).astype(np.float32) / 6,
        "v_proj.weight": rng.normal(size=(16, 32)).astype(np.float32) / 6,
        "o_proj.weight": np.eye(32, dtype=np.float32),
        "q_norm.weight": rng.normal(size=8).astype(np.float32),
        "k_norm.weight": rng.normal(size=8).astype(np.float32),
    }

    def run(module: Any, q: np.ndarray) -> Any:
        tensors = stored | {"q_proj.weight": q.reshape(-1, 32)}
        flat = FlatModel.of(lambda: module(config, kind, ""))
        weights = []
        for name in flat.names:
            recipe = flat.recipes[name]
            parts = [x.arranged(tensors[x.name.removeprefix("self_attn.")]) for x in recipe.parts]
            joined = np.concatenate(parts)
            weights.append(jnp.asarray(joined.T if recipe.transpose else joined))
        rope = rope_tables(kind.rope, jnp.arange(5)[None].repeat(2, 0))
        return flat.rebuild(tuple(weights))(jnp.asarray(x), rope, None, 0, dense_attend)[0]

    both = np.concatenate([queries, gates], axis=1)
    results = jax.jit(lambda: (run(Attention, queries), run(GatedAttention, both)))()
    plain, gated = map(np.asarray, results)
    factor = np.asarray(jax.nn.sigmoid(np.einsum("btd,hkd->bthk", x, gates)))
    np.testing.assert_allclose(gated, plain * factor.reshape(plain.shape), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 4])
def test_a_target_and_its_draft_layer_lower_for_cuda(width: int, tmp_path: Path) -> None:
    """Heads of published sizes, which are larger than in other families."""
    sizes = {"hidden_size": 512, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"num_hidden_layers": 4, "head_dim": 256, "intermediate_size": 512}
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    config = read(tmp_path, DENSE | sizes | heads)
    module = replace(config, num_layers=1, first_layer=config.num_layers)
    how: dict[str, Any] = {"implementation": "pallas"}
    target = FlatModel.of(partial(CausalLM, config, **how))
    draft = FlatModel.of(partial(build_head, module, **how))
    view = PageView((jnp.zeros((2, 4), jnp.int32),), 16, "pallas")
    rows = RequestRows(*(jnp.ones(2, jnp.int32) for _ in range(4)))

    def call(weights: Any, of_draft: Any, tokens: Any, kv: Any, pool: Any, of_module: Any) -> Any:
        model, head = target.rebuild(weights), draft.rebuild(of_draft)
        attend, at = view.attend(jnp.zeros(2, jnp.int32), width), jnp.zeros_like(tokens)
        recur = recur_in_order(rows, 2 * width, 4, group=1, **how)
        hidden, features, pools = model(tokens, at, (kv, pool), (attend, recur))
        inputs = head.embed(tokens, model), head.fuse(features), at, of_module, attend
        state, of_module = head(*inputs, row=jnp.zeros(2, jnp.int32))
        of_module = head.store(*inputs[:3], of_module, attend.store)
        return model.logits(hidden), head.logits(state, model), pools, of_module

    (kv,) = pool_shapes(target.caches, (64,))
    pools = kv, abstract_pool(target.caches, 3), kv_pool(module, 64)
    tokens = jax.ShapeDtypeStruct((2, width), jnp.int32)
    text = lower_for_cuda(call, target.abstract, draft.abstract, tokens, *pools)
    for name in ("delta_steps", "rope_store", "tree_attention"):
        assert f"specjax_{name}" in text, name
