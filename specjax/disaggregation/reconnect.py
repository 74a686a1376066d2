"""Reconnecting: a channel that is opened again whenever it is lost."""

import logging
import random
import threading
import time
from collections.abc import Callable

from specjax.disaggregation.address import check_secret
from specjax.disaggregation.channel import PULSE, Accept, Channel, Deliver, Lost, Pulse
from specjax.disaggregation.connecting import SayHello, dial
from specjax.disaggregation.messages import Hello
from specjax.disaggregation.sockets import Sockets
from specjax.scheduling.loop import start_device_thread

logger = logging.getLogger(__name__)


class Reconnecting:
    """Connects to one listener for as long as it is not closed, in a daemon thread of its own.

    What it calls comes in this order, never two at once: ``opened``, then ``deliver`` for each
    message and ``lost`` once, then the next channel's ``opened``.

    Between two attempts it waits, twice as long each time, less a random part by which many
    processes spread out. It starts anew after a channel that has lasted longer than any wait. A
    peer whose hello is refused is asked at the slowest pace: only a new process can help.
    """

    def __init__(
        self,
        address: str,
        *,
        hello: SayHello,
        secret: str,
        max_bytes: int,
        check_hello: Callable[[Hello], None],
        opened: Accept,
        timeout: float = 5.0,
        pulse: Pulse = PULSE,
        first_wait: float = 0.1,
        max_wait: float = 5.0,
    ) -> None:
        """Starts to connect at once.

        Args:
            hello: called for each attempt.
            check_hello: raises ValueError where the peer is no match for this side.
            opened: called with each new channel before it receives anything; returns ``deliver``
                and ``lost`` of that channel.
            timeout: seconds of an attempt.
            first_wait: seconds after the first failure.
            max_wait: seconds that no wait exceeds.

        Raises:
            ValueError: the address is none, or lacks a secret.
        """
        check_secret(address, secret)
        self._address = address
        self._hello = hello
        self._secret = secret
        self._max_bytes = max_bytes
        self._check_hello = check_hello
        self._opened = opened
        self._timeout = timeout
        self._pulse = pulse
        self._first_wait = first_wait
        self._max_wait = max_wait
        self._sockets = Sockets()
        self._closing = threading.Event()
        self._ended = threading.Event()  # the channel that was opened last
        self._channel: Channel | None = None
        self._logged: set[str] = set()  # since a channel was opened
        self._thread = start_device_thread(self._run, "specjax-reconnect", self.close)

    def close(self) -> None:
        """Close the channel and open no more; returns at once, and ``lost`` follows."""
        self._sockets.close()
        self._closing.set()
        if (channel := self._channel) is not None:
            channel.close()

    def _run(self) -> None:
        wait = self._first_wait
        while not self._closing.is_set():
            started = time.monotonic()
            try:
                self._dial()
            except Exception as error:
                self._log(error)
                if not isinstance(error, OSError):
                    wait = self._max_wait
            else:
                self._ended.wait()
                if time.monotonic() - started > self._max_wait:
                    wait = self._first_wait
            self._closing.wait(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, self._max_wait)

    def _dial(self) -> None:
        self._ended.clear()
        dial(
            self._address,
            hello=self._hello,
            secret=self._secret,
            max_bytes=self._max_bytes,
            accept=self._accept,
            timeout=self._timeout,
            pulse=self._pulse,
            sockets=self._sockets,
        )

    def _accept(self, channel: Channel) -> tuple[Deliver, Lost]:
        self._check_hello(channel.hello)
        self._sockets.check_open()
        deliver, lost = self._opened(channel)
        self._logged.clear()
        self._channel = channel
        if self._closing.is_set():  # it did not see this channel
            channel.close()

        def end(error: Exception) -> None:
            try:
                lost(error)
            finally:
                self._channel = None
                self._ended.set()

        return deliver, end

    def _log(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        if reason in self._logged or self._closing.is_set():
            return
        self._logged.add(reason)
        is_expected = isinstance(error, OSError | ValueError)
        logger.warning(
            "no channel to %s, trying again: %s",
            self._address,
            reason,
            exc_info=None if is_expected else error,
        )
