"""Admission and rounds: first come, first served, on a fixed number of slots and pages."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from specjax.runtime.paging import PageAllocator
from specjax.runtime.runner import Dispatched, ModelRunner
from specjax.scheduling.request import Request


@dataclass(frozen=True)
class InFlight:
    """A dispatched result that the host has not read: one prefill, or one round."""

    requests: tuple[Request, ...]
    result: Dispatched
    is_round: bool


class Scheduler:
    """Runs requests on a :class:`ModelRunner`.

    The device executes dispatches in order, so a slot or page that is given back while a round is
    in flight can be handed out at once: its new owner's prefill runs behind that round.

    Args:
        runner: the device side.
        allocator: pages of the pool.
        run_ahead: rounds that may be dispatched before the result of the first is read.
    """

    def __init__(self, runner: ModelRunner, allocator: PageAllocator, *, run_ahead: int) -> None:
        self._runner = runner
        self._allocator = allocator
        self._run_ahead = run_ahead
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._free_slots = list(range(runner.config.num_slots - 1, 0, -1))
        self._in_flight: deque[InFlight] = deque()

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._running)

    def check(self, request: Request) -> None:
        """Refuse a request that the pool can never hold.

        Raises:
            ValueError: with the knobs to turn.
        """
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
        """Queue a request that passed :meth:`check`."""
        self._waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request wherever it is; the text so far stays."""
        if request.is_finished:
            return
        request.finish({"type": "abort"})
        if request in self._running:
            self._release(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    def step(self) -> None:
        """Admit what fits, dispatch one round, and read results that are due."""
        self._admit()
        if self._running:
            slots = [request.slot for request in self._running]
            result = self._runner.round(slots)
            self._in_flight.append(InFlight(tuple(self._running), result, is_round=True))
        keep = self._run_ahead if self._running else 0
        while sum(entry.is_round for entry in self._in_flight) > keep:
            self._read(self._in_flight.popleft())
        if not self._running:
            self._in_flight.clear()

    def _admit(self) -> None:
        while self._waiting and self._free_slots:
            request = self._waiting[0]
            needed = self._allocator.pages_for(request.max_kv_tokens)
            pages = self._allocator.allocate(needed)
            if pages is None:
                return
            self._waiting.popleft()
            request.pages = pages
            request.slot = self._free_slots.pop()
            self._runner.set_slot(
                request.slot,
                request.params,
                seed=request.seed,
                end_token_ids=request.end_token_ids,
            )
            self._runner.set_pages(request.slot, pages)
            self._prefill(request)
            self._running.append(request)

    def _prefill(self, request: Request) -> None:
        ids, width = request.input_ids, self._runner.config.prefill_buckets[-1]
        for start in range(0, len(ids), width):
            end = min(start + width, len(ids))
            following = ids[end] if end < len(ids) else None
            token = self._runner.prefill(
                request.slot, ids[start:end], start, following, request.max_new_tokens
            )
        self._in_flight.append(InFlight((request,), token, is_round=False))

    def _read(self, entry: InFlight) -> None:
        values = entry.result.read()
        for i, request in enumerate(entry.requests):
            if request.is_finished:
                continue
            if entry.is_round:
                self._append_rounds(request, values[:, i])
            else:
                request.append_first(int(values[0]))
            if request.is_finished:
                self._release(request)

    def _append_rounds(self, request: Request, rounds: np.ndarray) -> None:
        for values in rounds:
            count, drafts = int(values[-1]), int(values[-2])
            if count == 0 or request.is_finished:
                return
            tokens: list[int] = values[:count].tolist()
            request.append_round(tokens, drafts, self._runner.config.num_steps)

    def _release(self, request: Request) -> None:
        self._running.remove(request)
        self._allocator.free(request.pages)
        self._free_slots.append(request.slot)
        self._runner.clear_slot(request.slot)
        request.pages, request.slot = [], 0
