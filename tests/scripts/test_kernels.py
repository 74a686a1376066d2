"""The kernel benchmarks run on a CPU with tiny sizes."""

import json

import pytest

from ..loading import run_bench


def rows_of(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.slow
def test_smoke_writes_one_row_a_kernel(tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    assert run_bench("kernels", f"--smoke --output {output}") == 0
    rows = rows_of(output)
    assert [row["kernel"] for row in rows] == ["accept_tree", "compact_tree", "move_kv"]
    assert all(set(row["microseconds"]) == {"xla", "pallas"} for row in rows)
    assert "xla / pallas" in capsys.readouterr().out


@pytest.mark.slow
def test_attention_is_compared_and_written_a_page_size(tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    assert run_bench("attention", f"--smoke --output {output}") == 0
    rows = rows_of(output)
    assert [row["sizes"]["page"] for row in rows] == [16, 64]
    for row in rows:
        assert 0 < row["error"] < 2e-2
        seconds = row["microseconds"]["pallas"] / 1e6
        # two requests, keys and values of 64 tokens, two heads of 16, two bytes each
        assert row["bytes_per_second"] * seconds == pytest.approx(2 * 2 * 64 * 2 * 16 * 2)
        assert row["copy"] > 0
    assert "of a copy" in capsys.readouterr().out


def test_what_cannot_be_measured_is_refused(capsys):
    assert run_bench("kernels", "") == 2
    assert "only --smoke runs" in capsys.readouterr().err
