"""GGUF files read by the ``gguf`` library: plain metadata, and tensors dequantised on demand."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFValueType, ReaderField
from gguf.quants import dequantize
from ml_dtypes import bfloat16

from specjax.checkpoints.tensors import TensorInfo

_PLAIN = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(bfloat16),
}


class GGUFFile:
    """An open GGUF file. Open each file once: configuration, weights and tokenizer share it.

    The library wraps every vocabulary entry in numpy arrays, so opening SmolLM2's file takes 1.8 s
    on two CPU cores and 150 MiB. Only plain values and the tensors are kept.

    Args:
        path: the file; it is memory-mapped and tensors are read on demand.

    Attributes:
        metadata: values by key: numbers, strings, and lists of either.
        tensors: the library's tensors by name.

    Raises:
        ValueError: if the file is not a complete little-endian GGUF of version 2 or 3.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            reader = GGUFReader(self.path)
            self.metadata = {
                key: _value(field)
                for key, field in reader.fields.items()
                if not key.startswith("GGUF.")  # counts and version, which are not metadata
            }
        # beyond the end of the file the library finds empty arrays, or arrays that are too short
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
            raise ValueError(
                f"{self.path} is not a complete GGUF file of version 2 or 3: {error}"
            ) from error
        if reader.endianess != GGUFEndian.LITTLE:
            raise ValueError(f"{self.path} is big-endian; only little-endian files are supported")
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in numpy order, ``[out, in]`` for a matrix."""
        return tuple(reversed(self.tensors[name].shape.tolist()))

    def info(self, name: str) -> TensorInfo:
        """What is known of a tensor without reading it."""
        return TensorInfo(self.shape(name), self.path, self.tensors[name].tensor_type.name)

    def read(self, name: str) -> np.ndarray:
        """A tensor as float32, float16 or bfloat16; quantised types are dequantised to float32."""
        tensor = self.tensors[name]
        data, kind = np.asarray(tensor.data), tensor.tensor_type
        if kind in _PLAIN:
            return data.view(_PLAIN[kind])
        try:
            return dequantize(data, kind)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: tensor {name!r} has type {kind.name}, "
                "which the gguf library cannot dequantise"
            ) from error


def _value(field: ReaderField) -> Any:
    value = field.contents()
    if field.types[0] != GGUFValueType.FLOAT32:
        return value
    # the shortest decimal that is the same float32: 1e-05 rather than 9.999999747378752e-06
    return float(str(np.float32(value)))
