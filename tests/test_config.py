"""Configurations reject invalid values with an error that names the value and the reason."""

from dataclasses import replace

import pytest

from specjax.config import RopeScaling
from specjax.testing import EAGLE3, TARGET

from .support.runners import EAGLE


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (TARGET, {"vocab_size": 0}, "vocab_size=0 must be an integer of at least 1"),
        (TARGET, {"hidden_size": 1.5}, "hidden_size=1.5"),
        (TARGET, {"num_layers": -1}, "num_layers=-1"),
        (TARGET, {"max_position_embeddings": 0}, "max_position_embeddings=0"),
        (TARGET, {"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        (TARGET, {"head_dim": 7}, "head_dim=7 must be even"),
        (TARGET, {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        (TARGET, {"rms_norm_eps": -1e-5}, "rms_norm_eps=-1e-05"),
        (TARGET, {"rope_theta": 0.0}, "rope_theta=0.0"),
        (TARGET, {"rope_theta": float("inf")}, "rope_theta=inf"),
        (TARGET, {"dtype": "float16"}, "dtype='float16' is not one of"),
        (EAGLE3, {"checkpoint_format": "EAGLE3"}, "checkpoint_format='EAGLE3'"),
        (EAGLE3, {"draft_vocab_size": 62}, "draft_vocab_size=62 must .* 61"),
        (EAGLE3, {"draft_vocab_size": 0}, "draft_vocab_size=0"),
        (EAGLE3, {"feature_layers": ()}, "needs feature_layers"),
        (EAGLE3, {"num_layers": 2}, "num_layers=2: an EAGLE-3 head has exactly 1"),
        (EAGLE, {"num_heads": 5}, "num_heads=5"),
    ],
)
def test_models_and_heads(config, changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        replace(config, **changes)


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
        ({"rope_type": "ntk"}, "rope_type='ntk' is not supported; supported: 'linear', 'dynamic'"),
        ({"rope_type": "linear", "factor": 0.5}, "factor=0.5"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor=nan"),
        ({"rope_type": "llama3", "low_freq_factor": 4.0}, "low_freq_factor=4.0 must be below"),
    ],
)
def test_rope_scaling(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        RopeScaling(**arguments)
