"""A feed-forward of experts against a loop over tokens in float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.config import Quantization
from specjax.models.decoder import CausalLM
from specjax.models.experts import Experts, MixtureConfig, mean_distinct
from specjax.models.flat import FlatModel
from specjax.models.layers import LayerKind
from specjax.testing.dense import dense_attend
from specjax.testing.models import SIZES, random_weights
from specjax.types import TokenInputs

KINDS: dict[str, dict[str, Any]] = {
    "softmax": {"norm_topk_prob": False},
    "normalised": {},
    "shared": {"shared_expert_intermediate_size": 24, "has_shared_expert_gate": True},
    "sigmoid": {
        "scoring": "sigmoid",
        "has_correction_bias": True,
        "routed_scaling_factor": 2.5,
        "n_group": 4,
        "topk_group": 2,
        "shared_expert_intermediate_size": 24,
    },
}
SPARSE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}


def make(quantization: Quantization | None = None, **changes: Any) -> tuple[Experts, Any]:
    sizes = {**SIZES, **SPARSE, **changes, "quantization": quantization}
    config = MixtureConfig(model_type="qwen3_moe", num_layers=1, **sizes)
    layer = Experts(config, LayerKind.of(config, implementation="xla"), "model.layers.0.")
    rng = np.random.default_rng(0)
    graph, state = nnx.split(layer)

    def values(leaf: Any) -> Any:
        if leaf.dtype == jnp.int8:
            return rng.integers(-127, 128, leaf.shape, np.int8)
        scale = 0.02 if quantization and leaf.shape[-1] == 1 else 1.0
        return np.asarray(scale * rng.normal(size=leaf.shape), leaf.dtype)

    return nnx.merge(graph, jax.tree.map(values, state)), config


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gated(x: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    gate, up = np.split(gate_up @ x, 2)
    return down @ (silu(gate) * up)


def reference(layer: Experts, config: MixtureConfig, x: np.ndarray) -> np.ndarray:
    """The output of one token f64 ``[D]``."""
    count, size = config.num_experts, config.hidden_size
    router = np.float64(layer.router[...])
    gate_up = np.float64(layer.gate_up[...]).reshape(count, -1, size)
    down = np.float64(layer.down[...]).reshape(count, size, -1)
    logits = router @ x
    if config.scoring == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
        ranked = scores + np.float64(layer.correction[...])
    else:
        ranked = scores = np.exp(logits) / np.exp(logits).sum()
    groups = ranked.reshape(config.n_group, -1)
    best = np.argsort(-np.sort(groups)[:, -2:].sum(axis=1))[: config.topk_group]
    of_group = np.arange(count) // groups.shape[1]
    ranked = np.where(np.isin(of_group, best), ranked, -np.inf) if len(groups) > 1 else ranked
    chosen = np.argsort(-ranked)[: config.num_experts_per_tok]
    weights = scores[chosen] / (scores[chosen].sum() if config.norm_topk_prob else 1)
    out = np.zeros(size)
    for expert, weight in zip(chosen, weights * config.routed_scaling_factor, strict=True):
        out += weight * gated(x, gate_up[expert], down[expert])
    if layer.shared is not None:
        kernels = layer.shared.gate_up.kernel[...], layer.shared.down.kernel[...]
        shared = gated(x, *(np.float64(kernel).T for kernel in kernels))
        if layer.shared_gate is not None:
            shared = shared / (1 + np.exp(-np.float64(layer.shared_gate[...])[0] @ x))
        out += shared
    return out


def summed(out: jax.Array) -> np.ndarray:
    return np.asarray(out if out.ndim == 3 else out.sum(axis=0))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_a_loop(kind: str) -> None:
    layer, config = make(**KINDS[kind])
    x = np.random.default_rng(1).normal(size=(2, 5, config.hidden_size)).astype(np.float32)
    expected = np.stack([[reference(layer, config, np.float64(row)) for row in y] for y in x])
    found = summed(layer(jnp.asarray(x)))
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def inputs_where(is_real: np.ndarray) -> TokenInputs:
    unread: Any = None
    return TokenInputs(jnp.asarray(is_real), unread, unread)


def test_padding_reads_no_expert() -> None:
    """Its result has the shared expert alone, and that of other tokens does not change."""
    layer, config = make(**KINDS["shared"])
    x = np.random.default_rng(1).normal(size=(2, 5, config.hidden_size)).astype(np.float32)
    is_real = np.array([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0]], bool)
    every, some = layer(jnp.asarray(x)), layer(jnp.asarray(x), inputs_where(is_real))
    np.testing.assert_array_equal(some[:, is_real], every[:, is_real])
    assert not np.asarray(some[:-1, ~is_real]).any()
    np.testing.assert_array_equal(some[-1], every[-1])


def test_the_sums_of_many_tokens_are_added() -> None:
    layer, config = make(**KINDS["shared"])
    x = np.random.default_rng(1).normal(size=(1, 513, config.hidden_size)).astype(np.float32)
    out = layer(jnp.asarray(x))
    assert out.shape == x.shape
    few = summed(layer(jnp.asarray(x[:, :5])))
    np.testing.assert_allclose(out[:, :5], few, atol=1e-5 * np.abs(few).max())


@pytest.mark.parametrize("num_rows", [1, 513])
def test_one_expert_per_token_keeps_the_dtype(num_rows: int) -> None:
    layer, config = make(num_experts_per_tok=1, dtype="bfloat16")
    x = jnp.ones((1, num_rows, config.hidden_size), jnp.bfloat16)
    out = layer(x)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("group", [None, 16])
def test_quantised_experts_equal_their_values(group: int | None) -> None:
    """The router and its bias are never quantised."""
    layer, config = make(Quantization("int8", group=group))
    assert layer.router[...].dtype == jnp.float32
    plain, _ = make()
    plain.router[...] = layer.router[...]
    for name in ("gate_up", "down"):
        matrix = getattr(layer, name)[...]
        values, scale = np.float32(matrix.values[0]), np.float32(matrix.scale[0])
        scales = np.repeat(scale, values.shape[1] // scale.shape[1], axis=1)
        getattr(plain, name)[...] = jnp.asarray(values * scales)
    x = np.random.default_rng(1).normal(size=(1, 6, config.hidden_size)).astype(np.float32)
    expected = summed(plain(jnp.asarray(x)))
    found = summed(layer(jnp.asarray(x)))
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"n_group": 3}, "n_group=3 must divide num_experts=8"),
        ({"n_group": 8}, "n_group=8 must divide num_experts=8 into groups of 2"),
        ({"n_group": 2, "topk_group": 3}, "topk_group=3 must be at most n_group=2"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 must be at most 8"),
        ({"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok=3 must be at most 2"),
        ({"num_experts": 2000}, "num_experts=2000"),
        *(
            ({"quantization": Quantization(**format), "hidden_size": 192}, "with 192 and 48 inputs")
            for format in (
                {"kind": "int4", "group": 16},
                {"kind": "int8", "group": 16, "has_zeros": True},
                {"kind": "fp8", "group": 8},
                {"kind": "fp8", "group": 32},  # does not divide 48
                {"kind": "int8", "group": 48},
            )
        ),
    ],
)
def test_refused_sizes(changes: dict[str, Any], text: str) -> None:
    sizes = {**SIZES, **SPARSE, **changes}
    with pytest.raises(ValueError, match=text):
        MixtureConfig(model_type="qwen3_moe", num_layers=1, **sizes)


def test_distinct_experts_are_counted_by_layer() -> None:
    _, config = make()
    rng = np.random.default_rng(0)
    routes = [rng.integers(-1, 8, (5, 3), np.int32), np.full((5, 3), -1, np.int32)]
    routes.append(np.tile(np.int32([[7, 0, 3]]), (5, 1)))
    counts = [len(set(chosen.ravel().tolist()) - {-1}) for chosen in routes]
    found = mean_distinct(config, [jnp.asarray(chosen) for chosen in routes])
    assert found is not None
    assert counts[1:] == [0, 3]
    assert found.dtype == jnp.float32
    assert float(found) == np.float32(sum(counts)) / np.float32(3)
    assert mean_distinct(config, []) is None


def test_a_model_returns_the_choices_of_layers_with_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {**SIZES, **SPARSE, "dense_layers": (1,), "num_layers": 3}
    config = MixtureConfig(model_type="qwen3_moe", **sizes)
    flat = FlatModel.of(partial(CausalLM, config, "xla"))
    is_real, call = np.array([[1, 1, 0], [1, 0, 0]], bool), Experts.__call__

    @jax.jit
    def choices(weights: Any, tokens: jax.Array) -> tuple[list[Any], list[Any]]:
        inputs: list[Any] = []
        routes: list[jax.Array] = []

        def watched(layer: Experts, x: jax.Array, by_token: TokenInputs | None) -> jax.Array:
            inputs.append((layer.router[...], x.reshape(6, -1)))
            return call(layer, x, by_token)

        monkeypatch.setattr(Experts, "__call__", watched)
        positions = jnp.tile(jnp.arange(3, dtype=jnp.int32), (2, 1))
        model, by_token = flat.rebuild(weights), inputs_where(is_real)
        model(tokens, positions, None, dense_attend, (), by_token, routes)
        return routes, inputs

    tokens = np.random.default_rng(1).integers(60, size=(2, 3), dtype=np.int32)
    routes, inputs = choices(random_weights(flat, 0), tokens)
    assert len(routes) == len(inputs) == 2
    for chosen, (router, rows) in zip(routes, inputs, strict=True):
        best = np.sort(np.argsort(-(np.float64(rows) @ np.float64(router).T))[:, :3])
        best[~is_real.ravel()] = -1
        np.testing.assert_array_equal(np.sort(chosen), best)
