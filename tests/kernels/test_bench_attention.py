"""The bench script of the attention kernel runs."""

import json
import runpy
import sys

from ..loading import SCRIPTS

SCRIPT = SCRIPTS / "bench_attention.py"


def test_smoke_compares_and_writes_one_row_a_page_size(tmp_path, monkeypatch, capsys):
    output = tmp_path / "rows.jsonl"
    argv = [SCRIPT.name, "--smoke", "--page-sizes", "16,64", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", argv)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["page_size"] for row in rows] == [16, 64]
    for row in rows:
        assert 0 < row["error"] < 2e-2
        assert row["microseconds"] > 0
        assert row["bytes_per_second"] > 0 < row["copy"]
    assert "ratio" in capsys.readouterr().out
