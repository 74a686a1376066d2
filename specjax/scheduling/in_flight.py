"""Dispatched results that the host has not read, and what reading them does to the requests."""

from dataclasses import dataclass
from typing import Any

from specjax.runtime.dispatched import Dispatched, HostLogprobs
from specjax.scheduling.events import SchedulerMetrics
from specjax.scheduling.request import Request
from specjax.scheduling.row import Row
from specjax.scheduling.spec_counts import SpecTotals


@dataclass(frozen=True)
class InFlight:
    """One prefill chunk, or the rounds of one call.

    ``is_last_chunk`` marks the chunk that samples a token.
    """

    rows: tuple[Row, ...]
    result: Dispatched
    is_round: bool
    is_last_chunk: bool = False


class Reader:
    """Gives the requests the tokens of results, oldest first.

    Args:
        metrics: hears of tokens and drafts.
    """

    def __init__(self, metrics: SchedulerMetrics) -> None:
        self._metrics = metrics

    def fetch(self, entry: InFlight) -> tuple[list[Any], HostLogprobs | None]:
        """Wait for a result: its values, and log probabilities where a request wants them."""
        values = entry.result.read().tolist()
        if any(row.request.wants_logprobs and not row.is_released for row in entry.rows):
            return values, entry.result.read_logprobs()
        return values, None

    def take_first(self, row: Row, token: int, logprobs: HostLogprobs | None, now: float) -> None:
        """Append the token that a prefill sampled."""
        request = row.request
        row.awaits_first = False
        request.append_first(token, logprobs)
        if request.first_token_time is None:
            request.first_token_time = now
            self._metrics.first_token(now - request.created_time)
        self._report_tokens(request, 1, now)

    def take_rounds(
        self,
        row: Row,
        index: int,
        rounds: list[list[list[int]]],
        num_steps: int,
        logprobs: HostLogprobs | None,
        now: float,
    ) -> None:
        """Append what the rounds of one call brought a row, up to where its request ends.

        Args:
            row: the row.
            index: its place in the batch.
            rounds: for each round and place in the batch the tokens, the number of accepted drafts
                and the number of tokens, 0 where the row was stopped already.
            num_steps: drafted tokens of these rounds.
            logprobs: of the whole call.
            now: time of reading.
        """
        request, spec = row.request, row.request.spec
        row.unread_rounds -= len(rounds)
        before = SpecTotals() if spec is None else spec.totals
        kept = 0
        for number, batch in enumerate(rounds):
            *tokens, drafts, count = batch[index]
            if count == 0 or request.is_finished:
                break
            beside = None if logprobs is None else _at(logprobs, number, index)
            kept += request.append_round(tokens[:count], drafts, num_steps, beside)
        row.kv_len += kept
        if kept:
            self._report_tokens(request, kept, now)
        if spec is not None:
            after = spec.totals
            self._metrics.drafts_verified(
                after.verifies - before.verifies,
                after.proposed - before.proposed,
                after.correct - before.correct,
            )

    def _report_tokens(self, request: Request, count: int, now: float) -> None:
        last, request.last_token_time = request.last_token_time, now
        self._metrics.tokens_generated(count, None if last is None else now - last)


def _at(logprobs: HostLogprobs, number: int, index: int) -> HostLogprobs:
    """The log probabilities of one round and row."""
    return HostLogprobs(
        logprobs.chosen[number, index],
        logprobs.top_ids[number, index],
        logprobs.top_values[number, index],
    )
