"""Multi-token prediction modules: tensor layout and errors."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from specjax.checkpoints import open_target
from specjax.checkpoints.draft import MtpCheckpoint, open_mtp
from specjax.models.eagle import MtpHead
from specjax.models.flat import FlatModel
from specjax.testing.files import write_folder

from ..support.checkpoint_files import (
    CONFIG,
    MIMO,
    add_biases,
    module_tensors,
    target_tensors,
    write_mimo,
)

QKV = ("q_proj", "k_proj", "v_proj")


def opened(path: Path, num_modules: int = 2, draft: Path | None = None) -> MtpCheckpoint:
    return open_mtp(draft, open_target(path), num_modules=num_modules)


def test_modules_of_the_targets_own_checkpoint(tmp_path: Path) -> None:
    """The target ignores its modules; a draft may use only some of them."""
    path = write_mimo(tmp_path / "mimo")
    target = open_target(path)
    assert target.config.qkv_bias
    target.check_weights()
    for count in (2, 1):
        modules = opened(path, count)
        flat = FlatModel.of(partial(MtpHead, modules.config))
        weights = flat.order(modules.load_weights())
        assert [x.shape for x in weights] == [leaf.shape for leaf in flat.abstract]
    tensors = module_tensors() | add_biases(module_tensors(), QKV)
    weights = opened(path).load_weights()
    prefix = "model.mtp_layers.1."
    for flat_name, name in {
        "modules.1.token_norm.scale": "token_layernorm",
        "modules.1.hidden_norm.scale": "hidden_layernorm",
        "modules.1.norm.scale": "final_layernorm",
        "modules.1.fc.kernel": "input_proj",
        "modules.1.layer.input_norm.scale": "input_layernorm",
        "modules.1.layer.attention.output.kernel": "self_attn.o_proj",
    }.items():
        np.testing.assert_array_equal(weights[flat_name], tensors[f"{prefix}{name}.weight"].T)


def test_modules_of_another_checkpoint(tmp_path: Path) -> None:
    """Modules ignore copies of the target's tensors and the modules of the target's checkpoint."""
    target = write_mimo(tmp_path / "mimo")
    tensors = add_biases(module_tensors(), QKV)
    other = write_folder(tmp_path / "other", CONFIG | MIMO, tensors)
    modules = opened(target, draft=other)
    modules.check_weights()
    assert modules.path == other
    assert "2 multi-token prediction modules" in modules.describe()
    scaled = open_mtp(other, open_target(target), num_modules=1, rope_theta=7.0)
    assert scaled.config.rope_theta == 7.0


def test_refusals(tmp_path: Path) -> None:
    path = write_mimo(tmp_path / "mimo")
    with pytest.raises(ValueError, match=r"speculative_num_steps=3 needs 3 modules, but .* has 2"):
        opened(path, 3)
    plain = write_folder(tmp_path / "plain", CONFIG, target_tensors())
    with pytest.raises(ValueError, match=r"of 0 multi-token .* pass draft=DIRECTORY"):
        opened(plain, 1)
    few = write_mimo(tmp_path / "few", count=1)
    with pytest.raises(ValueError, match=r"of 1 multi-token .* num_nextn_predict_layers=2"):
        opened(few, 1)
    with pytest.raises(ValueError, match="the head has vocab_size=50, but the target has 61"):
        opened(path, 1, write_mimo(tmp_path / "small", vocab_size=50))
    experts = add_biases(target_tensors() | module_tensors(), QKV)
    experts["model.mtp_layers.0.mlp.experts.0.up_proj.weight"] = np.zeros((2, 2), np.float32)
    mixed = write_folder(tmp_path / "experts", CONFIG | MIMO, experts)
    with pytest.raises(ValueError, match="has 1 tensors that the model does not use"):
        opened(path, 1, mixed).check_weights()
    extra = {"model.mtp_layers.0.extra.weight": np.zeros(3, np.float32)}
    tensors = add_biases(target_tensors() | module_tensors(), QKV) | extra
    more = write_folder(tmp_path / "more", CONFIG | MIMO, tensors)
    with pytest.raises(ValueError, match="has 1 tensors that the model does not use"):
        opened(more).check_weights()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="only from a Hugging Face directory"):
        opened(path, 1, tmp_path / "empty")
