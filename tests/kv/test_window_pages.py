"""Window pages: what running requests read is there, in a simulation of the device."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.kv import window_pages
from specjax.kv.budget import PageBudget
from specjax.kv.holding import KVWrites, PageHolding
from specjax.kv.pages import PageAllocator
from specjax.kv.window_pages import WindowPages, pages_wanted
from specjax.types import DraftShape

CHUNK = 12  # maximum number of tokens in a prefill
CONTEXT = 64


@pytest.fixture(autouse=True, scope="module")
def _few_pages() -> Iterator[None]:
    """Few window pages, which are often taken back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_pages, "AHEAD_DISPATCHES", 2)
        patch.setattr(window_pages, "SPARE", 0.0)
        yield


@dataclass(eq=False)
class Row(PageHolding):
    """A running request, and the number of its tokens on the device after all dispatches."""

    device_len: int = 0

    @property
    def is_prefilled(self) -> bool:
        return self.kv_len >= len(self.prefill_ids)


class Device:
    """A pool of window pages that stores, instead of KV, the text on which it depends."""

    def __init__(self, num_slots: int, num_pages: int, size: int, window: int) -> None:
        self.size, self.window = size, window
        self.table = np.zeros((num_slots, 2 * CONTEXT), np.int32)
        self.pool: dict[int, Any] = {}

    def set_pages(self, slot: int, pages: Any, first: int) -> None:
        self.table[slot, first:] = 0

    def set_window_pages(self, slot: int, pages: Any, first: int) -> None:
        self.table[slot, first : first + len(pages)] = pages
        self.table[slot, first + len(pages) :] = 0

    def index(self, slot: int, position: int) -> int:
        page = self.table[slot, position // self.size]
        assert page, f"slot {slot} has no window page at {position}"
        return int(page) * self.size + position % self.size

    def write(self, slot: int, text: list[int], begin: int, end: int) -> None:
        for position in range(begin, end):
            self.pool[self.index(slot, position)] = tuple(text[: position + 1])

    def check(self, slot: int, text: list[int], begin: int) -> None:
        """Check what rows from position ``begin`` on read, up to the end of the text."""
        for position in range(max(0, begin - self.window + 1), len(text)):
            assert self.pool[self.index(slot, position)] == tuple(text[: position + 1])


class Simulation:
    """Serves texts of few tokens, so that many begin alike, as the scheduler does."""

    def __init__(
        self, seed: int, *, size: int, windows: Sequence[int], rounds: int, spare: bool
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.slots = 4
        self.writes = KVWrites.of([DraftShape.chain(0), DraftShape(2, 3, 6)], rounds)
        self.devices: list[Device] = []
        self.followers: list[WindowPages] = []
        for window in windows:
            sizes = {"num_requests": self.slots - 1, "chunk": CHUNK}
            count = pages_wanted(window, self.writes, size, **sizes)
            device = Device(self.slots, count, size, window)
            form = count, size, window, self.writes
            self.devices.append(device)
            self.followers.append(WindowPages(*form, device.set_window_pages))
        most = (self.slots - 1) * -(-(CONTEXT + self.writes.tail) // size)
        self.allocator = PageAllocator(1 + (most if spare else most // 2), size)
        self.budget = PageBudget(self.allocator, self.writes, self.set_pages, 0, self.followers)
        self.running: list[Row] = []
        self.unread: deque[list[tuple[Row, int]]] = deque()
        self.hits = self.trimmed = self.preempted = 0

    def set_pages(self, *entries: Any) -> None:
        for device in self.devices:
            device.set_pages(*entries)

    def write(self, *rows: Any) -> None:
        for device in self.devices:
            device.write(*rows)

    def check(self, *rows: Any) -> None:
        for device in self.devices:
            device.check(*rows)

    def step(self) -> None:
        if self.rng.random() < 0.6:
            self.prefill()
        if self.rng.random() < 0.8:
            self.round()
        while len(self.unread) > int(self.rng.integers(2)):
            self.read()
        if self.running and self.rng.random() < 0.1:
            self.release(self.running[int(self.rng.integers(len(self.running)))])
        pools = [each._allocator for each in self.followers]
        used = sum(pool.num_pages - 1 - pool.num_free for pool in pools)
        assert self.budget.num_window_tokens == used * self.allocator.page_size

    def admit(self) -> Row | None:
        free = sorted(set(range(1, self.slots)) - {row.slot for row in self.running})
        if not free:
            return None
        text = [0] * int(self.rng.integers(1, 40))
        text += self.rng.integers(2, size=int(self.rng.integers(1, 12))).tolist()
        row = Row(free[0], text, CONTEXT, len(text))
        whole = len(self.budget.cache.match(text)[1])
        if not self.budget.admit(row, self.running, self.budget.capacity(self.running)):
            return None
        self.hits += row.num_shared
        self.trimmed += whole - row.num_shared
        self.running.append(row)
        return row

    def prefill(self) -> None:
        """Dispatch chunks of prompts in one call; only the newest request may be unfinished."""
        budget, pieces, duplicates = CHUNK, [], []
        while budget:
            row = self.running[-1] if self.running else None
            if row is None or row.is_prefilled:
                row = self.admit()
            if row is None:
                break
            end = min(len(row.prefill_ids), row.kv_len + int(self.rng.integers(1, budget + 1)))
            self.budget.prepare_chunk(row, end, self.running)
            pieces.append((row, row.kv_len, end))
            budget -= end - row.kv_len
            row.kv_len = row.device_len = end
            if not row.is_prefilled:
                break
            if not self.budget.share(row, is_dispatched=False):
                duplicates.append(row)
        for row, begin, end in pieces:
            self.write(row.slot, row.prefill_ids, begin, end)
        for row, begin, end in pieces:
            self.check(row.slot, row.prefill_ids[:end], begin)
        self.budget.chunks_dispatched()
        for row in duplicates:
            self.budget.share(row, is_dispatched=True)

    def ready(self) -> list[Row]:
        rows = [row for row in self.running if row.is_prefilled]
        return [row for row in rows if row.device_len < CONTEXT - 1]

    def round(self) -> None:
        rows = self.ready()
        while rows and not self.budget.grow(rows, self.running):
            while self.unread:
                self.read()
            self.preempted += 1
            self.release(self.running[-1])
            rows = self.ready()
        for row in rows:
            text = row.prefill_ids
            for _ in range(self.writes.rounds):
                length = row.device_len
                drafts = min(self.writes.rows, CONTEXT + self.writes.tail - length)
                tree = [*text[:length], *[9] * drafts]
                self.write(row.slot, tree, length, len(tree))
                self.check(row.slot, tree, length)
                count = int(self.rng.integers(1, self.writes.accept_width + 1))
                row.device_len = min(length + count, CONTEXT - 1)
                text += [1] * (row.device_len - len(text))
                self.write(row.slot, text, length, row.device_len)
            row.unread_rounds += self.writes.rounds
        if rows:
            self.unread.append([(row, row.device_len) for row in rows])

    def read(self) -> None:
        for row, length in self.unread.popleft():
            row.unread_rounds -= self.writes.rounds
            row.kv_len = length

    def release(self, row: Row) -> None:
        self.running.remove(row)
        text = row.prefill_ids if row.is_prefilled else row.prefill_ids[: row.kv_len]
        self.budget.release(row, [*text, 1])
        for device in self.devices:
            device.table[row.slot] = 0

    def check_clean(self) -> None:
        while self.running:
            self.release(self.running[-1])
        self.budget.cache.flush()
        assert self.allocator.num_free == self.allocator.num_pages - 1
        for pool in (each._allocator for each in self.followers):
            assert pool.num_free == pool.num_pages - 1


@pytest.mark.parametrize("spare", [True, False])
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1, 2, 4]),
    windows=st.lists(st.integers(1, 20), min_size=1, max_size=2),
    rounds=st.sampled_from([1, 3]),
)
@settings(max_examples=60)
def test_rows_read_the_keys_of_their_own_text(spare, seed, size, windows, rounds) -> None:
    one = Simulation(seed, size=size, windows=windows, rounds=rounds, spare=spare)
    for _ in range(40):
        one.step()
    one.check_clean()


def test_simulations_meet_what_they_are_for() -> None:
    ones = [Simulation(seed, size=2, windows=[5], rounds=1, spare=False) for seed in range(20)]
    for one in ones:
        for _ in range(60):
            one.step()
    for name in ("hits", "trimmed", "preempted"):
        assert sum(getattr(one, name) for one in ones) > 0, name


class After:
    """A follower with which requests can continue after ``counts`` pages only."""

    def __init__(self, *counts: int) -> None:
        self.counts = counts

    def usable(self, pages: list[int]) -> int:
        return max(count for count in self.counts if count <= len(pages))

    def awaits(self, text: list[int], count: int) -> bool:
        return False

    def drop(self, pages: list[int]) -> None:
        """Has no pages."""


def test_a_cached_prefix_ends_where_all_followers_can_continue() -> None:
    allocator, writes = PageAllocator(20, 2), KVWrites.of([DraftShape.chain(0)], 1)
    followers: Any = [After(0, 1, 4), After(0, 1, 3)]
    budget = PageBudget(allocator, writes, lambda *_: None, 0, followers)
    text, pages = list(range(9)), allocator.allocate(4)
    budget.cache.insert(text, pages)
    row = Row(1, text, CONTEXT, len(text))
    assert budget.admit(row, [], budget.capacity([]))
    assert (row.num_shared, row.num_matched, row.pages[0]) == (1, 8, pages[0])


@pytest.mark.parametrize("system", [0, 40])
def test_the_windows_of_idle_texts_stay(system: int) -> None:
    """A conversation goes on after long texts, and another begins as earlier ones did."""
    one = Simulation(0, size=2, windows=[8], rounds=1, spare=True)
    most, writes = 3 * 200, one.writes
    allocator = PageAllocator(most, 2)
    count = pages_wanted(8, writes, 2, num_requests=3, chunk=CHUNK)
    windows = WindowPages(count, 2, 8, writes, lambda *_: None)
    budget = PageBudget(allocator, writes, lambda *_: None, 0, [windows])
    texts = [[*range(1, system + 1), *([i] * 100)] for i in range(1000, 1004)]
    cached = []
    for text in texts * 2:
        row = Row(1, text, len(text) + 20, len(text))
        assert budget.admit(row, [], budget.capacity([]))
        cached.append(row.num_cached)
        while not row.is_prefilled:
            end = min(len(text), row.kv_len + CHUNK)
            budget.prepare_chunk(row, end, [row])
            row.kv_len = end
            if row.is_prefilled:
                assert budget.share(row, is_dispatched=False)
            budget.chunks_dispatched()
        assert budget.grow([row], [row])
        text += [0, 0]  # the last token has no KV yet
        row.kv_len = len(text) - 1
        budget.release(row, text)
        text += [7] * 3
    # all but the first find where texts branch off
    assert cached[:4] == [0, system, system, system]
    assert cached[4:] == [system + 100] * 4
