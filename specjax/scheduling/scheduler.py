"""The scheduler: admission, prefill, rounds and preemption (retraction).

Callers take turns, and each caller's requests start in the order of their arrival, except that
others pass a request whose grammar is late. A preempted request returns to the head of the queue,
so the request that started first always advances.
"""

import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable
from functools import partial

from specjax.adaptive.controller import TierController
from specjax.checks import ParameterError
from specjax.kv.budget import Capacity, PageBudget
from specjax.kv.holding import salt_of
from specjax.kv.pages import PageAllocator
from specjax.kv.prefix_cache import Watcher
from specjax.kv.snapshots import Snapshots
from specjax.kv.window_pages import WindowPages
from specjax.metrics import Totals
from specjax.models.declare import request_layers
from specjax.runtime.runner import ModelRunner
from specjax.sampling.grammar_request import RequestGrammar, await_answers
from specjax.scheduling.constrained import is_constrained
from specjax.scheduling.in_flight import InFlight, PromptPiece, last_multiple
from specjax.scheduling.prompt_source import FirstToken, PromptSource
from specjax.scheduling.request import Deadlines, Request, RunningRequest
from specjax.scheduling.waiting import FairQueue

logger = logging.getLogger(__name__)

# Retry a blocked admission after this many steps; the page reserve may have shrunk by then.
RETRY_STEPS = 32
MAX_SLEEP = 3600.0  # seconds, because the timeout of a queue has a limit
# Requests that start together in an idle engine wait for each other, at most this many seconds from
# the first token on: 64 prompts of 1,024 take 1.5 s, with rounds 2.1 s (Llama-3.1-8B shape, H200).
MAX_BURST = 1.5
LATE_SECONDS = 0.01  # wait for late grammars if nothing else is left to do
MAX_LATE = 16  # waiting requests whose grammars are prepared while others start before them


class QueueFullError(RuntimeError):
    """More than ``max_waiting_requests`` requests would wait."""


