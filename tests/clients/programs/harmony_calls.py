"""Reasoning, schemas and tools of a model that writes harmony; arguments and results are JSON."""

import json
import sys
from typing import Any, Literal

from anthropic import Anthropic
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel

QUESTION = {"role": "user", "content": "hi"}


class Point(BaseModel):
    """A point."""

    x: Literal[1, 2]


PARAMETERS = Point.model_json_schema()
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}


def chats(client: OpenAI, model: str, text: str, called: str) -> dict[str, Any]:
    """A schema, a text, a call that the model chooses, and an answer to its result."""
    asked: Any = {"model": model, "messages": [QUESTION], "max_tokens": 300}
    free = {"seed": 1, "temperature": 1, "response_format": Point}
    parsed = client.chat.completions.parse(**asked, **free)
    whole = client.chat.completions.create(**asked, extra_body={"ebnf": text}).choices[0]
    asked |= {"tools": [TOOL], "extra_body": {"ebnf": called}}
    turn = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        collected = stream.get_final_completion().choices[0]
    (call,) = turn.message.tool_calls or ()
    result = {"role": "tool", "tool_call_id": call.id, "content": "9"}
    history = [QUESTION, turn.message.model_dump(exclude_none=True), result]
    last = client.chat.completions.create(
        **asked | {"messages": history, "extra_body": {"ebnf": text}}
    )
    found = [whole, turn, collected, last.choices[0]]
    return {
        "parsed": parsed.choices[0].message.parsed.x,
        "choices": [choice.model_dump() for choice in found],
    }


def responses(client: OpenAI, model: str, text: str, called: str) -> list[Any]:
    """A call in a stream, and an answer to its result."""
    asked: Any = {"model": model, "tools": [{"type": "function", **TOOL["function"]}]}
    with client.responses.stream(**asked, input="hi", extra_body={"ebnf": called}) as stream:
        for _ in stream:
            pass
        turn = stream.get_final_response()
    call = turn.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "9"}
    history = [QUESTION, *turn.output, result]
    last = client.responses.create(**asked, input=history, extra_body={"ebnf": text})
    reasoned = last.usage.output_tokens_details.reasoning_tokens
    return [[item.type for item in turn.output], call.arguments, last.output_text, reasoned]


def messages(client: Anthropic, model: str, text: str, called: str) -> list[Any]:
    """The same."""
    tool = {"name": "f", "input_schema": PARAMETERS}
    history: list[Any] = [QUESTION]
    asked: Any = {"model": model, "max_tokens": 300, "tools": [tool]}
    with client.messages.stream(**asked, messages=history, extra_body={"ebnf": called}) as stream:
        turn = stream.get_final_message()
    result = {"type": "tool_result", "tool_use_id": turn.content[-1].id, "content": "9"}
    history += [
        {"role": "assistant", "content": turn.content},
        {"role": "user", "content": [result]},
    ]
    last = client.messages.create(**asked, messages=history, extra_body={"ebnf": text})
    return [
        [block.type for block in turn.content],
        turn.content[-1].input,
        [block.type for block in last.content],
        last.content[-1].text,
    ]


def langchain(base: str, key: str, model: str, text: str, called: str) -> list[Any]:
    """A call that the model chooses, in a stream, and an answer to its result."""
    chat = ChatOpenAI(base_url=base, api_key=key, model=model, max_completion_tokens=300)
    bound, merged = chat.bind_tools([TOOL]), None
    for chunk in bound.stream("hi", extra_body={"ebnf": called}):
        merged = chunk if merged is None else merged + chunk
    (call,) = merged.tool_calls
    history = [("user", "hi"), merged, {"role": "tool", "content": "9", "tool_call_id": call["id"]}]
    last = bound.invoke(history, extra_body={"ebnf": text})
    return [merged.content, call["name"], call["args"], last.content]


def main(address: str, key: str, model: str, text: str, called: str) -> dict[str, Any]:
    base = f"{address}/v1"
    openai = OpenAI(base_url=base, api_key=key)
    asked = model, text, called
    return {
        "chats": chats(openai, *asked),
        "responses": responses(openai, *asked),
        "messages": messages(Anthropic(base_url=address, api_key=key), *asked),
        "langchain": langchain(base, key, *asked),
    }


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
