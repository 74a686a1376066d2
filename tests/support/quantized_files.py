"""Checkpoints whose matrices are quantised, in the formats of published files."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from specjax.checkpoints import open_target
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel
from specjax.testing import Files
from specjax.testing.dense import dense_logits

E4M3 = ml_dtypes.float8_e4m3fn
GROUP = 24  # neither 32 nor 48 inputs are whole groups
TOKENS = [3, 1, 4, 15, 9, 26, 5, 35]
Stored = tuple[
    dict[str, np.ndarray], np.ndarray
]  # tensors by suffix, and the values they stand for


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file({name: np.asarray(x, order="C") for name, x in tensors.items()}, path)


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Signed integers along the last axis, as words of 32 bits."""
    rows, columns = values.shape
    words = np.zeros((rows, -(-columns * bits // 32)), np.int64)
    for i in range(columns):
        place = i % (32 // bits)
        words[:, i * bits // 32] |= (
            values[:, i].astype(np.int64) + 2 ** (bits - 1)
        ) << place * bits
    return words.astype(np.uint32).view(np.int32)


def channel(kind: str, matrix: np.ndarray) -> Stored:
    if kind == "fp8":
        scale = np.abs(matrix).max(axis=1, keepdims=True) / 448
        values = (matrix / scale).astype(E4M3)
    else:
        scale = np.abs(matrix).max(axis=1, keepdims=True) / 127
        values = np.rint(matrix / scale).astype(np.int8)
    return {"": values, "_scale": scale}, np.float32(values) * scale


def tensor_scale(matrix: np.ndarray) -> Stored:
    scale = np.float32(np.abs(matrix).max() / 448)
    values = (matrix / scale).astype(E4M3)
    return {"": values, "_scale": scale.reshape(1)}, np.float32(values) * scale


def blocks(matrix: np.ndarray) -> Stored:
    """Blocks of 24 x 24, also partial ones."""
    rows, columns = (-(-size // GROUP) for size in matrix.shape)
    values, scales = np.zeros(matrix.shape, E4M3), np.zeros((rows, columns), np.float32)
    whole = np.zeros_like(matrix)
    for i in range(rows):
        for j in range(columns):
            at = slice(i * GROUP, (i + 1) * GROUP), slice(j * GROUP, (j + 1) * GROUP)
            scales[i, j] = np.abs(matrix[at]).max() / 448
            values[at] = (matrix[at] / scales[i, j]).astype(E4M3)
            whole[at] = np.float32(values[at]) * scales[i, j]
    return {"": values, "_scale_inv": scales}, whole


def packed(bits: int, has_zeros: bool, group: int | None, matrix: np.ndarray) -> Stored:
    rows, columns = matrix.shape
    size = group or columns
    count, most = -(-columns // size), 2 ** (bits - 1) - 1
    values, scales = np.zeros(matrix.shape, np.int8), np.zeros((rows, count), np.float32)
    zeros, whole = np.zeros((rows, count), np.int8), np.zeros_like(matrix)
    for j in range(count):
        at = slice(j * size, (j + 1) * size)
        part = matrix[:, at]
        low, high = part.min(axis=1), part.max(axis=1)
        scales[:, j] = (high - low) / (2 * most) if has_zeros else np.abs(part).max(axis=1) / most
        if has_zeros:
            zeros[:, j] = np.clip(np.rint(-most - low / scales[:, j]), -most - 1, most)
        rounded = np.rint(part / scales[:, j : j + 1]) + zeros[:, j : j + 1]
        values[:, at] = np.clip(rounded, -most - 1, most)
        whole[:, at] = (np.float32(values[:, at]) - zeros[:, j : j + 1]) * scales[:, j : j + 1]
    stored = {"_packed": pack(values, bits), "_scale": scales}
    stored["_shape"] = np.array(matrix.shape, np.int64)
    if has_zeros:
        stored["_zero_point"] = pack(np.ascontiguousarray(zeros.T), bits).T
    return stored, whole


def compressed(bits: int, type: str, strategy: str, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": bits, "type": type, "strategy": strategy, "symmetric": True} | weights
    group = {"weights": scheme, "targets": ["Linear"], "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


BLOCKS = {
    "quant_method": "fp8",
    "weight_block_size": [GROUP, GROUP],
    "activation_scheme": "dynamic",
}
Format = tuple[dict[str, Any], Callable[[np.ndarray], Stored]]
INT4 = {"bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
FORMATS: dict[str, Format] = {
    "fp8-channel": (compressed(8, "float", "channel"), lambda x: channel("fp8", x)),
    "fp8-tensor": (compressed(8, "float", "tensor"), tensor_scale),
    "fp8-blocks": (BLOCKS, blocks),
    "int8-channel": (compressed(8, "int", "channel"), lambda x: channel("int8", x)),
    "int8-packed": (compressed(8, "int", "channel"), lambda x: packed(8, False, None, x)),
    "int4": (compressed(**INT4), lambda x: packed(4, False, GROUP, x)),
    "int4-zeros": (compressed(**INT4, symmetric=False), lambda x: packed(4, True, GROUP, x)),
}


def make(
    files: Files, folder: Path, name: str | Format, plain: str = "lm_head"
) -> tuple[Path, Path]:
    """The tiny target in a format, and whole with the same values; ``plain`` matrices are whole."""
    return quantised(files.target, folder, name, plain)


def quantised(model: Path, folder: Path, name: str | Format, plain: str) -> tuple[Path, Path]:
    """Two copies of a model or draft, as :func:`make`."""
    config, quantise = FORMATS[name] if isinstance(name, str) else name
    stored, whole = {}, {}
    for key, x in load_file(model / "model.safetensors").items():
        is_plain = any(part in key for part in plain.split())
        if x.ndim == 2 and "embed_tokens" not in key and not is_plain:
            found, whole[key] = quantise(np.float32(x))
            stored |= named(key, found)
        else:
            stored[key] = whole[key] = x
    paths = folder / "stored", folder / "whole"
    for path in paths:
        shutil.copytree(model, path)
    write_tensors(paths[0] / "model.safetensors", stored)
    save_file(whole, paths[1] / "model.safetensors")
    edit(paths[0], lambda fields: fields.update(quantization_config=config))
    return paths


def named(matrix: str, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors by name; a suffix with a point replaces ``.weight``."""
    module = matrix.removesuffix(".weight")
    return {(module if x.startswith(".") else matrix) + x: value for x, value in found.items()}


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    fields = json.loads((path / "config.json").read_text())
    change(fields)
    (path / "config.json").write_text(json.dumps(fields))


def logits_of(path: Path) -> np.ndarray:
    target = open_target(path, dtype="float32")
    flat = FlatModel.of(partial(CausalLM, target.config))
    return dense_logits(flat.order(target.load_weights()), TOKENS, target.config)
