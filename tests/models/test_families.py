"""The family of docs/models.md: post-norm layers with GELU, and all other differences of layers."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import SamplingParams
from specjax.checkpoints import open_target
from specjax.config import Quantization, Rope
from specjax.models import registry
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel
from specjax.models.layers import LayerKind, rotated
from specjax.models.registry import layer_kinds
from specjax.models.weights import QuantArray, dot, take_outputs
from specjax.testing import TARGET
from specjax.testing.dense import dense_attend
from specjax.testing.files import write_folder

from ..support.checkpoint_files import (
    CONFIG,
    DIM,
    HEADS,
    HIDDEN,
    INNER,
    LAYERS,
    VOCAB,
    Tensors,
    target_tensors,
)

# the family

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
GUIDE: dict[str, Any] = {"__name__": "guide"}
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], GUIDE)
POST, post_layers = GUIDE["FAMILIES"]["post"], GUIDE["layers"]


INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}},
    "ignore": ["lm_head"],
}


@pytest.fixture(autouse=True)
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the family to the registry."""
    monkeypatch.setitem(registry.FAMILIES, "post", POST)


# a reference in float64, with tensors under Hugging Face names

SETTINGS = CONFIG | {
    "architectures": ["PostForCausalLM"],
    "model_type": "post",
    "hidden_act": "gelu_pytorch_tanh",
    "rope_theta": 1e4,
    "score_scale": 0.5,
}
NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")


def random_tensors(norms: tuple[str, ...]) -> Tensors:
    rng = np.random.default_rng(0)
    tensors = {
        name: tensor * tensor.shape[1] ** -0.5
        for name, tensor in target_tensors().items()
        if tensor.ndim == 2
    }
    layers = [f"model.layers.{i}.{norm}_layernorm" for i in range(LAYERS) for norm in norms]
    scales = {f"{name}.weight": rng.uniform(0.5, 1.5, HIDDEN) for name in ("model.norm", *layers)}
    return {name: np.float32(tensor) for name, tensor in (tensors | scales).items()}


