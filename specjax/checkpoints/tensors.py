"""Read tensors from checkpoints (safetensors, PyTorch) and make weights from them."""

import os
import re
import threading
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import jax.numpy as jnp
import numpy as np
from ml_dtypes import bfloat16
from safetensors import SafetensorError, safe_open

from specjax.config import BlockConfig, DraftConfig, ModelConfig
from specjax.json_file import Fields
from specjax.models.family import Recipe, Recipes

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


def _shards(directory: Path, index: str) -> list[Path]:
    """List the files that an index names, in order; all must exist."""
    weight_map = Fields.read(directory / index).fields("weight_map")
    if not weight_map.values:
        raise ValueError(f"{directory / index} has no weight_map")
    names = dict.fromkeys(weight_map.get(tensor, str) for tensor in weight_map.values)
    paths = [directory / name for name in names]
    if absent := [path.name for path in paths if not os.path.isfile(path)]:
        raise ValueError(f"{directory / index} names missing shards: {absent}")
    return paths


_KINDS = {"BOOL": "bool", "BF": "bfloat", "F": "float", "I": "int", "U": "uint", "C": "complex"}


def _safetensors(path: Path, files: list[Path]) -> TensorSource:
    handles: dict[str, Any] = {}
    infos: dict[str, TensorInfo] = {}
    # handles are not documented as thread-safe, and their reads copy while holding the GIL
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
            f"{files[0]} is a PyTorch checkpoint, but torch is not installed. Install torch, or "
            "convert the file to safetensors on a machine with torch: "
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
        if (directory / index).is_file():
            return source(directory, _shards(directory, index))
        if (directory / standard).is_file():
            return source(directory, [directory / standard])
        if files := sorted(directory.glob(pattern)):
            return source(directory, files)
    raise ValueError(
        f"{directory} contains no weights: expected *.safetensors (with {SAFETENSORS_INDEX} if "
        "sharded) or pytorch_model.bin"
    )


# Time to transpose 4096 x 4096 float32 on one core: 0.027 s in blocks of 128, 0.13 s in one step.
_BLOCK = 128
_FLOATS = ("float16", "bfloat16", "float32", "float64")

SCALE = "_scale"  # a quantised matrix X has its scales in X_scale


