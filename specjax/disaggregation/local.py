"""A prefill and a decode side in one process: arrays go from device to device."""

import logging
from functools import partial
from queue import SimpleQueue
from threading import Thread

import jax

from specjax.disaggregation.decode import DecodeScheduler
from specjax.disaggregation.messages import Arrival, Message
from specjax.disaggregation.prefill import Asker, PrefillScheduler
from specjax.scheduling.loop import EngineLoop

logger = logging.getLogger(__name__)


class LocalPeer:
    """The prefill side of the same process.

    A thread waits until arrays have come to the decode side's device. Rounds there would wait as
    well, behind what is not yet computed here, if they were taken any earlier.
    """

    def __init__(
        self,
        prefill: tuple[EngineLoop, PrefillScheduler],
        decode: tuple[EngineLoop, DecodeScheduler],
    ) -> None:
        """Join both sides; ValueError where they do not fit."""
        self._loop, self._scheduler = decode
        self._scheduler.expect(prefill[1].facts)
        self._messages: SimpleQueue[Message | None] = SimpleQueue()
        self._asker = Asker(*prefill, self._messages.put)
        self._thread = Thread(target=self._run, name="specjax-transfer", daemon=True)
        self._thread.start()
        self._loop.post(partial(self._scheduler.join, self))

    @property
    def weights(self) -> str:
        return self._asker.weights

    def send(self, message: Message) -> None:
        self._asker.take(message)

    def close(self) -> None:
        """Part the sides: what is asked for is computed by the decode side."""
        self._loop.post(partial(self._scheduler.leave, self))
        self._asker.lost()
        self._messages.put(None)

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._deliver(message)
            except Exception as error:  # no memory for it, or what computes it has failed
                logger.warning("prompts are computed here from now on", exc_info=error)
                self.close()
            del message  # it may be large, and the next one may be long in coming

    def _deliver(self, message: Message) -> None:
        if not isinstance(message, Arrival):  # weights are looked at where they are
            return
        placed = self._scheduler.placed(message)
        jax.block_until_ready(vars(placed))
        self._loop.post(partial(self._scheduler.take, placed))
