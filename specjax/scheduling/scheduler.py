"""First come, first served: admission, prefill, rounds, retraction, and reading behind the device.

Running requests are those that came first, in the order of their coming, and a retracted request
goes back to the head of the queue. So the oldest request is never retracted while another runs, and
always advances.
"""

import time
from collections import deque
from collections.abc import Callable

from specjax.adaptive.controller import AdaptiveController
from specjax.kv.budget import PageBudget
from specjax.kv.pages import PageAllocator
from specjax.kv.prefix_cache import PrefixCache
from specjax.runtime.buckets import pick_bucket
from specjax.runtime.runner import ModelRunner
from specjax.scheduling.deadlines import Deadlines
from specjax.scheduling.events import NoMetrics, SchedulerMetrics
from specjax.scheduling.in_flight import InFlight, Reader
from specjax.scheduling.request import Request
from specjax.scheduling.row import Row

RETRY_STEPS = 32


class QueueFullError(RuntimeError):
    """A request came while as many wait as may."""


class Scheduler:
    """Runs requests on a :class:`ModelRunner`; one thread uses it.

    A step admits requests, dispatches prefill chunks of up to the largest bucket in tokens all
    together, so that long prompts hold decoding up for no longer than that, and then one round of
    all rows that decode. Requests are prefilled one after the other: the next one already finds the
    pages of the one before in the prefix cache.

    Results are read late: at the end of a step the newest ``run_ahead`` dispatches are unread.
    The device stops rows at their limit and at end tokens by itself. Stop strings, aborts and
    timeouts are known to the host alone; what rounds in flight bring such a request is ignored. The
    device executes in dispatch order, so a slot or page that is given back while a round is in
    flight can be handed out at once: what its new owner does comes behind that round.

    Args:
        runner: the device side.
        allocator: pages of the pool.
        run_ahead: dispatches left unread while the next step is dispatched; 0 is synchronous.
            Outputs do not depend on it.
        prefix_cache: keeps the pages of prompts and outputs for requests that start alike.
        max_waiting_requests: how many may wait, beside those that a slot is free for, before
            :meth:`add` refuses.
        clock: seconds, for timeouts and figures; that of the requests.
        metrics: hears what happens.
        controller: chooses the drafted tokens of each round, by what it hears of earlier ones.
    """

    def __init__(
        self,
        runner: ModelRunner,
        allocator: PageAllocator,
        *,
        run_ahead: int,
        prefix_cache: PrefixCache | None = None,
        max_waiting_requests: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        metrics: SchedulerMetrics | None = None,
        controller: AdaptiveController | None = None,
    ) -> None:
        self._runner = runner
        self._allocator = allocator
        self._budget = PageBudget(runner, allocator, prefix_cache)
        self._run_ahead = run_ahead
        self._max_waiting = max_waiting_requests
        self._clock = clock
        self._metrics: SchedulerMetrics = NoMetrics() if metrics is None else metrics
        self._controller = controller
        self._reader = Reader(self._metrics)
        self._waiting: deque[Request] = deque()
        self._running: list[Row] = []
        self._free_slots = list(range(runner.config.num_slots - 1, 0, -1))
        self._in_flight: deque[InFlight] = deque()
        self._deadlines = Deadlines()
        # the next request waits for pages: until a running one gives some back, or for so many
        # steps, after which less may be held back
        self._is_blocked = False
        self._steps_blocked = 0

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that have none."""
        return len(self._waiting)

    def check(self, request: Request) -> None:
        """Refuse a request that can never be served; any thread may call this.

        Raises:
            ValueError: with the knobs to turn.
        """
        self._runner.check(request.params, request.end_token_ids, request.top_logprobs)
        allocator, config = self._allocator, self._runner.config
        needed = allocator.pages_for(request.max_kv_tokens)
        size = f"{len(request.input_ids)} prompt tokens and max_new_tokens={request.max_new_tokens}"
        if needed > config.pages_per_request:
            raise ValueError(
                f"a request of {size} needs {needed * config.page_size} KV tokens, but a request "
                f"holds {config.context}; lower max_new_tokens or raise context_length"
            )
        total = allocator.num_pages - 1
        if needed > total:
            raise ValueError(
                f"a request of {size} needs {needed * allocator.page_size} KV tokens, but the "
                f"pool holds {total * allocator.page_size}; lower max_new_tokens or raise "
                "max_total_tokens or mem_fraction_static"
            )

    def add(self, *requests: Request) -> None:
        """Queue requests that passed :meth:`check`, all of them or none.

        Raises:
            QueueFullError: if more than ``max_waiting_requests`` would wait and find no free slot.
        """
        limit, count = self._max_waiting, len(self._waiting)
        # those that the next step can give a slot do not count as waiting
        if limit is not None and count + len(requests) > limit + len(self._free_slots):
            raise QueueFullError(
                f"{count} requests wait already for {len(self._free_slots)} places, "
                f"{len(requests)} more came and max_waiting_requests={limit}; send fewer at once "
                "or raise it"
            )
        self._waiting.extend(requests)
        for request in requests:
            self._deadlines.watch(request)

    def abort(self, request: Request, message: str | None = None) -> None:
        """End a request wherever it is; the text so far stays."""
        if request.is_finished:
            return
        self._finish(request, message)
        row = next((row for row in self._running if row.request is request), None)
        if row is not None:
            self._release(row)
        elif request in self._waiting:
            self._waiting.remove(request)
            self._is_blocked = False
        self._report_queue()

    def step(self) -> None:
        """Admit what fits, dispatch prefill chunks and a round, and read results that are due."""
        if self._deadlines:
            for request in self._deadlines.expired(self._clock()):
                self.abort(request, f"the timeout of {request.timeout} s has passed")
        has_unread = bool(self._in_flight)
        self._steps_blocked = self._steps_blocked + 1 if self._is_blocked else 0
        if self._steps_blocked == RETRY_STEPS:
            self._is_blocked = False
        has_dispatched = self._prefill()
        rows = self._rows_with_pages()
        if rows:
            self._dispatch_round(rows)
        # with nothing new to compute the device would idle while the host waits to read
        self._read_until(self._run_ahead if has_dispatched or rows else 0)
        if self._running and not (has_dispatched or rows or has_unread):
            raise RuntimeError(
                f"request {self._running[0].request.rid!r} waits for results that were lost"
            )
        self._report_queue()

    def flush_cache(self) -> None:
        """Forget all KV, so that it can come from other weights, and cached prefixes with it.

        Running requests keep their text and compute it again.
        """
        self._read_until(0)
        while self._running:
            self._retract(self._running[-1], is_cached=False)
        self._budget.flush()

    def fail_all(self, message: str) -> None:
        """End every request after a step raised; pages and slots are free again.

        What the device computed last is unknown, so nothing of it is read, and no KV is kept.
        """
        self._in_flight.clear()
        requests = [*(row.request for row in self._running), *self._waiting]
        for request in requests:
            if not request.is_finished:
                self._finish(request, message)
        self._waiting.clear()
        while self._running:
            self._release(self._running[-1], is_cached=False)
        self._budget.flush()
        self._report_queue()

    # dispatching

    def _prefill(self) -> bool:
        """Dispatch chunks up to a budget of padded tokens; returns whether there were any."""
        buckets = self._runner.config.prefill_buckets
        spent, budget = 0, buckets[-1]
        while spent < budget:
            row = self._row_to_prefill()
            if row is None:
                break
            width = pick_bucket(min(len(row.text) - row.kv_len, budget), buckets)
            if spent + width > budget:
                break
            spent += width
            self._dispatch_chunk(row, row.kv_len + width)
        return spent > 0

    def _row_to_prefill(self) -> Row | None:
        """The newest running request where its prefill is not done, else the next one waiting."""
        if self._running and not self._running[-1].is_prefilled:
            return self._running[-1]
        if not self._waiting or not self._free_slots or self._is_blocked:
            return None
        request = self._waiting[0]
        row = self._budget.admit(request, self._free_slots[-1], self._running)
        if row is None:
            self._is_blocked = True
            return None
        # from here on the request is found among the running, whatever the runner raises
        self._running.append(row)
        self._waiting.popleft()
        self._free_slots.pop()
        queue_seconds = None
        if request.admitted_time is None:
            request.admitted_time = self._clock()
            request.cached_tokens = row.kv_len
            queue_seconds = request.admitted_time - request.created_time
        self._metrics.request_admitted(len(row.text), row.kv_len, queue_seconds)
        self._runner.set_slot(
            row.slot,
            request.params,
            seed=request.seed,
            end_token_ids=request.end_token_ids,
            prompt_len=len(request.input_ids),
            top_logprobs=request.top_logprobs,
            cached_ids=row.text[: row.kv_len],
        )
        self._runner.set_pages(row.slot, row.pages)
        return row

    def _dispatch_chunk(self, row: Row, end: int) -> None:
        start, is_last = row.kv_len, end >= len(row.text)
        result = self._runner.prefill(
            row.slot,
            row.text[start:end],
            start,
            None if is_last else row.text[end],
            row.request.num_left,
        )
        row.kv_len = min(end, len(row.text))
        self._metrics.tokens_prefilled(row.kv_len - start)
        row.awaits_first = is_last
        self._in_flight.append(InFlight((row,), result, is_round=False, is_last_chunk=is_last))
        if is_last:
            self._budget.share(row)

    def _rows_with_pages(self) -> list[Row]:
        """Rows for the next round, with pages for it; retracts the newest where they run out."""
        rows = [row for row in self._running if row.can_advance()]
        while rows and not self._budget.grow(rows, self._running):
            if self._in_flight:
                # Exact counts may make room, and a retracted request has nothing in flight then:
                # its text is complete, neither lost nor doubled.
                self._read_until(0)
            elif len(self._running) > 1:
                self._retract(self._running[-1])
                self._budget.hold_back_more()
            else:
                raise RuntimeError(
                    f"request {rows[0].request.rid!r} cannot grow though nothing else runs; "
                    "pages were lost"
                )
            rows = [row for row in self._running if row.can_advance()]
        return rows

    def _dispatch_round(self, rows: list[Row]) -> None:
        if self._controller is not None:
            self._controller.activate_for_batch(len(rows))
        result = self._runner.round([row.slot for row in rows])
        for row in rows:
            row.unread_rounds += self._runner.config.rounds_per_dispatch
        self._in_flight.append(InFlight(tuple(rows), result, is_round=True))

    # reading

    def _read_until(self, num_unread: int) -> None:
        """Read results, oldest first, until ``num_unread`` are left or all requests have ended."""
        while len(self._in_flight) > num_unread:
            self._read(self._in_flight.popleft())

    def _read(self, entry: InFlight) -> None:
        if all(row.is_released for row in entry.rows):
            return
        # a chunk that is not the last is waited for too, so that the device is never far behind
        values, logprobs = self._reader.fetch(entry)
        now = self._clock()
        num_steps = entry.result.num_steps
        if entry.is_round and self._controller is not None:
            self._report_accepted(entry, values, num_steps)
        for i, row in enumerate(entry.rows):
            if row.is_released:
                continue
            if entry.is_round:
                self._reader.take_rounds(row, i, values, num_steps, logprobs, now)
            elif entry.is_last_chunk:
                self._reader.take_first(row, values[0], logprobs, now)
            if row.request.is_finished:
                self._report_end(row.request)
                self._release(row)

    def _report_accepted(
        self, entry: InFlight, rounds: list[list[list[int]]], num_steps: int
    ) -> None:
        """Tell the controller what each round accepted of requests that had not ended by then."""
        assert self._controller is not None
        for batch in rounds:
            counts = [
                batch[i][-2]
                for i, row in enumerate(entry.rows)
                if batch[i][-1] > 0 and not row.is_released
            ]
            self._controller.on_verify_complete(
                counts, executed_steps=num_steps, batch_size=len(entry.rows)
            )

    # endings

    def _finish(self, request: Request, message: str | None) -> None:
        request.finish({"type": "abort"} | ({} if message is None else {"message": message}))
        self._report_end(request)

    def _report_queue(self) -> None:
        self._metrics.queue_changed(
            len(self._running), len(self._waiting), self._budget.num_used_tokens
        )

    def _report_end(self, request: Request) -> None:
        if self._controller is not None and request.spec is not None:
            request.spec.ema_accept_len = self._controller.ema_accept_len
        reason, ended = request.finish_reason, request.ended_time
        assert reason is not None
        assert ended is not None
        self._metrics.request_finished(reason["type"], ended - request.created_time)

    def _retract(self, row: Row, *, is_cached: bool = True) -> None:
        """Take a row's pages away; the request waits before all others to resume.

        It resumes by prefill of its prompt and its output so far. The noise of a token is keyed by
        the request's seed and the token's position, so it goes on as if nothing had happened.
        """
        row.request.num_retractions += 1
        self._release(row, is_cached=is_cached)
        self._waiting.appendleft(row.request)
        self._metrics.request_retracted()

    def _release(self, row: Row, *, is_cached: bool = True) -> None:
        row.is_released = True
        self._is_blocked = False
        self._running.remove(row)
        self._budget.release(row, is_cached=is_cached)
        self._free_slots.append(row.slot)
        self._runner.clear_slot(row.slot)
        if not self._running:
            self._in_flight.clear()  # nobody waits for it
