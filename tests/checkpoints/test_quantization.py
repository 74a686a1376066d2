"""Checkpoints whose matrices are quantised, in the formats of published files."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from specjax import SamplingParams
from specjax.checkpoints import export_fp8, open_target
from specjax.checkpoints.quantization import unpack
from specjax.checkpoints.tensors import open_directory
from specjax.config import ModelConfig, Quantization
from specjax.engine.args import EngineArgs
from specjax.engine.plan import plan_engine
from specjax.engine.weights import weights_from_tensors
from specjax.testing import Files

from ..support.quantized_files import FORMATS, GROUP, edit, logits_of, make, pack, write_tensors


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_formats_have_the_values_of_their_files(files: Files, tmp_path: Path, name: str) -> None:
    stored, whole = make(files, tmp_path, name)
    target = open_target(stored, dtype="float32")
    target.check_weights()
    weights = target.load_weights()
    format = target.config.quantization
    assert format is not None
    assert format.plain == ("lm_head",)
    expected = logits_of(whole)
    np.testing.assert_allclose(logits_of(stored), expected, atol=1e-5 * np.abs(expected).max())
    assert weights["layers.0.mlp.down.kernel.values"].dtype == format.dtype
    assert weights["lm_head.kernel"].dtype == np.float32


@pytest.mark.parametrize("key", ["ignore", "modules_to_not_convert"])
def test_whole_modules_that_the_file_lacks_are_reported(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    stored, _ = make(files, tmp_path, "fp8-channel")
    known = ["lm_head", "model.lm_head", "model.layers.0.mlp", "layers.1.self_attn.o_proj"]
    known += ["language_model.model.norm", "re:.*gate$", "model.vision_tower.blocks.0"]
    known += ["model.layers.0.mlp.gate_proj"]
    absent = ["model.layers.0.mlp.gate", "model.layers.9", "ayers.0", "model.layers.0.mlp.down_pro"]
    for names in (known, known + absent):
        edit(stored, lambda fields, names=names: fields["quantization_config"].update({key: names}))
        caplog.clear()
        open_target(stored, dtype="float32")
        warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(warned) == (names is not known)
    assert f"quantization_config: {key} names modules that the file lacks: {absent}" in warned[0]
    edit(stored, lambda fields: fields["quantization_config"].update({key: "lm_head"}))
    with pytest.raises(ValueError, match=f"config.json: quantization_config: {key}="):
        open_target(stored, dtype="float32")


class Foreign:
    """An array of another library, as of PyTorch, with a dtype that is not numpy's."""

    dtype = "torch.float32"

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return np.ones(32, np.float32)


