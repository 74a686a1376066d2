"""The benchmark of starts: two processes over one empty cache."""

import json
import subprocess
import sys

import pytest

from ..loading import SCRIPTS
from ..tiny_checkpoints import write_head, write_target


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "bench_start.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_second_start_reads_what_the_first_compiled(tmp_path):
    output = tmp_path / "rows.jsonl"
    options = ["--speculative-num-steps", 2, "--max-running-requests", 1, "--page-size", 4]
    options += ["--context-length", 128, "--chunked-prefill-size", 64, "--starts", 2]
    target, head = write_target(tmp_path / "target"), write_head(tmp_path / "head")
    done = run("--model", target, "--draft", head, *options, "--json", output)
    assert done.returncode == 0, done.stderr
    cold, warm = [json.loads(line) for line in output.read_text().splitlines()]
    phases = ("interpreter", "imports", "device", "engine", "prefill", "round")
    for row in (cold, warm):
        assert row["total"] == pytest.approx(sum(row[phase] for phase in phases), abs=1e-6)
        assert min(row[phase] for phase in phases) >= 0
    assert warm["functions"] == cold["functions"] == warm["from_cache"] > 3
    assert cold["from_cache"] == 0
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 4
    assert len({len(line) for line in table}) == 1


def test_bad_arguments_are_one_line():
    done = run("--preset", "nothing", "--starts", 1)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("bench_start: error: preset='nothing'")
