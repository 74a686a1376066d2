"""Prompts that a source takes over: they hold a slot and pages, but need no steps."""

from collections import Counter

import numpy as np

from specjax.sampling.params import SamplingParams
from specjax.scheduling.prompt_source import PromptSource

from ..support.runners import make_request, plain_outputs
from ..support.schedulers import STEPS, Clock, Serving

RNG = np.random.default_rng(14)
PROMPTS = [RNG.integers(6, 61, size=n).tolist() for n in (9, 20, 3, 7, 8, 5)]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)


class Taking(PromptSource):
    """Takes each request once, and gives up those in ``lost`` in the next step."""

    deadline = None

    def __init__(self) -> None:
        self.taken, self.lost, self.computed = [], [], []
        self.counts: Counter[str] = Counter()

    @property
    def has_results(self) -> bool:
        return bool(self.lost)

    def request(self, row) -> bool:
        self.counts["requested"] += 1
        is_new = all(row.request is not other.request for other in self.taken)
        self.taken += [row] * is_new
        return is_new

    def receive(self, *, is_idle):
        self.counts["idle"] += is_idle
        lost, self.lost = self.lost, []
        return [(row, None) for row in lost]

    def dispatched(self, rows) -> None:
        self.computed += rows

    def release(self, row) -> None:
        self.counts["released"] += 1


def test_prompts_given_up_by_a_source_are_computed_here() -> None:
    source = Taking()
    serving = Serving(run_ahead=1, is_cached=True, prompt_source=source)
    requests = serving.add(PROMPTS, GREEDY)
    while serving.scheduler.has_work:
        serving.step()
    # four hold all slots and wait for the source: nothing to dispatch, no deadline to wake up for
    assert len(serving.rows) == len(source.taken) == 4
    assert not serving.watched.calls
    assert serving.scheduler.idle_seconds is None
    serving.scheduler.abort(requests[1])
    source.lost = source.taken[:4]
    serving.step()
    assert serving.running[0] is requests[0]
    while not all(request.is_finished for request in requests):
        source.lost += source.taken[4:]
        serving.step()
    serving.check_clean()
    expected = plain_outputs(PROMPTS, GREEDY, range(6))
    assert requests[1].output_ids == []
    assert [r.output_ids for r in requests[:1] + requests[2:]] == expected[:1] + expected[2:]
    assert {row.request for row in source.computed} == {*requests} - {requests[1]}
    # each admission is released once: six that were taken, and five that were computed here
    assert source.counts["requested"] == source.counts["released"] == 11
    assert source.counts["idle"] >= 2


def test_the_loop_sleeps_until_a_deadline_or_a_timeout() -> None:
    clock, source = Clock(), Taking()
    serving = Serving(clock=clock, prompt_source=source)
    late = make_request(PROMPTS[0], GREEDY, width=STEPS, timeout=7.0, clock=clock)
    serving.add_all([late])
    serving.step()
    assert serving.scheduler.idle_seconds == 7.0
    source.deadline = clock.now + 5.0
    assert serving.scheduler.idle_seconds == 5.0
    assert not serving.scheduler.has_work
    source.deadline = None
    clock.now += 7.0
    assert serving.scheduler.has_work
    serving.step()
    assert late.finish_reason == {"type": "abort", "message": "the request timed out after 7.0 s"}
    serving.check_clean()
