"""Read ``quantization_config``: how a checkpoint says that its matrices are quantised."""

from collections.abc import Callable
from typing import Annotated, Any

from msgspec import Meta

from specjax.config import Quantization
from specjax.json_file import Fields, Flag, PositiveSize

# how files pack integers, see packed_files.py
GPTQ, GPTQ_V2, AWQ = "GPTQ", "GPTQ v2", "AWQ"
# inputs of a group, up to which the last group is padded
_GroupSize = Annotated[int, Meta(ge=1, le=2**13)]
_LAYOUTS = "float-quantized", "int-quantized", "naive-quantized", "pack-quantized"
# With "static" and "weight", the order was used for quantising only. With True, "group" and
# "dynamic", tensors have the order, see packed_files.py.
_ORDERS = None, False, True, "static", "weight", "group", "dynamic"
# keys of GPTQ and AWQ that change what tensors mean, and the value with which each changes nothing
_NEUTRAL = {"is_marlin_format": False, "rotation": None, "adapter": None, "pack_dtype": "int32"}


def read_quantization(config: Fields) -> Quantization | None:
    """Read ``quantization_config`` of a target; ``None`` if its matrices are whole.

    Raises ValueError with the key of a format that is not supported.
    """
    stated = config.fields("quantization_config")
    if not stated.values:
        return None
    method = stated.get("quant_method", Any, None)
    if not isinstance(method, str) or method not in _READERS:
        raise stated.wrong(
            "quant_method",
            "is not supported; use a checkpoint of compressed-tensors, FP8, GPTQ or AWQ, the whole "
            "weights of the model with quantization='fp8', 'int8' or 'int4', or a GGUF file",
        )
    return Quantization(**_READERS[method](stated))


def _block_format(stated: Fields) -> dict[str, Any]:
    if stated.get("activation_scheme", str, "dynamic") != "dynamic":
        raise stated.wrong("activation_scheme", "is not supported; only 'dynamic' is")
    if not stated.get("weight_block_size", list[PositiveSize], []):
        return {"kind": "fp8"}
    return {"kind": "fp8", "group": _block_size(stated, "weight_block_size")}


def _block_size(fields: Fields, key: str) -> int:
    sizes = fields.get(key, list[_GroupSize])
    if len(sizes) != 2 or sizes[0] != sizes[1]:
        raise fields.wrong(key, "must be two equal numbers")
    return sizes[1]


def _compressed_format(stated: Fields) -> dict[str, Any]:
    if stated.get("format", str, _LAYOUTS[0]) not in _LAYOUTS:
        raise stated.wrong("format", f"is not supported; supported: {', '.join(_LAYOUTS)}")
    if stated.fields("sparsity_config").get("format", str, "dense") != "dense":
        raise stated.wrong("sparsity_config", "is not supported; the format may be 'dense' only")
    if stated.fields("transform_config").values:
        raise stated.wrong("transform_config", "is not supported")
    groups = stated.get("config_groups", dict[str, Any], {})
    if len(groups) != 1:
        raise stated.wrong("config_groups", "must have one group; mixed schemes are not supported")
    group = stated.fields("config_groups").fields(next(iter(groups)))
    if group.get("targets", list[str], ["Linear"]) != ["Linear"]:
        raise group.wrong("targets", "is not supported; only ['Linear'] is")
    if group.fields("output_activations").values:
        raise group.wrong("output_activations", "is not supported")
    inputs, weights = group.fields("input_activations"), group.fields("weights")
    if inputs.values and inputs.get("dynamic", Any, False) is not True:
        raise inputs.wrong("dynamic", "is not supported; activations may have dynamic scales only")
    bits, kind = weights.get("num_bits", int), weights.get("type", str, "int")
    name = {(8, "float"): "fp8", (8, "int"): "int8", (4, "int"): "int4"}.get((bits, kind))
    if name is None:
        raise weights.wrong("num_bits", f"with type={kind!r} is not supported")
    if weights.get("actorder", Any, None) not in _ORDERS:
        raise weights.wrong("actorder", "is not supported")
    strategy = weights.get("strategy", str, "tensor")
    values: dict[str, Any] = {"kind": name}
    if strategy == "group":
        values["group"] = weights.get("group_size", _GroupSize)
    elif strategy == "block":
        values["group"] = _block_size(weights, "block_structure")
    elif strategy not in ("channel", "tensor"):
        raise weights.wrong("strategy", "is not supported; tensor, channel, group and block are")
    if not weights.get("symmetric", Flag, True):
        # zero points need groups; one group may have all inputs
        if "group" not in values:
            raise weights.wrong("symmetric", f"is not supported with strategy={strategy!r}")
        values["has_zeros"] = True
    return values


def _gptq_format(stated: Fields) -> dict[str, Any]:
    key = "format" if "format" in stated else "checkpoint_format"
    packing = {"gptq": GPTQ, "gptq_v2": GPTQ_V2}.get(stated.get(key, str, "gptq"))
    if packing is None:
        raise stated.wrong(key, "is not supported; gptq and gptq_v2 are")
    kind = {4: "int4", 8: "int8"}.get(stated.get("bits", int))
    if kind is None:
        raise stated.wrong("bits", "is not supported; 4 and 8 are")
    # others than exclusions
    if not all(name.startswith("-:") for name in stated.get("dynamic", dict[str, Any], {})):
        raise stated.wrong("dynamic", "is not supported; all modules need the same scheme")
    return {"kind": kind, "packing": packing, **_packed_groups(stated, "sym", is_symmetric=True)}


def _awq_format(stated: Fields) -> dict[str, Any]:
    for key in ("version", "format", "checkpoint_format"):
        if stated.get(key, str, "gemm").lower() != "gemm":
            raise stated.wrong(key, "is not supported; only 'gemm' is")
    if stated.get("backend", str, "") == "llm-awq":
        raise stated.wrong("backend", "is not supported: it packs integers in another order")
    if stated.get("bits", int) != 4:
        raise stated.wrong("bits", "is not supported; only 4 is")
    groups = _packed_groups(stated, "zero_point", is_symmetric=False)
    return {"kind": "int4", "packing": AWQ, **groups}


def _packed_groups(stated: Fields, key: str, *, is_symmetric: bool) -> dict[str, Any]:
    """Groups and zero points of GPTQ or AWQ; ``key`` tells whether there are zero points."""
    for name, value in _NEUTRAL.items():
        if stated.get(name, Any, value) != value:
            raise stated.wrong(name, "is not supported")
    is_whole = stated.get("group_size", int) == -1
    group = None if is_whole else stated.get("group_size", _GroupSize)
    has_zeros = stated.get(key, Flag, True) != is_symmetric
    if has_zeros and group is None:
        raise stated.wrong(key, "is not supported with group_size=-1: zero points need groups")
    return {"group": group, "has_zeros": has_zeros}


_READERS: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "fp8": _block_format,
    "compressed-tensors": _compressed_format,
    "gptq": _gptq_format,
    "awq": _awq_format,
}
