"""The program of ``grammar_worker``, and the processes that it forks, one for each grammar.

A process has a region of shared memory, to which it writes masks and forced tokens.
"""

import json
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, cast

import numpy as np

from specjax.sampling.grammar_worker import ANSWER, COMMAND, FORK, KILL, MAX_ANSWER

# Limits of a grammar. A schema of 1,200 nested definitions needs about 90 MB.
MAX_BYTES, MAX_SECONDS = 128 * 2**20, 3.0
DIED = f"it needs too much time or memory ({MAX_SECONDS:g} CPU seconds, {MAX_BYTES >> 20} MiB)"
START_SECONDS = 60.0  # maximum wait for the program, which reads the tokenizer
# Idle processes, which have compiled a grammar before: forking and the first one take 15 ms.
NUM_IDLE = 4
# Processes in addition to those of running requests and of the waiting ones that keep theirs, which
# are twice as many.
SPARE = NUM_IDLE + 8


class Answer(NamedTuple):
    """The state of a text; ``masks`` and ``forced`` have the nodes of its tree."""

    num_accepted: int  # new tokens that the grammar accepts
    is_complete: bool  # nothing may follow the text any more
    is_free: bool  # nothing limits what follows the text
    is_slow: bool  # the work needed much CPU time
    error: str  # why the text cannot be continued


class Process:
    """A forked process with the matchers of one grammar.

    Attributes:
        masks: i32 ``[T, V / 32]`` in shared memory.
        forced: i32 ``[T, 1 + S]`` in shared memory; forced tokens, then -1.
    """

    def __init__(
        self, owner: "GrammarProcesses", number: int, region: int, end: socket.socket
    ) -> None:
        self._owner, self.number, self.region = owner, number, region
        rows, words = owner.memory[region], owner.num_words
        self.masks, self.forced = rows[:, :words], rows[:, words:]
        self.socket, self._readable = end, select.poll()
        self._readable.register(end.fileno(), select.POLLIN)
        weakref.finalize(self, end.close)

    def has_answer(self, seconds: float = 0.0) -> bool:
        """Wait for an answer or the end of the process."""
        return bool(self._readable.poll(1000 * max(0.0, seconds)))

    def send(self, message: bytes) -> None:
        with suppress(OSError):  # reading the answer will fail too
            self.socket.sendall(len(message).to_bytes(4) + message)

    def receive(self) -> Answer:
        """Read an answer; it is small, so one call has it all. Raises EOFError or OSError."""
        message = self.socket.recv(MAX_ANSWER)
        if not message:
            raise EOFError
        error = message[ANSWER.size :].decode(errors="replace")
        return Answer._make((*ANSWER.unpack_from(message), error))

    def end(self) -> None:
        self._owner.end(self)


