"""The prefix cache by hand-made cases, and as a state machine against a brute-force model."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specjax.kv.pages import PageAllocator
from specjax.kv.prefix_cache import Match, PrefixCache


class Pool(PageAllocator):
    """An allocator that remembers what was freed last."""

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
    """Insert a text as a request without a match would; returns the pages it had computed."""
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


def test_an_empty_cache_matches_nothing() -> None:
    cache, pool = make_cache()
    match = cache.match(text("a", "b"))
    assert match.pages == []
    assert match.num_tokens == 0
    cache.lock(match.node)
    cache.unlock(match.node)
    assert cache.insert([], []) == []
    assert cache.match([]).pages == []
    assert (cache.num_pages, cache.num_evictable, cache.evict(3), cache.flush()) == (0, 0, 0, 0)
    assert pool.num_free == 64


def test_the_longest_prefix_is_found() -> None:
    cache, pool = make_cache()
    pages = store(cache, pool, text("a", "b", "c", "d1"))
    assert cache.num_pages == len(pages) == 3
    match = cache.match(text("a", "b", "c", "d"))
    assert match.pages == pages
    assert match.num_tokens == 12
    assert cache.match(text("a", "b", "c2")).pages == pages[:2]
    assert cache.match(text("a", "x", "c", "d")).pages == []  # "b1" is part of the key of "a"
    assert cache.match(text("x", "b", "c", "d")).pages == []


def test_a_page_depends_on_the_token_behind_it_only_with_a_draft_head() -> None:
    for lookahead, expected in ((0, 2), (1, 1), (3, 1)):
        cache, pool = make_cache(lookahead=lookahead)
        pages = store(cache, pool, text("a", "b", "c"))
        assert cache.match(text("a", "b", "x")).pages == pages[:expected]
        assert cache.match(text("a", "b", "c")).pages == pages[:2]
    cache, pool = make_cache(lookahead=3)
    pages = store(cache, pool, text("a", "b", "c"))
    assert cache.match([*text("a", "b", "c2"), 0]).pages == pages[:1]
    assert cache.match(text("a", "b", "c3")).pages == pages[:2]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_match_leaves_one_token_to_prefill(lookahead: int) -> None:
    cache, pool = make_cache(lookahead=lookahead)
    pages = store(cache, pool, text("a", "b", "c1"))
    assert len(pages) == 2
    assert cache.match(text("a", "b", "c1")).pages == pages
    assert cache.match(text("a", "b")).pages == pages[:1]
    assert cache.match(text("a")).pages == []


@pytest.mark.parametrize(("lookahead", "taken"), [(0, 2), (1, 1)])
def test_a_page_without_its_lookahead_stays_with_the_caller(lookahead: int, taken: int) -> None:
    cache, pool = make_cache(lookahead=lookahead)
    pages = pool.take(3)
    assert cache.insert(text("a", "b"), pages) == pages[taken:]
    assert cache.num_pages == cache.num_full_pages(8) == taken


def test_fewer_pages_than_tokens_may_be_offered() -> None:
    cache, pool = make_cache()
    pages = pool.take(1)
    assert cache.insert(text("a", "b", "c", "d"), pages) == []
    assert cache.match(text("a", "b", "c", "d")).pages == pages


def test_duplicates_come_back_and_the_first_pages_stay() -> None:
    cache, pool = make_cache()
    first = store(cache, pool, text("a", "b", "c1"))
    second = pool.take(4)
    assert cache.insert(text("a", "b", "c", "d1"), second) == [*second[:2], second[3]]
    assert cache.match(text("a", "b", "c", "d", "e")).pages == [*first, second[2]]
    assert cache.num_pages == 3


def test_borrowed_pages_are_neither_taken_nor_returned() -> None:
    cache, pool = make_cache()
    pages = store(cache, pool, text("a", "b", "c1"))
    match = cache.match(text("a", "b", "c", "d"))
    own = pool.take(2)
    assert cache.insert(text("a", "b", "c", "d"), match.pages + own) == own[1:]
    # the text known so far ends with the borrowed pages: the last one lacks its lookahead
    assert cache.insert(text("a", "b"), pages) == []
    assert cache.num_pages == 3


@pytest.mark.parametrize("wrong", ["twice", "padding", "elsewhere", "shifted"])
def test_wrong_pages_are_refused_and_nothing_is_taken(wrong: str) -> None:
    cache, pool = make_cache()
    held = store(cache, pool, text("a", "b", "c1"))
    page = pool.take(1)[0]
    tokens = text("x", "y", "z") if wrong != "shifted" else text("a", "b", "c")
    pages = {
        "twice": [page, page],
        "padding": [page, 0],
        "elsewhere": [page, held[1]],
        "shifted": [held[1], page],
    }[wrong]
    with pytest.raises(ValueError, match="twice" if wrong in ("twice", "padding") else "another"):
        cache.insert(tokens, pages)
    assert cache.num_pages == cache.num_evictable == 2
    assert cache.match(text("a", "b", "c")).pages == held


def test_texts_part_at_a_page_border() -> None:
    cache, pool = make_cache()
    trunk = store(cache, pool, text("a", "b", "c", "d", "e1"))
    tokens = text("a", "b", "c2", "x2", "y", "z1")
    pages = pool.take(4)
    # "b" is shared; the third page differs within
    assert cache.insert(tokens, pages) == pages[:2]
    assert cache.match(text("a", "b", "c", "d", "e")).pages == trunk
    assert cache.match([*tokens, 0]).pages == trunk[:2] + pages[2:]
    assert cache.num_pages == 6


def test_the_least_recently_used_text_goes_first_from_its_end() -> None:
    cache, pool = make_cache()
    ab = store(cache, pool, text("a", "b", "c1"))
    xy = store(cache, pool, text("x", "y", "z1"))
    cache.match(text("a", "b", "c"))
    assert cache.evict(1) == 1
    assert pool.last_freed == [xy[1]]
    assert cache.evict(2) == 2
    assert set(pool.last_freed) == {xy[0], ab[1]}
    assert cache.evict(9) == 1
    assert cache.num_pages == 0
    assert pool.num_free == 64


def test_an_interior_node_can_go_when_its_children_are_gone() -> None:
    cache, pool = make_cache(lookahead=0)
    trunk = store(cache, pool, text("a", "b"))
    left = store(cache, pool, text("a", "b", "l"))[2:]
    store(cache, pool, text("q", "r"))
    cache.match(text("a", "b", "m"))  # the trunk is used last, its branch first
    assert cache.evict(1) == 1
    assert pool.last_freed == left
    assert cache.evict(2) == 2
    assert not set(pool.last_freed) & set(trunk)
    assert cache.evict(2) == 2
    assert set(pool.last_freed) == set(trunk)


def test_locked_pages_stay() -> None:
    cache, pool = make_cache()
    pages = store(cache, pool, text("a", "b", "c", "d1"))
    match = cache.match(text("a", "b", "x"))  # "b" is not matched: its key has "c1"
    cache.lock(match.node)
    cache.lock(match.node)
    assert match.pages == pages[:1]
    assert cache.num_evictable == 2
    assert cache.flush() == 2
    assert cache.evict(1) == 0
    cache.unlock(match.node)
    assert cache.num_evictable == 0
    cache.unlock(match.node)
    assert cache.num_evictable == 1
    with pytest.raises(ValueError, match="not locked"):
        cache.unlock(match.node)
    assert cache.flush() == 1
    assert pool.num_free == 64


def test_locks_of_a_text_and_of_its_start_are_counted_apart() -> None:
    cache, pool = make_cache(lookahead=0)
    pages = store(cache, pool, text("a", "b", "c", "d"))
    whole = cache.match(text("a", "b", "c", "d", "e"))
    cache.lock(whole.node)
    half = cache.match(text("a", "b", "x"))
    cache.lock(half.node)
    assert (half.pages, cache.num_evictable) == (pages[:2], 0)
    cache.unlock(whole.node)
    assert cache.num_evictable == 2
    assert cache.flush() == 2
    assert set(pool.last_freed) == set(pages[2:])
    with pytest.raises(ValueError, match="not locked"):
        cache.unlock(whole.node)
    cache.unlock(half.node)
    assert cache.flush() == 2


def test_a_match_can_be_locked_after_other_texts_parted_from_it() -> None:
    cache, pool = make_cache(lookahead=0)
    pages = store(cache, pool, text("a", "b", "c", "d"))
    whole = cache.match(text("a", "b", "c", "d", "e"))
    store(cache, pool, text("a", "x"))
    cache.match(text("a", "b", "y"))
    cache.lock(whole.node)
    assert cache.flush() == 1
    assert cache.match(text("a", "b", "c", "d", "e")).pages == pages


@pytest.mark.parametrize("count", [1, 4])
def test_a_match_whose_pages_were_evicted_cannot_be_locked(count: int) -> None:
    cache, pool = make_cache(lookahead=0)
    store(cache, pool, text("a", "b", "c", "d"))
    whole, half = cache.match(text("a", "b", "c", "d", "e")), cache.match(text("a", "b", "x"))
    cache.evict(count)
    with pytest.raises(ValueError, match="evicted"):
        cache.lock(whole.node)
    if count == 1:
        cache.lock(half.node)
        assert cache.num_evictable == 1
    else:
        with pytest.raises(ValueError, match="evicted"):
            cache.lock(half.node)


def test_a_released_text_was_used_until_then_and_what_eviction_left_keeps_its_age() -> None:
    cache, pool = make_cache(lookahead=0)
    old = store(cache, pool, text("a", "b"))
    match = cache.match(text("a", "b", "c"))
    cache.lock(match.node)
    young = store(cache, pool, text("x", "y"))
    assert cache.evict(1) == 1
    assert pool.last_freed == young[1:]
    cache.unlock(match.node)
    assert cache.evict(2) == 2
    assert set(pool.last_freed) == {young[0], old[1]}


def test_use_without_eviction_keeps_every_text_evictable() -> None:
    cache, pool = make_cache(lookahead=0)
    store(cache, pool, text("a", "b"))
    match = cache.match(text("a", "b", "c"))
    cache.lock(match.node)
    hot = store(cache, pool, text("x", "y"))
    for _ in range(1_000):
        cache.match(text("x", "y", "z"))
    cache.unlock(match.node)
    cache.match(text("x", "y", "z"))
    assert cache.evict(2) == 2
    assert not set(pool.last_freed) & set(hot)
    assert cache.flush() == 2


def test_unlock_does_not_take_the_lock_of_a_longer_match() -> None:
    cache, pool = make_cache(lookahead=0)
    store(cache, pool, text("a", "b", "c", "d"))
    whole, half = cache.match(text("a", "b", "c", "d", "e")), cache.match(text("a", "b", "x"))
    cache.lock(whole.node)
    with pytest.raises(ValueError, match="not locked"):
        cache.unlock(half.node)
    assert cache.num_evictable == 0


def test_a_wrong_lookahead_is_refused() -> None:
    with pytest.raises(ValueError, match="lookahead=-1"):
        PrefixCache(PageAllocator(4, 4), lookahead=-1)


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_page_sizes(page_size: int, lookahead: int) -> None:
    cache, pool = make_cache(page_size, lookahead)
    tokens = list(range(7 * page_size + lookahead))
    pages = store(cache, pool, tokens)
    assert len(pages) == 7
    tokens.append(7 * page_size + lookahead)
    for length in range(0, len(tokens) + 1, max(1, page_size // 2)):
        match = cache.match(tokens[:length])
        assert match.pages == pages[: max(0, length - 1) // page_size]
        assert match.num_tokens == len(match.pages) * page_size
    assert cache.flush() == 7
    assert pool.num_free == 64


def test_a_deep_tree_needs_no_recursion() -> None:
    depth = 2_000
    cache, pool = make_cache(1, 1, depth + 1)
    tokens = list(range(depth + 1))
    pages = store(cache, pool, tokens)
    for length in range(depth, 1, -1):
        cache.match(tokens[:length])
    match = cache.match(tokens)
    assert match.pages == pages
    cache.lock(match.node)
    assert cache.evict(depth) == 0
    cache.unlock(match.node)
    assert cache.evict(depth // 2) == depth // 2
    assert pool.last_freed == pages[: depth // 2 - 1 : -1]
    assert cache.flush() == depth // 2


@pytest.mark.parametrize("shape", ["wide", "long"])
def test_ten_thousand_pages_one_at_a_time(shape: str) -> None:
    """A scan of the cache in every call would take 10^8 steps; the time allowed is 30-fold."""
    count = 10_000
    cache, pool = make_cache(2, 1, count + 1)
    texts = [[i, i, i] for i in range(count)] if shape == "wide" else [list(range(2 * count + 1))]
    start = time.process_time()
    order = [page for tokens in texts for page in store(cache, pool, tokens)]
    hot = texts[0][:3]
    for _ in range(count):
        match = cache.match(hot)
        cache.lock(match.node)
        cache.unlock(match.node)
    evicted = []
    while cache.evict(1):
        evicted += pool.last_freed
    assert time.process_time() - start < 5
    assert evicted == ([*order[1:], order[0]] if shape == "wide" else order[::-1])


class Model:
    """What the cache must do, page by page; a page is named by all tokens that it depends on."""

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
        """The cached chain up to ``count`` pages, stamped as used now."""
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
        """Returns what goes back to the caller."""
        known = self.use(tokens, len(pages))
        chain = self.chain(tokens, len(pages))
        back = [page for name, page in zip(known, pages, strict=False) if self.pages[name] != page]
        for name, page in list(zip(chain, pages, strict=False))[len(known) :]:
            self.pages[name], self.last_used[name] = page, self.clock
        return back + pages[len(chain) :]

    def unlock(self, chain: list[tuple[int, ...]]) -> None:
        """Pages that are released for good were used until now."""
        self.clock += 1
        self.locks.subtract(chain)
        self.last_used |= {name: self.clock for name in chain if not self.locks[name]}

    def evict(self, count: int) -> list[tuple[int, ...]]:
        """Take out pages one by one, each the least recently used one that none follows."""
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
    """A match, the names of its pages, and whether all of them have stayed in the cache since."""

    match: Match
    chain: list[tuple[int, ...]]
    is_alive: bool = True


@dataclass
class Borrower:
    """A request: its text, its pages in order, those that are its own, and what it has locked."""

    tokens: list[int]
    pages: list[int]
    own: list[int]
    locked: Lookup


class Caching(RuleBasedStateMachine):
    """Requests that come, publish, go and are given up, over a pool that is often too small."""

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
        """A prefix of an earlier text, cut anywhere, and something new behind it."""
        known = data.draw(st.sampled_from(self.texts))
        tokens = known[: data.draw(st.sampled_from([len(known), *range(len(known))]))]
        runs = st.tuples(st.integers(0, 1), st.sampled_from([self.page_size] * 3 + [1]))
        for token, length in data.draw(st.lists(runs, min_size=1, max_size=5)):
            tokens += [token] * length
        tokens = tokens[: 7 * self.page_size]
        self.texts.append(tokens)
        return list(tokens)

    def match(self, tokens: list[int]) -> Lookup:
        lookup = Lookup(self.cache.match(tokens), self.model.match(tokens))
        assert lookup.match.pages == [self.model.pages[name] for name in lookup.chain]
        num_tokens = len(lookup.chain) * self.page_size
        assert lookup.match.num_tokens == num_tokens <= max(0, len(tokens) - 1)
        self.lookups.append(lookup)
        return lookup

    def lock(self, lookup: Lookup) -> None:
        self.cache.lock(lookup.match.node)
        self.model.locks.update(lookup.chain)

    def unlock(self, lookup: Lookup) -> None:
        self.cache.unlock(lookup.match.node)
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
        """Eviction is noticed, even if the text came back since."""
        lookup = data.draw(st.sampled_from(self.lookups))
        if lookup.is_alive:
            self.lock(lookup)
            self.running.append(Borrower([], [], [], lookup))
        else:
            with pytest.raises(ValueError, match="evicted"):
                self.cache.lock(lookup.match.node)

    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        """A request that nothing interrupts."""
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
            self.running.append(Borrower(tokens, lookup.match.pages + own, own, lookup))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1))
    def publish(self, data: st.DataObject, token: int) -> None:
        """A prefilled request lets others use its prompt, and runs on."""
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
        """Exactly the least recently used pages go, and never a locked one."""
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
    def every_page_has_one_place(self) -> None:
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


TestCaching = Caching.TestCase
TestCaching.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
