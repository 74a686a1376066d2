"""Damaged files: each is refused by the name of its folder, or gives the weights of the whole file.

A case damages one file of a checkpoint: single bits, or one field of a header or configuration.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from specjax.checkpoints import open_target
from specjax.testing import Files
from specjax.testing.files import write_folder

from ..support.checkpoint_files import CONFIG, target_tensors, write_gguf
from ..support.quantized_files import FORMATS, make

Damage = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Case:
    write: Callable[[Path, Files], Path]  # returns the model
    file: str  # the damaged file; empty: the model itself
    damage: Damage


def flip(data: bytes, place: int) -> bytes:
    """Flip a bit."""
    changed = bytearray(data)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def gguf_table(data: bytes, path: Path) -> tuple[int, list[tuple[str, int, int]]]:
    """The start of the tensor table, and (kind, place, size) of each number in it."""
    path.write_bytes(data)
    fields, start = [], len(data)
    for tensor in gguf.GGUFReader(path).tensors:
        at = tensor.field.offset
        start = min(start, at)
        for kind, part in zip(
            ("length", "name", "rank", "dims", "type", "offset"), tensor.field.parts, strict=True
        ):
            step = part.nbytes if kind == "name" else part.itemsize
            fields += [(kind, at + i, step) for i in range(0, part.nbytes, step)]
            at += part.nbytes
    return start, fields


class GGUFTable:
    """Damage of the tensor table of a GGUF file: a bit, or one of its numbers or names."""

    def __init__(self, kind: str) -> None:
        self.kind, self.fields, self.start = kind, [("", 0, 0)], 0

    def write(self, folder: Path, _: Files) -> Path:
        path = write_gguf(folder / "model.gguf", target_tensors())
        self.start, self.fields = gguf_table(path.read_bytes(), folder / "copy")
        return path

    def __call__(self, data: bytes, rng: random.Random) -> bytes:
        if self.kind == "bits":
            end = sum(self.fields[-1][1:])
            return flip(data, rng.randrange(8 * self.start, 8 * end))
        if rng.random() < 0.1:  # the numbers of tensors and keys
            place, size, value = rng.choice((8, 16)), 8, 0
        else:
            kind, place, size = rng.choice(self.fields)
            if kind == "name":
                _, other, length = rng.choice([x for x in self.fields if x[0] == "name"])
                same = data[other : other + length][:size].ljust(size, b"x")
                return data[:place] + same + data[place + size :]
            if kind == "type":
                value = rng.choice(list(gguf.GGMLQuantizationType)).value
                return data[:place] + value.to_bytes(4, "little") + data[place + size :]
        value = int.from_bytes(data[place : place + size], "little")
        value += rng.choice((-64, -32, -1, 1, 2, 31, 32, 33, 64, 2**20, -value))
        return (
            data[:place] + (value % 2 ** (8 * size)).to_bytes(size, "little") + data[place + size :]
        )


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def join(header: dict[str, Any], tensors: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + tensors


def header_bits(data: bytes, rng: random.Random) -> bytes:
    return flip(data, rng.randrange(8 * (8 + int.from_bytes(data[:8], "little"))))


def header_fields(data: bytes, rng: random.Random) -> bytes:
    """Change one field of a safetensors header, or its names."""
    header, tensors = split(data)
    header.pop("__metadata__", None)
    names = sorted(header)
    name, other = rng.sample(names, 2)
    stored = header[name]
    change = rng.randrange(7)
    if change == 0:
        kinds = "BOOL U8 I8 F8_E5M2 F8_E4M3 I16 U16 F16 BF16 I32 U32 F32 I64 F64 X".split()
        stored["dtype"] = rng.choice(kinds)
    elif change == 1 and stored["shape"]:
        i = rng.randrange(len(stored["shape"]))
        stored["shape"][i] += rng.choice((-1, 1, 2, -stored["shape"][i]))
    elif change == 2:
        stored["shape"] = rng.choice((stored["shape"][::-1], [*stored["shape"], 1], []))
    elif change == 3:
        stored["data_offsets"][rng.randrange(2)] += rng.choice((-64, -4, -1, 1, 4, 64))
    elif change == 4:
        stored["data_offsets"] = header[other]["data_offsets"]
    elif change == 5:
        del header[name]
    else:
        endings = "_scale _scale_inv _zero_point _g_idx _shape _packed _offset x".split()
        base = name.rpartition("_")[0] if rng.random() < 0.3 else name
        header[base + rng.choice(endings)] = header.pop(name)
    return join(header, tensors)


STRAY = "{}.weight_g_idx {}.input_scale {}.weight_zero_point {}.weight_scale_inv {}.weight_offset"


def quantised_tensors(data: bytes, rng: random.Random) -> bytes:
    """Change the values or the dtype of scales or zero points, or add a tensor."""
    header, tensors = split(data)
    name = rng.choice([x for x in header if x.endswith(("_scale", "_scale_inv", "_zero_point"))])
    start, end = header[name]["data_offsets"]
    if rng.random() < 0.4:
        stray = rng.choice(STRAY.split()).format(name.rpartition(".")[0])
        if stray not in header:
            header[stray] = {"dtype": "F32", "shape": [1], "data_offsets": [len(tensors)] * 2}
            header[stray]["data_offsets"][1] += 4
            return join(header, tensors + np.float32(1).tobytes())
    if name.endswith("_zero_point") or rng.random() < 0.3:
        kinds = ["U32", "F32"] if name.endswith("_zero_point") else ["I32", "U32"]
        header[name]["dtype"] = rng.choice(kinds)
        return join(header, tensors)
    values = np.frombuffer(tensors[start:end], np.float32).copy()
    wrong = (np.nan, np.inf, -np.inf, 0.0, -0.0, -1.0, 1e38, 1e-40)
    values[rng.randrange(values.size)] = rng.choice(wrong)
    return join(header, tensors[:start] + values.tobytes() + tensors[end:])


# keys of quantization_config -> values that are wrong for at least one format
KEYS: dict[str, tuple[Any, ...]] = {
    "quant_method": ("gptq", "fp8", "compressed-tensors", None),
    "format": ("pack-quantized", "dense", "marlin-24"),
    "weight_block_size": ([12, 12], [24, 48], [48, 48], [0, 24], None),
    "activation_scheme": ("static",),
    "num_bits": (2, 4, 8, "4", None),
    "type": ("int", "float", "x"),
    "strategy": ("tensor", "channel", "group", "block", "token"),
    "symmetric": (True, False, None),
    "group_size": (12, 48, 2**31, -1, None),
    "block_structure": ([24, 24], [12, 12]),
    "actorder": ("group", "weight", True),
}


def quantised_config(data: bytes, rng: random.Random) -> bytes:
    config = json.loads(data)
    stated = config["quantization_config"]
    groups = stated.get("config_groups")
    key = rng.choice(list(KEYS))
    place = groups["group_0"]["weights"] if groups and rng.random() < 0.7 else stated
    place[key] = rng.choice(KEYS[key])
    return json.dumps(config).encode()


def write_plain(folder: Path, _: Files) -> Path:
    return write_folder(folder / "model", CONFIG, target_tensors())


def write_quantised(name: str, folder: Path, files: Files) -> Path:
    return make(files, folder, name)[0]


# Further files and ways to damage them are added here.
BITS, FIELDS = GGUFTable("bits"), GGUFTable("fields")
CASES = {
    "gguf-bits": Case(BITS.write, "", BITS),
    "gguf-fields": Case(FIELDS.write, "", FIELDS),
    "safetensors-bits": Case(write_plain, "model.safetensors", header_bits),
    "safetensors-fields": Case(write_plain, "model.safetensors", header_fields),
}
for kind in FORMATS:
    write = partial(write_quantised, kind)
    CASES[f"{kind}-values"] = Case(write, "model.safetensors", quantised_tensors)
    CASES[f"{kind}-fields"] = Case(write, "model.safetensors", header_fields)
    CASES[f"{kind}-config"] = Case(write, "config.json", quantised_config)


def weights_of(model: Path) -> dict[str, bytes]:
    loaded = open_target(model, dtype="float32").load_weights()
    return {name: weight.tobytes() for name, weight in loaded.items()}


def check(case: Case, folder: Path, files: Files, count: int) -> None:
    model = case.write(folder, files)
    file = model / case.file if case.file else model
    data, whole = file.read_bytes(), weights_of(model)
    for seed in range(count):
        changed = case.damage(data, random.Random(seed))
        file.write_bytes(changed)
        refusal, found = "", whole
        try:
            found = weights_of(model)
        except ValueError as error:
            refusal = str(error)
        assert not refusal or str(folder) in refusal, seed
        assert found == whole, seed


QUICK = [
    *(name for name in CASES if name.startswith(("gguf", "safetensors")) or "values" in name),
    *(f"{kind}-{what}" for kind in ("fp8-blocks", "int4-zeros") for what in ("fields", "config")),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_damage_is_refused(name: str, files: Files, tmp_path: Path) -> None:
    check(CASES[name], tmp_path, files, 40 if name.startswith(("gguf", "safetensors")) else 6)


@pytest.mark.long_after(8)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_much_damage_is_refused(name: str, files: Files, tmp_path: Path) -> None:
    check(CASES[name], tmp_path, files, 100)
