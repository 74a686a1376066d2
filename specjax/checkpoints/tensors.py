"""Read tensors from checkpoints (safetensors, PyTorch) and make weights from them."""

import json
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from ml_dtypes import bfloat16
from safetensors import SafetensorError, safe_open

from specjax.checks import check_regular
from specjax.json_file import Fields
from specjax.models.declare import Recipe

MAX_HEADER = 2**23  # bytes of a safetensors header; 60,000 tensors with long names
SAFETENSORS_INDEX = "model.safetensors.index.json"
_PYTORCH_INDEX = "pytorch_model.bin.index.json"


class TensorInfo(NamedTuple):
    """The file of a tensor, and the shape and numpy dtype name of the array that is read."""

    shape: tuple[int, ...]
    path: Path
    dtype: str


@dataclass(frozen=True)
class TensorSource:
    """Named tensors of a checkpoint, with Hugging Face names and layout (``[out, in]``).

    ``infos`` is available without reading tensors. ``read`` returns a tensor in its info's dtype.
    """

    path: Path
    infos: Mapping[str, TensorInfo]
    read: Callable[[str], np.ndarray]


def in_memory(tensors: Mapping[str, np.ndarray], path: Path) -> TensorSource:
    """The source of these arrays; ``path`` says in messages where they are from."""
    infos = {name: TensorInfo(x.shape, path, str(x.dtype)) for name, x in tensors.items()}
    return TensorSource(path, infos, tensors.__getitem__)


def _shards(directory: Path, index: str) -> list[Path]:
    """List the files that an index names, in order; all must exist."""
    weight_map = Fields.read(directory / index).fields("weight_map")
    if not weight_map.values:
        raise ValueError(f"{directory / index} has no weight_map")
    names = dict.fromkeys(weight_map.get(tensor, str) for tensor in weight_map.values)
    if outside := [name for name in names if os.path.basename(name) != name]:
        raise ValueError(f"{directory / index} names {outside[0]!r}, a file in another folder")
    if absent := list(islice((x for x in names if not os.path.isfile(directory / x)), 5)):
        raise ValueError(f"{directory / index} names missing shards: {absent}")
    return [directory / name for name in names]


