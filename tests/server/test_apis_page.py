"""docs/apis.md and the parsers of Responses and Messages agree."""

import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from specjax.server import fields
from specjax.server.blocks import Block
from specjax.server.fields import SAMPLING, ApiError, Body
from specjax.server.messages import MessageAnswer, count_tokens, read_message
from specjax.server.responses import ResponseAnswer, read_input, read_response
from specjax.server.service import Service
from specjax.text.tool_formats import ToolCall

PAGE = (Path(__file__).parents[2] / "docs" / "apis.md").read_text("utf-8")
RESPONSES, MESSAGES = PAGE.split("## Responses\n")[1].split("## Messages\n")
# accepted like the sampling fields
COMMON = SAMPLING | {"best_of", "return_token_ids"}
META = {"prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0}
# a block or item with what any kind needs
ANYTHING: dict[str, Any] = {
    **{"role": "user", "content": "x", "text": "a", "thinking": "b", "output": "x"},
    **{"id": "1", "call_id": "1", "tool_use_id": "1", "name": "f", "arguments": "{}", "input": {}},
}


def rows(section: str, title: str) -> list[list[str]]:
    table = re.search(rf"^\| {title} \|.*\n\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE)
    assert table is not None
    return [line.strip("|").split("|") for line in table[1].splitlines()]


def treatments(section: str, title: str) -> dict[str, tuple[str, str]]:
    """By name: its treatment, and the message in quotes."""
    found = {}
    for names, treatment, note in rows(section, title):
        message = "".join(re.findall(r'"(.*?)"', note)[:1])
        for name in re.findall(r"`([\w.]+)`", names):
            assert name not in found
            found[name] = (treatment.strip(), message)
    return found


def refusal_of(read: Callable[..., Any], *arguments: Any) -> str:
    """The message of the error that a reader raises, or an empty text."""
    try:
        read(*arguments)
    except ApiError as error:
        return error.message
    return ""


@pytest.fixture
def service(engine) -> Service:
    return Service(engine)


@pytest.mark.parametrize(
    ("section", "read", "base"),
    [
        (RESPONSES, read_response, {"input": "a"}),
        (MESSAGES, read_message, {"messages": [{"role": "user", "content": "a"}]}),
        (MESSAGES, count_tokens, {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_fields(service, section, read, base) -> None:
    table = treatments(section, "field")
    body = Body(base)
    read(service, body)
    known = {name for name, (treatment, _) in table.items() if treatment != "warned"}
    assert body.looked_up - COMMON <= known
    assert {name for name, (how, _) in table.items() if how == "done"} <= body.looked_up | SAMPLING
    for name, (treatment, message) in table.items():
        if treatment == "done":
            assert name not in fields.IGNORED
            continue
        if treatment == "refused" and read is count_tokens:
            continue
        before = service.ignored_fields.count
        refusal = refusal_of(read, service, Body(base | {name: {"a": 1}}))
        assert bool(refusal) == (treatment == "refused"), name
        assert message in refusal
        assert service.ignored_fields.count - before == (treatment == "warned"), name


def test_items() -> None:
    for kind, (treatment, message) in treatments(RESPONSES, "item of `input`").items():
        refusal = refusal_of(read_input, [ANYTHING | {"type": kind}])
        assert treatment == ("refused" if refusal else "done"), kind
        if kind == "message":  # the quoted message is that of its other parts
            parts = [{"type": "input_image", "image_url": "x"}]
            refusal = refusal_of(read_input, [{"role": "user", "content": parts}])
        assert message in refusal


def test_blocks(service) -> None:
    for kind, (treatment, message) in treatments(MESSAGES, "block").items():
        opening, block = {"role": "user", "content": "a"}, ANYTHING | {"type": kind}
        turns = [{"role": role, "content": [block]} for role in ("user", "assistant")]
        bodies = [Body({"messages": [opening, turn]}) for turn in turns]
        refusals = [refusal_of(read_message, service, body) for body in bodies]
        num_accepted = refusals.count("")
        assert num_accepted == {"refused": 0}.get(treatment, 2 if kind == "text" else 1), kind
        assert all(message in refusal for refusal in refusals)


def events(answer: Any) -> set[str]:
    """The types of all events of an answer, and of their deltas."""
    blocks = [Block("reasoning", 0), Block("text", 1), Block("call", 2, ToolCall("f", "1"))]
    answer.blocks = blocks
    sent = list(answer.begin())
    for block in blocks:
        sent += [*answer.begin_block(block), answer.grow_block(block, "x")]
        sent += answer.end_block(block)
    for reason in ("stop", "length", "abort"):
        sent += answer.end(META | {"finish_reason": {"type": reason}}, 0)
    found = {event["type"] for event in sent}
    found |= {event["delta"]["type"] for event in sent if event["type"] == "content_block_delta"}
    return found | set(
        re.findall(r"^event: (.*)$", answer.failed(ApiError(503, "x")).decode(), re.M)
    )


@pytest.mark.parametrize(
    ("section", "kind", "more"),
    [
        (RESPONSES, ResponseAnswer, {"request": {}}),
        (MESSAGES, MessageAnswer, {"num_prompt_tokens": 1}),
    ],
)
def test_events(section, kind, more) -> None:
    parts = Mock(return_value=SimpleNamespace(ends_with_call=False))
    sent = events(kind(id="1", model="m", new_parts=parts, texts=Mock(), **more))
    cells = chain.from_iterable(row[:1] for row in rows(section, "event"))
    named = set(re.findall(r"`([\w.]+)`", " ".join(cells)))
    deltas = {name for name in sent if name.endswith("_delta")} - named
    assert named | deltas == sent
    notes = " ".join(row[1] for row in rows(section, "event"))
    assert {name for name in re.findall(r"`(\w+)`", notes) if name.endswith("_delta")} == deltas
    never = re.findall(r"`([\w.]+)`", section.split("Never sent:")[1])
    assert never
    assert not sent & set(never)


def test_answers(service) -> None:
    turns = [{"role": "user", "content": "a"}]
    for section, read, base in (
        (RESPONSES, read_response, {"input": "a"}),
        (MESSAGES, read_message, {"messages": turns}),
    ):
        _, answer = read(service, Body(base))
        written = answer.response(META | {"finish_reason": {"type": "stop"}}, 0)
        has, lacks = re.findall(
            r"The (?:response|message) has (.*?)\. It has no\s(.*?)\.", section, re.S
        )[0]
        assert set(re.findall(r"`(\w+)`", has)) == written.keys()
        assert not written.keys() & set(re.findall(r"`(\w+)`", lacks))
    usage = re.findall(r"`usage` has only (.*?)\.\n", MESSAGES, re.S)[0]
    assert set(re.findall(r"`(\w+)`", usage)) == written["usage"].keys()
