"""A scheduler over the tiny runner, watched from outside while it works."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np

from specjax.adaptive import AdaptiveSpecPolicy, TierController
from specjax.runtime.runner import Dispatched, ModelRunner
from specjax.sampling.params import SamplingParams
from specjax.sampling.table import HostTables
from specjax.scheduling.request import Request
from specjax.scheduling.scheduler import Scheduler
from specjax.speculative.prefill import Chunk
from specjax.testing import TARGET
from specjax.types import NO_DRAFTS, DraftShape

from .runners import copied_runner, make_request

STEPS = 4


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Letters:
    """A decoder of one letter per token."""

    def push(self, ids: list[int]) -> str:
        return "".join(chr(0x100 + i) for i in ids)

    def flush(self) -> str:
        return ""


class WatchedRunner:
    """Checks what the scheduler dispatches against what is on the device.

    Attributes:
        calls: the names of the dispatches so far, in order.
        largest_batch: rows of the largest round.
    """

    def __init__(self, runner: ModelRunner, rows: Callable[[], list[Any]]) -> None:
        self._runner = runner
        self.config = runner.config
        self._rows = rows
        self.calls: list[str] = []
        self.largest_batch = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def prefill(self, chunks: Sequence[Chunk], **options: Any) -> Dispatched:
        slots = [chunk.slot for chunk in chunks]
        assert slots
        assert len(set(slots)) == len(slots)
        for chunk in chunks:
            end = chunk.start + len(chunk.tokens)
            self.check_pages(chunk.slot, chunk.start, end, is_prefill=True)
        self.calls.append("prefill")
        return self._runner.prefill(chunks, **options)

    def round(self, slots: Sequence[int], tier: DraftShape | None) -> Dispatched:
        writes = self._runner.config.kv_writes
        lengths = self.lengths()
        caps = {row.slot: row.request.max_kv_tokens + writes.tail for row in self._rows()}
        assert slots
        assert len(set(slots)) == len(slots)
        for slot in slots:
            length = int(lengths[slot])
            end = length + writes.after(writes.rounds)
            self.check_pages(slot, length, min(end, caps[slot]))
        self.calls.append("round")
        self.largest_batch = max(self.largest_batch, len(slots))
        return self._runner.round(slots, tier)

    def lengths(self) -> np.ndarray:
        """KV lengths by slot on the device after all dispatches so far."""
        return np.asarray(self._runner.on_device.future.seq_lens)

    def check_pages(self, slot: int, start: int, end: int, *, is_prefill: bool = False) -> None:
        """Check that positions ``[start, end)`` of a slot are in pages that no other slot has.

        Later prompts of the same call may read the pages that a prefill writes.
        """
        size, table = self._runner.config.page_size, self._runner.tables.page_tables[0]
        written = table[slot, start // size : -(-end // size)]
        assert written.all(), f"slot {slot} writes {start}..{end} without pages"
        others = table.copy()
        others[slot] = 0
        if is_prefill:
            for row in self._rows():
                others[row.slot, : row.num_shared] = 0
        assert not np.isin(written, others).any(), f"slot {slot} writes into pages of another"


class Forced(AdaptiveSpecPolicy):
    """A policy that takes given tiers in order and records what is reported to it."""

    tier = NO_DRAFTS

    def __init__(self, runner: ModelRunner, tiers: Iterator[DraftShape]) -> None:
        self.tiers, self._next = runner.config.shapes, tiers
        self.tier = self.tiers[0]
        self.reported: list[tuple[list[int], int, int]] = []  # counts, steps, batch
        self.seconds: list[float] = []

    def tier_for_batch(self, batch_size: int, *known: Any) -> DraftShape:
        assert batch_size == 4  # the padded batch
        self.tier = next(self._next)
        return self.tier

    def on_verify_complete(
        self, counts: Sequence[int], *, tier: DraftShape, batch_size: int, **others: Any
    ) -> bool:
        self.reported.append((list(counts), tier.steps, batch_size))
        self.seconds.append(others["record"].seconds)
        return False


def forced(runner: ModelRunner, tiers: Iterable[DraftShape]) -> TierController:
    """A controller that cycles through these tiers."""
    return TierController(Forced(runner, cycle(tiers)))


class Serving:
    """A scheduler over the tiny runner, with the given number of pages."""

    def __init__(
        self,
        *,
        num_steps: int = STEPS,
        rounds: int = 1,
        run_ahead: int = 0,
        num_pages: int = 0,
        is_cached: bool = False,
        runner: ModelRunner | None = None,
        **options: Any,
    ) -> None:
        self.runner = copied_runner(num_steps, rounds) if runner is None else runner
        config = self.runner.config
        # an earlier failed test may have left its slots in use
        self.runner.tables = HostTables(
            config.num_slots, config.pages_per_request, TARGET.vocab_size
        )
        self.watched = WatchedRunner(self.runner, lambda: self.rows)
        self.watched.config = replace(config, num_pages=num_pages or config.num_pages)
        self.scheduler = Scheduler(
            self.watched,  # type: ignore[arg-type]
            run_ahead=run_ahead,
            caches_prefixes=is_cached,
            **options,
        )
        self.allocator = self.scheduler._allocator
        self.cache = self.scheduler._budget.cache if is_cached else None

    @property
    def rows(self) -> list[Any]:
        return self.scheduler._running

    @property
    def running(self) -> list[Request]:
        return [row.request for row in self.rows]

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler._waiting)

    def add(
        self, prompts: Sequence[list[int]], params: SamplingParams, **options: Any
    ) -> list[Request]:
        requests = [
            make_request(prompt, params, seed=i, width=self.runner.config.largest.steps, **options)
            for i, prompt in enumerate(prompts)
        ]
        self.add_all(requests)
        return requests

    def add_all(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.scheduler.check(request)
            self.scheduler.add(request)

    def step(self) -> None:
        """Run a step, then check that each page has one owner."""
        self.scheduler.step()
        self.check_pages()

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()
        self.check_clean()

    def check_pages(self) -> None:
        """Each page is free, cached, or owned by one row; page tables match the rows' pages."""
        cached = set() if self.cache is None else self.cache._held
        free = set(self.allocator._free)
        own = [page for row in self.rows for page in row.pages[row.num_shared :]]
        shared = {page for row in self.rows for page in row.pages[: row.num_shared]}
        assert shared <= cached
        everything = [*free, *cached, *own]
        assert sorted(everything) == list(range(1, self.allocator.num_pages))
        table = np.zeros_like(self.runner.tables.page_tables[0])
        for row in self.rows:
            table[row.slot, : len(row.pages)] = row.pages
        np.testing.assert_array_equal(self.runner.tables.page_tables[0], table)

    def check_clean(self) -> None:
        """All pages are free or cached, no lock is left, and the host's tables are empty."""
        assert not self.rows
        self.check_pages()
        num_cached = 0
        if self.cache is not None:
            num_cached = self.cache.num_pages
            assert self.cache.num_evictable == num_cached
        assert self.allocator.num_free + num_cached == self.allocator.num_pages - 1
        tables = self.runner.tables
        assert not tables.page_tables[0].any()
        assert (tables.sampling["end_token_ids"] == -1).all()
        assert not tables.sampling["temperatures"].any()
        assert (tables.sampling["top_ks"] == TARGET.vocab_size).all()
        assert sorted(self.scheduler._free_slots) == list(range(1, self.runner.config.num_slots))


def check_identities(request: Request) -> None:
    """Check identities that hold for the metrics of any request."""
    meta = request.result()["meta_info"]
    histogram, verifies = meta["spec_correct_drafts_histogram"], meta["spec_verify_ct"]
    correct, proposed = meta["spec_num_correct_drafts"], meta["spec_num_proposed_drafts"]
    assert sum(histogram) == verifies
    assert sum(i * count for i, count in enumerate(histogram)) == correct
    assert 0 <= correct <= proposed <= verifies * (len(histogram) - 1)
    assert meta["spec_accept_rate"] == (correct / proposed if proposed else 0.0)
    assert meta["completion_tokens"] == len(request.output_ids)
    expected = len(request.output_ids) / verifies if verifies else 0.0
    assert meta["spec_accept_length"] == expected
