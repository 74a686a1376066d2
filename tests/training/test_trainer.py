"""Training reduces the loss, resumes exactly and exports what it trained."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.draft import DraftCheckpoint
from specjax.checkpoints.draft_config import draft_config
from specjax.checkpoints.draft_names import DraftSource
from specjax.checkpoints.export import export_draft
from specjax.checkpoints.tensors import open_directory
from specjax.models.eagle import Eagle3Head
from specjax.training.data import Corpus, draft_vocabulary, pack
from specjax.training.generate import GeneratorConfig, Sampler
from specjax.training.measure import measure_acceptance
from specjax.training.saving import checkpoint_manager, restore_state, save_state
from specjax.training.trainer import TrainConfig


@pytest.fixture(autouse=True)
def _optax_promotes_its_step_count():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def greedy(tiny) -> Corpus:
    """Greedy answers of the tiny target to random prompts."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 61, 4).tolist() for _ in range(48)]
    config = GeneratorConfig(num_rows=48, prefill_rows=48, max_prompt_len=8, max_new_tokens=24)
    answers = Sampler(tiny.flat, tiny.weights, tiny.model, config, ()).generate(
        prompts, [0.0] * 48, 24, 0
    )
    return Corpus.of([(p, a, "greedy") for p, a in zip(prompts, answers, strict=True)])


def _trainer(tiny, corpus, **changes):
    settings = {
        "steps": 60,
        "batch_rows": 8,
        "row_length": 32,
        "ttt_steps": 3,
        "learning_rate": 1e-2,
        "warmup_steps": 4,
    }
    vocabulary = draft_vocabulary(corpus, tiny.draft.draft_vocab_size, tiny.model.vocab_size)
    return tiny.trainer(TrainConfig(**settings | changes), vocabulary)


def _run(trainer, state, rows, last):
    step, stream = trainer.step_function(), trainer.training_batches(rows, int(state.step))
    history = []
    for index in range(int(state.step), last):
        rate = np.float32(trainer.config.rate(index))
        state, statistics = step(state, trainer.target_weights, next(stream), rate, np.float32(0.5))
        history.append(statistics)
    return state, history


def test_training_raises_predicted_and_measured_acceptance(tiny, greedy):
    trainer = _trainer(tiny, greedy)
    rows = pack(greedy, 32, 0)
    start = trainer.init()
    before = measure_acceptance(trainer, start.params, greedy, 3, 32)
    evaluate = trainer.evaluation_function()
    loss_before = trainer.evaluate(evaluate, start.params, rows).loss.sum()
    state, _ = _run(trainer, start, rows, 60)
    figures = trainer.evaluate(evaluate, state.params, rows)
    after = measure_acceptance(trainer, state.params, greedy, 3, 32)
    everything = np.ones(len(greedy), bool)
    # most of what is left is the entropy of a random target's softmax
    assert figures.loss.sum() < 0.9 * loss_before
    assert after.length(everything) > before.length(everything) + 0.5
    assert (after.tokens == greedy.lengths - greedy.prompt_lens - 1).all()
    # every row is a start, the text is greedy, and the vocabulary misses a few tokens only
    assert after.predicted(everything) == pytest.approx(float(figures.accept_length()), abs=0.15)


def test_resumed_training_continues_exactly(tiny, greedy, tmp_path):
    trainer, rows = _trainer(tiny, greedy), pack(greedy, 32, 0)
    whole, _ = _run(trainer, trainer.init(), rows, 12)
    first, _ = _run(trainer, trainer.init(), rows, 7)
    manager = checkpoint_manager(tmp_path / "run")
    assert restore_state(manager, trainer.init()) is None
    save_state(manager, first)
    manager.wait_until_finished()
    manager.close()
    manager = checkpoint_manager(tmp_path / "run")
    restored = restore_state(manager, trainer.init())
    manager.close()
    assert int(restored.step) == 7
    resumed, _ = _run(trainer, restored, rows, 12)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_tables_are_not_trained_and_the_output_head_starts_as_the_targets(tiny, greedy):
    trainer, rows = _trainer(tiny, greedy), pack(greedy, 32, 0)
    state = trainer.init()
    target = dict(zip(tiny.flat.names, tiny.weights, strict=True))
    np.testing.assert_array_equal(
        state.params["lm_head.kernel"], target["embedding.table"][trainer.vocabulary].T
    )
    state, _ = _run(trainer, state, rows, 2)
    head = trainer.flat.rebuild(trainer.weights(state.params))
    ids = head.target_ids(jnp.arange(len(trainer.vocabulary)))
    np.testing.assert_array_equal(ids, trainer.vocabulary)


def test_export_round_trips(tiny, greedy, tmp_path):
    trainer = _trainer(tiny, greedy)
    weights = trainer.named_weights(trainer.init().params)
    export_draft(tmp_path / "head", tiny.draft, weights, max_shard_bytes=8000)
    assert len(list((tmp_path / "head").glob("*.safetensors"))) > 1
    source = DraftSource(open_directory(tmp_path / "head"))
    config = draft_config(
        tmp_path / "head", source, tiny.model, algorithm="EAGLE3", rope_theta=None
    )
    assert config == tiny.draft
    again = DraftCheckpoint(config, tmp_path / "head", source).load_weights()
    assert set(again) == set(weights)
    for name, value in weights.items():
        np.testing.assert_array_equal(again[name], value)
    assert trainer.flat.names == tuple(trainer.flat.of(partial(Eagle3Head, config)).names)


def test_rate_warms_up_and_falls_to_the_final_fraction():
    config = TrainConfig(steps=100, warmup_steps=10, learning_rate=1.0, final_rate_fraction=0.1)
    rates = [config.rate(i) for i in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert all(a > b for a, b in pairwise(rates[9:]))
    assert rates[-1] == pytest.approx(0.1)
    with pytest.raises(ValueError, match="warmup_steps=100"):
        TrainConfig(steps=100, warmup_steps=100)
    with pytest.raises(ValueError, match="hard_weight=2"):
        TrainConfig(hard_weight=2)


def test_a_vocabulary_of_another_size_is_refused(tiny):
    with pytest.raises(ValueError, match="has 5 ids but draft_vocab_size=40"):
        tiny.trainer(TrainConfig(), np.arange(5))
