"""The decode side: lets a peer prefill prompts, and decodes them as after a local prefill.

A request is sent to the peer only when it has a slot and pages for its prompt on this side, so KV
in transit always has memory. While the decode side is full, requests wait in its queue. If the
peer fails, the request is prefilled locally.
"""

import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

import jax
import numpy as np
from msgspec import structs
from msgspec.structs import replace

from specjax.disaggregation.messages import Arrival, Cancel, Job, Message, Piece, Prefilled, Weights
from specjax.disaggregation.prefill import DecodeClient, PrefillJobs
from specjax.disaggregation.rows import MOST_TOKENS, KVTransfer
from specjax.runtime.runner import ModelRunner
from specjax.sampling.params import GRAMMARS, SamplingParams
from specjax.scheduling.loop import EngineLoop, start_device_thread
from specjax.scheduling.prompt_source import FirstToken, PromptSource
from specjax.scheduling.request import Request, RunningRequest
from specjax.speculative.prefill import UNLIMITED
from specjax.types import Logprobs

logger = logging.getLogger(__name__)

# maximum tokens of KV to store between two rounds: 0.8 ms for the Llama-3.1-8B shape on an H200
TOKENS_A_STEP = 1024
TOKENS_OF_A_START = 128  # cost of starting a request, in the same unit
# Seconds without progress until a request is prefilled locally. A prefill side sends KV after each
# chunk, every 0.2 s for that shape. A side that is silent for longer has hung, or first computes
# 400,000 prompt tokens for others.
MAX_SILENCE = 10.0
# maximum pieces on the device that the scheduler has not stored yet; it stores two per step
MOST_PIECES = 4
TRANSIT_TOKENS = MOST_PIECES * MOST_TOKENS
MAX_TEXT = 200  # maximum characters of a sent id and of a logged reason