class Scheduler:
    """Runs requests on a :class:`ModelRunner`; only one thread may use it.

    A step admits requests, dispatches chunks of their prompts and one round for all decoding rows,
    and reads results that are due. docs/serving.md describes how prompts and rounds take turns.

    Results are read late. The device stops rows at their limit and at end tokens. Only the host
    handles stop strings, aborts and timeouts; it ignores later results for such a request. The
    device executes in dispatch order, so a slot or page that is freed while a round is in flight
    can be reused at once: its new owner is dispatched after that round.

    Args:
        run_ahead: number of dispatches left unread at the end of a step; does not affect outputs.
        caches_prefixes: cache the pages of prompts and outputs for requests with an equal start.
        max_waiting_requests: maximum number of waiting requests that have no free slot.
        max_prefill_stall: maximum seconds of prefill between two rounds, but at least one call.
        clock: the clock of the requests in seconds, for timeouts and metrics.
        controller: chooses the tier of each round from the acceptance in earlier rounds.
        prompt_source: gets the prompts of admitted requests; by default they are computed here.
        cache_watcher: learns which pages the prefix cache has.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        run_ahead: int,
        caches_prefixes: bool = False,
        max_waiting_requests: int | None = None,
        max_prefill_stall: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
        metrics: Totals | None = None,
        controller: TierController | None = None,
        prompt_source: PromptSource | None = None,
        cache_watcher: Watcher | None = None,
    ) -> None:
        self._runner, config = runner, runner.config
        self._allocator = PageAllocator(config.num_pages, config.page_size)
        # recurrent layers continue from snapshots only
        shares = caches_prefixes and (
            config.num_snapshots > 0 or not request_layers(runner.networks.target.caches)
        )
        lookahead = config.algorithm.lookahead if shares else None
        size, writes = config.page_size, config.kv_writes
        followers: list[WindowPages | Snapshots] = [
            WindowPages(count, size, window, writes, partial(runner.set_pages, pool=pool))
            for pool, (window, count) in enumerate(config.window_pages, start=1)
        ]
        if config.num_snapshots and lookahead is not None:
            slots = range(config.num_slots, config.num_states)
            followers.append(Snapshots(slots, size, config.chunk_step, lookahead))
        self._budget = PageBudget(self._allocator, writes, runner.set_pages, lookahead, followers)
        self._budget.cache.watcher = cache_watcher
        self._run_ahead = run_ahead
        self._max_waiting, self._max_stall = max_waiting_requests, max_prefill_stall
        self._clock = clock
        self._metrics = Totals() if metrics is None else metrics
        self._controller = controller
        self.prompt_source = PromptSource() if prompt_source is None else prompt_source
        self._waiting = FairQueue()
        self._running: list[RunningRequest] = []
        self._free_slots = list(range(config.num_slots - 1, 0, -1))
        self._in_flight = InFlight(runner, self._metrics, controller, clock)
        self._deadlines = Deadlines()
        self._stopped: list[Request] = []  # preempted or ended since `take_changed`
        # steps until a blocked admission is retried; reset to 0 if a running request frees pages
        self._blocked_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether a step has work to do, apart from prompts that are computed elsewhere."""
        if any(not row.is_remote for row in self._running):
            return True
        if self._waiting and self._free_slots and not self._blocked_steps:
            return True
        return self.prompt_source.has_results or self.idle_seconds == 0

    @property
    def idle_seconds(self) -> float | None:
        """Seconds that the loop may sleep until the next deadline; ``None`` if there is none."""
        if not self._running:
            return None
        deadlines = self._deadlines.next, self.prompt_source.deadline
        moments = [moment for moment in deadlines if moment is not None]
        return min(MAX_SLEEP, max(0.0, min(moments) - self._clock())) if moments else None

    @property
    def max_tokens(self) -> int:
        """Maximum number of prompt and completion tokens of one request that fit the KV pool."""
        tail = self._runner.config.kv_writes.tail
        # the KV of the last token is never stored
        return (self._allocator.num_pages - 1) * self._runner.config.page_size - tail + 1

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that can never be served; any thread may call this."""
        self._runner.check(request.params, request.end_token_ids, request.top_logprobs)
        allocator, config = self._allocator, self._runner.config
        needed = allocator.pages_for(request.max_kv_tokens + config.kv_writes.tail)
        for limit, holder, knobs in (
            (config.pages_per_request, "a request holds", "context_length"),
            (allocator.num_pages - 1, "the pool holds", "max_total_tokens or mem_fraction_static"),
        ):
            if needed > limit:
                raise ParameterError(
                    f"a request with {len(request.input_ids)} prompt tokens and max_new_tokens="
                    f"{request.max_new_tokens} needs {needed * config.page_size} KV tokens, but "
                    f"{holder} {limit * config.page_size}; shorten it or raise {knobs}",
                    limit=limit * config.page_size,
                )

    def check_queue(self, num_new: int) -> None:
        """Raise QueueFullError if too many requests would wait; any thread may call this."""
        limit, count = self._max_waiting, len(self._waiting)
        # requests that will get a slot in the next step do not count as waiting
        if limit is not None and count + num_new > limit + len(self._free_slots):
            raise QueueFullError(
                f"max_waiting_requests={limit} exceeded: {count} requests wait for "
                f"{len(self._free_slots)} free slots and {num_new} more were sent; send fewer at "
                "once or raise max_waiting_requests"
            )

    def add(self, *requests: Request, caller: Hashable = None) -> None:
        """Queue all requests, which have passed :meth:`check`; or none, if the queue is full."""
        self.check_queue(len(requests))
        for request in requests:
            self._waiting.append(request, caller)
            self._deadlines.watch(request)

    def abort(self, request: Request, message: str | None = None) -> None:
        """End a waiting or running request; it keeps its text so far."""
        if request.is_finished:
            return
        self._finish(request, message)
        row = next((row for row in self._running if row.request is request), None)
        if row is not None:
            self._release(row)
        elif request in self._waiting:
            self._waiting.remove(request)
            self._blocked_steps = 0
        self._report_queue()

    def fail(self, request: Request, error: Exception) -> None:
        """End a request after an error that affects no other request."""
        logger.error("request %r failed", request.rid, exc_info=error)
        request.fail()
        self.abort(request, f"the request failed: {error!r}")

    def debug_state(self) -> dict[str, int]:
        free, cached = self._allocator.num_free, self._budget.cache.num_pages
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "pages_free": free,
            "pages_cached": cached,
            "pages_held": self._allocator.num_pages - 1 - free - cached,
        }

    def take_changed(self) -> list[Request]:
        """Running requests, and those preempted or ended since the last call; may have repeats."""
        stopped, self._stopped = self._stopped, []
        return [*(row.request for row in self._running), *stopped]

    def step(self) -> None:
        """Admit requests, dispatch prompt chunks and a round, and read results that are due."""
        self._receive_prompts()
        self._settle()
        for request in self._deadlines.expired(self._clock()):
            self.abort(request, f"the request timed out after {request.arguments.timeout} s")
        has_unread = bool(self._in_flight)
        self._blocked_steps = max(0, self._blocked_steps - 1)
        num_starting = self._num_starting()
        prefills_first = self._prefills_first(num_starting)
        has_dispatched = num_starting > 0 and self._prefill(prefills_first)
        rows = [] if has_dispatched and prefills_first else self._dispatch_round()
        # if nothing was dispatched, the device becomes idle, so read everything
        self._read_until(self._run_ahead if has_dispatched or rows else 0)
        here = [row for row in self._running if not row.is_remote]
        if any(row.is_late for row in here) and not (has_dispatched or rows):
            self._settle(LATE_SECONDS)
        elif here and not (has_dispatched or rows or has_unread):
            rid = here[0].request.rid
            raise RuntimeError(f"internal error: lost results for {rid!r}; restart the engine")
        self._report_queue()

    def flush_cache(self) -> None:
        """Drop all KV and cached prefixes; running requests will compute their KV again."""
        self._read_until(0)
        while self._running:
            self._preempt(self._running[-1], is_cached=False)
        self._budget.cache.flush()

    def fail_all(self, message: str) -> None:
        """End all requests after a failed step; read no results and keep no KV."""
        self._in_flight.clear()
        for request in (*(row.request for row in self._running), *self._waiting):
            if not request.is_finished:
                self._finish(request, message)
        self._waiting = FairQueue()
        while self._running:
            self._release(self._running[-1], is_cached=False)
        self._budget.cache.flush()
        self._report_queue()

    # prompts

    def _receive_prompts(self) -> None:
        """Continue requests whose prompts were computed elsewhere; requeue those given up."""
        is_idle = all(row.is_remote for row in self._running)
        lost: set[RunningRequest] = set()
        for row, first_token in self.prompt_source.receive(is_idle=is_idle):
            if first_token is None:
                lost.add(row)
            else:
                self._take_first(row, first_token)
        if lost:
            # requeue the oldest last, so that it is at the head; skip aborted rows
            for row in [row for row in reversed(self._running) if row in lost]:
                self._requeue(row, is_cached=False)

    def _take_first(self, row: RunningRequest, first_token: FirstToken) -> None:
        """Treat a prompt as if its last chunk had been computed and read here."""
        request = row.request
        row.is_remote = False
        self._budget.share(row, is_dispatched=True)
        if first_token.cached_tokens > request.cached_tokens:
            self._metrics.cached_tokens += first_token.cached_tokens - request.cached_tokens
            request.cached_tokens = first_token.cached_tokens
        reports = first_token.logprobs, first_token.hidden_states
        try:
            self._in_flight.add_first(row, first_token.token, reports, self._clock())
        except Exception as error:
            self.fail(request, error)

    @property
    def _is_prefilling(self) -> bool:
        """Whether the last running request is prefilling; no other can be."""
        newest = self._running[-1] if self._running else None
        return newest is not None and not (newest.is_prefilled or newest.is_remote)

    def _num_starting(self) -> int:
        """Number of requests whose prompts could be computed now if there are enough pages."""
        if self._blocked_steps:
            return int(self._is_prefilling)
        return self._is_prefilling + min(len(self._waiting), len(self._free_slots))

    def _prefills_first(self, num_starting: int) -> bool:
        """Whether prompts are computed without a round: if no request has decoded yet.

        A round with few rows takes nearly as long as one with many, so requests that start together
        wait for each other, for at most :data:`MAX_BURST`. Other requests never wait for a burst.
        """
        rows = [row for row in self._running if row.can_advance() or row.is_late]
        has_decoded = any(row.unread_rounds or row.kv_len > len(row.prefill_ids) for row in rows)
        if has_decoded or (rows and num_starting < 2):
            return False
        times = [row.request.first_token_time for row in rows if not row.awaits_first]
        return all(time is None or self._clock() < time + MAX_BURST for time in times)

    def _prefill(self, is_first: bool) -> bool:
        """Dispatch prompt chunks up to the token budget; return whether there were any."""
        config, step = self._runner.config, self._runner.config.chunk_step
        buckets = config.prefill_buckets
        if not self._in_flight:
            # the device is idle, so begin with a smaller dispatch and admit others meanwhile
            buckets = buckets[:-1] or buckets
        budget, limit = buckets[-1], config.num_slots
        if not is_first:
            widest = self._in_flight.prefill_times.widest_within(self._max_stall)
            budget = min(budget, config.mixed_prefill_tokens, widest)
            limit = config.max_chunks(budget)  # of one call
        capacity = self._budget.capacity(self._running)
        pieces: list[PromptPiece] = []
        duplicates: list[RunningRequest] = []
        while budget > 0 and len(pieces) < limit and (row := self._row_to_prefill(capacity)):
            if (end := row.kv_len + budget) < len(row.prefill_ids):
                end = last_multiple(row.kv_len, end, step)
                if pieces and end % step:
                    break  # a call of its own has more room
                budget = end - row.kv_len
            end = min(end, len(row.prefill_ids))
            missing = row.request.missing_logprobs
            if missing is not None and row.kv_len < missing < end:
                end = missing  # earlier tokens need no logits
            piece = PromptPiece(row, row.kv_len, end)
            if pieces and not is_first and piece.wants_logprobs != pieces[-1].wants_logprobs:
                break  # it needs another call
            pieces.append(piece)
            budget -= end - row.kv_len
            self._metrics.prefilled_tokens += end - row.kv_len
            self._budget.prepare_chunk(row, end, self._running)
            row.kv_len = end
            row.awaits_first = row.is_prefilled
            if row.is_prefilled and not self._budget.share(row, is_dispatched=False):
                duplicates.append(row)
        self._in_flight.dispatch_prompts(pieces)
        self._budget.chunks_dispatched()
        for row in duplicates:
            self._budget.share(row, is_dispatched=True)
        self.prompt_source.dispatched([piece.row for piece in pieces])
        return bool(pieces)

    def _row_to_prefill(self, capacity: Capacity) -> RunningRequest | None:
        """The running request that is prefilling, or else a newly admitted one."""
        if self._is_prefilling:
            return self._running[-1]
        while (row := self._admit(capacity)) is not None:
            row.is_remote = self.prompt_source.request(row)
            if not row.is_remote:
                break
        return row

    def _admit(self, capacity: Capacity) -> RunningRequest | None:
        """Give the next request that can start a slot and pages, if both are free."""
        if not self._waiting or not self._free_slots or self._blocked_steps:
            return None
        if (request := self._next_ready()) is None:
            return None
        if request.constraint is not None and request.constraint.error:
            self.abort(request, f"grammar: {request.constraint.error}")
            return None
        row = RunningRequest(
            request=request,
            slot=self._free_slots[-1],
            prefill_ids=request.known_ids,
            max_kv_tokens=request.max_kv_tokens,
            num_cacheable=request.num_cacheable,
            salt=salt_of(request.params.cache_salt),
        )
        if not self._budget.admit(row, self._running, capacity):
            self._blocked_steps = 0 if self._budget.waits else RETRY_STEPS
            return None
        # from here on, the request counts as running, even if the runner raises an error
        self._running.append(row)
        self._waiting.take(request)
        self._free_slots.pop()
        queue_seconds = None
        if request.admitted_time is None:
            request.admitted_time = self._clock()
            request.cached_tokens = row.kv_len
            queue_seconds = request.admitted_time - request.created_time
        self._metrics.request_admitted(len(row.prefill_ids), row.kv_len, queue_seconds)
        try:
            self._runner.set_slot(
                row.slot,
                request.params,
                seed=request.seed,
                end_token_ids=request.end_token_ids,
                prompt_len=len(request.input_ids),
                top_logprobs=request.top_logprobs,
                hidden_states=request.arguments.return_hidden_states,
                cached_ids=row.prefill_ids[: row.kv_len],
                mask=request.mask,
            )
        except Exception as error:
            self.fail(request, error)
            return None
        self._runner.set_pages(row.slot, row.pages)
        return row

    def _next_ready(self) -> Request | None:
        """The next waiting request whose grammar, if any, is ready; earlier ones wait."""
        late: list[RequestGrammar] = []
        for request in self._waiting:
            if (constraint := request.constraint) is None:
                return request
            if len(late) < MAX_LATE:
                if constraint.prepare(request.output_ids):
                    return request
                late.append(constraint)
                if request.num_retractions:
                    break  # it started before all others
        if not self._running:
            if any(constraint.is_busy for constraint in late):
                await_answers(late, LATE_SECONDS)
            else:  # too many processes run, or their program is starting
                time.sleep(LATE_SECONDS)
        return None

    def _dispatch_round(self) -> list[RunningRequest]:
        """Dispatch a round, or parts of one or two; return their rows.

        If a grammar limits a request, the second call of the started round follows here, because
        its masks need the tokens of the round before, and then the first call of the next one.
        """
        flight = self._in_flight
        started = flight.constrained.rows
        if started:
            while any(row.unread_rounds or row.awaits_first for row in flight.constrained.rows):
                self._read_until(len(flight) - 1)
            if flight.constrained.rows:  # reading may have ended them all
                for row in flight.finish_constrained():
                    self._end(row)
        rows = self._rows_with_pages()
        if is_constrained(rows):
            flight.start_constrained(rows)
        elif rows and not started:
            flight.dispatch_round(rows)
        return started or rows

    def _rows_with_pages(self) -> list[RunningRequest]:
        """Give pages to the rows of the next round; preempt the last row if pages run out."""
        rows = [row for row in self._running if row.can_advance()]
        while rows and not self._budget.grow(rows, self._running):
            if self._in_flight:
                # Reading gives exact lengths, which may free pages. A request with results in
                # flight must not be preempted, or tokens would be lost or repeated.
                self._read_until(0)
            elif len(self._running) > 1:
                self._preempt(self._running[-1])
                self._budget.raise_reserve()
            else:
                raise RuntimeError(
                    f"internal error: request {rows[0].request.rid!r} lacks pages although it runs "
                    "alone; restart the engine and report this"
                )
            rows = [row for row in self._running if row.can_advance()]
        return rows

    def _read_until(self, num_unread: int) -> None:
        """Read results, oldest first, until at most ``num_unread`` are left."""
        while len(self._in_flight) > num_unread:
            self._end_all(self._in_flight.read())

    def _settle(self, seconds: float = 0.0) -> None:
        """Take late answers of grammars that come within ``seconds``, and tokens they accept."""
        constraints = [row.request.constraint for row in self._running]
        await_answers([constraint for constraint in constraints if constraint is not None], seconds)
        self._end_all(self._in_flight.settle())

    def _end_all(self, ended: Iterable[tuple[RunningRequest, Exception | None]]) -> None:
        for row, error in ended:
            if error is not None:
                self.fail(row.request, error)
            if not row.is_released:
                self._end(row)

    # endings

    def _finish(self, request: Request, message: str | None) -> None:
        self._stopped.append(request)
        request.finish({"type": "abort"} | ({"message": message} if message else {}))
        self._report_end(request)

    def _end(self, row: RunningRequest) -> None:
        self._report_end(row.request)
        self._release(row)

    def _report_queue(self) -> None:
        tokens_in_use = self._budget.num_used_tokens, self._budget.num_window_tokens
        self._metrics.queue_changed(len(self._running), len(self._waiting), *tokens_in_use)

    def _report_end(self, request: Request) -> None:
        if self._controller is not None and request.spec is not None:
            request.spec.ema_accept_len = self._controller.ema_accept_len
        assert request.finish_reason is not None
        lengths = len(request.input_ids), len(request.output_ids)
        reason = request.finish_reason["type"]
        self._metrics.request_finished(reason, request.latency, *lengths)

    def _preempt(self, row: RunningRequest, *, is_cached: bool = True) -> None:
        """Preempt (retract) a row: free its pages and put its request at the head of the queue.

        The request resumes with a prefill of its prompt and output so far. Noise depends only on
        the request's seed and the token's position, so preemption does not change the output.
        """
        row.request.num_retractions += 1
        self._metrics.num_retracted += 1
        self._requeue(row, is_cached=is_cached)

    def _requeue(self, row: RunningRequest, *, is_cached: bool) -> None:
        self._release(row, is_cached=is_cached)
        if not is_cached:
            row.request.forget_prompt_logprobs()
        self._waiting.appendleft(row.request)

    def _release(self, row: RunningRequest, *, is_cached: bool = True) -> None:
        self.prompt_source.release(row)
        row.is_released = True
        self._stopped.append(row.request)
        self._blocked_steps = 0
        self._running.remove(row)
        if row.request.constraint is not None and row.is_late:
            row.request.constraint.close()  # it may have tokens that the request does not have
        # partial remote KV is not cached, because the rest may come from other weights
        is_kept = is_cached and not row.is_remote
        request = row.request
        if is_kept and request.is_finished and request.routes is not None:
            # before its pages are freed; tokens of an aborted prompt may be missing
            begin, end = request.arguments.routed_experts_start_len, len(request.known_ids) - 1
            pieces = self._runner.take_routes(row.pages, begin, min(end, row.kv_len))
            request.routes.pieces = pieces
        self._budget.release(row, row.request.known_ids if is_kept else None)
        self._free_slots.append(row.slot)
        self._runner.clear_slot(row.slot)
        if not self._running:
            self._in_flight.clear()
