"""Metrics of an engine: events to totals, totals to Prometheus, both against ``meta_info``."""

import gc
import json
import re
import threading
import time
import weakref
from typing import Any

import jax
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from specjax.engine.args import EngineArgs
from specjax.engine.plan import plan_engine
from specjax.metrics import (
    FIRST_TOKEN_BOUNDS,
    FIRST_VERIFIES,
    INTER_TOKEN_BOUNDS,
    LATENCY_BOUNDS,
    MARKS_A_WINDOW,
    WINDOW_SECONDS,
    EngineMetrics,
    Histogram,
    Throughput,
    Totals,
)
from specjax.sampling.params import SamplingParams
from specjax.testing import STEPS
from specjax.types import DraftShape

from ..support.runners import make_request
from ..support.schedulers import Clock


def exposed(registry: Any) -> dict[str, float]:
    """All samples of the exposition text: ``name`` or ``name{label}`` without ``model_name``."""
    samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            rest = ",".join(f"{k}={v}" for k, v in labels.items())
            key = sample.name.removeprefix("specjax:") + (f"{{{rest}}}" if rest else "")
            assert key not in samples
            samples[key] = sample.value
    return samples


def test_a_bound_counts_the_values_up_to_it():
    histogram = Histogram((1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 1), (2.5, 3)):
        histogram.observe(value, times)
    assert histogram.counts == [3, 1, 3]
    assert histogram.total == 0.5 + 2 * 1.0 + 1.5 + 3 * 2.5


def test_throughput_is_of_the_window_and_leaves_out_time_without_work():
    speed = Throughput(window=5.0)
    assert speed.rate(0.0, 0) == 0.0
    speed.resume(100.0)
    total = 0
    for step in range(1, 101):  # ten seconds of 10 tokens/s
        total += 1
        speed.advance(100.0 + step / 10, total, has_work=step < 100)
    assert speed.rate(110.0, total) == pytest.approx(10.0)
    assert not speed.is_idle(114.9)
    assert speed.is_idle(115.0)
    assert speed.rate(1000.0, total) == pytest.approx(10.0)  # idle time changes nothing
    speed.resume(2000.0)
    for step in range(1, 26):  # half a window at four times the speed
        total += 4
        speed.advance(2000.0 + step / 10, total, has_work=True)
    assert speed.rate(2002.5, total) == pytest.approx((10 + 40) / 2, rel=1 / MARKS_A_WINDOW)
    assert speed.rate(2008.0, total) == 0.0  # no tokens for a window
    assert len(speed._marks) < 60


def test_throughput_starts_with_work_that_no_admission_announced():
    speed = Throughput(window=5.0)
    speed.advance(1000.0, 0, has_work=True)
    speed.advance(1001.0, 7, has_work=False)
    assert speed.rate(1001.0, 7) == pytest.approx(7.0)


