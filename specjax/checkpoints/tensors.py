"""Tensors of checkpoints: what a source is, safetensors and PyTorch files."""

import os
import re
import threading
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import bfloat16
from safetensors import SafetensorError, safe_open

from specjax.json_file import Fields

SAFETENSORS_INDEX = "model.safetensors.index.json"
_PYTORCH_INDEX = "pytorch_model.bin.index.json"


class TensorInfo(NamedTuple):
    """Shape and numpy's dtype name of what ``read`` gives, and the file that holds it."""

    shape: tuple[int, ...]
    path: Path
    dtype: str


@dataclass(frozen=True)
class TensorSource:
    """Named tensors of a checkpoint, in Hugging Face names and layout (``[out, in]``).

    ``infos`` is what is known without reading, ``read`` gives a tensor in the dtype it says.
    """

    path: Path
    infos: Mapping[str, TensorInfo]
    read: Callable[[str], np.ndarray]


def _shards(directory: Path, index: str) -> list[Path]:
    """Files that an index names, in order, checked to exist."""
    weight_map = Fields.read(directory / index).fields("weight_map")
    if not weight_map.values:
        raise ValueError(f"{directory / index} has no weight_map")
    names = dict.fromkeys(weight_map.get(tensor, str) for tensor in weight_map.values)
    paths = [directory / name for name in names]
    if absent := [path.name for path in paths if not os.path.isfile(path)]:
        raise ValueError(f"{directory / index} names shards that are missing: {absent}")
    return paths


_KINDS = {"BOOL": "bool", "BF": "bfloat", "F": "float", "I": "int", "U": "uint", "C": "complex"}


def _safetensors(path: Path, files: list[Path]) -> TensorSource:
    handles: dict[str, Any] = {}
    infos: dict[str, TensorInfo] = {}
    # a handle is not documented as safe to share, and its reads copy while holding the GIL
    lock = threading.Lock()
    for file in files:
        try:
            handle = safe_open(file, framework="np")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is not a complete safetensors file: {error}") from error
        for name in handle.keys():
            if name in infos:
                raise ValueError(f"tensor {name!r} is in both {infos[name].path} and {file}")
            stored = handle.get_slice(name)
            kind = re.fullmatch(r"(BOOL|BF|F|I|U|C)(\d*)", str(stored.get_dtype()))
            dtype = _KINDS[kind[1]] + kind[2] if kind else str(stored.get_dtype())
            infos[name] = TensorInfo(tuple(stored.get_shape()), file, dtype)
            handles[name] = handle

    def read(name: str) -> np.ndarray:
        try:
            with lock:
                return handles[name].get_tensor(name)
        except (SafetensorError, TypeError, KeyError) as error:
            file = infos[name].path
            raise ValueError(f"tensor {name!r} of {file} cannot be read: {error}") from error

    return TensorSource(path, infos, read)


def _torch(path: Path, files: list[Path]) -> TensorSource:
    try:
        import torch
    except ImportError:
        raise ValueError(
            f"{files[0]} is a PyTorch checkpoint and torch is not installed. Install torch, or "
            "convert it to safetensors where torch is: "
            "safetensors.torch.save_file({k: v.contiguous() for k, v in "
            "torch.load('pytorch_model.bin', weights_only=True).items()}, 'model.safetensors')"
        ) from None
    tensors: dict[str, Any] = {}
    infos: dict[str, TensorInfo] = {}
    for file in files:
        state = _torch_state(torch, file)
        tensors |= state
        for name, tensor in state.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            infos[name] = TensorInfo(tuple(tensor.shape), file, dtype)

    def read(name: str) -> np.ndarray:
        tensor = tensors[name].detach().contiguous()
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(bfloat16)
        return tensor.numpy()

    return TensorSource(path, infos, read)


def _torch_state(torch: Any, file: Path) -> Mapping[str, Any]:
    try:
        # files of torch before 1.6 are not zip archives, which alone can be mapped
        is_zip = zipfile.is_zipfile(file)
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # torch.load documents no exception types
        raise ValueError(f"{file} cannot be read as a PyTorch state dict: {error}") from error
    if not isinstance(state, Mapping) or not all(map(torch.is_tensor, state.values())):
        raise ValueError(f"{file} holds a {type(state).__name__}, not a state dict of tensors")
    return state


def open_directory(directory: Path) -> TensorSource:
    """The tensors of a Hugging Face directory: safetensors if there are any, else PyTorch files."""
    for index, standard, pattern, source in (
        (SAFETENSORS_INDEX, "model.safetensors", "*.safetensors", _safetensors),
        (_PYTORCH_INDEX, "pytorch_model.bin", "pytorch_model*.bin", _torch),
    ):
        if (directory / index).is_file():
            return source(directory, _shards(directory, index))
        if (directory / standard).is_file():
            return source(directory, [directory / standard])
        if files := sorted(directory.glob(pattern)):
            return source(directory, files)
    raise ValueError(
        f"{directory} holds no weights: expected *.safetensors (with {SAFETENSORS_INDEX} if "
        "sharded) or pytorch_model.bin"
    )
