"""Generated text equals one-by-one decoding, whatever the batch and its refills."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training import generate
from specjax.training.generate import Sampler
from specjax.training.ttt import packed_attend

SIZE = 32


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr(generate, "CHUNK_STEPS", 4)


def _sampler(tiny, stops=(7,), **changes):
    settings = {
        "model": tiny.model,
        "num_rows": 3,
        "prefill_rows": 2,
        "max_prompt_len": 12,
        "max_new_tokens": 14,
    }
    return Sampler(flat=tiny.flat, weights=tiny.weights, stop_ids=stops, **settings | changes)


@pytest.fixture(scope="module")
def logits_of(tiny):
    """Logits [SIZE, V] of one text by itself, as a function of its tokens."""

    @jax.jit
    def run(weights, ids, segments):
        model = tiny.flat.rebuild(weights)
        attend = packed_attend(segments)
        return model.logits(model(ids, jnp.arange(SIZE)[None], None, attend)[0])[0]

    def logits(tokens):
        ids = np.zeros((1, SIZE), np.int32)
        ids[0, : len(tokens)] = tokens
        segments = (np.arange(SIZE) < len(tokens)).astype(np.int32)[None]
        return np.asarray(run(tiny.weights, ids, segments))

    return logits


def _greedy(logits_of, prompt, count):
    """Greedy decoding that runs the whole text again for every token."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(int(logits_of(tokens)[len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(2)
    return [rng.integers(0, 61, n).tolist() for n in (3, 12, 1, 7, 5, 9, 12, 2)]


def test_greedy_equals_decoding_alone(tiny, logits_of, prompts):
    free = [_greedy(logits_of, p, 14) for p in prompts]
    # a token that ends some of the texts early, and not all of them
    stop = next(t for t in free[1][3:] if 0 < sum(t in text for text in free) < len(free))
    finished = []
    out = _sampler(tiny, (stop,)).generate(
        prompts, [0.0] * len(prompts), 14, 0, lambda n, t: finished.append((n, t))
    )
    expected = [text[: text.index(stop) + 1] if stop in text else text for text in free]
    assert out == expected
    assert len({len(text) for text in out}) > 1
    assert sum(n for n, _ in finished) == len(prompts)
    assert sum(t for _, t in finished) == sum(map(len, out))


def test_sampled_rows_vary_with_the_seed_and_greedy_rows_do_not(tiny, prompts):
    sampler = _sampler(tiny, ())
    temperatures = [0.0, 5.0] * 4
    first = sampler.generate(prompts, temperatures, 8, 1)
    again = sampler.generate(prompts, temperatures, 8, 1)
    other = sampler.generate(prompts, temperatures, 8, 2)
    assert first == again
    assert all(a == b for a, b in zip(first[::2], other[::2], strict=True))
    assert all(a != b for a, b in zip(first[1::2], other[1::2], strict=True))
    assert all(len(text) == 8 for text in first)


@pytest.mark.slow
def test_sampling_follows_the_softmax(tiny, logits_of):
    """First tokens of many samples of one prompt have the frequencies of the model."""
    prompt, temperature = [3, 1, 4], 0.7
    weights = np.exp(logits_of(prompt)[2] / temperature)
    expected = weights / weights.sum()
    count = 3000
    sampler = _sampler(tiny, (), num_rows=1000, prefill_rows=500, max_new_tokens=1)
    texts = sampler.generate([prompt] * count, [temperature] * count, 1, 0)
    observed = np.bincount([t[0] for t in texts], minlength=61) / count
    error = np.sqrt(expected * (1 - expected) / count)
    assert (np.abs(observed - expected) < 5 * error + 1e-9).all()


def test_what_does_not_fit_is_refused(tiny):
    with pytest.raises(ValueError, match=r"prompt 1 has 13 tokens.*--max-prompt-len=12"):
        _sampler(tiny).generate([[1], [1] * 13], [0.0, 0.0], 4, 0)
    with pytest.raises(ValueError, match=r"max_new_tokens=15 .* from 1 to 14"):
        _sampler(tiny).generate([[1]], [0.0], 15, 0)
    with pytest.raises(ValueError, match=r"--max-prompt-len=.*-answer-tokens.* context of 2048"):
        _sampler(tiny, max_new_tokens=2040)
    windowed = dataclasses.replace(tiny.model, sliding_window=16)
    with pytest.raises(ValueError, match=r"sliding_window.* of 16"):
        _sampler(tiny, model=windowed)
