"""The prefix cache as a state machine against a brute-force model; and what it refuses."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specjax.kv.pages import PageAllocator
from specjax.kv.prefix_cache import Node, PrefixCache


class Pool(PageAllocator):
    """An allocator that records the last freed pages."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self.last_freed: list[int] = []

    def free(self, pages: list[int]) -> None:
        super().free(pages)
        self.last_freed = list(pages)

    def take(self, count: int) -> list[int]:
        pages = self.allocate(count)
        assert pages is not None
        return pages


def make_cache(
    page_size: int = 4, lookahead: int = 1, num_pages: int = 65
) -> tuple[PrefixCache, Pool]:
    pool = Pool(num_pages, page_size)
    return PrefixCache(pool, lookahead=lookahead), pool


def store(cache: PrefixCache, pool: Pool, tokens: Sequence[int]) -> list[int]:
    """Insert a text as a request without a match does; returns the pages that it computed."""
    pages = pool.take(cache.num_full_pages(len(tokens)))
    pool.free(cache.insert(tokens, pages))
    return pages


def text(*pages: str, size: int = 4) -> list[int]:
    """Tokens of named pages: "a" is a full page, "a2" its first two tokens."""
    tokens: list[int] = []
    for page in pages:
        count = int(page[1:]) if len(page) > 1 else size
        tokens += [100 * ord(page[0]) + i for i in range(count)]
    return tokens


def test_fewer_pages_than_tokens_may_be_offered() -> None:
    cache, pool = make_cache()
    pages = pool.take(1)
    assert cache.insert(text("a", "b", "c", "d"), pages) == []
    assert cache.match(text("a", "b", "c", "d"))[1] == pages


def test_a_wrong_lookahead_is_refused() -> None:
    with pytest.raises(ValueError, match="lookahead=-1"):
        PrefixCache(PageAllocator(4, 4), lookahead=-1)


@pytest.mark.parametrize("shape", ["wide", "long"])
def test_ten_thousand_pages_one_at_a_time(shape: str) -> None:
    """Scanning the cache in every call would take 10^8 steps; the time limit is 30-fold."""
    count = 10_000
    cache, pool = make_cache(2, 1, count + 1)
    texts = [[i, i, i] for i in range(count)] if shape == "wide" else [list(range(2 * count + 1))]
    start = time.process_time()
    order = [page for tokens in texts for page in store(cache, pool, tokens)]
    hot = texts[0][:3]
    for _ in range(count):
        node, _ = cache.match(hot)
        cache.lock(node)
        cache.unlock(node)
    node, _ = cache.match(texts[-1])  # deep trees cause no recursion
    cache.lock(node)
    cache.unlock(node)
    cache.match(hot)
    evicted = []
    while cache.evict(1):
        evicted += pool.last_freed
    assert time.process_time() - start < 5
    assert evicted == ([*order[1:], order[0]] if shape == "wide" else order[::-1])


