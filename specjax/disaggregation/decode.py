"""The decode side: has prompts computed elsewhere, and decodes them as if it had done so itself.

A request is asked for once it has a slot and the pages of its prompt here, so that what is in
transit always has a place: the decode side holds the KV, and while it is full, requests wait in its
queue. Whatever goes wrong, the prompt is computed here instead.
"""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np

from specjax.disaggregation.messages import (
    Arrival,
    Cancel,
    Job,
    Message,
    Piece,
    Prefilled,
)
from specjax.disaggregation.rows import RowPort, check_facts
from specjax.kv.budget import Room
from specjax.sampling.params import SamplingParams
from specjax.scheduling.request import Request, RunningRequest
from specjax.scheduling.scheduler import Scheduler
from specjax.speculative.prefill import UNLIMITED
from specjax.types import Logprobs

logger = logging.getLogger(__name__)

# tokens whose KV is taken between two rounds: 0.8 ms of the Llama-3.1-8B shape on an H200
TOKENS_A_STEP = 1024
TOKENS_OF_A_START = 128  # for which a request that begins counts
# Seconds without progress after which a request that was asked for is computed here. A prefill side
# sends KV after each chunk, every 0.2 s for that shape. One that is silent for longer has hung, or
# computes 400,000 tokens of prompts for others first.
MAX_SILENCE = 10.0
MAX_SLEEP = 3600.0  # seconds without a look at the timeouts; a queue cannot wait for any number
MAX_TEXT = 200  # characters of an id that are sent, and of a reason that is logged


class PrefillPeer(Protocol):
    """A prefill side, as the decode side sees it."""

    @property
    def weights(self) -> str:
        """Fingerprint of its weights."""

    def send(self, message: Message) -> None:
        """Does not block; ``ConnectionError`` where it has gone."""