def test_events_become_metrics():
    clock = Clock()
    totals = Totals(clock=clock, max_total_tokens=100)
    registry = EngineMetrics("m", totals).registry
    totals.request_admitted(10, 4, 0.25)
    totals.prefilled_tokens += 5
    totals.prefilled_tokens += 1
    totals.queue_changed(1, 2, 40)
    samples = exposed(registry)
    assert (samples["num_running_reqs"], samples["num_queue_reqs"]) == (1, 2)
    assert (samples["num_used_tokens"], samples["max_total_num_tokens"]) == (40, 100)
    assert samples["token_usage"] == 0.4
    assert "max_window_num_tokens" not in samples
    totals.max_window_tokens = 48
    totals.queue_changed(1, 2, 40, 24)
    samples = exposed(registry)
    assert (samples["num_used_window_tokens"], samples["max_window_num_tokens"]) == (24, 48)
    totals.time_to_first_token.observe(0.5)
    totals.tokens_generated(1, None)
    clock.now += 0.004
    totals.tokens_generated(4, 0.004)
    totals.drafts_verified(3, [(2, 2)], 2047)
    totals.drafts_verified(5, [(1, 2), (0, 0)], 8192)
    assert totals.snapshot().accepted_by_position == [2, 1]
    totals.num_retracted += 1
    totals.request_admitted(15, 12, None)
    totals.prefilled_tokens += 3
    totals.queue_changed(0, 0, 0)
    totals.request_finished("length", 2.0, 7, 3)
    totals.request_finished("abort", 50.0, 7, 3)
    samples = exposed(registry)
    assert samples["prompt_tokens_total"] == 10
    assert samples["cached_tokens_total"] == 4
    assert samples["realtime_tokens_total{mode=prefill_compute}"] == 6 + 3
    assert samples["realtime_tokens_total{mode=prefill_cache}"] == 4 + 12
    assert samples["realtime_tokens_total{mode=decode}"] == 5
    assert samples["generation_tokens_total"] == 5
    assert samples["cache_hit_rate"] == 0.4
    assert samples["spec_verify_calls_total"] == 3
    assert samples["spec_proposed_drafts_total"] == 8
    assert samples["spec_accepted_drafts_total"] == 3
    assert samples["spec_accept_length"] == 2.0
    assert samples["spec_accept_rate"] == 3 / 8
    lengths = {"0-2047": 3.0, "2048-8191": 0.0, "8192+": 1.5}
    for context, length in lengths.items():
        assert samples[f"spec_context_accept_length{{context={context}}}"] == length
    assert totals.snapshot().accept_length_by_context == lengths
    assert samples["spec_context_verify_calls_total{context=8192+}"] == 2
    assert samples["spec_context_accepted_drafts_total{context=8192+}"] == 1
    assert samples["num_retracted_requests_total"] == 1
    assert samples["num_requests_total"] == 2
    assert samples["num_aborted_requests_total"] == 1
    assert samples["queue_time_seconds_sum"] == 0.25
    assert samples["time_to_first_token_seconds_count"] == 1
    # four tokens at once: each took a quarter of the time
    assert samples["inter_token_latency_seconds_count"] == 4
    assert samples["inter_token_latency_seconds_sum"] == pytest.approx(0.004)
    assert samples["inter_token_latency_seconds_bucket{le=0.001}"] == 4
    assert samples["inter_token_latency_seconds_bucket{le=0.0008}"] == 0
    assert samples["inter_token_latency_seconds_bucket{le=+Inf}"] == 4
    assert samples["e2e_request_latency_seconds_sum"] == 2.0
    assert samples["gen_throughput"] == pytest.approx(5 / 0.004)
    clock.now += WINDOW_SECONDS
    assert exposed(registry)["gen_throughput"] == 0.0
    assert totals.snapshot().last_gen_throughput == pytest.approx(5 / 0.004)


@pytest.mark.slow
def test_a_snapshot_is_of_one_moment():
    """Pairs are written while snapshots are taken: no snapshot may see half of a pair."""
    totals = Totals()
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            totals.drafts_verified(3, [(3, 3)], 9)
            totals.tokens_generated(2, 0.001)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            now = totals.snapshot()
            assert now.num_proposed_drafts == now.num_accepted_drafts == 3 * now.num_verifies
            assert now.accepted_by_context["0-2047"] == now.num_accepted_drafts
            assert sum(now.inter_token_latency.counts) == now.generated_tokens
            time.sleep(0)
    finally:
        is_over.set()
        writer.join()
    assert totals.snapshot().num_verifies > 0


def test_tier_metrics_exist_if_rounds_draft():
    totals = Totals(drafts=True, tier=DraftShape(2, 4, 7))
    registry = EngineMetrics("m", totals).registry
    samples = exposed(registry)
    assert samples["spec_num_steps"] == 2
    assert samples["spec_num_draft_tokens"] == 7
    assert "spec_ema_accept_len" not in samples
    for tier, rows in ((DraftShape(2, 4, 7, packed=3), 3), (DraftShape.chain(0), 1)):
        totals.tier = tier
        assert exposed(registry)["spec_num_draft_tokens"] == rows
    plain = exposed(EngineMetrics("m", Totals()).registry)
    assert not {"spec_num_steps", "spec_num_draft_tokens", "spec_num_switches_total"} & set(plain)


def test_adaptive_metrics_exclude_the_bonus_token():
    totals = Totals(drafts=True, adapts=True, ema_accept_len=1.5, num_switches=2, wasted_drafts=3)
    registry = EngineMetrics("m", totals).registry
    samples = exposed(registry)
    assert samples["spec_ema_accept_len"] == 1.5
    assert samples["spec_num_switches_total"] == 2
    assert samples["spec_wasted_drafts_total"] == 3
    text = generate_latest(registry).decode()
    (line,) = [line for line in text.splitlines() if "HELP specjax:spec_ema_accept_len" in line]
    assert "excludes the bonus token, which spec_accept_length includes" in line


