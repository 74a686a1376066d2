"""GGUF files: the reader, and weights compared with their original tensors."""

from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from specjax.checkpoints import open_target, target
from specjax.checkpoints.gguf import GGUFFile
from specjax.config import RopeScaling
from specjax.testing.files import write_folder

from ..support.checkpoint_files import (
    CONFIG,
    DIM,
    LAYERS,
    QKV,
    add_biases,
    target_tensors,
    to_gguf_rows,
    write_gguf,
)
from .layout import check_layout

LLAMA3 = RopeScaling(
    rope_type="llama3",
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def llama3_divisors(theta: float, scaling: RopeScaling, dim: int) -> np.ndarray:
    """Divisors that llama.cpp's converter writes for Llama 3.1 scaling, one per frequency."""
    divisors = []
    original = scaling.original_max_position_embeddings
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * theta ** (i / dim)
        if wavelength < original / scaling.high_freq_factor:
            divisors.append(1.0)
        elif wavelength > original / scaling.low_freq_factor:
            divisors.append(scaling.factor)
        else:
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.asarray(divisors, np.float32)


def head_norms(dim: int) -> dict[str, np.ndarray]:
    names = (f"{i}.self_attn.{x}_norm" for i in range(LAYERS) for x in "qk")
    return {f"model.layers.{name}.weight": np.linspace(0.5, 2, dim, dtype="f4") for name in names}


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_equal_the_original_tensors(tmp_path: Path, arch: str, tied: bool) -> None:
    tensors = add_biases(target_tensors(tied=tied), QKV)
    if arch == "qwen3":
        tensors |= head_norms(DIM)
    name = "model.layers.0.self_attn.k_proj.weight"
    assert not np.array_equal(to_gguf_rows(tensors[name], 2), tensors[name])
    checkpoint = open_target(write_gguf(tmp_path / "model.gguf", tensors, arch=arch))
    assert checkpoint.config.qkv_bias
    assert checkpoint.config.dtype == "float32"
    assert checkpoint.config.tie_word_embeddings is tied
    check_layout(checkpoint, tensors)


WINDOW = {"attention.sliding_window": 16}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
LONG = {
    f"rope_factors_{name}.weight": np.array(values, np.float32)
    for name, values in {"long": [1.0, 1.5, 2.5, 4.0], "short": [1.0, 1.1, 1.3, 1.6]}.items()
}


def scaling(kind: str, **values: Any) -> dict[str, Any]:
    original = {"original_max_position_embeddings": 32}
    return {"rope_scaling": RopeScaling(rope_type=kind, factor=4.0, **original, **values)}


@pytest.mark.parametrize(
    ("arch", "keys", "extra", "expected"),
    [
        ("llama", WINDOW, {}, {"model_type": "mistral", "windows": (16,) * LAYERS}),
        (
            "mistral3",
            YARN | {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1},
            {},
            {"model_type": "ministral3", **scaling("yarn", llama_4_scaling_beta=0.1)},
        ),
        ("qwen2", YARN, {}, scaling("yarn", attention_factor=1.1386294361119891)),
        (
            "qwen2",
            YARN | {"rope.scaling.yarn_attn_factor": 1.5, "rope.scaling.yarn_beta_fast": 16.0},
            {},
            scaling("yarn", attention_factor=1.5, beta_fast=16.0),
        ),
        (
            "qwen2",
            {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.25},
            LONG,
            scaling(
                "longrope",
                attention_factor=1.25,
                long_factor=(1.0, 1.5, 2.5, 4.0),
                short_factor=(1.0, 1.1, 1.3, 1.6),
            ),
        ),
        ("qwen2", {"rope.dimension_count": 4}, {}, {"rotary_dim": 4}),
        (
            "granite",
            {
                "attention.scale": 0.5,
                "embedding_scale": 12.0,
                "residual_scale": 0.25,
                "logit_scale": 8.0,
            },
            {},
            {
                "attention_scale": 0.5,
                "embedding_scale": 12.0,
                "residual_scale": 0.25,
                "logit_scale": 0.125,
            },
        ),
        ("granite", {}, {}, {"attention_scale": DIM**-0.5, "residual_scale": 1.0}),
        ("smollm3", {}, {}, {"rope_theta": 5000.0}),
    ],
)
def test_keys_of_families(
    tmp_path: Path, arch: str, keys: dict[str, Any], extra: Any, expected: dict[str, Any]
) -> None:
    path = write_gguf(tmp_path / "m.gguf", target_tensors(), arch=arch, keys=keys, extra=extra)
    checkpoint = open_target(path)
    for name, value in expected.items():
        assert getattr(checkpoint.config, name) == value, name
    if arch == "granite":  # layouts of heads are slow; parity tests check those of all families
        check_layout(checkpoint, target_tensors())


def gemma_tensors() -> dict[str, np.ndarray]:
    """Tensors with four norms per layer; 1 + w is exact."""
    rng, names = np.random.default_rng(5), ("pre_feedforward", "post_feedforward")
    norms = [f"model.layers.{i}.{name}_layernorm.weight" for i in range(LAYERS) for name in names]
    plain = target_tensors(tied=True) | head_norms(DIM)
    plain |= {name: rng.normal(size=32).astype(np.float32) for name in norms}
    rounded = {n: np.round(x * 1024) / 1024 for n, x in plain.items() if n.endswith("norm.weight")}
    return plain | rounded


@pytest.mark.parametrize(
    ("keys", "pattern"),
    [
        (WINDOW, (16, 16, 16)),  # five layers in six have it
        (WINDOW | {"attention.sliding_window_pattern": 2}, (16, 0, 16)),
        (WINDOW | {"attention.sliding_window_pattern": [False, True, True]}, (0, 16, 16)),
        (WINDOW | {"attention.sliding_window_pattern": [True, True, True]}, (16, 16, 16)),
        ({}, ()),
    ],
)
def test_gemma3(tmp_path: Path, keys: dict[str, Any], pattern: tuple[int, ...]) -> None:
    keys = {"attention.key_length": DIM, "rope.freq_base_swa": 100.0, **keys}
    path = write_gguf(tmp_path / "m.gguf", gemma_tensors(), arch="gemma3", keys=keys)
    config = open_target(path).config
    assert config.windows == pattern
    ropes = [rope and rope.theta for rope in config.layer_ropes]
    assert ropes == [100.0 if window else None for window in pattern or (0, 0, 0)]
    assert (config.attention_scale, config.activation) == (DIM**-0.5, "gelu_pytorch_tanh")


def test_norms_with_one_added(tmp_path: Path) -> None:
    keys = {"attention.key_length": DIM, **WINDOW}
    path = write_gguf(tmp_path / "m.gguf", gemma_tensors(), arch="gemma3", keys=keys)
    weights, tensors = open_target(path).load_weights(), gemma_tensors()
    for ours, theirs in {
        "norm": "norm",
        "layers.1.attention.k_norm": "layers.1.self_attn.k_norm",
        "layers.1.post_attention_norm": "layers.1.pre_feedforward_layernorm",
        "layers.2.mlp_output_norm": "layers.2.post_feedforward_layernorm",
    }.items():
        np.testing.assert_array_equal(weights[f"{ours}.scale"], tensors[f"model.{theirs}.weight"])


def test_a_larger_gemma_has_another_scale(tmp_path: Path) -> None:
    """Files do not state it: that of the 27B model follows from its width, not from its heads."""
    keys = {**WINDOW, "attention.key_length": 16, "block_count": 46}
    path = write_gguf(tmp_path / "m.gguf", gemma_tensors(), arch="gemma2", keys=keys)
    assert open_target(path).config.attention_scale == DIM**-0.5  # 32 / 4 instead of 16
    write_gguf(path, gemma_tensors(), arch="gemma2", keys=keys | {"block_count": 45})
    config = open_target(path).config
    assert config.attention_scale == 0.25
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)


