"""Exported tensors: the order of rows, columns and ids that published files have."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from specjax.checkpoints.export import published_tensors
from specjax.config import ModelConfig
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel

# a head has 8 rows, of which 6 are rotated; a permutation that is its own inverse shows less
CONFIG = ModelConfig(
    model_type="glm",
    vocab_size=5,
    hidden_size=4,
    intermediate_size=3,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rotary_dim=6,
    qkv_bias=True,
    max_position_embeddings=16,
)
# rows of a file in the order of the weights, where row i rotates with row i + 4
ORDERS = {"glm": [0, 2, 4, 6, 1, 3, 5, 7], "phi3": [0, 1, 2, 6, 3, 4, 5, 7]}


@pytest.mark.parametrize("family", ORDERS)
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_rows_of_rotated_heads_have_the_published_order(family: str, kind: str) -> None:
    config = replace(CONFIG, model_type=family)
    recipes, rng = FlatModel.of(partial(CausalLM, config)).recipes, np.random.default_rng(0)
    weights = {name: rng.normal(size=recipe.shape) for name, recipe in recipes.items()}
    tensors = published_tensors(config, recipes, weights)
    names = ["qkv"] if family == "phi3" else ["q", "k", "v"]
    stored = [tensors[f"model.layers.0.self_attn.{name}_proj.{kind}"] for name in names]
    heads = np.concatenate(stored).reshape(4, 8, -1)  # two of queries, one of keys, one of values
    heads[:3] = heads[:3, ORDERS[family]]
    weight = weights["layers.0.attention.qkv." + {"weight": "kernel"}.get(kind, kind)]
    np.testing.assert_array_equal(heads.reshape(32, -1).T.squeeze(), weight)
