"""Grammars of requests, in processes apart from the engine; see ``grammar_worker``.

Any thread checks a grammar with :class:`Grammars`. Later, the engine's thread tells a
:class:`RequestGrammar` the tokens of its text and the drafts, and reads masks from shared memory.
It waits for an answer for at most ``PATIENCE``. A request whose answer is late takes no part in
rounds until the answer has come.
"""

import json
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from specjax.checks import ParameterError, short
from specjax.sampling.grammar import Thinking
from specjax.sampling.grammar_worker import COMMAND, FORK, KILL, SLOW_SECONDS, split_region

MAX_CHARACTERS = 2**16
# Seconds that a round waits for masks, after which it goes on without the request.
PATIENCE = 0.025
# Memory of a grammar. A schema of 1,200 nested definitions needs about 90 MB.
MAX_BYTES = 128 * 2**20
# Lanes in which new grammars are compiled: processes at once, CPU seconds, niceness. A grammar that
# is too slow for the first lane starts again in the second one. Of 5,000 random grammars, each took
# 0.03 s or less.
LANES = ((2, 0.25, 10), (1, 3.0, 19))
MAX_SLOW = 8  # checks in the second lane
START_SECONDS = 60.0  # maximum wait for the program, which reads the tokenizer
# Idle processes, which have compiled a grammar before: forking and the first one take 15 ms.
NUM_IDLE = 4
# Processes in addition to those of running requests and of the waiting ones that keep theirs, which
# are twice as many.
SPARE = NUM_IDLE + 8
# Grammars of the first lane that need no other check, because clients send the same one again.
NUM_CHECKED = 64
DIED = f"it needs too much time or memory ({LANES[-1][1]:g} CPU seconds, {MAX_BYTES >> 20} MiB)"

_caller_left: ContextVar[threading.Event | None] = ContextVar("caller_left", default=None)


@contextmanager
def while_waiting() -> Iterator[None]:
    """In this block, and in threads with a copy of its context, a caller waits for grammars.

    If the block ends before a grammar is checked, the work on it ends too.
    """
    left = threading.Event()
    token = _caller_left.set(left)
    try:
        yield
    finally:
        left.set()
        _caller_left.reset(token)


class CallerLeftError(Exception):
    """The caller that waited for a grammar has left."""


class Process:
    """A forked process with the matchers of one grammar, and its region of shared memory."""

    def __init__(self, grammars: "Grammars", number: int, region: int, connection: Connection):
        self._grammars, self._number = grammars, number
        self.region, self.connection = region, connection
        self._readable = select.poll()  # Connection.poll takes 15 us
        self._readable.register(connection.fileno(), select.POLLIN)

    def has_answer(self, seconds: float = 0.0) -> bool:
        """Wait for an answer or the end of the process."""
        return bool(self._readable.poll(1000 * max(0.0, seconds)))

    def send(self, request: dict[str, Any]) -> None:
        self.connection.send_bytes(json.dumps(request, ensure_ascii=False).encode())

    def receive(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.connection.recv_bytes())
        return answer

    def receive_mask(self) -> np.ndarray:
        return np.frombuffer(self.connection.recv_bytes(), np.int32)

    def end(self) -> None:
        self._grammars.end(self._number)


