"""Grammars of requests, for the engine's thread.

It tells a :class:`RequestGrammar` the tokens of its text and the drafts, and reads masks from the
memory of its process. It waits for an answer for at most ``PATIENCE``. A request whose answer is
late takes no part in rounds until the answer has come.
"""

import sys
import time
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specjax.sampling.grammar_process import DIED, Answer, GrammarProcesses, Process

# Seconds that a round waits for masks, after which it goes on without the request.
PATIENCE = 0.025


# tokens of the nodes, the root first, which is the last token of the text; and their parents
Tree = tuple[list[int], list[int]]
ROOT: Tree = [0], [-1]  # for the mask of the text only


@dataclass(eq=False)
class Grammar:
    """A grammar that has been checked, for one request or several samples."""

    processes: GrammarProcesses
    job: dict[str, Any]
    mask: np.ndarray | None
    checked: "RequestGrammar | None" = None  # it has the process of the check
    _requests: "list[RequestGrammar]" = field(default_factory=list)

    def request(self) -> "RequestGrammar":
        """The grammar of a new request."""
        request, self.checked = self.checked, None
        if request is None:
            request = RequestGrammar(self.processes, self.job, self.mask)
            if self.processes.has_room and not self.job["is_slow"]:
                request.start([])
        self._requests.append(request)
        return request

    def close(self) -> None:
        """End the processes of the check and of all requests."""
        for request in (self.checked, *self._requests):
            if request is not None:
                request.close()


class RequestGrammar:
    """The grammar of one request, which another process follows; for the engine's thread.

    Attributes:
        job: the grammar and its limits, as a process gets them.
        answer: what the process said last about the text.
        is_busy: an answer is awaited.
        is_slow: its work needs so much CPU time that rounds do not wait for it.
        mask: i32 ``[V / 32]`` of the text; ``None`` if it is not known.
        fault: why no process could be started.
    """

    def __init__(
        self,
        processes: GrammarProcesses,
        job: dict[str, Any],
        mask: np.ndarray | None = None,
    ) -> None:
        self._processes, self.job, self.mask = processes, job, mask
        self._process: Process | None = None
        self.answer = Answer(0, False, False, False, "")
        self.is_busy = self.is_slow = False
        self.fault: Exception | None = None
        self._tree: Tree | None = None  # the process has its masks

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    @property
    def error(self) -> str:
        """Why the text cannot be continued."""
        return self.answer.error

    def close(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = self.mask = None
            self.is_busy = False

    def start(self, text: Sequence[int]) -> None:
        """Start a process that follows ``text``, if there may be another one."""
        try:
            self._process = self._processes.start(self.job | {"tokens": [*text]})
        except Exception as error:  # it must end no other request
            self.fault = error
            self._fail(f"its process cannot be started: {error}")
        self.is_busy = self.is_slow = self._process is not None
        self._tree = None

    def prepare(self, text: Sequence[int], seconds: float = 0.0) -> bool:
        """Return whether a process follows ``text`` and ``mask`` is known, or the grammar failed.

        Call this until it returns ``True``, before the text is continued; it waits for ``seconds``.
        """
        if self._process is None:
            self.start(text)
        elif self.mask is None and not self.is_busy:
            self.send([], ROOT)
        if self.mask is None:
            await_answers([self], seconds)
        if self.mask is None and self._process is not None and not (self.is_busy or self.error):
            self.mask = self._process.masks[0].copy()
        return bool(self.error) or (self._process is not None and self.mask is not None)

    def send(self, tokens: Sequence[int], tree: Tree | None = None) -> None:
        """Add tokens to the text, and request the masks of the drafts after it, if any.

        ``answer`` will have the number of tokens that the grammar accepts. After a forbidden token,
        and after a complete text, no mask is written. If there is nothing new, nothing is sent.
        """
        if not tokens and tree == self._tree:
            return
        self._tree = tree
        if tokens:
            self.mask = None
        if self._process is None:
            self._fail(self.error or "its process has ended")
        else:
            nodes, parents = tree or ([], [])
            message = array("i", [len(tokens), *tokens, *nodes, *parents])
            self._process.send(message.tobytes())
            self.is_busy = True

    def read(self, masks: np.ndarray, forced: np.ndarray) -> int:
        """Copy the masks and forced tokens of the tree to the first rows; return their number."""
        if self._process is None or self._tree is None:
            return 0
        count = len(self._tree[0])
        masks[:count] = self._process.masks[:count]
        forced[:count] = self._process.forced[:count, : forced.shape[1]]
        return count

    def receive(self, seconds: float) -> None:
        """Take an answer that comes within ``seconds``, or find that the process has ended."""
        assert self._process is not None
        self.is_slow = True
        try:
            if self._process.has_answer(seconds):
                self.answer, self.is_busy = self._process.receive(), False
                self.is_slow = self.answer.is_slow
                if self.answer.error:  # an exception may hold this object for long
                    self.close()
        except (EOFError, OSError):
            self._fail(DIED)

    def _fail(self, reason: str) -> None:
        self.close()
        self.answer = Answer(0, False, False, False, reason)


def await_answers(grammars: Collection[RequestGrammar], seconds: float | None = None) -> None:
    """Take the answers that come within ``seconds``; grammars without one stay busy.

    Default: within ``PATIENCE``, but slow grammars are not awaited.
    """
    deadline = time.monotonic() + (PATIENCE if seconds is None else seconds)
    busy = [grammar for grammar in grammars if grammar.is_busy]
    for grammar in sorted(busy, key=lambda grammar: grammar.is_slow):
        is_awaited = seconds is not None or not grammar.is_slow
        grammar.receive(deadline - time.monotonic() if is_awaited else 0.0)
