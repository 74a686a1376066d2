"""The benchmark of adaptive speculation, end to end on a tiny model, and its figures."""

import importlib.util
import json

import pytest

from specjax.bench_adaptive import (
    PROMPTS,
    Phase,
    PhaseRun,
    RecordingPolicy,
    Round,
    figures,
    full_depth,
    make_phases,
    median_figures,
    ratios,
    timeline,
)

from ..loading import load_script

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def script():
    return load_script("bench_adaptive_speculative")


@pytest.fixture
def common(files):
    return (
        f"--model {files.target} --draft {files.head} --page-size 4 --chunked-prefill-size 1"
        f" --context-length 128 --compile-cache-dir {files.cache} --requests 2 --max-tokens 12"
        " --concurrency 1 --warmup 1"
    )


@pytest.fixture
def short_prompts(monkeypatch):
    monkeypatch.setitem(PROMPTS, "low", ("ab", "cd", "ef"))
    monkeypatch.setitem(PROMPTS, "high", ("gh", "ij", "kl"))


def test_modes_phases_and_files(script, common, short_prompts, tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text('{"policy": "ema", "candidate_steps": [0, 2], "update_interval": 1}')
    output, plot = tmp_path / "figures.json", tmp_path / "tiers.png"
    arguments = (
        f"{common} --modes plain,2,cost --repeats 2 --speculative-adaptive-config {config}"
        f" --json {output} --plot {plot}"
    )
    assert script.main(arguments.split()) == 0
    result = json.loads(output.read_text())
    assert list(result["phases"]) == ["low_1", "high_1", "low_2", "high_2"]
    assert result["equal_share"] == 1.0
    for rows in (*result["phases"].values(), result["overall"]):
        assert list(rows) == ["plain", "2", "cost"]
        tokens = 2 * 12 if rows is not result["overall"] else 4 * 2 * 12
        assert {row["completion_tokens"] for row in rows.values()} == {tokens}
        assert rows["plain"]["accept_len"] is None
        assert rows["2"]["accept_len"] > 1.0
        assert rows["2"]["row_rounds_by_steps"] == {"2": rows["2"]["verifies"]}
    assert all(len(runs) == 2 and len(runs[0]) == 4 for runs in result["seconds"].values())
    depth = result["full_depth"]
    assert depth["steps"] == 2
    assert depth["high_over_low"] == depth["accept_len"]["high"] / depth["accept_len"]["low"]
    assert set(result["ratios"]["overall"]["cost"]) == {"best_static", "worst_static", "plain"}

    assert result["policies"]["cost"]["policy"] == "cost"
    assert result["policies"]["cost"]["candidate_steps"] == [0, 2]
    (line,) = result["timelines"].values()
    assert [phase["name"] for phase in line["phases"]] == list(result["phases"])
    ends = [phase["end"] for phase in line["phases"]]
    times = [record["time"] for record in line["rounds"]]
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < ends[-1]
    assert {record["steps"] for record in line["rounds"]} <= {0, 2}
    # one request at a time: a round is a row, and prefill brings one token of each request
    written = sum(1 + record["accepted"] for record in line["rounds"])
    assert written >= 4 * 2 * 11

    assert plot.read_bytes().startswith(PNG)
    printed = capsys.readouterr().out
    tables = printed.split("\n\n")[:5]
    for table in tables:
        lines = table.splitlines()
        assert len(lines) == 2 + 3
        assert len({len(line) for line in lines}) == 1
    assert "accept length with 2 steps: low" in printed
    assert "texts equal to those of the first run: 100.0%" in printed


def test_one_policy_alone(script, common, short_prompts, tmp_path):
    config, output = tmp_path / "config.json", tmp_path / "figures.json"
    config.write_text('{"candidate_steps": [1, 2]}')
    arguments = (
        f"{common} --workload low --modes ema --raw --stop-at-eos --json {output}"
        f" --speculative-adaptive-config {config}"
    )
    assert script.main(arguments.split()) == 0
    result = json.loads(output.read_text())
    assert list(result["phases"]) == ["low"]
    assert result["full_depth"] is None
    assert result["ratios"]["overall"] == {"ema": {}}
    assert result["policies"]["ema"]["candidate_steps"] == [1, 2]


def test_bad_input_is_named(script, common, tmp_path, capsys, monkeypatch):
    for arguments, message in (
        ("--modes fast", "['fast'] must be different ones of"),
        ("--modes 3,3", "must be different ones of"),
        ("--modes 0", "numbers from 1"),
        ("--requests 0", "--requests 0 must be at least 1"),
        ("--warmup -1", "--warmup -1 must be at least 0"),
    ):
        with pytest.raises(SystemExit):
            script.parse_arguments(arguments.split())
        assert message in capsys.readouterr().err
    config = tmp_path / "config.json"
    config.write_text('{"ema_alpha": 2}')
    arguments = f"{common} --modes ema --speculative-adaptive-config {config}"
    assert script.main(arguments.split()) == 2
    assert "ema_alpha=2" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        script.parse_arguments(["--plot", "tiers.png"])
    assert "pip install 'specjax[bench]'" in capsys.readouterr().err


# figures


def meta(tokens: int, verifies: int, plain: int = 0, latency: float = 1.0) -> dict:
    return {
        "completion_tokens": tokens,
        "spec_verify_ct": verifies,
        "spec_accept_length": (tokens - plain) / verifies if verifies else 0.0,
        "spec_num_wasted_drafts": 5,
        "spec_rounds_by_steps": {"0": plain, "3": verifies},
        "e2e_latency": latency,
        "queue_time": 0.25,
    }


def phase_run(seconds: float, *metas: dict) -> PhaseRun:
    return PhaseRun(0.0, seconds, list(metas), [[1]] * len(metas))


def test_figures_leave_plain_rounds_out_of_the_accept_length():
    runs = [phase_run(2.0, meta(10, 4), meta(20, 4, plain=6)), phase_run(3.0, meta(10, 0, plain=9))]
    row = figures(runs)
    assert row["accept_len"] == pytest.approx((10 + 14) / 8)
    assert row["throughput"] == pytest.approx(40 / 5)
    assert row["latency"] == pytest.approx(0.75)
    assert row["wasted_drafts"] == 15
    assert row["row_rounds_by_steps"] == {"0": 15, "3": 8}


def test_the_median_repeat_counts():
    repeats = [[phase_run(seconds, meta(10, 4))] for seconds in (5.0, 1.0, 3.0)]
    assert median_figures(repeats)["seconds"] == 3.0
    assert median_figures(repeats[:2])["seconds"] == 1.0


def test_ratios_are_of_throughput():
    rows = {
        mode: {"throughput": speed}
        for mode, speed in {"plain": 50.0, "3": 100.0, "7": 40.0, "cost": 120.0}.items()
    }
    assert ratios(rows) == {"cost": {"best_static": 1.2, "worst_static": 3.0, "plain": 2.4}}
    rows["plain"] = {"throughput": 10.0}  # which is no fixed tier
    assert ratios(rows)["cost"] == {"best_static": 1.2, "worst_static": 3.0, "plain": 12.0}
    assert ratios({"ema": {"throughput": 1.0}}) == {"ema": {}}


def test_full_depth_weighs_verifies():
    rows = {
        "low_1": {"7": {"accept_len": 2.0, "verifies": 30}, "1": {}},
        "high_1": {"7": {"accept_len": 6.0, "verifies": 1}},
        "low_2": {"7": {"accept_len": 4.0, "verifies": 10}},
    }
    depth = full_depth({"low_1": "low", "high_1": "high", "low_2": "low"}, rows)
    assert depth == {
        "steps": 7,
        "accept_len": {"low": 2.5, "high": 6.0},
        "high_over_low": pytest.approx(2.4),
    }


def test_a_kind_goes_on_with_its_next_prompts(short_prompts):
    phases = make_phases("transition", 2)
    assert [phase.name for phase in phases] == ["low_1", "high_1", "low_2", "high_2"]
    assert [phase.prompts for phase in phases if phase.kind == "low"] == [
        ("ab", "cd"),
        ("ef", "ab"),
    ]
    assert [phase.name for phase in make_phases("high", 1)] == ["high"]


def test_a_timeline_leaves_out_what_lies_between_phases():
    phases = [Phase("low", "low", ()), Phase("high", "high", ())]
    runs = [PhaseRun(10.0, 1.0, [], []), PhaseRun(15.0, 2.0, [], [])]
    rounds = [Round(time, 3, 1, 2) for time in (9.5, 10.5, 12.5, 16.5, 17.5)]
    assert timeline(phases, runs, rounds) == {
        "phases": [
            {"name": "low", "kind": "low", "start": 0.0, "end": 1.0},
            {"name": "high", "kind": "high", "start": 1.0, "end": 3.0},
        ],
        "rounds": [{"time": time, "steps": 3, "rows": 1, "accepted": 2} for time in (0.5, 2.5)],
    }


class Fixed:
    """A policy that stays at 3 and counts what it hears of."""

    candidate_steps = (0, 1, 3)

    def __init__(self):
        self.heard = []

    def steps_for_batch(self, batch_size):
        return 3

    def on_verify_complete(self, num_accepted_drafts, *, executed_steps, batch_size):
        self.heard.append((num_accepted_drafts, executed_steps, batch_size))
        return True


def test_the_warm_up_runs_all_tiers_and_tells_the_policy_nothing():
    policy = Fixed()
    record = RecordingPolicy(policy)
    record.is_warming = True
    seen = []
    for _ in range(8):
        seen.append(record.steps_for_batch(1))
        assert not record.on_verify_complete([0], executed_steps=seen[-1], batch_size=1)
    assert seen == [0, 0, 1, 1, 3, 3, 0, 0]
    assert policy.heard == []
    record.is_warming = False
    assert record.steps_for_batch(1) == 3
    assert record.on_verify_complete([2, 1], executed_steps=3, batch_size=2)
    assert policy.heard == [([2, 1], 3, 2)]
    assert (record.rounds[-1].rows, record.rounds[-1].accepted) == (2, 3)
    assert record.candidate_steps == (0, 1, 3)