def test_weights_equal_a_directory_of_the_same_tensors(tmp_path: Path) -> None:
    tensors = target_tensors()
    directory = open_target(write_folder(tmp_path / "hf", CONFIG, tensors))
    file = open_target(write_gguf(tmp_path / "model.gguf", tensors))
    assert file.config == directory.config
    ours, theirs = file.load_weights(), directory.load_weights()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0", "BF16", "F16"])
def test_stored_types(tmp_path: Path, kind: str) -> None:
    """Quantised and half-precision matrices load with the values that the gguf library decodes."""
    number = gguf.GGMLQuantizationType[kind]
    tensors = target_tensors()
    # the 48 columns of down_proj are not a multiple of 32, the block size
    path = write_gguf(
        tmp_path / "model.gguf",
        {n: t for n, t in tensors.items() if not n.endswith("down_proj.weight")},
        kind=number,
        extra={
            f"blk.{i}.ffn_down.weight": tensors[f"model.layers.{i}.mlp.down_proj.weight"]
            for i in range(3)
        },
    )
    opened = open_target(path)
    assert opened.config.dtype == "bfloat16"
    stored = f", dequantised from {kind}; quantization='int8'" if kind.startswith("Q") else ""
    assert opened.matrices.startswith(f"bfloat16{stored}")
    assert opened.quantised("int4").matrices.endswith(f"from {kind}") == bool(stored)
    decoded = {
        name: gguf.quants.dequantize(gguf.quants.quantize(value, number), number)
        if value.ndim > 1 and not name.endswith("down_proj.weight")
        else value
        for name, value in tensors.items()
    }
    check_layout(open_target(path, dtype="float32"), decoded)
    check_layout(open_target(path), decoded)