@pytest.mark.parametrize("name", ["fp8-channel", "int4-zeros"])
def test_scales_of_keys_and_values(files: Files, tmp_path: Path, name: str) -> None:
    """They are rounded up to powers of two, and logits stay the same; also weights in memory."""
    stored, _ = make(files, tmp_path, name, plain="lm_head o_proj" if "fp8" in name else "lm_head")
    plain = open_target(stored, dtype="float32")
    before = logits_of(stored)
    source = open_directory(stored)
    tensors = {key: source.read(key) for key in source.infos}
    scales = {
        "layers.0.self_attn.k_scale": np.float32([0.26]),
        "layers.0.self_attn.v_scale": np.float32([[[3.0]], [[4.1]]]),
        "layers.1.self_attn.k_proj.k_scale": np.float32(0.1),
        "layers.1.self_attn.v_proj.output_scale": np.float32([1.0]),
    }
    tensors |= {f"model.{key}": x for key, x in scales.items()}
    write_tensors(stored / "model.safetensors", tensors)
    target = open_target(stored, dtype="float32")
    assert target.config.kv_exponents == ((-1, 3), (-3, 0))
    np.testing.assert_allclose(logits_of(stored), before, rtol=1e-6, atol=1e-6)
    found, own = target.load_weights(), plain.load_weights()
    q, k, v = np.split(np.arange(64), (32, 48))  # heads of queries, keys and values
    for layer, (key, value) in enumerate(target.config.kv_exponents):
        kernel = f"layers.{layer}.attention.qkv.kernel.scale"
        changed = found[kernel] / own[kernel]
        for rows, exponent in (q, key), (k, -key), (v, -value):
            assert (changed[:, rows] == 2.0**exponent).all()
    plan = plan_engine(EngineArgs(**files.arguments(target=stored, speculative=False)))
    update = {key: x for key, x in tensors.items() if "layers.0.self_attn" in key}
    new, _ = weights_from_tensors(plan, update, draft=False)
    for key, weight in new.items():
        assert np.array_equal(weight.view(np.uint8), found[key].view(np.uint8))
    new, _ = weights_from_tensors(plan, {"model.norm.weight": Foreign()}, draft=False)
    assert np.array_equal(new["norm.scale"], np.ones(32, np.float32))
    with pytest.raises(ValueError, match=r"only \['model.layers.0.self_attn.k_scale'\]"):
        weights_from_tensors(plan, {"model.layers.0.self_attn.k_scale": np.ones(1)}, draft=False)
    # compiled functions do not depend on them
    assert plan.networks.target_config.kv_exponents == ()
    both = {"model.layers.0.self_attn.kv_scale": np.float32(0.5)}  # the largest counts
    write_tensors(stored / "model.safetensors", tensors | both)
    assert open_target(stored, dtype="float32").config.kv_exponents == ((-1, 3), (-3, 0))
    assert target.has_weights_of(target)
    assert not target.has_weights_of(replace(target, config=plain.config))
    for wrong in (np.nan, 0.0, -1.0, 1e30):
        tensors["model.layers.0.self_attn.k_scale"] = np.float32([1.0, wrong])
        write_tensors(stored / "model.safetensors", tensors)
        message = (
            rf"layers.0.self_attn.k_scale.*model.safetensors.* with {re.escape(f'{wrong:g}')};"
        )
        with pytest.raises(ValueError, match=message):
            open_target(stored, dtype="float32")


def test_exported_weights_are_those_of_an_engine(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "fp8"
    export_fp8(path, files.target, max_shard_bytes=20_000)
    assert len(list(path.glob("*.safetensors"))) > 1
    stored = open_target(path, dtype="float32")
    stored.check_weights()
    assert stored.config.quantization == Quantization("fp8", plain=("lm_head",))
    found, expected = (
        one.load_weights()
        for one in (stored, open_target(files.target, dtype="float32").quantised("fp8"))
    )
    layers = [name for name in expected if name.startswith("layers")]
    assert "layers.1.mlp.down.kernel.scale" in layers
    for name in layers:
        assert np.array_equal(np.float32(found[name]), np.float32(expected[name]))
    assert found["lm_head.kernel"].dtype == np.float32
    with pytest.raises(ValueError, match="must be a new or an empty directory"):
        export_fp8(path, files.target)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="must be a new or an empty directory"):
        export_fp8(tmp_path / "file", files.target)
    for wrong in (path, "smollm2-135m"):
        with pytest.raises(ValueError, match="must be a directory with the whole weights"):
            export_fp8(tmp_path / "other", wrong)
    damaged = tmp_path / "damaged"
    shutil.copytree(files.target, damaged)
    (damaged / "merges.txt").symlink_to("/dev/null")
    with pytest.raises(ValueError, match=r"merges\.txt is not a regular file"):
        export_fp8(tmp_path / "other", damaged)
    assert not (tmp_path / "other").exists()
    tensors = load_file(damaged / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    write_tensors(damaged / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=r"lacks 1 tensor.*down_proj"):
        export_fp8(tmp_path / "other", damaged)


@pytest.mark.long_after(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4-zeros", "fp8-blocks"])
def test_texts_equal_those_of_whole_weights(files: Files, tmp_path: Path, name: str) -> None:
    stored, whole = make(files, tmp_path, name, "lm_head layers.1.mlp.down_proj")
    prompts = [[5, 9, 11, 40, 2, 7], [33, 12], [8] * 20]
    params = [
        SamplingParams(temperature=t, max_new_tokens=24, ignore_eos=True, sampling_seed=3)
        for t in (0.0, 0.9, 0.9)
    ]
    texts = []
    for path, speculative in ((whole, False), (stored, True)):
        options = {"dtype": "float32", "skip_tokenizer_init": True, "speculative": speculative}
        with files.engine(target=path, **options) as engine:
            found = engine.generate(input_ids=prompts, sampling_params=params)
            texts.append([one["output_ids"] for one in found])
            if speculative:
                names = engine.runner.networks.target.names
                assert "layers.1.mlp.down.kernel" in names
                assert "layers.0.mlp.down.kernel.values" in names
                engine.update_weights_from_disk(stored)
                again = engine.generate(input_ids=prompts, sampling_params=params)
                assert [one["output_ids"] for one in again] == texts[-1]
    assert texts[0] == texts[1]


def test_quantization_names_what_a_file_is(files: Files, tmp_path: Path) -> None:
    stored, _ = make(files, tmp_path, "int8-channel")
    target = open_target(stored, dtype="float32")
    assert target.quantised("int8").config == target.config
    with pytest.raises(
        ValueError, match=r"'fp8', but .* are int8, without lm_head; set it to None or"
    ):
        target.quantised("fp8")


@given(st.data())
def test_words_hold_integers(data: st.DataObject) -> None:
    bits, axis = data.draw(st.sampled_from((4, 8))), data.draw(st.sampled_from((0, 1)))
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 20))
    limit = 2 ** (bits - 1)
    values = np.array(
        [[data.draw(st.integers(-limit, limit - 1)) for _ in range(columns)] for _ in range(rows)],
        np.int8,
    )
    words = pack(values, bits)
    found = unpack(words if axis == 1 else np.ascontiguousarray(words.T), bits, columns, axis)
    assert np.array_equal(found if axis == 1 else found.T, values)


