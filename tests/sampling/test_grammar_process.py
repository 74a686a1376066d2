"""Processes of grammars: hostile grammars end alone, callers may leave, and answers may be late."""

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax.checks import ParameterError
from specjax.sampling import grammar_check, grammar_compiler, grammar_process
from specjax.sampling.grammar import Constraint
from specjax.sampling.grammar_check import CallerLeftError, Grammars, while_waiting
from specjax.sampling.grammar_compiler import GrammarCompiler
from specjax.sampling.grammar_process import GrammarProcesses
from specjax.sampling.grammar_request import RequestGrammar, await_answers
from specjax.testing.files import EOS_ID, LETTERS, letter_tokenizer

from ..support.waiting import wait_for

TOKENIZER = letter_tokenizer()
# each grows without end in the library: the first in memory, the others in time
HOSTILE = {
    "memory": ("ebnf", "start: A\nA: " + " & ".join(f"/.*a{{{i}}}.*/" for i in range(1, 46))),
    "closures": ("regex", "(a*)*" * 13_000),  # 2.5 CPU seconds
    "line breaks": ("ebnf", "root ::= " + "\n" * 60_000 + '"a"'),
}


def make_grammars(num_slots: int) -> Grammars:
    processes = GrammarProcesses(
        num_slots=num_slots,
        nodes=4,
        width=4,
        tokenizer=TOKENIZER.backend.to_str(),
        vocab_size=TOKENIZER.vocab_size,
        end_token_ids=[EOS_ID],
        spaces=True,
    )
    return Grammars(processes)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return make_grammars(num_slots=2)


@pytest.fixture
def short_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "LANES", ((2, 0.1), (1, 0.3)))


@pytest.fixture(autouse=True)
def _nothing_is_left(grammars: Grammars) -> Iterator[None]:
    yield
    deadline, processes = time.monotonic() + 10, grammars.processes
    while len(processes._free) + len(processes._idle) < 3 * 2 + grammar_process.SPARE:
        assert time.monotonic() < deadline
        assert len(processes._processes) == len(processes._idle)
        time.sleep(0.01)
        processes._collect()


