"""The comparison of algorithms with an engine that computes nothing."""

import json

import pytest

from ..loading import run_bench
from .fake_engine import FakeEngine

NAME = "compare"


class Fake(FakeEngine):
    def generate(self, *, input_ids, sampling_params):
        outputs = super().generate(input_ids=input_ids, sampling_params=sampling_params)
        for output in outputs:
            output["meta_info"]["time_to_first_token"] = 0.3
            if self.steps:  # of which some had nothing to propose
                output["meta_info"]["spec_rounds_by_steps"] = {"0": 4, str(self.steps): 4}
        return outputs


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    monkeypatch.setattr("specjax.Engine", Fake)
    monkeypatch.setattr(Fake, "made", [], raising=False)
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("ab", "cde", "f")))
    return path


def test_rows_stand_beside_plain_decoding(prompts, tmp_path, capsys):
    """Rounds without a verify count as rounds; a row says whether its acceptance is real."""
    output = tmp_path / "rows.jsonl"
    arguments = (
        f"--prompts {prompts} --batch 1,3 --num-prompts 4 --output-len 9 --json {output} "
        "--temperatures 0,0.5 --dtype float32 --case EAGLE3 --case"
    )
    case = "NGRAM steps=2 simulate_accept_length=2.5 speculative_adaptive=false"
    assert run_bench(NAME, arguments, case) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["temperature"], row["batch"]) for row in rows[:4]] == [
        (temperature, batch) for temperature in (0.0, 0.5) for batch in (1, 3)
    ]
    assert [row["speedup"] for row in rows[:4]] == [1.0] * 4
    assert [row["simulate_accept_length"] for row in rows[::4]] == [None, None, 2.5]
    assert rows[-1]["round_ms"] == pytest.approx(200 / 8)
    assert [made.get("speculative_algorithm") for made in Fake.made] == [None, "EAGLE3", "NGRAM"]
    assert Fake.made[2]["speculative_num_steps"] == 2
    assert Fake.made[2]["speculative_adaptive"] is False
    assert Fake.made[1]["dtype"] == "float32"
    assert capsys.readouterr().out.count("\n|") == 13


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("NGRAM steps", "'steps' must be option=value"),
        ("EAGLE5", "speculative_algorithm='EAGLE5' is not one of"),
        ("NGRAM topk=2", "speculative_eagle_topk"),
    ],
)
def test_bad_cases_are_refused_before_the_first_engine(prompts, case, message, capsys):
    assert run_bench(NAME, f"--prompts {prompts} --case EAGLE3 --case", case) == 2
    assert message in capsys.readouterr().err
    assert not Fake.made