def test_rows_and_positions_follow_from_the_verified_drafts():
    totals = Totals(drafts=True, depth=3, chains=True, rows_by_proposed=[5, 4, 0, 2])
    registry = EngineMetrics("m", totals).registry
    samples = exposed(registry)
    assert samples["spec_verified_rows_total"] == 5 + 2 * 4 + 4 * 2
    by_position = [samples[f"spec_verified_drafts_total{{position={i}}}"] for i in range(3)]
    assert by_position == [6, 2, 2]
    past = totals.snapshot()
    totals.rows_by_proposed[3] += 1
    assert past.verified_by_position == [6, 2, 2]
    totals.chains = False  # nodes of a tree are not in the order of positions
    samples = exposed(registry)
    assert samples["spec_verified_rows_total"] == 25
    assert not [name for name in samples if name.startswith("spec_verified_drafts")]


def test_what_no_policy_reports_is_left_out():
    state: dict[str, Any] = {"num_rounds": 5, "num_plain_rounds": 2}
    registry = EngineMetrics("m", Totals(drafts=True, adapts=True, adaptive=lambda: state)).registry
    samples = exposed(registry)
    assert (samples["spec_rounds_total"], samples["spec_plain_rounds_total"]) == (5, 2)
    names = "spec_expected_tokens_total", "spec_realised_tokens_total", "spec_calibration_error"
    assert not samples.keys() & set(names)
    state |= {"expected_tokens": 3.5, "realised_tokens": 3.0}
    samples = exposed(registry)
    assert (samples[names[0]], samples[names[1]]) == (3.5, 3.0)
    assert names[2] not in samples
    state["calibration_error"] = 0.0
    assert exposed(registry)[names[2]] == 0.0


def test_experts_are_those_of_rounds_that_read_some():
    totals = Totals(is_mixture=True)
    registry = EngineMetrics("m", totals).registry
    names = "experts_read_per_layer", "experts_read_total", "expert_rounds_total"
    assert [exposed(registry)[name] for name in names] == [0.0, 0.0, 0.0]
    totals.experts_read([3.5, 0.0])
    totals.experts_read([8.0])
    assert [exposed(registry)[name] for name in names] == [5.75, 11.5, 2.0]
    assert not set(names) & set(exposed(EngineMetrics("m", Totals()).registry))


def test_names_and_types_stay():
    """Dashboards query them."""
    adaptive = {"expected_tokens": 1.0, "realised_tokens": 1.0, "calibration_error": 0.1}
    has = {"drafts": True, "chains": True, "adapts": True, "is_mixture": True}
    totals = Totals(**has, adaptive=lambda: adaptive)
    text = generate_latest(EngineMetrics("m", totals).registry).decode()
    assert '\nspecjax:num_running_reqs{model_name="m"} 0.0\n' in text
    families = re.findall(r"^# TYPE specjax:(\S+) (\S+)$", text, re.MULTILINE)
    by_kind = {kind: {n for n, k in families if k == kind} for kind in {k for _, k in families}}
    gauges = (
        "num_running_reqs num_queue_reqs num_used_tokens max_total_num_tokens token_usage "
        "gen_throughput cache_hit_rate spec_accept_length spec_accept_rate spec_num_steps "
        "spec_num_draft_tokens spec_ema_accept_len spec_calibration_error experts_read_per_layer "
        "spec_context_accept_length"
    )
    counters = (
        "prompt_tokens cached_tokens generation_tokens realtime_tokens num_requests "
        "num_aborted_requests num_retracted_requests spec_verify_calls spec_proposed_drafts "
        "spec_accepted_drafts spec_verified_rows spec_verified_drafts spec_num_switches "
        "spec_wasted_drafts spec_rounds spec_plain_rounds spec_expected_tokens "
        "spec_realised_tokens experts_read expert_rounds spec_context_verify_calls "
        "spec_context_accepted_drafts"
    )
    histograms = "queue_time time_to_first_token inter_token_latency e2e_request_latency"
    assert by_kind == {
        "gauge": set(gauges.split()),
        "counter": {f"{name}_total" for name in counters.split()},
        "histogram": {f"{name}_seconds" for name in histograms.split()},
    }


@pytest.mark.parametrize("bounds", [FIRST_TOKEN_BOUNDS, INTER_TOKEN_BOUNDS, LATENCY_BOUNDS])
def test_bounds_ascend(bounds):
    assert list(bounds) == sorted(set(bounds))


# engines


