"""The throughput benchmark: figures, modes, requests, and a run with real engines."""

import importlib.util
import json

import pytest

from ..loading import load_bench, run_bench
from ..tiny_checkpoints import letter_tokenizer
from .fake_engine import FakeEngine

script, data = load_bench("throughput"), load_bench("data")
OFFLINE, ADAPTIVE = "throughput", "adaptive"
TOKENIZER = letter_tokenizer()
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr("specjax.Engine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "made", [], raising=False)
    return FakeEngine


@pytest.fixture
def short_prompts(monkeypatch, tmp_path):
    path = tmp_path / "short.jsonl"
    texts = {"low": ("ab", "cd", "ef"), "high": ("gh", "ij", "kl")}
    lines = [
        json.dumps({"question_id": text, "category": kind, "turns": [text]})
        for kind in texts
        for text in texts[kind]
    ]
    path.write_text("\n".join(lines))
    monkeypatch.setattr(data, "ADAPTIVE_PROMPTS", path)


@pytest.mark.slow
def test_policies_and_fixed_tiers_with_real_engines(files, short_prompts, tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text('{"policy": "ema", "candidate_steps": [0, 2], "update_interval": 1}')
    output, plot = tmp_path / "figures.json", tmp_path / "tiers.png"
    arguments = (
        f"--model {files.target} --draft {files.head} --page-size 4 --chunked-prefill-size 1"
        f" --context-length 128 --compile-cache-dir {files.cache} --requests 2 --max-tokens 12"
        f" --concurrency 1 --warmup 1 --modes plain,2_sync,cost --repeats 2 --temperature 0.8"
        f" --speculative-adaptive-config {config} --json {output} --plot {plot}"
    )
    assert run_bench(ADAPTIVE, arguments) == 0
    result = json.loads(output.read_text())
    assert list(result["rows"]) == ["low_1", "high_1", "low_2", "high_2", "overall"]
    for name, rows in result["rows"].items():
        assert list(rows) == ["plain", "2_sync", "cost"]
        requests = 4 * 2 if name == "overall" else 2
        for row in rows.values():
            assert row["equal_share"] == 1.0
            assert row["total_output_tokens"] == 12 * requests
            assert row["successful_requests"] == requests
            assert row["output_throughput"] == 12 * requests / row["total_latency"]
            assert row["num_retractions"] == 0
        assert rows["plain"]["accept_length"] is None
        assert rows["2_sync"]["accept_length"] > 1.0
        assert rows["2_sync"]["row_rounds_by_steps"] == {"2": rows["2_sync"]["verify_calls"]}
    assert all(len(runs) == 2 and len(runs[0]) == 4 for runs in result["seconds"].values())
    assert result["policies"]["cost"]["policy"] == "cost"
    assert result["policies"]["cost"]["candidate_steps"] == [0, 2]
    assert plot.read_bytes().startswith(PNG)

    assert list(result["settings"]) == ["plain", "2_sync", "cost"]
    assert str(tmp_path.parent) not in output.read_text()
    captured = capsys.readouterr()
    tables = [text.splitlines() for text in captured.out.split("\n\n") if text.startswith("|")]
    assert [len(table) for table in tables] == [2 + 3] * 5
    assert all(len({len(line) for line in table}) == 1 for table in tables)
    assert "switches, row rounds by drafted tokens" in captured.out
    assert "100.0% or more in every row" in captured.out
    assert "high_2: 100%" in captured.err


# with an engine that computes nothing


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "abcd"[:n], "output_len": 3 * n} for n in (1, 2, 3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_all_modes_and_sizes_give_a_row_each(fake, prompts, tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    output.write_text("{}\n")  # rows are appended
    arguments = (
        f"--num-prompts 5 --dataset-path {prompts} --speculative-num-steps 2"
        f" --modes plain_sync,spec --batch 1,2 --json {output}"
    )
    assert run_bench(OFFLINE, arguments) == 0
    _, *results = [json.loads(line) for line in output.read_text().splitlines()]
    rows = [
        row | {"mode": mode, "settings": result["settings"][mode]}
        for result in results
        for mode, row in result["rows"]["overall"].items()
    ]
    assert [(row["settings"]["max_running_requests"], row["mode"]) for row in rows] == [
        (1, "plain_sync"),
        (1, "spec"),
        (2, "plain_sync"),
        (2, "spec"),
    ]
    for row in rows:
        assert row["successful_requests"] == 5
        assert row["equal_share"] == 1.0
        assert row["total_input_tokens"] == 1 + 2 + 3 + 1 + 2
        assert row["total_output_tokens"] == 3 * row["total_input_tokens"]
        seconds, num_out = row["total_latency"], row["total_output_tokens"]
        assert row["output_throughput"] == num_out / seconds
        is_plain = row["mode"] == "plain_sync"
        assert (row["accept_length"] is None) == (row["verify_calls"] == 0) == is_plain
        assert row["settings"]["speculative_num_steps"] == (0 if is_plain else 2)
        assert row["settings"]["model"] == "tiny"
    captured = capsys.readouterr()
    table = [line for line in captured.out.splitlines() if line.startswith("|")]
    assert len(table) == 2 * (2 + 2)
    assert "100.0% or more in every row" in captured.out
    # the one with a draft comes first and lends its weights to all others
    lenders = [options["share_weights_with"] for options in fake.made]
    assert lenders[0] is None
    assert {id(lender.options) for lender in lenders[1:]} == {id(fake.made[0])}
    assert [options["overlap"] for options in fake.made] == [None, False] * 2


def test_a_difference_counts(fake, prompts, monkeypatch):
    monkeypatch.setattr(fake, "wrong", (2,))
    arguments = f"--num-prompts 3 --speculative-num-steps 2 --dataset-path {prompts}"
    assert run_bench(OFFLINE, f"{arguments} --modes plain,spec") == 1


def test_what_a_mode_gives_to_its_engine(fake, short_prompts, tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"policy": "ema", "candidate_steps": [1, 2]}')
    arguments = (
        "--workload low --modes ema,3,plain --max-tokens 9 --draft x"
        f" --requests 1 --concurrency 3 --speculative-adaptive-config {config}"
    )
    assert run_bench(ADAPTIVE, arguments) == 0
    ema, fixed, plain = fake.made
    assert ema["speculative_adaptive_config"] == {"policy": "ema", "candidate_steps": [1, 2]}
    assert ema["speculative_adaptive"]
    assert "speculative_adaptive_config" not in fixed
    assert fixed["speculative_num_steps"] == 3
    assert fixed["draft"] == "x"
    assert not any(name.startswith(("speculative_", "draft")) for name in plain)
    assert plain["context_length"] == 9 + 256
    assert plain["max_total_tokens"] == 2 * 3 * plain["context_length"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--modes fast", "['fast'] must be different ones of"),
        ("--modes 3,3", "must be different ones of"),
        ("--modes 0", "numbers from 1"),
        ("--speculative-algorithm none --modes spec", "exclude each other"),
        ("--num-prompts 0", "--num-prompts 0 must be at least 1"),
        ("--warmup -1", "--warmup -1 must be at least 0"),
        ("--batch 1,2 --plot all.png", "takes one batch size"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        script.parse_arguments(OFFLINE, arguments.split())
    assert message in capsys.readouterr().err


def test_what_the_engine_refuses_is_one_line(fake, tmp_path, capsys, monkeypatch):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": 90 * "a"}))
    assert run_bench(OFFLINE, f"--num-prompts 1 --dataset-path {path} --warmup 0") == 2
    assert "context_length=64" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        script.parse_arguments(ADAPTIVE, ["--plot", "tiers.png"])
    assert "pip install '.[bench]'" in capsys.readouterr().err


# figures


def meta(tokens: int, verifies: int, plain: int = 0) -> dict:
    return {
        "prompt_tokens": 4,
        "completion_tokens": tokens,
        "finish_reason": {"type": "length"},
        "spec_verify_ct": verifies,
        "spec_accept_length": (tokens - plain) / verifies if verifies else 0.0,
        "spec_num_correct_drafts": 7,
        "spec_num_proposed_drafts": 12,
        "spec_correct_drafts_histogram": [1, 2],
        "spec_rounds_by_steps": {"0": plain, "3": verifies},
        "e2e_latency": 1.0,
        "queue_time": 0.25,
    }


def phase_run(seconds: float, *metas: dict) -> object:
    return script.PhaseRun(seconds, [{"meta_info": m, "output_ids": [1]} for m in metas])


def test_figures_leave_plain_rounds_out_of_the_accept_length():
    runs = [phase_run(2.0, meta(10, 4), meta(20, 4, plain=6)), phase_run(3.0, meta(10, 4, plain=9))]
    row = script.figures(runs, [[1], [1], [2]])
    assert row["accept_length"] == pytest.approx((10 + 14 + 1) / 12)
    assert row["output_throughput"] == pytest.approx(40 / 5)
    assert row["mean_latency"] == pytest.approx(0.75)
    assert row["wasted_drafts"] == 15
    assert row["row_rounds_by_steps"] == {"0": 15, "3": 12}
    assert row["equal_share"] == pytest.approx(2 / 3)


def test_the_median_repeat_counts():
    repeats = [[phase_run(seconds, meta(10, 4))] for seconds in (5.0, 1.0, 3.0)]
    assert script.median_run(repeats)[0].seconds == 3.0
    assert script.median_run(repeats[:2])[0].seconds == 1.0


def test_ratios_are_of_throughput():
    def ratios(**speeds: float) -> dict:
        rows = {mode.strip("_"): {"output_throughput": x} for mode, x in speeds.items()}
        found: dict = script.ratios(rows)
        return found

    best = {"best_static": 1.2, "worst_static": 3.0}
    assert ratios(plain=50, _3=100, _7=40, cost=120) == {"cost": {**best, "plain": 2.4}}
    # plain decoding is no fixed tier
    assert ratios(plain=10, _3=100, _7=40, cost=120) == {"cost": {**best, "plain": 12.0}}
    assert ratios(ema=1) == {"ema": {}}


# requests


def test_a_kind_goes_on_with_its_next_prompts(short_prompts):
    phases = data.workload_phases("transition", 2, TOKENIZER, 8)
    assert list(phases) == ["low_1", "high_1", "low_2", "high_2"]
    low = (phases["low_1"], phases["low_2"])
    texts = [[TOKENIZER.decode(r.input_ids) for r in requests] for requests in low]
    assert texts == [
        [f"<user>{text}<assistant>" for text in pair] for pair in (("ab", "cd"), ("ef", "ab"))
    ]
    assert list(data.workload_phases("high", 1, TOKENIZER, 8)) == ["high"]


def test_jsonl_requests(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "ab", "output_len": 3},
        {"messages": [{"role": "user", "content": "cd"}]},
        {"question_id": "q", "category": "c", "turns": ["ef", "later"]},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    requests = data.jsonl_requests(path, 4, TOKENIZER, 8)
    texts = [TOKENIZER.decode(r.input_ids) for r in requests]
    assert texts == ["ab", "<user>cd<assistant>", "<user>ef<assistant>", "ab"]
    assert [r.output_len for r in requests] == [3, 8, 8, 3]
    for bad, message in (
        ('{"prompt": "a"}\n[]', "line 2"),
        ('{"text": "a"}', "lacks prompt, messages or turns"),
        ('{"turns": []}', "at least one string"),
        ("", "holds no prompts"),
    ):
        path.write_text(bad)
        with pytest.raises(ValueError, match=message):
            data.jsonl_requests(path, 1, TOKENIZER, 8)
