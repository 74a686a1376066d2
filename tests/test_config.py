"""Configurations refuse what cannot be, and say what and why."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from specjax.config import RopeScaling, SpeculativeConfig

from .tiny import EAGLE, EAGLE3, TARGET


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size=0 must be an integer of at least 1"),
        ({"hidden_size": 1.5}, "hidden_size=1.5"),
        ({"num_layers": -1}, "num_layers=-1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0"),
        ({"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"rope_theta": 0.0}, "rope_theta=0.0"),
        ({"rope_theta": float("inf")}, "rope_theta=inf"),
        ({"dtype": "float16"}, "dtype='float16' is not one of"),
    ],
)
def test_model_sizes(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TARGET, **changes)


@pytest.mark.parametrize(
    ("head", "changes", "message"),
    [
        (EAGLE3, {"algorithm": "EAGLE4"}, "algorithm='EAGLE4'"),
        (EAGLE3, {"draft_vocab_size": 62}, "draft_vocab_size=62 .* vocab_size=61"),
        (EAGLE3, {"draft_vocab_size": 0}, "draft_vocab_size=0"),
        (EAGLE3, {"feature_layers": ()}, "needs feature_layers"),
        (EAGLE3, {"num_layers": 2}, "num_layers=2: an EAGLE-3 head has exactly 1"),
        (EAGLE, {"num_heads": 5}, "num_heads=5"),
    ],
)
def test_heads(head, changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        replace(head, **changes)


def test_feature_size() -> None:
    assert EAGLE3.feature_size == 3 * TARGET.hidden_size
    assert EAGLE.feature_size == TARGET.hidden_size
    assert replace(EAGLE, num_layers=2).num_layers == 2


@pytest.mark.parametrize(("n", "layers"), [(32, (1, 15, 28)), (30, (1, 14, 26)), (8, (1, 3, 4))])
def test_default_feature_layers(n, layers) -> None:
    assert replace(TARGET, num_layers=n).default_feature_layers == layers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rope_type": "yarn"}, "rope_type='yarn' is not supported; supported: 'linear', 'llama3'"),
        ({"rope_type": "linear", "factor": 0.5}, "factor=0.5"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor=nan"),
        ({"rope_type": "llama3", "low_freq_factor": 4.0}, "low_freq_factor=4.0 must be below"),
    ],
)
def test_rope_scaling(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        RopeScaling(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "EAGLE2"}, "speculative_algorithm='EAGLE2' is not 'EAGLE3' or 'EAGLE'"),
        ({"num_steps": 0}, "speculative_num_steps=0 .* speculative_algorithm=None"),
        ({"num_steps": 64, "num_draft_tokens": 65}, "speculative_num_steps=64"),
        ({"num_steps": 3.0}, "speculative_num_steps=3.0"),
        ({"topk": 4}, "speculative_eagle_topk=4: only chains"),
        ({"num_draft_tokens": 5}, r"speculative_num_draft_tokens=5 .* \+ 1 = 4"),
    ],
)
def test_speculation(changes, message) -> None:
    good = {"algorithm": "EAGLE3", "num_steps": 3, "num_draft_tokens": 4}
    assert SpeculativeConfig(**good).topk == 1
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**(good | changes))


def test_dtype_and_hash() -> None:
    assert TARGET.jnp_dtype == jnp.dtype(jnp.float32)
    assert replace(TARGET, dtype="bfloat16").jnp_dtype == jnp.dtype(jnp.bfloat16)
    assert hash(TARGET) == hash(replace(TARGET))