@pytest.fixture(scope="module")
def run(files):
    """A speculative engine small enough to retract, and the results of its first requests."""
    with jax.numpy_dtype_promotion("strict"):
        engine = files.engine(max_total_tokens=44, chunked_prefill_size=1)
        prompts = [[7, 8, 9, 10, 11, 12], [7, 8, 9, 10, 11, 12, 13], [20, 21], [30, 31, 32]]
        sampling = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
        results = engine.generate(input_ids=prompts, sampling_params=sampling)
        results += engine.generate(input_ids=prompts[:2], sampling_params=sampling)
        results.append(
            engine.generate(input_ids=prompts[3], sampling_params=sampling, timeout=1e-9)
        )
        yield engine, results
        engine.close()


def total(results: list[dict[str, Any]], name: str) -> int:
    return sum(result["meta_info"][name] for result in results)


@pytest.mark.slow
def test_counters_are_the_sums_of_the_results(run):
    engine, results = run
    samples = exposed(engine.metrics.registry)
    served = results[:-1]
    assert results[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert samples["generation_tokens_total"] == total(results, "completion_tokens")
    assert samples["prompt_tokens_total"] == total(served, "prompt_tokens")
    assert samples["cached_tokens_total"] == total(results, "cached_tokens") > 0
    assert samples["spec_verify_calls_total"] == total(results, "spec_verify_ct") > 0
    assert samples["spec_accepted_drafts_total"] == total(results, "spec_num_correct_drafts") > 0
    assert samples["spec_proposed_drafts_total"] == total(results, "spec_num_proposed_drafts")
    verifies = total(results, "spec_verify_ct")  # each of the root and all drafts
    assert samples["spec_verified_rows_total"] == (1 + STEPS) * verifies
    for position in range(STEPS):
        assert samples[f"spec_verified_drafts_total{{position={position}}}"] == verifies
    assert samples["num_retracted_requests_total"] == total(results, "num_retractions") > 0
    assert samples["num_requests_total"] == len(results)
    assert samples["num_aborted_requests_total"] == 1
    assert samples["time_to_first_token_seconds_count"] == len(served)
    assert samples["time_to_first_token_seconds_sum"] == pytest.approx(
        total(served, "time_to_first_token")
    )
    assert samples["queue_time_seconds_sum"] == pytest.approx(total(served, "queue_time"))
    assert samples["e2e_request_latency_seconds_count"] == len(served)
    assert samples["e2e_request_latency_seconds_sum"] == pytest.approx(total(served, "e2e_latency"))
    not_first = total(results, "completion_tokens") - len(served)
    assert samples["inter_token_latency_seconds_count"] == not_first
    assert samples["num_running_reqs"] == samples["num_queue_reqs"] == 0
    assert samples["num_used_tokens"] == 0


def test_a_retracted_request_is_prefilled_again_but_counted_once(run):
    engine, results = run
    samples = exposed(engine.metrics.registry)
    prefilled = sum(
        samples[f"realtime_tokens_total{{mode={mode}}}"]
        for mode in ("prefill_compute", "prefill_cache")
    )
    assert prefilled > samples["prompt_tokens_total"] == total(results[:-1], "prompt_tokens")


def test_server_info(run, files):
    engine, results = run
    info = json.loads(json.dumps(engine.get_server_info()))
    assert info["model_path"] == str(files.target)
    assert info["speculative_algorithm"] == "EAGLE3"
    assert info["context_length"] == engine.context_length == info["max_req_input_len"] + 1
    assert info["page_size"] == 4
    assert info["max_running_requests"] == 2
    assert info["max_total_num_tokens"] == 44
    assert info["speculative_num_steps"] == STEPS
    assert info["speculative_eagle_topk"] == 1
    assert info["speculative_num_draft_tokens"] == STEPS + 1
    assert exposed(engine.metrics.registry)["spec_num_draft_tokens"] == STEPS + 1
    assert isinstance(info["version"], str)
    (state,) = info["internal_states"]
    verifies = total(results, "spec_verify_ct")
    accepted = total(results, "spec_num_correct_drafts")
    assert state["avg_spec_accept_length"] == 1 + accepted / verifies
    assert state["spec_verify_ct"] == verifies
    assert state["spec_verified_rows"] == (1 + STEPS) * verifies
    assert state["spec_verified_drafts"] == [verifies] * STEPS
    assert state["speculative_num_steps"] == STEPS
    assert state["num_retracted_requests"] == total(results, "num_retractions")
    assert state["cached_tokens"] == total(results, "cached_tokens")
    assert state["last_gen_throughput"] > 0
    assert state["num_running_reqs"] == state["num_queue_reqs"] == state["num_used_tokens"] == 0
    assert "adaptive" not in state
    usage = state["memory_usage"]
    weights = jax.tree.leaves(engine.runner.weights)
    assert usage["weight"] * 1e9 == pytest.approx(sum(w.nbytes for w in weights))
    pools = jax.tree.leaves(engine.runner.on_device.pools)
    assert usage["kvcache"] * 1e9 == pytest.approx(sum(pool.nbytes for pool in pools))
    assert usage["token_capacity"] == 44


@pytest.mark.parametrize(
    ("accepted", "checks", "warns"),
    [([0, 0, 0, 0, 1], True, False), ([0, 0, 0, 0, 0, 1], True, True), ([0], False, False)],
)
def test_rarely_accepted_drafts_cause_one_warning(accepted, checks, warns, caplog):
    totals = Totals(checks_acceptance=checks)
    for _ in range(3 * FIRST_VERIFIES):
        if totals.num_verifies < FIRST_VERIFIES:
            assert not caplog.records
        totals.drafts_verified(len(accepted), [(n, n) for n in accepted], 9)
    assert len(caplog.records) == warns
    if warns:
        message = caplog.records[0].getMessage()
        for cause in ("target layers shifted by one", "layout", "rope style"):
            assert cause in message
        assert re.search(r"first 20[0-5] verify passes is 1\.1[67]", message)


@pytest.mark.parametrize(("end", "limit"), [((), 2), ((5,), 9)], ids=["length", "end token"])
@pytest.mark.parametrize(("most", "warns"), [(3, False), (1, True)])
def test_short_requests_do_not_look_like_bad_drafts(end, limit, most, warns, caplog):
    """Rounds that are cut count with all drafts that were accepted."""
    totals = Totals(checks_acceptance=True)
    for i in range(FIRST_VERIFIES):
        num_accepted = most if i % 6 == 0 else 0
        request = make_request([7], SamplingParams(max_new_tokens=limit), width=3, ends=end)
        request.append_first(1)
        tokens = [5, 2, 3, 4][: num_accepted + 1]
        request.append_round(tokens, 3, num_accepted, DraftShape.chain(3))
        assert request.is_finished
        totals.drafts_verified(*request.spec.take_new(), 9)
    assert totals.accept_length == pytest.approx(1.17)
    assert len(caplog.records) == warns


@pytest.mark.parametrize(
    ("changes", "checks"),
    [
        ({}, True),
        ({"load_format": "dummy"}, False),
        ({"simulate_accept_length": 2.0}, False),
        ({"simulate_acceptance": 0.0}, False),
        ({"speculative_algorithm": "NGRAM", "draft": None}, False),
        ({"speculative": False}, False),
    ],
)
def test_only_trained_drafts_are_checked(changes, checks, files):
    plan = plan_engine(EngineArgs(**files.arguments(**changes)))
    assert plan.has_trained_draft == checks


@pytest.mark.slow
def test_two_engines_do_not_clash(run, files):
    engine, results = run
    with files.small(speculative=False, share_weights_with=engine) as plain:
        one = plain.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 3})
        samples = exposed(plain.metrics.registry)
        info = plain.get_server_info()
        (state,) = info["internal_states"]
    assert samples["generation_tokens_total"] == one["meta_info"]["completion_tokens"]
    assert samples["spec_verify_calls_total"] == samples["spec_accept_length"] == 0
    assert "avg_spec_accept_length" not in state
    assert "speculative_num_steps" not in state
    assert info["speculative_num_steps"] is None
    assert "spec_num_steps" not in samples
    samples = exposed(engine.metrics.registry)
    assert samples["generation_tokens_total"] == total(results, "completion_tokens")


def test_aborting_the_last_request_empties_the_gauges(run):
    engine, _ = run
    sampling = {"temperature": 0.0, "max_new_tokens": 30, "ignore_eos": True}
    stream = engine.generate(input_ids=[3, 4], sampling_params=sampling, stream=True)
    next(stream)
    assert engine.metrics.snapshot().checks_acceptance
    assert engine.metrics.snapshot().num_running == 1
    assert engine.metrics.snapshot().num_used_tokens > 0
    stream.close()
    engine._loop.run(lambda: None)
    now = engine.metrics.snapshot()
    assert (now.num_running, now.num_waiting, now.num_used_tokens) == (0, 0, 0)


def test_a_served_registry_does_not_keep_its_engine(files):
    with files.small(speculative=False) as engine:
        registry = engine.metrics.registry
        runner = weakref.ref(engine.runner)
    del engine
    gc.collect()
    assert runner() is None
    assert exposed(registry)["num_requests_total"] == 0
