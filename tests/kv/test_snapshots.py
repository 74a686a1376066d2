"""Snapshots: texts continue from their own states, in a simulation of the device."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.kv.budget import PageBudget
from specjax.kv.holding import KVWrites, PageHolding
from specjax.kv.pages import PageAllocator
from specjax.kv.snapshots import Snapshots
from specjax.scheduling.in_flight import PromptPiece, last_multiple
from specjax.types import DraftShape

SLOTS, CONTEXT, CHUNK = 5, 96, 30
PLAIN = KVWrites.of([DraftShape.chain(0)], 1)


@dataclass(eq=False)
class Row(PageHolding):
    """A running request."""

    @property
    def is_prefilled(self) -> bool:
        return self.kv_len >= len(self.prefill_ids)


class Simulation:
    """Serves texts that begin alike; the pool of states stores the text of each state."""

    def __init__(
        self, seed: int, *, size: int = 2, step: int = 4, lookahead: int = 0, count: int = 4
    ) -> None:
        self.rng, self.step_size = np.random.default_rng(seed), step
        self.allocator = PageAllocator(1 + (SLOTS - 1) * (CONTEXT // size + 1), size)
        self.slots = range(SLOTS, SLOTS + count)
        self.snapshots = Snapshots(self.slots, size, step, lookahead)
        form = self.allocator, PLAIN, lambda *_: None, lookahead, [self.snapshots]
        self.budget = PageBudget(*form)
        self.pool: dict[int, Any] = {}
        self.running: list[Row] = []
        self.hits = self.branches = self.taken = self.waits = 0

    def check_slots(self) -> None:
        """Each slot has one owner, and snapshots hold the states at the ends of their pages."""
        mapped, free = self.snapshots._page_map, self.snapshots._free
        assert sorted([*mapped.values(), *free]) == list(self.slots)
        for row in self.running:
            for index, page in enumerate(row.pages, start=1):
                if page in mapped:
                    end = index * self.allocator.page_size
                    assert self.pool[mapped[page]] == tuple(row.prefill_ids[:end])

    def admit(self) -> Row | None:
        free = sorted(set(range(1, SLOTS)) - {row.slot for row in self.running})
        if not free:
            return None
        text = [0] * int(self.rng.integers(1, 60))
        text += self.rng.integers(2, size=int(self.rng.integers(1, 20))).tolist()
        row = Row(free[0], text, CONTEXT, len(text))
        if not self.budget.admit(row, self.running, self.budget.capacity(self.running)):
            assert self.budget.waits
            self.waits += 1
            return None
        self.hits += row.num_cached > 0
        self.branches += row.num_matched > row.num_cached
        self.running.append(row)
        return row

    def prefill(self, *, is_lost: bool) -> None:
        """Prepare chunks, and dispatch them in calls with little room if no error comes first."""
        budget, pieces, duplicates = CHUNK, [], []
        while budget > 0:
            row = self.running[-1] if self.running else None
            if row is None or row.is_prefilled:
                row = self.admit()
            if row is None:
                break
            if (end := row.kv_len + budget) < len(row.prefill_ids):
                end = last_multiple(row.kv_len, end, self.step_size)
            end = min(end, len(row.prefill_ids))
            self.budget.prepare_chunk(row, end, self.running)
            pieces.append((row, row.kv_len, end))
            budget = budget - (end - row.kv_len) if end == len(row.prefill_ids) else 0
            row.kv_len = end
            if row.is_prefilled and not self.budget.share(row, is_dispatched=False):
                duplicates.append(row)
        if is_lost:
            while self.running:
                self.release(self.running[-1], is_cached=False)
            self.budget.cache.flush()
            return
        for row, start, end in pieces:
            while start < end:
                piece: Any = PromptPiece(row, start, end)  # type: ignore[arg-type]
                stop = piece.cut(int(self.rng.integers(1, CHUNK + 1)), self.step_size)
                self.compute(row, start, stop)
                start = stop
        self.budget.chunks_dispatched()
        for row in duplicates:
            self.budget.share(row, is_dispatched=True)

    def compute(self, row: Row, start: int, end: int) -> None:
        """A call: states are kept at most once, after whole groups or all tokens."""
        text = tuple(row.prefill_ids)
        is_hit = start == row.num_cached > 0
        if start:
            assert self.pool[row.state_source if is_hit else row.slot] == text[:start]
        kept = {at: slot for at, slot in row.kept_states.items() if start < at <= end}
        assert len(kept) <= 1
        for at, slot in kept.items():
            assert (at - start) % self.step_size == 0 or at == end
            self.pool[slot] = text[:at]
            self.taken += 1
        self.pool[row.slot] = text[:end]

    def release(self, row: Row, *, is_cached: bool = True) -> None:
        """End a request, maybe in the middle of its prompt."""
        self.running.remove(row)
        if is_cached and row.is_prefilled:
            row.kv_len += int(self.rng.integers(0, CONTEXT - row.kv_len))
        text = [*row.prefill_ids[: row.kv_len], *[1] * (row.kv_len + 1 - len(row.prefill_ids))]
        self.budget.release(row, text if is_cached else None)

    def step(self) -> None:
        chance = self.rng.random()
        self.prefill(is_lost=chance < 0.02)
        self.check_slots()
        if self.running and chance > 0.4:
            self.release(self.running[int(self.rng.integers(len(self.running)))])
        if chance > 0.8:
            self.budget.cache.evict(int(self.rng.integers(1, 30)))
        self.check_slots()


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1, 2, 4]),
    step=st.sampled_from([1, 4, 8]),
    lookahead=st.sampled_from([0, 1, 3]),
    count=st.integers(1, 6),
)
@settings(max_examples=60)
def test_texts_continue_from_their_own_states(seed, size, step, lookahead, count) -> None:
    one = Simulation(seed, size=size, step=step, lookahead=lookahead, count=count)
    for _ in range(40):
        one.step()
    while one.running:
        one.release(one.running[-1])
    one.budget.cache.flush()
    assert sorted(one.snapshots._free) == list(one.slots)
    assert one.allocator.num_free == one.allocator.num_pages - 1


def test_simulations_meet_what_they_are_for() -> None:
    ones = [Simulation(seed) for seed in range(10)]
    for one in ones:
        for _ in range(40):
            one.step()
    for name in ("hits", "branches", "taken", "waits"):
        assert sum(getattr(one, name) for one in ones) > 20, name


def serve(budget: PageBudget, text: list[int], answer: list[int]) -> int:
    """Serve a prompt alone, and keep its text; return the number of its tokens that were cached."""
    row = Row(1, text, len(text) + len(answer), len(text))
    assert budget.admit(row, [], budget.capacity([]))
    budget.prepare_chunk(row, len(text), [row])
    row.kv_len = len(text)
    is_shared = budget.share(row, is_dispatched=False)
    budget.chunks_dispatched()
    assert is_shared or budget.share(row, is_dispatched=True)
    assert budget.grow([row], [row])
    row.kv_len = len(text) + len(answer) - 1  # the last token has no KV yet
    budget.release(row, [*text, *answer])
    return row.num_cached


def test_the_branch_and_the_end_of_a_prompt_have_snapshots() -> None:
    """The third text continues where the second left the first, the last where the first ended."""
    allocator = PageAllocator(200, 4)
    budget = PageBudget(allocator, PLAIN, lambda *_: None, 0, [Snapshots(range(5, 15), 4, 8, 0)])
    common = [0] * 30
    texts = [[*common, *[i] * 50] for i in (1, 2, 3)]
    cached = [serve(budget, text, [5]) for text in [*texts, [*texts[0], 6]]]
    assert cached == [0, 0, 24, 72]


def test_long_beginnings_are_compared_only_if_what_follows_is_equal() -> None:
    """With 32 prompts in a dispatch, comparing all of 100,000 tokens takes 30 ms each time."""
    common, size = [0] * 100_000, 100_000 // 4
    snapshots = Snapshots(range(1, 65), 4, 4, 0)
    for slot in range(32):
        text = [*common, *[slot] * 8]
        row = Row(slot, text, len(text), len(text), pages=list(range(len(text) // 4)))
        row.num_matched = row.kv_len = len(common)
        snapshots.prepare_chunk(row, len(text), [])
    started = time.process_time()
    for _ in range(10):
        assert not snapshots.awaits([*common, *[32] * 8], size)
    assert time.process_time() - started < 0.1
    assert snapshots.awaits([*common, *[31] * 8], size)
    assert not snapshots.awaits([1, *common[1:], *[31] * 8], size)
    assert snapshots.awaits([*common, *[31] * 8], size - 9)


def test_what_a_chat_has_left_behind_is_taken_back_first() -> None:
    """Others take the snapshot before the last turn, then a text's end, not the branch of all."""
    snapshots = Snapshots(range(5, 9), 4, 8, 0)
    budget = PageBudget(PageAllocator(200, 4), PLAIN, lambda *_: None, 0, [snapshots])
    common = [0] * 30
    texts = [[*common, *[i] * 46] for i in (1, 2)]
    later = [[*texts[1], 5, *[3] * 20], [4] * 20, [*common, 6]]
    assert [serve(budget, text, [5]) for text in [*texts, *later]] == [0, 0, 72, 0, 24]
    assert serve(budget, [*texts[1], 7], [5]) == 24
    assert serve(budget, [7] * 20, [5]) == 0
    assert serve(budget, [*common, 8], [5]) == 24
    assert len(snapshots._free) == 0


