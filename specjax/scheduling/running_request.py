"""A running request: its slot, its pages, and how far the device may have got with it."""

from dataclasses import dataclass

from specjax.kv.budget import PageHolding
from specjax.scheduling.request import Request


@dataclass(eq=False, kw_only=True)
class RunningRequest(PageHolding):
    """A request from its admission to its end or its retraction.

    Once the first token is read, ``kv_len`` is one less than the known tokens, since the newest
    token is in no pool yet.
    """

    request: Request
    awaits_first: bool = False  # the token that prefill sampled is not read
    is_released: bool = False  # slot and pages are given back; what is in flight is ignored

    @property
    def is_prefilled(self) -> bool:
        """Whether the last chunk of its text has been dispatched."""
        return self.kv_len >= len(self.prefill_ids)

    def can_advance(self) -> bool:
        """Whether a further round may be of use.

        Each unread round brings one token at least, so with as many of them as tokens are left, the
        request is known to end with what is unread.
        """
        unread = self.unread_rounds + self.awaits_first
        return self.is_prefilled and self.request.num_left > unread
