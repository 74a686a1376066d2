"""Measure how long rounds take, by tier, batch bucket and context."""

import logging
import time
from collections.abc import Iterator
from itertools import cycle, islice
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
PERIOD = 64  # tokens after which a measured text repeats: more than a round drafts
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
    Rows are greedy, and KV is zero or left over. Each dispatch starts from random tokens, different
    ones in all rows and dispatches: with zero KV, the rows would soon repeat the same tokens, for
    which a mixture reads few experts. Texts are periodic, so that NGRAM finds drafts. All tokens
    are uploaded before a stretch. Only the contents of pages change.
    """
    config = runner.config
    (short, long), buckets = contexts, config.batch_buckets
    vocab_size = runner.networks.target_config.vocab_size
    tokens = cycle(np.random.default_rng(0).permutation(vocab_size))
    for slot in range(1, config.num_slots):
        runner.set_slot(slot, GREEDY, seed=0)
        runner.record_text(slot, np.resize(_draw(tokens, PERIOD), min(1 + long, config.context)))
    held = config.num_pages * config.page_size // long  # requests of this length in the pool
    most = max((batch for batch in buckets if 1 < batch <= held), default=buckets[-1])
    points = [(pair, short) for pair in config.rounds]
    points += [((tier, most), long) for tier in config.shapes]
    times: dict[Any, list[float]] = {point: [] for point in points}
    before, last, read = None, None, 0.0
    for stretch in range(1 + STRETCHES):
        # the first dispatch of a function loads it and captures its CUDA graph
        count = DISPATCHES if stretch else 1
        for pair, context in points:
            slots, starts = _place(runner, pair[1], context, count, tokens)
            for number, rows in enumerate(starts):
                runner.set_rows(**rows)
                following = runner.round(slots, pair[0])
                if last is not None:
                    last.read()
                    now = time.perf_counter()
                    if before is not None:
                        times[before].append(now - read)
                    read = now
                # the last result of a stretch is read after the next batch is placed, which may
                # take the host longer than a round
                is_counted = stretch and number < count - 1
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


def _draw(tokens: Iterator[int], count: int) -> np.ndarray:
    return np.fromiter(islice(tokens, count), np.int32, count)


def _place(
    runner: ModelRunner, bucket: int, context: int, count: int, tokens: Iterator[int]
) -> tuple[range, list[dict[str, jax.Array]]]:
    """Give pages to a batch; return its slots, and the rows that ``count`` dispatches start from.

    A request has ``context`` tokens, or as many as fit, and one less in each dispatch than in the
    one before it: rounds write into the history after the text, which must stay periodic.
    """
    config = runner.config
    slots = range(1, min(bucket, config.num_slots - 1) + 1)
    pages = min(config.pages_per_request, (config.num_pages - 1) // len(slots))
    room = pages * config.page_size - config.kv_writes.after(config.rounds_per_dispatch)
    is_used = np.zeros(config.num_slots, np.int32)
    for slot in slots:
        is_used[slot] = 1
        runner.set_measured_pages(slot, pages)
    starts = [
        {
            "seq_lens": is_used * max(1, min(context, room) - number),
            "remaining": is_used * UNLIMITED,
            "bonus_tokens": _draw(tokens, config.num_slots),
        }
        for number in range(count)
    ]
    return slots, runner.networks.placement.put(starts)
