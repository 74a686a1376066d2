"""Dispatch prompts and rounds, hold their results, and deliver these to requests."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.adaptive.controller import TierController
from specjax.adaptive.survival import RoundRecord
from specjax.metrics import Totals
from specjax.runtime.runner import Dispatched, ModelRunner
from specjax.runtime.runner_config import MIN_CHUNK, pick_bucket
from specjax.sampling.grammar_request import await_answers
from specjax.scheduling.constrained import ConstrainedRounds
from specjax.scheduling.prefill_times import PrefillTimes
from specjax.scheduling.request import Request, RunningRequest
from specjax.speculative.prefill import Chunk
from specjax.types import NO_DRAFTS, DraftShape, RoundResults

logger = logging.getLogger(__name__)


def last_multiple(start: int, end: int, step: int) -> int:
    """The last multiple of ``step`` up to ``end``, or ``end`` if none is after ``start``."""
    multiple = end - end % step
    return multiple if multiple > start else end


class PromptPiece(NamedTuple):
    """A range of a running request's ``prefill_ids`` to compute in one call."""

    row: RunningRequest
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def is_last(self) -> bool:
        """Whether the piece is the last, so that a token is sampled after it."""
        return self.end == len(self.row.prefill_ids)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the request still needs log-probabilities from this piece."""
        missing = self.row.request.missing_logprobs
        return missing is not None and missing < self.end

    def cut(self, room: int, step: int) -> int:
        """The end of the part for a call that has room for this many tokens.

        A call keeps states once, after a multiple of ``step`` tokens or at its end.
        """
        end = min(self.end, self.start + room)
        kept = sorted(at for at in self.row.kept_states if self.start < at <= end)
        if len(kept) > 1 or any((at - self.start) % step for at in kept):
            return kept[0]
        return end if end == self.end else last_multiple(self.start, end, step)

    def chunk(self) -> Chunk:
        row = self.row
        span, budget = (self.start, self.end), row.request.num_left
        source = row.state_source if self.start == row.num_cached else 0
        states = {at - self.start: slot for at, slot in row.kept_states.items()}
        kept = next((x for x in states.items() if 0 < x[0] <= self.num_tokens), (0, 0))
        chunk = Chunk.of(row.slot, row.prefill_ids, *span, budget, row.num_cached)
        return chunk._replace(state_source=source, kept_states=kept)


class Reading(NamedTuple):
    """Tokens of a result that a grammar must accept before the request gets them."""

    row: RunningRequest
    tokens: Sequence[int]
    take: Callable[[], None]


class InFlight:
    """A queue of results; reading one adds its tokens to requests and informs the controller."""

    def __init__(
        self,
        runner: ModelRunner,
        metrics: Totals,
        controller: TierController | None,
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._metrics = metrics
        self._controller = controller
        self._clock = clock
        self.constrained = ConstrainedRounds(runner)
        self._readings: list[Reading] = []
        # start of the oldest call's rounds: when the previous result was read; None if the call has
        # no rounds or was dispatched later
        self._started: float | None = None
        # when the last result was read, and whether the device had it before
        self._read_time, self._was_ready = 0.0, True
        self.prefill_times = PrefillTimes(runner.config.prefill_buckets)
        # rows, result, padded batch size (if rounds), pieces, width and time (if prefill)
        self._queue: deque[
            tuple[Sequence[RunningRequest], Dispatched, int, Sequence[PromptPiece], int, float]
        ] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def clear(self) -> None:
        self._queue.clear()
        self._readings.clear()
        self.constrained.clear()
        self._started = None

    def dispatch_prompts(self, pieces: Sequence[PromptPiece]) -> None:
        """Dispatch pieces of prompts in as many calls as they need."""
        config, waiting, step = self._runner.config, deque(pieces), self._runner.config.chunk_step
        while waiting:
            logs, run = next(groupby(waiting, attrgetter("wants_logprobs")))
            group = list(run)
            num_tokens = max(sum(piece.num_tokens for piece in group), MIN_CHUNK * len(group))
            width = room = config.prefill_width(num_tokens, with_logprobs=logs)
            batch: list[PromptPiece] = []
            while len(batch) < min(len(group), config.max_chunks(width)) and room > 0:
                piece = waiting[0]
                if (end := piece.cut(room, step)) == piece.end:
                    room -= waiting.popleft().num_tokens
                elif batch and end % step:
                    break  # another call has more room
                else:
                    waiting[0], room = piece._replace(start=end), 0
                batch.append(piece._replace(end=end))
            now = self._clock()  # before the call, which may wait for the device
            result = self._runner.prefill([piece.chunk() for piece in batch], with_logprobs=logs)
            self._queue.append(([piece.row for piece in batch], result, 0, batch, width, now))

    def dispatch_round(self, rows: list[RunningRequest]) -> None:
        """Dispatch the rounds of one call in the tier that the controller chooses."""
        config = self._runner.config
        result = self._runner.round([row.slot for row in rows], self._choose_tier(rows))
        for row in rows:
            row.unread_rounds += config.rounds_per_dispatch
        bucket = pick_bucket(len(rows), config.batch_buckets)
        self._queue.append((rows, result, bucket, (), 0, 0.0))

    def start_constrained(self, rows: list[RunningRequest]) -> None:
        """Dispatch the first call of a round in which a grammar limits a request."""
        tier = self._choose_tier(rows) or self._runner.config.largest
        self.constrained.start(rows, tier._replace(packed=0))

    def finish_constrained(self) -> list[RunningRequest]:
        """Dispatch the second call; return the rows that ended because no token may follow."""
        rows, result = self.constrained.finish()
        if result is not None:
            for row in rows:
                row.unread_rounds += 1
            batch_size = pick_bucket(len(rows), self._runner.config.batch_buckets)
            self._queue.append((rows, result, batch_size, (), 0, 0.0))
        return [row for row in rows if row.request.is_finished and not row.is_released]

    def _choose_tier(self, rows: Sequence[RunningRequest]) -> DraftShape | None:
        config = self._runner.config
        batch_size = pick_bucket(len(rows), config.batch_buckets)
        controller, tier = self._controller, None
        if not self._queue:  # the device may have been idle before this round
            self._started = None
        drafting = [row for row in rows if row.request.params.speculative]
        requests = [row.request.rid for row in drafting]
        if controller is not None:
            record = RoundRecord((), mean_context(rows), requests, share_drafting(rows))
            tier = controller.activate_for_batch(batch_size, record)
        if NO_DRAFTS in config.shapes and not drafting:
            tier = NO_DRAFTS
        if controller is not None and tier is not None and tier.packed:
            if (estimate := controller.policy.calibration(requests)) is not None:
                self._runner.set_calibration(*estimate, [row.slot for row in drafting])
        return tier

    def read(self) -> Iterator[tuple[RunningRequest, Exception | None]]:
        """Wait for the oldest result; yield the rows that ended, each with its error, if any."""
        rows, result, batch_size, pieces, width, dispatched = self._queue.popleft()
        if all(row.is_released for row in rows):
            self._started, self._read_time, self._was_ready = None, self._clock(), True
            return
        is_ready = result.is_ready
        # wait for every chunk, not only for a prompt's last one, so that the host is not far ahead
        packed, accept_width = result.read(), result.tier.accept_width
        rounds = None
        if batch_size:
            rounds = RoundResults.unpack(packed[:, :batch_size], accept_width).lists()
            if (bits := packed[:, batch_size:, 0]).size:
                self._metrics.experts_read(bits.view(np.float32).ravel().tolist())
        # the tokens of the first round by row, or one of each prompt
        tokens: list[Any] = rounds.tokens[0] if rounds else packed.tolist()
        counts = rounds.num_accepted_tokens[0] if rounds else ()
        reported = result.logprobs, result.prompt_logprobs, result.hidden_states
        logprobs, prompt, states = jax.tree.map(np.asarray, reported)
        if states is not None:
            states = states.astype(np.float32)
        reports = () if logprobs is None and states is None else (logprobs, states)
        at = 0
        now = self._clock()
        # A call starts when the one before it ends, and both ends are known if the host waited for
        # them. On an H200, including the others gave 11 ms for a call of 24 ms.
        if width and not is_ready and (dispatched > self._read_time or not self._was_ready):
            self.prefill_times.observe(width, now - max(dispatched, self._read_time))
        self._read_time, self._was_ready = now, is_ready
        seconds = 0.0
        if rounds is not None and self._started is not None:
            seconds = (now - self._started) / len(rounds.tokens)
        # a round of two calls joins the queue at the second
        follows = self._queue[0][2] if self._queue else self.constrained.rows
        self._started = now if batch_size and follows else None
        if rounds and self._controller is not None:
            self._report_accepted(self._controller, rows, rounds, result.tier, batch_size, seconds)
        for i, row in enumerate(rows):
            span = slice(at, at := at + pieces[i].num_tokens) if pieces else None
            if row.is_released:
                continue
            try:
                if rounds:
                    take = partial(self._take_rounds, row, i, rounds, result.tier, reports, now)
                    new_tokens = tokens[i][: counts[i]]
                    self._readings.append(Reading(row, new_tokens[: row.request.num_left], take))
                    continue
                piece = pieces[i]
                if prompt is not None and piece.wants_logprobs:
                    piece_logprobs = jax.tree.map(lambda leaf, span=span: leaf[span], prompt)
                    row.request.take_prompt_logprobs(piece.start, piece_logprobs)
                if piece.is_last:
                    report = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], reports)
                    self.add_first(row, tokens[i], report, now)
            except Exception as error:
                yield row, error
        yield from self.settle()

    def add_first(
        self, row: RunningRequest, token: int, reports: tuple[Any, ...], now: float
    ) -> None:
        """Add the token that prefill sampled, with its reports, if any; :meth:`settle` follows."""
        take = partial(self._take_first, row, token, reports, now)
        self._readings.append(Reading(row, [token][: row.request.max_new_tokens], take))

    def settle(self) -> Iterator[tuple[RunningRequest, Exception | None]]:
        """Give requests the tokens that their grammars have accepted; yield as :meth:`read` does.

        Readings whose answer does not come in time stay for later.
        """
        readings = [x for x in self._readings if not x.row.is_released]
        sent = []
        for row, tokens, _ in readings:
            if (constraint := row.request.constraint) and tokens and not row.is_late:
                is_last = len(tokens) >= row.request.num_left
                constraint.send(tokens, None if is_last else self.constrained.tree(row))
                row.awaits_grammar = True
                sent.append(constraint)
        await_answers(sent)
        self._readings = []
        for reading in readings:
            row = reading.row
            if (constraint := row.request.constraint) and constraint.is_busy:
                self._readings.append(reading)
                continue
            row.awaits_grammar = False
            try:
                reading.take()
            except Exception as error:
                yield row, error
            else:
                if row.request.is_finished:
                    yield row, None

    def _take_first(
        self, row: RunningRequest, token: int, reports: tuple[Any, ...], now: float
    ) -> None:
        request = row.request
        row.awaits_first = False
        request.append_first(token, *reports)
        if not request.output_ids:
            return
        if request.first_token_time is None:
            request.first_token_time = now
            self._metrics.time_to_first_token.observe(now - request.created_time)
        self._report_tokens(request, 1, now)

    def _take_rounds(
        self,
        row: RunningRequest,
        index: int,
        rounds: RoundResults,
        tier: DraftShape,
        reports: tuple[Any, ...],
        now: float,
    ) -> None:
        """Append the tokens from the rounds of one call to a row until its request ends.

        ``index`` is the row's. Its number of tokens is 0 in rounds after it has stopped.
        """
        request, spec = row.request, row.request.spec
        row.unread_rounds -= len(rounds.tokens)
        total = 0
        tokens, _, proposed, accepted, counts = rounds
        for number in range(len(tokens)):
            count = counts[number][index]
            if count == 0 or request.is_finished:
                break
            drafts = proposed[number][index], accepted[number][index]
            self._metrics.rows_by_proposed[drafts[0]] += 1
            report = jax.tree.map(lambda leaf, at=(number, index): leaf[at], reports)
            total += request.append_round(tokens[number][index][:count], *drafts, tier, *report)
        row.kv_len += total
        if total:
            self._report_tokens(request, total, now)
        if spec is not None:
            self._metrics.drafts_verified(*spec.take_new(), row.kv_len)

    def _report_tokens(self, request: Request, count: int, now: float) -> None:
        last, request.last_token_time = request.last_token_time, now
        self._metrics.tokens_generated(count, None if last is None else now - last)

    def _report_accepted(
        self,
        controller: TierController,
        rows: Sequence[RunningRequest],
        rounds: RoundResults,
        tier: DraftShape,
        batch_size: int,
        seconds: float,
    ) -> None:
        """Report the accepted drafts of each round to the controller, without ended requests."""
        context, share = mean_context(rows), share_drafting(rows)
        for number, counts in enumerate(rounds.num_accepted_tokens):
            live = [i for i, row in enumerate(rows) if counts[i] and not row.is_released]
            # Rows without proposed drafts do not count; a round with only such rows is plain. But a
            # packed round proposes none for requests whose drafts are unlikely to survive.
            drafts = rounds.num_proposed_drafts[number], rounds.num_accepted_drafts[number]
            drafting = [i for i in live if drafts[0][i]]
            if tier.packed:
                drafting = [i for i in live if rows[i].request.params.speculative]
            if tier.steps and not drafting and NO_DRAFTS not in controller.tiers:
                continue
            proposed, accepted = ([numbers[i] for i in drafting] for numbers in drafts)
            confidences: Any = ()
            if rounds.confidence_bits.shape[-1]:
                confidences = rounds.confidence_bits[number, drafting].view(np.float32)
            executed, ids = tier if drafting else NO_DRAFTS, [rows[i].request.rid for i in drafting]
            measured = seconds if executed == tier else 0.0
            record = RoundRecord(proposed, context, ids, share, confidences, measured)
            try:
                controller.on_verify_complete(
                    accepted or [0] * len(live), tier=executed, batch_size=batch_size, record=record
                )
            except ValueError as error:
                # this affects only the adaptive metrics, not the tokens of requests
                logger.warning("the adaptive policy failed on the result of a round: %s", error)


def mean_context(rows: Sequence[RunningRequest]) -> float:
    """Mean number of tokens in the KV pool per row, without those of rounds in flight."""
    return sum([row.kv_len for row in rows]) / len(rows)


def share_drafting(rows: Sequence[RunningRequest]) -> float:
    """Share of the rows whose requests may have drafts; 1 if that is none of them."""
    return [row.request.params.speculative for row in rows].count(True) / len(rows) or 1.0
