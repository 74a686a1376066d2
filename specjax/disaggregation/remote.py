"""Prefill and decode sides in different processes, connected by sockets."""

import logging
import time
from contextlib import suppress
from functools import partial

import numpy as np

from specjax.disaggregation import messages as wire
from specjax.disaggregation.channel import Channel, Deliver, Lost, Terms
from specjax.disaggregation.decode import PrefillPeer, RemotePrompts
from specjax.disaggregation.dialer import Dialer
from specjax.disaggregation.listener import Listener
from specjax.disaggregation.prefill import DecodeClient, PrefillJobs
from specjax.disaggregation.rows import check_facts
from specjax.scheduling.loop import EngineLoop

logger = logging.getLogger(__name__)

# Maximum bytes of KV that the running jobs of a decode side compute or queue; other jobs wait.
MAX_QUEUED = 2**30
# Maximum seconds that all jobs wait for the network if a single prompt exceeds MAX_QUEUED. If the
# decode side takes less than 67 MB in this time, it can compute that prompt faster.
MAX_WAIT = 0.25
# maximum bytes of waiting prompts per decode side, each counted as at least 1 KiB
MAX_WAITING = 2**26
# maximum bytes of the arrays of a job: prompts of four million tokens
MAX_JOB = 2**24


class PrefillServer(Listener):
    """Accepts the connections of decode sides to a prefill side, on ``address``."""

    def __init__(self, address: str, secret: str, side: tuple[EngineLoop, PrefillJobs]) -> None:
        self._side = side
        hello = partial(_hello, side[1])
        terms = Terms(hello=hello, secret=secret, max_bytes=MAX_JOB, opened=self._opened)
        super().__init__(address, terms)

    def _opened(self, channel: Channel) -> tuple[Deliver, Lost]:
        check_facts(self._side[1].transfer.facts["both"], channel.hello.facts.get("both"))
        decode_side = _DecodeSide(channel, self._side)
        return decode_side.deliver, decode_side.lost


class _DecodeSide:
    """Queue of jobs from one decode side; jobs wait while it has too much KV to read.

    Computed KV waits in pinned memory. A decode side that reads slowly delays only its own jobs.
    """

    def __init__(self, channel: Channel, side: tuple[EngineLoop, PrefillJobs]) -> None:
        self._channel = channel
        self._prompts = side[1]
        self._waiting: dict[int, wire.Job] = {}
        self._num_waiting_bytes = 0
        self._queued: dict[int, int] = {}  # bytes of KV of each running or unsent job
        self._given_up: set[int] = set()  # jobs that send nothing more; used in the loop's thread
        self._num_queued = self._num_sent = 0  # bytes of KV, counted in different threads
        self._client = DecodeClient(*side, self._reply)

    # In the listener's thread.

    def deliver(self, message: wire.Message) -> None:
        if isinstance(message, wire.Job):
            self._take(message)
        elif isinstance(message, wire.Cancel) and message.id in self._waiting:
            self._num_waiting_bytes -= _size(self._waiting.pop(message.id))
            self._reply(wire.Refused(id=message.id, reason="cancelled"))
        else:
            self._client.take(message)

    def lost(self, error: Exception) -> None:
        logger.info("a decode side disconnected: %s", error)
        self._waiting.clear()
        self._client.lost()

    def _take(self, job: wire.Job) -> None:
        if job.id in self._waiting or job.id in self._queued:
            raise wire.WireError(f"job {job.id} was sent again while in progress")
        if self._num_waiting_bytes + _size(job) > MAX_WAITING:
            reason = "too many prompts queued by this decode side"
            self._reply(wire.Refused(id=job.id, reason=reason))
            return
        self._waiting[job.id] = job
        self._num_waiting_bytes += _size(job)
        self._begin()

    def _begin(self) -> None:
        """Start the next jobs, and at least one job if none is running."""
        while self._waiting:
            job = next(iter(self._waiting.values()))
            size = self._prompts.transfer.sent_bytes(np.size(job.input_ids) - job.start)
            if self._queued and sum(self._queued.values()) + size > MAX_QUEUED:
                return
            del self._waiting[job.id]
            self._num_waiting_bytes -= _size(job)
            self._queued[job.id] = size
            self._client.take(job)

    def _ended(self, job: int) -> None:
        if self._queued.pop(job, None) is not None:
            self._begin()

    def _piece_sent(self, size: int) -> None:
        self._num_sent += size

    # In the loop's thread, except for refusals.

    def _reply(self, message: wire.Message) -> None:
        sent = None
        if isinstance(message, wire.Piece):
            self._wait(message.id)
            if message.id in self._given_up:
                return
            size = sum(array.nbytes for array in message.kv)
            self._num_queued += size
            sent = partial(self._piece_sent, size)
        elif isinstance(message, wire.Prefilled | wire.Refused):
            sent = partial(self._ended, message.id)
            self._given_up.discard(message.id)
        try:
            message = self._prompts.hosted(message)
        except Exception as error:  # no pinned memory: the copy uses slower memory
            logger.warning("no pinned host memory for sent KV; sending is slower: %s", error)
        with suppress(ConnectionError):
            self._channel.send(message, sent)

    def _wait(self, job: int) -> None:
        """Wait for capacity to send a piece of a job; give the job up after ``MAX_WAIT``."""
        deadline = time.monotonic() + MAX_WAIT
        while self._channel.is_open and self._num_queued - self._num_sent > MAX_QUEUED:
            if job in self._given_up:
                return
            if time.monotonic() > deadline:
                logger.warning("a decode side reads KV too slowly and must prefill a prompt itself")
                self._given_up.add(job)
                self._client.take(wire.Cancel(id=job))
            time.sleep(1e-3)


