"""Quantised matrices in checkpoints: formats of published files, and quantising while loading.

A source that :func:`quantised_source` returns has the same names for all formats: a matrix ``X`` of
values ``[out, in]``, ``X_scale`` f32 ``[out, groups]``, and ``X_offset`` f32 ``[out, groups]`` if
groups have zero points. Formats, with their names of tensors:

- FP8 in blocks (``quant_method: fp8``): ``X`` e4m3 and ``X_scale_inv [out / 128, in / 128]``.
- compressed-tensors: ``X`` e4m3 or int8 and ``X_scale [out, 1]`` or ``[1]``; with
  ``pack-quantized`` the integers ``X_packed`` i32 ``[out, in * bits / 32]``, ``X_scale`` and, for
  zero points, ``X_zero_point`` i32 ``[out * bits / 32, groups]``.
- GPTQ and AWQ, see packed_files.py: ``X`` int4 or int8, ``X_scale [out, groups]`` and, for zero
  points, ``X_zero_point`` int8 ``[out, groups]``.
"""

import math
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import jax.numpy as jnp
import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn, int4

from specjax.checkpoints.tensors import FLOATS, TensorInfo, TensorSource, cast
from specjax.compiling.pool import usable_cores
from specjax.config import Quantization
from specjax.models.declare import OFFSET, SCALE, Recipes
from specjax.models.weights import largest

PACKED, ZERO_POINT, BLOCK_SCALE = "_packed", "_zero_point", "_scale_inv"
# values that are quantised at once: with all values of a matrix, it takes twice as long
_CACHED = 2**18
_LARGE = 2**27  # values of a matrix that several threads quantise
# endings of the tensors of a quantised matrix
SUFFIXES = SCALE, BLOCK_SCALE, PACKED, ZERO_POINT, "_shape"
# limits of scales; values times scales stay far from the largest float
_SCALES, _KV_SCALES = (2.0**-126, 2.0**16), (2.0**-10, 2.0**10)
# scales of activations in attention, of which only those below are read
_OF_ATTENTION = re.compile(
    r"(.+\.self_attn\.)(([qkv]|kv|attn)_(scale|zero_point)|([qkv])_proj\.(\5|output)_scale)"
)
# a scale of keys, of values, or of both
_KV_SCALE = re.compile(
    r"model\.layers\.(\d+)\.self_attn\.(?:([kv]|kv)_scale|([kv])_proj\.(?:\3|output)_scale)"
)


def plain_projections(source: TensorSource, recipes: Recipes) -> tuple[str, ...]:
    """The projections that a quantised checkpoint stores whole; ``recipes`` quantise all."""
    plain = list[str]()
    stored = {name.removesuffix(PACKED): info for name, info in source.infos.items()}
    for weight, recipe in recipes.items():
        if weight.endswith(".values"):
            names = [tensor.name for tensor in recipe.parts if tensor.name in stored]
            floats = [name for name in names if stored[name].dtype in FLOATS]
            if 0 < len(floats) < len(names):
                matrix = weight.removesuffix(".kernel.values")
                raise ValueError(
                    f"{source.path}: only some of the projections of {matrix!r} are quantised, "
                    "which is not supported"
                )
            plain += (name.removesuffix(".weight") for name in floats)
    return tuple(sorted(plain))


def read_kv_exponents(source: TensorSource, num_layers: int) -> tuple[tuple[int, int], ...]:
    """Binary exponents of the scales of stored keys and values, by layer; empty if all are 0.

    The largest scale of a layer's heads is rounded up to a power of two, which can be part of
    weights without changing a result, see ``Attention``. 8-bit floats have the same precision at
    any scale between their smallest and largest values.
    """
    powers: dict[tuple[int, str], int] = {}
    for name in source.infos:
        match = _KV_SCALE.fullmatch(name)
        if match is None or int(match[1]) >= num_layers:
            continue
        # queries are multiplied by those of keys, in float16 on a GPU
        scales = _read_scales(source, name, *_KV_SCALES)
        exponent = math.ceil(math.log2(scales.max()))
        for key in ((int(match[1]), letter) for letter in match[2] or match[3]):
            powers[key] = max(exponent, powers.get(key, exponent))
    if not any(powers.values()):
        return ()
    return tuple((powers.get((i, "k"), 0), powers.get((i, "v"), 0)) for i in range(num_layers))