_DTYPES = {"BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "BF16": "bfloat16", "C64": "complex64"}
_DTYPES |= {f"F{bits}": f"float{bits}" for bits in (16, 32, 64)}
_DTYPES |= {
    f"{x}{bits}": f"{y}{bits}" for x, y in [("I", "int"), ("U", "uint")] for bits in (8, 16, 32, 64)
}


def _safetensors(path: Path, files: list[Path]) -> TensorSource:
    infos: dict[str, TensorInfo] = {}
    starts: dict[str, int] = {}  # offsets of tensors in their files
    versions: dict[Path, tuple[int, ...]] = {}
    for file in files:
        try:
            check_regular(file)
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                if size > MAX_HEADER:
                    raise ValueError(f"the header has {size} bytes; the limit is {MAX_HEADER}")
                with safe_open(file, framework="np"):  # checks the header, and the file's size
                    pass
                header = json.loads(opened.read(size))
                versions[file] = _version(opened)
            header.pop("__metadata__", None)
            file_infos = {
                name: TensorInfo(tuple(x["shape"]), file, _DTYPES.get(x["dtype"], x["dtype"]))
                for name, x in header.items()
            }
            offsets = {name: stored["data_offsets"][0] for name, stored in header.items()}
        except (SafetensorError, OSError, ValueError, TypeError, LookupError) as error:
            raise ValueError(f"{file} is not a complete safetensors file: {error}") from error
        for name in file_infos:
            if name in infos:
                raise ValueError(f"tensor {name!r} is in both {infos[name].path} and {file}")
        infos |= file_infos
        starts |= {name: 8 + size + offset for name, offset in offsets.items()}

    def read(name: str) -> np.ndarray:
        # safetensors itself reads with the GIL held, so other threads could not convert meanwhile
        shape, file, kind = infos[name]
        try:
            array = np.empty(shape, np.dtype(kind))
            with file.open("rb") as opened:
                opened.seek(starts[name])
                count = opened.readinto(array.reshape(-1).view(np.uint8).data)
                if count != array.nbytes or _version(opened) != versions[file]:
                    raise ValueError("the file was changed after its header was read")
            return array
        except (TypeError, ValueError, OSError) as error:
            raise ValueError(f"tensor {name!r} of {file} cannot be read: {error}") from error

    return TensorSource(path, infos, read)


def copy_header(source: BinaryIO, path: Path) -> None:
    """Write a sparse safetensors file with the header of another, and the tensors that checks read.

    These are vocabulary maps, the scales of keys and values, and the first order of inputs.
    """
    size = source.seek(0, os.SEEK_END)
    source.seek(0)
    start = source.read(8)
    if (length := int.from_bytes(start, "little")) > MAX_HEADER:
        raise ValueError(f"the header of {path.name} has {length} bytes; the limit is {MAX_HEADER}")
    header = source.read(length)
    with path.open("wb") as file:
        file.write(start + header)
        tensors = json.loads(header)
        order = min((name for name in tensors if name.endswith("g_idx")), default=None)
        for name, stored in tensors.items():
            if name.endswith(("d2t", "t2d", "k_scale", "v_scale")) or name == order:
                begin, end = (8 + length + offset for offset in stored["data_offsets"])
                source.seek(begin)
                file.seek(begin)
                file.write(source.read(end - begin))
        file.truncate(size)


def _version(opened: BinaryIO) -> tuple[int, ...]:
    """Values that differ if a file is replaced or written."""
    status = os.fstat(opened.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _torch(path: Path, files: list[Path]) -> TensorSource:
    try:
        import torch
    except ImportError:
        raise ValueError(
            f"{files[0]} is a PyTorch checkpoint, but torch is not installed. Install torch, or "
            "convert the file to safetensors on a machine with torch: "
            "safetensors.torch.save_file({k: v.contiguous() for k, v in "
            "torch.load('pytorch_model.bin', weights_only=True).items()}, 'model.safetensors')"
        ) from None
    tensors: dict[str, Any] = {}
    infos: dict[str, TensorInfo] = {}
    for file in files:
        check_regular(file)
        for name, tensor in _torch_state(torch, file).items():
            if name in tensors:
                raise ValueError(f"tensor {name!r} is in both {infos[name].path} and {file}")
            tensors[name] = tensor
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
        # only zip archives can be mapped; torch before 1.6 wrote other files
        is_zip = zipfile.is_zipfile(file)
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # torch.load documents no exception types
        raise ValueError(f"{file} cannot be read as a PyTorch state dict: {error}") from error
    if not isinstance(state, Mapping) or not all(map(torch.is_tensor, state.values())):
        raise ValueError(f"{file} contains a {type(state).__name__}, not a state dict of tensors")
    return state


def open_directory(directory: Path) -> TensorSource:
    """Open the tensors of a Hugging Face directory: safetensors if present, else PyTorch files."""
    for index, standard, pattern, source in (
        (SAFETENSORS_INDEX, "model.safetensors", "*.safetensors", _safetensors),
        (_PYTORCH_INDEX, "pytorch_model.bin", "pytorch_model*.bin", _torch),
    ):
        if os.path.lexists(directory / index):
            return source(directory, _shards(directory, index))
        if os.path.lexists(directory / standard):
            return source(directory, [directory / standard])
        if files := sorted(directory.glob(pattern)):
            return source(directory, files)
    raise ValueError(
        f"{directory} contains no weights: expected *.safetensors (with {SAFETENSORS_INDEX} if "
        "sharded) or pytorch_model.bin"
    )


# Time to transpose 4096 x 4096 float32 on one core: 0.027 s in blocks of 128, 0.13 s in one step.
_BLOCK = 128
FLOATS = ("float16", "bfloat16", "float32", "float64")


def cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert ``array`` to ``dtype``; bfloat16 to float32 is an exact bit shift."""
    if array.dtype == dtype:
        return array
    if array.dtype.kind in "iubc" and np.dtype(dtype).kind not in "iu":
        raise ValueError(f"tensor {array.shape} of {array.dtype} cannot be converted to {dtype}")
    if array.dtype == bfloat16 and dtype == np.float32:
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(dtype)


def _bits(array: np.ndarray) -> np.ndarray:
    """View an array as unsigned integers; numpy copies strided extension dtypes slowly."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _transpose_into(out: np.ndarray, tensor: np.ndarray) -> None:
    """Compute ``out [in, n] = tensor [n, in].T`` in cache-sized blocks."""
    rows, columns = tensor.shape
    out, tensor = _bits(out), _bits(tensor)
    for i in range(0, rows, _BLOCK):
        for j in range(0, columns, _BLOCK):
            out[j : j + _BLOCK, i : i + _BLOCK] = tensor[i : i + _BLOCK, j : j + _BLOCK].T


def make_weight(recipe: Recipe, source: TensorSource, dtype: np.dtype) -> np.ndarray:
    if not recipe.transpose:
        arrays = [tensor.arranged(cast(source.read(tensor.name), dtype)) for tensor in recipe.parts]
        array = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        if recipe.layout is not None:
            return np.ascontiguousarray(recipe.layout.cut(array))
        # return an owned, writable array: a view would keep the memory map of its file alive
        return array if array.flags.owndata and array.flags.c_contiguous else array.copy()
    out = np.empty(recipe.shape, dtype)
    start = 0
    for stored in recipe.parts:
        stop = start + stored.shape[0]
        tensor = np.ascontiguousarray(stored.arranged(cast(source.read(stored.name), dtype)))
        _transpose_into(out[:, start:stop], tensor)
        start = stop
    return out
