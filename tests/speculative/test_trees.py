"""Trees produce the tokens of plain decoding with any shape, pages and schedule."""

from dataclasses import replace

import numpy as np
import pytest

from specjax.config import DraftConfig
from specjax.sampling.params import SamplingParams
from specjax.testing import EAGLE3, dense_logits
from specjax.types import DraftShape

from ..support.compilation import counted_compilations
from ..support.runners import (
    EAGLE,
    copied_runner,
    make_request,
    make_runner,
    plain_output,
    plain_outputs,
    run_requests,
)
from ..support.schedulers import Serving, forced
from .identity import JOBS, check, expected

TREE = DraftShape(steps=3, topk=3, nodes=8)
RNG = np.random.default_rng(21)
PROMPTS = [RNG.integers(6, 61, size=n).tolist() for n in (9, 1, 17, 40, 5, 16)]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.95)


def tree_runner(shape: DraftShape = TREE, rounds: int = 1, **changes):
    """A runner over the target whose drafts are often right."""
    return copied_runner(shape.steps, rounds, shapes=(shape,), **changes)


@pytest.mark.slow
def test_trees_equal_dense_decoding():
    """Penalties and minimum length follow each node's path, log-probabilities its row."""
    assert check(tree_runner(), JOBS, expected(True)) > 1.5


@pytest.mark.long_after(1)
@pytest.mark.slow
@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("shape", [TREE, DraftShape.chain(7, 4)], ids=["tree", "cut chain"])
def test_a_request_may_end_anywhere(shape, run_ahead):
    """Up to twice as many tokens as nodes, and after prompts that nearly fill the context."""
    runner = tree_runner(shape)
    config = runner.config
    most = config.context - config.kv_writes.tail
    serving = Serving(runner=runner, run_ahead=run_ahead)
    requests = []
    for limit in range(1, 2 * shape.nodes + 1):
        long = RNG.integers(6, 61, size=most - limit + 1).tolist()
        for i, prompt in enumerate((PROMPTS[limit % len(PROMPTS)], long)):
            params = replace((GREEDY, SEEDED)[(limit + i) % 2], max_new_tokens=limit)
            requests.append(make_request(prompt, params, seed=limit, width=shape.depth))
    with pytest.raises(ValueError, match=f"{most + 2} KV tokens|needs .* a request holds"):
        serving.scheduler.check(make_request(long, replace(GREEDY, max_new_tokens=limit + 4)))
    serving.add_all(requests)
    serving.finish()
    for request in requests:
        prompt = tuple(request.input_ids)
        assert request.output_ids == plain_output(prompt, request.params, request.seed)


@pytest.mark.slow
@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_pages_that_run_out_change_no_token(params, run_ahead):
    serving = Serving(runner=tree_runner(), run_ahead=run_ahead, num_pages=22, is_cached=True)
    requests = serving.add(PROMPTS * 2, params)
    serving.finish()
    assert sum(request.num_retractions for request in requests) > 0
    seeds = [request.seed for request in requests]
    assert [r.output_ids for r in requests] == plain_outputs(PROMPTS * 2, params, seeds)


@pytest.mark.slow
def test_metrics_of_a_tree():
    """All nodes of a round count as proposed; accepted drafts are counted by depth."""
    request = make_request(PROMPTS[0], GREEDY, width=TREE.steps)
    run_requests(tree_runner(), [request])
    meta = request.result()["meta_info"]
    rounds = meta["spec_verify_ct"]
    assert meta["spec_num_proposed_drafts"] == rounds * (TREE.nodes - 1)
    histogram = meta["spec_correct_drafts_histogram"]
    assert len(histogram) == TREE.steps + 1
    assert sum(histogram) == rounds
    assert sum(i * n for i, n in enumerate(histogram)) == meta["spec_num_correct_drafts"]
    assert meta["spec_accept_length"] > 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "rounds"), [(DraftShape.chain(0), 4), (DraftShape.chain(4), 1), (TREE, 1)]
)
def test_hidden_states_are_those_that_the_logits_come_from(shape, rounds):
    """Equal to a dense pass over the same text, with preempted and other requests in the batch."""
    runner = copied_runner(shape.steps, rounds, shapes=(shape,))
    serving = Serving(runner=runner, run_ahead=1, num_pages=20)
    requests = []
    for i, prompt in enumerate(PROMPTS):
        params, wants = (GREEDY, SEEDED)[i % 2], i != 1
        requests.append(
            make_request(prompt, params, seed=i, width=shape.steps, return_hidden_states=wants)
        )
    serving.add_all(requests)
    serving.finish()
    assert sum(request.num_retractions for request in requests) > 0
    target = runner.networks.target
    head = np.asarray(runner.weights[0][target.names.index("lm_head.kernel")])
    for i, request in enumerate(requests):
        meta = request.result()["meta_info"]
        assert ("hidden_states" in meta) == (i != 1)
        if i == 1:
            continue
        states, count = meta["hidden_states"], len(request.output_ids)
        assert states.shape == (count, head.shape[0])
        assert states.dtype == np.float32
        text = [*request.input_ids, *request.output_ids[:-1]]
        logits = dense_logits(runner.weights[0], text)[-count:]
        np.testing.assert_allclose(states @ head, logits, atol=1e-4 * np.abs(logits).max())


