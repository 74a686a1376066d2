"""Hold dispatched results that the host has not read yet, and deliver them to requests."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from specjax.adaptive.controller import AdaptiveController
from specjax.adaptive.survival import RoundRecord
from specjax.metrics import Totals
from specjax.runtime.runner import Dispatched
from specjax.scheduling.request import PromptPiece, Request, RunningRequest
from specjax.types import NO_DRAFTS, DraftShape

logger = logging.getLogger(__name__)


class InFlight:
    """A queue of results; reading one adds its tokens to requests and informs the controller."""

    def __init__(
        self, metrics: Totals, controller: AdaptiveController | None, clock: Callable[[], float]
    ) -> None:
        self._metrics = metrics
        self._controller = controller
        self._clock = clock
        # rows, result, padded batch size (if rounds), pieces (if prefill)
        self._queue: deque[
            tuple[Sequence[RunningRequest], Dispatched, int, Sequence[PromptPiece]]
        ] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(
        self,
        rows: Sequence[RunningRequest],
        result: Dispatched,
        *,
        batch_size: int = 0,
        pieces: Sequence[PromptPiece] = (),
    ) -> None:
        """Append the result of rounds with their padded batch size, or of prefill with pieces."""
        self._queue.append((rows, result, batch_size, pieces))

    def clear(self) -> None:
        self._queue.clear()

    def read(self) -> Iterator[tuple[RunningRequest, Exception | None]]:
        """Wait for the oldest result; yield the rows that ended, each with its error, if any."""
        rows, result, batch_size, pieces = self._queue.popleft()
        if all(row.is_released for row in rows):
            return
        # wait for every chunk, not only for a prompt's last one, so that the host is not far ahead
        packed = result.read()
        values: list[Any] = packed.tolist()
        reported = result.logprobs, result.prompt_logprobs, result.hidden_states
        logprobs, prompt, states = jax.tree.map(np.asarray, reported)
        if states is not None:
            states = states.astype(np.float32)
        reports = () if logprobs is None and states is None else (logprobs, states)
        at = 0
        now = self._clock()
        if batch_size and self._controller is not None:
            self._report_accepted(self._controller, rows, packed, result.tier)
        for i, row in enumerate(rows):
            own = slice(at, at := at + pieces[i].num_tokens) if pieces else None
            if row.is_released:
                continue
            try:
                if batch_size:
                    self._take_rounds(row, i, values, result.tier, reports, now)
                else:
                    piece = pieces[i]
                    if prompt is not None and piece.wants_logprobs:
                        part = jax.tree.map(lambda leaf, own=own: leaf[own], prompt)
                        row.request.take_prompt_logprobs(piece.start, part)
                    if piece.is_last:
                        first = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], reports)
                        self.take_first(row, values[i], first, now)
            except Exception as error:
                yield row, error
            else:
                if row.request.is_finished:
                    yield row, None

    def take_first(
        self, row: RunningRequest, token: int, reports: tuple[Any, ...], now: float
    ) -> None:
        """Give a request the token that prefill sampled, with its reports, if any."""
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
        rounds: list[list[list[int]]],
        tier: DraftShape,
        reports: tuple[Any, ...],
        now: float,
    ) -> None:
        """Append the tokens from the rounds of one call to a row until its request ends.

        Entry ``index`` of each round has the tokens, then the numbers of proposed drafts, accepted
        drafts and tokens. The number of tokens is 0 if the row had already stopped.
        """
        request, spec = row.request, row.request.spec
        row.unread_rounds -= len(rounds)
        kept = 0
        for number, batch in enumerate(rounds):
            *tokens, proposed, accepted, count = batch[index]
            if count == 0 or request.is_finished:
                break
            own = (
                jax.tree.map(lambda leaf, at=(number, index): leaf[at], reports) if reports else ()
            )
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
        self,
        controller: AdaptiveController,
        rows: Sequence[RunningRequest],
        rounds: np.ndarray,
        tier: DraftShape,
    ) -> None:
        """Report the accepted drafts of each round to the controller, without ended requests."""
        context, batch_size = mean_context(rows), rounds.shape[1]
        for batch in rounds:
            counts = batch[:, -3:].tolist()
            live = [
                (i, row.request, *counts[i])
                for i, row in enumerate(rows)
                if counts[i][-1] > 0 and not row.is_released
            ]
            # Rows without proposed drafts do not count; a round with only such rows is plain. But a
            # packed round proposes none for requests whose drafts are unlikely to survive.
            drafting = [
                one for one in live if one[2] or (tier.packed and one[1].params.speculative)
            ]
            if tier.steps and not drafting and NO_DRAFTS not in controller.tiers:
                continue
            index, requests, proposed, accepted, _ = (
                zip(*drafting, strict=True) if drafting else [()] * 5
            )
            # the float32 bits of confidences, if the round reports them
            bits = batch[list(index), tier.accept_width : -3]
            executed = tier if drafting else NO_DRAFTS
            record = RoundRecord(
                proposed, context, [request.rid for request in requests], bits.view(np.float32)
            )
            try:
                controller.on_verify_complete(
                    accepted or [0] * len(live),
                    tier=executed,
                    batch_size=batch_size,
                    record=record,
                )
            except ValueError as error:
                # this affects only the adaptive metrics, not the tokens of requests
                logger.warning("the adaptive policy failed on the result of a round: %s", error)


def mean_context(rows: Sequence[RunningRequest]) -> float:
    """Mean number of tokens in the KV pool per row, without those of rounds in flight."""
    return sum(row.kv_len for row in rows) / len(rows)
