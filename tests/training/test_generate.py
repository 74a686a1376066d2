"""Generated text equals one-by-one decoding, whatever else is generated with it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training import generate
from specjax.training.ttt import packed_attend

SIZE = 32


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch):
    monkeypatch.setattr(generate, "GROUP", 1)


@pytest.fixture(scope="module")
def greedy(tiny):
    """Greedy decoding that runs the whole text again for every token."""

    @jax.jit
    def run(weights, ids, segments):
        model = tiny.flat.rebuild(weights)
        attend = packed_attend(segments)
        return model.logits(model(ids, jnp.arange(SIZE)[None], None, attend)[0])[0]

    def decode(prompt, count):
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            ids = np.zeros((1, SIZE), np.int32)
            ids[0, : len(tokens)] = tokens
            segments = (np.arange(SIZE) < len(tokens)).astype(np.int32)[None]
            logits = run(tiny.weights, ids, segments)
            tokens.append(int(logits[len(tokens) - 1].argmax()))
        return tokens[len(prompt) :]

    return decode


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(2)
    return [rng.integers(0, 61, n).tolist() for n in (3, 8, 1, 7, 5, 8, 2)]


def test_greedy_equals_decoding_alone(sampler, greedy, prompts):
    free = [greedy(p, 14) for p in prompts]
    # a token that ends some of the texts early, and not all of them
    stop = next(t for t in free[1][3:] if 0 < sum(t in text for text in free) < len(free))
    finished = []
    out = dataclasses.replace(sampler, stop_ids=(stop,)).generate(
        prompts, [0.0] * len(prompts), 14, 0, lambda n, t: finished.append((n, t))
    )
    expected = [text[: text.index(stop) + 1] if stop in text else text for text in free]
    assert out == expected
    assert len(finished) > 1
    assert sum(n for n, _ in finished) == len(prompts)
    assert sum(t for _, t in finished) == sum(map(len, out))


def test_sampled_texts_vary_with_the_seed_and_greedy_ones_do_not(sampler, prompts):
    temperatures = [0.0, 5.0, 0.0, 5.0, 0.0, 5.0, 0.0]
    first, again, other = (sampler.generate(prompts, temperatures, 8, s) for s in (1, 1, 2))
    assert first == again
    assert first[::2] == other[::2]
    assert all(a != b for a, b in zip(first[1::2], other[1::2], strict=True))
    assert all(len(text) == 8 for text in first)
