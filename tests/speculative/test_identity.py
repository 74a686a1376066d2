"""With any sampling parameters, rounds produce the same as dense decoding in numpy."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from specjax.testing import EAGLE3, Job, dense_decode
from specjax.types import DraftShape

from ..support.runners import copied_runner, make_runner
from .driver import resumed, serve, staged_runner, start
from .identity import COUNT, JOBS, check, expected, params


def test_the_jobs_reach_every_case():
    """End tokens come as soon as they are allowed, not before; others run to their last token."""
    lengths = [len(output.tokens) for output in expected(False)]
    assert lengths[3] == 8
    assert lengths[7] == 12
    assert lengths[8] == COUNT
    assert lengths.count(COUNT) >= 5
    neutral = [replace(job, params=params(temperature=0.0)) for job in JOBS]
    plain = [dense_decode(make_runner().weights[0], job).tokens for job in neutral]
    assert sum(a == b.tokens for a, b in zip(plain, expected(False), strict=True)) <= 2


@pytest.mark.parametrize("rounds", [1, 4])
def test_plain_rounds_equal_dense_decoding(rounds):
    check(make_runner(rounds=rounds), JOBS, expected(False))


@pytest.mark.parametrize(("steps", "rounds"), [(4, 1), (2, 4)])
def test_speculation_equals_dense_decoding(steps, rounds):
    check(make_runner(EAGLE3, steps, rounds=rounds), JOBS, expected(False))


@pytest.mark.parametrize(("steps", "rounds"), [(4, 1), (2, 4)])
def test_speculation_equals_dense_decoding_where_drafts_are_accepted(steps, rounds):
    """Penalties count drafts accepted in the same round."""
    assert check(copied_runner(steps, rounds), JOBS, expected(True)) > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_chain_may_verify_fewer_rows_than_it_drafts(rounds):
    """The accept width, visible in the round's output shape, is that of the verified rows."""
    shape = DraftShape.chain(7, 4)
    check(make_runner(EAGLE3, 7, rounds=rounds, shapes=(shape,)), JOBS, expected(False))
    runner = copied_runner(7, rounds, shapes=(shape,))
    assert check(runner, JOBS, expected(True)) > 1.5
    assert runner.round([1]).read().shape == (rounds, 4, 4 + 3)


def test_the_order_of_rows_changes_nothing():
    runner = copied_runner(4)
    order = np.random.default_rng(0).permutation(len(JOBS)).tolist()
    shuffled = serve(runner, [JOBS[i] for i in order])
    assert [o.tokens for o in shuffled] == [expected(True)[i].tokens for i in order]


@pytest.mark.parametrize(("steps", "count"), [(0, 5), (4, 1), (4, 6)])
def test_resuming_after_some_tokens_changes_nothing(steps, count):
    """The prefilled text is prompt and output; only the output has penalties."""
    pairs = zip(JOBS, expected(True), strict=True)
    longer = [(job, truth) for job, truth in pairs if len(truth.tokens) > count]
    assert len(longer) >= 6
    jobs = [resumed(job, truth, count) for job, truth in longer]
    check(copied_runner(steps), jobs, [truth for _, truth in longer], skip=count)


@pytest.mark.parametrize("index", [0, 1, 4, 5])
def test_tokens_from_the_prefix_cache_are_penalised(index):
    """The first pages of the text come from another request, as with a prefix cache."""
    runner = copied_runner(4)
    whole = replace(JOBS[index], ends=())
    truth = dense_decode(runner.weights[0], whole)
    job = resumed(whole, truth, 9)
    page = runner.config.page_size
    num_cached = (len(job.text) - 1) // page * page
    assert num_cached >= page
    start(runner, 3, Job(prompt=job.text, params=params(temperature=0.0)))
    shared = runner.tables.page_tables[0][3, : num_cached // page].tolist()
    # the slot's history may hold tokens of earlier requests
    future = runner.on_device.future
    future = replace(future, tokens=jax.numpy.full_like(future.tokens, 7))
    runner.on_device = replace(runner.on_device, future=future)
    outputs = serve(runner, [job], num_cached=num_cached, pages=[*shared, *range(1, 12)])
    assert outputs[0].tokens == truth.tokens[9:]
    runner.clear_slot(3)


@pytest.mark.slow
def test_compiled_stages_report_the_same_log_probabilities():
    fused, staged = make_runner(EAGLE3, 4), staged_runner(EAGLE3, 4)
    for runner in (fused, staged):
        start(runner, 1, JOBS[3])
        start(runner, 2, JOBS[6])
    for _ in range(3):
        ours, theirs = staged.round([2, 1]), fused.round([2, 1])
        assert np.array_equal(ours.read(), theirs.read())
        found, truth = (jax.tree.map(np.asarray, each.logprobs) for each in (ours, theirs))
        assert found.chosen.shape == (1, 4, 5)
        assert found.top_ids.shape == found.top_values.shape == (1, 4, 5, 20)
        for a, b in zip(vars(found).values(), vars(truth).values(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        behind = np.arange(5) >= ours.read()[0, :, -1:]
        assert not found.chosen[0][behind].any()
        assert not found.top_values[0][behind].any()
    for runner in (fused, staged):
        runner.clear_slot(1)
        runner.clear_slot(2)
