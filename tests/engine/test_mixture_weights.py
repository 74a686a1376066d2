"""Replacing the weights of mixtures of experts."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax.checkpoints import export_fp8, open_target
from specjax.checkpoints.tensors import open_directory
from specjax.engine.args import EngineArgs
from specjax.engine.plan import plan_engine
from specjax.engine.weights import weights_from_tensors
from specjax.testing.files import write_folder

from ..support.model_files import MIXTURE, write_mixture


def planned(path: Path, **options: Any) -> Any:
    return plan_engine(EngineArgs(model=path, speculative_algorithm=None, **options))


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_stacks_give_the_weights_of_their_experts(tmp_path: Path, quantization: str | None) -> None:
    """They are quantised from all bits. A correction bias stays float32."""
    tensors = write_mixture(tmp_path)
    plan = planned(tmp_path, dtype="bfloat16", quantization=quantization)
    expected, _ = weights_from_tensors(plan, tensors, draft=False)
    stacked = {name: x for name, x in tensors.items() if ".experts." not in name}
    layer = "model.layers.0.mlp.experts."
    for stack, names in {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.items():
        stacked[layer + stack] = np.stack(
            [
                np.concatenate([tensors[f"{layer}{i}.{x}_proj.weight"] for x in names])
                for i in range(MIXTURE["n_routed_experts"])
            ]
        )
    found, _ = weights_from_tensors(plan, stacked, draft=False)
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(np.float32(found[name]), np.float32(expected[name]))
    bias = tensors["model.layers.0.mlp.gate.e_score_correction_bias"]
    np.testing.assert_array_equal(found["layers.0.mlp.correction"], bias)


def test_all_experts_of_a_layer_are_required(tmp_path: Path) -> None:
    tensors = write_mixture(tmp_path)
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    with pytest.raises(ValueError, match=r"without \['.*experts\.0\.up_proj\.weight', .*all parts"):
        weights_from_tensors(planned(tmp_path), {name: tensors[name]}, draft=False)


def test_export_in_fp8(tmp_path: Path) -> None:
    """Routers and the modules for multi-token prediction stay whole."""
    tensors, module = write_mixture(tmp_path / "model"), "model.layers.1.eh_proj"
    tensors[f"{module}.weight"] = np.ones((2, 2), np.float32)
    changes = {"num_nextn_predict_layers": 1}
    write_folder(tmp_path / "model", MIXTURE | changes, tensors)
    export_fp8(tmp_path / "fp8", tmp_path / "model")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    patterns = [x.removeprefix("re:") for x in config["quantization_config"]["ignore"]]
    stored = open_directory(tmp_path / "fp8").infos
    whole = {
        name.removesuffix(".weight")
        for name, info in stored.items()
        if len(info.shape) == 2 and info.dtype == "float32" and not name.endswith("_scale")
    }
    assert whole == {"lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", module}
    named = {name for name in whole if any(re.fullmatch(x, name) for x in patterns)}
    assert whole - named == {"model.embed_tokens"}
    open_target(tmp_path / "fp8").check_weights()
