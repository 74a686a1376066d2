"""The page budget: how many pages each running request gets and gives back.

Between any two calls, every page except the padding page is free, owned by the prefix cache, or
owned by exactly one holding (its ``pages`` after the first ``num_shared``).

Before a dispatch, each holding has pages for the maximum KV write of its unread rounds and of this
dispatch. Any change uploads the page tables, so all holdings grow together, and if there are enough
pages, for up to ``GROW_DISPATCHES`` dispatches. They keep pages until others need them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specjax.kv.holding import KVWrites, PageHolding
from specjax.kv.pages import PageAllocator
from specjax.kv.prefix_cache import PrefixCache
from specjax.kv.snapshots import Snapshots
from specjax.kv.window_pages import WindowPages

GROW_DISPATCHES = 16

# An admission reserves this fraction of the pages that running requests may still need. Requests
# often end before their limit, so a full reserve would waste pages, but a reserve that is too small
# causes preemptions. Each preemption raises the fraction, and each round lowers it.
RESERVE_START = 0.3
MIN_RESERVE = 0.1
RESERVE_RAISE = 0.2
RESERVE_DECAY = 0.998


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
        followers: give pages of other pools to the pages of texts, and take them back.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        writes: KVWrites,
        set_pages: Callable[[int, Sequence[int], int], None],
        lookahead: int | None,
        followers: Sequence[WindowPages | Snapshots] = (),
    ) -> None:
        self._allocator = allocator
        # owns shared pages; empty without sharing
        self.cache = PrefixCache(allocator, lookahead=lookahead or 0)
        self._is_sharing = lookahead is not None
        self._writes = writes
        self._set_pages = set_pages
        self._reserve = RESERVE_START
        self._followers = followers
        self.waits = False  # whether the last holding that was refused may be admitted next time
        allocator.on_free += [follower.drop for follower in followers]

    @property
    def num_used_tokens(self) -> int:
        """Number of tokens that the pages of all holdings can store, including shared pages."""
        num_used = self._allocator.num_pages - 1 - self._available(())
        return num_used * self._allocator.page_size

    @property
    def num_window_tokens(self) -> int:
        """The same for the pages of the followers, including those of cached texts."""
        return sum(follower.num_used_tokens for follower in self._followers)

    def capacity(self, running: Sequence[PageHolding]) -> Capacity:
        """Page totals of the running requests, valid until the next dispatch or read of a round."""
        return Capacity(sum(map(self._may_grow, running)), sum(map(self._reclaimable, running)))

    def admit(
        self, holding: PageHolding, running: Sequence[PageHolding], capacity: Capacity
    ) -> bool:
        """Give a new holding the pages for its text and its first rounds, cached pages first.

        Returns ``False`` and gives no pages if too few would be left for the running requests, or
        if a follower had better prepare chunks of others first (``waits``).
        Updates ``capacity``, the page totals of the running requests.
        """
        text = holding.cache_keys(holding.prefill_ids)
        node, shared = self.cache.match(text, holding.num_cacheable)
        holding.num_matched = len(shared) * self._allocator.page_size
        usable = self._usable(shared)
        cacheable = text[: holding.num_cacheable]
        self.waits = any(follower.awaits(cacheable, usable) for follower in self._followers)
        if self.waits:
            return False
        if usable < len(shared):
            limit = usable * self._allocator.page_size
            node, shared = self.cache.match(text, limit)
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
        other holdings. If there are too few, returns ``False``; the holdings may then have more
        pages, but not all that they need.
        """
        self._reserve = max(MIN_RESERVE, self._reserve * RESERVE_DECAY)
        is_grown = self._grow(holdings, running)
        return is_grown and all(follower.grow(holdings, running) for follower in self._followers)

    def _grow(self, holdings: Sequence[PageHolding], running: Sequence[PageHolding]) -> bool:
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
                begin = len(holding.pages)
                holding.pages += pages[:count]
                del pages[:count]
                self._set_pages(holding.slot, holding.pages[begin:], begin)
        return True

    def prepare_chunk(self, holding: PageHolding, end: int, running: Sequence[PageHolding]) -> None:
        """Prepare a prompt chunk up to ``end``, before ``holding.kv_len`` counts its tokens."""
        for follower in self._followers:
            follower.prepare_chunk(holding, end, running)

    def chunks_dispatched(self) -> None:
        """Note that all prepared chunks have been dispatched."""
        for follower in self._followers:
            follower.chunks_dispatched()

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
        text = holding.cache_keys(holding.prefill_ids)
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
            replaced, holding.pages = holding.pages[:count], shared + holding.pages[count:]
            self._set_pages(holding.slot, holding.pages, 0)
            for follower in self._followers:
                follower.replace(holding, replaced, shared)
            self._allocator.free(duplicates)
        return True

    def release(self, holding: PageHolding, known_ids: list[int] | None) -> None:
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
                text = holding.cache_keys(known_ids)
                owned = self.cache.insert(text, holding.pages[:full]) + holding.pages[full:]
                if self._followers:
                    cached = self.cache.match(text)[1][:full]
                    for follower in self._followers:
                        follower.move(holding.pages, cached)
                    holding.pages[: len(cached)] = cached
            self.cache.unlock(holding.node)
        for follower in self._followers:
            follower.end(holding)
        holding.pages, holding.num_shared, holding.node = [], 0, None
        self._allocator.free(owned)

    def raise_reserve(self) -> None:
        self._reserve = min(1.0, self._reserve + RESERVE_RAISE)

    def _usable(self, pages: Sequence[int]) -> int:
        """Number of leading pages of a cached prefix after which all followers can continue."""
        counts = (follower.usable(pages) for follower in self._followers)
        count = min(counts, default=len(pages))
        return count if count == len(pages) else self._usable(pages[:count])

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
            num_kept = len(holding.pages) - min(short, self._reclaimable(holding))
            if num_kept < len(holding.pages):
                short -= len(holding.pages) - num_kept
                self._allocator.free(holding.pages[num_kept:])
                del holding.pages[num_kept:]
                self._set_pages(holding.slot, (), num_kept)
        pages = self._allocator.allocate(count)
        assert pages is not None
        return pages
