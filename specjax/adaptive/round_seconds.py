"""How long a round takes on this device, for every tier and batch bucket."""

import time

import jax
import numpy as np

from specjax.runtime.runner import UNLIMITED, ModelRunner
from specjax.runtime.runner_config import RunnerConfig
from specjax.sampling.params import SamplingParams

# Tokens in the pool of a measured row, where the context allows: attention takes its usual share.
CONTEXT = 512
SECONDS = 0.25
STRETCHES = 5
MOST_DISPATCHES = 64
GREEDY = SamplingParams(temperature=0.0)


def measure_round_seconds(runner: ModelRunner) -> dict[tuple[int, int], float]:
    """Seconds a round by (drafted tokens, batch bucket): the median of a few stretches.

    Rounds are dispatched without a read in between, as serving does. The rows are greedy, over
    zeroed or left-over KV, whose values do not change the time. Every pair has a stretch before any
    has its next, so that what slows the device down for a while meets all of them.

    Args:
        runner: compiled and loaded, without requests; afterwards it is as if nothing had happened,
            but for what the pages hold.
    """
    config = runner.config
    before = runner.speculative_num_steps
    pairs = [(steps, bucket) for steps in config.tiers for bucket in config.batch_buckets]
    for slot in range(1, config.num_slots):
        runner.set_slot(slot, GREEDY, seed=0)
    counts = {pair: _stretch_length(runner, *pair) for pair in pairs}
    stretches = [
        {pair: _run(runner, *pair, counts[pair]) for pair in pairs} for _ in range(STRETCHES)
    ]
    runner.apply_runtime_state(runner.build_adaptive_runtime_state(before, before + 1))
    runner.reset_rows()
    for slot in range(1, config.num_slots):
        runner.clear_slot(slot)
    jax.block_until_ready(runner.pools)
    return {pair: float(np.median([times[pair] for times in stretches])) for pair in pairs}


def _stretch_length(runner: ModelRunner, steps: int, bucket: int) -> int:
    # the first dispatches of a function load it and capture its graphs
    _run(runner, steps, bucket, 1)
    once = _run(runner, steps, bucket, 1) * runner.config.rounds_per_dispatch
    most = _room(runner.config, bucket)[2]
    return max(1, min(most, round(SECONDS / STRETCHES / once)))


def _room(config: RunnerConfig, bucket: int) -> tuple[int, int, int]:
    """Pages and tokens of each row, and how many dispatches then have room."""
    advance = config.rounds_per_dispatch * (config.num_steps + 1)
    pages = min(config.pages_per_request, (config.num_pages - 1) // _num_rows(config, bucket))
    room = pages * config.page_size
    # one dispatch more than a stretch, to warm up
    filled = max(1, min(CONTEXT, room - 2 * advance))
    return pages, filled, max(1, min(MOST_DISPATCHES, (room - filled) // advance - 2))


def _num_rows(config: RunnerConfig, bucket: int) -> int:
    return min(bucket, config.num_slots - 1)


def _run(runner: ModelRunner, steps: int, bucket: int, count: int) -> float:
    """Seconds a round over ``count`` dispatches behind one that is not counted."""
    config = runner.config
    pages, filled, _ = _room(config, bucket)
    slots = list(range(1, _num_rows(config, bucket) + 1))
    lens, remaining = np.zeros((2, config.num_slots), np.int32)
    for i, slot in enumerate(slots):
        lens[slot], remaining[slot] = filled, UNLIMITED
        runner.set_pages(slot, range(1 + i * pages, 1 + (i + 1) * pages))
    runner.reset_rows(lens, remaining)
    runner.apply_runtime_state(runner.build_adaptive_runtime_state(steps, steps + 1))
    runner.round(slots).read()
    started = time.perf_counter()
    for _ in range(count):
        last = runner.round(slots)
    last.read()
    return (time.perf_counter() - started) / (count * config.rounds_per_dispatch)
