"""The benchmark of rounds on a tiny model, and its counts."""

import json

import pytest

from ..loading import load_bench, run_bench


@pytest.mark.slow
def test_a_row_for_each_cell_of_the_grid(files, tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    arguments = (
        f"--model {files.target} --draft {files.head} --dtype float32 --batch 1,2 --steps 0,1"
        f" --context 10 --page-size 4 --rounds 2 --profile --output {output}"
    )
    assert run_bench("round", arguments) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["steps"], row["batch"]) for row in rows] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    for row in rows:
        assert row["device_ms"] > 0
        assert row["engine_ms"] > 0
        assert row["ratio"] == pytest.approx(row["engine_ms"] / row["floor_ms"])
        assert (row["accept_length"] > 1) == (row["steps"] > 0)
    floors = [row["floor_bytes"] for row in rows]
    assert floors[0] < floors[1] < floors[3]
    assert floors[0] < floors[2]
    printed = capsys.readouterr().out
    table = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 4
    assert "copy bandwidth" in printed


def test_dispatches_cover_prefill_and_the_timed_rounds():
    script = load_bench("round")
    # two chunks and one, settling, timed ones, one more in flight
    assert script.dispatches_needed([600, 512], 20) == 3 + script.SETTLING_ROUNDS + 20 + 1


def test_the_real_preset_is_a_model():
    args = load_bench("round").parse_arguments("round", ["--preset", "smollm2-135m"])
    assert args.model == "smollm2-135m"
