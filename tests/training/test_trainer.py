"""Training reduces the loss, resumes exactly and exports the trained weights."""

from dataclasses import fields, replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.decoder import CausalLM
from specjax.models.experts import MixtureConfig
from specjax.models.flat import FlatModel
from specjax.testing import random_weights
from specjax.training.data import Corpus, batches, draft_vocabulary, pack
from specjax.training.trainer import (
    TrainConfig,
    Trainer,
    checkpoint_manager,
    restore_state,
    save_state,
)


@pytest.fixture(autouse=True)
def _optax_promotes_its_step_count():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def greedy(sampler) -> Corpus:
    """Greedy answers of the tiny target to random prompts."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 61, 4).tolist() for _ in range(48)]
    answers = sampler.generate(prompts, [0.0] * 48, 24, 0)
    return Corpus.of([(p, a, "greedy") for p, a in zip(prompts, answers, strict=True)])


@pytest.fixture(scope="module")
def trainer(tiny, greedy) -> Trainer:
    """A trainer that the tests share, so that its step compiles once."""
    config = TrainConfig(
        steps=60,
        batch_rows=8,
        row_length=32,
        ttt_steps=3,
        learning_rate=1e-2,
        warmup_steps=4,
        hard_weight=0.5,
    )
    vocabulary = draft_vocabulary(greedy, tiny.draft.draft_vocab_size, tiny.model.vocab_size)
    return tiny.trainer(config, vocabulary)


def _run(trainer, state, rows, last):
    config = trainer.config
    first = int(state.step)
    stream = batches(rows, config.batch_rows, config.seed, first)
    for _ in range(first, last):
        state, _ = trainer.step(state, trainer.target_weights, next(stream))
    return state


@pytest.mark.slow
def test_training_raises_acceptance(trainer, greedy):
    rows = pack(greedy, 32, 0)
    start = trainer.init()
    before = trainer.evaluate(start.params, rows)
    state = _run(trainer, start, rows, 60)
    figures = trainer.evaluate(state.params, rows)
    # most of the remaining loss is the entropy of a random target's softmax
    assert figures.loss.sum() < 0.9 * before.loss.sum()
    assert figures.accept_length() > before.accept_length() + 0.5
    with pytest.raises(ValueError, match="no rows are held out, but evaluation needs some"):
        trainer.evaluate(state.params, pack(Corpus(), 32, 0))


@pytest.mark.slow
def test_a_head_learns_from_a_mixture(tiny, corpus):
    config = TrainConfig(
        steps=40, batch_rows=8, row_length=32, ttt_steps=2, learning_rate=1e-2, warmup_steps=2
    )
    sizes = {field.name: getattr(tiny.model, field.name) for field in fields(tiny.model)}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    model = MixtureConfig(**sizes | experts | {"model_type": "qwen3_moe"})
    flat = FlatModel.of(partial(CausalLM, model))
    trainer = replace(tiny, model=model, flat=flat, weights=random_weights(flat, 0)).trainer(config)
    rows = pack(corpus, 32, 0)
    start = trainer.init()
    before = trainer.evaluate(start.params, rows).loss.sum()
    state = _run(trainer, start, rows, 40)
    assert trainer.evaluate(state.params, rows).loss.sum() < 0.95 * before


@pytest.mark.slow
def test_resumed_training_continues_exactly(trainer, greedy, tmp_path):
    rows = pack(greedy, 32, 0)
    whole = _run(trainer, trainer.init(), rows, 12)
    first = _run(trainer, trainer.init(), rows, 7)
    manager = checkpoint_manager(tmp_path / "run")
    assert restore_state(manager, trainer.init(), trainer.vocabulary) is None
    save_state(manager, first, trainer.vocabulary)
    manager.wait_until_finished()
    manager.close()
    manager = checkpoint_manager(tmp_path / "run")
    restored = restore_state(manager, trainer.init(), trainer.vocabulary)
    manager.close()
    assert int(restored.step) == 7
    resumed = _run(trainer, restored, rows, 12)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_tables_are_not_trained_and_the_output_head_starts_with_the_targets(tiny, trainer, greedy):
    rows = pack(greedy, 32, 0)
    state = trainer.init()
    target = dict(zip(tiny.flat.names, tiny.weights, strict=True))
    np.testing.assert_array_equal(
        state.params["lm_head.kernel"], target["embedding.table"][trainer.vocabulary].T
    )
    state = _run(trainer, state, rows, 2)
    head = trainer.head(state.params)
    ids = head.target_ids(jnp.arange(len(trainer.vocabulary)))
    np.testing.assert_array_equal(ids, trainer.vocabulary)


def test_rate_warms_up_and_decays():
    config = TrainConfig(steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [float(config.rate(i)) for i in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert all(a > b for a, b in pairwise(rates[9:]))
    assert rates[-1] == pytest.approx(0.02)
