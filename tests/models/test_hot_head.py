"""The columns of the target's output head that a draft keeps, against numpy."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config import HotVocabulary, ModelConfig, Quantization
from specjax.models.flat import Networks
from specjax.models.hot_head import hot_columns
from specjax.models.weights import QuantArray
from specjax.speculative.algorithm import SpeculativeAlgorithm
from specjax.testing import EAGLE3, TARGET, random_weights

IDS = np.array([0, 3, 4, 17, 30, 31, 59, 60], np.int32)
HOT = dataclasses.replace(
    EAGLE3,
    checkpoint_format="eagle-1",
    draft_vocab_size=TARGET.vocab_size,
    feature_layers=(),
    has_own_lm_head=False,
)
SMALL = dataclasses.replace(TARGET, num_layers=1)
GROUPED = Quantization("int4", group=8, has_zeros=True)
TARGETS: dict[str, Any] = {
    "whole": {},
    "tied": {"tie_word_embeddings": True},
    "scaled": {"logit_scale": 0.25, "logit_softcap": 3.0},
    "fp8": {"quantization": Quantization("fp8")},
    "int4": {"quantization": GROUPED},
    "fp8 with a whole head": {"quantization": Quantization("fp8", plain=("lm_head",))},
}


def networks(target: ModelConfig, format: Quantization | None) -> Networks:
    head = dataclasses.replace(HOT, hot=HotVocabulary(len(IDS), format, ""))
    return SpeculativeAlgorithm.EAGLE.networks(target, head)


def table_of(named: dict[str, Any], target: ModelConfig) -> np.ndarray:
    """The output head [D, V] in float64."""
    if target.tie_word_embeddings:
        return np.asarray(named["embedding.table"], np.float64).T
    if "lm_head.kernel" in named:
        return np.asarray(named["lm_head.kernel"], np.float64)
    leaves = (named.get(f"lm_head.kernel.{x}") for x in ("values", "scale", "offset"))
    values, scale, offset = (None if x is None else np.asarray(x, np.float64) for x in leaves)
    parts, outputs, size = values.shape
    grouped = values.reshape(parts, outputs, scale.shape[2], -1) * scale[..., None]
    if offset is not None:
        grouped += offset[..., None]
    return grouped.transpose(0, 2, 3, 1).reshape(parts * size, outputs)[: target.hidden_size]


@pytest.mark.parametrize("name", TARGETS)
def test_logits_are_those_of_the_target_for_these_tokens(name: str) -> None:
    target = dataclasses.replace(SMALL, **TARGETS[name])
    has_format = target.quantization is not None and not target.quantization.plain
    nets = networks(target, target.quantization if has_format else None)
    weights = random_weights(nets.target, 0)
    draft = dict(zip(nets.draft.names, random_weights(nets.draft, 1), strict=True))
    draft["hot_head.offsets"] = jnp.asarray(IDS - np.arange(len(IDS), dtype=np.int32))
    draft |= hot_columns(nets, weights, draft)
    head = nets.draft.rebuild(tuple(draft[name] for name in nets.draft.names))
    assert isinstance(head.hot_head.kernel[...], QuantArray) == has_format
    hidden = np.random.default_rng(2).normal(size=(2, 3, target.hidden_size)).astype(np.float32)
    ours = head.logits(jnp.asarray(hidden), nets.target.rebuild(weights))

    named = dict(zip(nets.target.names, weights, strict=True))
    theirs = hidden @ table_of(named, target)[:, IDS] * target.logit_scale
    if (cap := target.logit_softcap) is not None:
        theirs = cap * np.tanh(theirs / cap)
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
    assert head.vocabulary.tolist() == IDS.tolist()
    assert head.target_ids(jnp.array([7, 0])).tolist() == [60, 0]


def test_a_draft_with_a_vocabulary_of_its_own_takes_no_columns() -> None:
    nets = SpeculativeAlgorithm.EAGLE3.networks(TARGET, EAGLE3)
    assert hot_columns(nets, random_weights(nets.target, 0), {}) == {}


def test_columns_count_as_weights() -> None:
    whole = SpeculativeAlgorithm.EAGLE.networks(SMALL, HOT).weight_bytes
    assert networks(SMALL, None).weight_bytes - whole == 4 * len(IDS) * (TARGET.hidden_size + 1)
