"""openai-python, anthropic, LangChain and Instructor with a model that writes harmony."""

from collections.abc import Iterator
from typing import Any

import pytest

from ..support.harmony_files import IN_ORDER, exactly, write_harmony
from ..support.server_process import serving, wait_until_ready
from .conftest import KEY, Run

BEFORE = "<|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>hm<|end|>{BEFORE}"
PREAMBLE = f"<|channel|>commentary<|message|>So:<|end|>{BEFORE}"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}'
TEXT = "<|channel|>final<|message|>Hi"
ARGUMENTS = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_steps": 3,
    "grammar_backend": "llguidance",
    "reasoning_parser": "gpt-oss",
    "tool_call_parser": "gpt-oss",
    "max_running_requests": 2,
    "batch_buckets": (2,),
    "chunked_prefill_size": 32,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def asked(
    run_program: Run, files: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """Arguments that all programs get."""
    model = write_harmony(tmp_path_factory.mktemp("harmony") / "model", IN_ORDER)
    arguments = ARGUMENTS | {"model": model, "compile_cache_dir": files.cache}
    with serving(arguments, "--served-model-name", "tiny", key=KEY) as (process, client):
        wait_until_ready(process, client)
        yield {"address": f"http://127.0.0.1:{client.port}", "key": KEY, "model": "tiny"}


def test_clients_get_the_parts_of_messages(run_program: Run, asked: dict[str, Any]) -> None:
    texts = {"text": exactly(THOUGHT + TEXT), "called": exactly(THOUGHT + PREAMBLE + CALL)}
    found = run_program("harmony_calls", **texts, **asked)
    assert found["chats"]["parsed"] in (1, 2)
    whole, turn, collected, last = found["chats"]["choices"]
    for choice in (whole, last):
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "Hi")
        assert choice["finish_reason"] == "stop"
    for choice in (turn, collected):
        message = choice["message"]
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], call["function"]["arguments"]) == ("f", '{"x": 1}')
        assert (message["reasoning_content"], message["content"]) == ("hm", "So:")
        assert choice["finish_reason"] == "tool_calls"
    kinds, arguments, text, num_reasoning = found["responses"]
    assert kinds == ["reasoning", "message", "function_call"]
    assert (arguments, text) == ('{"x": 1}', "Hi")
    assert num_reasoning > 0
    assert found["messages"] == [
        *(["thinking", "text", "tool_use"], {"x": 1}),
        *(["thinking", "text"], "Hi"),
    ]
    assert found["langchain"] == ["So:", "f", {"x": 1}, "Hi"]


def test_structured_output_and_tools(run_program: Run, asked: dict[str, Any]) -> None:
    """Schemas hold in the channel final, and forced calls have their header."""
    found = run_program("agent_calls", limit=300, **asked)
    for name in ("langchain tools", "langchain stream"):
        ((called, keys),) = found.pop(name)
        assert called == "get_weather"
        assert "city" in keys  # the schema allows others
    assert len(found) == 4
    for fruit in found.values():
        assert set(fruit) == {"name", "count"}
        assert 1 <= fruit["count"] <= 9
