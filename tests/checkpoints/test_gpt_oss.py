"""gpt-oss: configurations, tensors of experts in several layouts, updates, heads for it."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from specjax.kernels import mxfp4

from specjax.checkpoints import export_draft, export_fp8, open_target
from specjax.checkpoints.presets import PRESETS
from specjax.cli.main import main
from specjax.engine.args import EngineArgs
from specjax.engine.plan import plan_engine
from specjax.engine.weights import weights_from_tensors
from specjax.models.block import BlockDraft
from specjax.models.flat import FlatModel
from specjax.testing import random_weights
from specjax.testing.files import write_folder, write_target

from ..support.model_files import BLOCK, read_folder
from ..support.mxfp4_files import INNER, NUM_EXPERTS, SIZE, write_gpt_oss, write_wide_head

AT = "model.layers.0.mlp.experts."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("gpt_oss")
    target = write_target(path / "llama")
    for name, is_packed in (("packed", True), ("whole", False)):
        write_gpt_oss(path / name, target, is_packed=is_packed)
    return path


def test_configuration(folder: Path) -> None:
    config: Any = open_target(folder / "packed").config
    assert config.windows == (12, 0)
    assert config.qkv_bias
    assert config.output_bias
    assert (config.num_experts, config.num_experts_per_tok) == (NUM_EXPERTS, 2)
    assert (config.swiglu_limit, config.swiglu_alpha) == (7.0, 1.702)
    assert not config.rope_scaling.truncate
    assert config.quantization is None
    assert config.has_packed_experts
    assert not open_target(folder / "whole").config.has_packed_experts  # type: ignore[attr-defined]


PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}


@pytest.mark.parametrize("of_draft", [False, True])
def test_a_published_configuration_is_the_preset(tmp_path: Path, of_draft: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = open_target(tmp_path, dtype="bfloat16", of_draft=of_draft).config
    preset, _ = PRESETS["gpt-oss-20b"]
    assert replace(config, eos_token_ids=()) == preset


def test_layouts_give_the_same_matrices(folder: Path) -> None:
    """Gates come first, and rows are outputs."""
    whole = open_target(folder / "whole", dtype="float32").load_weights()
    packed = open_target(folder / "packed", dtype="float32").load_weights()
    assert packed["layers.0.mlp.down"].shape == (NUM_EXPERTS, 1, SIZE, 32)
    stored = load_file(folder / "whole" / "model.safetensors")
    gate_up = stored[f"{AT}gate_up_proj"].swapaxes(1, 2)
    expected = np.concatenate([gate_up[:, ::2], gate_up[:, 1::2]], axis=1).reshape(-1, SIZE)
    np.testing.assert_array_equal(whole["layers.0.mlp.gate_up"], expected)
    for name, size in (("gate_up", SIZE), ("down", INNER)):
        stored = (packed[f"layers.0.mlp.{name}{x}"] for x in ("", "_scale"))
        values = np.asarray(mxfp4.unpacked(*stored, size)).reshape(-1, size)
        np.testing.assert_array_equal(values, whole[f"layers.0.mlp.{name}"])
        np.testing.assert_array_equal(
            packed[f"layers.0.mlp.{name}_bias"], whole[f"layers.0.mlp.{name}_bias"]
        )


@pytest.mark.parametrize("name", ["packed", "whole"])
def test_updates_with_published_names_give_the_weights_of_the_file(folder: Path, name: str) -> None:
    plan = plan_engine(EngineArgs(model=folder / name, speculative_algorithm=None, dtype="float32"))
    tensors = load_file(folder / name / "model.safetensors")
    expected = plan.target.load_weights()
    found, _ = weights_from_tensors(plan, tensors, draft=False)
    assert found.keys() == expected.keys()
    for key in expected:
        np.testing.assert_array_equal(found[key], expected[key])


def test_whole_experts_may_be_quantised(folder: Path) -> None:
    """Packed ones stay packed; the other matrices become 8 or 4 bits."""
    whole = open_target(folder / "whole", dtype="float32").quantised("fp8").load_weights()
    assert whole["layers.0.mlp.gate_up.values"].dtype.name == "float8_e4m3fn"
    opened = open_target(folder / "packed", dtype="float32").quantised("int4")
    assert opened.matrices == "int4 in groups of 128, experts in MXFP4"
    packed = opened.load_weights()
    assert packed["layers.0.mlp.gate_up"].dtype == np.uint16
    assert packed["layers.0.attention.qkv.kernel.values"].dtype.name == "int4"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("down_proj_blocks", None, r"lacks 1 tensor.*down_proj_blocks"),
        ("down_proj_blocks", np.zeros((6, 64, 2, 8), "u1"), r"shape \(6, 64, 2, 8\).*2, 16\)"),
        ("gate_up_proj_scales", np.full((6, 128, 2), 255, "u1"), r"_scales'.* up to 128"),
        ("down_proj_bias", np.zeros((6, 65), "f4"), r"shape \(6, 65\), .* requires \(6, 64\)"),
    ],
)
def test_damaged_tensors(
    folder: Path, tmp_path: Path, name: str, tensor: np.ndarray | None, message: str
) -> None:
    config, tensors = read_folder(folder / "packed")
    del tensors[AT + name]
    if tensor is not None:
        tensors[AT + name] = tensor
    with pytest.raises(ValueError, match=message):
        open_target(write_folder(tmp_path, config, tensors)).load_weights()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size": 96, "head_dim": 8},
            "hidden_size=96 .* experts 64 must be multiples of 64",
        ),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method='hqq' is not supported"),
        ({"model_type": "qwen3_moe", "architectures": []}, "quant_method='mxfp4' is not"),
    ],
)
def test_refused_configurations(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config, _ = read_folder(folder / "packed")
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=message):
        open_target(tmp_path)


def test_packed_experts_are_not_exported_again(folder: Path, tmp_path: Path) -> None:
    for name in ("packed", "whole"):
        with pytest.raises(ValueError, match="experts of its own layout"):
            export_fp8(tmp_path / "fp8", folder / name)


def test_inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder / "packed")]) == 0
    lines = dict(x.split(": ", 1) for x in capsys.readouterr().out.splitlines())
    assert lines["experts"] == "6, of which a token uses 2, of width 64"
    assert lines["windows"] == "12 in 1 of 2 layers"
    assert lines["matrices"] == "bfloat16, experts in MXFP4"


def with_boundaries(path: Path) -> Path:
    """Write an EAGLE-3 head whose ids count hidden states, with a norm before its projection."""
    write_wide_head(path, norm_before_fc=True)
    config = json.loads((path / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 1, 2]
    (path / "config.json").write_text(json.dumps(config))
    return path


def dflash(path: Path) -> Path:
    changes: dict[str, Any] = {"hidden_size": SIZE, "target_hidden_size": SIZE, "markov_rank": 0}
    config = replace(BLOCK, markov_head=None, anchor_first=False, **changes)
    flat = FlatModel.of(partial(BlockDraft, config))
    export_draft(path, config, dict(zip(flat.names, random_weights(flat, 0), strict=True)))
    return path


@pytest.mark.parametrize(
    ("write", "algorithm", "kind", "layers"),
    [
        (with_boundaries, "EAGLE3", "EAGLE-3", "0, 0, 1"),
        (partial(write_wide_head, mask_token_id=11, num_layers=2), "EAGLE3", "P-EAGLE", "0, 0, 1"),
        (dflash, "DFLASH", "DFlash of speculators", "-1, 1"),
    ],
)
def test_heads(
    folder: Path, tmp_path: Path, capsys: Any, write: Any, algorithm: str, kind: str, layers: str
) -> None:
    path = write(tmp_path / "head")
    assert main(["inspect", str(path), "--model", str(folder / "packed")]) == 0
    lines = dict(x.split(": ", 1) for x in capsys.readouterr().out.splitlines())
    assert lines[f"fits {folder / 'packed'}"] == "yes"
    assert (lines["algorithm"], lines["format"]) == (algorithm, kind)
    assert lines["target layers"] == layers
