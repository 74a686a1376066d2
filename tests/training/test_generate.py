"""Generated text equals decoding one prompt at a time, in any batch."""

import dataclasses

import numpy as np
import pytest

from specjax import SamplingParams
from specjax.testing import Job, dense_decode
from specjax.training import generate


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch):
    monkeypatch.setattr(generate, "GROUP", 1)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(2)
    return [rng.integers(0, 61, n).tolist() for n in (3, 8, 1, 7, 5, 8, 2)]


@pytest.mark.slow
def test_greedy_equals_decoding_alone(tiny, sampler, prompts):
    assert "plain decoding" in sampler.engine._plan.describe()  # without a hint to draft
    params = SamplingParams(temperature=0.0, max_new_tokens=14)
    jobs = [Job(prompt=tuple(prompt), params=params) for prompt in prompts]
    free = [dense_decode(tiny.weights, job, tiny.model).tokens for job in jobs]
    # a token that ends some of the texts early, but not all of them
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


@pytest.mark.slow
def test_sampled_texts_vary_with_the_seed_and_greedy_ones_do_not(sampler, prompts):
    temperatures = [0.0, 5.0, 0.0, 5.0, 0.0, 5.0, 0.0]
    first, again, other = (sampler.generate(prompts, temperatures, 8, s) for s in (1, 1, 2))
    assert first == again
    assert first[::2] == other[::2]
    assert all(a != b for a, b in zip(first[1::2], other[1::2], strict=True))
    assert all(len(text) == 8 for text in first)


@pytest.mark.slow
def test_what_does_not_fit_is_refused(sampler):
    longest = sampler.max_prompt_len
    most = sampler.engine.context_length - longest
    with pytest.raises(ValueError, match=rf"prompt 1 has {longest + 1} tokens.*--max-prompt-len="):
        sampler.generate([[1], [1] * (longest + 1)], [0.0, 0.0], 4, 0)
    with pytest.raises(ValueError, match=rf"max_new_tokens={most + 1} .* from 1 to {most}"):
        sampler.generate([[1]], [0.0], most + 1, 0)
