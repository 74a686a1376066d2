"""GGUF files: plain metadata, and tensors that the ``gguf`` library dequantises on demand."""

import math
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from ml_dtypes import bfloat16

from specjax.checkpoints.tensors import TensorInfo
from specjax.json_file import Fields, Size

_STRING, _ARRAY = 8, 9
_SCALARS = dict(enumerate(map(np.dtype, "u1 i1 <u2 <i2 <u4 <i4 <f4 ?".split())))
_SCALARS |= dict(enumerate(map(np.dtype, "<u8 <i8 <f8".split()), 10))
_PLAIN = {
    GGMLQuantizationType.BF16: np.dtype(bfloat16),
    **{GGMLQuantizationType[f"F{8 * n}"]: np.dtype(f"<f{n}") for n in (2, 4, 8)},
    **{GGMLQuantizationType[f"I{8 * n}"]: np.dtype(f"<i{n}") for n in (1, 2, 4, 8)},
}
_MAX_NESTING = 4


class GGUFTensor(NamedTuple):
    """Where a tensor lies in the data; ``shape`` is in numpy order, ``[out, in]`` for a matrix."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    size: int


class GGUFFile:
    """An open GGUF file. Open each file once: configuration, weights and tokenizer share it.

    Every length is compared with what is left of the file before anything is read, so that a
    damaged file costs no more memory than its own size.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.tensors: dict[str, GGUFTensor] = {}
        self._at = 0
        try:
            self._data: np.ndarray = np.memmap(self.path, np.uint8, "r")
            self._bytes = self._data.data
            values, num_tensors = self._read_metadata()
            self.metadata = Fields(values, self.path)
            self._read_tensor_table(num_tensors, self.metadata.get("general.alignment", Size, 32))
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{self.path} is not a complete GGUF file of version 2 or 3: {error}"
            ) from error

    def info(self, name: str) -> TensorInfo:
        """What is known of a tensor without reading it; quantised types become float32."""
        tensor = self.tensors[name]
        dtype = _PLAIN.get(tensor.kind, np.dtype(np.float32)).name
        return TensorInfo(tensor.shape, self.path, dtype)

    def read(self, name: str) -> np.ndarray:
        """A tensor as it is stored; quantised types are dequantised to float32."""
        shape, kind, start, size = self.tensors[name]
        data = np.asarray(self._data[start : start + size])
        if kind in _PLAIN:
            return data.view(_PLAIN[kind]).reshape(shape)
        try:
            return dequantize(data.reshape(*shape[:-1], -1), kind)
        except NotImplementedError as error:
            place = f"{self.path}: tensor {name!r} of type {kind.name}"
            raise ValueError(f"{place} is none that the gguf library can dequantise") from error

    def _read_metadata(self) -> tuple[dict[str, Any], int]:
        if self._take(4) != b"GGUF":
            raise ValueError("it does not start with GGUF")
        version = self._number("<I")
        if version and version & 0xFFFF == 0:
            raise ValueError("it is big-endian; only little-endian files are supported")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported")
        num_tensors, num_values = self._number("<Q"), self._number("<Q")
        values: dict[str, Any] = {}
        for _ in range(self._checked(num_values, 13)):
            key = self._text()
            if key in values:
                raise ValueError(f"the key {key!r} is given twice")
            values[key] = self._value(self._number("<I"), 0)
        return values, num_tensors

    def _read_tensor_table(self, count: int, alignment: int) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment={alignment} is no power of two")
        for _ in range(self._checked(count, 24)):
            name = self._text()
            if name in self.tensors:
                raise ValueError(f"the tensor {name!r} is given twice")
            dims = [self._number("<Q") for _ in range(self._checked(self._number("<I"), 8))]
            kind, start = GGMLQuantizationType(self._number("<I")), self._number("<Q")
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if not dims or min(dims) < 1 or dims[0] % block:
                raise ValueError(f"tensor {name!r} of type {kind.name} has dimensions {dims}")
            size = math.prod(dims) // block * block_bytes
            self.tensors[name] = GGUFTensor(tuple(reversed(dims)), kind, start, size)
        first = -(-self._at // alignment) * alignment
        self._data = self._data[first:]
        for name, tensor in self.tensors.items():
            if tensor.start + tensor.size > len(self._data):
                raise ValueError(f"tensor {name!r} reaches beyond the end of the file")

    def _value(self, kind: int, nesting: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind in _SCALARS:
            return self._array(kind, 1)[0]
        if kind != _ARRAY or nesting == _MAX_NESTING:
            raise ValueError(f"a value at byte {self._at} has type {kind} in {nesting} arrays")
        item, length = self._number("<I"), self._number("<Q")
        if item in _SCALARS:
            return self._array(item, length)
        # the length of a string, or type and length of an array, come before what they hold
        self._checked(length, 8 if item == _STRING else 12)
        return [self._value(item, nesting + 1) for _ in range(length)]

    def _array(self, kind: int, length: int) -> list[Any]:
        dtype = _SCALARS[kind]
        values = np.frombuffer(self._take(length * dtype.itemsize), dtype)
        if dtype != np.float32:
            return values.tolist()
        # the shortest decimal that is the same float32: 1e-05 rather than 9.999999747378752e-06
        return [float(str(value)) for value in values]

    def _text(self) -> str:
        return str(self._take(self._number("<Q")), "utf-8")

    def _number(self, layout: str) -> int:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _checked(self, count: int, size: int) -> int:
        """``count`` if so many things of at least ``size`` bytes fit into the rest of the file."""
        left = len(self._bytes) - self._at
        if count * size > left:
            raise ValueError(f"{count} times {size} bytes at byte {self._at} reach beyond its end")
        return count

    def _take(self, size: int) -> memoryview:
        start = self._at
        self._at = start + self._checked(size, 1)
        return self._bytes[start : self._at]
