"""Parameters of requests that layers of a model read for each token."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kv.pages import Segments
from specjax.models import registry
from specjax.models.decoder import CausalLM
from specjax.models.family import alike
from specjax.models.flat import FlatModel
from specjax.models.layers import MLP, Attention
from specjax.sampling.table import neutral_sampling, pack_sampling, unpack_sampling
from specjax.speculative.algorithm import Batch
from specjax.testing import TARGET, random_weights
from specjax.testing.dense import dense_attend

TABLE = neutral_sampling(6, TARGET.vocab_size)
TABLE["min_ps"] = np.arange(6) / 8
TABLE["seeds"] = np.arange(12).reshape(6, 2)


def batch_of(*slots: Any) -> Batch:
    """A batch of which only slots and parameters are read."""
    index = jnp.asarray(slots, jnp.int32)
    sampling = unpack_sampling(jnp.asarray(pack_sampling(TABLE)), index)
    rest: Any = ("target", "draft", "pages", "seq_lens", "bonus_tokens", "tokens", "draw")
    return Batch(slots=index, sampling=sampling, **dict.fromkeys(rest))


def test_rows_have_the_parameters_of_their_request() -> None:
    is_node = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1]], bool)
    inputs = batch_of(4, 2, 0).inputs_of_rows(jnp.asarray(is_node))
    assert inputs.is_real.tolist() == [[True, True, False], [True, False, False], [False] * 3]
    assert inputs.parameter("min_ps").tolist() == [[0.5] * 3, [0.25] * 3, [0.0] * 3]
    seeds = inputs.parameter("seeds")
    np.testing.assert_array_equal(seeds, np.repeat(TABLE["seeds"][[4, 2, 0], None], 3, axis=1))


def test_segments_have_the_parameters_of_their_request() -> None:
    counts = np.array([2, 0, 3, 1], np.int32)
    segments = Segments.of(jnp.zeros(4, jnp.int32), jnp.asarray(counts), 9)
    inputs = batch_of(3, 5, 1, 4).inputs_of_segments(segments)
    assert inputs.is_real.tolist() == [[True] * 6 + [False] * 3]
    expected = np.repeat(TABLE["min_ps"][[3, 5, 1, 4]], counts)
    np.testing.assert_array_equal(inputs.parameter("min_ps")[0, :6], expected)


class Scaled(Attention):
    """Attention of inputs that are scaled by a parameter of their request."""

    def __call__(self, x: Any, rope: Any, kv: Any, layer: int, attend: Any, *rest: Any) -> Any:
        x = x * (1 + rest[-1].parameter("min_ps")[..., None])
        return super().__call__(x, rope, kv, layer, attend, *rest)


class Shifted(MLP):
    """A feed-forward of inputs that are shifted by a parameter of their request."""

    def __call__(self, x: Any, by_token: Any = None) -> Any:
        return super().__call__(x + by_token.parameter("min_ps")[..., None], by_token)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_mixers_and_feed_forwards_read_parameters(
    monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    """The states of a request do not depend on the parameters of the other one in its batch."""
    layers = partial(alike, mixer=Scaled, feed_forward=Shifted)
    family = replace(registry.FAMILIES["llama"], layers=layers)
    monkeypatch.setitem(registry.FAMILIES, "llama", family)
    flat = FlatModel.of(partial(CausalLM, replace(TARGET, num_layers=1), implementation))
    weights = random_weights(flat, 0)

    @jax.jit
    def states(slots: jax.Array) -> jax.Array:
        tokens = jnp.array([[5, 9, 2], [5, 9, 2]], jnp.int32)
        by_token = batch_of(*slots).inputs_of_rows(jnp.ones(tokens.shape, bool))
        positions = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), tokens.shape)
        model = flat.rebuild(weights)
        return model(tokens, positions, None, dense_attend, (), by_token)[0]

    mixed, *equal = (np.asarray(states(np.int32(pair))) for pair in ((1, 5), (1, 1), (5, 5)))
    np.testing.assert_array_equal(mixed, [equal[0][0], equal[1][1]])
    assert np.abs(mixed[0] - mixed[1]).max() > 0.1
