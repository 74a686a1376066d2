"""How an engine chooses its drafted tokens: policy, controller, and what a round takes."""

import logging
import time
from itertools import product

import jax
import numpy as np

from specjax.adaptive import (
    AdaptiveController,
    AdaptiveSpecPolicy,
    AdaptiveSpeculativeParams,
    CostAwarePolicy,
)
from specjax.checks import check_number
from specjax.engine.args import EngineArgs
from specjax.runtime.runner import ModelRunner
from specjax.sampling.params import SamplingParams
from specjax.speculative.prefill import UNLIMITED
from specjax.types import DraftShape

logger = logging.getLogger(__name__)

ROUND_SECONDS = "round_seconds"
# Tokens in the pool of a measured row, where the context allows: attention takes its usual share.
CONTEXT = 512
SECONDS = 0.25
STRETCHES = 5
MOST_DISPATCHES = 64
GREEDY = SamplingParams(temperature=0.0)


def make_controller(args: EngineArgs, runner: ModelRunner) -> AdaptiveController | None:
    """What adapts a compiled and loaded runner; ``None`` where nothing does."""
    config, first = args.adaptive, args.shape.steps
    if config is None or not runner.config.batch_buckets:
        return None
    policy: AdaptiveSpecPolicy
    if config.policy == "ema":
        policy = AdaptiveSpeculativeParams(first, config, runner.config.shapes)
    else:
        policy = CostAwarePolicy(round_seconds(runner), first, config)
    return AdaptiveController(None, policy)


def round_seconds(runner: ModelRunner) -> dict[tuple[DraftShape, int], float]:
    """Seconds of a round by (tier, batch bucket), measured once and kept beside the functions."""
    cache = runner.compiled.cache
    keys = {(tier, batch): f"tier {tier}, batch {batch}" for tier, batch in _pairs(runner)}
    kept = None if cache is None else cache.load_json(ROUND_SECONDS)
    if kept is not None:
        try:
            return {pair: check_number(k, kept.get(k), above=0) for pair, k in keys.items()}
        except ValueError as error:
            logger.warning("the kept round times are measured again: %s", error)
    seconds = measure_round_seconds(runner)
    for pair, key in keys.items():
        logger.info("round of %s: %.2f ms", key, 1e3 * seconds[pair])
    if cache is not None:
        cache.store_json(ROUND_SECONDS, {key: seconds[pair] for pair, key in keys.items()})
    return seconds


def _pairs(runner: ModelRunner) -> list[tuple[DraftShape, int]]:
    return list(product(runner.config.shapes, runner.config.batch_buckets))


def measure_round_seconds(runner: ModelRunner) -> dict[tuple[DraftShape, int], float]:
    """Seconds a round by (tier, batch bucket): the median of a few stretches.

    Rounds are dispatched without a read in between, as serving does. The rows are greedy, over
    zeroed or left-over KV, whose values do not change the time. Every pair has a stretch before any
    has its next, so that what slows the device down for a while meets all of them. The runner has
    no requests; afterwards it is as before, but for what the pages hold.
    """
    config, pairs = runner.config, _pairs(runner)
    for slot in range(1, config.num_slots):
        runner.set_slot(slot, GREEDY, seed=0)
    counts = {}
    for pair in pairs:
        # the first dispatches of a function load it and capture its graphs
        _run(runner, *pair, 1)
        once = _run(runner, *pair, 1) * config.rounds_per_dispatch
        counts[pair] = max(1, round(SECONDS / STRETCHES / once))
    stretches = [
        {pair: _run(runner, *pair, counts[pair]) for pair in pairs} for _ in range(STRETCHES)
    ]
    runner.reset_rows()
    for slot in range(1, config.num_slots):
        runner.clear_slot(slot)
    jax.block_until_ready(runner.on_device)
    return {pair: float(np.median([times[pair] for times in stretches])) for pair in pairs}


def _run(runner: ModelRunner, tier: DraftShape, bucket: int, count: int) -> float:
    """Seconds a round over up to ``count`` dispatches behind one that is not counted."""
    config = runner.config
    slots = range(1, min(bucket, config.num_slots - 1) + 1)
    pages = min(config.pages_per_request, (config.num_pages - 1) // len(slots))
    room = pages * config.page_size
    advance = config.kv_writes.after(config.rounds_per_dispatch)
    filled = max(1, min(CONTEXT, room - 2 * advance))
    # as many as the pages hold, less the one to warm up
    count = max(1, min(count, MOST_DISPATCHES, (room - filled) // advance - 2))
    lens, remaining = np.zeros((2, config.num_slots), np.int32)
    for slot in slots:
        lens[slot], remaining[slot] = filled, UNLIMITED
        runner.set_pages(slot, range(1 + (slot - 1) * pages, 1 + slot * pages))
    runner.reset_rows(lens, remaining)
    runner.round(slots, tier).read()
    started = time.perf_counter()
    for _ in range(count):
        last = runner.round(slots, tier)
    last.read()
    return (time.perf_counter() - started) / (count * config.rounds_per_dispatch)
