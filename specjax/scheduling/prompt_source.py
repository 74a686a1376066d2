"""Prompt sources: where the scheduler gets the KV of prompts from, and where it goes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax.scheduling.request import RunningRequest
from specjax.types import Logprobs


class FirstToken(NamedTuple):
    """Result of a prompt that was computed elsewhere, once its KV and state are in the slot."""

    token: int
    logprobs: Logprobs | None = None  # of the token, [1]
    hidden_states: np.ndarray | None = None  # f32 [1, D], of the last prompt token
    cached_tokens: int = 0  # of the prompt, from the other engine's prefix cache


class PromptSource:
    """Local prompts: the scheduler computes each of them itself.

    Subclasses have prompts computed elsewhere (:meth:`request`, :meth:`receive`) or watch those
    that are computed here (:meth:`dispatched`). The thread that steps the scheduler calls
    everything, :attr:`peer_connected` excepted.
    """

    @property
    def peer_connected(self) -> bool | None:
        """Whether another engine is connected; ``None`` if none is ever asked. For any thread."""
        return None

    @property
    def has_results(self) -> bool:
        """Whether :meth:`receive` has something to do before the deadline."""
        return False

    @property
    def deadline(self) -> float | None:
        """When :meth:`receive` gives up a prompt, in seconds of the scheduler's clock."""
        return None

    def request(self, row: RunningRequest) -> bool:
        """Have the prompt of a newly admitted row computed elsewhere; ``False`` to compute it here.

        The row has its slot and pages. KV of the first ``row.kv_len`` tokens is cached already.
        """
        return False

    def receive(self, *, is_idle: bool) -> Sequence[tuple[RunningRequest, FirstToken | None]]:
        """Store what has arrived; called at the beginning of each step.

        Args:
            is_idle: whether no row decodes or is computed here, so that nothing is held up.

        Returns:
            Requested rows that are done, with their first token. ``None`` gives a row up: the
            scheduler discards its KV and computes it here, unless it was aborted before.
        """
        return ()

    def dispatched(self, rows: Sequence[RunningRequest]) -> None:
        """Called after chunks of the prompts of ``rows`` were dispatched here."""

    def release(self, row: RunningRequest) -> None:
        """Called before a row loses its slot and pages, whether or not its prompt is done."""

    def weights_replaced(self) -> None:
        """Called when the runner has other weights, and no KV of the old ones is left."""
