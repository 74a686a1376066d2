"""Damaged checkpoints: any damage in a file raises a ValueError that names the file."""

import json
import os
import random
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from specjax.checkpoints import open_draft, open_target
from specjax.checkpoints.tensors import open_directory
from specjax.testing.files import write_folder

from ..support.checkpoint_files import (
    CONFIG,
    HEAD_CONFIG,
    head_tensors,
    target_tensors,
    write_gguf,
    write_sharded,
)
from .damage import damage_json, fuzz


def damage_bytes(file: Path, rng: random.Random, header: int = 2500) -> None:
    data = bytearray(file.read_bytes())
    if rng.random() < 0.2:
        del data[rng.randrange(len(data)) :]
    for _ in range(rng.randrange(3)):
        i = rng.randrange(min(header, len(data) or 1))
        width = rng.choice((1, 4, 8))
        value = rng.choice((0, 1, 0x7F, 255, 2**31, 2**40, 2**63, 2**64 - 1))
        data[i : i + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
    file.write_bytes(data)


@pytest.fixture(scope="module")
def tokenizer_files() -> dict[str, str]:
    vocab = {"a": 0, "b": 1, "<s>": 2, "</s>": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens(["<s>"])
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "add_bos_token": True,
        "added_tokens_decoder": {"3": {"content": "</s>", "special": True}},
        "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    }
    return {"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(config)}


def test_damaged_directories(tmp_path: Path, tokenizer_files: dict[str, str]) -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config = CONFIG | {"rope_scaling": llama3, "sliding_window": 32, "head_dim": 8}
    write_sharded(tmp_path, config, target_tensors(), 2)
    files = tokenizer_files | {"generation_config.json": '{"eos_token_id": [3, 5]}'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    names = [*files, "config.json", "model.safetensors.index.json"]

    def act(name: str) -> None:
        target = open_target(tmp_path)
        (target.load_tokenizer if "token" in name else target.check_weights)()

    assert fuzz(tmp_path, names, damage_json, act, 400) > 40


@pytest.mark.parametrize("nested", [False, True])
def test_damaged_heads(tmp_path: Path, nested: bool) -> None:
    target = open_target(write_folder(tmp_path / "target", CONFIG, {}))
    config: dict[str, Any] = HEAD_CONFIG | {"norm_output": False, "target_hidden_size": 32}
    if nested:
        layer = {k: v for k, v in HEAD_CONFIG.items() if k != "eagle_config"}
        eagle = HEAD_CONFIG["eagle_config"]
        config = {"transformer_layer_config": layer, "draft_vocab_size": 20, "eagle_config": eagle}
    head = write_folder(tmp_path / "head", config, head_tensors())
    act = partial(open_draft, head, target)
    assert fuzz(head, ["config.json"], damage_json, lambda _: act().check_weights(), 200) > 10


def test_damaged_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    keys = {
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 2.0,
        "tensor_data_layout": ["a", "b"],
        "attention.sliding_window": 32,
    }
    write_gguf(path, target_tensors(), keys=keys)
    act = partial(open_target, path)
    assert fuzz(tmp_path, [path.name], damage_bytes, lambda _: act().check_weights(), 300) > 20


@pytest.mark.parametrize("kind", [0, 8, 9])
def test_gguf_array_longer_than_the_file(tmp_path: Path, kind: int) -> None:
    """Lengths of bytes, strings and arrays are checked against the file's size before reading."""
    path = tmp_path / "model.gguf"
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k"
    path.write_bytes(head + struct.pack("<IIQ", 9, kind, 2**40))
    assert path.stat().st_size == 49
    with pytest.raises(ValueError, match=r"is not a complete GGUF .* exceed the file's size"):
        open_target(path)
    nested = struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 9, 1) * 5000
    path.write_bytes(head + nested)
    with pytest.raises(ValueError, match=r"model\.gguf is not a complete GGUF .* 4 arrays"):
        open_target(path)


def test_damaged_safetensors(tmp_path: Path) -> None:
    act = partial(open_target, write_folder(tmp_path, CONFIG, target_tensors()))
    fuzz(tmp_path, ["model.safetensors"], damage_bytes, lambda _: act().check_weights(), 100)


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    tensors = {"a": np.arange(4, dtype=np.float32), "b": np.ones(4, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_directory(tmp_path)
    assert np.array_equal(source.read("a"), tensors["a"])
    save_file(tensors, tmp_path / "new", metadata={"a longer": "header"})
    (tmp_path / "new").replace(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'b' of .*model.safetensors.*changed after its header"):
        source.read("b")


@pytest.mark.parametrize("layers", [2**31, 2**31 - 1, 1000])
def test_layer_count_is_checked_before_building(tmp_path: Path, layers: int) -> None:
    write_folder(tmp_path, CONFIG | {"num_hidden_layers": layers}, target_tensors())
    with pytest.raises(
        ValueError, match=r"_layers=214748364\d .* (1024|2147483647)|lacks \d+ tensor"
    ):
        open_target(tmp_path).check_weights()


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool", "complex64"])
def test_weights_must_be_floats(tmp_path: Path, dtype: str) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = target_tensors()
    write_folder(tmp_path, CONFIG, tensors)
    try:
        save_file(tensors | {name: tensors[name].astype(dtype)}, tmp_path / "model.safetensors")
    except Exception:  # this version of safetensors lacks the dtype
        pytest.skip(f"safetensors stores no {dtype}")
    with pytest.raises(ValueError, match=rf"{name}' in .*\.safetensors is {dtype}; .* bfloat16"):
        open_target(tmp_path).load_weights()
    gguf = {"blk.0.ffn_up.weight": tensors["model.layers.0.mlp.up_proj.weight"].astype(np.int32)}
    rest = {k: v for k, v in tensors.items() if k != "model.layers.0.mlp.up_proj.weight"}
    path = write_gguf(tmp_path / "model.gguf", rest, extra=gguf)
    with pytest.raises(ValueError, match=r"up_proj.weight' in .*\.gguf is int32"):
        open_target(path).check_weights()


OPTIONAL_FILES = [
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
]


@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "broken link"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", *OPTIONAL_FILES])
def test_only_regular_files_are_read(
    tmp_path: Path, tokenizer_files: dict[str, str], name: str, kind: str
) -> None:
    write_folder(tmp_path, CONFIG, target_tensors())
    (tmp_path / "tokenizer.json").write_text(tokenizer_files["tokenizer.json"])
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "device":
        (tmp_path / name).symlink_to("/dev/null")
    elif kind == "pipe":
        os.mkfifo(tmp_path / name)
    elif kind == "broken link":
        (tmp_path / name).symlink_to(tmp_path / "none")
    else:
        (tmp_path / name).mkdir()

    def load() -> None:
        open_target(tmp_path).check_weights()
        open_target(tmp_path).load_tokenizer()

    is_absent = kind == "broken link"
    reason = "(missing|not a complete safetensors)" if is_absent else "not a regular file"
    with pytest.raises(ValueError, match=f"{tmp_path / name} is {reason}"):
        load()


@pytest.mark.parametrize("name", ["{}/b.safetensors", "../b.safetensors", "c/b.safetensors", ".."])
def test_an_index_names_files_of_its_folder(tmp_path: Path, name: str) -> None:
    model = write_folder(tmp_path / "a", CONFIG, target_tensors())
    (tmp_path / "b.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    (model / "c").mkdir()
    (model / "c" / "b.safetensors").symlink_to(tmp_path / "b.safetensors")
    name = name.format(tmp_path)
    index = {"weight_map": dict.fromkeys(target_tensors(), name)}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"index\.json names .*'{name}'"):
        open_target(model).check_weights()


def test_headers_have_a_limit(tmp_path: Path) -> None:
    """A million empty tensors would take 26 s."""
    model = write_folder(tmp_path, CONFIG, target_tensors())
    path = model / "model.safetensors"
    path.write_bytes((2**23 + 1).to_bytes(8, "little") + b"{}" + bytes(2**23))
    with pytest.raises(ValueError, match=r"model\.safetensors .* 8388609 bytes; .* 8388608"):
        open_target(model).check_weights()


@pytest.mark.parametrize(
    "name", ["x.rotary_emb.inv_freq", "lm_head.weight_copy", "model.layers.9.rotary_emb.inv_freq"]
)
def test_a_name_is_known_only_where_it_is_used(tmp_path: Path, name: str) -> None:
    known = ("model.layers.1.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
    tensors = target_tensors(tied=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors |= dict.fromkeys(known, np.ones(4, np.float32))
    config = CONFIG | {"tie_word_embeddings": True}
    open_target(write_folder(tmp_path, config, tensors)).check_weights()
    write_folder(tmp_path, config, tensors | {name: np.ones(1, np.float32)})
    with pytest.raises(ValueError, match=f"does not use: '{name}'"):
        open_target(tmp_path).check_weights()