class Model:
    """Reference model of the cache, page by page; the key of a page is all tokens it depends on."""

    def __init__(self, page_size: int, lookahead: int) -> None:
        self.page_size = page_size
        self.lookahead = lookahead
        self.pages: dict[tuple[int, ...], int] = {}
        self.last_used: dict[tuple[int, ...], int] = {}
        self.locks: Counter[tuple[int, ...]] = Counter()
        self.freed: list[int] = []
        self.clock = 0

    def chain(self, tokens: Sequence[int], count: int) -> list[tuple[int, ...]]:
        ends = [(p + 1) * self.page_size + self.lookahead for p in range(count)]
        return [tuple(tokens[:end]) for end in ends if end <= len(tokens)]

    def use(self, tokens: Sequence[int], count: int) -> list[tuple[int, ...]]:
        """The cached chain up to ``count`` pages, marked as used now."""
        self.clock += 1
        found = []
        for name in self.chain(tokens, count):
            if name not in self.pages:
                break
            self.last_used[name] = self.clock
            found.append(name)
        return found

    def match(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        return self.use(tokens, max(0, len(tokens) - 1) // self.page_size)

    def insert(self, tokens: Sequence[int], pages: list[int]) -> list[int]:
        """Returns the pages that go back to the caller."""
        known = self.use(tokens, len(pages))
        chain = self.chain(tokens, len(pages))
        back = [page for name, page in zip(known, pages, strict=False) if self.pages[name] != page]
        for name, page in list(zip(chain, pages, strict=False))[len(known) :]:
            self.pages[name], self.last_used[name] = page, self.clock
        return back + pages[len(chain) :]

    def unlock(self, chain: list[tuple[int, ...]]) -> None:
        """Pages without another lock are marked as used now."""
        self.clock += 1
        self.locks.subtract(chain)
        self.last_used |= {name: self.clock for name in chain if not self.locks[name]}

    def evict(self, count: int) -> list[tuple[int, ...]]:
        """Remove pages one by one, each the least recently used page without a successor."""
        evicted: list[tuple[int, ...]] = []
        while len(evicted) < count:
            inner = {name[: len(name) - self.page_size] for name in self.pages}
            leaves = [name for name in self.pages if name not in inner and not self.locks[name]]
            if not leaves:
                break
            evicted.append(min(leaves, key=self.last_used.__getitem__))
            self.freed.append(self.pages.pop(evicted[-1]))
        return evicted


@dataclass
class Lookup:
    """A match, the keys of its pages, and whether all of them are still in the cache."""

    node: Node
    pages: list[int]
    chain: list[tuple[int, ...]]
    is_alive: bool = True


@dataclass
class Borrower:
    """A request: its text, its pages in order, the pages that it owns, and its lock."""

    tokens: list[int]
    pages: list[int]
    own: list[int]
    locked: Lookup


class Caching(RuleBasedStateMachine):
    """Requests start, publish, end and abort, over a pool that is often too small."""

    NUM_PAGES = 20

    @initialize(page_size=st.sampled_from([1, 2, 5, 16, 64]), lookahead=st.integers(0, 2))
    def start(self, page_size: int, lookahead: int) -> None:
        self.page_size = page_size
        self.pool = Pool(self.NUM_PAGES, page_size)
        self.cache = PrefixCache(self.pool, lookahead=lookahead)
        self.model = Model(page_size, lookahead)
        self.running: list[Borrower] = []
        self.lookups: list[Lookup] = []
        self.texts: list[list[int]] = [[]]

    def draw_text(self, data: st.DataObject) -> list[int]:
        """A prefix of an earlier text, cut anywhere, and new tokens after it."""
        known = data.draw(st.sampled_from(self.texts))
        tokens = known[: data.draw(st.sampled_from([len(known), *range(len(known))]))]
        runs = st.tuples(st.integers(0, 1), st.sampled_from([self.page_size] * 3 + [1]))
        for token, length in data.draw(st.lists(runs, min_size=1, max_size=5)):
            tokens += [token] * length
        tokens = tokens[: 7 * self.page_size]
        self.texts.append(tokens)
        return list(tokens)

    def match(self, tokens: list[int]) -> Lookup:
        lookup = Lookup(*self.cache.match(tokens), self.model.match(tokens))
        assert lookup.pages == [self.model.pages[name] for name in lookup.chain]
        assert len(lookup.pages) * self.page_size <= max(0, len(tokens) - 1)
        self.lookups.append(lookup)
        return lookup

    def lock(self, lookup: Lookup) -> None:
        self.cache.lock(lookup.node)
        self.model.locks.update(lookup.chain)

    def unlock(self, lookup: Lookup) -> None:
        self.cache.unlock(lookup.node)
        self.model.unlock(lookup.chain)

    def insert(self, request: Borrower) -> None:
        back = self.cache.insert(request.tokens, request.pages)
        assert back == self.model.insert(request.tokens, request.pages)
        assert set(back) <= set(request.own)
        request.own = back

    @rule(data=st.data())
    def look_up(self, data: st.DataObject) -> None:
        self.match(self.draw_text(data))

    @precondition(lambda self: self.lookups)
    @rule(data=st.data())
    def lock_an_earlier_match(self, data: st.DataObject) -> None:
        """Eviction is detected, even if the text was cached again."""
        lookup = data.draw(st.sampled_from(self.lookups))
        if lookup.is_alive:
            self.lock(lookup)
            self.running.append(Borrower([], [], [], lookup))
        else:
            with pytest.raises(ValueError, match="evicted"):
                self.cache.lock(lookup.node)

    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        """A request without interruption."""
        num_running = len(self.running)
        self.admit(data)
        if len(self.running) > num_running:
            self.end(self.running.pop(), 1, unlock_first=False)

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        tokens = self.draw_text(data)
        lookup = self.match(tokens)
        self.lock(lookup)
        needed = self.pool.pages_for(len(tokens)) - len(lookup.chain)
        if needed > self.pool.num_free:
            self.evict(needed - self.pool.num_free)
        own = self.pool.allocate(needed)
        if own is None:
            self.unlock(lookup)
        else:
            self.running.append(Borrower(tokens, lookup.pages + own, own, lookup))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1))
    def publish(self, data: st.DataObject, token: int) -> None:
        """A prefilled request shares its prompt and continues."""
        request = data.draw(st.sampled_from(self.running))
        if not request.tokens:
            return
        self.insert(request)
        if len(request.tokens) < len(request.pages) * self.page_size:
            request.tokens.append(token)
        lookup = self.match([*request.tokens, token])
        self.lock(lookup)
        self.unlock(request.locked)
        request.locked = lookup

    @precondition(lambda self: self.running)
    @rule(data=st.data(), unlock_first=st.booleans())
    def finish(self, data: st.DataObject, unlock_first: bool) -> None:
        request = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.end(request, data.draw(st.integers(0, self.page_size)), unlock_first=unlock_first)

    def end(self, request: Borrower, num_output: int, *, unlock_first: bool) -> None:
        room = len(request.pages) * self.page_size - len(request.tokens)
        request.tokens += [1] * min(num_output, room)
        self.texts.append(request.tokens)
        if unlock_first:
            self.unlock(request.locked)
        self.insert(request)
        if not unlock_first:
            self.unlock(request.locked)
        self.pool.free(request.own)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        request = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.unlock(request.locked)
        self.pool.free(request.own)

    @rule(count=st.integers(-1, NUM_PAGES))
    def evict(self, count: int) -> None:
        """Exactly the least recently used pages are evicted, and never a locked one."""
        self.model.freed, self.pool.last_freed = [], []
        evicted = set(self.model.evict(count))
        assert self.cache.evict(count) == len(evicted)
        assert sorted(self.pool.last_freed) == sorted(self.model.freed)
        for lookup in self.lookups:
            lookup.is_alive &= evicted.isdisjoint(lookup.chain)

    @rule()
    def flush(self) -> None:
        unlocked = {name for name in self.model.pages if not self.model.locks[name]}
        assert self.cache.flush() == len(unlocked)
        assert set(self.model.evict(self.NUM_PAGES)) == unlocked
        for lookup in self.lookups:
            lookup.is_alive &= unlocked.isdisjoint(lookup.chain)

    @invariant()
    def every_page_has_one_owner(self) -> None:
        own = [page for request in self.running for page in request.own]
        places = [*own, *self.model.pages.values()]
        assert len(set(places)) == len(places)
        assert self.cache.num_pages == len(self.model.pages)
        assert self.pool.num_free + self.cache.num_pages + len(own) == self.NUM_PAGES - 1

    @invariant()
    def locks_protect_exactly_the_matched_pages(self) -> None:
        assert self.cache.num_evictable == sum(
            not self.model.locks[name] for name in self.model.pages
        )

    def teardown(self) -> None:
        for request in self.running:
            self.unlock(request.locked)
            self.pool.free(request.own)
        self.cache.flush()
        assert self.pool.num_free == self.NUM_PAGES - 1
        assert self.cache.num_pages == 0


TestCaching = pytest.mark.slow(Caching.TestCase)
TestCaching.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