def ids_of(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def letters_of(mask: np.ndarray | None) -> set[str]:
    assert mask is not None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return {LETTERS[i] for i in np.flatnonzero(bits) if i < len(LETTERS)}


def masks_of(request: RequestGrammar, tokens: list[int], parents: list[int]) -> list[set[str]]:
    request.send([], (tokens, parents))
    await_answers([request], 10)
    words = -(-TOKENIZER.vocab_size // 32)
    masks, forced = np.full((4, words), -1, np.int32), np.full((4, 4), -1, np.int32)
    request.read(masks, forced)
    return [letters_of(mask) for mask in masks[: len(tokens)]]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.usefixtures("short_lanes")
def test_a_hostile_grammar_is_refused(grammars: Grammars, name: str) -> None:
    kind, text = HOSTILE[name]
    with pytest.raises(ParameterError, match=f"{kind}=.*CPU seconds, 128 MiB") as caught:
        grammars.check(kind, text)
    assert caught.value.param == kind


def waited_seconds(pid: int) -> float:
    """CPU time of the children that a process has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_a_grammar_that_grows_ends_by_its_memory(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fills its memory in 0.8 CPU seconds, and has 20."""
    monkeypatch.setattr(grammar_check, "LANES", ((2, 0.05), (1, 20.0)))
    program = grammars.processes._program.pid
    before, deadline = waited_seconds(program), time.monotonic() + 10
    with pytest.raises(ParameterError, match="128 MiB"):
        grammars.check(*HOSTILE["memory"])
    used = 0.0
    while used < 0.3 and time.monotonic() < deadline:  # until the program has waited for it
        time.sleep(0.05)
        used = waited_seconds(program) - before
    assert used < 10


@pytest.mark.slow
@pytest.mark.usefixtures("short_lanes")
def test_hostile_grammars_do_not_keep_others_waiting(grammars: Grammars) -> None:
    """Honest ones are compiled while six hostile ones wait for the second lane."""
    errors: list[Any] = []

    def attack() -> None:
        try:
            grammars.check(*HOSTILE["closures"])
        except ParameterError as error:
            errors.append(error)

    threads = [threading.Thread(target=attack) for _ in range(6)]
    for thread in threads:
        thread.start()
    num_before = 0
    for i in range(8):
        assert letters_of(grammars.check("regex", f"[ab]c{{{i}}}").mask) == {"a", "b"}
        num_before += len(errors) < len(threads)
    for thread in threads:
        thread.join()
    assert len(errors) == 6
    assert num_before > 0


def test_work_ends_when_its_caller_leaves(grammars: Grammars) -> None:
    with while_waiting():
        left = grammar_check._caller_left.get()
        assert left is not None
        left.set()
        with pytest.raises(CallerLeftError):
            grammars.check(*HOSTILE["closures"])
    assert len(grammars.processes._processes) == len(grammars.processes._idle)


def test_errors_that_are_kept_hold_no_process(grammars: Grammars) -> None:
    """Tracebacks may live until the garbage collector runs."""
    processes = grammars.processes
    with pytest.raises(ParameterError) as refusal:
        grammars.check("regex", "(")
    assert len(processes._processes) == len(processes._idle)
    assert refusal.value.__traceback__ is not None


def test_a_request_follows_its_text(grammars: Grammars) -> None:
    request = grammars.check("regex", "a[bc](d|ef)").request()
    assert request.prepare([], 0)
    assert letters_of(request.mask) == {"a"}
    request.send(ids_of("a"))
    await_answers([request], 10)
    assert request.answer.num_accepted == 1
    tree = ids_of("abce"), [-1, 0, 0, 2]
    expected = [{"b", "c"}, {"d", "e"}, {"d", "e"}, {"f"}]
    assert masks_of(request, *tree) == expected
    assert masks_of(request, *tree) == expected  # without another question
    request.send(ids_of("bdz"))
    await_answers([request], 10)
    assert request.answer.num_accepted == 2
    assert request.answer.is_complete
    request.close()


def test_a_process_that_has_ended_is_replaced(grammars: Grammars) -> None:
    """The new one gets the text so far, as after a preemption."""
    grammar = grammars.check("regex", "a[bc](d|ef)")
    first, second = grammar.request(), grammar.request()
    assert first.prepare([], 0)
    first.close()
    for request in (first, second):
        while not request.prepare(ids_of("ab"), 1):
            pass
    assert letters_of(first.mask) == {"d", "e"}
    # the second sample has the mask of the check, and a process of its own
    assert letters_of(second.mask) == {"a"}
    second.close()
    process = first._process
    assert process is not None
    process.end()
    first.send(ids_of("d"))
    await_answers([first], 10)
    assert "CPU seconds" in first.error
    assert first.answer.num_accepted == 0
    assert first.prepare([], 0)
    first.close()


def test_the_program_is_started_again(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile, requests wait, and the engine's thread does not; a failed start ends some."""
    processes, waits, failures = grammars.processes, threading.Event(), ["no memory"]
    program, launch = processes._program, processes._launch

    def start() -> str:
        waits.wait(10)
        return failures.pop() if failures else launch()

    monkeypatch.setattr(processes, "_launch", start)
    grammar = grammars.check("regex", "[ab]d")
    requests = [grammar.request() for _ in range(3)]
    for request in requests:
        request.close()
    program.kill()
    program.wait()
    for process in processes._idle.copy():
        process.end()
        assert process.has_answer(10)
    for _ in range(2):
        assert not requests[0].prepare([], 0)
        assert not requests[0].error
    assert processes._is_starting
    waits.set()
    for request in requests[:2]:
        wait_for(lambda request=request: request.prepare([], 0.01))
    assert "no memory" in requests[0].error
    wait_for(lambda: not processes._failure)
    wait_for(lambda: requests[2].prepare([], 0.01))
    assert letters_of(requests[2].mask) == {"a", "b"}
    assert processes._program is not program
    for request in requests:
        request.close()


@pytest.mark.slow
def test_a_text_ends_at_the_same_place_with_any_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits count what plain decoding does: the tokens of the text, and one mask for each."""
    monkeypatch.setitem(grammar_compiler.LIMITS, "max_lexer_states", 150)
    size = TOKENIZER.vocab_size
    compiler = GrammarCompiler(TOKENIZER.backend.to_str(), size, [EOS_ID], spaces=True)
    words, rng = -(-size // 32), random.Random(1)

    def ends(text: list[int], num_drafts: int) -> tuple[int, str, list[bytes]]:
        constraint: Constraint = compiler.compile("regex", "b[ab]*a[ab]{12}c")
        masks = np.empty((1 + num_drafts, words), np.int32)
        forced, seen, at = np.empty((1 + num_drafts, 4), np.int32), list[bytes](), 0
        while at < len(text) and not constraint.error:
            path = text[at : at + num_drafts // 2]
            others = ids_of("".join(rng.choices("ab", k=num_drafts - len(path))))
            tokens = [0, *path, *others]
            parents = [*range(-1, len(path)), *range(len(path), len(tokens) - 1)]
            constraint.fill(tokens, parents, masks, forced)
            seen.append(masks[0].tobytes())
            new = text[at : at + rng.randint(1, 1 + len(path))]
            count = constraint.advance(new)
            at += count
            if count < len(new):
                break
        return at, constraint.error, seen

    places = []
    for _ in range(10):
        text = ids_of("b" + "".join(rng.choices("ab", k=120)))
        at, error, _ = ends(text, 0)
        places.append(at)
        for num_drafts in (1, 4, 12):
            assert ends(text, num_drafts)[:2] == (at, error)
    assert min(places) < 121


def test_a_grammar_that_was_checked_needs_no_other_check(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = grammars.check("regex", "[xy]z")

    def refuse(lane: Any) -> None:
        raise RuntimeError("another check")

    monkeypatch.setattr(grammars, "_turn", refuse)
    with pytest.raises(RuntimeError):
        grammars.check("regex", "[xy]zz")
    second = grammars.check("regex", "[xy]z")
    assert letters_of(second.mask) == letters_of(first.mask) == {"x", "y"}
    request = second.request()
    await_answers([request], 10)
    assert masks_of(request, ids_of("a"), [-1]) == [{"x", "y"}]
    request.close()


@pytest.mark.usefixtures("short_lanes")
def test_few_slow_grammars_wait(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold threads that others need."""
    monkeypatch.setattr(grammars, "_slow", threading.Semaphore(0))
    with pytest.raises(ParameterError, match="retry later"):
        grammars.check(*HOSTILE["closures"])
    assert letters_of(grammars.check("regex", "[ab]e").mask) == {"a", "b"}


def test_a_program_that_cannot_start_ends_its_requests_only(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = grammars.check("regex", "[ab]f").request()

    def fail(job: Any) -> None:
        raise FileNotFoundError("no interpreter")

    request.close()
    monkeypatch.setattr(grammars.processes, "start", fail)
    assert request.prepare([], 0)
    assert "no interpreter" in request.error


def test_a_closed_program_stays_closed() -> None:
    closed = make_grammars(num_slots=1)
    assert letters_of(closed.check("regex", "[ab]c").mask) == {"a", "b"}
    closed.processes.close()
    with pytest.raises(ValueError, match="closed"):
        closed.check("regex", "[ab]cc")
    assert closed.processes._program.poll() is not None