def test_absent_ids_of_special_tokens(tmp_path: Path) -> None:
    tokenizer = {"ggml.model": "llama", "ggml.eot_token_id": 60}
    path = write_gguf(tmp_path / "model.gguf", target_tensors(), tokenizer=tokenizer)
    config = open_target(path).config
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 60))
    write_gguf(path, target_tensors(), tokenizer=tokenizer | {"ggml.model": "gpt2"})
    config = open_target(path).config
    assert (config.bos_token_id, config.eos_token_ids) == (None, (60,))


def test_wide_heads(tmp_path: Path) -> None:
    tensors = target_tensors(dim=12) | head_norms(12)
    keys = {"attention.key_length": 12, "attention.value_length": 12, "rope.dimension_count": 12}
    checkpoint = open_target(write_gguf(tmp_path / "model.gguf", tensors, arch="qwen3", keys=keys))
    assert checkpoint.config.head_dim == 12
    check_layout(checkpoint, tensors)


def test_llama3_scaling_is_recognised(tmp_path: Path) -> None:
    keys = {"rope.freq_base": 500000.0}
    divisors = llama3_divisors(500000.0, LLAMA3, DIM)
    assert 1.0 < divisors[-2] or divisors[-1] == LLAMA3.factor
    path = write_gguf(
        tmp_path / "model.gguf",
        target_tensors(),
        keys=keys,
        extra={"rope_freqs.weight": divisors},
    )
    checkpoint = open_target(path)
    assert checkpoint.config.rope_scaling == LLAMA3
    check_layout(checkpoint, target_tensors())


def test_llama3_scaling_of_partly_rotated_heads(tmp_path: Path) -> None:
    keys = {"rope.freq_base": 5e6, "rope.dimension_count": 4}
    divisors = llama3_divisors(5e6, LLAMA3, 4)
    assert divisors[-1] == LLAMA3.factor
    extra = {"rope_freqs.weight": divisors}
    path = write_gguf(tmp_path / "m.gguf", target_tensors(), arch="qwen2", keys=keys, extra=extra)
    config = open_target(path).config
    assert (config.rotary_dim, config.rope_scaling) == (4, LLAMA3)


