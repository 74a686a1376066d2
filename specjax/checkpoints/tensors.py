"""Where checkpoint tensors come from: the interface of a source, safetensors and PyTorch files."""

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from ml_dtypes import bfloat16
from safetensors import SafetensorError, safe_open

from specjax.json_file import read_json

SAFETENSORS_INDEX = "model.safetensors.index.json"
PYTORCH_INDEX = "pytorch_model.bin.index.json"


class TensorInfo(NamedTuple):
    """Shape and dtype name of a stored tensor, and the file that holds it."""

    shape: tuple[int, ...]
    path: Path
    dtype: str


class TensorSource(Protocol):
    """Named tensors of a checkpoint, in Hugging Face names and layout (``[out, in]``)."""

    path: Path

    def names(self) -> set[str]:
        """Names of all tensors."""

    def info(self, name: str) -> TensorInfo:
        """What is known of a tensor without reading it."""

    def read(self, name: str) -> np.ndarray:
        """The tensor, in its stored dtype (quantised types as float32)."""


def _shards(directory: Path, index: str) -> list[Path]:
    """Files that an index names, in order, checked to exist."""
    weight_map = read_json(directory / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{directory / index} has no weight_map")
    paths = [directory / name for name in dict.fromkeys(weight_map.values())]
    if absent := [path.name for path in paths if not path.is_file()]:
        raise ValueError(f"{directory / index} names shards that are missing: {absent}")
    return paths


class SafetensorsSource:
    """Tensors of one or several safetensors files.

    Raises:
        ValueError: if a file is broken or two files hold the same tensor.
    """

    def __init__(self, path: Path, files: list[Path]) -> None:
        self.path = path
        self._handles: dict[str, tuple[Path, Any]] = {}
        # a handle is not documented as safe to share, and its reads copy while holding the GIL
        self._lock = threading.Lock()
        for file in files:
            try:
                handle = safe_open(file, framework="np")
            except SafetensorError as error:
                raise ValueError(f"{file} is not a complete safetensors file: {error}") from error
            for name in handle.keys():
                if name in self._handles:
                    other = self._handles[name][0]
                    raise ValueError(f"tensor {name!r} is in both {other} and {file}")
                self._handles[name] = (file, handle)

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._handles)

    def info(self, name: str) -> TensorInfo:
        """What is known of a tensor without reading it."""
        file, handle = self._handles[name]
        stored = handle.get_slice(name)
        return TensorInfo(tuple(stored.get_shape()), file, stored.get_dtype())

    def read(self, name: str) -> np.ndarray:
        """The tensor, in its stored dtype."""
        file, handle = self._handles[name]
        try:
            with self._lock:
                return handle.get_tensor(name)
        except (SafetensorError, TypeError, KeyError) as error:
            raise ValueError(f"tensor {name!r} of {file} cannot be read: {error}") from error


class TorchSource:
    """Tensors of ``pytorch_model.bin`` files, read with ``torch.load(weights_only=True)``.

    Raises:
        ValueError: if PyTorch is not installed or a file is not a plain state dict.
    """

    def __init__(self, path: Path, files: list[Path]) -> None:
        try:
            import torch
        except ImportError:
            raise ValueError(
                f"{files[0]} is a PyTorch checkpoint and torch is not installed. Install torch, or "
                "convert it to safetensors where torch is: "
                "safetensors.torch.save_file({k: v.contiguous() for k, v in "
                "torch.load('pytorch_model.bin', weights_only=True).items()}, 'model.safetensors')"
            ) from None
        self._torch = torch
        self.path = path
        self._tensors: dict[str, tuple[Path, Any]] = {}
        for file in files:
            for name, tensor in self._load(file).items():
                if not isinstance(tensor, torch.Tensor):
                    kind = type(tensor).__name__
                    raise ValueError(f"{file}: entry {name!r} is a {kind}, not a tensor")
                self._tensors[name] = (file, tensor)

    def _load(self, file: Path) -> Mapping[str, Any]:
        try:
            try:
                state = self._torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # files of torch before 1.6 are not zip archives: no mmap
                state = self._torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load documents no exception types
            raise ValueError(f"{file} cannot be read as a PyTorch state dict: {error}") from error
        if not isinstance(state, Mapping):
            raise ValueError(f"{file} holds a {type(state).__name__}, not a state dict")
        return state

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """What is known of a tensor without reading it."""
        file, tensor = self._tensors[name]
        return TensorInfo(tuple(tensor.shape), file, str(tensor.dtype).removeprefix("torch."))

    def read(self, name: str) -> np.ndarray:
        """The tensor, in its stored dtype."""
        tensor = self._tensors[name][1].detach().contiguous()
        if tensor.dtype == self._torch.bfloat16:
            return tensor.view(self._torch.int16).numpy().view(bfloat16)
        return tensor.numpy()


def open_directory(path: str | os.PathLike[str]) -> SafetensorsSource | TorchSource:
    """The tensors of a Hugging Face directory: safetensors if there are any, else PyTorch files.

    Raises:
        ValueError: if the directory holds neither, or a shard that its index names is missing.
    """
    directory = Path(path)
    if (directory / SAFETENSORS_INDEX).is_file():
        return SafetensorsSource(directory, _shards(directory, SAFETENSORS_INDEX))
    if files := _weight_files(directory, "model.safetensors", "*.safetensors"):
        return SafetensorsSource(directory, files)
    if (directory / PYTORCH_INDEX).is_file():
        return TorchSource(directory, _shards(directory, PYTORCH_INDEX))
    if files := _weight_files(directory, "pytorch_model.bin", "pytorch_model*.bin"):
        return TorchSource(directory, files)
    raise ValueError(
        f"{directory} holds no weights: expected *.safetensors (with {SAFETENSORS_INDEX} if "
        "sharded) or pytorch_model.bin"
    )


def _weight_files(directory: Path, standard: str, pattern: str) -> list[Path]:
    """Weight files without an index: the standard name alone if it exists, else all matches."""
    path = directory / standard
    return [path] if path.is_file() else sorted(directory.glob(pattern))
