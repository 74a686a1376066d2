"""A prefill and a decode side in one process, and a peer that holds back messages."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np
from msgspec.structs import replace

from specjax import DisaggregatedEngine, Engine
from specjax.disaggregation.decode import LocalPeer
from specjax.disaggregation.messages import Message, Prefilled, Weights
from specjax.testing import is_idle, num_held

from ..support.waiting import wait_for

SECONDS = 30.0  # no step takes longer unless it hangs
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_running_requests": 4,
    "batch_buckets": (4,),
    "max_total_tokens": 420,
    "disable_radix_cache": True,
}
REPORTS = {
    "return_logprob": True,
    "top_logprobs_num": 2,
    "logprob_start_len": 0,
    "return_hidden_states": True,
}
# times, and state that depends on earlier requests
OWN = ("id", "e2e_latency", "queue_time", "time_to_first_token", "ema_accept_len", "cached_tokens")


class HeldPeer(LocalPeer):
    """Holds back messages of the prefill side and delivers them later, possibly changed.

    Attributes:
        change: maps each message to the one that is delivered.
    """

    def __init__(self, engine: DisaggregatedEngine, change: Any = None) -> None:
        self.held: SimpleQueue[Message] = SimpleQueue()
        self.is_holding = True
        self.change: Callable[[Message], Message] = change or (lambda message: message)
        super().__init__(engine.prefill._side, engine._side)

    def _deliver(self, message: Message) -> None:
        if isinstance(message, Weights):
            super()._deliver(message)
        elif self.is_holding:
            self.held.put(message)
        else:
            super()._deliver(self.change(message))

    def wait(self, kind: type, count: int = 1) -> list[Message]:
        """Take this many messages of a kind, and all before the last of them."""
        taken: list[Message] = []
        while sum(isinstance(message, kind) for message in taken) < count:
            taken.append(self.held.get(timeout=SECONDS))
        return taken

    def let_go(self, *messages: Message) -> None:
        """Deliver messages, then all held ones and all later ones."""
        for message in messages:
            super()._deliver(self.change(message))
        self.is_holding = False
        while not self.held.empty():
            super()._deliver(self.change(self.held.get()))


@contextmanager
def held(engine: DisaggregatedEngine, change: Any = None) -> Iterator[HeldPeer]:
    """Replace the engine's peer; afterwards both sides are empty."""
    ours = engine._peer
    assert ours is not None
    ours.close()
    peer = HeldPeer(engine, change)
    try:
        yield peer
    finally:
        peer.close()
        wait_until_empty(engine)
        engine._peer = LocalPeer(engine.prefill._side, engine._side)


def wait_until_empty(*engines: Engine) -> None:
    """Check that neither side has running or waiting requests or used pages."""
    for engine in engines:
        for side in (engine, getattr(engine, "prefill", engine)):
            wait_for(lambda side=side: is_idle(side))  # type: ignore[misc]
            assert num_held(side) == 0


def without_rows(message: Message) -> Message:
    return replace(message, rows=None) if isinstance(message, Prefilled) else message


def assert_same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], *leave: str) -> None:
    """Results are equal except for times; floats within the float32 tolerance of reordering."""
    for one, other in zip(ours, theirs, strict=True):
        assert one["output_ids"] == other["output_ids"]
        assert one["text"] == other["text"]
        meta, expected = one["meta_info"], other["meta_info"]
        assert meta.keys() == expected.keys()
        for name in meta.keys() - {*OWN, *leave}:
            if name == "hidden_states":
                np.testing.assert_allclose(meta[name], expected[name], atol=1e-3)
            elif "logprobs" in name:
                _assert_close(meta[name], expected[name])
            else:
                assert meta[name] == expected[name], name


def _assert_close(ours: Any, theirs: Any) -> None:
    """Nested lists of log-probabilities and ids; ids of ties may be swapped."""
    if isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            _assert_close(one, other)
    elif theirs is None or theirs[0] is None:
        assert ours == theirs
    else:
        assert abs(ours[0] - theirs[0]) < 1e-4
