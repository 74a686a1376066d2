"""Benchmarks by their names, and the script that is called as upstream's."""

import os
import subprocess
import sys

import pytest

from ..loading import SCRIPTS, load_bench, run_bench


@pytest.mark.parametrize("name", sorted(load_bench("__main__").NAMES))
def test_a_benchmark_describes_its_options(name, capsys):
    with pytest.raises(SystemExit) as ended:
        run_bench(name, "--help")
    assert ended.value.code == 0
    assert f"usage: bench {name} " in capsys.readouterr().out


def test_an_unknown_name_is_told_the_others(capsys):
    assert run_bench("nothing", "") == 2
    assert "acceptance, adaptive, attention" in capsys.readouterr().out


@pytest.mark.parametrize("script", ["bench", "bench_adaptive_speculative.py"])
def test_bad_input_is_one_line_and_paths_are_safe(script):
    name = ["adaptive"] if script == "bench" else []
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), *name, "--num-prompts", "1", "--model", "/nowhere"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONSAFEPATH": "1"},
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("bench adaptive: error: ")
