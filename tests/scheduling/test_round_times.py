"""Times of rounds, as the adaptive policy gets them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specjax.metrics import Totals
from specjax.scheduling.constrained import StartedRound
from specjax.scheduling.in_flight import InFlight
from specjax.types import NO_DRAFTS

CONFIG = SimpleNamespace(prefill_buckets=(32,), batch_buckets=(1,), shapes=(NO_DRAFTS,))


class Flight(InFlight):
    """Collects the times of rounds; ``now`` is the clock."""

    def __init__(self) -> None:
        self.now, self.seconds = 0.0, list[float]()
        runner: Any = SimpleNamespace(config=CONFIG)
        super().__init__(runner, Totals(), None, lambda: self.now)
        policy: Any = SimpleNamespace(activate_for_batch=lambda *_: NO_DRAFTS)
        self._controller = policy
        self.request = SimpleNamespace(num_left=9, constraint=None, is_finished=False)
        self.request.params, self.request.rid = SimpleNamespace(speculative=False), "r"
        self.row: Any = SimpleNamespace(request=self.request, is_released=False, is_late=False)
        self.row.kv_len = self.row.unread_rounds = 0

    def _report_accepted(self, *args: Any) -> None:
        self.seconds.append(args[-1])

    def settle(self) -> Any:
        return iter(())

    def start(self) -> None:
        """Dispatch the first call of a round of two calls."""
        tier = self._choose_tier([self.row])
        self.constrained._started = StartedRound([self.row], tier or NO_DRAFTS, *[None] * 2)  # type: ignore[arg-type]

    def finish(self) -> None:
        """Dispatch the second call, or the only one of another round."""
        self.constrained._started = None
        none = dict.fromkeys(("logprobs", "prompt_logprobs", "hidden_states"))
        result: Any = SimpleNamespace(is_ready=True, tier=NO_DRAFTS, **none)
        result.read = lambda: np.zeros((1, 1, 4), np.int32)
        self._queue.append(([self.row], result, 1, (), 0, 0.0))

    def read_at(self, now: float) -> None:
        self.now = now
        assert not list(self.read())


def test_rounds_of_two_calls_take_the_time_between_their_results() -> None:
    flight = Flight()
    flight.start()
    for now in (1.0, 1.25, 1.75):
        flight.finish()
        flight.start()
        flight.read_at(now)
    assert flight.seconds == pytest.approx([0.0, 0.25, 0.5])


def test_idle_time_before_a_round_does_not_count() -> None:
    flight = Flight()
    flight.start()
    flight.finish()
    flight.start()
    flight.read_at(1.0)
    flight.constrained.clear()  # its requests have ended
    flight.start()  # after idle time
    flight.finish()
    flight.read_at(60.0)
    assert flight.seconds == [0.0, 0.0]
