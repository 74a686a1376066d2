"""Declarations of weights, and the feed-forward of docs/models.md that makes its own."""

import importlib
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.checkpoints.tensors import TensorInfo, TensorSource, make_weight
from specjax.compiling.digest import facts_of_package
from specjax.config import Quantization
from specjax.models import registry
from specjax.models.declare import Cache, pool_layers, pool_shapes, pool_windows, weight
from specjax.models.decoder import CausalLM
from specjax.models.family import alike
from specjax.models.flat import FlatModel
from specjax.testing import TARGET

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
GUIDE: dict[str, Any] = {"__name__": "guide"}
exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], GUIDE)
AT = "model.layers.0.mlp."


@pytest.fixture
def squared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama with the feed-forward of the guide."""
    family = replace(registry.FAMILIES["llama"], layers=GUIDE["layers"])
    monkeypatch.setitem(registry.FAMILIES, "llama", family)


@pytest.mark.usefixtures("squared")
def test_a_module_loads_the_tensors_that_it_declares() -> None:
    flat, rng = FlatModel.of(partial(CausalLM, TARGET)), np.random.default_rng(0)
    parts = [part for recipe in flat.recipes.values() for part in recipe.parts]
    tensors = {part.name: np.float32(rng.normal(size=part.shape)) for part in parts}
    infos = {name: TensorInfo(x.shape, Path("x"), "float32") for name, x in tensors.items()}
    source = TensorSource(Path("x"), infos, tensors.__getitem__)
    dtype = np.dtype(np.float32)
    named = {name: make_weight(recipe, source, dtype) for name, recipe in flat.recipes.items()}
    model = flat.rebuild(tuple(map(jnp.asarray, flat.order(named))))
    x = np.float32(rng.normal(size=(3, TARGET.hidden_size)))
    inner = np.maximum(x @ tensors[f"{AT}up_proj.weight"].T, 0.0) ** 2
    expected = inner @ tensors[f"{AT}down_proj.weight"].T
    np.testing.assert_allclose(model.layers[0].mlp(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("squared")
def test_a_declared_matrix_has_quantised_forms() -> None:
    format = Quantization("int8", plain=(f"{AT}down_proj",))
    flat = FlatModel.of(partial(CausalLM, replace(TARGET, quantization=format)))
    names = {name: [p.name for p in r.parts] for name, r in flat.recipes.items() if "0.mlp" in name}
    assert names == {
        "layers.0.mlp.down.kernel": [f"{AT}down_proj.weight"],
        "layers.0.mlp.up.kernel.values": [f"{AT}up_proj.weight"],
        "layers.0.mlp.up.kernel.scale": [f"{AT}up_proj.weight_scale"],
    }
    assert flat.recipes["layers.0.mlp.up.kernel.values"].dtype == "int8"


class Gain(nnx.Module):
    """A mixer that multiplies each input."""

    cache = Cache(jax.ShapeDtypeStruct((3,), jnp.int8))

    def __init__(self, config: Any, kind: Any, at: str) -> None:
        self.gain = weight(f"{at}mixer.gain", (config.hidden_size,), jnp.float32, mean=3.0)

    def __call__(self, x: Any, rope: Any, kv: Any, layer: int, attend: Any, *_: Any) -> Any:
        return x * self.gain[...], kv


def test_another_mixer_replaces_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    family = replace(registry.FAMILIES["llama"], layers=partial(alike, mixer=Gain))
    monkeypatch.setitem(registry.FAMILIES, "llama", family)
    flat = FlatModel.of(partial(CausalLM, TARGET))
    assert [part.name for part in flat.recipes["layers.1.attention.gain"].parts] == [
        "model.layers.1.mixer.gain"
    ]
    x = np.float32(np.random.default_rng(0).normal(size=(1, 2, TARGET.hidden_size)))
    layer = flat.rebuild(flat.random(0)).layers[1]
    _, middle, _, kv = layer(jnp.asarray(x), None, None, "kv", 1, None)
    normed = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + TARGET.rms_norm_eps)
    np.testing.assert_allclose(middle, x + 3.0 * normed, rtol=1e-5)
    assert kv == "kv"


@pytest.mark.parametrize("wraps", [lambda make: make, partial], ids=["class", "partial"])
def test_compiled_functions_depend_on_the_sources_of_a_mixer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wraps: Any
) -> None:
    (tmp_path / "mixers.py").write_text("class Mixer:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mixers", raising=False)
    mixer = importlib.import_module("mixers").Mixer
    assert registry.cache_facts(TARGET) == ()
    family = replace(registry.FAMILIES["llama"], layers=partial(alike, mixer=wraps(mixer)))
    monkeypatch.setitem(registry.FAMILIES, "llama", family)
    name, package = sorted(registry.cache_facts(TARGET), key=len)
    assert name == "mixers.Mixer"
    assert package == facts_of_package("mixers")


def test_a_mesh_may_cut_matrices_between_heads() -> None:
    config = replace(TARGET, model_type="olmo2", num_layers=1, qkv_bias=True, output_bias=True)
    flat = FlatModel.of(partial(CausalLM, replace(config, quantization=Quantization("int8"))))
    pairs = zip(flat.names, flat.splits, strict=True)
    assert {name.replace("layers.0.", ""): split for name, split in pairs if split} == {
        "attention.qkv.kernel.values": "out",
        "attention.qkv.kernel.scale": "out",
        "attention.qkv.bias": "out",
        "attention.q_norm.scale": "out",
        "attention.k_norm.scale": "out",
        "attention.output.kernel.values": "in",
        "attention.output.kernel.scale": "in",
        "mlp.gate_up.kernel.values": "out",
        "mlp.gate_up.kernel.scale": "out",
        "mlp.down.kernel.values": "in",
        "mlp.down.kernel.scale": "in",
        "lm_head.kernel.values": "vocab",
        "lm_head.kernel.scale": "vocab",
    }


def test_layers_of_one_kind_have_equal_structures() -> None:
    """So one trace serves them, although they have other tensors and scales."""
    config = replace(TARGET, kv_exponents=((1, 2),) + ((0, 0),) * (TARGET.num_layers - 1))
    first, second, *_ = (nnx.split(layer)[0] for layer in CausalLM(config).layers)
    assert first == second
    assert hash(first) == hash(second)


def test_layers_with_equal_caches_share_a_pool() -> None:
    config = replace(TARGET, num_layers=4, windows=(8, 0, 8, 5))
    caches, token = CausalLM(config).caches, (2, TARGET.num_kv_heads, TARGET.head_dim)
    assert pool_windows(caches) == (5, 8)
    assert pool_layers(caches, 1) == ([0, 1, 2, 3],)
    assert pool_layers(caches, 3) == ([1], [3], [0, 2])
    shapes = [shape.shape for shape in pool_shapes(caches, (40, 12, 20))]
    assert shapes == [(1, 40, *token), (1, 12, *token), (2, 20, *token)]
    assert [shape.shape for shape in pool_shapes(caches, (40,))] == [(4, 40, *token)]
    first, second = pool_shapes(caches[::2], (40, 20))
    assert (first, second.shape) == (None, (2, 20, *token))
    wide = caches[1]._replace(per_token=jax.ShapeDtypeStruct((2, 1, 5), jnp.float32))
    # other shapes have a pool with the same pages, in the order of pools for windows
    assert pool_layers((caches[0], wide), 1) == pool_layers((caches[0], wide), 2) == ([1], [0])
    shapes = [shape.shape for shape in pool_shapes((caches[1], wide), (40,))]
    assert shapes == [(1, 40, *token), (1, 40, 2, 1, 5)]
    wide = wide._replace(window=8)
    with pytest.raises(ValueError, match=r"layers \[0, 1\] .*\(2, 1, 5\)"):
        pool_shapes((caches[0], wide), (40, 20))
