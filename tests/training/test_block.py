"""Training of block drafters: anchors, the loss against one block at a time, and the whole run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Engine
from specjax.checkpoints.export import export_draft
from specjax.models.layers import dense_attention, rotated
from specjax.models.rope import rope_tables
from specjax.training import block as training
from specjax.training.block import (
    BlockTrainer,
    block_draft_config,
    context_store,
    draw_anchors,
    feature_scale,
)
from specjax.training.data import Corpus, batches, pack
from specjax.training.trainer import TrainConfig
from specjax.training.ttt import PackedBatch, packed_attend

from ..support.model_files import write_model

NUM_DRAFTS = 3


@pytest.fixture(autouse=True)
def _optax_promotes_its_step_count():
    with jax.numpy_dtype_promotion("standard"):
        yield


@rotated
def whole_attend(kv, layer, q, k, v):
    """Attention of one block over its whole context and itself."""
    keys, values = (jnp.concatenate(x, axis=1) for x in zip(kv[layer], (k, v), strict=True))
    return kv, dense_attention(q, keys, values)


@pytest.mark.slow
def test_anchors_are_tokens_of_answers_with_a_draft_after_them(corpus):
    rows = pack(corpus, 48, 0, 0.5)
    anchors = draw_anchors(jax.tree.map(jnp.asarray, rows), 40, NUM_DRAFTS, jax.random.key(0))
    for line in range(len(rows.tokens)):
        segments, starts = rows.segments[line], rows.starts[line]
        expected = {
            p
            for p in range(1, 47)
            if starts[p - 1] and segments[p - 1] == segments[p] == segments[p + 1] > 0
        }
        real = anchors.is_real[line]
        assert set(anchors.rows[line][real].tolist()) == expected
        for p, drafted in zip(
            anchors.rows[line][real].tolist(), anchors.is_drafted[line][real], strict=True
        ):
            inside = [p + j < 48 and segments[min(p + j, 47)] == segments[p] for j in (1, 2, 3)]
            assert drafted.tolist() == inside
        assert not anchors.is_drafted[line][~real].any()


@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_the_last_feature_is_the_deepest(tiny, count):
    model = dataclasses.replace(tiny.model, num_layers=count)
    layers = block_draft_config(model, draft_vocab_size=61).feature_layers
    assert layers == {3: (-1, 0, 1), 4: (0, 1, 1), 5: (1, 1, 1), 8: (1, 3, 4)}[count]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(x, marks=pytest.mark.slow) for x in ("reduced", "whole")), "dflash", "rnn"],
)
def test_loss_equals_one_block_at_a_time(tiny, corpus, kind, monkeypatch):
    monkeypatch.setattr(training, "BLOCKS_AT_ONCE", 16)
    monkeypatch.setattr(training, "GROUP", 5)
    changes = {"num_layers": 2, "num_drafts": NUM_DRAFTS, "markov_rank": 6}
    changes["draft_vocab_size"] = 40 if kind == "reduced" else 61
    if kind == "rnn":
        changes["markov_head"] = "rnn"
    if kind == "dflash":
        changes |= {"anchor_first": False, "markov_head": None, "markov_rank": 0}
        changes |= {"has_confidence_head": False, "confidence_with_markov": False}
    config = block_draft_config(tiny.model, **changes)
    vocabulary = np.sort(np.random.default_rng(3).permutation(61)[: config.draft_vocab_size])
    options = TrainConfig(batch_rows=2, row_length=32, anchors=9, hard_weight=0.6)
    scale = np.random.default_rng(4).uniform(0.2, 5.0, config.feature_size)
    trainer = BlockTrainer(options, config, tiny.flat, tiny.weights, vocabulary, scale)
    batch = jax.tree.map(lambda x: jnp.asarray(x[:2]), pack(corpus, 32, 0, 0.5))
    params = trainer.init().params
    draft, target = trainer.head(params), tiny.flat.rebuild(tiny.weights)
    _, found = jax.jit(trainer.loss)(draft, target, batch, jnp.int32(0))
    layers = config.feature_layers
    hidden, features, _ = target(
        batch.tokens, batch.positions, None, packed_attend(batch.texts), layers
    )
    wanted = np.asarray(target.logits(hidden))
    key = jax.random.fold_in(jax.random.key(0), 0)
    anchors = draw_anchors(batch, options.anchors, NUM_DRAFTS, key)
    sums = np.zeros((5, NUM_DRAFTS))
    for line, i in np.argwhere(np.asarray(anchors.is_real)):
        p = int(anchors.rows[line, i])
        first = p - int(batch.positions[line, p])
        where = slice(first, p)
        kv = draft.store(
            features[line : line + 1, where],
            batch.positions[line : line + 1, where],
            (),
            context_store,
        )
        ids = [int(batch.tokens[line, p])] + [config.mask_token_id] * (config.block - 1)
        positions = p - first + jnp.arange(config.block)[None]
        states, _ = draft(jnp.asarray([ids]), positions, kv, whole_attend, whole_attend, target)
        states = states[0, -NUM_DRAFTS:]
        memory, alive = None if draft.markov is None else draft.markov.start(1), True
        for j in range(NUM_DRAFTS):
            if p + j + 1 >= 32 or batch.segments[line, p + j + 1] != batch.segments[line, p]:
                break
            logits = draft.logits(states[j : j + 1], target)
            if draft.markov is not None:
                token = batch.tokens[line, p + j][None]
                bias, memory = draft.markov(token, states[j : j + 1], memory)
                logits = logits + bias
            logits = np.asarray(logits[0], np.float64)
            row, best = wanted[line, p + j], int(wanted[line, p + j].argmax())
            normalized = logits - np.logaddexp.reduce(logits)
            sums[2:4, j] += 1, alive
            alive = alive and vocabulary[logits.argmax()] == best
            sums[4, j] += alive
            if best in vocabulary:
                label = list(vocabulary).index(best)
                draft_probs, probs = (np.exp(x / 0.8) for x in (normalized, row[vocabulary]))
                pair = draft_probs / draft_probs.sum(), probs / probs.sum()
                accepted = np.minimum(*pair).sum()
                sums[0, j] -= 0.4 * np.log(accepted) + 0.6 * normalized[label]
                sums[1, j] += 1
    assert sums[1].min() > 0
    np.testing.assert_allclose(np.stack(found), sums, rtol=1e-4)


@pytest.mark.slow
def test_weights_of_the_context_are_those_of_the_layers(tiny):
    config = block_draft_config(tiny.model, draft_vocab_size=61, num_layers=2)
    scale = np.full(config.feature_size, 4.0)
    trainer = BlockTrainer(TrainConfig(), config, tiny.flat, tiny.weights, np.arange(61), scale)
    params = trainer.init().params
    np.testing.assert_allclose(trainer.named_weights(params)["fc.kernel"] * 4, params["fc.kernel"])
    assert "context.kernel" not in params
    target = dict(zip(tiny.flat.names, tiny.weights, strict=True))
    last = tiny.model.num_layers - 1
    for part in ("attention.output.kernel", "mlp.down.kernel", "input_norm.scale"):
        ours = params[f"layers.{config.num_layers - 1}.{part}"]
        np.testing.assert_array_equal(ours, target[f"layers.{last}.{part}"])
    draft = trainer.head(params)
    x = jax.random.normal(jax.random.key(1), (1, 4, config.feature_size))
    positions = jnp.arange(4)[None]
    rope = rope_tables(config.rope, positions)
    context = draft.hidden_norm(draft.fc(x))
    stored = draft.store(x, positions, (), context_store)
    for layer, both in zip(draft.layers, stored, strict=True):
        _, expected = layer.attention(
            context, rope, (), 0, lambda kv, i, q, k, v, rope: (context_store(kv, i, k, v, rope), q)
        )
        for ours, theirs in zip(both, expected[0], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_serving_accepts_as_training_predicts(tiny, sampler, tmp_path):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 61, 4).tolist() for _ in range(48)]
    answers = sampler.generate(prompts, [0.0] * 48, 24, 0)
    corpus = Corpus.of([(p, a, "greedy") for p, a in zip(prompts, answers, strict=True)])
    config = block_draft_config(
        tiny.model, draft_vocab_size=61, num_layers=2, num_drafts=NUM_DRAFTS, markov_rank=8
    )
    options = TrainConfig(
        steps=120, batch_rows=8, row_length=32, anchors=24, learning_rate=1e-2, warmup_steps=8
    )
    rows = pack(corpus, 32, 0)
    scale = feature_scale(
        tiny.flat, tiny.weights, config.feature_layers, PackedBatch(*(x[:2] for x in rows))
    )
    trainer = BlockTrainer(options, config, tiny.flat, tiny.weights, np.arange(61), scale)
    state, stream = trainer.init(), batches(rows, 8, 0)
    for _ in range(options.steps):
        state, _ = trainer.step(state, trainer.target_weights, next(stream))
    predicted = trainer.evaluate(state.params, rows).accept_length()
    assert predicted > 1.8
    export_draft(tmp_path / "draft", config, trainer.named_weights(state.params))
    target = write_model(tmp_path / "target", tiny.model)
    with Engine(
        str(target),
        draft=str(tmp_path / "draft"),
        speculative_algorithm="DSPARK",
        skip_tokenizer_init=True,
        context_length=64,
        max_running_requests=4,
        batch_buckets=[4],
        show_progress=False,
        compile_on_use=True,
    ) as engine:
        found = engine.generate(
            input_ids=prompts, sampling_params={"temperature": 0.0, "max_new_tokens": 24}
        )
    assert [one["output_ids"] for one in found] == answers
    verifies = sum(one["meta_info"]["spec_verify_ct"] for one in found)
    # prefill makes the first token of each answer
    measured = (sum(map(len, answers)) - len(answers)) / verifies
    assert measured == pytest.approx(predicted, abs=0.35)