def chats(rng: np.random.Generator, is_kept: bool) -> Any:
    """Turns of chats, interleaved: prompts of 20 chats with 2 system prompts, and answers.

    Later prompts have the whole answers if these are kept, else without a reasoning before them.
    """

    def draw(low: int, high: int) -> list[int]:
        return rng.integers(10, 1000, size=int(rng.integers(low, high))).tolist()

    systems = [draw(300, 600), draw(1000, 2000)]
    waiting = [[*systems[i % 2], *draw(20, 200)] for i in range(20)]
    for _ in range(160):
        chat = waiting.pop(int(rng.integers(8)))
        reasoning, answer = [] if is_kept else draw(100, 600), draw(50, 300)
        yield [*chat, 1], [*reasoning, *answer]
        waiting.append([*chat, 2, *answer, 3, *draw(20, 200)])


def hit_rate(turns: Any, num_snapshots: int | None) -> float:
    """Share of prompt tokens that are cached, with a pool of 40,000 tokens."""
    followers = []
    if num_snapshots is not None:
        followers = [Snapshots(range(1, 1 + num_snapshots), 16, 64, 0)]
    budget = PageBudget(PageAllocator(2500, 16), PLAIN, lambda *_: None, 0, followers)
    pairs = [(len(text), serve(budget, text, answer)) for text, answer in turns]
    return sum(cached for _, cached in pairs) / sum(length for length, _ in pairs)


@pytest.mark.parametrize("is_kept", [True, False])
def test_chats_hit_nearly_as_often_as_without_states(is_kept: bool) -> None:
    turns = list(chats(np.random.default_rng(0), is_kept))
    dense, states, few = (hit_rate(turns, count) for count in (None, 32, 8))
    assert dense > 0.8
    assert dense - 0.05 < states < dense
    assert few < states
