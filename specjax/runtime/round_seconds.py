"""How long a round takes on this device, for every tier and batch bucket."""

import time
from collections.abc import Sequence

import jax
import numpy as np

from specjax.runtime.runner import UNLIMITED, ModelRunner

# Tokens in the pool of a measured row, where the context allows: attention takes its usual share.
CONTEXT = 512
SECONDS = 0.2
STRETCHES = 3
MOST_DISPATCHES = 20


def measure_round_seconds(runner: ModelRunner) -> dict[tuple[int, int], float]:
    """Seconds a round by (drafted tokens, batch bucket): the median of a few stretches.

    Rounds are dispatched without a read in between, as serving does. The rows are greedy, over
    zeroed or left-over KV, whose values do not change the time.

    Args:
        runner: compiled and loaded, without requests; afterwards it is as if nothing had happened,
            but for what the pages hold.
    """
    config = runner.config
    before = runner.speculative_num_steps
    seconds = {}
    for steps in config.tiers:
        runner.apply_runtime_state(runner.build_adaptive_runtime_state(steps, steps + 1))
        for bucket in config.batch_buckets:
            slots = range(1, min(bucket, config.num_slots - 1) + 1)
            seconds[steps, bucket] = _measure(runner, slots)
    runner.apply_runtime_state(runner.build_adaptive_runtime_state(before, before + 1))
    runner.reset_rows()
    for slot in range(1, config.num_slots):
        runner.clear_slot(slot)
    return seconds


def _measure(runner: ModelRunner, slots: Sequence[int]) -> float:
    config = runner.config
    advance = config.rounds_per_dispatch * (config.num_steps + 1)
    pages = min(config.pages_per_request, (config.num_pages - 1) // len(slots))
    room = pages * config.page_size
    # one row more than the warm-up and a stretch may fill
    filled = max(1, min(CONTEXT, room - 2 * advance))
    most = max(1, min(MOST_DISPATCHES, (room - filled) // advance - 2))

    def prepare() -> None:
        lens, remaining = np.zeros((2, config.num_slots), np.int32)
        for i, slot in enumerate(slots):
            lens[slot], remaining[slot] = filled, UNLIMITED
            runner.set_pages(slot, range(1 + i * pages, 1 + (i + 1) * pages))
        runner.reset_rows(lens, remaining)

    def run(count: int) -> float:
        prepare()
        runner.round(list(slots)).read()
        started = time.perf_counter()
        for _ in range(count):
            last = runner.round(list(slots))
        last.read()
        return (time.perf_counter() - started) / (count * config.rounds_per_dispatch)

    once = run(1) * config.rounds_per_dispatch
    count = max(1, min(most, round(SECONDS / STRETCHES / once)))
    times = [run(count) for _ in range(STRETCHES)]
    jax.block_until_ready(runner.pools)
    return float(np.median(times))
