"""Reading of GGUF files: metadata, and tensors as lazily dequantised arrays.

Block sizes and dequantisation are the ``gguf`` library's. The header is parsed here, because
``gguf.GGUFReader`` wraps each vocabulary entry in numpy arrays: 2.0 s for the 98,000 strings of
SmolLM2's tokenizer on two CPU cores, against 0.1 s for the loop below.

Source: the GGUF specification, versions 2 and 3 (little-endian).
"""

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from ml_dtypes import bfloat16

from specjax.checkpoints.tensors import TensorInfo

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
# struct formats of the scalar value types, by type number
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_PLAIN = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(bfloat16),
}


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies in the file. ``shape`` is in numpy order, ``[out, in]`` for a matrix."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    num_bytes: int


class _Cursor:
    """Sequential decoding of the header."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.offset)
        self.offset += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        start, self.offset = self.offset, self.offset + length
        if self.offset > len(self.data):
            raise struct.error("string beyond the end of the file")
        return self.data[start : self.offset].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            if inner in (_STRING, _ARRAY):
                return [self.value(inner) for _ in range(count)]
            code = f"<{count}{_SCALARS[inner]}"
            values = struct.unpack_from(code, self.data, self.offset)
            self.offset += struct.calcsize(code)
            return list(values)
        value = self.scalar(_SCALARS[kind])
        # the shortest decimal that is the same float32: 1e-05 rather than 9.999999747378752e-06
        return float(str(np.float32(value))) if kind == 6 else value


class GGUFFile:
    """An open GGUF file.

    Args:
        path: the file; it is memory-mapped and tensors are read on demand.

    Raises:
        ValueError: if the file is not a complete little-endian GGUF of version 2 or 3.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with self.path.open("rb") as handle:
            if handle.read(4) != _MAGIC:
                raise ValueError(f"{self.path} is not a GGUF file: it does not start with 'GGUF'")
            self._data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._data)
        cursor.offset = len(_MAGIC)
        try:
            version = cursor.scalar("I")
            if version not in (2, 3):
                raise ValueError(
                    f"{self.path}: GGUF version {version} is not supported; "
                    "supported: 2 and 3, little-endian"
                )
            num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
            self.metadata: dict[str, Any] = {}
            for _ in range(num_values):
                key = cursor.string()
                self.metadata[key] = cursor.value(cursor.scalar("I"))
            self.tensors = self._read_tensor_table(cursor, num_tensors)
        except (struct.error, KeyError, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise ValueError(f"{self.path}: broken or truncated GGUF header: {error}") from error

    def _read_tensor_table(self, cursor: _Cursor, count: int) -> dict[str, GGUFTensor]:
        entries = []
        for _ in range(count):
            name = cursor.string()
            dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
            entries.append((name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        base = -(-cursor.offset // alignment) * alignment
        tensors = {}
        for name, shape, number, offset in entries:
            try:
                kind = GGMLQuantizationType(number)
            except ValueError:
                raise ValueError(
                    f"{self.path}: tensor {name!r} has unknown GGML type {number}; "
                    "a newer gguf library may know it"
                ) from None
            block, block_bytes = GGML_QUANT_SIZES[kind]
            num_bytes = math.prod(shape) // block * block_bytes
            if base + offset + num_bytes > len(self._data):
                raise ValueError(
                    f"{self.path}: tensor {name!r} ends at byte {base + offset + num_bytes}, "
                    f"but the file has {len(self._data)}: it is truncated"
                )
            tensors[name] = GGUFTensor(shape, kind, base + offset, num_bytes)
        return tensors

    @property
    def is_quantized(self) -> bool:
        """Whether any tensor is stored in a block-quantised type."""
        return any(tensor.kind not in _PLAIN for tensor in self.tensors.values())

    def info(self, name: str) -> TensorInfo:
        """What is known of a tensor without reading it."""
        tensor = self.tensors[name]
        return TensorInfo(tensor.shape, self.path, tensor.kind.name)

    def read(self, name: str) -> np.ndarray:
        """A tensor as float32, float16 or bfloat16; quantised types are dequantised to float32."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.start)
        if tensor.kind in _PLAIN:
            return raw.view(_PLAIN[tensor.kind]).reshape(tensor.shape)
        try:
            return dequantize(raw.reshape(*tensor.shape[:-1], -1), tensor.kind)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: tensor {name!r} has type {tensor.kind.name}, "
                "which the gguf library cannot dequantise"
            ) from error
