"""Checks of grammars, which compile them; also the callers that wait for a check and may leave."""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from specjax.checks import ParameterError, short
from specjax.sampling.boundary import Boundary
from specjax.sampling.grammar_process import DIED, MAX_SECONDS, GrammarProcesses
from specjax.sampling.grammar_request import Grammar, RequestGrammar

MAX_CHARACTERS = 2**16
# Lanes in which new grammars are compiled: processes at once, CPU seconds. A grammar that is too
# slow for the first lane starts again in the second one. Of 5,000 random grammars, each took 0.03 s
# or less.
LANES = ((2, 0.1), (1, MAX_SECONDS))
MAX_SLOW = 8  # checks in the second lane
# Grammars of the first lane that need no other check, because clients send the same one again.
NUM_CHECKED = 64

_caller_left: ContextVar[threading.Event | None] = ContextVar("caller_left", default=None)


@contextmanager
def while_waiting() -> Iterator[None]:
    """In this block, and in threads with a copy of its context, a caller waits for grammars.

    If the block ends before a grammar is checked, the work on it ends too.
    """
    caller_left = threading.Event()
    token = _caller_left.set(caller_left)
    try:
        yield
    finally:
        caller_left.set()
        _caller_left.reset(token)


class CallerLeftError(Exception):
    """The caller that waited for a grammar has left."""


class Grammars:
    """Checks grammars, and makes those of requests; for any thread."""

    def __init__(self, processes: GrammarProcesses) -> None:
        self.processes = processes
        # masks by grammar, the last used one last
        self._checked = OrderedDict[Any, np.ndarray | None]()
        self._lanes = [threading.BoundedSemaphore(size) for size, *_ in LANES]
        self._slow = threading.BoundedSemaphore(MAX_SLOW)  # for the second lane, the last one

    def check(self, kind: str | None, text: str, boundary: Boundary | None = None) -> Grammar:
        """Compile a grammar. Raises ParameterError with the library's reason.

        ``kind`` is the name of the sampling parameter; without one, only the reasoning is limited.
        """
        # the vocabulary limits token ids
        if len(text) > MAX_CHARACTERS and kind != "allowed_token_ids":
            message = f"{kind} has {len(text)} characters; at most {MAX_CHARACTERS} are supported"
            raise ParameterError(message, param=kind, limit=MAX_CHARACTERS)
        job: dict[str, Any] = {"kind": kind, "text": text, "boundary": boundary}
        job |= {"seconds": LANES[-1][1], "is_slow": False}  # after the check
        key = kind, text, boundary
        if (mask := self._checked.pop(key, None)) is not None:
            self._checked[key] = mask
            return Grammar(self.processes, job, mask)
        for lane, (_, seconds) in zip(self._lanes, LANES, strict=True):
            request = RequestGrammar(self.processes, job | {"seconds": seconds})
            try:
                with self._turn(lane):
                    while not request.prepare([], 0.05):
                        if self.processes.is_closed:
                            raise ValueError("the engine is closed")
                        _check_caller()
                        if not request.is_busy:
                            time.sleep(0.01)
            except BaseException:
                request.close()
                raise
            if request.error != DIED:
                break
        if request.fault is not None:
            raise request.fault
        if request.error:
            reason = f"{kind}={short(text)}: {DIED}" if request.error == DIED else request.error
            raise ParameterError(reason, param=kind)
        mask = request.mask
        if lane is self._lanes[-1]:
            job["is_slow"] = True
        else:
            self._checked[key] = mask
            if len(self._checked) > NUM_CHECKED:
                self._checked.popitem(last=False)
        request.job = job
        if self.processes.has_room:
            return Grammar(self.processes, job, mask, request)
        request.close()
        return Grammar(self.processes, job, mask)

    @contextmanager
    def _turn(self, lane: threading.BoundedSemaphore) -> Iterator[None]:
        """Wait for a place in a lane; few may wait for the second one, as they hold threads."""
        is_slow = lane is self._lanes[-1]
        if is_slow and not self._slow.acquire(blocking=False):
            raise ParameterError(f"{MAX_SLOW} slow grammars are being compiled; retry later")
        try:
            while not lane.acquire(timeout=0.05):
                _check_caller()
            try:
                yield
            finally:
                lane.release()
        finally:
            if is_slow:
                self._slow.release()


def _check_caller() -> None:
    caller_left = _caller_left.get()
    if caller_left is not None and caller_left.is_set():
        raise CallerLeftError
