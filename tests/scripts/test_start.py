"""The benchmark of starts: two processes over one empty cache."""

import json

import pytest

from ..loading import load_bench, run_bench
from ..tiny_checkpoints import write_head, write_target


@pytest.mark.slow
def test_the_second_start_reads_what_the_first_compiled(tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    target, head = write_target(tmp_path / "target"), write_head(tmp_path / "head")
    options = (
        f"--model {target} --draft {head} --speculative-num-steps 2 --max-running-requests 1"
        " --page-size 4 --context-length 128 --chunked-prefill-size 64 --starts 2"
    )
    assert run_bench("bench_start", f"{options} --json {output}") == 0
    cold, warm = [json.loads(line) for line in output.read_text().splitlines()]
    phases = ("interpreter", "imports", "device", "engine", "prefill", "round")
    for row in (cold, warm):
        assert row["total"] == pytest.approx(sum(row[phase] for phase in phases), abs=1e-6)
        assert min(row[phase] for phase in phases) >= 0
    assert warm["functions"] == cold["functions"] == warm["from_cache"] > 3
    assert cold["from_cache"] == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 4
    assert len({len(line) for line in table}) == 1


def test_a_preset_needs_no_files_and_room_for_its_largest_batch(tmp_path):
    script = load_bench("start")
    line = "--preset llama3.1-8b --batch-buckets 1,8 --context-length 64"
    options = script.engine_options(script.parse_arguments("bench_start", line.split()), tmp_path)
    assert options["max_running_requests"] == 8
    assert options["load_format"] == "dummy"
    assert json.loads(json.dumps(options)) == options
    assert options["compile_cache_dir"] == str(tmp_path / "cache")
    with pytest.raises(SystemExit):
        script.parse_arguments("bench_start", ["--starts", "0"])
