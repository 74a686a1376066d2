"""The grid of draft shapes: which there are, and a run with an engine that computes nothing."""

import importlib.util
import json

import pytest

from ..loading import load_bench, run_bench
from .fake_engine import FakeEngine

script = load_bench("speculative")
DOOR = "bench_speculative"


class FakeGrid(FakeEngine):
    def generate(self, *, input_ids, sampling_params):
        assert len(input_ids) <= self.options["max_running_requests"]
        outputs = super().generate(input_ids=input_ids, sampling_params=sampling_params)
        for output in outputs:
            output["meta_info"]["time_to_first_token"] = 0.3
        return outputs


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr("specjax.Engine", FakeGrid)
    monkeypatch.setattr(FakeGrid, "made", [], raising=False)
    return FakeGrid


def test_shapes_that_there_are():
    shapes = script.grid([1, 3], [1, 2], [3, 8, 40])
    assert shapes == [(0, 1, 1), (1, 1, 2), (1, 2, 3), (3, 1, 4), (3, 2, 3), (3, 2, 8)]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("ab", "cde", "f")))
    return path


def test_a_grid(fake, prompts, tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    arguments = (
        f"--prompts {prompts} --steps 2 --topk 1,2 --draft-tokens 5 --batch 1,3 --num-prompts 4 "
        f"--output-len 9 --json {output} --seed 3"
    )
    if importlib.util.find_spec("matplotlib"):
        arguments += f" --plot {tmp_path / 'grid.png'}"
    assert run_bench(DOOR, arguments) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    shapes = [(0, 1, 1)] * 2 + [(2, 1, 3)] * 2 + [(2, 2, 5)] * 2
    assert [(row["steps"], row["topk"], row["nodes"]) for row in rows] == shapes
    assert [row["batch"] for row in rows] == [1, 3] * 3
    assert [row["accept_length"] for row in rows] == [None, None] + [9 / 4] * 4
    assert [row["round_ms"] for row in rows] == pytest.approx([200 / 8] * 2 + [200 / 4] * 4)
    assert all(row["equal_share"] == 1 for row in rows)
    assert rows[0]["speedup"] == rows[1]["speedup"] == 1
    plain, chain, tree = fake.made
    assert plain["share_weights_with"] is None
    assert "speculative_num_steps" not in plain
    assert (chain["speculative_eagle_topk"], tree["speculative_num_draft_tokens"]) == (1, 5)
    assert tree["batch_buckets"] == [1, 3]
    table = capsys.readouterr().out
    assert table.count("\n|") == 7
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_text_that_differs_is_a_failure(fake, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeGrid, "wrong", (2,))
    assert run_bench(DOOR, f"--prompts {prompts} --steps 2 --topk 1 --batch 1 --num-prompts 2") == 1


@pytest.mark.parametrize("arguments", ["--steps 0", "--batch 0,2", "--output-len 0"])
def test_bad_options(fake, arguments, capsys):
    with pytest.raises(SystemExit):
        run_bench(DOOR, arguments)
    assert arguments.split()[0] in capsys.readouterr().err
