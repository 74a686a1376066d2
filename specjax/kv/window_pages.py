"""Window pages: the pages of layers whose attention has a window, in a pool of their own.

Such layers read only the last keys of a text, so their pool is smaller than that of the other
layers. A page of a text has a window page from the dispatch that writes it. If window pages run
out, those that no running request reads any more are taken back: first those before the windows of
texts, then the least recently used. The table of a slot may still name them: rows never read keys
before their window, and never write them.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from specjax.kv.holding import KVWrites, PageHolding, move_entries
from specjax.kv.pages import PageAllocator

# Window pages are prepared for several dispatches, because each change uploads the page tables.
AHEAD_DISPATCHES = 16
# dispatches that the host has not read when it prepares others
MAX_UNREAD = 2
# of the window pages that running requests need: these keep the windows of cached texts
SPARE = 0.5


def pages_wanted(
    window: int, writes: KVWrites, page_size: int, *, num_requests: int, chunk: int
) -> int:
    """Number of window pages, with the padding page, for ``num_requests`` running requests.

    A prefill writes at most ``chunk`` tokens.
    """
    written = writes.after((AHEAD_DISPATCHES + MAX_UNREAD) * writes.rounds)
    # pages at both ends are shared with other keys, and a chunk may begin and end within a page
    per_request = -(-(window + written) // page_size) + 2
    added = -(-chunk // page_size) + 2 * num_requests
    return 1 + num_requests * per_request + int(SPARE * num_requests * per_request) + added


class WindowPages:
    """Gives window pages to the pages of texts; only one thread may use it.

    Args:
        num_pages: number of window pages, from :func:`pages_wanted`.
        window: number of keys that a row sees, the largest of all layers.
        set_pages: called with (slot, window pages, first), writes a slot's table of window pages
            from entry ``first`` on.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        window: int,
        writes: KVWrites,
        set_pages: Callable[[int, Sequence[int], int], None],
    ) -> None:
        self._allocator = PageAllocator(num_pages, page_size)
        self._window = window
        self._writes = writes
        self._set_pages = set_pages
        # window page of each page that has one, least recently used first
        self._page_map: OrderedDict[int, int] = OrderedDict()
        # KV lengths of holdings before the chunks that have not been dispatched yet
        self._begins: dict[PageHolding, int] = {}

    @property
    def num_used_tokens(self) -> int:
        """Number of tokens that all window pages in use can store, also those of cached texts."""
        return len(self._page_map) * self._allocator.page_size

    def usable(self, pages: Sequence[int]) -> int:
        """Number of leading pages of a cached prefix after which a request can continue.

        It is the longest prefix whose last window has all its window pages, which count as used.
        """
        size, count, in_a_row = self._allocator.page_size, 0, 0
        for index, page in enumerate(pages, start=1):
            in_a_row = in_a_row + 1 if page in self._page_map else 0
            if in_a_row >= index - self._first(index * size):
                count = index
        for page in pages[self._first(count * size) : count]:
            self._page_map.move_to_end(page)
        return count

    def awaits(self, text: list[int], count: int) -> bool:
        """Requests can read the window pages that others write in the same dispatch."""
        return False

    def prepare_chunk(self, holding: PageHolding, end: int, running: Iterable[PageHolding]) -> None:
        """Give window pages to a chunk from ``holding.kv_len`` to ``end``, not dispatched yet."""
        if not self._prepare([(holding, end)], running):
            raise RuntimeError(
                f"internal error: too few window pages for a chunk of {end - holding.kv_len} "
                "tokens; restart the engine and report this"
            )
        self._write_table(holding, self._first(holding.kv_len))
        self._begins.setdefault(holding, holding.kv_len)

    def chunks_dispatched(self) -> None:
        """Prepared chunks no longer need keys before the window at their ends."""
        for holding, begin in self._begins.items():
            self._mark_droppable(holding, max(begin, holding.num_cached))
        self._begins.clear()

    def end(self, holding: PageHolding) -> None:
        """Mark the last window of a text as used now, and its other window pages as used least."""
        self._begins.pop(holding, None)
        self._mark_droppable(holding, len(holding.prefill_ids))
        for page in holding.pages[self._first(holding.kv_len) :]:
            if page in self._page_map:
                self._page_map.move_to_end(page)

    def grow(self, holdings: Sequence[PageHolding], running: Iterable[PageHolding]) -> bool:
        """Give window pages to the next dispatch of rounds, or to several; ``False`` if none."""

        def ends(dispatches: int) -> list[tuple[PageHolding, int]]:
            return [(holding, holding.max_kv_len(self._writes, dispatches)) for holding in holdings]

        if not self._missing(ends(1)):
            return True
        return any(self._prepare(ends(n), running) for n in (AHEAD_DISPATCHES, 1))

    def move(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Give window pages of ``sources`` to ``targets``, pages of equal text that have none."""
        move_entries(self._page_map, sources, targets)

    def replace(self, holding: PageHolding, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Use ``targets`` instead of ``sources`` of equal text in a holding; rewrite its table."""
        self.move(sources, targets)
        self._mark_droppable(holding, holding.num_cached)
        self._write_table(holding, self._first(holding.kv_len))

    def drop(self, pages: Iterable[int]) -> None:
        """Take back the window pages of pages that are freed."""
        window_pages = [self._page_map.pop(page) for page in pages if page in self._page_map]
        self._allocator.free(window_pages)

    def _first(self, position: int) -> int:
        """Index of the first page that a row at this position reads."""
        return max(0, position - self._window + 1) // self._allocator.page_size

    def _prepare(
        self, ends: Sequence[tuple[PageHolding, int]], running: Iterable[PageHolding]
    ) -> bool:
        """Give window pages to writes from each holding's ``kv_len`` to an end, or to none."""
        missing = self._missing(ends)
        count = sum(len(pages) for _, pages in missing)
        if count > self._allocator.num_free:
            self._take_back(count - self._allocator.num_free, running)
        if (allocated := self._allocator.allocate(count)) is None:
            return False
        lacking = [page for _, pages in missing for page in pages]
        self._page_map.update(zip(lacking, allocated, strict=True))
        for holding, _ in missing:
            self._write_table(holding, holding.kv_len // self._allocator.page_size)
        return True

    def _missing(
        self, ends: Sequence[tuple[PageHolding, int]]
    ) -> list[tuple[PageHolding, list[int]]]:
        """Pages without a window page from each holding's ``kv_len`` to an end."""
        missing, size = [], self._allocator.page_size
        for holding, end in ends:
            pages = holding.pages[holding.kv_len // size : self._allocator.pages_for(end)]
            if lacking := [page for page in pages if page not in self._page_map]:
                missing.append((holding, lacking))
        return missing

    def _take_back(self, count: int, running: Iterable[PageHolding]) -> None:
        """Take back unread window pages: at least ``count`` if possible, and a few at a time."""
        read = {
            page
            for holding in running
            for page in holding.pages[self._first(self._begins.get(holding, holding.kv_len)) :]
        }
        count = max(count, self._allocator.num_pages // 8)
        unread = (page for page in self._page_map if page not in read)
        self.drop(list(islice(unread, count)))

    def _mark_droppable(self, holding: PageHolding, begin: int) -> None:
        """Mark pages from ``begin`` on that no row of this text still reads as first to drop.

        Windows at ``num_cached`` and ``num_matched`` keep their rank, because other requests may
        branch there.
        """
        size, ends = self._allocator.page_size, {holding.num_cached, holding.num_matched}
        branching = {index for end in ends for index in range(self._first(end), end // size)}
        for index in range(self._first(begin), self._first(holding.kv_len)):
            page = holding.pages[index]
            if index not in branching and page in self._page_map:
                self._page_map.move_to_end(page, last=False)

    def _write_table(self, holding: PageHolding, begin: int) -> None:
        """Write the window pages of a holding into its slot's table from entry ``begin`` on."""
        pages = [self._page_map.get(page, 0) for page in holding.pages[begin:]]
        self._set_pages(holding.slot, pages, begin)
