"""Jobs with every sampling parameter, and their comparison with dense decoding in numpy."""

from functools import cache

import numpy as np

from specjax.runtime.runner import ModelRunner
from specjax.sampling.params import SamplingParams
from specjax.testing import Job, dense_decode
from specjax.types import DraftShape

from ..support.runners import copied_runner, make_runner
from .driver import serve

END = 5
RNG = np.random.default_rng(4)
BIAS = {END: 25.0, "9": -3.0, 30: 1.5}
COUNT = 24


def params(**changes) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": COUNT} | changes))


# the parameters of neighbouring rows differ as much as possible
PARAMS = [
    params(temperature=0.0, repetition_penalty=1.4),
    params(temperature=0.8, frequency_penalty=0.7, presence_penalty=0.5, top_p=0.95),
    params(temperature=0.0),
    params(temperature=0.0, logit_bias=BIAS, min_new_tokens=7),
    params(temperature=1.1, min_p=0.1, repetition_penalty=1.2, frequency_penalty=-0.2),
    params(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.3),
    params(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02),
    params(temperature=1.0, logit_bias=BIAS, min_new_tokens=11, repetition_penalty=0.8),
    params(temperature=0.0, min_new_tokens=COUNT, logit_bias={END: 50.0}),
    params(temperature=1.5, top_k=8, min_new_tokens=3, logit_bias={END: 4.0}),
]
JOBS = [
    Job(
        prompt=tuple(RNG.integers(6, 61, size=size).tolist()),
        params=one,
        seed=2**40 + 11 * i,
        ends=(END, 60),
        top_logprobs=[None, 0, 3, 20][i % 4],
    )
    for i, (one, size) in enumerate(zip(PARAMS, (5, 17, 1, 16, 30, 3, 8, 33, 4, 12), strict=True))
]


@cache
def expected(is_copied: bool):
    runner = copied_runner(0) if is_copied else make_runner()
    return [dense_decode(runner.weights[0], job) for job in JOBS]


def check(
    runner: ModelRunner, jobs, truths, skip: int = 0, tier: DraftShape | None = None
) -> float:
    """Compare log-probabilities, and tokens after ``skip``; return the tokens per round."""
    outputs = serve(runner, jobs, tier)
    for job, output, truth in zip(jobs, outputs, truths, strict=True):
        assert output.tokens == truth.tokens[skip:], job
        np.testing.assert_allclose(output.chosen, truth.chosen[skip:], atol=1e-4)
        assert [list(top) for top in output.top] == [list(top) for top in truth.top[skip:]]
        for ours, theirs in zip(output.top, truth.top[skip:], strict=True):
            np.testing.assert_allclose(list(ours.values()), list(theirs.values()), atol=1e-4)
    return sum(len(o.tokens) for o in outputs) / max(1, sum(o.num_rounds for o in outputs))
