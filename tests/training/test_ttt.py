"""Training-time test equals what a head computes when it serves."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.eagle import Eagle3Head
from specjax.training.attention import masked_attention, packed_attend, ttt_attend
from specjax.training.data import Corpus, pack
from specjax.training.trainer import TrainConfig, one_per_row, walk_rounds
from specjax.training.ttt import (
    hit_lengths,
    step_mask,
    target_outputs,
    ttt_loss,
    ttt_states,
)

STEPS = 4


def _models(tiny, seed=5):
    trainer = tiny.trainer(TrainConfig(steps=10, warmup_steps=1, ttt_steps=STEPS, seed=seed))
    params = trainer.init().params
    return trainer, tiny.flat.rebuild(tiny.weights), trainer.flat.rebuild(trainer.weights(params))


def _growing_attend(kv, layer, q, k, v):
    """Plain decoding: append to an explicit cache, new rows see the cache and each other."""
    keys, values = (k, v) if kv is None else (jnp.concatenate(p, 1) for p in zip(kv, (k, v)))
    past, new = keys.shape[1] - q.shape[1], q.shape[1]
    mask = jnp.arange(keys.shape[1])[None, :] <= past + jnp.arange(new)[:, None]
    return (keys, values), masked_attention(q, keys, values, mask[None, None])


def _target_features(tiny, target, tokens):
    """Features [n, F] and logits [n, V] of one text by itself."""
    positions = jnp.arange(len(tokens))[None]
    attend = packed_attend(jnp.ones((1, len(tokens)), jnp.int32), "xla")
    ids = jnp.asarray(tokens, jnp.int32)[None]
    hidden, features, _ = target(ids, positions, None, attend, tiny.draft.feature_layers)
    return features, target.logits(hidden)[0]


def _serve(head, target, tokens, features, row, drafts):
    """States of a chain that is drafted from ``row`` with the given draft tokens.

    The head extends over the rows up to ``row`` (feature i with token i + 1, position i) and then
    runs on its own outputs at positions row + 1, row + 2, ... over its explicit cache.
    """
    ids = jnp.asarray(tokens, jnp.int32)
    embeds = head.embed(ids[None, 1 : row + 2], target)
    hidden = head.fuse(features[:, : row + 1])
    out, kv = head(embeds, hidden, jnp.arange(row + 1)[None], None, _growing_attend)
    states = [out[0, -1]]
    for step, draft in enumerate(drafts, start=1):
        embeds = head.embed(jnp.full((1, 1), draft, jnp.int32), target)
        position = jnp.full((1, 1), row + step)
        out, kv = head(embeds, states[-1][None, None], position, kv, _growing_attend)
        states.append(out[0, -1])
    return jnp.stack(states)


def test_unrolled_states_equal_a_recurrent_chain_over_an_explicit_cache(tiny, corpus):
    _, target, head = _models(tiny)
    batch = pack(corpus, 48, 0)
    assert (batch.segments[0].max() >= 2) and (batch.segments == 0).any()
    batch = jax.tree.map(lambda x: x[:2], batch)
    outputs = target_outputs(
        target, batch, jnp.arange(40), tiny.draft.feature_layers, "xla"
    )
    states = list(ttt_states(head, target, batch, outputs.features, STEPS))
    checked = 0
    for line in range(2):
        segments = np.asarray(batch.segments[line])
        for segment in range(1, segments.max() + 1):
            (where,) = np.nonzero(segments == segment)
            tokens = np.asarray(batch.tokens[line, where])
            features, _ = _target_features(tiny, target, tokens)
            np.testing.assert_allclose(
                outputs.features[line, where], features[0], rtol=2e-5, atol=2e-5
            )
            for row in range(0, len(tokens) - 1, 3):
                count = min(STEPS, len(tokens) - 1 - row)
                served = _serve(
                    head, target, tokens, features, row, tokens[row + 2 : row + 1 + count]
                )
                unrolled = jnp.stack([s[line, where[row]] for s in states[:count]])
                np.testing.assert_allclose(unrolled, served, rtol=3e-5, atol=3e-5)
                checked += count
    assert checked > 40


def test_hit_lengths_equal_greedy_drafting(tiny, corpus):
    """Chains drafted with the head's own tokens accept as many as the teacher-forced count says."""
    trainer, target, head = _models(tiny)
    vocabulary = jnp.asarray(trainer.vocabulary, jnp.int32)
    # text of the head's own making at some rows, so that some chains are long
    tokens = list(corpus.sequence(0)[:6])
    while len(tokens) < 24:
        features, _ = _target_features(tiny, target, [*tokens, 0])
        state = _serve(head, target, tokens, features, len(tokens) - 2, [])[0]
        follow = int(vocabulary[head.logits(state, target).argmax()])
        tokens.append(follow if len(tokens) % 5 else (follow + 1) % 61)
    text = Corpus.of([(tokens[:6], tokens[6:], "x")])
    batch = one_per_row(text, np.arange(1), 32, 1)
    outputs = target_outputs(target, batch, vocabulary, tiny.draft.feature_layers, "xla")
    hits = np.asarray(hit_lengths(head, target, batch, outputs.features, vocabulary, STEPS))[0]
    features, _ = _target_features(tiny, target, tokens)
    for row in range(5, len(tokens) - 2):
        drafts: list[int] = []
        for _ in range(STEPS):
            state = _serve(head, target, tokens, features, row, drafts)[-1]
            drafts.append(int(vocabulary[head.logits(state, target).argmax()]))
        following = tokens[row + 2 : row + 2 + STEPS]
        accepted = 0
        for draft, token in zip(drafts, following, strict=False):
            if draft != token:
                break
            accepted += 1
        assert hits[row] == accepted
    assert hits.max() >= 1
    assert not hits[:5].any()