class Grammars:
    """Starts the program, checks grammars and starts processes for them; for any thread.

    Args:
        tokenizer: JSON of the library tokenizers.
        vocab_size: number of token ids, V.
        end_token_ids: tokens that may follow a complete text.
        spaces: whether JSON may have white space between its tokens.
        num_slots: maximum number of running requests.
        nodes: maximum number of nodes of a tree, T.
        width: maximum number of forced tokens per node, 1 + S.
    """

    def __init__(
        self,
        tokenizer: str,
        vocab_size: int,
        end_token_ids: Sequence[int],
        *,
        spaces: bool,
        num_slots: int,
        nodes: int,
        width: int,
    ) -> None:
        self._setup = json.dumps(
            {
                "tokenizer": tokenizer,
                "vocab_size": vocab_size,
                "end_token_ids": list(end_token_ids),
                "spaces": spaces,
                "max_bytes": MAX_BYTES,
            }
        )
        self.num_words = -(-vocab_size // 32)
        self._num_slots, self._region_size = num_slots, nodes * (self.num_words + width)
        count = 3 * num_slots + SPARE
        self._shared = os.memfd_create("specjax-grammars")
        weakref.finalize(self, os.close, self._shared)
        os.ftruncate(self._shared, 4 * count * self._region_size)
        self._memory = np.frombuffer(mmap.mmap(self._shared, 0), np.int32).reshape(count, -1)
        self._lock, self._pid, self._is_closed = threading.RLock(), os.getpid(), False
        self._free, self._last = list(range(count)), 0
        self._processes: dict[int, Process] = {}
        self._idle: list[Process] = []
        self._checked = OrderedDict[Any, np.ndarray]()  # masks by grammar, the last used one last
        self._ending: dict[int, Process] = {}
        self._lanes = [threading.BoundedSemaphore(size) for size, *_ in LANES]
        self._num_slow = 0  # checks in the second lane, which is the last one
        self._start_program()

    def _start_program(self) -> None:
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = os.pathsep.join(filter(None, sys.path))
        # one thread, because it forks; one arena of memory, because arenas reserve addresses
        limits = {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "PYTHONPATH": paths}
        module = "specjax.sampling.grammar_worker"
        with other:
            program = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(other.fileno()), str(self._shared)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # the library writes the stacks of its faults
                pass_fds=(other.fileno(), self._shared),
                env=os.environ | limits,
                start_new_session=True,  # an interrupt from the terminal must reach only the parent
            )
        self._control, self._program = mine, program
        self._end_program = weakref.finalize(self, _end_program, mine, program)
        assert program.stdin is not None
        with suppress(BrokenPipeError), program.stdin as pipe:
            pipe.write(self._setup.encode())
        mine.settimeout(START_SECONDS)
        error = mine.recv(1000) or b"its program ends at once"
        mine.settimeout(None)
        if error != b"\0":
            reason = error.decode(errors="replace")
            raise ValueError(f"grammar_backend='llguidance' refuses the tokenizer: {reason}")

    def check(self, kind: str | None, text: str, thinking: Thinking | None = None) -> "Grammar":
        """Compile a grammar. Raises ParameterError with the library's reason.

        ``kind`` is the name of the sampling parameter; without one, only the reasoning is limited.
        """
        if len(text) > MAX_CHARACTERS:
            message = f"{kind} has {len(text)} characters; at most {MAX_CHARACTERS} are supported"
            raise ParameterError(message, param=kind, limit=MAX_CHARACTERS)
        job: dict[str, Any] = {"kind": kind, "text": text}
        job["thinking"] = thinking and [*thinking[:3], [*thinking[3]]]
        job |= {"seconds": LANES[-1][1], "niceness": 0}  # if a process compiles it after the check
        key = kind, text, thinking
        with self._lock:
            if (mask := self._checked.pop(key, None)) is not None:
                self._checked[key] = mask
                return Grammar(self, job, mask, None)
        error = f"{kind}={short(text)}: {DIED}"
        for lane, (_, seconds, niceness) in zip(self._lanes, LANES, strict=True):
            with self._turn(lane):
                limits = {"seconds": seconds, "niceness": niceness, "tokens": []}
                while (process := self.start(job | limits)) is None:
                    if self._is_closed:
                        raise ValueError("the engine is closed")
                    _check_caller()
                    time.sleep(0.01)
                is_kept = False
                try:
                    while not process.has_answer(0.05):
                        _check_caller()
                    if answer := process.receive()["error"]:
                        error = answer
                        break
                    mask = process.receive_mask()
                    is_kept = self.has_room
                    if lane is self._lanes[0]:
                        self._remember(key, mask)
                    else:
                        job |= {"niceness": niceness}
                    return Grammar(self, job, mask, process if is_kept else None)
                except (EOFError, OSError):
                    continue
                finally:
                    if not is_kept:
                        process.end()
        raise ParameterError(error, param=kind)

    @contextmanager
    def _turn(self, lane: threading.BoundedSemaphore) -> Iterator[None]:
        """Wait for a place in a lane; few may wait for the second one, as they hold threads."""
        is_slow = lane is self._lanes[-1]
        with self._lock:
            self._num_slow += is_slow
        try:
            if self._num_slow > MAX_SLOW:
                raise ParameterError(f"{MAX_SLOW} slow grammars are being compiled; retry later")
            while not lane.acquire(timeout=0.05):
                _check_caller()
            try:
                yield
            finally:
                lane.release()
        finally:
            with self._lock:
                self._num_slow -= is_slow

    def _remember(self, key: Any, mask: np.ndarray) -> None:
        with self._lock:
            self._checked[key] = mask
            if len(self._checked) > NUM_CHECKED:
                self._checked.popitem(last=False)

    @property
    def has_room(self) -> bool:
        """Whether waiting requests may have processes too."""
        return len(self._processes) - len(self._idle) <= 2 * self._num_slots

    def start(self, job: dict[str, Any]) -> Process | None:
        """Give a process a job; ``None`` if too many run, of which some will end."""
        with self._lock:
            self._collect()
            if self._is_closed:
                return None
            idle = [each for each in self._idle if not each.has_answer()]  # they only end
            for each in self._idle:
                if each not in idle:
                    each.end()
            process = idle.pop(0) if idle else self._fork()
            self._idle = idle
            while len(idle) < NUM_IDLE and (new := self._fork()) is not None:
                idle.append(new)
        if process is not None:
            with suppress(OSError):  # reading the answer will fail too
                process.send(job)
        return process

    def _fork(self) -> Process | None:
        if not self._free:
            return None
        mine, other = socket.socketpair()
        self._last += 1
        number, region = self._last, self._free.pop()
        process = Process(self, number, region, Connection(mine.detach()))
        self._processes[number] = process
        message = COMMAND.pack(FORK, number)
        with other:
            try:
                socket.send_fds(self._control, [message], [other.fileno()])
            except OSError:  # the program has died
                self._end_program()
                self._start_program()
                socket.send_fds(self._control, [message], [other.fileno()])
        return process

    def close(self) -> None:
        """End the program, and its processes with it."""
        with self._lock:
            self._is_closed = True
            self._end_program()

    def end(self, number: int) -> None:
        """Kill a process. Its region is free once its end of the connection is closed."""
        if os.getpid() != self._pid:  # a fork must not end what it inherits, and may lack the lock
            return
        with self._lock:
            process = self._processes.pop(number, None)
            if process is None:
                return
            self._ending[number] = process
            with suppress(OSError):
                self._control.send(COMMAND.pack(KILL, number))
            with (
                suppress(OSError),
                socket.socket(fileno=os.dup(process.connection.fileno())) as end,
            ):
                end.shutdown(socket.SHUT_WR)  # if the program has died, the process ends by this

    def _collect(self) -> None:
        for number, process in list(self._ending.items()):
            try:
                while process.has_answer():
                    process.connection.recv_bytes()
            except (EOFError, OSError):
                process.connection.close()
                self._free.append(process.region)
                del self._ending[number]

    def region(self, process: Process, nodes: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Masks i32 ``[nodes, V / 32]`` and forced tokens i32 ``[nodes, width]`` of a process."""
        return split_region(self._memory[process.region], nodes, self.num_words, width)

    def place(self, process: Process) -> int:
        """Byte offset of a process's region."""
        return 4 * process.region * self._region_size


def _end_program(control: socket.socket, program: subprocess.Popen[bytes]) -> None:
    control.close()
    program.kill()
    program.wait()


def _check_caller() -> None:
    left = _caller_left.get()
    if left is not None and left.is_set():
        raise CallerLeftError


class Grammar:
    """A grammar that has been checked, for one request or several samples."""

    def __init__(
        self, grammars: Grammars, job: dict[str, Any], mask: np.ndarray, process: Process | None
    ) -> None:
        self.grammars, self.job, self.mask = grammars, job, mask
        self._process = process

    def request(self) -> "RequestGrammar":
        """The grammar of a new request; the first one gets the process of the check."""
        request = RequestGrammar(self, self._process)
        if self._process is None and self.grammars.has_room and not self.job["niceness"]:
            request.start([])
        self._process = None
        return request

    def __del__(self) -> None:
        if self._process is not None and not sys.is_finalizing():
            self._process.end()


class RequestGrammar:
    """The grammar of one request, which another process follows; for the engine's thread.

    Attributes:
        error: why the text cannot be continued.
        is_complete: nothing may follow the text any more.
        is_free: nothing limits the rest of the text.
        is_busy: an answer is awaited.
        is_slow: its work needs so much CPU time that rounds do not wait for it.
        mask: i32 ``[V / 32]`` of the text; ``None`` if it is not known.
    """

    def __init__(self, grammar: Grammar, process: Process | None) -> None:
        self._grammar, self._process = grammar, process
        self.mask: np.ndarray | None = grammar.mask
        self.error = ""
        self.is_complete = self.is_free = self.is_busy = self.is_slow = False
        self._is_starting = False
        self._count = 0  # tokens that the last answer accepts
        self._tree: tuple[list[int], list[int], int] | None = None  # the region has its masks
        self._written: list[int] = []

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = self.mask = None
            self.is_busy = False

    def has_answer(self, seconds: float) -> bool:
        assert self._process is not None
        return self._process.has_answer(seconds)

    def start(self, text: Sequence[int]) -> None:
        """Start a process that follows ``text``, if there may be another one."""
        try:
            self._process = self._grammar.grammars.start(self._grammar.job | {"tokens": list(text)})
        except Exception as error:  # no process could be started; it must end no other request
            self.error = f"its process cannot be started: {error}"
        self.is_busy = self._is_starting = self.is_slow = self._process is not None
        self._tree = None

    def prepare(self, text: Sequence[int], seconds: float) -> bool:
        """Return whether a process follows ``text`` and ``mask`` is known, or the grammar failed.

        Call this until it returns ``True``, before the text is continued; it waits for ``seconds``.
        """
        if self._process is None:
            self.start(text)
        elif self.mask is None and not self.is_busy:
            self.ask([0], [-1], 1)
        if self.mask is None:
            await_answers([self], seconds)
        if self.mask is None and self._process is not None and not (self.is_busy or self.error):
            masks, _ = self._grammar.grammars.region(self._process, 1, 1)
            self.mask = masks[0].copy() if self._written else np.full_like(masks[0], -1)
        return bool(self.error) or (self._process is not None and self.mask is not None)

    def send(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text; :meth:`advance` has the answer."""
        self._tree = self.mask = None
        self._request({"tokens": list(tokens)})

    def advance(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens that were sent the grammar accepts."""
        return min(self._count, len(tokens))

    def ask(self, tokens: list[int], parents: list[int], width: int) -> None:
        """Request masks and forced tokens of a tree, unless its answer is here already."""
        if self._tree == (tokens, parents, width):
            return
        self._tree = tokens, parents, width
        grammars, process = self._grammar.grammars, self._process
        at = 0 if process is None else grammars.place(process)
        self._request({"tree": [tokens, parents], "at": at, "sizes": [grammars.num_words, width]})

    def read(self, masks: np.ndarray, forced: np.ndarray) -> list[int]:
        """Copy the answer for a tree to its rows; return those that were written."""
        if self._process is None or self._tree is None:
            return []
        tokens, _, width = self._tree
        source = self._grammar.grammars.region(self._process, len(tokens), width)
        for row in self._written:
            masks[row], forced[row] = source[0][row], source[1][row]
        return self._written

    def _request(self, request: dict[str, Any]) -> None:
        self._count, self._written = 0, []
        if self._process is None:
            self.error = self.error or "its process has ended"
            return
        try:
            self._process.send(request)
            self.is_busy = True
        except OSError:
            self._fail()

    def receive(self) -> None:
        """Take the answer, which must be there; or find that the process has ended."""
        assert self._process is not None
        try:
            answer = self._process.receive()
            if self._is_starting and not answer["error"]:
                self.mask = self._process.receive_mask()
        except (EOFError, OSError):
            self._fail()
            return
        self._is_starting = self.is_busy = False
        self.error, self.is_complete = answer["error"], answer.get("is_complete", False)
        self.is_free, self._count = answer.get("is_free", False), answer.get("count", 0)
        self._written = answer.get("written", [])
        self.is_slow = answer.get("seconds", 0) > SLOW_SECONDS

    def _fail(self) -> None:
        self.close()
        self.error = DIED


def await_answers(grammars: Collection[RequestGrammar], seconds: float | None = None) -> None:
    """Take the answers that come within ``seconds``; grammars without one stay busy.

    Default: within ``PATIENCE``, but slow grammars are not awaited.
    """
    deadline = time.monotonic() + (PATIENCE if seconds is None else seconds)
    busy = [each for each in grammars if each.is_busy]
    for each in sorted(busy, key=lambda grammar: grammar.is_slow):
        is_awaited = seconds is not None or not each.is_slow
        if each.has_answer(deadline - time.monotonic() if is_awaited else 0.0):
            each.receive()
        else:
            each.is_slow = True
