"""The benchmark of a mixed load: its load, its statistics, and runs with an engine that waits."""

import asyncio
import importlib.util
import json

import numpy as np
import pytest

from ..loading import load_bench, run_bench
from .fake_engine import FakeEngine

script = load_bench("serving_mix")
NAME = "serving_mix"
TABLE_LINES = [2 + 2, 2 + 4]


class FakeServer(FakeEngine):
    """Streams chunks of two tokens, and refuses prompts that fill its context."""

    aborted: tuple[int, ...] = ()  # prompt lengths whose requests end after their first chunk
    context_length = 40

    async def async_generate(self, *, input_ids, sampling_params, stream):
        assert stream
        assert sampling_params["ignore_eos"]
        whole = self._answer(input_ids, sampling_params["max_new_tokens"])
        return self._chunks(whole["meta_info"] | {"queue_time": 0.0, "e2e_latency": 0.003})

    async def _chunks(self, meta):
        count = meta["completion_tokens"]
        for seen in range(2, count + 2, 2):
            await asyncio.sleep(0.001)
            reason = meta["finish_reason"] if seen >= count else None
            if meta["prompt_tokens"] in self.aborted:
                reason = {"type": "abort", "message": "too slow"}
            yield {
                "output_ids": [],
                "meta_info": meta
                | {"completion_tokens": min(seen, count), "finish_reason": reason},
            }
            if reason is not None:
                return


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr("specjax.Engine", FakeServer)
    monkeypatch.setattr(FakeServer, "made", [], raising=False)
    return FakeServer


LOAD = "--prompt-len 3,9 --long-prompt-len 30 --output-len 4,8 --max-running-requests 4"


def parse(text: str = ""):
    return script.parse_arguments(NAME, text.split())


def run(arguments: str, output) -> tuple[int, dict]:
    status = run_bench(NAME, f"{LOAD} --output {output} {arguments}")
    (line,) = output.read_text().splitlines()
    return status, json.loads(line)


# load


def test_a_seed_gives_the_stated_mix():
    load = script.make_load(parse(), 1000, 200, 7)
    assert load == script.make_load(parse(), 1000, 200, 7)
    assert load != script.make_load(parse(), 1000, 200, 8)
    long_ones = [len(r.input_ids) for r in load if r.is_long]
    short_ones = [len(r.input_ids) for r in load if not r.is_long]
    assert long_ones == 10 * [4096]
    assert 100 <= min(short_ones) < 130
    assert 570 < max(short_ones) <= 600
    outputs = [r.sampling["max_new_tokens"] for r in load]
    assert 64 <= min(outputs) < 75
    assert 245 < max(outputs) <= 256
    sampled = [r.sampling for r in load if r.sampling["temperature"] > 0]
    assert len(sampled) == 100
    assert all(s["temperature"] == 0.8 and s["top_p"] == 0.95 for s in sampled)
    assert sum(s.get("top_k") == 50 for s in sampled) == 50
    assert len({r.sampling["sampling_seed"] for r in load}) == 200
    assert all(0 <= min(r.input_ids) and max(r.input_ids) < 1000 for r in load)
    json.dumps([r.sampling for r in load])


def test_arrivals_are_a_poisson_process_of_the_rate():
    arrivals = script.make_arrivals(4.0, 4000, 3)
    assert arrivals == script.make_arrivals(4.0, 4000, 3)
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0.0
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 4, rel=0.05)
    assert np.diff(script.make_arrivals(8.0, 4000, 3)) == pytest.approx(gaps / 2)


# statistics


def test_summary():
    found = script.summary([0.001, 0.002, 0.003, 0.01])
    values = {"mean": 4.0, "p50": 2.5, "p99": 9.79, "max": 10.0, "p99/p50": 9.79 / 2.5}
    assert found == pytest.approx(values)
    assert set(script.summary([]).values()) == {None}
    assert script.summary([0.0])["p99/p50"] is None