def test_loss_equals_a_plain_computation(tiny, corpus):
    trainer, target, head = _models(tiny)
    vocabulary = np.asarray(trainer.vocabulary)
    batch = jax.tree.map(lambda x: x[:2], pack(corpus, 32, 0))
    outputs = target_outputs(
        target, batch, jnp.asarray(vocabulary), tiny.draft.feature_layers, "xla"
    )
    loss, statistics = ttt_loss(
        head, target, batch, outputs, jnp.asarray(vocabulary, jnp.int32), STEPS, jnp.float32(0.25)
    )
    states = list(ttt_states(head, target, batch, outputs.features, STEPS))
    expected = 0.0
    for step in range(STEPS):
        logs = np.asarray(jax.nn.log_softmax(head.logits(states[step], target), axis=-1))
        rows, reached, accepted = [], 0, 0
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
    assert (statistics.reached[1:] == statistics.accepted[:-1]).all() or (
        statistics.reached[1:] <= statistics.accepted[:-1]
    ).all()
    assert float(statistics.reached[0]) == float(statistics.rows[0])


def test_step_mask_stays_in_the_answer_of_its_own_segment(corpus):
    batch = pack(corpus, 32, 0)
    for step in range(3):
        mask = np.asarray(step_mask(batch, step))
        rows, columns = np.nonzero(mask)
        assert len(rows)
        assert batch.starts[rows, columns].all()
        assert (batch.segments[rows, columns] == batch.segments[rows, columns + 2 + step]).all()
        per_answer = np.maximum(np.minimum(corpus.lengths, 32) - corpus.prompt_lens - 1 - step, 0)
        assert len(rows) == per_answer[np.minimum(corpus.lengths, 32) - corpus.prompt_lens >= 2].sum()


def test_accept_length_telescopes():
    hits = np.asarray([0, 0, 2, 0, 1, 5, 0, 0, 0, 0, 0, 0])
    # rows 2 (2 drafts + bonus), 5 (5 drafts, cut by the end of the text)
    assert walk_rounds(hits, prompt_len=3, length=12) == (2, 8)
    assert walk_rounds(hits, prompt_len=3, length=4) == (0, 0)


@pytest.mark.parametrize("steps", [1, 3])
def test_later_steps_never_see_later_rows(tiny, steps):
    """Changing tokens after the last one a step may use changes no state before it."""
    _, _, head = _models(tiny)
    target = tiny.flat.rebuild(tiny.weights)
    batch = one_per_row(Corpus.of([([1, 2, 3], list(range(4, 20)), "x")]), np.arange(1), 24, 1)
    other = jax.tree.map(np.array, batch)
    other.tokens[0, 12:] = 7
    layers = tiny.draft.feature_layers
    states = []
    for b in (batch, other):
        out = target_outputs(target, b, jnp.arange(40), layers, "xla")
        states.append(list(ttt_states(head, target, b, out.features, steps))[-1])
    reach = 12 - steps  # step j at row i reads token i + 1 + j
    np.testing.assert_array_equal(states[0][0, :reach], states[1][0, :reach])
    assert not np.array_equal(states[0][0, reach], states[1][0, reach])


def test_first_step_attention_is_causal_attention(tiny):
    key = jax.random.key(0)
    q, k, v = (jax.random.normal(s, (2, 9, h, 8)) for s, h in zip(jax.random.split(key, 3), (4, 2, 2)))
    segments = jnp.asarray([[1] * 5 + [2] * 4, [1] * 7 + [0] * 2])
    _, ours = ttt_attend(segments)((), 0, q, k, v)
    _, packed = packed_attend(segments, "xla")(None, 0, q, k, v)
    np.testing.assert_allclose(ours, packed, rtol=1e-5, atol=1e-6)
    assert partial(Eagle3Head) is not None
