"""Pages of the running requests: how many each one gets, and which of them it gives back.

Invariant between any two calls: every page but the padding page is free, owned by the prefix cache,
or owned by exactly one holding (its ``pages`` after the first ``num_shared``).

Holdings grow on demand. Before a dispatch each has pages for the largest advance of all its unread
rounds and of this one. A change of any of them uploads the page tables, so all grow together. If
pages are plentiful, they grow for up to ``GROW_DISPATCHES`` dispatches. What turns out to be
unneeded stays with its holding until an admission or another holding needs it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specjax.kv.pages import PageAllocator
from specjax.kv.prefix_cache import Node, PrefixCache
from specjax.types import DraftShape

GROW_DISPATCHES = 16

# Fraction of what running requests may still grow by that an admission leaves untouched. Requests
# often end before their limit, so a full reserve wastes pages, and too little means preemptions:
# each raises the fraction, each round lowers it.
RESERVE_START = 0.3
MIN_RESERVE = 0.1
RESERVE_RAISE = 0.2
RESERVE_DECAY = 0.998


class KVWrites(NamedTuple):
    """Maximum KV write of a dispatch after a text, over all tiers."""

    rounds: int  # of a dispatch
    accept_width: int  # A, tokens that a round adds
    rows: int  # KV indices that a round writes
    tail: int  # KV indices that a round needs after the last token of a request

    @classmethod
    def of(cls, shapes: Sequence[DraftShape], rounds: int) -> "KVWrites":
        return cls(
            rounds,
            max(shape.accept_width for shape in shapes),
            max(shape.rows for shape in shapes),
            max(shape.tail for shape in shapes),
        )

    def after(self, num_rounds: int) -> int:
        """KV indices after a text that ``num_rounds`` unread rounds may write."""
        return (num_rounds - 1) * self.accept_width + self.rows if num_rounds else 0


@dataclass(eq=False)
class PageHolding:
    """The pages of one running request, and the lengths that they are planned by.

    ``kv_len`` counts tokens whose KV is final in the target once everything dispatched has run: a
    prefill chunk counts from its dispatch, a round from when its tokens are read. Dispatches write
    at ``kv_len`` and later. A draft whose KV at a position depends on n following tokens, n > 1,
    also writes the n - 1 positions before, but no cached ones.
    """

    slot: int  # request slot
    prefill_ids: list[int]  # the prompt, and the output of before a preemption
    max_kv_tokens: int  # tokens that the request ever has in the pool
    num_cacheable: int  # first tokens whose KV may come out of the prefix cache
    pages: list[int] = field(default_factory=list)  # in the order of the text
    num_shared: int = 0  # first pages that the prefix cache owns and that are only read
    node: Node | None = None  # locked in the prefix cache for the shared pages
    num_cached: int = 0  # first tokens whose KV came out of the prefix cache
    kv_len: int = 0
    unread_rounds: int = 0  # dispatched rounds that the host has not read

    def max_kv_len(self, writes: KVWrites, dispatches: int = 1) -> int:
        """Maximum KV indices in use after everything dispatched and ``dispatches`` more.

        A round writes from the end of the text in the pool on, drafts and verified rows alike.
        What it writes after the request's own maximum and the tail is never accepted; it goes to
        the padding page if there is no page for it.
        """
        begin = max(self.kv_len, len(self.prefill_ids))
        rounds = self.unread_rounds + dispatches * writes.rounds
        return min(begin + writes.after(rounds), self.max_kv_tokens + writes.tail)


@dataclass
class Capacity:
    """Sums over the running requests, in pages, that decide how many more are admitted."""

    reserved: int  # that they may need later
    reclaimable: int  # that they hold and do not need yet


class PageBudget:
    """Hands out the pages of a pool; holdings share those of equal prefixes.

    Args:
        allocator: of the pool.
        writes: maximum KV write of a dispatch.
        set_pages: writes a slot's page table from an entry on: slot, pages, first entry.
        lookahead: of the prefix cache; ``None`` shares no page.

    Attributes:
        cache: pages of equal prefixes, those that holdings share included.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        writes: KVWrites,
        set_pages: Callable[[int, Sequence[int], int], None],
        lookahead: int | None,
    ) -> None:
        self._allocator = allocator
        # if no page is shared, the cache is never given one
        self.cache = PrefixCache(allocator, lookahead=lookahead or 0)
        self._is_sharing = lookahead is not None
        self._writes = writes
        self._set_pages = set_pages
        self._reserve = RESERVE_START

    @property
    def num_used_tokens(self) -> int:
        """Tokens in the pages of the holdings, shared ones included."""
        num_used = self._allocator.num_pages - 1 - self._available(())
        return num_used * self._allocator.page_size

    def capacity(self, running: Sequence[PageHolding]) -> Capacity:
        """Capacity for new requests, valid until the running ones are dispatched or read again."""
        return Capacity(sum(map(self._may_grow, running)), sum(map(self._reclaimable, running)))

    def admit(
        self, holding: PageHolding, running: Sequence[PageHolding], capacity: Capacity
    ) -> bool:
        """Give a new holding the pages of its text and of its first rounds, cached ones first.

        Returns ``False`` and gives nothing if that would leave the running requests too few.
        ``capacity`` is theirs, and kept up to date.
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
                    f"a request needs {count} pages and only {self._available(())} are left though "
                    "nothing runs; pages were lost"
                )
            return False
        reclaims = count > self._available(())
        holding.pages = shared + self._take(count, running)
        if reclaims:
            capacity.reclaimable = self.capacity(running).reclaimable
        capacity.reserved += may_grow
        return True

    def grow(self, holdings: Sequence[PageHolding], running: Sequence[PageHolding]) -> bool:
        """Make sure that each of ``holdings`` has the pages for one more dispatch.

        Pages come from the free list, the prefix cache, then from what other holdings do not need
        yet. Returns ``False`` and changes nothing if those are too few.
        """
        self._reserve = max(MIN_RESERVE, self._reserve * RESERVE_DECAY)
        counts = self._missing(holdings, 1)
        if not any(counts):
            return True
        # for as many dispatches as leave half of what no running request must give up
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
        """Offer the full pages of a text to the prefix cache; ``False`` if that has to wait.

        Their KV is final in the order of the device: whoever reads them is dispatched with the last
        chunk of the text, of which each layer stores all keys and values before it reads any, or
        later. If another request has brought the same pages, those of the holding are freed, but
        not before that chunk ``is_dispatched``, which writes to them. The page of the last token
        stays out: a match leaves that token over, so no lock could cover it. The same holds for
        the pages of a lookahead.
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
            # from the next dispatch on, this request reads the pages that the other one brought
            holding.pages = shared + holding.pages[count:]
            self._set_pages(holding.slot, holding.pages, 0)
            self._allocator.free(duplicates)
        return True

    def release(self, holding: PageHolding, known_ids: Sequence[int] | None) -> None:
        """Take all pages of a holding back.

        A round in flight may still write after ``kv_len`` through the page table that it was
        dispatched with. The device executes in dispatch order, so the next owner of these pages
        writes them later, and no full page below ``kv_len`` is written again. The full pages of
        ``known_ids``, all its tokens, go to the prefix cache; ``None`` keeps no KV.
        """
        owned = holding.pages[holding.num_shared :]
        if holding.node is not None:
            if self._is_sharing and known_ids is not None:
                # one more token is known than is in the pool
                full = self.cache.num_matched_pages(holding.kv_len + 1)
                full = max(full, holding.num_shared)
                owned = self.cache.insert(known_ids, holding.pages[:full]) + holding.pages[full:]
            self.cache.unlock(holding.node)
        holding.pages, holding.num_shared, holding.node = [], 0, None
        self._allocator.free(owned)

    def raise_reserve(self) -> None:
        """Admit more carefully: a request had to be preempted."""
        self._reserve = min(1.0, self._reserve + RESERVE_RAISE)

    def _needed(self, holding: PageHolding, dispatches: int = 1) -> int:
        return self._allocator.pages_for(holding.max_kv_len(self._writes, dispatches))

    def _may_grow(self, holding: PageHolding) -> int:
        """Pages beyond the next dispatch to reserve for a holding."""
        soon, most = holding.max_kv_len(self._writes), holding.max_kv_tokens + self._writes.tail
        later = soon + int(self._reserve * (most - soon))
        return self._allocator.pages_for(later) - self._allocator.pages_for(soon)

    def _reclaimable(self, holding: PageHolding) -> int:
        """Pages that a holding can give back and still take part in the next dispatch."""
        return max(0, len(holding.pages) - self._needed(holding))

    def _available(self, running: Sequence[PageHolding]) -> int:
        """Pages to be had from the free list, the prefix cache and holdings that can spare some."""
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