def test_figures_of_traces():
    def meta(tokens: int, seconds: float) -> dict:
        counts = {"prompt_tokens": 10, "completion_tokens": tokens, "num_retractions": 1}
        return counts | {"queue_time": 0.5, "e2e_latency": seconds}

    traces = [
        script.Trace(0.0, False, 0.0, [(1.0, 1), (1.4, 4), (1.5, 1)], meta(6, 1.5)),
        script.Trace(1.0, True, 1.25, [(4.0, 2)], meta(2, 2.75)),
        script.Trace(1.0, False, 1.0, [(9.0, 2)], meta(2, 8.0), "gone"),
    ]
    row = script.figures(traces, 4.0)
    assert (row["successful_requests"], row["failed_requests"]) == (2, 1)
    assert row["errors"] == {"gone": 1}
    assert (row["request_throughput"], row["output_throughput"]) == (0.5, 2.0)
    assert (row["total_input_tokens"], row["num_retractions"]) == (20, 2)
    assert row["ttft_ms"]["mean"] == pytest.approx((1000 + 3000) / 2)
    assert row["e2e_ms"]["max"] == pytest.approx(3000)
    assert row["late_ms"]["max"] == pytest.approx(250)
    assert row["chunk_gap_ms"]["max"] == pytest.approx(400)
    assert row["chunk_gap_ms"]["mean"] == pytest.approx(250)
    # five tokens of 100 ms
    assert row["itl_ms"] == pytest.approx(dict.fromkeys(script.STATISTICS, 100) | {"p99/p50": 1})
    # from 0.5 to 1.5 and from 1.75 to 4.0
    assert row["running_mean"] == pytest.approx(3.25 / 4)
    assert row["running_max"] == 1
    assert row["accept_length_pooled"] is None


def test_a_span_may_begin_where_another_ends():
    assert script.most_at_once([(0, 2), (2, 3), (1, 2.5), (2.5, 4)]) == 2
    assert script.most_at_once([]) == 0


# runs


def test_the_rate_follows_from_the_capacity(fake, tmp_path, capsys):
    plot = tmp_path / "mix.png"
    arguments = f"--num-prompts 20 --utilization 0.5 --speculative-num-steps 2 --plot {plot}"
    status, result = run(arguments, tmp_path / "rows.jsonl")
    assert status == 0
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    first, second = result["runs"]["at once"], result["runs"]["Poisson"]
    assert second["request_rate"] == 0.5 * first["request_throughput"]
    assert first["request_rate"] is None
    for row in (first, second):
        assert (row["successful_requests"], row["failed_requests"]) == (20, 0)
        assert row["total_output_tokens"] == second["total_output_tokens"]
        assert 1 <= row["ttft_ms"]["p50"] <= row["e2e_ms"]["p50"]
        assert row["accept_length_pooled"] > 0
    assert 1 <= first["running_max"] <= 20
    settings = result["settings"]
    assert (settings["model"], settings["dtype"]) == ("tiny", "float32")
    assert (settings["utilization"], settings["prompt_len"]) == (0.5, [3, 9])
    assert {"jax", "specjax", "device_kind", "seed", "max_running_requests"} <= set(settings)
    assert settings["warmup"] == 4
    assert fake.made[0]["context_length"] == 30 + 8
    printed = capsys.readouterr().out.rstrip()
    tables = [text.splitlines() for text in printed.split("\n\n") if text.startswith("|")]
    assert [len(table) for table in tables] == TABLE_LINES
    assert printed.endswith("|")


def test_failed_requests_are_named_and_the_others_go_on(fake, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(fake, "aborted", (3,))
    # long prompts do not fit
    arguments = "--num-prompts 20 --request-rate 500 --long-prompt-len 40 --long-every 5 --warmup 2"
    status, result = run(arguments, tmp_path / "rows.jsonl")
    assert status == 1
    assert list(result["runs"]) == ["Poisson"]
    row = result["runs"]["Poisson"]
    assert row["request_rate"] == 500
    assert result["settings"]["utilization"] is None
    refused = "ValueError: no room in context_length=40"
    assert row["errors"][refused] == 4
    assert row["errors"]["too slow"] == row["failed_requests"] - 4 > 0
    assert row["successful_requests"] + row["failed_requests"] == 20
    assert f"Poisson: 4 failed: {refused}" in capsys.readouterr().err


def test_without_capacity_there_is_no_rate(fake, tmp_path, capsys):
    arguments = f"{LOAD} --num-prompts 2 --prompt-len 40,40 --long-prompt-len 40"
    assert run_bench(NAME, arguments) == 2
    assert "all requests failed: ValueError: no room" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--num-prompts 0", "--num-prompts 0 must be at least 1"),
        ("--prompt-len 9,3", "--prompt-len [9, 3] must be two ascending numbers"),
        ("--output-len 9", "--output-len [9] must be two ascending numbers"),
        ("--request-rate 0", "--request-rate 0.0 must be a number above 0"),
        ("--utilization nan", "--utilization nan must be a number above 0"),
        ("--plot mix.png", "pip install '.[bench]'"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parse(arguments)
    assert message in capsys.readouterr().err
