"""Measure how long rounds take, by tier, batch bucket and context."""

import logging
import time
from typing import Any

import jax
import numpy as np

from specjax.checks import check_number
from specjax.runtime.runner import ModelRunner
from specjax.sampling.params import SamplingParams
from specjax.speculative.prefill import UNLIMITED
from specjax.types import DraftShape

logger = logging.getLogger(__name__)

Contexts = tuple[int, int]  # a short and a long one, in tokens per request
Times = dict[tuple[DraftShape, int], list[float]]  # by tier and batch bucket, at both contexts

ROUND_SECONDS = "round_seconds"
# round times are medians over stretches of this many dispatches: 3 s for six buckets (8B, H200)
STRETCHES, DISPATCHES = 2, 3
GREEDY = SamplingParams(temperature=0.0)


def round_seconds(runner: ModelRunner, contexts: Contexts) -> Times:
    """Return seconds per round, which are measured if they are not cached."""
    cache, config = runner.compiled.cache, runner.config
    keys = {(tier, batch): f"tier {tier}, batch {batch}" for tier, batch in config.rounds}
    cached = None if cache is None else cache.load_json(ROUND_SECONDS)
    if cached is not None:
        try:
            return {
                pair: [check_number(k, x, above=0) for x in cached.get(k) or [None]]
                for pair, k in keys.items()
            }
        except (ValueError, TypeError) as error:
            logger.warning("measuring round times again: cached ones are invalid: %s", error)
    seconds = measure_round_seconds(runner, contexts)
    for pair, key in keys.items():
        figures = " and ".join(f"{1e3 * value:.2f}" for value in seconds[pair])
        logger.info("round of %s: %s ms with %d and %d tokens", key, figures, *contexts)
    if cache is not None:
        cache.store_json(ROUND_SECONDS, {key: seconds[pair] for pair, key in keys.items()})
    return seconds


def measure_round_seconds(runner: ModelRunner, contexts: Contexts) -> Times:
    """Measure seconds per round of each tier and bucket; the runner must have no requests.

    A round's time is the time between two results, and each result is read after the next dispatch,
    as in serving. A figure is the median of several stretches. The measurements take turns stretch
    by stretch, so a temporary slowdown of the device affects all of them. At the longer context,
    only the largest bucket that fits is measured: reading KV takes time in proportion to the batch.
    Rows are greedy with different last tokens, and KV is zero or left over: values of KV do not
    affect the time. Only the contents of pages change.
    """
    config = runner.config
    for slot in range(1, config.num_slots):
        runner.set_slot(slot, GREEDY, seed=0)
    (short, long), buckets = contexts, config.batch_buckets
    held = config.num_pages * config.page_size // long  # requests of this length in the pool
    most = max((batch for batch in buckets if 1 < batch <= held), default=buckets[-1])
    points = [(pair, short) for pair in config.rounds]
    points += [((tier, most), long) for tier in config.shapes]
    times: dict[Any, list[float]] = {point: [] for point in points}
    before, last, read = None, None, 0.0
    for stretch in range(1 + STRETCHES):
        for pair, context in points:
            slots, count = _place(runner, *pair, context)
            # the first dispatch of a function loads it and captures its CUDA graph
            count = count if stretch else 1
            for number in range(count):
                following = runner.round(slots, pair[0])
                if last is not None:
                    last.read()
                    now = time.perf_counter()
                    if before is not None:
                        times[before].append(now - read)
                    read = now
                # the last result of a stretch is read after the next batch is placed, which may
                # take the host longer than a round
                is_counted = stretch and (number < count - 1 or count == 1)
                before, last = (pair, context) if is_counted else None, following
    runner.reset_rows()
    for slot in range(1, config.num_slots):
        runner.clear_slot(slot)
    jax.block_until_ready(runner.on_device)
    costs = {at: float(np.median(times[at])) / config.rounds_per_dispatch for at in points}
    added = {tier: costs[(tier, most), long] - costs[(tier, most), short] for tier in config.shapes}
    return {
        (tier, batch): [value, value + max(0.0, added[tier]) * batch / most]
        for ((tier, batch), context), value in costs.items()
        if context == short
    }


def _place(runner: ModelRunner, tier: DraftShape, bucket: int, context: int) -> tuple[range, int]:
    """Give a batch ``context`` tokens per request, or as many as fit; return its slots.

    Also return the number of dispatches that its pages have room for, up to ``DISPATCHES``.
    """
    config = runner.config
    slots = range(1, min(bucket, config.num_slots - 1) + 1)
    pages = min(config.pages_per_request, (config.num_pages - 1) // len(slots))
    room, advance = pages * config.page_size, config.kv_writes.after(config.rounds_per_dispatch)
    filled = max(1, min(context, room - (DISPATCHES + 1) * advance))
    lens, remaining = np.zeros((2, config.num_slots), np.int32)
    for slot in slots:
        lens[slot], remaining[slot] = filled, UNLIMITED
        runner.set_measured_pages(slot, pages)
    runner.reset_rows(lens, remaining)
    return slots, max(1, min(DISPATCHES, (room - filled) // advance - 1))
