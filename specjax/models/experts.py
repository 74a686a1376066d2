"""Mixtures of experts: a feed-forward in which a router chooses a few of many small networks.

Axes: E experts, K experts that a token uses, I inner width of an expert, D hidden, R tokens. The
experts of a layer are two stacks of matrices, which one kernel each multiplies with the tokens that
chose them. Their sums go to the next norm, which adds them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.checks import Positive
from specjax.config import Count, ModelConfig, Quantization, Scale
from specjax.json_file import Fields, Flag, PositiveSize, Size
from specjax.kernels.add_norm import ordered_sum, whole
from specjax.kernels.choose_experts import choose_experts
from specjax.kernels.dot import plain_dot
from specjax.kernels.grouped_experts import MAX_FLOAT32_ROWS, Activation, grouped_experts
from specjax.models.declare import Part, Recipe, weight
from specjax.models.family import alike
from specjax.models.layers import ACTIVATIONS, MLP, LayerKind
from specjax.models.shards import all_sum
from specjax.models.weights import Kernel, QuantArray, abstract_kernel
from specjax.types import TokenInputs


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(ModelConfig):
    """A language model with mixtures of experts in some layers; names are those of files."""

    num_experts: Count
    num_experts_per_tok: Count
    moe_intermediate_size: Positive
    scoring: str = "softmax"  # of all experts, or "sigmoid"
    norm_topk_prob: bool = True  # the weights of a token's experts add up to 1
    routed_scaling_factor: Scale = 1.0  # multiplies them
    has_correction_bias: bool = False  # added to scores for the choice, but not to weights
    n_group: Count = 1  # experts are chosen from the best groups only
    topk_group: Count = 1
    # width of the expert that every token uses, and whether a scalar gate multiplies it; 0: none
    shared_expert_intermediate_size: Size = 0
    has_shared_expert_gate: bool = False
    dense_layers: tuple[int, ...] = ()  # layers with a plain feed-forward
    num_nextn_predict_layers: int = 0  # modules for multi-token prediction
    enable_return_routed_experts: bool = False  # keep them for each token, see models/routes.py
    has_packed_experts: bool = False  # their matrices are MXFP4

    def __post_init__(self) -> None:
        super().__post_init__()
        format = None if self.has_packed_experts else self.quantization
        _check_format(format, self.hidden_size, self.moe_intermediate_size)
        groups, size = self.n_group, self.num_experts // self.n_group
        if self.num_experts % groups or (groups > 1 and size < 2):
            raise ValueError(
                f"n_group={groups} must divide num_experts={self.num_experts} into groups of 2 or "
                "more"
            )
        if self.topk_group > groups:
            raise ValueError(f"topk_group={self.topk_group} must be at most n_group={groups}")
        if self.num_experts_per_tok > (most := size * self.topk_group):
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} must be at most {most}, the "
                "number of experts that a token may choose from"
            )


@dataclass(frozen=True)
class Gated:
    """The activation of an expert, ``activation(gate) * up``."""

    name: str

    def __call__(self, gate: Array, up: Array) -> Array:
        return ACTIVATIONS[self.name](gate) * up


class Experts(nnx.Module):
    """A feed-forward of experts: the weighted sum of those that the router chooses.

    The router computes in float32 and is never quantised. Files have the matrices of each expert
    apart, or stacked.
    """

    def __init__(self, config: MixtureConfig, kind: LayerKind, at: str) -> None:
        self.config, self.kind = config, kind
        self.activation: Activation = Gated(config.activation)
        size, count, inner = config.hidden_size, config.num_experts, config.moe_intermediate_size
        at, dtype = f"{at}mlp.", kind.dtypes.activations
        router, words = f"{kind.tensor(f'{at}gate')}.weight", ("gate", "router")
        stacks = tuple((f"{prefix}{x}.weight",) for x in words for prefix in (at, kind.tensor(at)))
        self.router = weight(router, (count, size), dtype, stddev=size**-0.5, stacks=stacks)
        bias = partial(weight, f"{at}gate.e_score_correction_bias", (count,), jnp.float32)
        named = ((f"{kind.tensor(at)}expert_bias",),)  # of LFM2
        self.correction = bias(stacks=named) if config.has_correction_bias else None
        self.gate_up = self.stack(at, size, gate_proj=inner, up_proj=inner)
        self.down = self.stack(at, inner, down_proj=size)
        width = config.shared_expert_intermediate_size
        shared = partial(MLP, config, kind, at, inner=width, module="shared_expert")
        self.shared = shared() if width else None
        if self.shared is not None:
            self.shared.down.num_sums = 1  # devices add up all experts at once
        gate = partial(weight, f"{at}shared_expert_gate.weight", (1, size), dtype)
        self.shared_gate = gate(stddev=size**-0.5) if config.has_shared_expert_gate else None

    def __call__(self, x: Array, by_token: TokenInputs | None = None) -> Array:
        """Map ``[B, T, D]`` to ``[B, T, D]`` or partial sums of it.

        For padding, no expert is read, and the result is that of the shared expert alone. The
        chosen experts i32 ``[B * T, K]``, or -1, become the attribute ``chosen``.
        """
        config, implementation = self.config, self.kind.implementation
        rows = x.reshape(-1, x.shape[-1])
        experts, weights = choose_experts(
            self.logits(rows),
            config.num_experts_per_tok,
            scoring=config.scoring,
            bias=None if self.correction is None else self.correction[...],
            is_normalised=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
            num_groups=config.n_group,
            top_groups=config.topk_group,
            is_real=None if by_token is None else by_token.is_real.reshape(-1),
            implementation=implementation,
        )
        self.chosen = nnx.Intermediate(experts)  # which CausalLM takes out of the layer
        (gate_up, in_scale), (down, out_scale) = self.matrices()
        sums = grouped_experts(
            rows,
            experts,
            weights,
            gate_up,
            down,
            activation=self.activation,
            scales=None if in_scale is None or out_scale is None else (in_scale, out_scale),
            biases=self.biases,
            implementation=implementation,
        )
        if self.shared is not None:
            shared = whole(self.shared(rows), 2, x.dtype)
            if self.shared_gate is not None:
                how: dict[str, Any] = {"is_transposed": True, "implementation": implementation}
                gate = plain_dot(rows, self.shared_gate[...], jnp.float32, **how)
                shared = (shared.astype(jnp.float32) * jax.nn.sigmoid(gate)).astype(x.dtype)
            sums = jnp.concatenate([sums, shared.astype(sums.dtype)[None]])
        # partial sums of many tokens would take K times the memory of the residual stream
        if len(sums) == 1 or len(rows) > MAX_FLOAT32_ROWS or self.kind.shards > 1:
            total = ordered_sum(sums.astype(jnp.float32)).astype(x.dtype).reshape(x.shape)
            return all_sum(total, self.kind.shards)
        return sums.reshape(len(sums), *x.shape)

    def logits(self, rows: Array) -> Array:
        """Those of the router, f32 ``[R, E]``."""
        how: dict[str, Any] = {"is_transposed": True, "implementation": self.kind.implementation}
        return plain_dot(rows, self.router[...], jnp.float32, **how)

    @property
    def biases(self) -> tuple[Array, Array] | None:
        """Those of gates and ups ``[E, 2 I]``, and of outputs ``[E, D]``."""
        return None

    def matrices(self) -> Sequence[tuple[Array, Array | None]]:
        """The matrices ``[E, out, in]`` of each product and, if they have some, their scales."""
        return [_split(x[...], self.config.num_experts) for x in (self.gate_up, self.down)]

    def stack(self, at: str, in_size: int, **outputs: int) -> Any:
        """Declare projections of all experts, with their numbers of outputs: ``[E * out, in]``."""
        kind, count, stacks = self.kind, self.config.num_experts, list[tuple[str, ...]]()
        stacks += [(prefix + x,) for x in _STACKED[*outputs] for prefix in (at, kind.tensor(at))]
        stacks.append(tuple(f"{at}experts.{x}.weight" for x in outputs))  # GGUF files
        names = [kind.tensor(f"{at}experts.{i}.{x}") for i in range(count) for x in outputs]
        sizes = [*outputs.values()] * count
        parts = (Part(f"{x}.weight", (n, in_size)) for x, n in zip(names, sizes, strict=True))
        # devices share the inner columns
        how: dict[str, Any] = {"split": "out" if len(outputs) > 1 else "in"}
        return matrix(tuple(parts), kind, in_size, stacks=tuple(stacks), **how)


def matrix(
    stored: tuple[Part, ...], kind: LayerKind, in_size: int, *, split: str, **options: Any
) -> Any:
    """Declare a matrix ``[out, in]`` for the kernels of experts, quantised as layers are.

    A mesh cuts the axis ``split``; ``options`` are those of the recipe.
    """
    out_size = sum(part.shape[0] for part in stored)
    dtypes = kind.dtypes.without(*(part.name.removesuffix(".weight") for part in stored))
    shape: Any = jax.ShapeDtypeStruct((out_size, in_size), dtypes.activations)
    if dtypes.quantization is not None:
        shape = abstract_kernel(in_size, out_size, dtypes, num_parts=1)
    return nnx.Param(shape, recipe=Recipe(stored, **options), split=split, stddev=in_size**-0.5)


def mean_distinct(config: ModelConfig, routes: Sequence[Array]) -> Array | None:
    """The number of experts that tokens chose, as the mean f32 ``[]`` over layers with experts.

    ``routes`` are the choices of each of these layers, as from ``CausalLM``. ``None`` if there are
    no such layers.
    """
    if not routes:
        return None
    assert isinstance(config, MixtureConfig)
    ids = jnp.stack(routes).reshape(len(routes), -1, 1)
    # on a GPU, XLA fuses the comparisons into their reduction, so no [L, R * K, E] is stored
    is_read = (ids == jnp.arange(config.num_experts, dtype=jnp.int32)).any(axis=1)
    return is_read.sum(dtype=jnp.int32).astype(jnp.float32) / len(routes)


def _check_format(format: Quantization | None, *sizes: int) -> None:
    """Raise ValueError for matrices ``[..., size]`` that the kernels of experts do not read."""
    if format is None:
        return
    # the number of groups has to tell their size
    is_power = format.group is None or (format.group >= 16 and format.group.bit_count() == 1)
    divides = all(size % (format.group or 1) == 0 for size in sizes)
    if format.bits != 8 or format.has_zeros or not (is_power and divides):
        raise ValueError(
            f"quantization {format} does not support experts with {' and '.join(map(str, sizes))} "
            "inputs; use 'fp8' or 'int8' with one scale per output, or with groups of a power of "
            "two of at least 16 inputs that divides these numbers"
        )


def _split(kernel: Kernel, count: int) -> tuple[Array, Array | None]:
    """The matrices ``[E, out, in]`` of a stack, and if they are quantised, their scales."""
    if not isinstance(kernel, QuantArray):
        return kernel.reshape(count, -1, kernel.shape[-1]), None
    values, scale = kernel.values[0], kernel.scale[0]
    return values.reshape(count, -1, values.shape[-1]), scale.reshape(count, -1, scale.shape[-1])


# tensors that stack all projections of a layer's experts: of transformers 5, and of Granite
_STACKED = {
    ("gate_proj", "up_proj"): ("experts.gate_up_proj", "input_linear.weight"),
    ("down_proj",): ("experts.down_proj", "output_linear.weight"),
}


def refusals(config: ModelConfig, device: jax.Device, *, deterministic: bool) -> Iterator[str]:
    """Why the experts of a model cannot run on a device."""
    if not deterministic or not isinstance(config, MixtureConfig):
        return
    widths = config.moe_intermediate_size, config.shared_expert_intermediate_size
    if any(width % 16 for width in widths):
        yield (
            "enable_deterministic_inference=True needs multiples of 16 as the widths of experts, "
            f"not {widths[0]} and {widths[1]}"
        )


def mixture_layers(config: MixtureConfig, **differences: Any) -> tuple[LayerKind, ...]:
    """Describe layers with experts, except those that have a plain feed-forward."""
    kinds = alike(config, **differences)
    return tuple(
        kind if i in config.dense_layers else replace(kind, feed_forward=Experts)
        for i, kind in enumerate(kinds, config.first_layer)
    )


def read_experts(config: Fields, **changes: Any) -> dict[str, Any]:
    """Read the sizes of experts and the rules of their choice; ``changes`` are a family's own."""
    count = next((key for key in _COUNTS if key in config), _COUNTS[0])
    values = {
        "num_experts": config.get(count, Count),
        "num_experts_per_tok": config.get("num_experts_per_tok", Count),
        "norm_topk_prob": config.get("norm_topk_prob", Flag, True),
    }
    if "moe_intermediate_size" not in changes:
        values["moe_intermediate_size"] = config.get("moe_intermediate_size", PositiveSize)
    return values | changes


# transformers writes the second name of any family's number
_COUNTS = "num_experts", "num_local_experts", "n_routed_experts"
