"""Pages that a running request holds, and KV indices that dispatches may write."""

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

from specjax.config import TOKEN_LIMIT
from specjax.kv.prefix_cache import Node
from specjax.types import DraftShape


def salt_of(text: str | None) -> int:
    """The number that stands for a salt, which is added to a first token; 0 without one."""
    return 0 if text is None else TOKEN_LIMIT * int.from_bytes(sha256(text.encode()).digest()[:8])


class KVWrites(NamedTuple):
    """Maximum number of KV indices that dispatches write after a text, over all tiers."""

    rounds: int  # rounds per dispatch
    accept_width: int  # A, maximum number of tokens that a round adds
    rows: int  # number of KV indices that a round writes
    tail: int  # number of KV indices that a round needs after the last token of a request

    @classmethod
    def of(
        cls, shapes: Sequence[DraftShape], rounds: int, *, drafts_ahead: bool = False
    ) -> "KVWrites":
        """The maximum over ``shapes``; with ``drafts_ahead``, rounds may also draft the next."""
        width = max(shape.accept_width for shape in shapes)
        rows, drafted = (max(getattr(s, x) for s in shapes) for x in ("rows", "draft_rows"))
        if drafts_ahead and drafted:  # after the tokens that the round adds
            rows = max(rows, width + drafted + 1)
        return cls(rounds, width, rows, max(shape.tail for shape in shapes))

    def after(self, num_rounds: int) -> int:
        """Number of KV indices after a text that ``num_rounds`` unread rounds may write."""
        return (num_rounds - 1) * self.accept_width + self.rows if num_rounds else 0


@dataclass(eq=False)
class PageHolding:
    """The pages of one running request, and the lengths that are needed to plan them.

    ``kv_len`` counts tokens whose KV in the target is final after all dispatches so far. Tokens of
    a prefill chunk count once the chunk is dispatched, and tokens of a round once they are read.
    Dispatches write at ``kv_len`` and later. If the draft's KV at a position depends on the next n
    tokens, n > 1, they also write the n - 1 positions before ``kv_len``, but not cached ones.
    """

    slot: int  # request slot
    prefill_ids: list[int]  # the prompt, and any output from before a preemption
    max_kv_tokens: int  # maximum number of the request's tokens in the pool
    num_cacheable: int  # number of leading tokens whose KV may come from the prefix cache
    salt: int = 0  # pages are shared among holdings with equal salts
    pages: list[int] = field(default_factory=list)  # in the order of the text
    num_shared: int = 0  # number of leading pages owned by the prefix cache, which are only read
    node: Node | None = None  # node of the last shared page in the prefix cache; it is locked
    num_cached: int = 0  # number of leading tokens whose KV came from the prefix cache
    num_matched: int = 0  # number of leading tokens that were cached, maybe without their windows
    kv_len: int = 0
    unread_rounds: int = 0  # rounds dispatched but not read by the host
    state_source: int = 0  # slot of the snapshot after ``num_cached`` tokens; 0: none
    # by number of tokens, slots that get the states after them from chunks not dispatched yet
    kept_states: dict[int, int] = field(default_factory=dict)

    def cache_keys(self, ids: list[int]) -> list[int]:
        """The keys of a text of the request in the prefix cache: its tokens, the first salted."""
        return [self.salt + ids[0], *ids[1:]] if self.salt else ids

    def max_kv_len(self, writes: KVWrites, dispatches: int = 1) -> int:
        """Maximum number of KV indices in use after all dispatches so far and ``dispatches`` more.

        A round writes drafts and verified rows after the text in the pool. Tokens beyond the
        request's maximum and the tail are never accepted, so their KV may go to page 0.
        """
        begin = max(self.kv_len, len(self.prefill_ids))
        rounds = self.unread_rounds + dispatches * writes.rounds
        return min(begin + writes.after(rounds), self.max_kv_tokens + writes.tail)


def move_entries(
    page_map: MutableMapping[int, int], sources: Iterable[int], targets: Iterable[int]
) -> None:
    """Give the entries of ``sources`` to ``targets``, pages of equal text that have none."""
    for before, after in zip(sources, targets, strict=False):
        if before in page_map and after not in page_map:
            page_map[after] = page_map.pop(before)
