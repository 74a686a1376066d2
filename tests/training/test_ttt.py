"""Training-time test computes the same states as a head during serving."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel
from specjax.models.layers import dense_attention, rotated
from specjax.testing import TARGET, random_weights
from specjax.testing.dense import dense_logits
from specjax.training.data import pack
from specjax.training.trainer import TrainConfig
from specjax.training.ttt import (
    StepStatistics,
    packed_attend,
    target_outputs,
    ttt_loss,
    ttt_states,
)

STEPS = 3


def _models(tiny, seed=5):
    trainer = tiny.trainer(TrainConfig(steps=10, warmup_steps=1, ttt_steps=STEPS, seed=seed))
    params = trainer.init().params
    return trainer, tiny.flat.rebuild(tiny.weights), trainer.head(params)


def _server(head, target, size=48):
    """Serve one row at a time over an explicit cache: ``(cache, slot, token, hidden)``.

    The slot is the rotary position. The row sees the cache up to its own slot.
    """

    @jax.jit
    def step(cache, slot, token, hidden):
        @rotated
        def attend(cache, layer, q, k, v):
            keys = jax.lax.dynamic_update_slice_in_dim(cache[0], k, slot, axis=1)
            values = jax.lax.dynamic_update_slice_in_dim(cache[1], v, slot, axis=1)
            mask = (jnp.arange(size) <= slot)[None, None, None]
            return (keys, values), dense_attention(q, keys, values, mask=mask)

        embeds = head.embed(token[None, None], target)
        out, cache = head(embeds, hidden[None, None], slot[None, None], cache, attend)
        return out[0, 0], cache

    def run(cache, slot, token, hidden):
        return step(cache, jnp.int32(slot), jnp.int32(token), hidden)

    shape = (1, size, head.config.num_kv_heads, head.config.head_dim)
    return run, (jnp.zeros(shape), jnp.zeros(shape))


def _states(head, target, batch, features, steps=STEPS):
    """Recurrent states [S, B, T, D] of the unrolled draft."""
    run = jax.jit(lambda b, f: jnp.stack(list(ttt_states(head, target, b, f, steps))))
    return np.asarray(run(batch, features))


def _featurizer(tiny, target, head, size=48):
    """Function from the tokens of one text to its features [n, F] and fused features [size, D]."""

    @jax.jit
    def run(ids, segments):
        attend = packed_attend(segments)
        return target(ids, jnp.arange(size)[None], None, attend, tiny.draft.feature_layers)[1]

    def features(tokens):
        ids = np.zeros((1, size), np.int32)
        ids[0, : len(tokens)] = tokens
        found = run(ids, (np.arange(size) < len(tokens)).astype(np.int32)[None])
        return np.asarray(found)[0, : len(tokens)]

    fuse_rows = jax.jit(head.fuse)

    def fuse(features):
        return np.asarray(fuse_rows(np.pad(features, ((0, size - len(features)), (0, 0)))[None]))[0]

    return features, fuse


def _outputs(tiny, target, batch, vocabulary):
    layers = tiny.draft.feature_layers
    return jax.jit(lambda b: target_outputs(target, b, vocabulary, layers))(batch)


@pytest.mark.slow
@pytest.mark.parametrize("norms", [True, False])
def test_unrolled_states_equal_a_recurrent_chain_over_an_explicit_cache(tiny, corpus, norms):
    draft = dataclasses.replace(tiny.draft, has_fc_norm=norms, norm_output=norms)
    _, target, head = _models(dataclasses.replace(tiny, draft=draft))
    batch = pack(corpus, 48, 0)
    assert batch.segments[0].max() >= 2
    assert (batch.segments == 0).any()
    batch = jax.tree.map(lambda x: x[:2], batch)
    outputs = _outputs(tiny, target, batch, jnp.arange(40))
    states = _states(head, target, batch, outputs.features)
    run, empty = _server(head, target)
    features_of, fuse = _featurizer(tiny, target, head)
    checked = 0
    for line in range(2):
        segments = np.asarray(batch.segments[line])
        for segment in range(1, segments.max() + 1):
            (where,) = np.nonzero(segments == segment)
            tokens = np.asarray(batch.tokens[line, where])
            features = features_of(tokens)
            np.testing.assert_allclose(
                outputs.features[line, where], features, rtol=2e-5, atol=2e-5
            )
            fused, cache = fuse(features), empty
            for row in range(len(tokens) - 1):
                state, cache = run(cache, row, tokens[row + 1], fused[row])
                chain = cache
                for step in range(STEPS):
                    np.testing.assert_allclose(
                        states[step, line, where[row]], state, rtol=3e-5, atol=3e-5
                    )
                    checked += 1
                    if row + step + 2 == len(tokens):
                        break
                    state, chain = run(chain, row + step + 1, tokens[row + step + 2], state)
    assert checked > 150


@pytest.mark.slow
def test_loss_equals_a_plain_computation(tiny, corpus):
    trainer, target, head = _models(tiny)
    vocabulary = np.asarray(trainer.vocabulary)
    batch = jax.tree.map(lambda x: x[:2], pack(corpus, 32, 0))
    ids = jnp.asarray(vocabulary, jnp.int32)
    outputs = _outputs(tiny, target, batch, ids)
    loss, statistics = jax.jit(lambda b, o: ttt_loss(head, target, b, o, ids, STEPS, 0.25))(
        batch, outputs
    )
    states = _states(head, target, batch, outputs.features)
    log_softmax = jax.jit(lambda s: jax.nn.log_softmax(head.logits(s, target), axis=-1))
    outputs = jax.tree.map(np.asarray, outputs)
    expected = 0.0
    for step in range(STEPS):
        logs = np.asarray(log_softmax(states[step]))
        rows = []
        for line in range(2):
            segments, starts = np.asarray(batch.segments[line]), np.asarray(batch.starts[line])
            for i in np.flatnonzero(starts):
                goal = i + 1 + step
                if goal + 1 >= 32 or segments[goal + 1] != segments[i]:
                    continue
                probs = np.exp(np.asarray(outputs.draft_logits[line, goal], np.float64))
                probs /= probs.sum()
                best = int(outputs.argmax[line, goal])
                if best in vocabulary:
                    hard = logs[line, i, list(vocabulary).index(best)]
                    rows.append(-0.75 * float(probs @ logs[line, i]) - 0.25 * float(hard))
        assert statistics.weight[step] == len(rows)
        np.testing.assert_allclose(statistics.loss[step], sum(rows), rtol=1e-4)
        expected += 0.8**step * np.mean(rows)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    assert (statistics.reached[1:] <= statistics.accepted[:-1]).all()
    assert float(statistics.reached[0]) == float(statistics.rows[0])


def test_accept_length_telescopes():
    """Two steps with an acceptance rate of 1/2 each give 1 + 1/2 + 1/4."""
    reached, accepted = jnp.array([8.0, 4.0]), jnp.array([4.0, 2.0])
    statistics = StepStatistics(reached, reached, reached, reached, accepted)
    assert statistics.accept_length() == 1.75


def test_packed_texts_are_those_of_a_family_with_windows_and_soft_caps():
    options = {"windows": (4, 0), "attention_softcap": 0.5, "logit_softcap": 2.0}
    config = dataclasses.replace(TARGET, model_type="ministral", **options)
    flat = FlatModel.of(partial(CausalLM, config))
    weights = random_weights(flat, 0)
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(1, 20))
    texts, positions = np.repeat([[1, 2]], (12, 8), axis=1), np.r_[:12, :8][None]

    @jax.jit
    def logits(tokens, positions):
        model = flat.rebuild(weights)
        return model.logits(model(tokens, positions, None, packed_attend(texts))[0])[0]

    found = np.asarray(logits(np.int32(tokens), np.int32(positions)))
    for begin, end in ((0, 12), (12, 20)):
        expected = dense_logits(weights, tokens[0, begin:end], config)
        np.testing.assert_allclose(found[begin:end], expected, atol=1e-5)