class GrammarProcesses:
    """Starts the program, and processes for grammars; for any thread.

    Args:
        num_slots: maximum number of running requests.
        nodes: maximum number of nodes of a tree, T.
        width: maximum number of forced tokens per node, 1 + S.
        compiler: arguments of the GrammarCompiler.
    """

    def __init__(self, *, num_slots: int, nodes: int, width: int, **compiler: Any) -> None:
        self.num_words, self._num_slots = -(-compiler["vocab_size"] // 32), num_slots
        shape = 3 * num_slots + SPARE, nodes, self.num_words + width
        self._setup = json.dumps(compiler | {"max_bytes": MAX_BYTES, "shape": shape})
        self._shared = os.memfd_create("specjax-grammars")
        weakref.finalize(self, os.close, self._shared)
        os.ftruncate(self._shared, 4 * int(np.prod(shape)))
        self.memory = np.frombuffer(mmap.mmap(self._shared, 0), np.int32).reshape(shape)
        self._lock, self._pid, self.is_closed = threading.RLock(), os.getpid(), False
        self._free, self._last = list(range(shape[0])), 0
        self._processes: dict[int, Process] = {}
        self._idle: list[Process] = []
        self._ending: list[Process] = []
        self._is_starting, self._end_program = True, cast(Callable[[], Any], lambda: None)
        self._start_program()
        if self._failure:
            raise ValueError(f"grammar_backend='llguidance' {self._failure}")

    def _start_program(self) -> None:
        """Start the program, which can take seconds; ``_failure`` is why it cannot, if so."""
        try:
            self._failure = self._launch()
        except Exception as error:
            self._failure = f"cannot start its program: {error}"
        with self._lock:
            self._is_starting = False
            if self._failure or self.is_closed:
                self._end_program()

    def _launch(self) -> str:
        """Start the program and wait until it can fork; return why it refuses the tokenizer."""
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
                # An interrupt from the terminal must reach only the parent. A session of its own
                # would have the same share of the cores as the engine.
                process_group=0,
            )
        self._control, self._program = mine, program
        self._end_program = weakref.finalize(self, _end_program, mine, program)
        assert program.stdin is not None
        with suppress(BrokenPipeError), program.stdin as pipe:
            pipe.write(self._setup.encode())
        mine.settimeout(START_SECONDS)
        error = mine.recv(1000) or b"its program ends at once"
        mine.settimeout(None)
        return "" if error == b"\0" else f"refuses the tokenizer: {error.decode(errors='replace')}"

    @property
    def has_room(self) -> bool:
        """Whether waiting requests may have processes too."""
        return len(self._processes) - len(self._idle) <= 2 * self._num_slots

    def start(self, job: dict[str, Any]) -> Process | None:
        """Give a process a job; ``None`` if too many run or the program is starting.

        Raises RuntimeError if the program cannot be started; the next call tries it again.
        """
        with self._lock:
            self._collect()
            if self.is_closed:
                return None
            failure = "" if self._is_starting else self._failure
            for idle in self._idle.copy():
                if idle.has_answer():  # they only end
                    self._idle.remove(idle)
                    idle.end()
            while len(self._idle) <= NUM_IDLE and (forked := self._fork()) is not None:
                self._idle.append(forked)
            process = self._idle.pop(0) if self._idle else None
        if process is not None:
            process.send(json.dumps(job | {"region": process.region}).encode())
        elif failure:
            raise RuntimeError(failure)
        return process

    def _fork(self) -> Process | None:
        if not self._free or self._is_starting:
            return None
        mine, other = socket.socketpair()
        self._last += 1
        with other:
            try:
                socket.send_fds(self._control, [COMMAND.pack(FORK, self._last)], [other.fileno()])
            except OSError:  # the program has died
                mine.close()
                self._is_starting = True
                self._end_program()
                threading.Thread(target=self._start_program, daemon=True).start()
                return None
        process = Process(self, self._last, self._free.pop(), mine)
        self._processes[process.number] = process
        return process

    def close(self) -> None:
        """End the program, and its processes with it."""
        with self._lock:
            self.is_closed = True
            self._end_program()

    def end(self, process: Process) -> None:
        """Kill a process. Its region is free once its end of the connection is closed."""
        if os.getpid() != self._pid:  # a fork must not end what it inherits, and may lack the lock
            return
        with self._lock:
            if self._processes.pop(process.number, None) is None:
                return
            self._ending.append(process)
            with suppress(OSError):
                self._control.send(COMMAND.pack(KILL, process.number))
            with suppress(OSError):
                process.socket.shutdown(socket.SHUT_WR)  # ends it if the program has died

    def _collect(self) -> None:
        for process in self._ending.copy():
            try:
                while process.has_answer():
                    process.receive()
            except (EOFError, OSError):
                process.socket.close()
                self._free.append(process.region)
                self._ending.remove(process)


def _end_program(control: socket.socket, program: subprocess.Popen[bytes]) -> None:
    control.close()
    program.kill()
    program.wait()