class PrefillPeer(ABC):
    """The decode side's view of a prefill side; jobs are sent in the loop's thread.

    A separate thread forwards each message when its arrays are on the device. If messages were
    forwarded earlier, rounds would wait for arrays that are not computed or copied yet. After an
    error in that thread, for example out of memory, the prefill side is disconnected.
    """

    weights: str  # fingerprint of the peer's weights

    def __init__(self, side: "tuple[EngineLoop, RemotePrompts]") -> None:
        self._loop, self._prompts = side
        self._messages: SimpleQueue[Arrival | None] = SimpleQueue()
        self._vacant: SimpleQueue[None] = SimpleQueue()  # one entry per free piece
        for _ in range(MOST_PIECES):
            self._vacant.put(None)
        self._is_closed = False
        self._thread = start_device_thread(self._run, "specjax-transfer", self.close)

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send without blocking; raise ``ConnectionError`` if the peer is disconnected."""

    def hang_up(self) -> None:
        """End the connection, which then calls :meth:`close`."""
        self.close()

    def put(self, message: Arrival) -> None:
        """Queue a message without blocking; messages are forwarded in order."""
        if not self._is_closed:
            self._messages.put(message)

    def close(self) -> None:
        """Stop forwarding and prefill pending requests locally; does not block."""
        self._is_closed = True
        self._messages.put(None)
        self._vacant.put(None)  # wakes the thread if it waits
        self._loop.post(partial(self._prompts.leave, self))

    def _run(self) -> None:
        while (message := self._messages.get()) is not None and not self._is_closed:
            try:
                self._forward(message)
            except Exception as error:
                self._is_closed = True
                logger.warning("disconnecting the prefill side after an error", exc_info=error)
                self.hang_up()
            del message  # free its memory while waiting for the next one
        while not self._messages.empty():  # only this thread takes messages
            self._messages.get()

    def _forward(self, message: Arrival) -> None:
        on_stored = None
        if isinstance(message, Piece):
            self._vacant.get()
            on_stored = partial(self._vacant.put, None)
        if self._is_closed:
            return
        placed = self._prompts.placed(message)
        jax.block_until_ready(structs.asdict(placed))
        self._loop.post(partial(self._prompts.take, placed, on_stored))


@dataclass
class _Awaited:
    row: RunningRequest
    progress_time: float  # time of sending, or of the last message for it or an earlier job


class RemotePrompts(PromptSource):
    """Lets a peer with equal weights prefill prompts.

    Preempted requests are prefilled locally. While no peer is connected, all requests are.
    ``weights`` is the fingerprint of this side's weights.
    """

    def __init__(self, runner: ModelRunner, clock: Callable[[], float] = time.perf_counter) -> None:
        self.transfer = KVTransfer(runner)
        self._target = runner.networks.target_config
        self._clock = clock
        self._peer: PrefillPeer | None = None
        self._arrived: deque[tuple[Arrival, Callable[[], None] | None]] = deque()
        self._ids = itertools.count()
        self._awaited: dict[int, _Awaited] = {}  # by job id, in the order of sending
        self._given_up: list[RunningRequest] = []  # since the last step
        self._local_only: WeakSet[Request] = WeakSet()  # never sent to a peer again
        self.weights = self.transfer.weights()

    @property
    def peer_connected(self) -> bool:
        return self._peer is not None

    def placed(self, message: Arrival) -> Arrival:
        """Put the KV of a message on the device; any thread may call this."""
        if not isinstance(message, Piece):
            return message
        return replace(message, kv=self.transfer.placed(message.kv))

    # called by the peer, in the loop's thread

    def join(self, peer: PrefillPeer) -> None:
        """Send jobs to this peer from now on."""
        if self._peer is not None:
            self.leave(self._peer)
        self._peer = peer

    def compare_weights(self, peer: PrefillPeer) -> None:
        """Log a warning if a peer cannot be used because its weights differ."""
        if peer.weights != self.weights:
            logger.warning(
                "prefilling locally until both sides have the same weights: fingerprint %r here, "
                "%.18r on the prefill side",
                self.weights,
                peer.weights,
            )

    def leave(self, peer: PrefillPeer) -> None:
        """Prefill the pending requests of this peer locally."""
        if peer is self._peer:
            self._peer = None
            for job in list(self._awaited):
                self._give_up(job)

    def weights_replaced(self) -> None:
        self.weights = self.transfer.weights()
        if self._peer is not None:
            self.compare_weights(self._peer)

    def take(self, message: Arrival, on_stored: Callable[[], None] | None = None) -> None:
        """Queue a message for a later step, which stores it and then calls ``on_stored``."""
        self._arrived.append((message, on_stored))
        if message.id in self._awaited:
            # the peer works in order, so this is progress for all later requests too
            for job, awaited in self._awaited.items():
                if job >= message.id:
                    awaited.progress_time = self._clock()

    # called by the scheduler
    @property
    def has_results(self) -> bool:
        return bool(self._arrived or self._given_up)

    @property
    def deadline(self) -> float | None:
        times = [awaited.progress_time for awaited in self._awaited.values()]
        return min(times) + MAX_SILENCE if times else None

    def request(self, row: RunningRequest) -> bool:
        request, peer = row.request, self._peer
        if peer is None or peer.weights != self.weights:
            return False
        if request.output_ids or request in self._local_only:
            return False
        timeout = request.arguments.timeout
        if timeout is not None:
            timeout = float(max(1e-3, timeout - request.latency))
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
            timeout=timeout,
            mask=request.mask,
        )
        try:
            peer.send(job)
        except (ConnectionError, ValueError) as error:  # disconnected, or not encodable
            logger.warning("request %r is prefilled locally: %s", request.rid, error)
            return False
        self._awaited[job.id] = _Awaited(row, self._clock())
        return True

    def receive(self, *, is_idle: bool) -> list[tuple[RunningRequest, FirstToken | None]]:
        """Store arrived messages; between rounds, store at most ``TOKENS_A_STEP`` tokens.

        Requests without progress for ``MAX_SILENCE`` seconds are then prefilled locally.
        """
        done: list[tuple[RunningRequest, FirstToken | None]] = []
        budget = UNLIMITED if is_idle else TOKENS_A_STEP
        while self._arrived and budget > 0:
            message, on_stored = self._arrived.popleft()
            if (awaited := self._awaited.get(message.id)) is not None:
                budget -= message.count if isinstance(message, Piece) else TOKENS_OF_A_START
                if (first_token := self._take(awaited.row, message)) is not None:
                    done.append((awaited.row, first_token))
            if on_stored is not None:
                on_stored()
        now = self._clock()
        for job, awaited in list(self._awaited.items()):
            if now >= awaited.progress_time + MAX_SILENCE:
                rid = awaited.row.request.rid
                reason = "the prefill side did not answer"
                logger.warning("request %r is prefilled locally: %s", rid, reason)
                self._give_up(job)
        rows, self._given_up = self._given_up, []
        return done + [(row, None) for row in rows]

    def release(self, row: RunningRequest) -> None:
        if row.is_remote:
            for job in [job for job, awaited in self._awaited.items() if awaited.row is row]:
                self._cancel(job)

    def _give_up(self, job: int) -> None:
        """Prefill a request locally, now and after preemptions, and cancel its job."""
        row = self._awaited[job].row
        self._given_up.append(row)
        self._local_only.add(row.request)
        self._cancel(job)

    def _cancel(self, job: int) -> None:
        del self._awaited[job]
        if self._peer is not None:
            try:
                self._peer.send(Cancel(id=job))
            except ConnectionError as error:
                logger.info("job %d could not be cancelled: %s", job, error)

    def _take(self, row: RunningRequest, message: Arrival) -> FirstToken | None:
        """Store a message; return the first token if the message completes the prompt."""
        try:
            if isinstance(message, Piece):
                self._take_piece(row, message)
                return None
            if isinstance(message, Prefilled):
                first_token = self._begin(row, message)
                del self._awaited[message.id]
                return first_token
            raise ValueError(message.reason[:MAX_TEXT])
        except ValueError as error:
            logger.warning("request %r is prefilled locally: %s", row.request.rid, error)
            self._give_up(message.id)
            return None

    def _take_piece(self, row: RunningRequest, piece: Piece) -> None:
        end = piece.start + piece.count
        if not row.num_cached <= piece.start <= row.kv_len or piece.count < 1:
            got = f"got KV of tokens {piece.start} to {end}"
            raise ValueError(f"{got}, but expected it to start at {row.kv_len}")
        if end > len(row.prefill_ids):
            raise ValueError(f"got KV up to token {end}; the prompt has {len(row.prefill_ids)}")
        self.transfer.check_kv(piece.kv, piece.count)
        self.transfer.put(row.pages, piece.start, piece.count, piece.kv)
        row.kv_len = end

    def _begin(self, row: RunningRequest, done: Prefilled) -> FirstToken:
        """Prepare the slot for its first round; raise ValueError if the message does not fit."""
        request, text = row.request, row.prefill_ids
        if done.weights != self.weights:
            raise ValueError(f"the prefill side used weights {done.weights}, not {self.weights}")
        if row.kv_len != len(text):
            raise ValueError(f"got KV of {row.kv_len} tokens; expected {len(text)}")
        if not 0 <= done.token < self._target.vocab_size:
            raise ValueError(f"token={done.token} must be in [0, {self._target.vocab_size})")
        if done.cached_tokens > len(text):
            raise ValueError(f"cached_tokens={done.cached_tokens} must be at most {len(text)}")
        self.transfer.check_rows(done.rows)
        logprobs, hidden = self._reports(request, done)
        if (start := request.logprob_start_len) is not None:
            count = len(text) - 1 - start
            of_prompt = _logprobs(done.prompt_logprobs, count, request.top_logprobs)
            request.take_prompt_logprobs(start, of_prompt)
        if request.max_new_tokens > 1:  # otherwise no round runs
            num_left = request.num_left - 1
            self.transfer.begin(row.slot, [*text, done.token], num_left, done.rows)
        return FirstToken(done.token, logprobs, hidden, done.cached_tokens)

    def _reports(self, request: Request, done: Prefilled) -> tuple[Logprobs | None, Any]:
        """Return requested log-probabilities and hidden states; ValueError for wrong shapes."""
        logprobs, hidden = None, None
        if request.top_logprobs is not None:
            logprobs = _logprobs(done.logprobs, 1, request.top_logprobs)
        if request.arguments.return_hidden_states:
            hidden, width = done.hidden, self._target.hidden_size
            if (kinds := _kinds((hidden,))) != (expected_kinds := [((1, width), "float32")]):
                raise ValueError(f"unexpected hidden states {kinds}; expected {expected_kinds}")
        return logprobs, hidden


class LocalPeer(PrefillPeer):
    """A prefill side in the same process; arrays are copied from device to device."""

    def __init__(
        self, prefill: tuple[EngineLoop, PrefillJobs], decode: tuple[EngineLoop, RemotePrompts]
    ) -> None:
        """Connect both sides; raise ValueError if they do not fit."""
        decode[1].transfer.expect(prefill[1].transfer.facts)
        self.weights = prefill[1].weights
        self._client = DecodeClient(*prefill, self._deliver)
        super().__init__(decode)
        try:
            self._loop.run(partial(self._prompts.join, self))
        except BaseException:
            self.close()
            raise

    def send(self, message: Message) -> None:
        self._client.take(message)

    def close(self) -> None:
        super().close()
        self._client.lost()

    def _deliver(self, message: Message) -> None:
        if isinstance(message, Weights):
            self.weights = message.weights
        elif isinstance(message, Arrival):
            self.put(message)


def _json(params: SamplingParams) -> dict[str, Any]:
    """Convert sampling parameters to JSON values, for ``SamplingParams.of``.

    Grammars and budgets are left out, because a mask says what they allow first.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, tuple):
            return [*map(plain, value)]
        # numpy numbers and other subclasses are not JSON values
        kinds = (bool, int, float, str)
        return next((kind(value) for kind in kinds if isinstance(value, kind)), value)

    values = asdict(params).items()
    omitted = (*GRAMMARS, "thinking_token_budget")
    return {name: plain(value) for name, value in values if name not in omitted}


def _logprobs(arrays: tuple[Any, ...] | None, count: int, top: int | None) -> Logprobs:
    """Check the shapes of ``count`` tokens' log-probabilities with ``top`` others; return them."""
    best = (count, top or 0) if count else (0, 0)
    expected_kinds = [((count,), "float32"), (best, "int32"), (best, "float32")]
    if arrays is None or _kinds(arrays) != expected_kinds:
        kinds = None if arrays is None else _kinds(arrays)
        raise ValueError(f"unexpected log-probabilities {kinds}; expected {expected_kinds}")
    return Logprobs(*arrays)


def _kinds(arrays: tuple[Any, ...]) -> list[Any]:
    """Return shape and dtype of each array."""
    return [array if array is None else (tuple(array.shape), str(array.dtype)) for array in arrays]
