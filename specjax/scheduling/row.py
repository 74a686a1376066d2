"""A running request: its slot, its pages, and how far the device may have got with it."""

from dataclasses import dataclass, field

from specjax.kv.prefix_cache import Node
from specjax.scheduling.request import Request


@dataclass(eq=False)
class Row:
    """A request from its admission to its end or its retraction.

    ``kv_len`` counts tokens whose KV is final, in target and draft, once everything dispatched has
    run: a prefill chunk counts from its dispatch, a round from when its tokens are read. Dispatches
    write at ``kv_len`` or behind it, never before. Once the first token is read, ``kv_len`` is one
    less than the known tokens, since the newest token is in no pool yet.

    Attributes:
        request: whose row it is.
        slot: request slot of the runner.
        text: what is prefilled: the prompt, and the output of before a retraction.
        pages: in the order of the text.
        num_shared: of the first pages, which the prefix cache owns and which are only read.
        node: locked in the prefix cache for the shared pages.
        unread_rounds: dispatched rounds that the host has not read.
        awaits_first: the token that prefill sampled is not read.
        is_released: slot and pages are given back; what is still in flight is ignored.
    """

    request: Request
    slot: int
    text: list[int]
    pages: list[int] = field(default_factory=list)
    num_shared: int = 0
    node: Node | None = None
    kv_len: int = 0
    unread_rounds: int = 0
    awaits_first: bool = False
    is_released: bool = False

    @property
    def is_prefilled(self) -> bool:
        """Whether the last chunk of its text has been dispatched."""
        return self.kv_len >= len(self.text)

    def can_advance(self) -> bool:
        """Whether a further round may be of use.

        Each unread round brings one token at least, so with as many of them as tokens are left, the
        request is known to end with what is unread.
        """
        left = self.request.max_new_tokens - len(self.request.output_ids)
        return self.is_prefilled and left > self.unread_rounds + self.awaits_first

    def max_tokens(self, num_rounds: int, advance: int) -> int:
        """KV tokens, at most, after everything dispatched and ``num_rounds`` more.

        It covers what a round writes: the ``advance`` rows that it verifies begin where the text in
        the pool ends, and its drafts lie among them. Rows behind the request's own maximum are
        never accepted; they go to the padding page where no page is there for them.
        """
        prefilled = max(self.kv_len, len(self.text))
        bound = prefilled + (self.unread_rounds + num_rounds) * advance
        return min(bound, self.request.max_kv_tokens)
