"""A prefill and a decode side in different processes, over sockets."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Lock

from specjax.disaggregation.channel import Channel
from specjax.disaggregation.decode import Placing, RemotePrompts
from specjax.disaggregation.listener import Listener
from specjax.disaggregation.messages import Arrival, Hello, Message, Weights
from specjax.disaggregation.prefill import Asker, PrefillJobs
from specjax.disaggregation.reconnect import Reconnecting
from specjax.disaggregation.rows import check_facts
from specjax.disaggregation.values import WireError
from specjax.scheduling.loop import EngineLoop

logger = logging.getLogger(__name__)

Deliver = Callable[[Message], None]
Lost = Callable[[Exception], None]

# bytes that wait for the network, beyond which the prefill side computes nothing more
MOST_QUEUED = 2**30
# seconds in which the network takes none of them, after which a decode side is given up: the
# prefill side waits for it, and all others with it
MAX_STALL = 10.0
# of the arrays of a job: prompts of four million tokens
MOST_JOB = 2**24


class PrefillServer:
    """Takes decode sides that connect to a prefill side.

    Attributes:
        address: where it listens.
    """

    def __init__(self, address: str, secret: str, side: tuple[EngineLoop, PrefillJobs]) -> None:
        self._side = side
        self._channels: set[Channel] = set()
        self._lock = Lock()
        self._listener = Listener(
            address, hello=self._hello, secret=secret, max_bytes=MOST_JOB, accept=self._accept
        )
        self.address = self._listener.address

    def close(self) -> None:
        """Hang up on everyone."""
        self._listener.close()
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.close()

    def _hello(self) -> Hello:
        return _hello(self._side[1])

    def _accept(self, channel: Channel) -> tuple[Deliver, Lost]:
        check_facts(self._side[1].facts["both"], channel.hello.facts.get("both"))
        asker = Asker(*self._side, partial(_send, channel, self._side[1]))
        with self._lock:
            self._channels.add(channel)

        def lost(error: Exception) -> None:
            logger.info("a decode side has gone: %s", error)
            with self._lock:
                self._channels.discard(channel)
            asker.lost()

        return asker.take, lost


class RemotePeer:
    """The prefill side of another process, whenever it can be reached.

    Attributes:
        address: where it is.
    """

    def __init__(self, address: str, secret: str, side: tuple[EngineLoop, RemotePrompts]) -> None:
        self._side = side
        self.address = address
        self._is_closed = False
        self._connecting = Reconnecting(
            address,
            hello=lambda: _hello(side[1]),
            secret=secret,
            max_bytes=side[1].most_bytes,
            check_hello=self._check,
            opened=self._opened,
        )

    def close(self) -> None:
        self._is_closed = True
        self._connecting.close()

    def _check(self, hello: Hello) -> None:
        facts = hello.facts
        if not isinstance(facts.get("weights"), str):
            raise ValueError(f"the prefill side says of its weights {facts.get('weights')!r}")
        self._side[1].expect(facts)

    def _opened(self, channel: Channel) -> tuple[Deliver, Lost]:
        link = _Link(channel, self._side)

        def lost(error: Exception) -> None:
            if not self._is_closed:
                logger.warning("prompts are computed here, the prefill side has gone: %s", error)
            link.lost()

        return link.deliver, lost


class _Link:
    """A prefill side for as long as one channel to it is open."""

    def __init__(self, channel: Channel, side: tuple[EngineLoop, RemotePrompts]) -> None:
        self._channel = channel
        self._loop, self._prompts = side
        self._placing = Placing(side, self._failed)
        self.weights: str = channel.hello.facts["weights"]
        self._loop.post(partial(self._prompts.join, self))

    def send(self, message: Message) -> None:
        self._channel.send(message)

    def deliver(self, message: Message) -> None:
        if isinstance(message, Weights):
            self.weights = message.weights
            self._loop.post(partial(self._prompts.compare_weights, self))
        elif isinstance(message, Arrival):
            self._placing.put(message)
        else:
            raise WireError(f"a prefill side sent a {type(message).__name__}")

    def lost(self) -> None:
        self._placing.close()
        self._loop.post(partial(self._prompts.leave, self))

    def _failed(self, error: Exception) -> None:
        logger.warning("hanging up on the prefill side", exc_info=error)
        self._channel.close()


def _hello(prompts: PrefillJobs | RemotePrompts) -> Hello:
    return Hello(facts=prompts.facts | {"weights": prompts.weights})


def _send(channel: Channel, jobs: PrefillJobs, message: Message) -> None:
    """Queue a message, once there is room for it, unless the channel has ended."""
    try:
        message = jobs.hosted(message)
    except Exception as error:  # no pinned memory: it is copied to other memory, slowly
        logger.warning("the host has no pinned memory for what is sent: %s", error)
    queued, since = channel.num_queued_bytes, time.monotonic()
    while channel.is_open and queued > MOST_QUEUED:
        time.sleep(1e-3)
        if (now := channel.num_queued_bytes) != queued:
            queued, since = now, time.monotonic()
        elif time.monotonic() - since > MAX_STALL:
            logger.warning("a decode side has taken nothing for %.0f s: hanging up", MAX_STALL)
            channel.close()
    with suppress(ConnectionError):
        channel.send(message)
