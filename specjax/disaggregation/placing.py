"""Copying what arrives to the decode side's device, beside its rounds."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

import jax

from specjax.disaggregation.decode import RemotePrompts
from specjax.disaggregation.messages import Arrival, Piece
from specjax.disaggregation.rows import MOST_TOKENS
from specjax.scheduling.loop import EngineLoop, start_device_thread

# pieces on the device that the scheduler has not taken, at most: those of two of its steps
MOST_PIECES = 4
TRANSIT_TOKENS = MOST_PIECES * MOST_TOKENS


class Placing:
    """A thread that hands on each message once its arrays are on the device.

    Rounds there would wait as well, behind what is not yet computed or copied, if it were taken any
    earlier. What goes wrong, such as no memory, ends it; ``failed`` is told in that thread.
    """

    def __init__(
        self, side: tuple[EngineLoop, RemotePrompts], failed: Callable[[Exception], None]
    ) -> None:
        self._loop, self._prompts = side
        self._failed = failed
        self._messages: SimpleQueue[Arrival | None] = SimpleQueue()
        self._vacant: SimpleQueue[None] = SimpleQueue()  # an entry for each further piece
        for _ in range(MOST_PIECES):
            self._vacant.put(None)
        self._is_closed = False
        self._thread = start_device_thread(self._run, "specjax-transfer", self.close)

    def put(self, message: Arrival) -> None:
        """Messages are handed on in this order; does not block."""
        if not self._is_closed:
            self._messages.put(message)

    def close(self) -> None:
        """Hand on nothing more; does not wait."""
        self._is_closed = True
        self._messages.put(None)
        self._vacant.put(None)  # the thread may wait for it

    def _run(self) -> None:
        while (message := self._messages.get()) is not None and not self._is_closed:
            try:
                self._place(message)
            except Exception as error:
                self._is_closed = True
                self._failed(error)
            del message  # it may be large, and the next one may be long in coming
        with suppress(Empty):
            while True:
                self._messages.get_nowait()

    def _place(self, message: Arrival) -> None:
        taken = None
        if isinstance(message, Piece):
            self._vacant.get()
            taken = partial(self._vacant.put, None)
        if self._is_closed:
            return
        placed = self._prompts.placed(message)
        jax.block_until_ready(vars(placed))
        self._loop.post(partial(self._prompts.take, placed, taken))
