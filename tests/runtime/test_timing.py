"""The rows that measured rounds start from."""

from itertools import pairwise
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from specjax.adaptive.cost import CONTEXTS
from specjax.runtime.timing import DISPATCHES, PERIOD, STRETCHES, measure_round_seconds
from specjax.speculative.ngram import NGRAM

from ..support.runners import chains, make_runner


def test_rows_and_dispatches_start_from_different_tokens(monkeypatch):
    runner, starts = make_runner(), []

    def start(*_):
        future = runner.on_device.future
        rows = future.bonus_tokens, future.seq_lens, future.tokens, future.remaining
        starts.append([np.array(x) for x in rows])
        return SimpleNamespace(read=lambda: None)

    monkeypatch.setattr(runner, "round", start)
    with jax.transfer_guard("disallow"):
        measure_round_seconds(runner, CONTEXTS)
    assert len(starts) == 2 * (1 + STRETCHES * DISPATCHES)
    for one, other in pairwise(starts[2:]):
        assert len({*one[0], *other[0]}) == 2 * len(one[0])
        assert {*(one[1] - other[1])[1:]} <= {1, 1 - DISPATCHES}
        assert (other[3][1:] > 2**30).all()
    texts = starts[0][2][1:]
    np.testing.assert_array_equal(texts[:, PERIOD:], texts[:, :-PERIOD])
    assert all((texts[:, i] != texts[:, i - 1]).all() for i in range(1, PERIOD))
    assert len({*map(tuple, texts)}) == len(texts)


@pytest.mark.slow
def test_measured_rounds_have_all_drafts_of_the_history(monkeypatch):
    runner, counts = make_runner(algorithm=NGRAM, shapes=chains(2, 5)), []
    dispatch = runner.round

    def record(slots, tier):
        result = dispatch(slots, tier)
        counts.append((tier.steps, result.read()[..., -3].ravel().tolist()))
        return result

    monkeypatch.setattr(runner, "round", record)
    measure_round_seconds(runner, CONTEXTS)
    assert {steps for steps, _ in counts} == {2, 5}
    assert all(drafted == 4 * [steps] for steps, drafted in counts)
