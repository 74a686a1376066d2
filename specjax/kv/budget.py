"""Pages of the running requests: who gets how many, and who gives some back.

Invariant between any two calls: every page but the padding page is free, owned by the prefix cache,
or owned by exactly one row (its ``pages`` behind the first ``num_shared``).

Rows grow on demand. Before a dispatch each has pages for the largest advance of all its unread
rounds and of this one. A change of any row uploads the page tables, so all rows grow together and,
where pages are plentiful, for up to ``GROW_DISPATCHES`` to come. What turns out unneeded stays with
its row as slack, until an admission or another row needs it.
"""

from collections.abc import Sequence

from specjax.kv.pages import PageAllocator
from specjax.kv.prefix_cache import PrefixCache
from specjax.runtime.runner import ModelRunner
from specjax.scheduling.request import Request
from specjax.scheduling.row import Row

GROW_DISPATCHES = 16

# Fraction of what running requests may still grow by that an admission leaves untouched. Requests
# often end before their limit, so holding all of it back wastes pages, and too little means
# retractions: each raises the fraction, each round lowers it.
HELD_BACK_START = 0.3
HELD_BACK_LEAST = 0.1
HELD_BACK_RAISE = 0.2
HELD_BACK_DECAY = 0.998


class PageBudget:
    """Hands out the pages of a runner's pool.

    Args:
        runner: its page tables follow what rows hold.
        allocator: pages of the pool.
        cache: shares the pages of equal prefixes; ``None`` shares nothing.
    """

    def __init__(
        self, runner: ModelRunner, allocator: PageAllocator, cache: PrefixCache | None
    ) -> None:
        self._runner = runner
        self._allocator = allocator
        self._cache = cache
        self._rounds = runner.config.rounds_per_dispatch
        self._advance = runner.config.num_steps + 1
        self._held_back = HELD_BACK_START

    @property
    def num_used_tokens(self) -> int:
        """Tokens in the pages of the rows, those that the prefix cache lends them included."""
        allocator = self._allocator
        num_used = allocator.num_pages - 1 - allocator.num_free
        if self._cache is not None:
            num_used -= self._cache.num_evictable
        return num_used * allocator.page_size

    def admit(self, request: Request, slot: int, running: Sequence[Row]) -> Row | None:
        """Give a request the pages of its text and of its first rounds, cached ones first.

        Returns:
            Its row, or ``None`` where that would leave the running requests too few pages.

        Raises:
            RuntimeError: if nothing runs and still there are too few: pages were lost.
        """
        row = Row(request, slot, request.input_ids + request.output_ids)
        if self._cache is not None:
            match = self._cache.match(row.text)
            self._cache.lock(match.node)
            row.node, row.pages = match.node, match.pages
            row.num_shared, row.kv_len = len(match.pages), match.num_tokens
        count = self._needed(row) - row.num_shared
        held_back = sum(map(self._may_grow, (*running, row))) if running else 0
        if count + held_back > self._available(running):
            if self._cache is not None and row.node is not None:
                self._cache.unlock(row.node)
            if not running:
                raise RuntimeError(
                    f"request {request.rid!r} needs {count} pages and only "
                    f"{self._available(())} are left though nothing runs; pages were lost"
                )
            return None
        row.pages = row.pages + self._take(count, running)
        return row

    def grow(self, rows: Sequence[Row], running: Sequence[Row]) -> bool:
        """Make sure that each of ``rows`` has the pages for one more dispatch.

        Pages come from the free list, then from the prefix cache, then from the slack of others.

        Returns:
            Whether they all have; if not, nothing has changed.
        """
        self._held_back = max(HELD_BACK_LEAST, self._held_back * HELD_BACK_DECAY)
        missing = [self._needed(row) - len(row.pages) for row in rows]
        if max(missing, default=0) <= 0:
            return True
        counts = self._generous(rows) or missing
        if counts is missing and sum(filter(_positive, missing)) > self._available(running):
            return False
        self._take_for(rows, counts, running)
        return True

    def _generous(self, rows: Sequence[Row]) -> list[int] | None:
        """Pages for as many dispatches as leave half of what no running request must give up."""
        plenty = self._available(()) // 2
        dispatches = GROW_DISPATCHES
        while dispatches > 1:
            counts = [self._needed(row, dispatches) - len(row.pages) for row in rows]
            if sum(filter(_positive, counts)) <= plenty:
                return counts
            dispatches //= 2
        return None

    def share(self, row: Row) -> None:
        """Lend the full pages of a text whose prefill is dispatched to the prefix cache.

        Their KV is final in the order of the device: whoever reads them is dispatched later. The
        page of the last token stays out: a match leaves that token over, so no lock could cover it.
        """
        if self._cache is None or row.node is None:
            return
        count = (len(row.text) - 1) // self._allocator.page_size
        if count == row.num_shared:
            return
        duplicates = self._cache.insert(row.text, row.pages[:count])
        match = self._cache.match(row.text)
        self._cache.lock(match.node)
        self._cache.unlock(row.node)
        row.node, row.num_shared = match.node, count
        if duplicates:
            # another request brought the same pages: from the next dispatch on, this one reads them
            row.pages = match.pages + row.pages[count:]
            self._runner.set_pages(row.slot, row.pages)
            self._allocator.free(duplicates)

    def release(self, row: Row, *, is_cached: bool = True) -> None:
        """Take all pages of a row back; the full ones of its known text go to the prefix cache.

        A round in flight may still write behind ``kv_len`` through the page table that it was
        dispatched with. The device executes in dispatch order, so whoever gets these pages next
        writes them later, and no full page below ``kv_len`` is written again.
        """
        owned = row.pages[row.num_shared :]
        if self._cache is not None and row.node is not None:
            if is_cached:
                request = row.request
                full = row.kv_len // self._allocator.page_size
                tokens = request.input_ids + request.output_ids
                owned = self._cache.insert(tokens, row.pages[:full]) + row.pages[full:]
            self._cache.unlock(row.node)
        row.pages, row.num_shared, row.node = [], 0, None
        self._allocator.free(owned)

    def hold_back_more(self) -> None:
        """Admit more carefully: a request had to be retracted."""
        self._held_back = min(1.0, self._held_back + HELD_BACK_RAISE)

    def flush(self) -> None:
        """Forget every cached prefix that no row reads."""
        if self._cache is not None:
            self._cache.flush()

    def _needed(self, row: Row, dispatches: int = 1) -> int:
        rounds = dispatches * self._rounds
        return self._allocator.pages_for(row.max_tokens(rounds, self._advance))

    def _may_grow(self, row: Row) -> int:
        """Pages beyond the next dispatch to hold back for a row."""
        soon, most = row.max_tokens(self._rounds, self._advance), row.request.max_kv_tokens
        later = soon + int(self._held_back * (most - soon))
        return self._allocator.pages_for(later) - self._allocator.pages_for(soon)

    def _slack(self, row: Row) -> int:
        """Pages that a row can give back and still take part in the next dispatch."""
        return max(0, len(row.pages) - self._needed(row))

    def _available(self, running: Sequence[Row]) -> int:
        """Pages to be had from the free list, the prefix cache and the slack of rows."""
        cached = 0 if self._cache is None else self._cache.num_evictable
        return self._allocator.num_free + cached + sum(map(self._slack, running))

    def _take(self, count: int, running: Sequence[Row]) -> list[int]:
        """``count`` pages, of as many as are available or more."""
        short = count - self._allocator.num_free
        if short > 0 and self._cache is not None:
            short -= self._cache.evict(short)
        for row in reversed(running):
            if short <= 0:
                break
            kept = len(row.pages) - min(short, self._slack(row))
            if kept < len(row.pages):
                short -= len(row.pages) - kept
                self._allocator.free(row.pages[kept:])
                del row.pages[kept:]
                self._runner.set_pages(row.slot, (), first=kept)
        pages = self._allocator.allocate(count)
        assert pages is not None
        return pages

    def _take_for(self, rows: Sequence[Row], counts: Sequence[int], running: Sequence[Row]) -> None:
        pages = self._take(sum(filter(_positive, counts)), running)
        for row, count in zip(rows, counts, strict=True):
            if count > 0:
                first = len(row.pages)
                row.pages += pages[:count]
                del pages[:count]
                self._runner.set_pages(row.slot, row.pages[first:], first=first)


def _positive(count: int) -> bool:
    return count > 0