def quantise(matrix: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Values ``[out, in]`` of an 8-bit dtype and scales f32 ``[out, 1]`` of a matrix.

    The largest value of each output has the largest magnitude of the dtype, and values are rounded
    to the nearest. An output of zeros has the scale 1.
    """
    is_float = jnp.issubdtype(dtype, jnp.floating)
    most = float(jnp.finfo(dtype).max if is_float else jnp.iinfo(dtype).max)
    matrix = matrix.astype(np.float32)
    scale = np.abs(matrix).max(axis=1, keepdims=True) / most
    scale[scale == 0.0] = 1.0
    values = np.clip(matrix / scale, -most, most)
    return (values if is_float else np.rint(values)).astype(dtype), scale


def quantised_source(source: TensorSource, recipes: Recipes) -> TensorSource:
    """Quantise the matrices whose scales the recipes need but the source lacks, when read.

    They then have the names and shapes of compressed-tensors files with one scale per output.
    """
    parts = {part.name: recipe.dtype for recipe in recipes.values() for part in recipe.parts}
    bases = (name.removesuffix(SCALE) for name in parts if name.endswith(f"weight{SCALE}"))
    dtypes = {
        name: np.dtype(parts[name] or "")
        for name in bases
        if (info := source.infos.get(name)) is not None
        and (len(info.shape), info.dtype in _FLOATS) == (2, True)
        and name + SCALE not in source.infos
    }
    infos = dict(source.infos)
    for name, dtype in dtypes.items():
        shape, path, _ = infos[name]
        infos[name] = TensorInfo(shape, path, dtype.name)
        infos[name + SCALE] = TensorInfo((shape[0], 1), path, "float32")

    def read(name: str) -> np.ndarray:
        base = name.removesuffix(SCALE)
        if base not in dtypes:
            return source.read(name)
        return quantise(source.read(base), dtypes[base])[name != base]

    return TensorSource(source.path, infos, read) if dtypes else source


C = TypeVar("C", ModelConfig, DraftConfig, BlockConfig)


@dataclass(frozen=True)
class Checkpoint(Generic[C]):
    """A model on disk. Only its configuration was read; weights are loaded in ``config.dtype``."""

    config: C
    path: Path
    _open_source: Callable[[], TensorSource]
    _recipes: ClassVar[Callable[[Any], Recipes]]

    def quantised(self, kind: str | None) -> Self:
        """The same model with its matrices quantised as ``kind``; ``None``: as they are."""
        return replace(self, config=replace(self.config, quantization=kind))

    def _source(self) -> TensorSource:
        return quantised_source(self._open_source(), self.recipes())

    def describe(self) -> str:
        """Summarize the resolved settings in one line."""
        raise NotImplementedError

    def check_weights(self) -> None:
        """Raise ValueError if names, shapes or dtypes on disk do not fit the configuration."""
        self._checked_recipes(self._source())

    def load_weights(self) -> dict[str, np.ndarray]:
        """Load all weights by the model's names, in ``config.dtype`` (``d2t`` in int32).

        Raises ValueError if a tensor cannot be read, or as :meth:`check_weights` does.
        """
        source = self._source()
        recipes, dtype = self._checked_recipes(source), self.config.dtypes.activations

        def make(recipe: Recipe) -> np.ndarray:
            return make_weight(recipe, source, np.dtype(recipe.dtype or dtype))

        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            return dict(zip(recipes, pool.map(make, recipes.values()), strict=True))

    def recipes(self) -> Recipes:
        """Return the recipe of each weight by name; in recipes, tensors have canonical names."""
        return type(self)._recipes(self.config)

    def canonical_name(self, name: str) -> str:
        """Map the published name of a tensor to its name in :meth:`recipes`."""
        return name

    def check_values(self, source: TensorSource) -> None:
        """Check the values of a source's tensors; the ValueError names the tensor."""

    def is_ignored(self, name: str) -> bool:
        raise NotImplementedError

    def _checked_recipes(self, source: TensorSource) -> Recipes:
        """Return the recipe of each weight after checking the tensors of ``source``."""
        infos, recipes = source.infos, self.recipes()
        parts = {p.name: (p, r) for r in recipes.values() for p in r.parts}
        if missing := [part for part, _ in parts.values() if part.name not in infos]:
            shown = [f"{part.name!r} {part.shape}" for part in missing]
            raise ValueError(
                f"{source.path} lacks {len(missing)} tensor(s) that its configuration requires: "
                f"{_listed(shown)}"
            )
        for name, (part, recipe) in parts.items():
            info = infos[name]
            if info.shape != part.shape:
                raise ValueError(
                    f"tensor {name!r} in {info.path} has shape {info.shape}, but the configuration "
                    f"requires {part.shape}"
                )
            if info.dtype not in _FLOATS and recipe.dtype not in ("int32", info.dtype):
                raise ValueError(
                    f"tensor {name!r} in {info.path} is {info.dtype}; weights must be one of "
                    f"{', '.join(_FLOATS)}"
                )
        unknown = {n for n in infos if n not in parts and not n.endswith("rotary_emb.inv_freq")}
        if unknown := {n for n in unknown if not self.is_ignored(n)}:
            shown = [f"{n!r} {infos[n].shape} in {infos[n].path}" for n in sorted(unknown)]
            raise ValueError(
                f"{source.path} has {len(unknown)} tensors that the model does not use: "
                f"{_listed(shown)}; it may be of another architecture"
            )
        self.check_values(source)
        return recipes


def _listed(shown: list[str]) -> str:
    return ", ".join([*shown[:5], *(["..."] if len(shown) > 5 else [])])


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
        arrays = [cast(part.arranged(source.read(part.name)), dtype) for part in recipe.parts]
        array = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        # return an owned, writable array: a view would keep the memory map of its file alive
        return array if array.flags.owndata and array.flags.c_contiguous else array.copy()
    out = np.empty(recipe.shape, dtype)
    start = 0
    for part in recipe.parts:
        stop = start + part.shape[0]
        tensor = np.ascontiguousarray(cast(part.arranged(source.read(part.name)), dtype))
        _transpose_into(out[:, start:stop], tensor)
        start = stop
    return out
