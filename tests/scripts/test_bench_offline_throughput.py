"""The throughput benchmark, end to end on a tiny model, and the requests that it makes."""

import json

import pytest

from specjax.bench_data import jsonl_requests, random_requests, sharegpt_requests

from ..loading import load_script
from ..tiny_checkpoints import letter_tokenizer

TOKENIZER = letter_tokenizer()


@pytest.fixture(scope="module")
def script():
    return load_script("bench_offline_throughput")


@pytest.fixture
def common(files):
    return (
        f"--model {files.target} --draft {files.head} --speculative-num-steps 2 --page-size 4"
        f" --chunked-prefill-size 16 --context-length 64 --compile-cache-dir {files.cache}"
    )


def test_all_modes_and_sizes_give_a_row_each(script, common, tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    output.write_text("{}\n")  # rows are appended
    arguments = (
        f"{common} --num-prompts 5 --random-input-len 9 --random-output-len 12 --temperature 0.8"
        f" --modes spec,plain_sync --batch 1,2 --result-filename {output}"
    )
    assert script.main(arguments.split()) == 0
    _, *rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["max_running_requests"], row["mode"]) for row in rows] == [
        (1, "spec"),
        (1, "plain_sync"),
        (2, "spec"),
        (2, "plain_sync"),
    ]
    requests = random_requests(5, 97, 9, 12, 0.0, 1)
    for row in rows:
        assert row["successful_requests"] == 5
        assert row["equal_share"] == 1.0
        assert row["total_input_tokens"] == sum(len(r.input_ids) for r in requests)
        assert row["total_output_tokens"] == sum(r.output_len for r in requests)
        seconds, num_out = row["total_latency"], row["total_output_tokens"]
        assert row["output_throughput"] == num_out / seconds
        assert row["total_throughput"] == pytest.approx(
            row["input_throughput"] + row["output_throughput"]
        )
        assert row["last_gen_throughput"] > 0
        assert row["num_retractions"] == 0
        is_plain = row["mode"] == "plain_sync"
        assert (row["accept_length"] is None) == (row["verify_calls"] == 0) == is_plain
        assert row["settings"]["speculative_num_steps"] == (0 if is_plain else 2)
        assert not any(str(tmp_path.parent) in str(value) for value in row["settings"].values())
    captured = capsys.readouterr()
    table = [line for line in captured.out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(rows)
    assert len({len(line) for line in table}) == 1
    assert "100.0% or more in every row" in captured.out
    assert "spec, batch 1: 100%" in captured.err


def test_a_sharegpt_file_with_stops(script, common, tmp_path, capsys):
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(CHATS))
    output = tmp_path / "rows.jsonl"
    arguments = (
        f"{common} --dataset-name sharegpt --dataset-path {path} --num-prompts 9 --skip-warmup"
        f" --disable-ignore-eos --apply-chat-template --modes plain_sync --batch 2"
        f" --result-filename {output}"
    )
    assert script.main(arguments.split()) == 0
    (row,) = [json.loads(line) for line in output.read_text().splitlines()]
    assert row["successful_requests"] == 2
    assert row["settings"]["dataset_file"] == "chats.json"
    assert row["total_output_tokens"] <= 4 + 2
    assert "plain_sync |     2 |        2 |" in capsys.readouterr().out


def test_bad_input_is_named(script, common, tmp_path, capsys):
    for arguments, message in (
        ("--modes fast", "['fast'] not among"),
        ("--speculative-algorithm none --modes spec", "exclude each other"),
        ("--dataset-name sharegpt", "needs --dataset-path"),
        ("--num-prompts 0", "--num-prompts 0 must be at least 1"),
        ("--extra-request-body 3", "must be a JSON object"),
    ):
        with pytest.raises(SystemExit):
            script.parse_arguments(arguments.split())
        assert message in capsys.readouterr().err
    long = f"{common} --num-prompts 1 --random-input-len 90 --random-range-ratio 1 --skip-warmup"
    assert script.main([*long.split(), "--batch", "1"]) == 2
    assert "context_length=64" in capsys.readouterr().err