class DecodeScheduler(Scheduler):
    """A scheduler whose prompts are computed by a peer, where there is one with equal weights.

    Requests that were retracted, and all while no peer is there, are prefilled here.
    """

    def __init__(self, *inputs: Any, port: RowPort, **options: Any) -> None:
        super().__init__(*inputs, **options)
        self._port = port
        self._peer: PrefillPeer | None = None
        self._arrived: deque[tuple[Arrival, Callable[[], None] | None]] = deque()
        self._ids = itertools.count()
        self._awaited: dict[int, RunningRequest] = {}
        self._here: WeakSet[Request] = WeakSet()  # not to be asked for again
        self.weights = port.weights()

    @property
    def facts(self) -> dict[str, Any]:
        """What a prefill side has to know, as JSON values."""
        return self._port.facts

    @property
    def most_bytes(self) -> int:
        """Of the arrays of one message from a prefill side."""
        return self._port.most_bytes

    @property
    def peer_connected(self) -> bool:
        """Whether there is somebody to ask. In any thread."""
        return self._peer is not None

    def expect(self, facts: dict[str, Any]) -> None:
        """Make ready for a peer of these; ValueError where it does not fit. In any thread."""
        check_facts(self._port.facts["both"], facts.get("both"))
        self._port.expect(facts.get("rows"))

    def placed(self, message: Arrival) -> Arrival:
        """A message with its KV on the device. In any thread."""
        if not isinstance(message, Piece):
            return message
        return replace(message, kv=self._port.placed(message.kv))

    # the peer; in the loop's thread, as all of this

    def join(self, peer: PrefillPeer) -> None:
        """Ask this peer from now on."""
        if self._peer is not None:
            self.leave(self._peer)
        self._peer = peer

    def compare_weights(self, peer: PrefillPeer) -> None:
        """Log where a peer cannot be asked, since its weights are others."""
        if peer.weights != self.weights:
            logger.warning(
                "prompts are computed here until the weights are equal: fingerprint %r here, "
                "%.18r at the prefill side",
                self.weights,
                peer.weights,
            )

    def leave(self, peer: PrefillPeer) -> None:
        """Compute here what this peer has been asked for."""
        if peer is self._peer:
            self._peer = None
            for row in reversed(self._running):
                if row.is_awaited:
                    self._compute_here(row)

    def weights_replaced(self) -> None:
        self.weights = self._port.weights()
        if self._peer is not None:
            self.compare_weights(self._peer)

    def take(self, message: Arrival, taken: Callable[[], None] | None = None) -> None:
        """A message of the peer, for one of the next steps, which then calls ``taken``."""
        self._arrived.append((message, taken))
        if message.id in self._awaited:
            # the peer works in the order of asking: this is progress of all later requests too
            for job, row in self._awaited.items():
                if job >= message.id:
                    row.heard_time = self._clock()

    def step(self) -> None:
        """Take what has arrived, give up what has made no progress, and go on as ever."""
        self._take_arrived()
        for row in reversed(self._running):
            if row.is_awaited and self._clock() >= row.heard_time + MAX_SILENCE:
                logger.warning("request %r is prefilled here: no answer", row.request.rid)
                self._compute_here(row)
        super().step()

    def _take_arrived(self) -> None:
        """Take what has arrived, not more than rounds hardly notice."""
        room = TOKENS_A_STEP if len(self._awaited) < len(self._running) else UNLIMITED
        while self._arrived and room > 0:
            message, taken = self._arrived.popleft()
            row = self._awaited.get(message.id)
            if row is not None:  # it still waits
                room -= message.count if isinstance(message, Piece) else TOKENS_OF_A_START
                self._take(row, message)
            if taken is not None:
                taken()

    def _take(self, row: RunningRequest, message: Arrival) -> None:
        try:
            if isinstance(message, Piece):
                self._take_piece(row, message)
            elif isinstance(message, Prefilled):
                self._begin(row, message)
            else:
                raise ValueError(message.reason[:MAX_TEXT])
        except ValueError as error:
            logger.warning("request %r is prefilled here: %s", row.request.rid, error)
            self._compute_here(row)

    # scheduling

    @property
    def has_work(self) -> bool:
        """Whether a step is of use: nothing is done for requests that wait for the peer alone."""
        is_decoding = len(self._awaited) < len(self._running)
        if is_decoding or self._arrived or self.idle_seconds == 0:
            return True
        return bool(self._waiting and self._free_slots) and not self._blocked_steps

    @property
    def idle_seconds(self) -> float | None:
        """Seconds to the next timeout, or until a request has waited too long for the peer."""
        moments = [row.heard_time + MAX_SILENCE for row in self._awaited.values()]
        if (moment := self._deadlines.next) is not None:
            moments.append(moment)
        return min(MAX_SLEEP, max(0.0, min(moments) - self._clock())) if moments else None

    def _row_to_prefill(self, room: Room) -> RunningRequest | None:
        while (row := super()._row_to_prefill(room)) is not None:
            if row.kv_len > row.num_cached or not self._ask(row):
                return row
        return None

    def _ask(self, row: RunningRequest) -> bool:
        """Ask the peer for a row; false where that has to be computed here."""
        request, peer = row.request, self._peer
        if peer is None or peer.weights != self.weights:
            return False
        if request.output_ids or request in self._here:
            return False
        left = request.arguments.timeout
        if left is not None:
            left = max(1e-3, left - request.latency)
        job = Job(
            id=next(self._ids),
            rid=request.rid[:MAX_TEXT],
            input_ids=np.array(request.input_ids, np.int32),
            start=row.kv_len,
            params=_json(request.params),
            seed=request.seed,
            end_token_ids=sorted(request.end_token_ids),
            top_logprobs=request.top_logprobs,
            logprob_start_len=request.logprob_start_len,
            return_hidden_states=request.arguments.return_hidden_states,
            timeout=left,
        )
        row.is_awaited, row.heard_time = True, self._clock()
        self._awaited[job.id] = row
        try:
            peer.send(job)
        except (ConnectionError, ValueError) as error:  # gone, or not to be sent
            logger.warning("request %r is prefilled here: %s", request.rid, error)
            row.is_awaited = False
            del self._awaited[job.id]
            return False
        return True

    def _take_piece(self, row: RunningRequest, piece: Piece) -> None:
        end = piece.start + piece.count
        if not row.num_cached <= piece.start <= row.kv_len or piece.count < 1:
            raise ValueError(f"tokens {piece.start} to {end} came where {row.kv_len} were there")
        if end > len(row.prefill_ids):
            raise ValueError(f"tokens up to {end} came of a prompt of {len(row.prefill_ids)}")
        self._port.check_kv(piece.kv, piece.count)
        self._port.put(row.pages, piece.start, piece.count, piece.kv)
        row.kv_len = end

    def _begin(self, row: RunningRequest, done: Prefilled) -> None:
        """Go on as if the last chunk of the prompt had been computed and read here."""
        request, text = row.request, row.prefill_ids
        if done.weights != self.weights:
            raise ValueError(f"weights {done.weights} instead of {self.weights}")
        if row.kv_len != len(text):
            raise ValueError(f"KV of {row.kv_len} tokens came instead of {len(text)}")
        if not 0 <= done.token < self.vocab_size:
            raise ValueError(f"token {done.token} is none of {self.vocab_size}")
        if done.cached_tokens > len(text):
            raise ValueError(f"{done.cached_tokens} of {len(text)} tokens were cached")
        self._port.check_rows(done.rows)
        logprobs, hidden = self._reports(request, done)
        if (start := request.logprob_start_len) is not None:
            count = len(text) - 1 - start
            of_prompt = _logprobs(done.prompt_logprobs, count, request.top_logprobs)
            request.take_prompt_logprobs(start, of_prompt)
        self._forget(row)
        self._budget.share(row, is_dispatched=True)
        if done.cached_tokens > request.cached_tokens:
            self._metrics.cached_tokens += done.cached_tokens - request.cached_tokens
            request.cached_tokens = done.cached_tokens
        try:
            self._in_flight.take_first(row, done.token, (logprobs, hidden), self._clock())
        except Exception as error:
            self.fail(request, error)
            return
        if request.is_finished:
            self._report_end(request)
            self._release(row)
        else:
            self._port.begin(row.slot, request.known_ids, request.num_left, done.rows)

    def _reports(self, request: Request, done: Prefilled) -> tuple[Logprobs | None, Any]:
        """What is reported beside the first token, as it was asked for; ValueError if not."""
        logprobs, hidden = None, None
        if request.top_logprobs is not None:
            logprobs = _logprobs(done.logprobs, 1, request.top_logprobs)
        if request.arguments.return_hidden_states:
            hidden = done.hidden
            width = self._runner.networks.target_config.hidden_size
            if _kinds((hidden,)) != [((1, width), "float32")]:
                raise ValueError(f"hidden states came as {_kinds((hidden,))}")
        return logprobs, hidden

    def _compute_here(self, row: RunningRequest) -> None:
        self._here.add(row.request)
        self._requeue(row, is_cached=False)

    def _forget(self, row: RunningRequest) -> int:
        """Wait for a row no longer; returns its job."""
        job = next(job for job, other in self._awaited.items() if other is row)
        del self._awaited[job]
        row.is_awaited = False
        return job

    def _release(self, row: RunningRequest, *, is_cached: bool = True) -> None:
        if row.is_awaited:
            # what has come of its KV is not kept: the rest may be of other weights
            is_cached = False
            job = self._forget(row)
            if self._peer is not None:
                try:
                    self._peer.send(Cancel(id=job))
                except ConnectionError as error:
                    logger.info("job %d is not cancelled: %s", job, error)
        super()._release(row, is_cached=is_cached)


def _json(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as JSON values, from which :meth:`SamplingParams.of` makes equal ones."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): item for key, item in value.items()}
        return list(value) if isinstance(value, tuple) else value

    return {name: plain(value) for name, value in asdict(params).items()}


def _logprobs(arrays: tuple[Any, ...] | None, count: int, top: int | None) -> Logprobs:
    """Log-probabilities of ``count`` tokens, each with ``top`` others; ValueError if not."""
    best = (count, top or 0) if count else (0, 0)
    wanted = [((count,), "float32"), (best, "int32"), (best, "float32")]
    if arrays is None or _kinds(arrays) != wanted:
        given = None if arrays is None else _kinds(arrays)
        raise ValueError(f"log-probabilities came as {given} where {wanted} are due")
    return Logprobs(*arrays)


def _kinds(arrays: tuple[Any, ...]) -> list[Any]:
    """Shape and dtype of each array."""
    return [array if array is None else (tuple(array.shape), str(array.dtype)) for array in arrays]
