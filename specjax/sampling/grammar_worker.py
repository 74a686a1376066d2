"""The program in which grammars are compiled and followed, apart from the engine.

Grammars come from clients, and the library bounds neither the time nor the memory to compile all of
them. So the program reads the tokenizer once and then forks a process for each grammar. Such a
process limits its own work, and ends alone. It has one thread at a time, which computes without
the lock of the engine's interpreter.

Command line: the descriptors of a socket and of shared memory. Standard input: one JSON object, see
:func:`main`. Messages on the socket are of ``COMMAND``. A forked process has a socket of its own,
which comes with the command that forks it. The first message there is a grammar as a JSON object,
each later one has tokens and a tree, see :meth:`Follower._step`, and answers are of ``ANSWER``.
"""

import json
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import thread_time
from typing import TYPE_CHECKING

import numpy as np

from specjax.sampling.boundary import Boundary
from specjax.sampling.grammar import Constraint

if TYPE_CHECKING:  # the engine imports this file, and may lack the library
    from specjax.sampling.grammar_compiler import GrammarCompiler

COMMAND = struct.Struct("=bq")  # FORK or KILL, and a number that identifies the process
FORK, KILL = 0, 1
# tokens that the grammar accepts; whether the text is complete and free, and the work slow; error
ANSWER, MAX_ANSWER = struct.Struct("=i???"), 2048
STACK_BYTES = 2**28  # a row of rules that refer to each other needs up to 40 MB
# CPU seconds for the tokens of a round and for each mask. The library's own limits end a mask after
# 1 s or less.
STEP_SECONDS = 4.0
# A process whose step took longer than this yields to others from then on.
SLOW_SECONDS = 0.01


