"""The page budget: how many pages each running request gets and gives back.

Between any two calls, every page except the padding page is free, owned by the prefix cache, or
owned by exactly one holding (its ``pages`` after the first ``num_shared``).

Before a dispatch, each holding has pages for the maximum KV write of its unread rounds and of this
dispatch. Any change uploads the page tables, so all holdings grow together, and if there are enough
pages, for up to ``GROW_DISPATCHES`` dispatches. They keep pages until others need them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specjax.kv.pages import PageAllocator
from specjax.kv.prefix_cache import Node, PrefixCache
from specjax.types import DraftShape

GROW_DISPATCHES = 16

# An admission reserves this fraction of the pages that running requests may still need. Requests
# often end before their limit, so a full reserve would waste pages, but a reserve that is too small
# causes preemptions. Each preemption raises the fraction, and each round lowers it.
RESERVE_START = 0.3
MIN_RESERVE = 0.1
RESERVE_RAISE = 0.2
RESERVE_DECAY = 0.998


class KVWrites(NamedTuple):
    """Maximum number of KV indices that dispatches write after a text, over all tiers."""

    rounds: int  # rounds per dispatch
    accept_width: int  # A, maximum number of tokens that a round adds
    rows: int  # number of KV indices that a round writes
    tail: int  # number of KV indices that a round needs after the last token of a request

    @classmethod
    def of(cls, shapes: Sequence[DraftShape], rounds: int) -> "KVWrites":
        return cls(
            rounds,
            max(shape.accept_width for shape in shapes),
            max(shape.rows for shape in shapes),
            max(shape.tail for shape in shapes),
        )

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
    pages: list[int] = field(default_factory=list)  # in the order of the text
    num_shared: int = 0  # number of leading pages owned by the prefix cache, which are only read
    node: Node | None = None  # node of the last shared page in the prefix cache; it is locked
    num_cached: int = 0  # number of leading tokens whose KV came from the prefix cache
    kv_len: int = 0
    unread_rounds: int = 0  # rounds dispatched but not read by the host

    def max_kv_len(self, writes: KVWrites, dispatches: int = 1) -> int:
        """Maximum number of KV indices in use after all dispatches so far and ``dispatches`` more.

        A round writes drafts and verified rows after the text in the pool. Tokens beyond the
        request's maximum and the tail are never accepted, so their KV may go to page 0.
        """
        begin = max(self.kv_len, len(self.prefill_ids))
        rounds = self.unread_rounds + dispatches * writes.rounds
        return min(begin + writes.after(rounds), self.max_kv_tokens + writes.tail)


@dataclass
class Capacity:
    """Page totals over all running requests, for admission decisions."""

    reserved: int  # pages that they may need later
    reclaimable: int  # pages that they hold but do not need yet


class PageBudget:
    """Hands out the pages of a pool; holdings with equal prefixes share pages.

    Args:
        writes: maximum KV write of a dispatch.
        set_pages: called with (slot, pages, first), writes a slot's page table from ``first`` on.
        lookahead: passed to the prefix cache; ``None`` disables sharing.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        writes: KVWrites,
        set_pages: Callable[[int, Sequence[int], int], None],
        lookahead: int | None,
    ) -> None:
        self._allocator = allocator
        # owns shared pages; empty without sharing
        self.cache = PrefixCache(allocator, lookahead=lookahead or 0)
        self._is_sharing = lookahead is not None
        self._writes = writes
        self._set_pages = set_pages
        self._reserve = RESERVE_START

    @property
    def num_used_tokens(self) -> int:
        """Number of tokens that the pages of all holdings can store, including shared pages."""
        num_used = self._allocator.num_pages - 1 - self._available(())
        return num_used * self._allocator.page_size

    def capacity(self, running: Sequence[PageHolding]) -> Capacity:
        """Page totals of the running requests, valid until the next dispatch or read of a round."""
        return Capacity(sum(map(self._may_grow, running)), sum(map(self._reclaimable, running)))

    def admit(
        self, holding: PageHolding, running: Sequence[PageHolding], capacity: Capacity
    ) -> bool:
        """Give a new holding the pages for its text and its first rounds, cached pages first.

        Returns ``False`` and gives no pages if too few would be left for the running requests.
        Updates ``capacity``, the page totals of the running requests.
        """
        node, shared = self.cache.match(holding.prefill_ids, holding.num_cacheable)
        self.cache.lock(node)
        holding.node, holding.num_shared = node, len(shared)
        holding.num_cached = holding.kv_len = len(shared) * self._allocator.page_size
        count = self._needed(holding) - len(shared)
        may_grow = self._may_grow(holding)
        reserved = capacity.reserved + may_grow if running else 0
        if count + reserved > self._available(()) + capacity.reclaimable:
            self.cache.unlock(node)
            if not running:
                raise RuntimeError(
                    f"internal error: only {self._available(())} of {count} pages are free, and no "
                    "request runs; restart the engine and report this"
                )
            return False
        reclaims = count > self._available(())
        holding.pages = shared + self._take(count, running)
        if reclaims:
            capacity.reclaimable = self.capacity(running).reclaimable
        capacity.reserved += may_grow
        return True

    def grow(self, holdings: Sequence[PageHolding], running: Sequence[PageHolding]) -> bool:
        """Give each of ``holdings`` the pages for one more dispatch.

        Pages come from the free list, then from the prefix cache, then from reclaimable pages of
        other holdings. If there are too few, returns ``False`` and changes nothing.
        """
        self._reserve = max(MIN_RESERVE, self._reserve * RESERVE_DECAY)
        counts = self._missing(holdings, 1)
        if not any(counts):
            return True
        # grow for several dispatches, by at most half of the pages available without reclaiming
        plenty, dispatches = self._available(()) // 2, GROW_DISPATCHES
        while dispatches > 1 and sum(self._missing(holdings, dispatches)) > plenty:
            dispatches //= 2
        counts = self._missing(holdings, dispatches)
        if dispatches == 1 and sum(counts) > self._available(running):
            return False
        pages = self._take(sum(counts), running)
        for holding, count in zip(holdings, counts, strict=True):
            if count:
                first = len(holding.pages)
                holding.pages += pages[:count]
                del pages[:count]
                self._set_pages(holding.slot, holding.pages[first:], first)
        return True

    def _missing(self, holdings: Sequence[PageHolding], dispatches: int) -> list[int]:
        return [max(0, self._needed(h, dispatches) - len(h.pages)) for h in holdings]

    def share(self, holding: PageHolding, *, is_dispatched: bool) -> bool:
        """Offer a prompt's full pages to the prefix cache; return ``False`` if this must wait.

        The KV may not have been computed yet, but it will be when another request reads it: the
        reader is dispatched with the prompt's last chunk or later, and each layer stores all keys
        and values of a chunk before it reads any. If another request has cached the same pages,
        those of the holding are freed, but only once the last chunk ``is_dispatched``, because it
        writes to them. Pages with the last token or the lookahead are not offered: a match never
        includes them, so no lock could protect them.
        """
        if not self._is_sharing or holding.node is None:
            return True
        text = holding.prefill_ids
        count = self.cache.num_matched_pages(len(text))
        if count == holding.num_shared:
            return True
        if not is_dispatched and len(self.cache.match(text)[1]) > holding.num_shared:
            return False
        duplicates = self.cache.insert(text, holding.pages[:count])
        node, shared = self.cache.match(text)
        self.cache.lock(node)
        self.cache.unlock(holding.node)
        holding.node, holding.num_shared = node, count
        if duplicates:
            # from the next dispatch on, this request reads the cached pages
            holding.pages = shared + holding.pages[count:]
            self._set_pages(holding.slot, holding.pages, 0)
            self._allocator.free(duplicates)
        return True

    def release(self, holding: PageHolding, known_ids: Sequence[int] | None) -> None:
        """Take back all pages of a holding.

        The full pages of ``known_ids`` (all tokens of the request) go to the prefix cache; ``None``
        caches nothing. A round in flight may still write after ``kv_len``. The device executes in
        dispatch order, so the next owner of these pages writes them later. Full pages before
        ``kv_len`` are not written again.
        """
        owned = holding.pages[holding.num_shared :]
        if holding.node is not None:
            if self._is_sharing and known_ids is not None:
                # the KV of the last known token is not in the pool
                full = self.cache.num_matched_pages(holding.kv_len + 1)
                full = max(full, holding.num_shared)
                owned = self.cache.insert(known_ids, holding.pages[:full]) + holding.pages[full:]
            self.cache.unlock(holding.node)
        holding.pages, holding.num_shared, holding.node = [], 0, None
        self._allocator.free(owned)

    def raise_reserve(self) -> None:
        self._reserve = min(1.0, self._reserve + RESERVE_RAISE)

    def _needed(self, holding: PageHolding, dispatches: int = 1) -> int:
        return self._allocator.pages_for(holding.max_kv_len(self._writes, dispatches))

    def _may_grow(self, holding: PageHolding) -> int:
        """Number of pages to reserve for a holding, in addition to those for its next dispatch."""
        soon, most = holding.max_kv_len(self._writes), holding.max_kv_tokens + self._writes.tail
        later = soon + int(self._reserve * (most - soon))
        return self._allocator.pages_for(later) - self._allocator.pages_for(soon)

    def _reclaimable(self, holding: PageHolding) -> int:
        """Number of pages of a holding that its next dispatch does not need."""
        return max(0, len(holding.pages) - self._needed(holding))

    def _available(self, running: Sequence[PageHolding]) -> int:
        """Number of pages that are free, evictable from the prefix cache, or reclaimable."""
        free = self._allocator.num_free + self.cache.num_evictable
        return free + sum(map(self._reclaimable, running))

    def _take(self, count: int, running: Sequence[PageHolding]) -> list[int]:
        short = count - self._allocator.num_free
        short -= self.cache.evict(short)
        for holding in reversed(running):
            if short <= 0:
                break
            kept = len(holding.pages) - min(short, self._reclaimable(holding))
            if kept < len(holding.pages):
                short -= len(holding.pages) - kept
                self._allocator.free(holding.pages[kept:])
                del holding.pages[kept:]
                self._set_pages(holding.slot, (), kept)
        pages = self._allocator.allocate(count)
        assert pages is not None
        return pages
