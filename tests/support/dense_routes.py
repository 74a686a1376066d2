"""The experts of each token of a text, from one pass without a cache, pages or rounds."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from specjax.kernels.delta_inputs import RequestRows

from specjax.kv.recurrent import abstract_pool, recur_in_order
from specjax.models.decoder import CausalLM
from specjax.models.experts import MixtureConfig
from specjax.models.flat import FlatModel, Weights
from specjax.testing.dense import WIDTH, dense_attend


@cache
def _function(config: MixtureConfig) -> Any:
    flat = FlatModel.of(partial(CausalLM, config))
    positions, pool = jnp.arange(WIDTH, dtype=jnp.int32)[None], abstract_pool(flat.caches, 2)
    rows = RequestRows(*(jnp.array([x], jnp.int32) for x in (1, -1, 0, WIDTH)))

    @jax.jit
    def routes(weights: Weights, tokens: jax.Array) -> list[jax.Array]:
        inputs: Any = None, dense_attend
        if pool is not None:
            recur = recur_in_order(rows, WIDTH, pool.num_taps, group=1, implementation="xla")
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), pool)
            inputs = (None, zeros), (dense_attend, recur)
        chosen: list[jax.Array] = []
        flat.rebuild(weights)(tokens, positions, *inputs, routes=chosen)
        return chosen

    return routes


def dense_routes(weights: Weights, ids: Sequence[int], config: MixtureConfig) -> np.ndarray:
    """Experts i32 ``[N, layers, K]`` of all tokens of a text of up to 128."""
    padded = np.zeros((1, WIDTH), np.int32)
    padded[0, : len(ids)] = ids
    experts = np.zeros((len(ids), config.num_layers, config.num_experts_per_tok), np.int32)
    layers = [i for i in range(config.num_layers) if i not in config.dense_layers]
    for i, chosen in zip(layers, _function(config)(weights, padded), strict=True):
        experts[:, i] = np.asarray(chosen)[: len(ids)]
    return experts
