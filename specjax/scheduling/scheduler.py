"""Admission and rounds: first come, first served, on a fixed number of slots and pages."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specjax.runtime.dispatched import Dispatched, HostLogprobs
from specjax.runtime.paging import PageAllocator
from specjax.runtime.runner import ModelRunner
from specjax.scheduling.request import Request


class QueueFullError(RuntimeError):
    """More requests wait than ``max_waiting_requests`` allows."""


@dataclass(frozen=True)
class InFlight:
    """A dispatched result that the host has not read: one prefill, or the rounds of one call."""

    requests: tuple[Request, ...]
    result: Dispatched
    num_rounds: int  # 0 for a prefill


class Scheduler:
    """Runs requests on a :class:`ModelRunner`.

    The device executes dispatches in order, so a slot or page that is given back while a round is
    in flight can be handed out at once: its new owner's prefill runs behind that round.

    Args:
        runner: the device side.
        allocator: pages of the pool.
        run_ahead: dispatches of rounds that may be made before the result of the first is read.
        max_waiting_requests: requests that may wait for a place; ``None`` for no limit.
        clock: seconds, for timeouts.
    """

    def __init__(
        self,
        runner: ModelRunner,
        allocator: PageAllocator,
        *,
        run_ahead: int,
        max_waiting_requests: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._allocator = allocator
        self._run_ahead = run_ahead
        self._max_waiting = max_waiting_requests
        self._clock = clock
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._free_slots = list(range(runner.config.num_slots - 1, 0, -1))
        self._in_flight: deque[InFlight] = deque()

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._running)

    def check(self, request: Request) -> None:
        """Refuse a request that can never be served.

        Raises:
            ValueError: with the knobs to turn.
        """
        self._runner.check(request.params, request.end_token_ids, request.top_logprobs)
        needed = self._allocator.pages_for(request.max_kv_tokens)
        total = self._allocator.num_pages - 1
        if needed > total:
            raise ValueError(
                f"a request of {len(request.input_ids)} prompt tokens and max_new_tokens="
                f"{request.max_new_tokens} needs {needed * self._allocator.page_size} KV tokens, "
                f"but the pool holds {total * self._allocator.page_size}; lower max_new_tokens or "
                "raise max_total_tokens or mem_fraction_static"
            )

    def add(self, request: Request) -> None:
        """Queue a request that passed :meth:`check`.

        Raises:
            QueueFullError: if ``max_waiting_requests`` wait beside those for which slots are free.
        """
        places = len(self._free_slots)
        if self._max_waiting is not None and len(self._waiting) >= self._max_waiting + places:
            raise QueueFullError(
                f"{len(self._waiting)} requests wait already; max_waiting_requests="
                f"{self._max_waiting} allows no more: send fewer at once or raise it"
            )
        self._waiting.append(request)

    def abort(self, request: Request, message: str | None = None) -> None:
        """End a request wherever it is; the text so far stays."""
        if request.is_finished:
            return
        reason = {"type": "abort"}
        request.finish(reason if message is None else reason | {"message": message})
        if request in self._running:
            self._release(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    def step(self) -> None:
        """End what is late, admit what fits, dispatch rounds, and read results that are due."""
        self._expire()
        self._admit()
        going_on = self._needs_a_round()
        if going_on:
            slots = [request.slot for request in self._running]
            rounds = self._runner.config.rounds_per_dispatch
            result = self._runner.round(slots)
            self._in_flight.append(InFlight(tuple(self._running), result, rounds))
        keep = self._run_ahead if going_on else 0
        while sum(entry.num_rounds > 0 for entry in self._in_flight) > keep or (
            not going_on and self._in_flight
        ):
            self._read(self._in_flight.popleft())
        if not self._running:
            self._in_flight.clear()

    def _needs_a_round(self) -> bool:
        """Whether some request may go on behind the results that are not read yet.

        A round brings each of its requests one token at least, so one whose unread results cover
        all that it may still produce has ended on the device.
        """
        coming = dict.fromkeys(self._running, 0)
        for entry in self._in_flight:
            for request in entry.requests:
                if request in coming:
                    coming[request] += max(entry.num_rounds, 1)
        return any(request.num_left > count for request, count in coming.items())

    def _expire(self) -> None:
        now = self._clock()
        for request in (*self._waiting, *self._running):
            if request.timeout is not None and now - request.created_time >= request.timeout:
                self.abort(request, f"timeout={request.timeout} seconds have passed")

    def _admit(self) -> None:
        while self._waiting and self._free_slots:
            request = self._waiting[0]
            needed = self._allocator.pages_for(request.max_kv_tokens)
            pages = self._allocator.allocate(needed)
            if pages is None:
                return
            self._waiting.popleft()
            request.slot, request.pages = self._free_slots.pop(), pages
            self._running.append(request)
            request.admitted_time = self._clock()
            self._runner.set_slot(
                request.slot,
                request.params,
                seed=request.seed,
                end_token_ids=request.end_token_ids,
                prompt_len=len(request.input_ids),
                top_logprobs=request.top_logprobs,
            )
            self._runner.set_pages(request.slot, pages)
            self._prefill(request)

    def _prefill(self, request: Request) -> None:
        ids, width = request.input_ids, self._runner.config.prefill_buckets[-1]
        for start in range(0, len(ids), width):
            end = min(start + width, len(ids))
            following = ids[end] if end < len(ids) else None
            result = self._runner.prefill(
                request.slot, ids[start:end], start, following, request.max_new_tokens
            )
        self._in_flight.append(InFlight((request,), result, num_rounds=0))

    def _read(self, entry: InFlight) -> None:
        values = entry.result.read()
        open_requests = [r for r in entry.requests if not r.is_finished]
        wanted = any(request.wants_logprobs for request in open_requests)
        logprobs = entry.result.read_logprobs() if wanted else None
        for i, request in enumerate(entry.requests):
            if request.is_finished:
                continue
            if entry.num_rounds:
                self._append_rounds(request, values[:, i], _rows(logprobs, i))
            else:
                request.append_first(int(values[0]), logprobs)
                request.first_token_time = self._clock()
            if request.is_finished:
                self._release(request)

    def _append_rounds(
        self, request: Request, rounds: np.ndarray, logprobs: HostLogprobs | None
    ) -> None:
        for i, values in enumerate(rounds):
            count, drafts = int(values[-1]), int(values[-2])
            if count == 0 or request.is_finished:
                return
            tokens: list[int] = values[:count].tolist()
            steps = self._runner.config.num_steps
            request.append_round(tokens, drafts, steps, _round(logprobs, i))

    def _release(self, request: Request) -> None:
        self._running.remove(request)
        self._allocator.free(request.pages)
        self._free_slots.append(request.slot)
        self._runner.clear_slot(request.slot)
        request.pages, request.slot = [], 0


def _rows(logprobs: HostLogprobs | None, i: int) -> HostLogprobs | None:
    """Log probabilities of one request in all rounds of a dispatch."""
    if logprobs is None:
        return None
    return HostLogprobs(logprobs.chosen[:, i], logprobs.top_ids[:, i], logprobs.top_values[:, i])


def _round(logprobs: HostLogprobs | None, i: int) -> HostLogprobs | None:
    """Log probabilities of one request in one round."""
    if logprobs is None:
        return None
    return HostLogprobs(logprobs.chosen[i], logprobs.top_ids[i], logprobs.top_values[i])
