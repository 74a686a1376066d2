"""Drafts drawn with the target's noise."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.kernels.draw_tokens import position_noise

from specjax.models.columns import Columns
from specjax.models.shards import AXIS
from specjax.sampling.accept_draws import Acceptance
from specjax.sampling.draw import SamplingConfig, draft_tokens, target_tokens
from specjax.sampling.logit_processor import LogitInputs
from specjax.sampling.params import SamplingParams
from specjax.speculative.tree import chain_input
from specjax.testing import kept_by_sorting

from ..support.lowering import lower_for_cuda
from ..support.sampling_tables import sampling_rows

VOCAB = 61
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.3, top_k=9, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0.6, top_p=0.7),
]
POSITIONS = jnp.asarray([[3, 4], [8, 9], [20, 21], [0, 1]], jnp.int32)
RNG = np.random.default_rng(3)
LOGITS = jnp.asarray(3 * RNG.normal(size=(4, 2, VOCAB)), jnp.float32)
IDS = RNG.choice(VOCAB, 40, replace=False).astype(np.int32)
jit_drafts = jax.jit(draft_tokens, static_argnames=("config", "topk"))


def table():
    return sampling_rows(PARAMS, VOCAB)


@pytest.mark.slow
def test_a_perfect_draft_draws_what_the_target_draws():
    config = SamplingConfig()
    tree = chain_input(jnp.zeros((4, 2), jnp.int32), POSITIONS[:, 0] - 1)
    slots, history = jnp.arange(4, dtype=jnp.int32), jnp.zeros((4, 16), jnp.int32)
    drawn, _ = target_tokens(LOGITS, tree, LogitInputs(table(), history, slots), config)
    probs, drafts = jit_drafts(LOGITS, None, POSITIONS, table(), config=config, topk=1)
    assert drafts[..., 0].tolist() == drawn.tolist()
    assert (np.asarray(probs) == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("topk", [1, 4])
def test_columns_follow_noise_and_filters(topk):
    """Columns of a smaller vocabulary use the noise of their tokens."""
    logits = LOGITS[..., :40]
    config = SamplingConfig()
    probs, drafts = jit_drafts(logits, IDS, POSITIONS, table(), config=config, topk=topk)
    for b, params in enumerate(PARAMS):
        for i in range(2):
            row = np.asarray(logits[b, i], np.float64)
            if not params.is_greedy:
                row = row / params.temperature
                top_k = VOCAB if params.top_k == -1 else params.top_k
                kept, _ = kept_by_sorting(row, top_k, params.top_p, params.min_p)
                seed = jnp.asarray([[0, b]], jnp.uint32)
                noise = np.asarray(position_noise(seed, POSITIONS[b, i : i + 1], VOCAB))[0]
                row = row + noise[IDS]
                row[list(set(range(40)) - kept)] = -np.inf
            best = np.argsort(-row, kind="stable")[:topk]
            assert drafts[b, i].tolist() == best.tolist()
            if topk > 1:
                weights = np.exp(row - row.max())
                np.testing.assert_allclose(probs[b, i], (weights / weights.sum())[best], rtol=1e-4)


@pytest.mark.parametrize("topk", [1, 4])
def test_a_greedy_batch_needs_no_noise(topk):
    rows = sampling_rows([PARAMS[0]] * 4, VOCAB)
    found = [
        jit_drafts(LOGITS, None, POSITIONS, rows, config=SamplingConfig(greedy=g), topk=topk)
        for g in (False, True)
    ]
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("topk", "reads"), [(1, False), (1, True), (4, True)])
def test_devices_with_own_columns_find_the_drafts_of_whole_rows(topk, reads):
    """Three devices, as a batch with the axis of a mesh; 61 columns leave two for padding."""
    rows, config = sampling_rows([PARAMS[0]] * 4, VOCAB), SamplingConfig(greedy=True)
    config = replace(config, reads_confidence=reads)
    logits = LOGITS.at[0, 0, 7].set(jnp.inf).at[1].set(-jnp.inf).at[2, 0, 9].set(jnp.nan)
    pieces = jnp.stack(jnp.split(jnp.pad(logits, ((0, 0), (0, 0), (0, 2))), 3, axis=-1))

    def of_device(own):
        return draft_tokens(Columns(own, VOCAB, 3), None, POSITIONS, rows, config, topk)

    found = jax.jit(jax.vmap(of_device, axis_name=AXIS))(pieces)
    probs, drafts = jit_drafts(logits, None, POSITIONS, rows, config=config, topk=topk)
    for device in range(3):
        np.testing.assert_array_equal(found[1][device], drafts)
        np.testing.assert_allclose(found[0][device], probs, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("topk", [1, 4])
def test_drafts_on_a_gpu_do_not_wait_for_the_host(topk):
    """The K best are one composite; a backend without it would run a sort."""
    config = SamplingConfig(implementation="pallas")
    text = lower_for_cuda(
        lambda *arguments: draft_tokens(*arguments, config, topk),
        LOGITS[..., :40],
        jnp.asarray(IDS),
        POSITIONS,
        table(),
    )
    assert "specjax_logit_thresholds" in text
    assert not re.search(r"stablehlo\.(case|if|while)", text)
    assert text.count("stablehlo.sort") == (topk > 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"processed": True},
        {"acceptance": Acceptance(uses_rejection=True)},
        {"acceptance": Acceptance(threshold_acc=0.5)},
    ],
    ids=str,
)
def test_draws_on_a_gpu_do_not_wait_for_the_host(options):
    """An XLA conditional or loop makes the host read back a value within the round."""
    config = SamplingConfig(max_top_logprobs=4, implementation="pallas", **options)

    def tokens(logits, probs, sampling):
        tree = chain_input(jnp.ones((4, 2), jnp.int32), POSITIONS[:, 0])
        tree = replace(tree, draft_probs=probs)
        slots, history = jnp.arange(4, dtype=jnp.int32), jnp.zeros((4, 16), jnp.int32)
        return target_tokens(logits, tree, LogitInputs(sampling, history, slots), config)

    text = lower_for_cuda(tokens, LOGITS, LOGITS[:, :1], table())
    assert text.count("specjax_") >= 3
    assert not re.search(r"stablehlo\.(case|if|while|sort)|chlo\.top_k", text)


def test_nan_is_not_proposed():
    """Its score is 0; columns are in range."""
    broken = jnp.full((4, 2, VOCAB), jnp.nan)
    probs, drafts = jit_drafts(broken, None, POSITIONS, table(), config=SamplingConfig(), topk=3)
    assert not np.asarray(probs).any()
    assert ((np.asarray(drafts) >= 0) & (np.asarray(drafts) < VOCAB)).all()
