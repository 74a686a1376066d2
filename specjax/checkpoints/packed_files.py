"""GPTQ and AWQ files, and activation order: tensors under the names of quantised matrices.

A module of such a file has integers q ``[out, in]``, which stand for ``(q - zero) * scale`` with a
scale and a zero point for each of G groups of inputs:

- ``qweight`` i32, the integers: GPTQ ``[in * bits / 32, out]``, where a word has neighbouring
  inputs, the first in its lowest bits; AWQ ``[in, out / 8]``, where a word has 8 outputs in the
  order 0, 2, 4, 6, 1, 3, 5, 7.
- ``scales [G, out]``, floats.
- ``qzeros`` i32 ``[G, out * bits / 32]``, the zero points, packed along the outputs: GPTQ stores
  zero - 1, GPTQ v2 and AWQ zero, AWQ in the order above. Symmetric files have 2 ** (bits - 1).
- ``g_idx`` i32 ``[in]`` of GPTQ, the group of each input. In files of compressed-tensors with an
  order, a matrix ``X`` has ``X_g_idx`` too.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specjax.checkpoints.quantization import ZERO_POINT, unpack
from specjax.checkpoints.quantization_config import AWQ, GPTQ, read_quantization
from specjax.checkpoints.tensors import FLOATS, TensorInfo, TensorSource, open_directory
from specjax.config import Quantization
from specjax.json_file import Fields
from specjax.models.declare import SCALE

_VALUES, _ORDER = ".qweight", "g_idx"
# where a word of AWQ has each of its 8 outputs
_AWQ_PLACES = 0, 4, 1, 5, 2, 6, 3, 7


class _Made(NamedTuple):
    info: TensorInfo
    read: Callable[[], np.ndarray]


def open_weights(directory: Path) -> TensorSource:
    """Open the tensors of a Hugging Face directory, those of GPTQ and AWQ as :func:`unpacked`."""
    source = open_directory(directory)
    if not any(name.endswith((_VALUES, _ORDER)) for name in source.infos):
        return source
    return unpacked(source, read_quantization(Fields.read(directory / "config.json")))


def unpacked(source: TensorSource, format: Quantization | None) -> TensorSource:
    """Offer the tensors of GPTQ and AWQ as ``X [out, in]``, ``X_scale`` and ``X_zero_point``.

    ``X`` is int4 or int8, scales are ``[out, G]`` as stored, and zero points int8 ``[out, G]``. If
    a file has an order of inputs, scales and zero points get the order of the groups. Raises
    ValueError if a shape or dtype is wrong, or the first order mixes the groups; if others do, it
    is raised when the scales are read.
    """
    made: dict[str, _Made] = {}
    replaced = set[str]()
    size = None if format is None else format.group
    for name in source.infos:
        module = name.rpartition(".")[0] + "."
        if name.endswith(_VALUES):
            if format is None or not format.packing:
                raise ValueError(
                    f"tensor {name!r} in {source.infos[name].path} is packed, but "
                    "quantization_config has not quant_method 'gptq' or 'awq'; copy it from "
                    "quantize_config.json or quant_config.json of the model"
                )
            packed = _Module(source, module, format)
            made |= packed.made()
            replaced |= packed.names
        elif name.endswith("_" + _ORDER):
            matrix = name.removesuffix("_" + _ORDER)
            found = [matrix + x for x in (SCALE, ZERO_POINT) if matrix + x in source.infos]
            made |= {x: _ordered(source, x, name, size) for x in found}
            replaced |= {name, *found}
    if not made:
        return source
    if orders := sorted(name for name in replaced if name.endswith(_ORDER)):
        read_order(source, orders[0], size)
    infos = {name: info for name, info in source.infos.items() if name not in replaced}
    if hidden := sorted(infos.keys() & made.keys()):
        raise ValueError(f"{infos[hidden[0]].path} has {hidden[0]!r} whole and packed")
    infos |= {name: tensor.info for name, tensor in made.items()}
    return TensorSource(
        source.path, infos, lambda name: made[name].read() if name in made else source.read(name)
    )


def read_order(source: TensorSource, name: str, size: int | None) -> np.ndarray:
    """The group of each ``size`` inputs, of the group of each input that a tensor has.

    Raises ValueError if the inputs of a group are not neighbours, as with true activation order:
    products would need their inputs in another order.
    """
    info = source.infos[name]
    groups = source.read(name)
    if info.dtype not in ("int32", "int64") or groups.ndim != 1:
        raise ValueError(
            f"tensor {name!r} in {info.path} is {info.dtype} and has shape {info.shape}; it must "
            "be int32 and have one value per input"
        )
    order = groups[:: size or max(1, len(groups))]
    is_whole = np.array_equal(np.repeat(order, size or len(groups))[: len(groups)], groups)
    if not is_whole or not np.array_equal(np.sort(order), np.arange(len(order))):
        raise ValueError(
            f"tensor {name!r} in {info.path}: inputs are in an order in which those of a group of "
            f"{size} are not neighbours (desc_act or actorder); this is not supported; use a "
            "checkpoint with desc_act=false or actorder='static'"
        )
    return order


def _ordered(source: TensorSource, name: str, of_inputs: str, size: int | None) -> _Made:
    """The scales or packed zero points ``[..., G]`` of compressed-tensors, in order."""

    def read() -> np.ndarray:
        order, stored = read_order(source, of_inputs, size), source.read(name)
        if stored.shape[-1:] != order.shape:
            raise ValueError(
                f"tensor {name!r} in {source.infos[name].path} has shape {stored.shape}, but "
                f"{of_inputs!r} has {len(order)} groups"
            )
        return stored[..., order]

    return _Made(source.infos[name], read)


class _Module:
    """A quantised module of GPTQ or AWQ; ``at`` begins the names of its tensors."""

    def __init__(self, source: TensorSource, at: str, format: Quantization) -> None:
        self._source, self._at, self._format = source, at, format
        self._is_awq = format.packing == AWQ
        info, per_word = source.infos[at + "qweight"], 32 // format.bits
        rows, columns = info.shape if len(info.shape) == 2 else (0, 0)
        self._inputs = rows if self._is_awq else rows * per_word
        self._outputs = columns * per_word if self._is_awq else columns
        self._groups = -(-self._inputs // (format.group or max(1, self._inputs)))
        shapes = {
            "qweight": (rows, columns),
            "scales": (self._groups, self._outputs),
            "qzeros": (self._groups, -(-self._outputs // per_word)),
            _ORDER: (self._inputs,),
        }
        self.names = {at + x for x in shapes if at + x in source.infos}
        needed = {f"{at}scales", *([f"{at}qzeros"] if format.has_zeros else [])}
        if missing := sorted(needed - self.names):
            raise ValueError(f"{info.path} has {at + 'qweight'!r} without {missing[0]!r}")
        for name in sorted(self.names):
            stored, leaf = source.infos[name], name.removeprefix(at)
            dtypes = FLOATS if leaf == "scales" else ("int32",)
            if stored.dtype not in dtypes or stored.shape != shapes[leaf] or not columns:
                raise ValueError(
                    f"tensor {name!r} in {stored.path} is {stored.dtype} and has shape "
                    f"{stored.shape}; a matrix {(self._outputs, self._inputs)} of {format} needs "
                    f"{' or '.join(dtypes)} of shape {shapes[leaf]}"
                )

    def made(self) -> dict[str, _Made]:
        """Its matrix, with scales and zero points."""
        at, infos, dtype = self._at, self._source.infos, self._format.dtype.name
        matrix, shape = (self._outputs, self._inputs), (self._outputs, self._groups)
        made = {
            "": _Made(infos[at + "qweight"]._replace(shape=matrix, dtype=dtype), self._values),
            SCALE: _Made(infos[at + "scales"]._replace(shape=shape), self._scales),
        }
        if self._format.has_zeros:
            info = infos[at + "qzeros"]._replace(shape=shape, dtype="int8")
            made[ZERO_POINT] = _Made(info, self._zeros)
        return {f"{at}weight{suffix}": tensor for suffix, tensor in made.items()}

    def _values(self) -> np.ndarray:
        words = self._source.read(self._at + "qweight")
        if self._is_awq:
            values = self._of_outputs(words)
        else:
            values = unpack(np.ascontiguousarray(words.T), self._format.bits, self._inputs, axis=1)
        return values.astype(self._format.dtype, order="C")

    def _of_outputs(self, words: np.ndarray) -> np.ndarray:
        """Signed integers ``[out, n]`` of words ``[n, out * bits / 32]``."""
        bits, by_output = self._format.bits, np.ascontiguousarray(words.T).view(np.uint32)
        places = _AWQ_PLACES if self._is_awq else range(32 // bits)
        values = np.empty((len(by_output), len(places), len(words)), np.int8)
        for i, place in enumerate(places):
            integers = by_output >> np.uint32(bits * place) & np.uint32(2**bits - 1)
            values[:, i] = integers.astype(np.int16) - 2 ** (bits - 1)
        return values.reshape(-1, len(words))[: self._outputs]

    def _in_order(self, of_groups: np.ndarray) -> np.ndarray:
        """Values ``[out, G]`` of groups, in the order of the inputs."""
        if (name := self._at + _ORDER) not in self.names:
            return of_groups
        return of_groups[:, read_order(self._source, name, self._format.group)]

    def _scales(self) -> np.ndarray:
        if not self._format.has_zeros and (name := f"{self._at}qzeros") in self.names:
            # symmetric files of GPTQ may have either convention
            found = set(np.unique(self._of_outputs(self._source.read(name))).tolist())
            allowed = [{0}, {-1}] if self._format.packing == GPTQ else [{0}]
            if found not in allowed:
                raise ValueError(
                    f"tensor {name!r} in {self._source.infos[name].path} has zero points other "
                    "than those of a symmetric file; correct sym or zero_point of "
                    "quantization_config"
                )
        return self._in_order(self._source.read(self._at + "scales").T)

    def _zeros(self) -> np.ndarray:
        zeros = self._of_outputs(self._source.read(f"{self._at}qzeros"))
        if self._format.packing == GPTQ:
            # the lowest zero point minus 1 is stored as the highest
            half = 2 ** (self._format.bits - 1)
            zeros = ((zeros.astype(np.int16) + half + 1) % (2 * half) - half).astype(np.int8)
        return self._in_order(zeros)
