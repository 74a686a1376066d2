"""LiteLLM through ``openai/`` returns the engine's texts and usage."""

from typing import Any

import pytest

from .conftest import MESSAGES, PROMPT, SAMPLING


@pytest.fixture(scope="module")
def found(run_program, given) -> Any:
    return run_program("litellm_calls", messages=MESSAGES, prompt=PROMPT, **given)


def test_answers_equal_the_engine(engine, found) -> None:
    said = engine.generate(messages=MESSAGES, sampling_params=SAMPLING)
    assert found["chat"]["choices"][0]["message"]["content"] == said["text"]
    used = found["chat"]["usage"]
    assert used["completion_tokens"] == said["meta_info"]["completion_tokens"]
    parts = [choice["delta"] for chunk in found["stream"] for choice in chunk["choices"]]
    assert "".join(part["content"] or "" for part in parts) == said["text"]
    usages = [chunk["usage"] for chunk in found["stream"] if chunk.get("usage")]
    assert [one["total_tokens"] for one in usages] == [used["total_tokens"]]
    whole = found["completion"]["choices"][0]["text"]
    assert whole == engine.generate(PROMPT, SAMPLING)["text"]


def test_errors_raise_the_librarys_exceptions(found) -> None:
    assert found["errors"] == {
        "value": "BadRequestError",
        "model": "NotFoundError",
        "key": "AuthenticationError",
    }