def test_a_difference_counts(script):
    assert script.equal_share([[1], [2, 3]], [[1], [2, 3]]) == 1.0
    assert script.equal_share([[1], [2]], [[1], [2, 3]]) == 0.5


# requests


CHATS = [
    {"conversations": [{"from": "human", "value": "abc"}, {"from": "gpt", "value": "defg"}]},
    {"conversations": [{"from": "human", "value": "no answer"}]},
    {"conversation": [{"from": "human", "value": "hij"}, {"from": "gpt", "value": "kl"}]},
    {"conversations": [{"from": "human", "value": "x" * 80}, {"from": "gpt", "value": "yy"}]},
]


def test_random_requests_keep_their_bounds_and_their_seed():
    requests = random_requests(300, 7, 20, 10, 0.5, 3)
    assert {len(r.input_ids) for r in requests} == set(range(10, 21))
    assert {r.output_len for r in requests} == set(range(5, 11))
    assert {i for r in requests for i in r.input_ids} == set(range(7))
    assert requests == random_requests(300, 7, 20, 10, 0.5, 3)
    assert requests != random_requests(300, 7, 20, 10, 0.5, 4)
    fixed = random_requests(4, 7, 20, 10, 1.0, 0)
    assert {(len(r.input_ids), r.output_len) for r in fixed} == {(20, 10)}
    with pytest.raises(ValueError, match="random_range_ratio=2"):
        random_requests(1, 7, 20, 10, 2.0, 0)
    with pytest.raises(ValueError, match="random_output_len=0"):
        random_requests(1, 7, 20, 0, 1.0, 0)


def test_sharegpt_requests(tmp_path):
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(CHATS))
    requests = sharegpt_requests(path, 9, TOKENIZER, context_length=64)
    found = sorted((TOKENIZER.decode(r.input_ids), r.output_len) for r in requests)
    assert found == [("abc", 4), ("hij", 2)]
    assert len(sharegpt_requests(path, 1, TOKENIZER, context_length=64)) == 1
    (one, two) = sharegpt_requests(
        path, 9, TOKENIZER, context_length=64, output_len=7, apply_chat_template=True
    )
    assert one.output_len == two.output_len == 7
    assert TOKENIZER.decode(one.input_ids).startswith("<user>")
    with pytest.raises(ValueError, match="at most 3 tokens"):
        sharegpt_requests(path, 9, TOKENIZER, context_length=3)
    path.write_text("{}")
    with pytest.raises(ValueError, match="no JSON list"):
        sharegpt_requests(path, 9, TOKENIZER, context_length=64)
    path.write_text("[{}]")
    with pytest.raises(ValueError, match="conversation 0"):
        sharegpt_requests(path, 9, TOKENIZER, context_length=64)


def test_jsonl_requests(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "ab", "output_len": 3},
        {"messages": [{"role": "user", "content": "cd"}]},
        {"question_id": "q", "category": "c", "turns": ["ef", "later"]},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    requests = jsonl_requests(path, 4, TOKENIZER, output_len=8)
    texts = [TOKENIZER.decode(r.input_ids) for r in requests]
    assert texts == ["ab", "<user>cd<assistant>", "<user>ef<assistant>", "ab"]
    assert [r.output_len for r in requests] == [3, 8, 8, 3]
    (templated,) = jsonl_requests(path, 1, TOKENIZER, output_len=8, apply_chat_template=True)
    assert TOKENIZER.decode(templated.input_ids) == "<user>ab<assistant>"
    for bad, message in (
        ('{"prompt": "a"}\n[]', "line 2"),
        ('{"text": "a"}', "none of prompt"),
        ('{"turns": []}', "at least one string"),
        ("", "holds no prompts"),
    ):
        path.write_text(bad)
        with pytest.raises(ValueError, match=message):
            jsonl_requests(path, 1, TOKENIZER, output_len=8)
