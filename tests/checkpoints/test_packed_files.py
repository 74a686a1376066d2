"""GPTQ and AWQ files, and those of compressed-tensors with an order of inputs."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from specjax.checkpoints import open_target
from specjax.checkpoints.packed_files import open_weights, unpacked
from specjax.checkpoints.quantization_config import read_quantization
from specjax.checkpoints.tensors import copy_header, in_memory
from specjax.engine.args import EngineArgs
from specjax.engine.plan import plan_engine
from specjax.engine.weights import weights_from_tensors
from specjax.json_file import Fields
from specjax.testing import Files

from ..support.packed_files import AWQ, MIXED, PACKED, awq, gptq, gptq_config
from ..support.quantized_files import GROUP, edit, logits_of, make, named, write_tensors

Q = "model.layers.0.self_attn.q_proj"
# the file that is checked first
FIRST = "model.layers.0.mlp.down_proj"


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKED)
def test_files_have_the_logits_of_their_values(files: Files, tmp_path: Path, name: str) -> None:
    stored, whole = make(files, tmp_path, PACKED[name])
    target = open_target(stored, dtype="float32")
    target.check_weights()
    format = target.config.quantization
    assert format is not None
    assert format.plain == ("lm_head",)
    assert target.load_weights()["layers.0.mlp.down.kernel.values"].dtype == format.dtype
    expected = logits_of(whole)
    np.testing.assert_allclose(logits_of(stored), expected, atol=1e-5 * np.abs(expected).max())


@given(st.data())
def test_values_and_zero_points(data: st.DataObject) -> None:
    """They stand for the values that were rounded, with every format of integers."""
    bits, has_zeros = data.draw(st.sampled_from((4, 8))), data.draw(st.booleans())
    version, is_permuted = data.draw(st.sampled_from((1, 2))), data.draw(st.booleans())
    rows, columns = (8 * data.draw(st.integers(1, 4)) for _ in range(2))
    group = data.draw(st.integers(1, columns))
    is_permuted &= columns % group == 0
    matrix = np.random.default_rng(data.draw(st.integers(0, 9))).normal(size=(rows, columns))
    if bits == 4 and data.draw(st.booleans()):
        config = AWQ | {"group_size": group, "zero_point": has_zeros}
        stored, whole = awq(matrix, group, has_zeros=has_zeros)
    else:
        config = gptq_config(bits, group, sym=not has_zeros)
        config["checkpoint_format"] = "gptq_v2" if version == 2 else "gptq"
        options: dict[str, Any] = {"has_zeros": has_zeros, "version": version}
        stored, whole = gptq(matrix, bits, group, is_permuted=is_permuted, **options)
    format = read_quantization(Fields({"quantization_config": config}, "config.json"))
    source = unpacked(in_memory(named("x.weight", stored), Path("memory")), format)
    x = {name: source.read(name) for name in source.infos}
    for name, value in x.items():
        assert (value.shape, str(value.dtype)) == (
            source.infos[name].shape,
            source.infos[name].dtype,
        )
    zeros = np.float32(x.get("x.weight_zero_point", np.zeros_like(x["x.weight_scale"])))
    assert ("x.weight_zero_point" in x) == has_zeros
    scale = np.float32(x["x.weight_scale"])
    of_inputs = [np.repeat(y, group, axis=1)[:, :columns] for y in (zeros, scale)]
    np.testing.assert_array_equal((np.float32(x["x.weight"]) - of_inputs[0]) * of_inputs[1], whole)


@pytest.mark.parametrize("name", ["gptq-zeros", "awq", "int4-order"])
def test_tensors_in_memory_give_the_weights_of_the_file(
    files: Files, tmp_path: Path, name: str
) -> None:
    stored, _ = make(files, tmp_path, PACKED[name])
    expected = open_target(stored, dtype="float32").load_weights()
    tensors = load_file(stored / "model.safetensors")
    update = {key: x for key, x in tensors.items() if "layers.0.self_attn" in key}
    plan = plan_engine(EngineArgs(**files.arguments(target=stored, speculative=False)))
    new, _ = weights_from_tensors(plan, update, draft=False)
    assert "layers.0.attention.qkv.kernel.offset" in new
    for key, weight in new.items():
        assert np.array_equal(weight.view(np.uint8), expected[key].view(np.uint8))


def test_a_format_names_its_file(files: Files, tmp_path: Path) -> None:
    stored, _ = make(files, tmp_path, PACKED["gptq-zeros-v2"])
    target = open_target(stored, dtype="float32")
    text = f"int4 in groups of {GROUP} with zero points, from GPTQ v2, without lm_head"
    assert target.matrices == text


def test_an_order_of_inputs_that_mixes_groups_is_refused(files: Files, tmp_path: Path) -> None:
    """The first when a file is opened, also by its header alone; the others when they are read."""
    stored, _ = make(files, tmp_path / "mixed", MIXED)
    message = f"tensor '{FIRST}.g_idx' in {stored}.*desc_act.*not supported; use .*desc_act=false"
    with pytest.raises(ValueError, match=message):
        open_target(stored, dtype="float32")
    for name, is_mixed in (("mixed", True), ("ordered", False)):
        folder = make(files, tmp_path / f"of {name}", MIXED if is_mixed else PACKED["gptq"])[0]
        data = (folder / "model.safetensors").read_bytes()
        with (folder / "copy").open("wb+") as copy:
            copy.write(data)
            (folder / "model.safetensors").unlink()
            copy_header(copy, folder / "model.safetensors")
        (folder / "copy").unlink()
        if is_mixed:
            with pytest.raises(ValueError, match="desc_act"):
                open_target(folder, dtype="float32")
        else:
            open_target(folder, dtype="float32").check_weights()
    stored, _ = make(files, tmp_path / "one", PACKED["gptq"])
    tensors = load_file(stored / "model.safetensors")
    tensors[f"{Q}.g_idx"] = tensors[f"{Q}.g_idx"][::-1].copy()
    write_tensors(stored / "model.safetensors", tensors)
    target = open_target(stored, dtype="float32")
    with pytest.raises(ValueError, match=f"tensor '{Q}.g_idx' in {stored}.*not neighbours"):
        target.load_weights()


REFUSED = [
    ("gptq", {"bits": 3}, "bits=3 is not supported; 4 and 8 are"),
    ("gptq", {"bits": None}, "no bits"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
    ("gptq", {"format": "gptq_v3"}, "format='gptq_v3'"),
    ("gptq", {"is_marlin_format": True}, "is_marlin_format=(true|True)"),
    ("gptq", {"rotation": "hadamard"}, "rotation='hadamard'"),
    ("gptq", {"pack_dtype": "int8"}, "pack_dtype='int8'"),
    ("gptq", {"dynamic": {"-:x": {}, r"+:.*down.*": {"bits": 8}}}, "dynamic="),
    ("gptq", {"group_size": 0}, "group_size=0 must be"),
    ("gptq", {"group_size": -1, "sym": False}, "sym=(false|False) is not .* group_size=-1"),
    ("awq", {"version": "gemv"}, "version='gemv'"),
    ("awq", {"backend": "llm-awq"}, "backend='llm-awq'"),
    ("awq", {"bits": 8}, "bits=8"),
    ("awq", {"group_size": -1}, "zero_point=(true|True) is not .* group_size=-1"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_refusals_name_the_key(
    files: Files, tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    stored, _ = make(files, tmp_path, PACKED[name])
    edit(stored, lambda fields: fields["quantization_config"].update(changes))
    with pytest.raises(ValueError, match=f"config.json: quantization_config.*{message}"):
        open_target(stored, dtype="float32")


@pytest.mark.parametrize(
    ("name", "leaf", "change", "message"),
    [
        ("gptq", ".qweight", lambda x: x[:-1], "'{}.g_idx' in .* has shape"),
        ("gptq", ".qweight", lambda x: x.view(np.float32), "'{}.qweight' in .* is float32"),
        ("gptq", ".qweight", lambda x: x[0], "'{}.* has shape"),
        ("gptq", ".qweight", lambda x: None, "'{}.scales'|'{}.weight'"),
        ("gptq", ".scales", lambda x: None, "'{}.qweight' without '{}.scales'"),
        ("gptq", ".scales", lambda x: x.view(np.int16), "'{}.scales' in .* is int16"),
        ("gptq", ".scales", lambda x: x * 0, "'{}.weight_scale' in .*scales must be"),
        ("gptq", ".g_idx", lambda x: x[1:], "'{}.g_idx' in .* has shape"),
        ("gptq", ".g_idx", lambda x: x + 1, "'{}.g_idx' in .* not neighbours"),
        ("gptq", ".qzeros", lambda x: x[:1], "'{}.qzeros' in .* has shape"),
        ("gptq", ".qzeros", lambda x: x + 1, "'{}.qzeros' in .* symmetric"),
        ("awq-symmetric", ".qzeros", lambda x: x - 0x11111111, "'{}.qzeros' in .* symmetric"),
        ("gptq", ".weight", lambda x: np.ones((32, 32), np.float32), "'{}.weight' whole and"),
        ("awq", ".qzeros", lambda x: None, "'{}.qweight' without '{}.qzeros'"),
        ("awq", ".g_idx", lambda x: np.zeros(32, np.int32), "'{}.g_idx'"),
        ("int4-order", ".weight_g_idx", lambda x: x[:24] * 0, "'{}.weight_scale' in .* 1 groups"),
        ("int4-order", ".weight_g_idx", lambda x: np.float32(x), "'{}.weight_g_idx' in .*float32"),
    ],
)
def test_damaged_files(
    files: Files, tmp_path: Path, name: str, leaf: str, change: Any, message: str
) -> None:
    stored, _ = make(files, tmp_path, PACKED[name])
    tensors = load_file(stored / "model.safetensors")
    changed = change(tensors.pop(Q + leaf, None))
    if changed is not None:
        tensors[Q + leaf] = changed
    write_tensors(stored / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=message.replace("{}", Q)) as found:
        open_target(stored, dtype="float32").load_weights()
    assert str(stored) in str(found.value)


@pytest.mark.parametrize("stated", [None, {"quant_method": "fp8"}])
def test_packed_files_need_their_configuration(
    files: Files, tmp_path: Path, stated: dict[str, Any] | None
) -> None:
    stored, _ = make(files, tmp_path, PACKED["gptq"])
    edit(stored, lambda fields: fields.update(quantization_config=stated))
    opened = partial(open_weights, stored)
    with pytest.raises(ValueError, match=r"qweight' in .* is packed, but .*copy it from quantize_"):
        opened()
