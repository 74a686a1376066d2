"""Call Responses with openai-python and Messages with anthropic; arguments and results are JSON."""

import json
import sys
from typing import Any

from anthropic import Anthropic
from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
QUESTION = "What is the weather in Paris?"


def responses(client: OpenAI, sampling: dict[str, Any], model: str) -> dict[str, Any]:
    """A whole and a streamed answer, a call, and an answer to the result of the call."""
    asked = {"model": model, "input": QUESTION, "max_output_tokens": 8, **sampling}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    streamed = events[-1].response  # the library's helper takes none that the limit has ended
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    asked |= {"max_output_tokens": 100, "tools": [tool], "tool_choice": "required"}
    with client.responses.stream(**asked, parallel_tool_calls=False) as stream:
        for _ in stream:
            pass
        (call,) = stream.get_final_response().output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    history = [{"role": "user", "content": QUESTION}, call, result]
    last = client.responses.create(**asked | {"input": history, "tool_choice": "none"})
    return {
        "text": whole.output_text,
        "streamed": [streamed.output_text, "".join(deltas)],
        "tokens": [whole.usage.input_tokens, whole.usage.output_tokens],
        "call": [call.name, json.loads(call.arguments)],
        "after the call": [item.type for item in last.output],
    }


def messages(client: Anthropic, sampling: dict[str, Any], model: str) -> dict[str, Any]:
    """The same, and the number of tokens of the prompt."""
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    asked = {"model": model, "messages": history, "max_tokens": 8, "extra_body": sampling}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        deltas = list(stream.text_stream)
        streamed = stream.get_final_message()
    counted = client.messages.count_tokens(model=model, messages=history)
    tool = {"name": "weather", "input_schema": SCHEMA}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    asked |= {"max_tokens": 100, "tools": [tool]}
    with client.messages.stream(**asked, tool_choice=choice) as stream:
        turn = stream.get_final_message()
    (call,) = turn.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    history = [
        *history,
        {"role": "assistant", "content": turn.content},
        {"role": "user", "content": [result]},
    ]
    last = client.messages.create(**asked | {"messages": history}, tool_choice={"type": "none"})
    return {
        "text": whole.content[0].text,
        "streamed": [streamed.content[0].text, "".join(deltas)],
        "tokens": [counted.input_tokens, whole.usage.output_tokens],
        "call": [call.name, call.input],
        "after the call": [block.type for block in last.content],
    }


def main(address: str, key: str, model: str, sampling: dict[str, Any]) -> dict[str, Any]:
    openai = OpenAI(base_url=f"{address}/v1", api_key=key)
    anthropic = Anthropic(base_url=address, api_key=key)
    return {
        "responses": responses(openai, {"extra_body": sampling}, model),
        "messages": messages(anthropic, sampling, model),
    }


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
