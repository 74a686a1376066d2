"""Read GGUF files: metadata and tensors under the names of the file."""

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
from specjax.checks import check_regular
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
_MAX_ENTRIES = 2**16  # keys or tensors of a file


class GGUFTensor(NamedTuple):
    """A stored tensor. ``shape`` has numpy's order: ``[out, in]`` for a matrix."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    path: Path
    data: np.ndarray  # u1 [bytes], mapped


class GGUFFile:
    """An open GGUF file. Open each file once: configuration, weights and tokenizer share it.

    Every length is checked against the rest of the file before reading, so that a damaged file
    never takes more memory than its own size. The tensors must fill the data section in the order
    of their table, aligned and without gaps. The first file of a split model, whose name ends in
    ``-00001-of-0000N.gguf``, opens the others, and has their tensors too.
    """

    def __init__(self, path: str | os.PathLike[str], number: int = 0) -> None:
        """Open the file with this ``number`` of a split model."""
        self.path = Path(path)
        self.tensors: dict[str, GGUFTensor] = {}
        self.packed = set[str]()  # those whose stored bytes u8 [..., blocks, bytes] are read
        self._at = 0
        try:
            check_regular(self.path)
            self._data: np.ndarray = np.memmap(self.path, np.uint8, "r")
            self._bytes = self._data.data
            values, num_tensors = self._read_metadata()
            self.metadata = Fields(values, self.path)
            self._read_tensor_table(num_tensors, self.metadata.get("general.alignment", Size, 32))
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{self.path} is not a complete GGUF file of version 2 or 3: {error}"
            ) from error
        self._read_split(number)

    def info(self, name: str) -> TensorInfo:
        """Describe a tensor without reading it; quantised types become float32."""
        tensor = self.tensors[name]
        if name in self.packed:
            return TensorInfo(self.read(name).shape, tensor.path, "uint8")
        dtype = _PLAIN.get(tensor.kind, np.dtype(np.float32)).name
        return TensorInfo(tensor.shape, tensor.path, dtype)

    def read(self, name: str) -> np.ndarray:
        """Read a tensor in its stored type; quantised types are dequantised to float32."""
        shape, kind, path, data = self.tensors[name]
        if name in self.packed:
            size, num_bytes = GGML_QUANT_SIZES[kind]
            return data.reshape(*shape[:-1], shape[-1] // size, num_bytes)
        if kind in _PLAIN:
            return data.view(_PLAIN[kind]).reshape(shape)
        try:
            return dequantize(data.reshape(*shape[:-1], -1), kind)
        except NotImplementedError as error:
            raise ValueError(
                f"{path}: tensor {name!r} has the type {kind.name}, which the gguf library "
                "does not support; use another GGUF file or a newer gguf"
            ) from error

    @property
    def quantised_types(self) -> list[str]:
        """Names of the types that :meth:`read` dequantises."""
        read = {x.kind for name, x in self.tensors.items() if name not in self.packed}
        return sorted(kind.name for kind in read if kind not in _PLAIN)

    def _read_metadata(self) -> tuple[dict[str, Any], int]:
        if self._take(4) != b"GGUF":
            raise ValueError("the file does not start with GGUF")
        version = self._number("<I")
        if version and version & 0xFFFF == 0:
            raise ValueError("the file is big-endian; only little-endian files are supported")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported")
        num_tensors, num_values = self._number("<Q"), self._number("<Q")
        values: dict[str, Any] = {}
        for _ in self._entries(num_values, 13):
            key = self._text()
            if key in values:
                raise ValueError(f"the key {key!r} occurs twice")
            values[key] = self._value(self._number("<I"), 0)
        return values, num_tensors

    def _read_tensor_table(self, count: int, alignment: int) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment={alignment} must be a power of two")
        places, end = {}, 0
        for _ in self._entries(count, 24):
            name = self._text()
            if name in places:
                raise ValueError(f"the tensor {name!r} occurs twice")
            dims = [self._number("<Q") for _ in range(self._checked(self._number("<I"), 8))]
            kind, start = GGMLQuantizationType(self._number("<I")), self._number("<Q")
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if not dims or min(dims) < 1 or dims[0] % block:
                demand = f"a multiple of {block}, the block size of {kind.name}"
                raise ValueError(f"tensor {name!r}: {dims=} must be positive, the first {demand}")
            if start != (expected := _aligned(end, alignment)):
                raise ValueError(f"tensor {name!r} has the offset {start}; it must be {expected}")
            end = start + math.prod(dims) // block * block_bytes
            places[name] = tuple(reversed(dims)), kind, slice(start, end)
        data = self._data[_aligned(self._at, alignment) :]
        if not end <= len(data) <= _aligned(end, alignment):
            raise ValueError(f"tensors have {end} bytes, but the data section has {len(data)}")
        for name, (shape, kind, place) in places.items():
            self.tensors[name] = GGUFTensor(shape, kind, self.path, np.asarray(data[place]))

    def _read_split(self, number: int) -> None:
        """Check the keys of a split model; its first file adds the tensors of the others."""
        data, ending = self.metadata, "-{:05d}-of-{:05d}.gguf"
        count = data.get("split.count", Size, 1)
        if data.get("split.no", Size, 0) != number:
            raise data.wrong("split.no", f"must be {number}; open the first file of a split model")
        if number:
            return
        if count > 1 and not self.path.name.endswith(suffix := ending.format(1, count)):
            raise data.wrong("split.count", f"needs files in one folder named *{suffix} and so on")
        stem = self.path.name.removesuffix(ending.format(1, count))
        for i in range(1, count):
            other = GGUFFile(self.path.with_name(stem + ending.format(i + 1, count)), i)
            if other.metadata.get("split.count", Size, 1) != count:
                raise other.metadata.wrong("split.count", f"must be {count}, as in the first file")
            if repeated := self.tensors.keys() & other.tensors.keys():
                raise ValueError(f"{other.path}: {min(repeated)!r} is in another file too")
            self.tensors |= other.tensors
        if data.get("split.tensors.count", Size, len(self.tensors)) != len(self.tensors):
            raise data.wrong("split.tensors.count", f"must be {len(self.tensors)}")

    def _value(self, kind: int, nesting: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind in _SCALARS:
            return self._array(kind, 1)[0]
        if kind != _ARRAY or nesting == _MAX_NESTING:
            raise ValueError(f"type {kind} at byte {self._at}, {nesting} arrays deep, is not valid")
        item, length = self._number("<I"), self._number("<Q")
        if item in _SCALARS:
            return self._array(item, length)
        # minimum bytes of an item: a string begins with its length, an array with type and length
        self._checked(length, 8 if item == _STRING else 12)
        return [self._value(item, nesting + 1) for _ in range(length)]

    def _array(self, kind: int, length: int) -> list[Any]:
        dtype = _SCALARS[kind]
        values = np.frombuffer(self._take(length * dtype.itemsize), dtype)
        if dtype != np.float32:
            return values.tolist()
        # shortest decimal of the same float32: 1e-05 instead of 9.999999747378752e-06
        return [float(str(value)) for value in values]

    def _text(self) -> str:
        return str(self._take(self._number("<Q")), "utf-8")

    def _number(self, layout: str) -> int:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _checked(self, count: int, size: int) -> int:
        """Return ``count`` if the file has ``size`` bytes left for each item."""
        remaining = len(self._bytes) - self._at
        if count * size > remaining:
            raise ValueError(f"{count} * {size} bytes at byte {self._at} exceed the file's size")
        return count

    def _entries(self, count: int, size: int) -> range:
        if count > _MAX_ENTRIES:
            raise ValueError(f"{count} keys or tensors exceed the limit of {_MAX_ENTRIES}")
        return range(self._checked(count, size))

    def _take(self, size: int) -> memoryview:
        start = self._at
        self._at = start + self._checked(size, 1)
        return self._bytes[start : self._at]


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