GRID = [  # head, shape, page size, rounds per call
    (EAGLE3, DraftShape(3, 2, 7), 1, 4),
    (EAGLE3, DraftShape(2, 4, 21), 16, 1),
    pytest.param(EAGLE3, DraftShape(4, 8, 6), 64, 1, marks=pytest.mark.long),
    (EAGLE3, DraftShape(2, 16, 64), 4, 4),
    pytest.param(EAGLE, DraftShape(5, 2, 16), 16, 1, marks=pytest.mark.long),
    pytest.param(EAGLE, DraftShape(1, 4, 5), 64, 4, marks=pytest.mark.long),
    pytest.param(EAGLE, DraftShape(2, 8, 32), 1, 1, marks=pytest.mark.long),
    (EAGLE, DraftShape(3, 16, 17), 16, 4),
]


@pytest.mark.long_after(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "shape", "page_size", "rounds"),
    GRID,
    ids=lambda value: value.checkpoint_format if isinstance(value, DraftConfig) else None,
)
def test_the_shape_of_a_tree_changes_no_token(head, shape, page_size, rounds):
    """Batches of one and four; drafts of random heads, and of one that is often right."""
    sizes = {"page_size": page_size, "pages_per_request": -(-256 // page_size)}
    sizes["num_pages"] = 1 + 1200 // page_size
    runners = [make_runner(head, shapes=(shape,), rounds=rounds, **sizes)]
    plain = [make_runner()]
    if head is EAGLE3:
        runners.append(tree_runner(shape, rounds, **sizes))
        plain.append(copied_runner(0))
    for runner, other in zip(runners, plain, strict=True):
        for params, run_ahead in ((GREEDY, 0), (GREEDY, 1), (SEEDED, 1)):
            for count in (1, len(PROMPTS)):
                ours, theirs = (
                    [
                        make_request(prompt, params, seed=i, width=one.config.largest.steps)
                        for i, prompt in enumerate(PROMPTS[:count])
                    ]
                    for one in (runner, other)
                )
                run_requests(runner, ours, run_ahead=run_ahead)
                run_requests(other, theirs)
                assert [r.output_ids for r in ours] == [r.output_ids for r in theirs]


@pytest.mark.slow
def test_tiers_of_trees_change_no_token():
    """Rounds without drafts, chains and trees in turn; two tiers have equal steps."""
    shapes = (DraftShape.chain(0), DraftShape(1, 3, 4), DraftShape.chain(3, 2), TREE)
    runner = copied_runner(3, shapes=shapes)
    runner.compile(show_progress=False)
    names = {one.key for one in runner.compiled.report if one.key.startswith("round")}
    assert names == {"round 0 4", "round 1-3-4 4", "round 3-1-2 4", "round 3-3-8 4"}
    controller = forced(runner, [shape for shape in shapes for _ in range(2)])
    serving = Serving(runner=runner, run_ahead=1, controller=controller)
    requests = serving.add(PROMPTS, SEEDED)
    with counted_compilations() as compiled:
        serving.finish()
    assert not compiled
    seeds = [request.seed for request in requests]
    assert [r.output_ids for r in requests] == plain_outputs(PROMPTS, SEEDED, seeds)
    by_steps = [set(r.spec.rounds_by_steps) for r in requests]
    assert {0, 1, 3} in by_steps