def _read_scales(
    source: TensorSource, name: str, least: float, most: float, *, signed: bool = False
) -> np.ndarray:
    info = source.infos[name]
    scales = source.read(name).astype(np.float64) if info.dtype in FLOATS else np.zeros(0)
    sizes = np.abs(scales) if signed else scales
    inside = (sizes >= least) & (sizes <= most)
    if not inside.any() or not inside.all():
        example = f" with {scales[~inside][0]:g}" if scales.size else ""
        raise ValueError(
            f"tensor {name!r} in {info.path} is {info.dtype} {info.shape}{example}; scales must be "
            f"floats from 2 ** {math.log2(least):.0f} to 2 ** {math.log2(most):.0f}"
        )
    return scales.astype(np.float32)


def quantise(
    matrix: np.ndarray, dtype: np.dtype, group: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Values ``[out, in]`` of a dtype of 8 or 4 bits, and scales f32 ``[out, groups]``.

    The value of largest magnitude in a group maps to the dtype's extreme code; the other values are
    rounded to the nearest code. For int4 only -8 is extreme, so the sign of the scale makes that
    value negative: perplexity grows by 26 % instead of 52 % (SmolLM2-135M). A group of zeros has
    the scale 1. ``None`` is one group per output; scales of smaller groups are rounded to bfloat16.
    """
    (rows, columns), most = matrix.shape, largest(dtype)
    least = -8.0 if dtype == int4 else -most
    size = columns if group is None else group
    groups = -(-columns // size)
    values, scales = np.empty((rows, columns), dtype), np.empty((rows, groups), np.float32)
    step = max(1, _CACHED // columns)
    # an output head is often the last to finish, when the threads of other matrices are idle
    threads = min(4, usable_cores()) if matrix.size > _LARGE else 1

    def rounds(thread: int) -> None:
        for start in range(thread * step, rows, threads * step):
            chunk = slice(start, start + step)
            block = cast(matrix[chunk], np.dtype(np.float32))
            if columns < groups * size:
                block = np.pad(block, ((0, 0), (0, groups * size - columns)))
            by_scale = block.reshape(-1, size)
            high, low = by_scale.max(axis=1), by_scale.min(axis=1)
            scale = np.where(high > -low, high if dtype == int4 else -high, low) / least
            scale[scale == 0.0] = 1.0
            if group is not None:  # products in bfloat16 round them
                scale = scale.astype(bfloat16).astype(np.float32)
            rounded = by_scale / scale[:, None]
            if jnp.issubdtype(dtype, jnp.integer):
                np.rint(rounded, out=rounded)
            np.clip(rounded, least, most, out=rounded)
            rounded = rounded.reshape(block.shape)[:, :columns]
            if dtype == float8_e4m3fn:  # seen as bytes: numpy would hold the GIL to copy them
                values.view(np.uint8)[chunk] = to_e4m3(rounded).view(np.uint8)
            else:
                values[chunk] = rounded
            scales[chunk] = scale.reshape(-1, groups)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(rounds, range(threads)))
    return values, scales


with np.errstate(invalid="ignore"):  # NaN stays NaN
    _FLOATS = np.arange(2**16, dtype=np.uint16).view(bfloat16).astype(np.float32)
    _CODES = _FLOATS.clip(-448.0, 448.0).astype(float8_e4m3fn).view(np.uint8)


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """Round float32 values of at most 448 to e4m3, in less than half of the time of ml_dtypes."""
    bits = values.view(np.uint32)
    # The middle of two neighbours in e4m3 needs the first 15 bits only, so the 16th can tell
    # whether any of the others is set.
    marked = bits & np.uint32(0xFFFF)
    marked += np.uint32(0xFFFF)
    marked |= bits
    marked >>= np.uint32(16)
    return np.take(_CODES, marked, mode="clip").view(float8_e4m3fn)


def unpack(packed: np.ndarray, bits: int, count: int, axis: int) -> np.ndarray:
    """The first ``count`` signed integers along an axis of i32 words, lowest bits first."""
    words = np.moveaxis(packed, axis, -1).view(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    values = (words[..., None] >> shifts & np.uint32(2**bits - 1)).astype(np.int16)
    values = (values - 2 ** (bits - 1)).astype(np.int8).reshape(*words.shape[:-1], -1)
    return np.moveaxis(values[..., :count], -1, axis)


class _Matrix:
    """A quantised matrix of a source."""

    def __init__(
        self,
        source: TensorSource,
        name: str,
        shape: tuple[int, ...],
        format: Quantization,
        signed: bool,
    ) -> None:
        # a group of GPTQ may have a negative scale, for values whose largest is positive
        self._signed = signed or bool(format.packing)
        self._source, self._name, self._shape, self._format = source, name, shape, format
        self._infos = source.infos
        self._lock = Lock()
        # of a matrix that is quantised here: what another thread will read
        self._halves: dict[str, np.ndarray] = {}
        size = shape[1] if format.group is None else format.group
        self.groups = -(-shape[1] // size)
        info = source.infos.get(name)
        self._is_whole = info is not None and info.dtype in FLOATS
        self._is_packed = info is None and bool(jnp.issubdtype(format.dtype, jnp.integer))
        self._stored = name + PACKED * self._is_packed  # the tensor with the values
        self._scale_name = name + (SCALE if name + SCALE in source.infos else BLOCK_SCALE)

    def inputs(self) -> set[str]:
        """The names of the tensors in the file that it is read from."""
        if self._is_whole:
            return {self._name}
        suffixes = [ZERO_POINT] * self._format.has_zeros + ["_shape"] * self._is_packed
        return {self._stored, self._scale_name, *(self._name + suffix for suffix in suffixes)}

    def outputs(self) -> dict[str, TensorInfo]:
        """The tensors that replace those of the file; none if the matrix is missing."""
        stored = self._stored
        if stored not in self._infos:
            return {}
        if not self._is_whole:
            if self._scale_name not in self._infos:
                raise ValueError(
                    f"{self._infos[stored].path} has {stored!r} without {self._name + SCALE!r}"
                )
            self._check_tensors()
        path, dtype = self._infos[stored].path, self._format.dtype.name
        shape = self._shape
        if stored == self._name:
            shape = self._infos[stored].shape
            dtype = dtype if self._is_whole else self._infos[stored].dtype
        scales_shape = (self._shape[0], self.groups)
        outputs = {self._name: TensorInfo(shape, path, dtype)}
        outputs[self._name + SCALE] = TensorInfo(scales_shape, path, "float32")
        if self._format.has_zeros:
            outputs[self._name + OFFSET] = TensorInfo(scales_shape, path, "float32")
        return outputs

    def read(self, suffix: str) -> np.ndarray:
        if self._is_whole:
            return self._quantised(suffix)
        if suffix == SCALE:
            return self._scales()
        if suffix == OFFSET:
            return self._offsets()
        packed = self._source.read(self._stored)
        if not self._is_packed:
            return packed
        name = self._name + "_shape"
        if name in self._infos and tuple(stated := self._source.read(name)) != self._shape:
            raise ValueError(
                f"tensor {name!r} in {self._infos[name].path} is {stated.tolist()}; it must be "
                f"{list(self._shape)}"
            )
        values = unpack(packed, self._format.bits, self._shape[1], axis=1)
        return values.astype(self._format.dtype)

    def _quantised(self, suffix: str) -> np.ndarray:
        if suffix == OFFSET:
            return np.zeros((self._shape[0], self.groups), np.float32)
        with self._lock:
            if suffix not in self._halves:
                quantised = quantise(
                    self._source.read(self._name), self._format.dtype, self._format.group
                )
                self._halves = dict(zip(("", SCALE), quantised, strict=True))
            return self._halves.pop(suffix)

    def _check_tensors(self) -> None:
        """Check packed values, and scales and zero points, which may be stored in several ways."""
        (rows, columns), zeros, bits = self._shape, self._name + ZERO_POINT, self._format.bits
        scales = [(rows, self.groups), (), (1,), (1, 1)]
        if self._format.group is not None:
            scales.append((-(-rows // self._format.group), self.groups))
        # dtype -> shapes
        allowed: dict[str, Any] = {self._scale_name: dict.fromkeys(FLOATS, scales)}
        if self._format.has_zeros:
            packed = -(-rows * bits // 32), self.groups
            allowed[zeros] = {"int32": [packed], "int8": [(rows, self.groups)]}
        elif zeros in self._infos:
            path = self._infos[zeros].path
            raise ValueError(f"{path} has {zeros!r}, although quantization_config is symmetric")
        if self._is_packed:
            allowed[self._stored] = {"int32": [(rows, -(-columns * bits // 32))]}
            if self._name + "_shape" in self._infos:
                allowed[self._name + "_shape"] = {key: [(2,)] for key in ("int64", "int32")}
        for name, shapes in allowed.items():
            if (info := self._infos.get(name)) is None:
                raise ValueError(f"{self._source.path} has no tensor {name!r}")
            if info.shape not in shapes.get(info.dtype, ()):
                raise ValueError(
                    f"tensor {name!r} in {info.path} is {info.dtype} and has shape {info.shape}; a "
                    f"matrix {self._shape} of {self._format} needs {' or '.join(shapes)} of shape "
                    f"{next(iter(shapes.values()))[0]}"
                )

    def _scales(self) -> np.ndarray:
        scale = _read_scales(self._source, self._scale_name, *_SCALES, signed=self._signed)
        rows, group = self._shape[0], self._format.group
        if scale.size == 1:
            scale = scale.reshape(1, 1)
        elif group is not None and len(scale) < rows:
            scale = np.repeat(scale, group, axis=0)[:rows]
        return np.ascontiguousarray(np.broadcast_to(scale, (rows, self.groups)))

    def _offsets(self) -> np.ndarray:
        scale, name = self._scales(), self._name + ZERO_POINT
        zeros, limit = self._source.read(name), 2 ** (self._format.bits - 1)
        if zeros.dtype == np.int32:
            zeros = unpack(zeros, self._format.bits, len(scale), axis=0)
        if zeros.min() < -limit or zeros.max() >= limit:
            raise ValueError(
                f"tensor {name!r} in {self._infos[name].path} has zero points from {zeros.min()} "
                f"to {zeros.max()}; they must be from {-limit} to {limit - 1}"
            )
        return -zeros.astype(np.float32) * scale


def quantised_source(
    source: TensorSource, recipes: Recipes, format: Quantization | None, *, signed: bool = False
) -> TensorSource:
    """Offer quantised matrices under the names that recipes use; quantise those stored in floats.

    ``signed`` permits negative scales, as :func:`quantise` makes them.
    """
    if format is None:
        return source
    shapes = {tensor.name: tensor.shape for recipe in recipes.values() for tensor in recipe.parts}
    matrices = {
        name: _Matrix(source, name, shape, format, signed)
        for name, shape in shapes.items()
        if name + SCALE in shapes
    }
    by_name = {name: outputs for name, x in matrices.items() if (outputs := x.outputs())}
    owners: Mapping[str, tuple[str, str]] = {
        x: (name, x.removeprefix(name)) for name, outputs in by_name.items() for x in outputs
    }
    modules = {name.rpartition(".")[0].rpartition(".")[0] + "." for name in shapes}
    replaced = {name for matrix in by_name for name in matrices[matrix].inputs()}
    infos = {
        name: info
        for name, info in source.infos.items()
        if name not in replaced
        and not ((match := _OF_ATTENTION.fullmatch(name)) and match[1] in modules)
    }
    if hidden := sorted(infos.keys() & owners.keys()):
        raise ValueError(f"{infos[hidden[0]].path}: nothing reads the tensor {hidden[0]!r}")
    infos |= {x: info for outputs in by_name.values() for x, info in outputs.items()}

    def read(name: str) -> np.ndarray:
        if name not in owners:
            return source.read(name)
        owner, suffix = owners[name]
        return matrices[owner].read(suffix)

    return TensorSource(source.path, infos, read)
