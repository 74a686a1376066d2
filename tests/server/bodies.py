"""Routes, and parts of requests and responses."""

from typing import Any

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
TOOL = {"type": "function", "function": {"name": "f"}}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
ENGINE_GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True}


def choices_of(chunks: list[Any], index: int = 0) -> list[Any]:
    return [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
