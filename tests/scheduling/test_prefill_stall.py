"""Prompts delay rounds for a limited time, on a device whose calls take a simulated time."""

from collections.abc import Sequence

import numpy as np
import pytest

from specjax.scheduling.prefill_times import PrefillTimes
from specjax.scheduling.request import Request
from specjax.scheduling.scheduler import MAX_BURST, Scheduler

from .devices import WIDTHS, Device, finish, requests_of, serve


def run_beside(
    device: Device, scheduler: Scheduler, others: Sequence[Request], num_tokens: int = 150
) -> list[float]:
    """Let three requests decode, then add others; return the stalls."""
    streams = requests_of(device, [300, 40, 20], num_tokens)
    scheduler.add(*streams)
    while len(streams[0].output_ids) < 4:
        scheduler.step()
    device.calls.clear()
    device.chunks.clear()
    scheduler.add(*others)
    finish(scheduler)
    assert all(len(r.output_ids) == r.max_new_tokens for r in (*streams, *others))
    assert sum(len(chunk.tokens) for chunk in device.chunks) == sum(
        len(request.input_ids) for request in others
    )
    return device.stalls()


@pytest.mark.parametrize("limit", [0.0, 0.015, 0.03])
@pytest.mark.parametrize("kind", ["burst", "long", "tiny", "scored"])
def test_decoding_requests_wait_for_at_most_the_limit(limit: float, kind: str) -> None:
    device = Device(128)
    lengths = {"burst": [400] * 20, "long": [5000], "tiny": [1] * 120, "scored": [60] * 20}[kind]
    others = requests_of(device, lengths, 2)
    if kind == "scored":
        scored = requests_of(device, lengths, 2, top_logprobs=0, logprob_start_len=0)
        others = [one for pair in zip(others, scored, strict=True) for one in pair]
    stalls = run_beside(device, serve(device, limit), others)
    assert 0 < max(stalls) <= max(limit, device.seconds(WIDTHS[0]))
    if kind in ("burst", "long") and limit == 0.03:  # and the limit is used
        assert max(stalls) == device.seconds(1024)


def test_without_a_limit_only_the_chunk_size_counts() -> None:
    device = Device(8)
    stalls = run_beside(device, serve(device, np.inf), requests_of(device, [5000], 2))
    assert max(stalls) == device.seconds(WIDTHS[-1])


def test_a_slower_device_gets_smaller_chunks() -> None:
    device = Device(8)
    scheduler = serve(device)
    run_beside(device, scheduler, requests_of(device, [5000], 2))
    device.slowdown = 4.0
    stalls = run_beside(device, scheduler, requests_of(device, [5000] * 4, 2), 300)
    assert stalls[0] > 0.1  # as fast as before would be less than 0.03 s
    assert max(stalls[20:]) <= 0.03
    device.slowdown = 1.0
    stalls = run_beside(device, scheduler, requests_of(device, [5000] * 4, 2), 300)
    assert max(stalls) == device.seconds(WIDTHS[-1])


def test_requests_that_start_together_decode_together() -> None:
    device = Device(32)
    scheduler = serve(device)
    scheduler.add(*requests_of(device, [500] * 32, 4))
    finish(scheduler)
    names = [name for name, _ in device.calls]
    # the last prompt may come alone
    assert names.index("round") >= names.count("prefill") - 1 > 10


def test_the_first_of_a_burst_do_not_wait_for_ever() -> None:
    device = Device(32)
    device.slowdown = 20.0  # 0.5 s per call of 1,024 tokens
    scheduler = serve(device)
    requests = requests_of(device, [500] * 32, 4)
    scheduler.add(*requests)
    finish(scheduler)
    names = [name for name, _ in device.calls]
    before = sum(seconds for _, seconds in device.calls[: names.index("round")])
    first = requests[0].first_token_time
    assert first is not None
    assert MAX_BURST <= before - first < MAX_BURST + 2 * device.seconds(WIDTHS[-1])


def test_a_new_caller_starts_with_the_next_free_slot() -> None:
    device = Device(4)
    scheduler = serve(device)
    batch = requests_of(device, [100] * 40, 8)
    (single,) = requests_of(device, [90], 8)
    scheduler.add(*batch, caller="batch")
    for _ in range(8):
        scheduler.step()
    started = sum(r.admitted_time is not None for r in batch)
    scheduler.add(single, caller="single")
    finish(scheduler)
    assert started < 10
    before = [r for r in batch if r.admitted_time < single.admitted_time]
    assert len(before) <= started + 1
    assert sorted(r.admitted_time for r in batch) == [r.admitted_time for r in batch]


def test_times_of_calls_are_estimated_from_those_measured() -> None:
    times = PrefillTimes((128, 256, 512, 1024))
    assert times.seconds(512) == np.inf
    assert times.widest_within(1.0) == 128  # nothing is known
    times.observe(256, 0.01)
    assert [times.seconds(w) for w in (128, 256, 512, 1024)] == [0.005, 0.01, 0.02, 0.04]
    assert times.widest_within(0.03) == 512
    times.observe(1024, 0.05)
    assert times.seconds(1024) == 0.04  # as four calls of 256
    for _ in range(8):
        times.observe(1024, 0.02)
    assert times.seconds(1024) == pytest.approx(0.02 + 0.03 * (15 / 16) ** 8)
    assert times.widest_within(0.001) == 128
    for _ in range(100):
        times.observe(256, 0.08)
    assert times.seconds(256) == pytest.approx(0.08, rel=0.01)


def test_a_host_that_reads_late_measures_no_short_calls() -> None:
    """Without a look at which results are ready, calls of 25 ms seem to take 11 ms."""
    device = Device(64)
    device.lateness = 0.02
    scheduler = serve(device)
    others = requests_of(device, [500] * 60, 40)
    stalls = run_beside(device, scheduler, others, 400)
    assert max(stalls) <= 0.03
    times = scheduler._in_flight.prefill_times
    for width in (512, 1024):
        assert times.seconds(width) >= 0.95 * device.seconds(width)
