"""Run each benchmark end to end on a tiny model, and check the input that they reject."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specjax.cli import commands, main
from specjax.testing import Files

from ..support.scripts import SCRIPTS, load_bench, run_bench


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def model(files: Files) -> str:
    sizes = "--page-size 4 --context-length 64 --chunked-prefill-size 1 --speculative-num-steps 2"
    return f"--model {files.target} --draft {files.head} {sizes} --compile-cache-dir {files.cache}"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.jsonl"
    rows = [("x", ["hello", "more"]), ("y", ["what is this"]), ("x", ["go on"])]
    lines = [
        json.dumps({"question_id": i, "category": category, "turns": turns})
        for i, (category, turns) in enumerate(rows)
    ]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output.json"


@pytest.mark.slow
def test_round(files: Files, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        f"--model {files.target} --draft {files.head} --dtype float32 --batch 1,2 --steps 0,1"
        f" --context 10 --page-size 4 --rounds 2 --profile --sampling greedy,logprobs"
        f" --simulate-acceptance 1"
    )
    assert run_bench("round", f"{arguments} --output {output}") == 0
    rows = rows_of(output)
    cells = [(steps, batch) for steps in (0, 1) for batch in (1, 2)]
    assert [(row["steps"], row["batch"]) for row in rows[::2]] == cells
    assert [row["sampling"] for row in rows] == ["greedy", "logprobs"] * 4
    for row in rows:
        assert row["engine_ms"] > 0
        assert row["device_ms"] is None if row["sampling"] == "logprobs" else row["device_ms"] > 0
        assert row["ratio"] == pytest.approx(row["engine_ms"] / row["floor_ms"])
        assert row["accept_length"] == pytest.approx(1 + row["steps"], abs=0.3)
        assert row["simulate_acceptance"] == (1.0 if row["steps"] else None)
    assert [row["over_greedy"] for row in rows[::2]] == [1.0] * 4
    floors = [row["floor_bytes"] for row in rows[::2]]
    assert floors[0] < floors[1] < floors[3]
    assert floors[0] < floors[2]
    assert "kernel" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kernels", "attention", "experts"])
def test_kernels(name: str, output: Path) -> None:
    assert run_bench(name, f"--smoke --output {output}") == 0
    rows = rows_of(output)
    if name == "kernels":
        assert [row["kernel"] for row in rows] == ["accept_tree", "compact_tree", "move_kv"]
        assert all(set(row["microseconds"]) == {"xla", "pallas"} for row in rows)
        return
    if name == "experts":
        assert [row["sizes"]["distinct"] for row in rows] == [2, 2, 2]
        # of an expert: three matrices of 128 by 128, and a float32 scale of each of 192 outputs, or
        # one of a byte for 32 inputs
        assert [row["bytes"] for row in rows] == [4 * 49152, 2 * (49152 + 1536), 49152 + 4 * 768]
        assert all(0 <= row["error"] < 2e-2 for row in rows)
        return
    assert [row["sizes"]["page"] for row in rows] == [16, 64]
    for row in rows:
        assert 0 < row["error"] < 2e-2
        seconds = row["microseconds"]["pallas"] / 1e6
        # two requests, keys and values of 64 tokens, two heads of 16, two bytes per value
        assert row["bytes_per_second"] * seconds == pytest.approx(2 * 2 * 64 * 2 * 16 * 2)


@pytest.mark.long
@pytest.mark.slow
def test_acceptance(
    files: Files,
    prompts: Path,
    output: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = f"{model(files)} --prompts {prompts} --output {output} --max-new-tokens 10"
    assert run_bench("acceptance", f"{arguments} --batch-size 1 --temperature 0.7") == 0
    error = capsys.readouterr().err
    assert "3 of 4 requests, accept length " in error
    assert "plain decoding" in error
    assert "for drafts set" not in error
    results = json.loads(output.read_text())
    assert results["overall"]["identical"] == results["overall"]["requests"] == 4
    assert list(results["categories"]) == ["x", "y"]
    assert results["settings"]["speculative_num_steps"] == 2
    assert results["settings"]["prompts"] == {"file": "p.jsonl", "count": 3}
    assert set(results["tokens_per_second"]) == {"speculative", "plain"}
    assert str(files.target.parent) not in output.read_text()
    for request in results["requests"]:
        meta = request["meta_info"]
        assert sum(meta["spec_correct_drafts_histogram"]) == meta["spec_verify_ct"]
    assert results["overall"]["logprob"] is None
    text = tmp_path / "text"
    text.write_text("some other text")
    assert run_bench("acceptance", f"{arguments} --context {text} --context-before 0,9") == 0
    again = json.loads(output.read_text())
    assert again["overall"]["identical"] == 8
    assert again["settings"]["context_before"] == [0, 9]
    assert sum(group["requests"] for group in again["contexts"].values()) == 8
    again["requests"] = again["requests"][4:]
    assert again["overall"]["logprob"] < 0
    for long, short in zip(again["requests"], results["requests"], strict=True):
        assert (
            long["meta_info"]["prompt_tokens"] - short["meta_info"]["prompt_tokens"] == 9
            or long["turn"] > 0
        )
    assert run_bench("acceptance", f"{arguments} --context {text} --context-before 99") == 2
    with pytest.raises(SystemExit):
        run_bench("acceptance", f"{arguments} --context {text} --context-before -1")


@pytest.mark.long
@pytest.mark.slow
def test_adaptive(files: Files, prompts: Path, output: Path, tmp_path: Path) -> None:
    """Fixed tiers, a policy and a synchronous mode give the texts of plain decoding."""
    config, again = tmp_path / "config.json", tmp_path / "again.jsonl"
    again.write_text('{"prompt": "once more"}')
    config.write_text('{"policy": "ema", "candidate_steps": [0, 2], "update_interval": 1}')
    arguments = (
        f"{model(files)} --workload {prompts} --workload {again} --requests 2 --max-tokens 8"
        f" --concurrency 1 --warmup 1 --repeats 2 --temperature 0.8 --json {output}"
        f" --speculative-adaptive-config {config}"
    )
    cases = ["--case", "steps=2 overlap=false", "--case", "policy=budget"]
    assert run_bench("adaptive", arguments, *cases) == 0
    rows = rows_of(output)
    names = ["plain", "steps=2 overlap=false", "policy=budget"]
    assert [row["case"] for row in rows] == names * 3
    assert [row["prompts"] for row in rows[::3]] == ["p", "again", "overall"]
    for row in rows:
        requests = 4 if row["prompts"] == "overall" else 2
        assert row["equal_share"] == 1.0
        assert (row["requests"], row["output_tokens"]) == (requests, 8 * requests)
        assert row["output_throughput"] == 8 * requests / row["median_seconds"]
        assert row["median_seconds"] == min(row["seconds"])
        assert (row["policy"] is not None) == (row["case"] == "policy=budget")
    plain, fixed, cost = rows[-3:]
    assert cost["over_best"] == cost["output_throughput"] / fixed["output_throughput"]
    assert (plain["speedup"], plain["accept_length"]) == (1.0, None)
    assert fixed["accept_length"] > 1.0
    assert fixed["row_rounds_by_steps"] == {"2": fixed["verify_calls"]}
    assert cost["policy"]["candidate_steps"] == [0, 2]
    assert str(files.target.parent) not in output.read_text()


LOADS = [
    "burst clients=3 prompt=8 output=6",
    "steady clients=2 prompt=text output=5 requests=2 temperature=0.8",
    "mix requests=20 prompt=12 long=20 output=8 rate=200",
    "prompts running=2 requests=3 prompt=20 interval=0.02",
]


@pytest.mark.slow
def test_serving(
    files: Files, output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serving = load_bench("serving")
    monkeypatch.setattr(serving, "RUNNING_PROMPT", 8)
    monkeypatch.setattr(serving, "RUNNING_OUTPUT", 100)
    monkeypatch.setattr(serving, "PROCESSES", 2)
    monkeypatch.setattr(serving, "SETTLING", 0.05)
    sizes = "--context-length 120 --max-running-requests 4 --batch-buckets 4 --turns 1"

    def run(ways: str, *loads: str) -> list[dict[str, Any]]:
        output.unlink(missing_ok=True)
        options = f"{model(files)} {sizes} --ways {ways} --output {output}"
        each = [part for load in loads for part in ("--load", load)]
        assert run_bench("serving", options, *each) == 0
        rows = rows_of(output)
        cells = [(load, way) for load in loads for way in ways.split()[0].split(",")]
        assert [(row["load"], row["way"]) for row in rows] == cells
        for row in rows:
            assert (row["failed"], row["errors"]) == (0, {})
            assert row["tokens_per_second"] == row["output_tokens"] / row["seconds"]
            assert 0 < row["ttft_ms"]["p50"] <= row["e2e_ms"]["p50"]
        return rows

    mixed = run("engine,stream --simulate-acceptance 1,0", "burst clients=4 prompt=5 output=10")
    for row in mixed:  # after prefill: rounds of 3, 3 and 3 tokens, or 9 rounds of one
        assert row["correct_drafts_histogram"] == [2 * 9, 0, 2 * 3]
        assert row["simulate_acceptance"] == 1.0
    direct, whole, stream, *steady = run("engine,whole,stream", *LOADS[:2])
    assert [row["output_tokens"] for row in (direct, whole, stream)] == [18] * 3
    assert [row["output_tokens"] for row in steady] == [20] * 3
    assert direct["accept_length"] == whole["accept_length"] == stream["accept_length"] > 1
    assert direct["over_engine"] == 1.0
    assert whole["over_engine"] == whole["tokens_per_second"] / direct["tokens_per_second"]
    assert stream["itl_ms"]["mean"] > 0
    # a text stream reports its counts only at the end
    assert [row["chunk_ms"] is None for row in steady] == [True, True, False]
    assert steady[2]["itl_ms"] is None
    mix, long = run("stream", *LOADS[2:])
    assert (mix["done"], long["done"], long["output_tokens"]) == (20, 3, 3)
    assert mix["seconds"] > 0.02
    assert long["chunk_ms"]["max"] > 0
    assert capsys.readouterr().out.count("ready_s") == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("kernels", [], "pass --smoke to run"),
        ("round", ["--sampling", "greedy,odd"], "--sampling: unknown ['odd']; choose from"),
        ("acceptance", ["--prompts", "/absent.jsonl"], "absent.jsonl"),
        (
            "acceptance",
            ["--prompts", "p", "--batch-size", "0"],
            "--batch-size 0 must be at least 1",
        ),
        ("adaptive", ["--warmup", "-1"], "--warmup -1 must be at least 0"),
        ("compare", ["--batch", "1,0"], "--batch [1, 0] must be at least 1"),
        ("compare", ["--case", "NGRAM steps"], "'steps' must have the form NAME=VALUE"),
        ("compare", ["--case", "EAGLE5"], "speculative_algorithm='EAGLE5' is not one of"),
        ("compare", ["--case", "NGRAM topk=2"], "speculative_eagle_topk"),
        ("compare", ["--case", "policy=fast"], "policy='fast'"),
        ("serving", ["--load", "storm"], "'storm' must be one of ['burst', "),
        ("serving", ["--load", "burst clients=0"], "clients=0 must be an integer of at least 1"),
        ("serving", ["--load", "mix prompt=text"], "prompt='text' must be an integer"),
        ("serving", ["--load", "mix rate=0"], "rate=0 must be above 0"),
        ("serving", ["--load", "burst heat=1"], "heat"),
        ("serving", ["--load", "burst", "--url", "ftp://a"], "--url ftp://a must be http://"),
        ("serving", ["--load", "mix", "--ways", "engine"], "--ways engine does not support --url"),
        ("serving", ["--load", "burst", "--ways", "fast"], "--ways: unknown ['fast']; choose from"),
        ("serving", ["--load", "burst", "--turns", "0"], "--turns 0 must be at least 1"),
        ("serving", ["--load", "burst", "--model", "/nowhere"], "exited with status 2"),
    ],
)
def test_input_is_refused_by_name(
    name: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["bench", name, *arguments])
    except SystemExit as ended:  # raised by the parser
        status = int(str(ended.code))
    assert status == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(commands.NAMES))
def test_a_benchmark_describes_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_bench(name, "--help")
    assert ended.value.code == 0
    assert f"usage: specjax bench {name} " in capsys.readouterr().out


def test_benchmarks_are_listed_and_a_wheel_names_the_missing_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "nothing"])
    assert "acceptance, adaptive, attention" in capsys.readouterr().err.replace("'", "")
    monkeypatch.setattr(commands, "SCRIPTS", tmp_path)
    assert run_bench("round", "") == 2
    assert "in a clone, run: pip install -e ." in capsys.readouterr().err


@pytest.mark.slow
def test_script_runs_the_adaptive_benchmark() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "bench_adaptive_speculative.py"), "--model", "/nowhere"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONSAFEPATH": "1"},
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("specjax: error: ")
