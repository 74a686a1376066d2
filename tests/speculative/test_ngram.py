"""N-gram drafts through rounds and the scheduler: no token changes, no other text is read."""

from dataclasses import replace

import numpy as np
import pytest

from specjax.engine.args import EngineArgs
from specjax.sampling.params import SamplingParams
from specjax.speculative.algorithm import SpeculativeAlgorithm
from specjax.speculative.ngram import CorpusConfig, sort_corpus
from specjax.types import DraftShape

from ..support.runners import copied_weights, make_request, make_runner, plain_outputs, run_requests
from ..support.schedulers import Serving
from .identity import JOBS, check, expected

NGRAM = SpeculativeAlgorithm.from_string("NGRAM")
SHAPE = DraftShape(5, 10, 6, stores_drafts=False)
RNG = np.random.default_rng(3)
PHRASE = RNG.integers(6, 61, size=7).tolist()
PROMPTS = [
    PHRASE + RNG.integers(6, 61, size=n).tolist() + PHRASE[:3] for n in (4, 1, 17, 30, 9, 12)
]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.95)
KINDS = (GREEDY, SEEDED, replace(SEEDED, speculative=False))


def ngram_runner(shape: DraftShape = SHAPE, algorithm=NGRAM, **changes):
    """A runner over the target that eventually repeats itself."""
    runner = make_runner(None, algorithm=algorithm, shapes=(shape,), **changes)
    runner.load(copied_weights()[0], ())
    return runner


def counts(request):
    """Numbers of proposed and accepted drafts."""
    meta = request.result()["meta_info"]
    return meta["spec_num_proposed_drafts"], meta["spec_correct_drafts_histogram"]


def served(serving, prompts, params=GREEDY):
    """Requests that use the same slots one after the other."""
    made = [make_request(p, params, seed=i, width=SHAPE.steps) for i, p in enumerate(prompts)]
    for request in made:
        serving.add_all([request])
        serving.finish()
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "rounds", "algorithm"),
    [
        (SHAPE, 1, NGRAM),
        (DraftShape.chain(4), 4, replace(NGRAM, breadth=1)),
        (DraftShape(15, 10, 16, stores_drafts=False), 1, replace(NGRAM, by_frequency=True)),
    ],
)
def test_equals_dense_decoding(shape, rounds, algorithm):
    """Greedy and seeded, with penalties, bias, minimum lengths and log-probabilities."""
    runner = ngram_runner(shape, algorithm, rounds=rounds)
    assert check(runner, JOBS, expected(True)) > 1.02


@pytest.mark.slow
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_pages_that_run_out_and_cached_prompts_change_no_token(run_ahead):
    """Aborts and preemptions, together with requests without speculation."""
    serving = Serving(runner=ngram_runner(), run_ahead=run_ahead, num_pages=26, is_cached=True)
    requests = [
        make_request(prompt, KINDS[i % 3], seed=i, width=SHAPE.steps, rid=f"r{i}")
        for i, prompt in enumerate(PROMPTS * 3)
    ]
    serving.add_all(requests)
    while not requests[3].output_ids:
        serving.step()
    serving.scheduler.abort(requests[3])
    serving.finish()
    assert sum(request.num_retractions for request in requests) > 0
    accepted = 0
    for request in requests:
        (whole,) = plain_outputs([request.input_ids], request.params, [request.seed])
        is_aborted = request is requests[3]
        assert request.output_ids == (whole[: len(request.output_ids)] if is_aborted else whole)
        if not request.params.speculative:
            assert "spec_verify_ct" not in request.result()["meta_info"]
            continue
        proposed, histogram = counts(request)
        accepted += sum(i * n for i, n in enumerate(histogram))
        assert proposed >= sum(i * n for i, n in enumerate(histogram))
        assert sum(histogram) == request.result()["meta_info"]["spec_verify_ct"]
    assert accepted > 20


@pytest.mark.slow
def test_only_the_requests_own_text_is_read():
    """Drafts are the same in a used slot and in a fresh one, and after a cached prefix."""
    runner = ngram_runner()
    fresh = []
    for prompt in PROMPTS:
        runner.reset()
        (request,) = served(Serving(runner=runner), [prompt])
        fresh.append(counts(request))
    assert any(proposed for proposed, _ in fresh)
    runner.reset()
    assert [counts(r) for r in served(Serving(runner=runner), PROMPTS)] == fresh
    cached = Serving(runner=runner, is_cached=True)
    served(cached, PROMPTS)
    again = served(cached, PROMPTS)
    assert all(request.result()["meta_info"]["cached_tokens"] > 0 for request in again)
    assert [counts(request) for request in again] == fresh


@pytest.mark.slow
def test_a_text_without_a_match_proposes_nothing():
    short = replace(GREEDY, max_new_tokens=2)
    (request,) = served(Serving(runner=ngram_runner()), [[30]], short)
    assert request.output_ids[0] != 30
    assert counts(request)[0] == 0
    assert request.output_ids == plain_outputs([[30]], short, [0])[0]


@pytest.mark.slow
def test_a_corpus_of_the_answer_is_accepted():
    """Also if the answer is the last document; accepted from the first round on."""
    (answer,) = plain_outputs([PROMPTS[1]], GREEDY, [0])
    tokens, order = sort_corpus([PROMPTS[0], PROMPTS[1] + answer], NGRAM.window[1])
    algorithm = replace(NGRAM, has_corpus=True)
    config = CorpusConfig(len(tokens), len(order), NGRAM.window[1])
    base = make_runner(config, algorithm=algorithm, shapes=(SHAPE,))
    networks = base.networks
    assert networks.draft.names == ("order", "tokens")
    base.load(copied_weights()[0], networks.draft.order({"tokens": tokens, "order": order}))
    request = make_request(PROMPTS[1], GREEDY, width=SHAPE.steps)
    run_requests(base, [request])
    assert request.output_ids == answer
    histogram = counts(request)[1]
    assert histogram[SHAPE.steps] >= len(answer) // (SHAPE.steps + 1)


def test_shapes():
    def shapes(**changes):
        return EngineArgs(speculative_algorithm="NGRAM", **changes).shapes

    assert shapes() == (DraftShape(11, 10, 12, stores_drafts=False),)
    assert shapes()[0].rows == 12
    assert shapes(speculative_num_steps=3) == (DraftShape(3, 10, 4, stores_drafts=False),)
    assert shapes(speculative_num_steps=3, speculative_num_draft_tokens=16)[0].nodes == 16
    assert shapes(speculative_ngram_max_bfs_breadth=1) == (DraftShape.chain(11),)
    assert not shapes()[0].stores_drafts
    tiers = shapes(
        speculative_adaptive=True, speculative_adaptive_config={"candidate_steps": [0, 1, 7]}
    )
    assert tiers == (
        DraftShape.chain(0),
        DraftShape.chain(1),
        DraftShape(7, 10, 8, stores_drafts=False),
    )
