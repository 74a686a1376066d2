"""The kernel benchmark runs on a CPU with tiny sizes."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_kernels.py"


def test_smoke_writes_one_row_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, "--smoke", "--output", str(output)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    assert [row["kernel"] for row in rows] == ["fill_bonus", "compact_tree", "move_kv"]
    assert all(set(row["microseconds"]) == {"xla", "pallas"} for row in rows)
    assert "microseconds a call" in capsys.readouterr().out


def test_an_unknown_kernel_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, "--kernels", "sort"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "['sort'] not among" in capsys.readouterr().err
