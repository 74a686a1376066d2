import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specjax.acceptance import Answer, Stopwatch, by_category, evaluate, load_prompts, summarize

from .loading import load_script
from .tiny_checkpoints import write_head, write_target

ROOT = Path(__file__).parents[1]
PROMPTS = ROOT / "scripts" / "data" / "prompts.jsonl"


def answer(category: str, tokens: int, verifies: int, histogram: list[int], **more: Any) -> Answer:
    correct = sum(i * count for i, count in enumerate(histogram))
    return Answer(
        question_id="q",
        category=category,
        turn=0,
        meta_info={
            "completion_tokens": tokens,
            "spec_verify_ct": verifies,
            "spec_num_correct_drafts": correct,
            "spec_num_proposed_drafts": 5 * verifies,
            "spec_correct_drafts_histogram": histogram,
        },
        **{"equal": True, "difference": None, **more},
    )


def test_own_prompts_cover_the_categories() -> None:
    prompts = load_prompts(PROMPTS)
    categories = {prompt.category for prompt in prompts}
    assert categories == {
        "conversation",
        "writing",
        "code",
        "extraction",
        "question_answering",
        "summarization",
        "translation",
        "math",
    }
    assert len(prompts) >= 36
    assert len({prompt.question_id for prompt in prompts}) == len(prompts)
    assert len({prompt.turns for prompt in prompts}) == len(prompts)
    assert any(len(prompt.turns) > 1 for prompt in prompts)


def test_limit_takes_the_first_prompts() -> None:
    assert load_prompts(PROMPTS, 3) == load_prompts(PROMPTS)[:3]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"question_id": 1, "category": "c"}',
        '{"question_id": 1, "category": "c", "turns": []}',
        '{"question_id": 1, "category": "c", "turns": "one"}',
        '{"question_id": 1, "category": "c", "turns": [1]}',
    ],
)
def test_a_bad_line_is_named(line: str, tmp_path: Path) -> None:
    good = '{"question_id": 1, "category": "c", "turns": ["t"]}'
    path = tmp_path / "p.jsonl"
    path.write_text(f"{good}\n\n{line}\n")
    with pytest.raises(ValueError, match=r"p\.jsonl, line 3: .*expected"):
        load_prompts(path)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="no prompts"):
        load_prompts(path)


def test_summary_has_the_mean_over_requests_and_the_pooled_length() -> None:
    answers = [answer("a", 12, 4, [1, 1, 1, 1, 0, 0]), answer("a", 5, 5, [5, 0, 0, 0, 0, 0])]
    figures = summarize(answers)
    assert figures["accept_length"] == pytest.approx((3.0 + 1.0) / 2)
    assert figures["accept_length_pooled"] == pytest.approx(17 / 9)
    assert figures["accept_rate"] == pytest.approx(6 / 45)
    assert figures["correct_drafts_histogram"] == [6, 1, 1, 1, 0, 0]
    assert figures["verify_calls"] == sum(figures["correct_drafts_histogram"])
    assert figures["requests"] == 2
    assert figures["completion_tokens"] == 17


def test_a_request_without_verify_calls_does_not_dilute_the_length() -> None:
    answers = [answer("a", 12, 4, [4]), answer("a", 1, 0, [0])]
    figures = summarize(answers)
    assert figures["accept_length"] == 3.0
    assert figures["accept_length_pooled"] == 3.0
    assert summarize(answers[1:])["accept_length"] == 0.0


def test_identity_counts_compared_answers_only() -> None:
    answers = [
        answer("a", 2, 1, [1]),
        answer("a", 2, 1, [1], equal=False),
        answer("a", 2, 1, [1], equal=None),
    ]
    assert (summarize(answers)["identical"], summarize(answers)["compared"]) == (1, 2)


def test_categories_keep_their_order() -> None:
    answers = [answer(name, 2, 1, [1]) for name in ("b", "a", "b")]
    groups = by_category(answers)
    assert list(groups) == ["b", "a"]
    assert groups["b"]["requests"] == 2


class EchoEngine:
    """Answers with the length of the conversation and its last message."""

    tokenizer = None

    def __init__(self) -> None:
        self.calls: list[Sequence[Sequence[dict[str, str]]]] = []

    def generate(self, *, messages: Any, sampling_params: dict[str, Any]) -> list[dict[str, Any]]:
        self.calls.append(messages)
        return [
            {
                "text": f"{len(chat)}:{chat[-1]['content']}",
                "output_ids": [len(chat)],
                "meta_info": {"completion_tokens": 1, "spec_verify_ct": 0},
            }
            for chat in messages
        ]


def test_later_turns_follow_the_earlier_answers(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows = [["a"], ["b", "c"], ["d", "e"], ["f"]]
    lines = [json.dumps({"question_id": 1, "category": "c", "turns": turns}) for turns in rows]
    path.write_text("\n".join(lines))
    engine, plain = EchoEngine(), EchoEngine()
    batches = list(evaluate(Stopwatch(engine), Stopwatch(plain), load_prompts(path), {}, 3))
    assert [len(batch) for batch in batches] == [3, 1, 2]
    assert engine.calls == plain.calls
    assert engine.calls[2] == [
        [
            {"role": "user", "content": first},
            {"role": "assistant", "content": f"1:{first}"},
            {"role": "user", "content": second},
        ]
        for first, second in (("b", "c"), ("d", "e"))
    ]
    assert [one.turn for batch in batches for one in batch] == [0, 0, 0, 0, 1, 1]
    assert all(one.equal for batch in batches for one in batch)


def test_the_script_evaluates_a_real_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(write_target(tmp_path / "target"))
    head = str(write_head(tmp_path / "head"))
    prompts, output = tmp_path / "p.jsonl", tmp_path / "results.json"
    rows = [("x", ["hello", "more"]), ("y", ["what is this"]), ("x", ["go on"])]
    lines = [
        json.dumps({"question_id": i, "category": category, "turns": turns})
        for i, (category, turns) in enumerate(rows)
    ]
    prompts.write_text("\n".join(lines))
    files = ["--prompts", str(prompts), "--model", target, "--draft", head, "--output", str(output)]
    options = (
        "--num-steps 3 --max-new-tokens 10 --batch-size 2 --temperature 0.7 --context-length 64 "
        "--compile-cache-dir none"
    )
    status = load_script("eval_acceptance").main([*files, *options.split()])
    assert status == 0
    table = capsys.readouterr().out
    assert "4/4" in table
    results = json.loads(output.read_text())
    assert results["overall"]["identical"] == results["overall"]["compared"] == 4
    assert list(results["categories"]) == ["x", "y"]
    assert results["settings"]["prompts"]["count"] == 3
    assert results["settings"]["model"] == "target"
    assert results["software"]["platform"] == "cpu"
    assert set(results["tokens_per_second"]) == {"speculative", "plain"}
    assert str(tmp_path) not in output.read_text()
    for request in results["requests"]:
        meta = request["meta_info"]
        assert sum(meta["spec_correct_drafts_histogram"]) == meta["spec_verify_ct"]


def test_the_script_refuses_bad_input_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("eval_acceptance")
    assert script.main(["--prompts", str(tmp_path / "absent.jsonl")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "absent.jsonl" in err
    with pytest.raises(SystemExit) as exit_info:
        script.main(["--prompts", str(PROMPTS), "--batch-size", "0"])
    assert exit_info.value.code == 2
