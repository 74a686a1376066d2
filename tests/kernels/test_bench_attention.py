"""The bench script of the attention kernel runs."""

import json
import runpy
import sys

import jax
import pytest

from ..loading import SCRIPTS

SCRIPT = SCRIPTS / "bench_attention.py"


def test_smoke_compares_and_writes_one_row_a_page_size(tmp_path, monkeypatch, capsys):
    output = tmp_path / "rows.jsonl"
    argv = [SCRIPT.name, "--smoke", "--page-sizes", "16,64", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", argv)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["page_size"] for row in rows] == [16, 64]
    # two requests, keys and values of 64 tokens, two heads of 16, two bytes each
    layer_bytes = 2 * 2 * 64 * 2 * 16 * 2
    for row in rows:
        assert 0 < row["error"] < 2e-2
        seconds = row["microseconds"] / 1e6
        assert row["bytes_per_second"] * seconds == pytest.approx(layer_bytes)
        assert row["copy"] > 0
    assert "ratio" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--rows 64", "--rows 0", "--head-dim 24", "--page-sizes 48"])
def test_bad_sizes_are_one_line(option, monkeypatch, capsys):
    argv = [SCRIPT.name, "--context", "64", *option.split()]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert option.split()[0] in capsys.readouterr().err
