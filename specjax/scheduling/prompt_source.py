"""Prompt sources, which get the KV of prompts from elsewhere, or watch prompts computed here."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax.scheduling.request import RunningRequest
from specjax.types import Logprobs


class FirstToken(NamedTuple):
    """The result of a prompt that was computed elsewhere; its KV and state are in the slot."""

    token: int
    logprobs: Logprobs | None = None  # [1], for the token
    hidden_states: np.ndarray | None = None  # f32 [1, D], from which the token was sampled
    cached_tokens: int = 0  # number of prompt tokens found in the other engine's prefix cache


class PromptSource:
    """The default source: the scheduler computes all prompts itself.

    A subclass has prompts computed elsewhere (:meth:`request`, :meth:`receive`), or watches prompts
    that are computed here (:meth:`dispatched`). Only the thread that steps the scheduler calls the
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
        """Time on the scheduler's clock, in s, at which :meth:`receive` gives up a prompt."""
        return None

    def request(self, row: RunningRequest) -> bool:
        """Request the prompt of a newly admitted row; ``False`` if it must be computed here.

        The row has its slot and pages. The KV of its first ``row.kv_len`` tokens is already cached.
        """
        return False

    def receive(self, *, is_idle: bool) -> Sequence[tuple[RunningRequest, FirstToken | None]]:
        """Store received KV; called at the beginning of each step.

        ``is_idle`` says that no row decodes or prefills here, so that waiting delays nothing.

        Returns requested rows that are done, with their first token. A row with ``None`` is given
        up: the scheduler discards its KV, and prefills it here unless it was aborted.
        """
        return ()

    def dispatched(self, rows: Sequence[RunningRequest]) -> None:
        """Called after prompt chunks of ``rows`` were dispatched here."""

    def release(self, row: RunningRequest) -> None:
        """Called before a row loses its slot and pages, even if its prompt is not done."""

    def weights_replaced(self) -> None:
        """Called after the runner's weights were replaced and all old KV was dropped."""
