"""gpt-oss: experts with biases and a clamped activation, sinks, windows in every other layer.

Files have the gates and ups of all experts in one tensor, in turn: rows 0, 2, 4 are gates. GGUF
files have them apart.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.config import Scale
from specjax.json_file import Fields, PositiveSize
from specjax.kernels import mxfp4
from specjax.models.declare import Part, Stored, weight
from specjax.models.experts import Experts, MixtureConfig, matrix, mixture_layers, read_experts
from specjax.models.family import GGUF, Family, attention_biases, layer_windows
from specjax.models.layers import LayerKind
from specjax.models.shards import once


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(MixtureConfig):
    """A mixture whose experts have a clamped activation."""

    swiglu_limit: Scale = 7.0  # of gates, and of ups in both directions
    swiglu_alpha: Scale = 1.702  # multiplies gates inside the sigmoid

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes, step = (self.hidden_size, self.moe_intermediate_size), 2 * mxfp4.GROUP
        if self.has_packed_experts and any(size % step for size in sizes):
            raise ValueError(
                f"hidden_size={sizes[0]} and the width of experts {sizes[1]} must be multiples of "
                f"{step} in MXFP4"
            )


@dataclass(frozen=True)
class Clamped:
    """The activation ``(up + 1) * gate * sigmoid(alpha * gate)`` of clamped gates and ups."""

    limit: float
    alpha: float

    def __call__(self, gate: Array, up: Array) -> Array:
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1.0) * gate * jax.nn.sigmoid(self.alpha * gate)


@lru_cache(maxsize=4)  # layers share an order
def _gates_first(count: int, inner: int) -> np.ndarray:
    """The order of stored rows ``[E * 2 I]``, in which gates and ups take turns."""
    rows = np.arange(2 * count * inner).reshape(count, inner, 2).swapaxes(1, 2).reshape(-1)
    rows.flags.writeable = False
    return rows


class _Form(NamedTuple):
    """How a kind of files stores a tensor of all experts."""

    ending: str  # of its name
    inner: tuple[int, ...] = ()  # the axes of a row
    is_transposed: bool = False

    def rows(self, *tensors: np.ndarray) -> np.ndarray:
        """Rows of tensors ``[E, out, *inner]``, those of two in turn: ``[E * out, ...]``."""
        by_output = [x.swapaxes(1, 2) if self.is_transposed else x for x in tensors]
        joined = by_output[0] if len(tensors) == 1 else np.stack(by_output, axis=2)
        return joined.reshape(-1, *by_output[0].shape[2:])


def _part(
    at: str, count: int, outputs: Mapping[str, int], columns: int | None, files: _Form, gguf: _Form
) -> Part:
    """A tensor of all experts, as directories and GGUF files have it."""
    size, (first, *others) = sum(outputs.values()), outputs
    name = f"{at}experts.{'gate_up_proj' if others else first}{files.ending}"
    shape = (count, *files.inner, size) if files.is_transposed else (count, size, *files.inner)
    shapes = {f"{at}experts.{x}{gguf.ending}": (count, n, *gguf.inner) for x, n in outputs.items()}
    return Part(
        name,
        (count * size,) if columns is None else (count * size, columns),
        _gates_first(count, outputs[first]) if others else None,
        made_of=(Stored({name: shape}, files.rows), Stored(shapes, gguf.rows)),
    )


def _packed_part(
    at: str, count: int, outputs: Mapping[str, int], in_size: int, *, is_scale: bool = False
) -> Part:
    """The words of all experts, or their scales, as directories and GGUF files have them."""
    size, groups, blocks = sum(outputs.values()), in_size // mxfp4.GROUP, -(-in_size // mxfp4.BLOCK)
    module = "gate_up_proj" if len(outputs) > 1 else next(iter(outputs))
    name = f"{at}experts.{module}_{'scales' if is_scale else 'blocks'}"
    shape = (count, size, groups) if is_scale else (count, size, groups, mxfp4.GROUP // 2)
    pack = mxfp4.pack_scales if is_scale else mxfp4.pack
    pack_ggml = mxfp4.pack_ggml_scales if is_scale else mxfp4.pack_ggml

    def of_files(stored: np.ndarray) -> np.ndarray:
        step = len(outputs)  # gates and ups take turns
        return pack(np.concatenate([stored[:, i::step] for i in range(step)], axis=1))

    def of_gguf(*stored: np.ndarray) -> np.ndarray:
        return pack_ggml(np.concatenate(stored, axis=1))

    ggml = {f"{at}experts.{x}.weight": (count, n, groups, 17) for x, n in outputs.items()}
    packed = (count, blocks, size) if is_scale else (count, blocks, size, mxfp4.GROUP)
    dtype = "uint32" if is_scale else "uint16"
    made_of = Stored({name: shape}, of_files, dtype), Stored(ggml, of_gguf, dtype)
    return Part(name, packed, made_of=made_of)


def _packed_split(outputs: Mapping[str, int], shape: tuple[int, ...]) -> dict[str, Any]:
    """How devices share packed matrices: by gates and ups, or by the blocks of their inputs."""
    if len(outputs) == 1:
        return {"split": "in", "axis": 1, "widths": (shape[1],)}
    return {"split": "out", "axis": 2, "widths": (*outputs.values(),), "unit": mxfp4.BLOCK}


class BiasedExperts(Experts):
    """Experts whose router and projections have biases."""

    config: GptOssConfig

    def __init__(self, config: GptOssConfig, kind: LayerKind, at: str) -> None:
        super().__init__(config, kind, at)
        self.activation = Clamped(config.swiglu_limit, config.swiglu_alpha)
        count, dtype, at = config.num_experts, kind.dtypes.activations, f"{at}mlp."
        self.router_bias = weight(f"{kind.tensor(f'{at}gate')}.bias", (count,), dtype)
        size, inner = config.hidden_size, config.moe_intermediate_size
        outputs = {"gate_proj": inner, "up_proj": inner}, {"down_proj": size}
        # a block of inner columns is on one device
        unit = mxfp4.BLOCK if config.has_packed_experts else 1
        of_inner: dict[str, Any] = {"split": "out", "widths": (inner,) * 2 * count, "unit": unit}

        def bias(outputs: Mapping[str, int], **options: Any) -> Any:
            part = _part(at, count, outputs, None, _Form("_bias"), _Form(".bias"))
            return weight((part,), part.shape, dtype, **options)

        def scale(outputs: Mapping[str, int], in_size: int) -> Any:
            # random values then have the size of other random weights
            exponent = 127 + round(math.log2(in_size**-0.5 / mxfp4.SPREAD)) + mxfp4.BIAS
            part = _packed_part(at, count, outputs, in_size, is_scale=True)
            how = _packed_split(outputs, part.shape)
            return weight((part,), part.shape, jnp.uint32, mean=exponent * 0x01010101, **how)

        self.gate_up_bias, self.down_bias = bias(outputs[0], **of_inner), bias(outputs[1])
        is_packed = config.has_packed_experts
        self.gate_up_scale = scale(outputs[0], size) if is_packed else None
        self.down_scale = scale(outputs[1], inner) if is_packed else None

    def stack(self, at: str, in_size: int, **outputs: int) -> Any:
        """Declare projections of all experts, with their numbers of outputs.

        They are ``[E * out, in]``, or packed, ``[E, blocks, out, 32]``.
        """
        count = self.config.num_experts
        if self.config.has_packed_experts:
            part = _packed_part(at, count, outputs, in_size)
            how = _packed_split(outputs, part.shape)
            return weight((part,), part.shape, jnp.uint16, stddev=1.0, **how)
        forms = _Form("", (in_size,), is_transposed=True), _Form(".weight", (in_size,))
        joint: dict[str, Any] = {"split": "in"}
        if len(outputs) > 1:
            joint = {"split": "out", "widths": (*outputs.values(),) * count}
        return matrix((_part(at, count, outputs, in_size, *forms),), self.kind, in_size, **joint)

    def matrices(self) -> Sequence[tuple[Array, Array | None]]:
        """The matrices of each product, packed with their scales if files have MXFP4."""
        if self.gate_up_scale is None or self.down_scale is None:
            return super().matrices()
        gate_up = self.gate_up[...], self.gate_up_scale[...]
        return [gate_up, (self.down[...], self.down_scale[...])]

    def logits(self, rows: Array) -> Array:
        """Those of the router, f32 ``[R, E]``."""
        return super().logits(rows) + self.router_bias[...].astype(jnp.float32)

    @property
    def biases(self) -> tuple[Array, Array]:
        gate_up, down = self.gate_up_bias[...], self.down_bias[...]
        count = self.config.num_experts
        return gate_up.reshape(count, -1), once(down.reshape(count, -1), self.kind.shards)


def _layers(config: Any, **differences: Any) -> tuple[LayerKind, ...]:
    options: dict[str, Any] = {"sinks": True, "renamed": (("gate", "router"),), **differences}
    kinds = mixture_layers(config, **options)
    return tuple(replace(kind, feed_forward=BiasedExperts) for kind in kinds)


_MXFP4 = "mxfp4"


def _read(config: Fields) -> dict[str, Any]:
    # in directories, and stated for a GGUF file by its types
    stated = config.fields("quantization_config")
    method = stated.get("quant_method", Any, config.get("quant_method", Any, None))
    width = config.get("intermediate_size", PositiveSize)
    config.get("experts_per_token", Any, None)  # repeats num_experts_per_tok
    windows = layer_windows(config, lambda i: i % 2 == 0)
    own = {
        "swiglu_limit": config.get("swiglu_limit", Scale, 7.0),
        "swiglu_alpha": config.get("swiglu_alpha", Scale, 1.702),
        # GGUF files have both
        "moe_intermediate_size": config.get("moe_intermediate_size", PositiveSize, width),
        "has_packed_experts": method == _MXFP4,
    }
    # a softmax over the chosen experts
    return windows | attention_biases(config) | read_experts(config, **own, norm_topk_prob=True)


GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    read=_read,
    layers=_layers,
    config=GptOssConfig,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 150000.0, "head_dim": 64}
    | {"attention_bias": True, "sliding_window": 128},
    gguf=GGUF(arch="gpt-oss", derive=lambda _: {"truncate": False}),
    quant_methods=(_MXFP4,),
)
