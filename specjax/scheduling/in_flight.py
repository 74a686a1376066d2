"""Dispatched results that the host has not read, and what reading them does to the requests."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from specjax.adaptive.controller import AdaptiveController
from specjax.metrics.totals import Totals
from specjax.runtime.runner import Dispatched
from specjax.scheduling.request import PromptPiece, Request, RunningRequest
from specjax.types import NO_DRAFTS, DraftShape

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Dispatch:
    rows: Sequence[RunningRequest]
    result: Dispatched
    batch_size: int = 0  # padded, of the rounds of one call; 0 for prefill
    pieces: Sequence[PromptPiece] = ()  # of prefill, one a row


class InFlight:
    """A queue of results; reading one gives its requests tokens, and tells the controller."""

    def __init__(
        self, metrics: Totals, controller: AdaptiveController | None, clock: Callable[[], float]
    ) -> None:
        self._metrics = metrics
        self._controller = controller
        self._clock = clock
        self._queue: deque[_Dispatch] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add_rounds(
        self, rows: Sequence[RunningRequest], result: Dispatched, batch_size: int
    ) -> None:
        """Append the rounds of one call, with their padded batch size."""
        self._queue.append(_Dispatch(rows, result, batch_size))

    def add_prefill(self, pieces: Sequence[PromptPiece], result: Dispatched) -> None:
        """Append the pieces of prompts that one call computes."""
        self._queue.append(_Dispatch([piece.row for piece in pieces], result, pieces=pieces))

    def clear(self) -> None:
        self._queue.clear()

    def read(self) -> Iterator[tuple[RunningRequest, Exception | None]]:
        """Wait for the oldest result; yields the rows that it ended, or what failed in them."""
        entry = self._queue.popleft()
        if all(row.is_released for row in entry.rows):
            return
        # chunks that are not the last are waited for too, so that the device is never far behind
        values: list[Any] = entry.result.read().tolist()
        wanting = (row for row in entry.rows if row.request.top_logprobs is not None)
        wants_logprobs = not all(row.is_released for row in wanting)
        logprobs = entry.result.read_logprobs() if wants_logprobs else None
        states = entry.result.read_hidden_states()
        # what is reported beside the tokens, if anything is
        beside = () if logprobs is None and states is None else (logprobs, states)
        prompt, at = entry.result.read_prompt_logprobs(), 0
        now = self._clock()
        if entry.batch_size and self._controller is not None:
            self._report_accepted(self._controller, entry, values)
        for i, row in enumerate(entry.rows):
            own = slice(at, at := at + entry.pieces[i].num_tokens) if entry.pieces else None
            if row.is_released:
                continue
            try:
                if entry.batch_size:
                    self._take_rounds(row, i, values, entry.result.tier, beside, now)
                else:
                    piece = entry.pieces[i]
                    if prompt is not None and piece.wants_logprobs:
                        part = jax.tree.map(lambda leaf, own=own: leaf[own], prompt)
                        row.request.take_prompt_logprobs(piece.start, part)
                    if piece.is_last:
                        first = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], beside)
                        self.take_first(row, values[i], first, now)
            except Exception as error:
                yield row, error
            else:
                if row.request.is_finished:
                    yield row, None

    def take_first(
        self, row: RunningRequest, token: int, beside: tuple[Any, ...], now: float
    ) -> None:
        """Give a request the token that prefill sampled, with what is reported beside it."""
        request = row.request
        row.awaits_first = False
        request.append_first(token, *beside)
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
        rounds: list[list[list[int]]],
        tier: DraftShape,
        beside: tuple[Any, ...],
        now: float,
    ) -> None:
        """Append what the rounds of one call brought a row, up to where its request ends.

        Each round has at ``index`` the tokens, the numbers of proposed and of accepted drafts, and
        of tokens: 0 where the row was stopped already.
        """
        request, spec = row.request, row.request.spec
        row.unread_rounds -= len(rounds)
        kept = 0
        for number, batch in enumerate(rounds):
            *tokens, proposed, accepted, count = batch[index]
            if count == 0 or request.is_finished:
                break
            own = jax.tree.map(lambda leaf, at=(number, index): leaf[at], beside) if beside else ()
            kept += request.append_round(tokens[:count], proposed, accepted, tier, *own)
        row.kv_len += kept
        if kept:
            self._report_tokens(request, kept, now)
        if spec is not None:
            self._metrics.drafts_verified(*spec.take_new())

    def _report_tokens(self, request: Request, count: int, now: float) -> None:
        last, request.last_token_time = request.last_token_time, now
        self._metrics.tokens_generated(count, None if last is None else now - last)

    def _report_accepted(
        self, controller: AdaptiveController, entry: _Dispatch, rounds: list[list[list[int]]]
    ) -> None:
        """Tell the controller what each round accepted of requests that had not ended by then."""
        tier = entry.result.tier
        for batch in rounds:
            live = [
                (proposed, accepted)
                for row, (*_, proposed, accepted, count) in zip(entry.rows, batch, strict=False)
                if count > 0 and not row.is_released
            ]
            # rows that had nothing to propose say nothing about the tier; a round of them is plain
            counts = [accepted for proposed, accepted in live if proposed]
            if tier.steps and not counts and NO_DRAFTS not in controller.tiers:
                continue
            executed = tier if counts else NO_DRAFTS
            counts = counts or [0] * len(live)
            try:
                controller.on_verify_complete(counts, tier=executed, batch_size=entry.batch_size)
            except ValueError as error:
                # figures alone suffer; the requests' tokens have nothing to do with it
                logger.warning("a round is left out of the choice of drafted tokens: %s", error)