def reference(
    tensors: Tensors,
    tokens: np.ndarray,
    *,
    pre: bool = False,
    post: bool = True,
    offset: float = 0.0,
    scales: float = 0.5,
    thetas: tuple[float, ...] = (1e4,) * LAYERS,
    windows: tuple[int, ...] = (999,) * LAYERS,
    softcap: float = 1e9,
    sinks: bool = False,
    embedding_scale: float = 1.0,
    residual_scale: float = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float = 1e9,
) -> np.ndarray:
    """Logits f64 ``[T, V]``."""
    stored = {name: np.float64(tensor) for name, tensor in tensors.items()}
    x = stored["model.embed_tokens.weight"][tokens] * embedding_scale
    places = np.arange(len(tokens))

    def norm(x: np.ndarray, name: str, is_there: bool = True) -> np.ndarray:
        if not is_there:
            return x
        mean = np.mean(x**2, axis=-1, keepdims=True)
        return x / np.sqrt(mean + 1e-5) * (stored[f"{name}.weight"] + offset)

    for i in range(LAYERS):
        layer = f"model.layers.{i}."

        def linear(x: np.ndarray, name: str, layer: str = layer) -> np.ndarray:
            return x @ stored[f"{layer}{name}.weight"].T

        def heads(y: np.ndarray, name: str, rotates: bool, i: int = i) -> np.ndarray:
            out = linear(y, f"self_attn.{name}_proj").reshape(len(tokens), -1, DIM)
            if rotates:
                turns = places[:, None, None] * thetas[i] ** (-np.arange(DIM // 2) / (DIM // 2))
                pairs = (out[..., : DIM // 2] + 1j * out[..., DIM // 2 :]) * np.exp(1j * turns)
                out = np.concatenate([pairs.real, pairs.imag], axis=-1)
            return np.repeat(out, HEADS // out.shape[1], axis=1)

        y = norm(x, f"{layer}input_layernorm", pre)
        q, k, v = heads(y, "q", True), heads(y, "k", True), heads(y, "v", False)
        scores = np.einsum("tnh,snh->nts", q, k) * scales
        scores = softcap * np.tanh(scores / softcap)
        gap = places[:, None] - places
        weights = np.where((gap >= 0) & (gap < windows[i]), np.exp(scores), 0.0)
        total = weights.sum(axis=-1, keepdims=True)
        if sinks:
            total = total + np.exp(stored[f"{layer}self_attn.sinks"])[:, None, None]
        mixed = np.einsum("nts,snh->tnh", weights / total, v).reshape(len(tokens), -1)
        name = f"{layer}post_attention_layernorm"
        x = x + norm(linear(mixed, "self_attn.o_proj"), name, post) * residual_scale
        y = norm(x, f"{layer}pre_feedforward_layernorm", pre)
        gate = linear(y, "mlp.gate_proj")
        gelu = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        out = linear(gelu * linear(y, "mlp.up_proj"), "mlp.down_proj")
        x = x + norm(out, f"{layer}post_feedforward_layernorm", post) * residual_scale
    logits = norm(x, "model.norm") @ stored["lm_head.weight"].T * logit_scale
    return logit_softcap * np.tanh(logits / logit_softcap)


TENSORS = random_tensors(NORMS[1::2])
TOKENS = np.random.default_rng(1).integers(VOCAB, size=24)


def logits_of(path: Path, attend: Any = dense_attend, implementation: str = "xla") -> np.ndarray:
    checkpoint = open_target(path)
    flat = FlatModel.of(partial(CausalLM, checkpoint.config, implementation=implementation))
    model = flat.rebuild(tuple(map(jnp.asarray, flat.order(checkpoint.load_weights()))))
    positions = jnp.arange(len(TOKENS), dtype=jnp.int32)[None]
    hidden, _, _ = model(jnp.asarray(TOKENS, jnp.int32)[None], positions, None, attend)
    return np.asarray(model.logits(hidden)[0])


def check_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_norm_order_and_activation(tmp_path: Path, implementation: str) -> None:
    path = write_folder(tmp_path, SETTINGS, TENSORS)
    check_close(logits_of(path, implementation=implementation), reference(TENSORS, TOKENS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "tanh"}, r"hidden_act='tanh'.*'gelu_pytorch_tanh'"),
        ({"score_scale": None}, "has no score_scale"),
    ],
)
def test_the_family_reads_its_configuration(tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_target(write_folder(tmp_path, SETTINGS | changes, {}))


def quantised(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """INT8 values ``[out, in]`` and scales f32 ``[out, 1]``."""
    scale = np.abs(matrix).max(axis=1, keepdims=True) / 127
    return np.round(matrix / scale).astype(np.int8), scale.astype(np.float32)


@pytest.mark.slow
def test_an_engine_serves_int8_weights_of_any_family(files: Any, tmp_path: Path) -> None:
    stored, restored = dict(TENSORS), dict(TENSORS)
    for name in (name for name in TENSORS if name.endswith("_proj.weight")):
        values, scale = quantised(TENSORS[name])
        stored |= {name: values, f"{name}_scale": scale}
        restored[name] = values * scale
    settings = SETTINGS | {"quantization_config": INT8}
    path = write_folder(tmp_path / "post8", settings, stored)
    check_close(logits_of(path), reference(restored, TOKENS))
    weights = open_target(path).load_weights()
    assert weights["layers.1.mlp.down.kernel.values"].shape == (1, HIDDEN, INNER)
    assert weights["layers.1.mlp.down.kernel.values"].dtype == np.int8
    assert weights["lm_head.kernel"].dtype == np.float32
    text = TOKENS[:9].tolist()
    with files.small(target=path, speculative=False, skip_tokenizer_init=True) as engine:
        params = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
        found = engine.generate(input_ids=text, sampling_params=params)["output_ids"]
    for _ in range(8):
        text.append(int(np.argmax(reference(restored, np.array(text))[-1])))
    assert found == text[9:]


@pytest.mark.slow
def test_random_quantised_weights_spread_as_plain_ones_do() -> None:
    config = replace(TARGET, quantization=Quantization("int8"))
    flat = FlatModel.of(partial(CausalLM, config))
    named = dict(zip(flat.names, flat.random(0), strict=True))
    kernel = "layers.0.mlp.down.kernel"
    values, scale = named[f"{kernel}.values"], named[f"{kernel}.scale"]
    assert values.dtype == jnp.int8
    np.testing.assert_allclose(
        (np.asarray(values) * np.asarray(scale)).std(), config.intermediate_size**-0.5, rtol=0.1
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_with_a_kernel_of_another_dtype(dtype: str) -> None:
    rng = np.random.default_rng(2)
    values, scale = quantised(rng.normal(size=(24, 32)))
    format = Quantization("int8")
    kernel = QuantArray(jnp.asarray(values[None]), jnp.asarray(scale[None]), None, format)
    x = jnp.asarray(rng.normal(size=(2, 3, 32)), dtype)
    expected = np.float32(x) @ (values * scale).T
    plain = jnp.asarray((values * scale).T, jnp.bfloat16)
    for found, out, limit in (
        (dot(x, kernel), dtype, 1e-5 if dtype == "float32" else 1e-2),
        (dot(x, kernel, jnp.float32), "float32", 1e-5),
        (dot(x, plain), dtype, 1e-2),
    ):
        assert found.dtype == out
        np.testing.assert_allclose(np.float32(found), expected, atol=limit * np.abs(expected).max())
    some = jnp.array([3, 0, 7])
    # products of other widths may sum in another order
    limit = 1e-5 if dtype == "float32" else 1e-2
    chosen, whole = dot(x, take_outputs(kernel, some)), dot(x, kernel)[..., some]
    np.testing.assert_allclose(np.float32(chosen), np.float32(whole), rtol=limit, atol=limit)


def mixed_layers(config: Any) -> tuple[LayerKind, ...]:
    """Alternating windows and rotary bases, norms on both sides, sinks, soft caps and scales."""
    both = {"pre_norm": True, "norm_offset": 1.0, "softcap": 2.0, "sinks": True}
    both["residual_scale"] = 0.3
    (kind, *_) = post_layers(config, **both)
    near, far = replace(kind, window=5), replace(kind, rope=Rope(DIM, 1e6))
    return near, far, near


@pytest.mark.slow
def test_layers_of_two_kinds_with_options_of_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales = {"embedding_scale": 3.0, "logit_scale": 0.25, "logit_softcap": 1.5}
    family = replace(POST, layers=mixed_layers, read=lambda config: POST.read(config) | scales)
    monkeypatch.setitem(registry.FAMILIES, "post", family)
    rng = np.random.default_rng(3)
    sinks = {f"model.layers.{i}.self_attn.sinks": rng.normal(size=HEADS) for i in range(LAYERS)}
    tensors = random_tensors(NORMS) | {name: np.float32(x) for name, x in sinks.items()}
    path = write_folder(tmp_path / "post", SETTINGS, tensors)
    expected = reference(
        tensors,
        TOKENS,
        pre=True,
        offset=1.0,
        thetas=(1e4, 1e6, 1e4),
        windows=(5, 999, 5),
        softcap=2.0,
        sinks=True,
        residual_scale=0.3,
        **scales,
    )
    check_close(logits_of(path), expected)
    # an attend without an option rejects it
    with pytest.raises(TypeError, match="window"):
        logits_of(path, no_options)


@rotated
def no_options(kv: Any, layer: int, q: Any, k: Any, v: Any) -> Any:
    """Attention without options."""
    return kv, q


def test_a_window_that_no_text_reaches_is_none() -> None:
    config = replace(TARGET, model_type="mistral", windows=(64, 32))
    assert [kind.window for kind in layer_kinds(config)] == [64, 32]
    assert [kind.window for kind in layer_kinds(config.within(64))] == [None, 32]
    assert config.within(32).windows == ()
    assert config.within(65) == config


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(ValueError, match=r"model_type='gemma9' must be one of.*'llama'"):
        layer_kinds(replace(TARGET, model_type="gemma9"))
