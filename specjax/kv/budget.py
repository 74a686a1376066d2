"""Pages of the running requests: who gets how many, and who gives some back.

Invariant between any two calls: every page but the padding page is free, owned by the prefix cache,
or owned by exactly one holding (its ``pages`` behind the first ``num_shared``).

Holdings grow on demand. Before a dispatch each has pages for the largest advance of all its unread
rounds and of this one. A change of any of them uploads the page tables, so all grow together and,
where pages are plentiful, for up to ``GROW_DISPATCHES`` to come. What turns out unneeded stays with
its holding, until an admission or another one needs it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specjax.kv.pages import PageAllocator
from specjax.kv.prefix_cache import Node, PrefixCache
from specjax.types import DraftShape

GROW_DISPATCHES = 16

# Fraction of what running requests may still grow by that an admission leaves untouched. Requests
# often end before their limit, so holding all of it back wastes pages, and too little means
# retractions: each raises the fraction, each round lowers it.
HELD_BACK_START = 0.3
HELD_BACK_LEAST = 0.1
HELD_BACK_RAISE = 0.2
HELD_BACK_DECAY = 0.998


class Reach(NamedTuple):
    """How far a dispatch may write behind a text: of all tiers, the most."""

    rounds: int  # of a dispatch
    accept_width: int  # A, tokens that a round adds
    rows: int  # that a round writes behind the tokens it found
    overhang: int  # rows that it needs behind a request's last token

    @classmethod
    def of(cls, shapes: Sequence[DraftShape], rounds: int) -> "Reach":
        return cls(
            rounds,
            max(shape.accept_width for shape in shapes),
            max(shape.rows for shape in shapes),
            max(shape.overhang for shape in shapes),
        )

    def behind(self, num_rounds: int) -> int:
        """KV indices behind a text that so many rounds may write, none of them read."""
        return (num_rounds - 1) * self.accept_width + self.rows if num_rounds else 0


@dataclass(eq=False)
class PageHolding:
    """The pages of one running request, and the lengths that they are planned by.

    ``kv_len`` counts tokens whose KV is final in the target once everything dispatched has run: a
    prefill chunk counts from its dispatch, a round from when its tokens are read. Dispatches write
    at ``kv_len`` or behind it. A draft whose KV depends on more than one token behind a position
    writes as many positions earlier as those are more than one, but no cached ones.
    """

    slot: int  # request slot
    prefill_ids: list[int]  # the prompt, and the output of before a retraction
    max_kv_tokens: int  # tokens that the request ever has in the pool
    num_cacheable: int  # first tokens whose KV may come out of the prefix cache
    pages: list[int] = field(default_factory=list)  # in the order of the text
    num_shared: int = 0  # first pages that the prefix cache owns and that are only read
    node: Node | None = None  # locked in the prefix cache for the shared pages
    num_cached: int = 0  # first tokens whose KV came out of the prefix cache
    kv_len: int = 0
    unread_rounds: int = 0  # dispatched rounds that the host has not read

    def reached(self, reach: Reach, dispatches: int = 1) -> int:
        """KV indices, at most, that are in use after everything dispatched and so much more.

        The rows that a round verifies begin where the text in the pool ends, and its drafts lie
        among them. Those behind the request's own maximum and the overhang are never accepted; they
        go to the padding page where they have none.
        """
        begin = max(self.kv_len, len(self.prefill_ids))
        rounds = self.unread_rounds + dispatches * reach.rounds
        return min(begin + reach.behind(rounds), self.max_kv_tokens + reach.overhang)


@dataclass
class Room:
    """Sums over the running requests, of pages."""

    held_back: int  # that they may need later
    spare: int  # that they hold and do not need yet


class PageBudget:
    """Hands out the pages of a pool; without a cache of equal prefixes none is shared.

    ``set_pages`` writes a slot's page table from an entry on: slot, pages, first entry.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        cache: PrefixCache | None,
        reach: Reach,
        set_pages: Callable[[int, Sequence[int], int], None],
    ) -> None:
        self._allocator = allocator
        # without one, a cache that is never given a page
        self._cache = PrefixCache(allocator, lookahead=0) if cache is None else cache
        self._is_sharing = cache is not None
        self._reach = reach
        self._set_pages = set_pages
        self._held_back = HELD_BACK_START

    @property
    def num_used_tokens(self) -> int:
        """Tokens in the pages of the holdings, those that the prefix cache lends them included."""
        num_used = self._allocator.num_pages - 1 - self._available(())
        return num_used * self._allocator.page_size

    @property
    def num_cached_pages(self) -> int:
        """Pages of the prefix cache, those that it lends to rows included."""
        return self._cache.num_pages

    def room(self, running: Sequence[PageHolding]) -> Room:
        """What the running requests leave to new ones, until they are dispatched or read again."""
        return Room(sum(map(self._may_grow, running)), sum(map(self._spare, running)))

    def admit(self, holding: PageHolding, running: Sequence[PageHolding], room: Room) -> bool:
        """Give a new holding the pages of its text and of its first rounds, cached ones first.

        False, and nothing is given, where that would leave the running requests too few. ``room``
        is theirs, and kept up to date.
        """
        match = self._cache.match(holding.prefill_ids, holding.num_cacheable)
        self._cache.lock(match.node)
        holding.node, holding.pages = match.node, match.pages
        holding.num_shared, holding.num_cached = len(match.pages), match.num_tokens
        holding.kv_len = match.num_tokens
        count = self._needed(holding) - holding.num_shared
        may_grow = self._may_grow(holding)
        held_back = room.held_back + may_grow if running else 0
        if count + held_back > self._available(()) + room.spare:
            self._cache.unlock(match.node)
            if not running:
                raise RuntimeError(
                    f"a request needs {count} pages and only {self._available(())} are left though "
                    "nothing runs; pages were lost"
                )
            return False
        takes_spare = count > self._available(())
        holding.pages = holding.pages + self._take(count, running)
        if takes_spare:
            room.spare = self.room(running).spare
        room.held_back += may_grow
        return True

    def grow(self, holdings: Sequence[PageHolding], running: Sequence[PageHolding]) -> bool:
        """Make sure that each of ``holdings`` has the pages for one more dispatch.

        Pages come from the free list, the prefix cache, then from what others can spare. False, and
        nothing has changed, where those are too few.
        """
        self._held_back = max(HELD_BACK_LEAST, self._held_back * HELD_BACK_DECAY)
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
        """Lend the full pages of a text to the prefix cache; false where that has to wait.

        Their KV is final in the order of the device: whoever reads them is dispatched with the last
        chunk of the text, of which each layer stores all keys and values before it reads any, or
        later. Where another request has brought the same pages, those of the holding go: not before
        that chunk ``is_dispatched``, which writes to them. The page of the last token stays out: a
        match leaves that token over, so no lock could cover it, and so do those of a lookahead.
        """
        if not self._is_sharing or holding.node is None:
            return True
        count = self._cache.num_matched_pages(len(holding.prefill_ids))
        if count == holding.num_shared:
            return True
        if (
            not is_dispatched
            and len(self._cache.match(holding.prefill_ids).pages) > holding.num_shared
        ):
            return False
        duplicates = self._cache.insert(holding.prefill_ids, holding.pages[:count])
        match = self._cache.match(holding.prefill_ids)
        self._cache.lock(match.node)
        self._cache.unlock(holding.node)
        holding.node, holding.num_shared = match.node, count
        if duplicates:
            # another request brought the same pages: from the next dispatch on, this one reads them
            holding.pages = match.pages + holding.pages[count:]
            self._set_pages(holding.slot, holding.pages, 0)
            self._allocator.free(duplicates)
        return True

    def release(self, holding: PageHolding, known_ids: Sequence[int] | None) -> None:
        """Take all pages of a holding back.

        A round in flight may still write behind ``kv_len`` through the page table that it was
        dispatched with. The device executes in dispatch order, so whoever gets these pages next
        writes them later, and no full page below ``kv_len`` is written again. The full pages of
        ``known_ids``, all its tokens, go to the prefix cache; ``None`` keeps no KV.
        """
        owned = holding.pages[holding.num_shared :]
        if holding.node is not None:
            if self._is_sharing and known_ids is not None:
                # one more token is known than stands in the pool
                full = self._cache.num_matched_pages(holding.kv_len + 1)
                full = max(full, holding.num_shared)
                owned = self._cache.insert(known_ids, holding.pages[:full]) + holding.pages[full:]
            self._cache.unlock(holding.node)
        holding.pages, holding.num_shared, holding.node = [], 0, None
        self._allocator.free(owned)

    def hold_back_more(self) -> None:
        """Admit more carefully: a request had to be retracted."""
        self._held_back = min(1.0, self._held_back + HELD_BACK_RAISE)

    def flush(self) -> None:
        """Forget every cached prefix that no holding reads."""
        self._cache.flush()

    def _needed(self, holding: PageHolding, dispatches: int = 1) -> int:
        return self._allocator.pages_for(holding.reached(self._reach, dispatches))

    def _may_grow(self, holding: PageHolding) -> int:
        """Pages beyond the next dispatch to hold back for a holding."""
        soon, most = holding.reached(self._reach), holding.max_kv_tokens + self._reach.overhang
        later = soon + int(self._held_back * (most - soon))
        return self._allocator.pages_for(later) - self._allocator.pages_for(soon)

    def _spare(self, holding: PageHolding) -> int:
        """Pages that a holding can give back and still take part in the next dispatch."""
        return max(0, len(holding.pages) - self._needed(holding))

    def _available(self, running: Sequence[PageHolding]) -> int:
        """Pages to be had from the free list, the prefix cache and the spare pages of holdings."""
        free = self._allocator.num_free + self._cache.num_evictable
        return free + sum(map(self._spare, running))

    def _take(self, count: int, running: Sequence[PageHolding]) -> list[int]:
        short = count - self._allocator.num_free
        short -= self._cache.evict(short)
        for holding in reversed(running):
            if short <= 0:
                break
            kept = len(holding.pages) - min(short, self._spare(holding))
            if kept < len(holding.pages):
                short -= len(holding.pages) - kept
                self._allocator.free(holding.pages[kept:])
                del holding.pages[kept:]
                self._set_pages(holding.slot, (), kept)
        pages = self._allocator.allocate(count)
        assert pages is not None
        return pages
