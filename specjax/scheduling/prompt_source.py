"""Prompt sources: provide the KV of prompts to the scheduler, or pass it on."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax.scheduling.request import RunningRequest
from specjax.types import Logprobs


class FirstToken(NamedTuple):
    """Result of a prompt computed elsewhere, after its KV and state are in the slot."""

    token: int
    logprobs: Logprobs | None = None  # of the token, [1]
    hidden_states: np.ndarray | None = None  # f32 [1, D], of the last prompt token
    cached_tokens: int = 0  # of the prompt, from the other engine's prefix cache


class PromptSource:
    """Local prompts: the scheduler computes all of them.

    Subclasses have prompts computed elsewhere (:meth:`request`, :meth:`receive`) or watch those
    that are computed here (:meth:`dispatched`). The thread that steps the scheduler calls all
    methods; any thread may read :attr:`peer_connected`.
    """

    @property
    def peer_connected(self) -> bool | None:
        """Whether another engine is connected; ``None`` if this source never uses one."""
        return None

    @property
    def has_results(self) -> bool:
        """Whether :meth:`receive` has work before the deadline."""
        return False

    @property
    def deadline(self) -> float | None:
        """Time at which :meth:`receive` gives up a prompt, in seconds of the scheduler's clock."""
        return None

    def request(self, row: RunningRequest) -> bool:
        """Have the prompt of a newly admitted row computed elsewhere; ``False`` to compute it here.

        The row has its slot and pages. KV of its first ``row.kv_len`` tokens is already cached.
        """
        return False

    def receive(self, *, is_idle: bool) -> Sequence[tuple[RunningRequest, FirstToken | None]]:
        """Store received KV; called at the beginning of each step.

        Args:
            is_idle: no row decodes or prefills here, so that waiting delays nothing.

        Returns:
            Requested rows that are done, with their first token. ``None`` gives a row up: the
            scheduler discards its KV and prefills it here unless it was aborted.
        """
        return ()

    def dispatched(self, rows: Sequence[RunningRequest]) -> None:
        """Called after the dispatch of prompt chunks of ``rows`` here."""

    def release(self, row: RunningRequest) -> None:
        """Called before a row loses its slot and pages, whether or not its prompt is done."""

    def weights_replaced(self) -> None:
        """Called after the runner's weights were replaced and all old KV was dropped."""