def test_other_frequency_divisors_are_refused(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.linspace(1, 8, DIM // 2, dtype=np.float32)}
    path = write_gguf(tmp_path / "model.gguf", target_tensors(), extra=extra)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight.*Llama 3\.1 scaling"):
        open_target(path)


@pytest.mark.parametrize(("window", "expected"), [(32, (32,) * LAYERS), (0, ())])
def test_sliding_window(tmp_path: Path, window: int, expected: tuple[int, ...]) -> None:
    keys = {"attention.sliding_window": window}
    path = write_gguf(tmp_path / "model.gguf", target_tensors(), keys=keys)
    assert open_target(path).config.windows == expected


def test_linear_scaling(tmp_path: Path) -> None:
    keys = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    path = write_gguf(tmp_path / "model.gguf", target_tensors(), keys=keys)
    assert open_target(path).config.rope_scaling == RopeScaling(rope_type="linear", factor=4.0)
    # llama.cpp reads a factor without a type as linear
    write_gguf(path, target_tensors(), keys={"rope.scaling.factor": 4.0})
    assert open_target(path).config.rope_scaling == RopeScaling(rope_type="linear", factor=4.0)
    divisors = {"rope_freqs.weight": np.ones(DIM // 2, np.float32)}
    write_gguf(path, target_tensors(), keys=keys, extra=divisors)
    with pytest.raises(ValueError, match=r"rope\.scaling\.type='linear' is not supported"):
        open_target(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "gemma9"}, r"general\.architecture='gemma9'.*'llama', .*'qwen2', 'qwen2moe'"),
        ({"arch": "mimo"}, "loads from a Hugging Face directory, not yet from GGUF; .*'qwen2'"),
        (
            {"arch": "ernie4_5-moe"},
            r"'ernie4_5-moe' needs mixtures of experts .* not supported yet; it must be one of \['",
        ),
        *(
            (
                {"extra": {f"rope_factors_{name}.weight": np.ones(4, "f4")}},
                rf"model\.gguf has no tensor 'rope_factors_{absent}\.weight'",
            )
            for name, absent in (("long", "short"), ("short", "long"))
        ),
        ({"extra": {n: np.ones(3, "f4") for n in LONG}}, r"rope_factors_\w+\.weight .* 4 numbers"),
        ({"arch": "qwen2", "keys": {"rope.dimension_count": 0}}, r"dimension_count=0 must be even"),
        (
            {"arch": "qwen2", "keys": {"rope.dimension_count": 5}},
            r"qwen2: rope\.dimension_count=5 must be even, at least 2 and at most .* 8",
        ),
        (
            {"arch": "granite", "keys": WINDOW},
            r"granite: attention\.sliding_window=16 is not supported",
        ),
        *(
            ({"arch": arch, "keys": {key: value}}, rf"{arch}: {key}=.* is not supported$")
            for arch, key, value in (
                ("llama", "attention_bias", True),
                ("llama", "mlp_bias", True),
                ("llama", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
                ("llama", "hidden_act", "gelu"),
                ("qwen2", "use_sliding_window", True),
                ("qwen2", "max_window_layers", 1),
            )
        ),
        (
            {
                "arch": "gemma2",
                "keys": WINDOW | {"query_pre_attn_scalar": 4.0, "attention.key_length": 8},
            },
            r"gemma2: query_pre_attn_scalar=.* is not supported$",
        ),
        ({"arch": "olmo2", "keys": {"attention.sliding_window_pattern": [True]}}, "not supported"),
        (
            {
                "arch": "gemma3",
                "keys": {"attention.key_length": 8}
                | WINDOW
                | {"attention.sliding_window_pattern": [True, False]},
            },
            r"sliding_window_pattern=\[True, False\] must have one value for each of 3 layers",
        ),
        ({"arch": "gemma2"}, r"model\.gguf has no gemma2\.attention\.sliding_window"),
        ({"arch": "gemma"}, r"the model does not use the tensor 'output\.weight'"),
        ({"arch": "qwen3", "keys": {"expert_count": 8}}, "qwen3: expert_count=8 is not supported"),
        ({"keys": {"expert_count": 8}}, r"llama has no expert_used_count"),
        *(
            (
                {"tokenizer": {f"ggml.{name}_token_id": token_id}},
                rf"ggml\.{name}_token_id={token_id} is outside the vocabulary of 61 tokens",
            )
            for name, token_id in {"bos": 61, "eos": 10**6, "eot": 61, "eom": 61}.items()
        ),
        ({"keys": {"rope.scaling.type": "yarn"}}, r"llama has no rope\.scaling\.factor"),
        ({"keys": {"rope.scaling.type": "longrope"}}, r"rope\.scaling\.type='longrope'"),
        ({"keys": {"rope.freq_base": 0.5}}, r"llama: rope\.freq_base=0\.5 must be"),
        ({"arch": "granite", "keys": {"logit_scale": 0.0}}, r"granite: logit_scale=0\.0 must be"),
        ({"keys": {"rope.dimension_count": 4}}, r"rope\.dimension_count=4.*head dimension 8"),
        ({"keys": {"feed_forward_length": [48, 48, 32]}}, r"\[48, 48, 32\] must be an integer"),
        ({"keys": {"attention.head_count": 0}}, r"llama: attention\.head_count=0 must be"),
        ({"keys": {"logit_scale": 2.0}}, r"model\.gguf: llama: logit_scale=2.0 is not supported"),
        ({"keys": {"block_count": 10**8, "attention.sliding_window": 8}}, r"=100000000 .* 1024"),
        ({"extra": {"lm_head.weight": np.ones((61, 32), np.float32)}}, r"gguf.*'lm_head.weight'"),
        ({"extra": {"blk.0.ffn_gate.scale": np.ones(1, np.float32)}}, r"'blk.0.ffn_gate.scale'"),
        ({"drop": ("context_length",)}, r"model\.gguf: llama has no context_length"),
    ],
)
def test_refused_configurations(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", target_tensors(), **options)
    with pytest.raises(ValueError, match=message):
        open_target(path).check_weights()


def test_reader_agrees_with_the_library(tmp_path: Path) -> None:
    keys = {"strings": ["a", "é", ""], "floats": [0.1, 2.5], "a_name": "ü", "a_float": 1e-5}
    kind = gguf.GGMLQuantizationType.F16
    path = write_gguf(tmp_path / "model.gguf", target_tensors(), keys=keys, kind=kind)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert set(ours.metadata.values) == set(fields)
    for key, value in fields.items():
        found = ours.metadata.values[key]
        if isinstance(value, float):
            assert np.float32(found) == np.float32(value), key
        elif isinstance(value, list) and isinstance(value[0], float):
            np.testing.assert_array_equal(np.float32(found), np.float32(value), err_msg=key)
        else:
            assert found == value, key
    assert ours.metadata.values["llama.a_float"] == 1e-5
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        found = ours.read(tensor.name)
        np.testing.assert_array_equal(found, tensor.data, err_msg=tensor.name)
        assert found.dtype == tensor.data.dtype
        assert ours.info(tensor.name).shape == tensor.data.shape


def test_damaged_header(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", target_tensors())
    data = path.read_bytes()
    path.write_bytes(data[:4] + (1).to_bytes(4, "little") + data[8:])
    with pytest.raises(ValueError, match=r"is not a complete GGUF file.*version 1"):
        GGUFFile(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="is not a complete GGUF file"):
        GGUFFile(path)


def number_at(path: Path, kind: str) -> int:
    """Return the place of the type or the offset of the file's third tensor."""
    field = gguf.GGUFReader(path).tensors[2].field
    return field.offset + sum(part.nbytes for part in field.parts[: -1 if kind == "offset" else -2])


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        *(("offset", step, r"'blk.*offset \d+; it must be \d+") for step in (1, -4, 32, 64, -64)),
        ("type", 8, r"'blk.*offset \d+; it must be \d+"),  # 34 bytes for 32 values
        ("count", -1, "data section has"),
        ("count", 1, "not a complete GGUF"),
        ("count", 2**17, "limit of 65536"),
        ("end", 32, "data section has"),
        ("end", -1, "data section has"),
    ],
)
def test_tensors_fill_the_data(tmp_path: Path, kind: str, change: int, message: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", target_tensors())
    data = bytearray(path.read_bytes())
    if kind == "end":
        data = data[:change] if change < 0 else data + bytes(change)
    else:
        place = 8 if kind == "count" else number_at(path, kind)
        value = int.from_bytes(data[place : place + 4], "little") + change
        data[place : place + 4] = value.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"model\.gguf .*{message}"):
        open_target(path)


def test_split_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first file opens the others; without all of them in order, the model is refused."""
    tensors = target_tensors()
    whole = open_target(write_gguf(tmp_path / "whole.gguf", tensors))
    writer = partial(gguf.GGUFWriter, split_max_tensors=12)
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", writer)
        write_gguf(tmp_path / "model.gguf", tensors)
    first, second, third = (tmp_path / f"model-{i:05d}-of-00003.gguf" for i in (1, 2, 3))
    split = open_target(first)
    assert split.config == whole.config
    assert not split.config.tie_word_embeddings  # the output head is in the last file
    found, expected = split.load_weights(), whole.load_weights()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert GGUFFile(first).info("output.weight").path == third
    with pytest.raises(ValueError, match=r"00002-of-00003.*split.no=1 must be 0; open the first"):
        open_target(second)
    with pytest.raises(ValueError, match=r"other.gguf: split.count=3 .*-00001-of-00003.gguf"):
        open_target(first.rename(tmp_path / "other.gguf"))
    (tmp_path / "other.gguf").rename(first)
    data = third.read_bytes()
    third.write_bytes(second.read_bytes())
    with pytest.raises(ValueError, match=r"00003-of-00003.*split.no=1 must be 2"):
        open_target(first)
    third.unlink()
    with pytest.raises(ValueError, match=r"00003-of-00003\.gguf is not a complete GGUF"):
        open_target(first)
    third.write_bytes(data)
    one = first.read_bytes().replace(b"split.count", b"split.cOunt")
    first.write_bytes(one)
    with pytest.raises(ValueError, match=r"split.tensors.count=\d+ must be 12"):
        open_target(first)


def test_big_endian_file_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_uint32("llama.block_count", 3)
    writer.add_tensor("token_embd.weight", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"model\.gguf .* is big-endian; only little-endian"):
        GGUFFile(tmp_path / "model.gguf")


def test_one_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights reuse the open file of the configuration: opening a large vocabulary is slow."""
    path = write_gguf(tmp_path / "model.gguf", target_tensors())
    opened = []

    class Counted(GGUFFile):
        def __init__(self, path: Path) -> None:
            opened.append(path)
            super().__init__(path)

    monkeypatch.setattr(target, "GGUFFile", Counted)
    checkpoint = open_target(path)
    checkpoint.load_weights()
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.model=None"):
        checkpoint.load_tokenizer()
    assert opened == [path]
