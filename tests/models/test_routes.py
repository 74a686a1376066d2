"""Routes: the pool that keeps them, options that ask for them, and arrays of a request."""

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config import ModelConfig
from specjax.models.declare import num_extra, pool_layers, pool_shapes, pool_windows
from specjax.models.decoder import CausalLM
from specjax.models.experts import MixtureConfig
from specjax.models.routes import Routes, RoutesPiece, route_caches, take_routes, with_routes
from specjax.testing import TARGET

SIZES: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FIELDS = {x.name: getattr(TARGET, x.name) for x in fields(ModelConfig)}
MIXTURE = MixtureConfig(**FIELDS | SIZES | {"model_type": "qwen3_moe", "num_layers": 3})
ON = SimpleNamespace(enable_return_routed_experts=True, model="m")
OFF = SimpleNamespace(enable_return_routed_experts=False, model="m")
KEPT = with_routes(replace(MIXTURE, dense_layers=(1,)), ON)


def test_routes_have_a_pool_with_the_pages_of_the_first() -> None:
    caches = CausalLM(replace(KEPT, windows=(8, 0, 8))).caches
    assert (len(caches), num_extra(caches, 1), pool_windows(caches)) == (4, 1, (8,))
    assert pool_layers(caches, 1) == ([0, 1, 2], [3])
    assert pool_layers(caches, 2) == ([1], [0, 2], [3])
    for counts in ((40,), (40, 12)):
        *others, pool = pool_shapes(caches, counts)
        assert [shape.shape[1] for shape in others] == [*counts]
        assert (pool.shape, pool.dtype) == ((1, 40, 2, 2), jnp.uint8)
    assert CausalLM(MIXTURE).caches == caches[1:2] * 3


@pytest.mark.parametrize(("count", "dtype"), [(256, jnp.uint8), (257, jnp.int16)])
def test_ids_of_all_experts_fit(count: int, dtype: Any) -> None:
    (cache,) = route_caches(replace(KEPT, num_experts=count))
    assert cache.per_token is not None
    assert cache.per_token.dtype == dtype
    assert np.array(count - 1).astype(cache.per_token.dtype) == count - 1


def test_who_cannot_keep_or_report_routes() -> None:
    assert with_routes(TARGET, OFF) is TARGET
    assert with_routes(MIXTURE, OFF) is MIXTURE
    for config in (TARGET, replace(MIXTURE, dense_layers=(0, 1, 2))):
        with pytest.raises(
            ValueError, match=r"enable_return_routed_experts=True needs .* model='m'"
        ):
            with_routes(config, ON)
    assert Routes.wanted(TARGET, False) is None
    for config in (TARGET, MIXTURE):
        with pytest.raises(ValueError, match=r"True needs the engine option enable_return.* False"):
            Routes.wanted(config, True)


def test_an_array_has_zeros_for_layers_without_experts() -> None:
    routes = Routes.wanted(KEPT, True)
    assert routes is not None
    assert routes.array().shape == (0, 3, 2)
    pool = np.random.default_rng(0).integers(6, size=(1, 30, 2, 2)).astype(np.uint8)
    index = np.array([5, 9, 2, 0], np.int32)
    routes.pieces = [RoutesPiece(take_routes(jnp.asarray(pool), index), count) for count in (4, 3)]
    experts = routes.array()
    assert (experts.shape, experts.dtype) == ((7, 3, 2), np.int32)
    np.testing.assert_array_equal(experts[:, [0, 2]], pool[0, [5, 9, 2, 0, 5, 9, 2]])
    assert not experts[:, 1].any()
