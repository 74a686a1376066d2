"""A prefill and a decode side in different processes, over sockets."""

import logging
import time
from contextlib import suppress
from functools import partial

import numpy as np

from specjax.disaggregation.channel import Channel, Deliver, Lost, Terms
from specjax.disaggregation.decode import PrefillPeer, RemotePrompts
from specjax.disaggregation.dialer import Dialer
from specjax.disaggregation.listener import Listener
from specjax.disaggregation.messages import (
    Arrival,
    Cancel,
    Hello,
    Job,
    Message,
    Piece,
    Prefilled,
    Refused,
    Weights,
    WireError,
)
from specjax.disaggregation.prefill import DecodeClient, PrefillJobs
from specjax.disaggregation.rows import check_facts
from specjax.scheduling.loop import EngineLoop

logger = logging.getLogger(__name__)

# Bytes of KV of one decode side's jobs that are computed or wait to be sent; its other jobs wait.
MAX_QUEUED = 2**30
# Seconds that all wait for the network, once a single prompt has more than that. It has to take
# 67 MB meanwhile, or the decode side computes that prompt faster.
MAX_WAIT = 0.25
# bytes of prompts of one decode side that wait, each counted as 1 KiB at least
MAX_WAITING = 2**26
# of the arrays of a job: prompts of four million tokens
MAX_JOB = 2**24


class PrefillServer:
    """Takes decode sides that connect to a prefill side.

    Attributes:
        address: where it listens.
    """

    def __init__(self, address: str, secret: str, side: tuple[EngineLoop, PrefillJobs]) -> None:
        self._side = side
        hello = partial(_hello, side[1])
        terms = Terms(hello=hello, secret=secret, max_bytes=MAX_JOB, opened=self._opened)
        self._listener = Listener(address, terms)
        self.address = self._listener.address

    def close(self) -> None:
        """Hang up on everyone."""
        self._listener.close()

    def _opened(self, channel: Channel) -> tuple[Deliver, Lost]:
        check_facts(self._side[1].transfer.facts["both"], channel.hello.facts.get("both"))
        decode_side = _DecodeSide(channel, self._side)
        return decode_side.deliver, decode_side.lost


class _DecodeSide:
    """The jobs of one decode side, of which as many are computed at once as it takes.

    KV that was computed waits in pinned memory until it is sent. A decode side that is slow to take
    it delays its own jobs.
    """

    def __init__(self, channel: Channel, side: tuple[EngineLoop, PrefillJobs]) -> None:
        self._channel = channel
        self._prompts = side[1]
        self._waiting: dict[int, Job] = {}
        self._num_waiting_bytes = 0
        self._queued: dict[int, int] = {}  # bytes of KV of each job that is computed or sent
        self._given_up: set[int] = set()  # jobs of which nothing more is sent; the loop's thread
        self._num_given = self._num_sent = 0  # bytes of KV, counted in different threads
        self._client = DecodeClient(*side, self._reply)

    # In the listener's thread.

    def deliver(self, message: Message) -> None:
        if isinstance(message, Job):
            self._take(message)
        elif isinstance(message, Cancel) and message.id in self._waiting:
            self._num_waiting_bytes -= _size(self._waiting.pop(message.id))
            self._reply(Refused(id=message.id, reason="cancelled"))
        else:
            self._client.take(message)

    def lost(self, error: Exception) -> None:
        logger.info("a decode side has gone: %s", error)
        self._waiting.clear()
        self._client.lost()

    def _take(self, job: Job) -> None:
        if job.id in self._waiting or job.id in self._queued:
            raise WireError(f"job {job.id} came again while it was being done")
        if self._num_waiting_bytes + _size(job) > MAX_WAITING:
            self._reply(Refused(id=job.id, reason="too many prompts of this decode side wait"))
            return
        self._waiting[job.id] = job
        self._num_waiting_bytes += _size(job)
        self._begin()

    def _begin(self) -> None:
        """Hand on the next jobs, at least one."""
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

    def _reply(self, message: Message) -> None:
        sent = None
        if isinstance(message, Piece):
            self._wait(message.id)
            if message.id in self._given_up:
                return
            size = sum(array.nbytes for array in message.kv)
            self._num_given += size
            sent = partial(self._piece_sent, size)
        elif isinstance(message, Prefilled | Refused):
            sent = partial(self._ended, message.id)
            self._given_up.discard(message.id)
        try:
            message = self._prompts.hosted(message)
        except Exception as error:  # no pinned memory: it is copied to other memory, slowly
            logger.warning("the host has no pinned memory for what is sent: %s", error)
        with suppress(ConnectionError):
            self._channel.send(message, sent)

    def _wait(self, job: int) -> None:
        """Wait until there is capacity for a piece of a job; give the job up after ``MAX_WAIT``."""
        deadline = time.monotonic() + MAX_WAIT
        while self._channel.is_open and self._num_given - self._num_sent > MAX_QUEUED:
            if job in self._given_up:
                return
            if time.monotonic() > deadline:
                logger.warning("a decode side is too slow for the KV of a long prompt")
                self._given_up.add(job)
                self._client.take(Cancel(id=job))
            time.sleep(1e-3)


class RemotePeer:
    """The prefill side of another process, whenever it can be reached.

    Attributes:
        address: where it is.
    """

    def __init__(self, address: str, secret: str, side: tuple[EngineLoop, RemotePrompts]) -> None:
        self._side = side
        self.address = address
        self._is_closed = False
        hello, size = partial(_hello, side[1]), side[1].transfer.most_bytes
        terms = Terms(hello=hello, secret=secret, max_bytes=size, opened=self._opened)
        self._dialer = Dialer(address, terms)

    def close(self) -> None:
        self._is_closed = True
        self._dialer.close()

    def _opened(self, channel: Channel) -> tuple[Deliver, Lost]:
        facts = channel.hello.facts
        if not isinstance(facts.get("weights"), str):
            raise ValueError(f"the prefill side says of its weights {facts.get('weights')!r:.80}")
        self._side[1].transfer.expect(facts)
        link = _Link(channel, self._side)

        def lost(error: Exception) -> None:
            if not self._is_closed:
                logger.warning("prompts are computed here, the prefill side has gone: %s", error)
            link.close()

        return link.deliver, lost


class _Link(PrefillPeer):
    """A prefill side for as long as one channel to it is open."""

    weights = ""

    def __init__(self, channel: Channel, side: tuple[EngineLoop, RemotePrompts]) -> None:
        self._channel = channel
        self.weights = channel.hello.facts["weights"]
        super().__init__(side)
        self._loop.post(partial(self._prompts.join, self))

    def send(self, message: Message) -> None:
        self._channel.send(message)

    def hang_up(self) -> None:
        self._channel.close()

    def deliver(self, message: Message) -> None:
        if isinstance(message, Weights):
            self.weights = message.weights
            self._loop.post(partial(self._prompts.compare_weights, self))
        elif isinstance(message, Arrival):
            self.put(message)
        else:
            raise WireError(f"a prefill side sent a {type(message).__name__}")


def _hello(prompts: PrefillJobs | RemotePrompts) -> Hello:
    return Hello(facts=prompts.transfer.facts | {"weights": prompts.weights})


def _size(job: Job) -> int:
    return max(job.input_ids.nbytes, 1024)
