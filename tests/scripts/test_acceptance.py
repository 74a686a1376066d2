import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ..loading import load_bench, run_bench
from ..tiny_engines import Files

script, data = load_bench("acceptance"), load_bench("data")
Stopwatch, by_category, summarize = script.Stopwatch, script.by_category, script.summarize


def load_prompts(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = data.read_lines(path, data.SPEC_BENCH)
    return rows


def answer(category: str, tokens: int, verifies: int, histogram: list[int], **more: Any) -> Any:
    correct = sum(i * count for i, count in enumerate(histogram))
    return script.Answer(
        question_id="q",
        category=category,
        turn=0,
        meta_info={
            "completion_tokens": tokens,
            "spec_verify_ct": verifies,
            "spec_accept_length": tokens / verifies if verifies else 0.0,
            "spec_num_correct_drafts": correct,
            "spec_num_proposed_drafts": 5 * verifies,
            "spec_correct_drafts_histogram": histogram,
        },
        **{"difference": None, **more},
    )


def test_own_prompts_cover_the_categories() -> None:
    prompts = load_prompts(data.PROMPTS)
    categories = {prompt["category"] for prompt in prompts}
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
    assert len({prompt["question_id"] for prompt in prompts}) == len(prompts)
    assert len({tuple(prompt["turns"]) for prompt in prompts}) == len(prompts)
    assert any(len(prompt["turns"]) > 1 for prompt in prompts)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"question_id": 1, "category": "c"}',
        '{"category": "c", "turns": ["t"]}',
        '{"question_id": 1, "category": "c", "turns": []}',
        '{"question_id": 1, "category": "c", "turns": "one"}',
        '{"question_id": 1, "category": "c", "turns": [1]}',
    ],
)
def test_a_bad_line_is_named(line: str, tmp_path: Path) -> None:
    good = '{"question_id": 1, "category": "c", "turns": ["t"]}'
    path = tmp_path / "p.jsonl"
    path.write_text(f"{good}\n\n{line}\n")
    with pytest.raises(ValueError, match=r"p\.jsonl, line 3: "):
        load_prompts(path)


def test_separators_inside_a_text_end_no_line(tmp_path: Path) -> None:
    path, text = tmp_path / "p.jsonl", "a\u2028b\u2029c\u0085d"
    row = {"question_id": 1, "category": "c", "turns": [text]}
    path.write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
    assert load_prompts(path) == [row]


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


def test_identity_counts_answers_without_a_difference() -> None:
    answers = [answer("a", 2, 1, [1]), answer("a", 2, 1, [1], difference="at token 0")]
    assert summarize(answers)["identical"] == 1


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
    watches = {"speculative": Stopwatch(engine), "plain": Stopwatch(plain)}
    batches = list(script.evaluate(watches, load_prompts(path), {}, 3))
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
    assert all(one.difference is None for batch in batches for one in batch)


@pytest.mark.slow
def test_the_script_evaluates_a_real_engine(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, output = tmp_path / "p.jsonl", tmp_path / "results.json"
    rows = [("x", ["hello", "more"]), ("y", ["what is this"]), ("x", ["go on"])]
    lines = [
        json.dumps({"question_id": i, "category": category, "turns": turns})
        for i, (category, turns) in enumerate(rows)
    ]
    prompts.write_text("\n".join(lines))
    options = (
        f"--prompts {prompts} --model {files.target} --draft {files.head} --output {output}"
        " --num-steps 3 --max-new-tokens 10 --batch-size 1 --temperature 0.7 --context-length 64"
        f" --compile-cache-dir {files.cache}"
    )
    assert run_bench("acceptance", options) == 0
    table = capsys.readouterr().out
    assert "4/4" in table
    results = json.loads(output.read_text())
    assert results["overall"]["identical"] == results["overall"]["requests"] == 4
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
    assert run_bench("acceptance", f"--prompts {tmp_path / 'absent.jsonl'}") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "absent.jsonl" in err
    with pytest.raises(SystemExit) as exit_info:
        run_bench("acceptance", f"--prompts {data.PROMPTS} --batch-size 0")
    assert exit_info.value.code == 2