def set_weights(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        groups = fields["quantization_config"]["config_groups"]
        groups["group_0"]["weights"].update(changes)

    return change


def set_group(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        fields["quantization_config"]["config_groups"]["group_0"].update(changes)

    return change


def set_config(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields["quantization_config"].update(changes)


REFUSED = [
    (set_config(quant_method="modelopt"), "quant_method='modelopt' is not supported"),
    (set_config(quant_method=["fp8"]), "quant_method="),
    (set_weights(num_bits=4, type="float"), "num_bits=4 with type='float'"),
    (set_weights(num_bits=3), "num_bits=3"),
    (set_weights(actorder="input"), "actorder='input'"),
    (set_weights(strategy="attn_head"), "strategy='attn_head'"),
    (set_weights(strategy="channel", symmetric=False), "symmetric=(False|false)"),
    (set_group(targets=["re:.*q_proj"]), "targets="),
    (set_group(input_activations={"num_bits": 8, "dynamic": False}), "dynamic=(False|false)"),
    (set_group(output_activations={"num_bits": 8}), "output_activations="),
    (set_config(sparsity_config={"format": "sparse-24"}), "sparsity_config="),
    (set_config(config_groups={"a": {}, "b": {}}), "config_groups=.*mixed schemes"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[text for _, text in REFUSED])
def test_refusals_name_the_key(
    files: Files, tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    stored, _ = make(files, tmp_path, "int4")
    edit(stored, change)
    with pytest.raises(ValueError, match=f"config.json.*{message}"):
        open_target(stored, dtype="float32")


Q = "model.layers.0.self_attn.q_proj.weight"


def read_back(path: Path) -> dict[str, np.ndarray]:
    source = open_directory(path)
    return {name: source.read(name) for name in source.infos}


@pytest.mark.parametrize(
    ("name", "suffix", "replace", "message"),
    [
        ("int4", "_packed", lambda x: x[:, :-1], "'{}_packed' in .*int32"),
        ("int4", "_packed", lambda x: None, "lacks 1 tensor.*'{}'"),
        ("int4", "_scale", lambda x: None, "'{}_packed' without '{}_scale'"),
        ("int4", "_scale", lambda x: x[:-1], "'{}_scale' in .* has shape"),
        ("int4-zeros", "_zero_point", lambda x: None, "no tensor '{}_zero_point'"),
        ("int4-zeros", "_zero_point", lambda x: x[:, :1], "'{}_zero_point' in .* has shape"),
        ("fp8-blocks", "_scale_inv", lambda x: x[:, :1], "'{}_scale_inv' in .* has shape"),
        ("fp8-channel", "", lambda x: x[:, :-1], "'{}' in .* has shape"),
        ("fp8-channel", "", lambda x: x.view(np.int8), "'{}' in .* is int8"),
        ("int8-channel", "_scale", lambda x: None, "'{}' without '{}_scale'"),
        ("int4", "_zero_point", lambda x: np.zeros((8, 2), np.int32), "'{}_zero_point', .*symmetr"),
        ("int4", "_scale_inv", lambda x: np.ones((32, 2), np.float32), "'{}_scale_inv'"),
        ("int4", "_shape", lambda x: x[::-1].copy() + 1, r"'{}_shape' in .*; it must be .32, 32"),
        ("int4-zeros", "_offset", lambda x: np.ones((32, 2), np.float32), "reads .*'{}_offset'"),
        ("int4-zeros", "_zero_point", lambda x: x.view(np.float32), "'{}_zero_point' in .*float32"),
        ("int4-zeros", "_zero_point", lambda x: np.full((32, 2), 8, np.int8), "from 8 to 8; .* 7"),
        ("fp8-channel", "_packed", lambda x: np.zeros((32, 8), np.int32), "'{}_packed'"),
        ("fp8-blocks", "_scale_inv", lambda x: x.view(np.int32), "'{}_scale_inv' in .* is int32"),
        ("int8-channel", ".input_scale", lambda x: np.ones(1, np.float32), "'{}.input_scale'"),
    ],
)
def test_damaged_files(
    files: Files, tmp_path: Path, name: str, suffix: str, replace: Any, message: str
) -> None:
    stored, _ = make(files, tmp_path, name)
    tensors = read_back(stored)
    changed = replace(tensors.pop(Q + suffix, None))
    if changed is not None:
        tensors[Q + suffix] = changed
    write_tensors(stored / "model.safetensors", tensors)
    target = open_target(stored, dtype="float32")
    with pytest.raises(ValueError, match=message.replace("{}", Q)) as found:
        target.load_weights()
    assert str(stored) in str(found.value)


@pytest.mark.parametrize("name", FORMATS)
def test_scales_are_positive_floats(files: Files, tmp_path: Path, name: str) -> None:
    stored, _ = make(files, tmp_path, name)
    tensors = read_back(stored)
    key = Q + ("_scale_inv" if name == "fp8-blocks" else "_scale")
    right = tensors[key]
    wrong = [np.full_like(right, x) for x in (np.nan, np.inf, 0.0, -1.0, 1e38, 2.0**16 + 1)]
    for values in (*wrong, np.ones(right.shape, np.int32), np.ones(right.shape, np.int8)):
        write_tensors(stored / "model.safetensors", tensors | {key: values})
        with pytest.raises(ValueError, match=f"tensor '{key}' in {stored}.* {values.dtype}"):
            open_target(stored, dtype="float32").source().read(f"{Q}_scale")
    write_tensors(stored / "model.safetensors", tensors | {key: np.full_like(right, 2.0**16)})
    open_target(stored, dtype="float32").source().read(f"{Q}_scale")


def test_scales_of_attention_belong_to_a_layer(files: Files, tmp_path: Path) -> None:
    stored, _ = make(files, tmp_path, "fp8-channel")
    name, tensors = "model.layers.9.self_attn.k_scale", read_back(stored)
    write_tensors(stored / "model.safetensors", tensors | {name: np.ones(1, np.float32)})
    with pytest.raises(ValueError, match=f"does not use: '{name}'"):
        open_target(stored, dtype="float32").check_weights()
    name = "model.layers.0.self_attn.k_scale"
    write_tensors(stored / "model.safetensors", tensors | {name: np.ones(1, np.int32)})
    with pytest.raises(ValueError, match=f"'{name}' in {stored}.* is int32"):
        open_target(stored, dtype="float32")


def test_parts_of_a_projection_must_be_alike(files: Files, tmp_path: Path) -> None:
    stored, _ = make(files, tmp_path, "int8-channel", "layers.1.self_attn.k_proj")
    with pytest.raises(
        ValueError, match=r"only some of the projections of 'layers.1.attention.qkv'"
    ):
        open_target(stored, dtype="float32")


def test_config_type(files: Files, tmp_path: Path) -> None:
    """A configuration prints what it is, for messages."""
    stored, _ = make(files, tmp_path, "int4")
    config = open_target(stored, dtype="bfloat16").config
    assert isinstance(config, ModelConfig)
    assert str(config.quantization) == f"int4 in groups of {GROUP}, without lm_head"