class RemotePeer(Dialer):
    """The prefill side at ``address``, in another process; reconnects automatically."""

    def __init__(self, address: str, secret: str, side: tuple[EngineLoop, RemotePrompts]) -> None:
        self._side = side
        hello, size = partial(_hello, side[1]), side[1].transfer.most_bytes
        terms = Terms(hello=hello, secret=secret, max_bytes=size, opened=self._opened)
        super().__init__(address, terms)

    def _opened(self, channel: Channel) -> tuple[Deliver, Lost]:
        facts = channel.hello.facts
        if not isinstance(facts.get("weights"), str):
            raise ValueError(f"weights={facts.get('weights')!r:.80} must be a fingerprint")
        self._side[1].transfer.expect(facts)
        link = _Link(channel, self._side)

        def lost(error: Exception) -> None:
            if not self._closing.is_set():
                logger.warning("prefilling locally: the prefill side disconnected (%s)", error)
            link.close()

        return link.deliver, lost


class _Link(PrefillPeer):
    """A prefill side, for as long as one channel to it is open."""

    def __init__(self, channel: Channel, side: tuple[EngineLoop, RemotePrompts]) -> None:
        self._channel = channel
        self.weights = channel.hello.facts["weights"]
        super().__init__(side)
        self._loop.post(partial(self._prompts.join, self))

    def send(self, message: wire.Message) -> None:
        self._channel.send(message)

    def hang_up(self) -> None:
        self._channel.close()

    def deliver(self, message: wire.Message) -> None:
        if isinstance(message, wire.Weights):
            self.weights = message.weights
            self._loop.post(partial(self._prompts.compare_weights, self))
        elif isinstance(message, wire.Arrival):
            self.put(message)
        else:
            raise wire.WireError(f"unexpected {type(message).__name__} message from a prefill side")


def _hello(prompts: PrefillJobs | RemotePrompts) -> wire.Hello:
    return wire.Hello(facts=prompts.transfer.facts | {"weights": prompts.weights})


def _size(job: wire.Job) -> int:
    return max(job.input_ids.nbytes, 1024)