class Follower:
    """Follows the text of one request; runs in a forked process."""

    def __init__(
        self, compiler: "GrammarCompiler", memory: np.ndarray, max_bytes: int, end: socket.socket
    ) -> None:
        self._compiler, self._regions, self._end = compiler, memory, end
        # Before the fork: where a process has read its own folder of /proc, the kernel removes that
        # folder at its end, which took the program more time than all forks.
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        self._max_bytes = size + 2 * STACK_BYTES + max_bytes
        self._constraint: Constraint | None = None
        self._has_started = threading.Event()

    def run(self) -> None:
        self._input = self._end.makefile("rb")
        resource.setrlimit(resource.RLIMIT_AS, (self._max_bytes, self._max_bytes))
        threading.stack_size(STACK_BYTES)
        # two threads, because a thread that yields to others does so until its end
        threading.Thread(target=self._start, daemon=True).start()
        follow = threading.Thread(target=self._follow)
        follow.start()
        follow.join()

    def _start(self) -> None:
        with suppress(Exception):  # the engine has closed the connection, or memory is used up
            self._compile()
        self._has_started.set()
        threading.Event().wait()  # keeps the stack, which counts as memory

    def _compile(self) -> None:
        """Compile a grammar, add its tokens so far, and answer with the mask after them."""
        _yield_to_others()
        with suppress(ValueError):  # copies most of the memory that a grammar will write to
            self._compiler.compile("regex", "[a-z]*")
        job = json.loads(self._receive())
        _limit_time(job["seconds"])
        boundary = job["boundary"] and Boundary(*job["boundary"])
        try:
            constraint = self._compiler.compile(job["kind"], job["text"], boundary)
        except ValueError as error:
            self._answer(str(error))
            return
        rows, words = self._regions[job["region"]], constraint.num_words
        self._masks, self._forced = rows[:, :words], rows[:, words:]
        for token in job["tokens"]:
            _limit_time(STEP_SECONDS)
            constraint.advance([token])
        constraint.fill([0], [-1], self._masks, self._forced[:, :1])  # more would cost a matcher
        _limit_time(0)
        self._answer(constraint.error, 0, constraint.is_complete, False, False)
        self._constraint = constraint

    def _follow(self) -> None:
        self._has_started.wait()
        with suppress(OSError):
            while self._constraint is not None and (message := self._receive()):
                self._step(self._constraint, array("i", message))

    def _step(self, constraint: Constraint, message: Sequence[int]) -> None:
        """Add tokens to the text, then write the masks of a tree.

        ``message`` has the number of tokens, the tokens, those of the tree, and its parents.
        """
        before, count, num_tokens = thread_time(), 0, message[0]
        tokens, tree = message[1 : 1 + num_tokens], message[1 + num_tokens :]
        nodes, parents = tree[: len(tree) // 2], tree[len(tree) // 2 :]
        _limit_time(STEP_SECONDS)
        try:
            count = constraint.advance(tokens)
            if count == num_tokens and not constraint.is_complete:
                limit = partial(_limit_time, STEP_SECONDS)
                constraint.fill(nodes, parents, self._masks, self._forced, limit)
        except Exception as fault:  # of the library
            constraint.error = repr(fault)
        _limit_time(0)
        is_slow = thread_time() - before > SLOW_SECONDS
        self._answer(constraint.error, count, constraint.is_complete, constraint.is_free, is_slow)
        if is_slow:
            _yield_to_others()

    def _receive(self) -> bytes:
        """The next message after its length in four bytes; empty at the end."""
        return self._input.read(int.from_bytes(self._input.read(4)))

    def _answer(self, error: str, *values: int) -> None:
        self._end.send((ANSWER.pack(*values or (0, 0, 0, 0)) + error.encode())[:MAX_ANSWER])


def _limit_time(cpu_seconds: float) -> None:
    """End the process if it computes for longer from now on; 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def _yield_to_others() -> None:
    """Let this thread compute only where a core is idle.

    On two cores, a busy thread of niceness 19 makes rounds of a model 1.5 times as long, and one of
    this kind 1.1 times.
    """
    with suppress(OSError):  # some sandboxes do not allow it
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


def _fork(follower: Follower, control: socket.socket) -> int:
    process = os.fork()
    if process == 0:
        try:
            control.close()
            follower.run()
        finally:
            os._exit(0)
    return process


def _serve(control: socket.socket, make: Callable[[socket.socket], Follower]) -> None:
    """Fork and end processes until the engine closes the socket."""
    processes: dict[int, int] = {}
    while True:
        # wake up now and then, to remove processes that have ended
        if select.select([control], [], [], 1.0)[0]:
            message, descriptors, *_ = socket.recv_fds(control, COMMAND.size, 1)
            if not message:
                break
            command, number = COMMAND.unpack(message)
            if command == FORK:
                with suppress(OSError), socket.socket(fileno=descriptors[0]) as end:
                    processes[number] = _fork(make(end), control)  # else the engine sees the end
            elif number in processes:
                os.kill(processes[number], signal.SIGKILL)
        for number, process in list(processes.items()):
            if os.waitpid(process, os.WNOHANG)[0]:
                del processes[number]
    for process in processes.values():
        os.kill(process, signal.SIGKILL)


def main() -> None:
    """Read arguments of the compiler, ``max_bytes`` and the ``shape`` of the memory; serve.

    The first message on the socket is empty, or says why the tokenizer is refused.
    """
    from specjax.sampling.grammar_compiler import GrammarCompiler

    # time limits end a process by this signal, which the parent may ignore or block
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    control = socket.socket(fileno=int(sys.argv[1]))
    values = json.load(sys.stdin)
    memory = np.frombuffer(mmap.mmap(int(sys.argv[2]), 0), np.int32).reshape(values.pop("shape"))
    max_bytes = values.pop("max_bytes")
    try:
        compiler = GrammarCompiler(**values)
    except Exception as error:  # the library may raise any
        control.send(str(error).encode()[:1000] or b"unknown error")
        return
    control.send(b"\0")
    _serve(control, partial(Follower, compiler, memory, max_bytes))


if __name__ == "__main__":
    main()
