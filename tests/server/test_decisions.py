"""Decisions: probabilities against the network, labels, refused requests, and limits."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from specjax.server import decisions, make_app
from specjax.server.decisions import DecisionAnswer, Predicate, encode_question, make_labels
from specjax.server.fields import ApiError
from specjax.testing import Client, running
from specjax.testing.dense import dense_logits
from specjax.testing.files import CONFIG, LETTERS
from specjax.text.tokenizer import Tokenizer

ROUTE = "/v1/decisions"
RED: dict[str, Any] = {"type": "predicate", "instructions": "red?"}
CHOICE: dict[str, Any] = {
    "type": "choice",
    "name": "c",
    "instructions": "which?",
    "choices": [
        {"value": "a"},
        {"value": "ab", "description": "x"},
        {"value": "true"},
        {"value": True},
    ],
}
SCORE: dict[str, Any] = {
    "type": "score",
    "name": "s",
    "instructions": "how?",
    "levels": [{"label": "lo"}, {"label": "mid", "description": ""}, {"label": "hi"}],
}
LINES = {
    "red?": ["A: false", "B: true"],
    "which?": ['A: "a"', 'B: "ab": x', 'C: "true"', "D: true"],
    "how?": ["A: lo", "B: mid", "C: hi"],
}


def prompt_of(question: dict[str, Any], text: str = "in") -> str:
    asked = question["instructions"]
    lines = [text, "", asked, *LINES[asked], "Reply with the label of one option."]
    return "<user>" + "\n".join(lines) + "<assistant>"


def label_logprob(engine: Any, prompt: str, label: str) -> float:
    """Sum over the letters of a label, each a token, by the network without cache and drafts."""
    prompt_ids, label_ids = map(engine.tokenizer.encode, (prompt, label))
    ids = [*prompt_ids, *label_ids[:-1]]
    logits = dense_logits(engine.runner.weights[0], ids, CONFIG)[len(prompt_ids) - 1 :]
    raw = logits.astype(np.float64)
    sums = np.log(np.sum(np.exp(raw), axis=-1))
    return float(sum(raw[i, token] - sums[i] for i, token in enumerate(label_ids)))


def expected(engine: Any, prompt: str, labels: list[str]) -> tuple[list[float], float]:
    """The probabilities, and the confidence."""
    weights = np.exp([label_logprob(engine, prompt, label) for label in labels])
    return [pytest.approx(x, abs=1e-5) for x in weights / sum(weights)], max(weights)


def check(engine: Any, question: dict[str, Any], answer: dict[str, Any], text: str = "in") -> None:
    count = len(LINES[question["instructions"]])
    probabilities, confidence = expected(engine, prompt_of(question, text), list("ABCD"[:count]))
    assert (answer["type"], answer["name"]) == (question["type"], question.get("name"))
    if question is RED:
        assert answer["probability"] == probabilities[1]
        return
    values = [entry["value"] for entry in answer["probabilities"]]
    actual = [entry["probability"] for entry in answer["probabilities"]]
    assert actual == probabilities
    assert answer["confidence"] == pytest.approx(confidence, abs=1e-5)
    if question is SCORE:
        assert answer["score"] == pytest.approx(actual[1] + 2 * actual[2])
        labels = [entry["label"] for entry in answer["probabilities"]]
        assert (values, labels) == ([0, 1, 2], ["lo", "mid", "hi"])
    else:
        assert [repr(value) for value in values] == ["'a'", "'ab'", "'true'", "True"]
        assert repr(answer["choice"]) == repr(values[actual.index(max(actual))])


def test_probabilities_are_those_of_the_network(engine, client) -> None:
    texts = [{"type": "input_text", "text": "i"}, {"type": "input_text", "text": "n"}]
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": texts}]
    questions = [SCORE, RED, CHOICE, RED]
    for sent, text, asked in (("in", "in", questions[1:2]), (messages, "x\n\ni\nn", questions)):
        answer = client.post(ROUTE, {"model": "tiny", "input": sent, "questions": asked})
        assert answer.status == 200, answer.error
        decision = answer.json()
        assert set(decision) == {"model", "answers", "usage"}
        for question, answered in zip(asked, decision["answers"], strict=True):
            check(engine, question, answered, text)
        prompts = [prompt_of(question, text) for question in asked]
        size = sum(len(engine.tokenizer.encode(prompt)) for prompt in prompts)
        usage = decision["usage"]
        assert usage["input_tokens"] == usage["total_tokens"] == size
        assert usage["output_tokens"] == 0
    # the last question repeats an earlier one
    assert usage["input_tokens_details"]["cached_tokens"] > size / 5


@pytest.mark.slow
def test_drafts_change_nothing(files, engine, client) -> None:
    body = {"input": "in", "questions": [SCORE, RED, CHOICE] * 30}
    with (
        files.engine(speculative=False, share_weights_with=engine) as plain,
        running(make_app(plain)) as port,
    ):
        plain_answers = Client(port).post(ROUTE, body).json()["answers"]
    answers = client.post(ROUTE, body).json()["answers"]
    for question, *pair in zip(body["questions"], answers, plain_answers, strict=True):
        for answer in pair:
            check(engine, question, answer)


def test_more_options_than_letters(engine, client, monkeypatch) -> None:
    assert make_labels(26) == [*map(chr, range(ord("A"), ord("Z") + 1))]
    labels = make_labels(27)
    assert labels[::13] == ["AA", "AN", "BA"]
    assert len(set(make_labels(255))) == 255
    monkeypatch.setattr(engine.tokenizer, "chat_template", "{{ messages[0].content[-7:] }}>")
    choices = [{"value": f"{i}"} for i in range(27)]
    asked = {"input": "in", "questions": [CHOICE | {"choices": choices}]}
    [answer] = client.post(ROUTE, asked).json()["answers"]
    probabilities, confidence = expected(engine, "option.>", labels)
    assert [x["probability"] for x in answer["probabilities"]] == probabilities
    assert answer["confidence"] == pytest.approx(confidence, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "param", "match"),
    [
        ({"x": 1}, "x", "unknown field 'x'"),
        ({"stream": True}, "stream", "unknown field"),
        ({"input": None}, "input", "input: "),
        ({"input": [{"role": "system", "content": "a"}]}, "input", r"input\[0\].role: "),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "text": ""}]}]},
            "input",
            r"input\[0\].content\[0\].type: Invalid enum value 'input_image'",
        ),
        ({"questions": []}, "questions", "length >= 1"),
        ({"questions": [RED] * 201}, "questions", "length <= 200"),
        ({"questions": [RED | {"y": 1}]}, "questions", r"unknown field `y`"),
        ({"questions": [RED, {"type": "predicate"}]}, "questions", r"\[1\]: .*`instructions`"),
        ({"questions": [RED | {"type": "rank"}]}, "questions", r"\[0\].type: .*'rank'"),
        ({"questions": [RED | {"name": 1}]}, "questions", r"\[0\].name: "),
        (
            {"questions": [CHOICE | {"choices": [{"value": "a"}]}]},
            "questions",
            r"\[0\].choices: .*length >= 2",
        ),
        (
            {"questions": [CHOICE | {"choices": [{"value": f"{i}"} for i in range(256)]}]},
            "questions",
            r"\[0\].choices: .*length <= 255",
        ),
        (
            {"questions": [CHOICE | {"choices": [{"value": 1}, {"value": "a"}]}]},
            "questions",
            r"choices\[0\].value",
        ),
        (
            {"questions": [CHOICE | {"choices": [{"value": "a"}, {"value": "a"}]}]},
            "questions",
            r"\[0\]: each value must be different",
        ),
        (
            {"questions": [SCORE | {"levels": [{"label": "a"}, {"label": "a"}]}]},
            "questions",
            r"\[0\]: each label must be different",
        ),
        (
            {"questions": [SCORE | {"levels": [{"label": f"{i}"} for i in range(11)]}]},
            "questions",
            r"\[0\].levels: .*length <= 10",
        ),
        ({"input": "a" * 128}, "input", "context_length=128"),
        ({"safety_identifier": 1}, "safety_identifier", "must be a string"),
    ],
)
def test_refused_requests(client, change: dict[str, Any], param: str | None, match: str) -> None:
    answer = client.post(ROUTE, {"input": "in", "questions": [RED]} | change)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert re.search(match, answer.error["message"])


def test_options_count_as_completions(engine, client, monkeypatch) -> None:
    with running(make_app(engine, max_requests=5)) as port:
        small = Client(port)
        assert small.post(ROUTE, {"input": "in", "questions": [RED, SCORE]}).status == 200
        answer = small.post(ROUTE, {"input": "in", "questions": [SCORE, SCORE]})
        assert (answer.status, "needs 6 completions" in answer.error["message"]) == (400, True)
    monkeypatch.setattr(decisions, "MAX_TOKENS", 300)
    assert client.post(ROUTE, {"input": "in", "questions": [SCORE]}).status == 200
    answer = client.post(ROUTE, {"input": "in", "questions": [SCORE] * 2})
    assert (answer.status, answer.error["param"]) == (400, "questions")
    assert "more than 300 prompt tokens" in answer.error["message"]


def service_of(template: str, letters: str = LETTERS) -> Any:
    """A service whose tokenizer joins a space with an A after it."""
    vocabulary = {letter: i for i, letter in enumerate([*letters, "Ġ", "ĠA"])}
    merges = [("Ġ", "A")] if "A" in letters else []
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, chat_template=template)
    return SimpleNamespace(
        tokenizer=tokenizer, engine=SimpleNamespace(context_length=500, reasoning=None)
    )


def test_labels_may_join_the_end_of_the_prompt() -> None:
    service = service_of("{{ messages[0].content }}Answer: ")
    prompt, labels = encode_question(service, "in", Predicate(instructions="red?"))
    decode = service.tokenizer.decode
    assert decode(prompt).endswith("option.Answer:")
    assert [decode(ids) for ids in labels] == [" A", " B"]
    assert [len(ids) for ids in labels] == [1, 2]


def test_models_that_cannot_reply_with_a_label() -> None:
    question = Predicate(instructions="red? </think>")
    closed = service_of("{{ messages[0].content }}<think></think>")
    assert encode_question(closed, "<think>", question)
    for service, match in (
        (service_of("{{ messages[0].content }}<think>"), "begins the reply with reasoning"),
        (service_of("{{ messages[0].content }}", "abc:"), "no tokens for the labels"),
    ):
        with pytest.raises(ValueError, match=match):
            encode_question(service, "in", question)


def test_aborted_questions_have_no_answer() -> None:
    meta = {"cached_tokens": 0, "input_token_logprobs": [(None, 1, None), (-1.0, 2, None)]}
    results = [{"meta_info": meta | {"finish_reason": {"type": x}}} for x in ("length", "abort")]
    answer = DecisionAnswer("tiny", [Predicate(instructions="red?")], [3])
    assert b'"probability":0.5' in answer.body(results[:1] * 2)
    with pytest.raises(ApiError, match="aborted") as refused:
        answer.body(results)
    assert (refused.value.status, refused.value.code) == (503, "aborted")
