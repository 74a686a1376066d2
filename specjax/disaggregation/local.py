"""A prefill and a decode side in one process: arrays go from device to device."""

import logging
from functools import partial

from specjax.disaggregation.decode import Placing, RemotePrompts
from specjax.disaggregation.messages import Arrival, Message
from specjax.disaggregation.prefill import Asker, PrefillJobs
from specjax.scheduling.loop import EngineLoop

logger = logging.getLogger(__name__)


class LocalPeer:
    """The prefill side of the same process."""

    def __init__(
        self,
        prefill: tuple[EngineLoop, PrefillJobs],
        decode: tuple[EngineLoop, RemotePrompts],
    ) -> None:
        """Join both sides; ValueError where they do not fit."""
        self._loop, self._prompts = decode
        self._prompts.expect(prefill[1].facts)
        self._placing = Placing(decode, self._failed)
        self._asker = Asker(*prefill, self._deliver)
        self._loop.run(partial(self._prompts.join, self))

    @property
    def weights(self) -> str:
        return self._asker.weights

    def send(self, message: Message) -> None:
        self._asker.take(message)

    def close(self) -> None:
        """Part the sides: what is asked for is computed by the decode side."""
        self._loop.post(partial(self._prompts.leave, self))
        self._asker.lost()
        self._placing.close()

    def _deliver(self, message: Message) -> None:
        if isinstance(message, Arrival):  # weights are looked at where they are
            self._placing.put(message)

    def _failed(self, error: Exception) -> None:
        logger.warning("prompts are computed here from now on", exc_info=error)
        self.close()
