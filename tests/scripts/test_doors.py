"""The scripts under their old names."""

import os
import runpy
import subprocess
import sys

import pytest

from ..loading import SCRIPTS, load_bench

DOORS = sorted(load_bench("__main__").DOORS)


@pytest.mark.parametrize("door", DOORS)
def test_a_door_opens_its_benchmark(door, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{door}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPTS / f"{door}.py"), run_name="__main__")
    assert ended.value.code == 0
    assert f"usage: {door}.py" in capsys.readouterr().out


def test_bad_input_is_one_line_and_paths_are_safe():
    command = [sys.executable, str(SCRIPTS / "bench_start.py"), "--preset", "nothing"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONSAFEPATH": "1"},
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("bench_start: error: preset='nothing'")
