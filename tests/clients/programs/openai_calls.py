"""Call a server with openai-python; arguments and results are JSON."""

import asyncio
import json
import sys
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

GIVEN = json.loads(sys.argv[1])
MESSAGES, PROMPT, MODEL = GIVEN["messages"], GIVEN["prompt"], GIVEN["model"]
NUM_AT_ONCE = 6


def seeded(number: int = 7) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 8, "temperature": 0.8, "seed": number}


def models(client: OpenAI) -> Any:
    found = [client.models.list().data[0], client.models.retrieve(MODEL)]
    return [model.model_dump() for model in found]


def chat(client: OpenAI) -> Any:
    asked = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **seeded()}
    return client.chat.completions.create(**asked).model_dump()


def chat_stream(client: OpenAI) -> Any:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    asked = {"messages": MESSAGES, "logprobs": True, **seeded(), **options}
    return [chunk.model_dump() for chunk in client.chat.completions.create(**asked)]


def chat_helper(client: OpenAI) -> Any:
    """Collect chunks with the library's helper, which raises if a limit ends the text."""
    with client.chat.completions.stream(messages=MESSAGES, stop=" ", **seeded()) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        return deltas, stream.get_final_completion().model_dump()


def samples(client: OpenAI) -> Any:
    asked = {"messages": MESSAGES, "n": 2, **seeded()}
    whole = client.chat.completions.create(**asked)
    texts = ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    return [choice.message.content for choice in whole.choices], texts


def completion(client: OpenAI) -> Any:
    asked = {"prompt": PROMPT, "logprobs": 2, "echo": True, **seeded()}
    return client.completions.create(**asked).model_dump()


def completion_stream(client: OpenAI) -> Any:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = client.completions.create(prompt=PROMPT, logprobs=2, **seeded(), **options)
    return [chunk.model_dump() for chunk in stream]


def batch(client: OpenAI) -> Any:
    found = client.completions.create(prompt=[PROMPT, "One, two,"], **seeded(), n=2)
    return [choice.text for choice in sorted(found.choices, key=lambda choice: choice.index)]


def stop(client: OpenAI) -> Any:
    asked = {**seeded(), "temperature": 0}
    whole = client.completions.create(prompt=PROMPT, **asked).choices[0].text
    word = whole.split()[2]
    cut = client.completions.create(prompt=PROMPT, stop=[word, "\0"], **asked).choices[0]
    return whole, word, cut.text, cut.finish_reason


def extensions(client: OpenAI) -> Any:
    body = {"top_k": 1, "ignore_eos": True, "speculative": False}
    found = client.chat.completions.create(messages=MESSAGES, extra_body=body, **seeded())
    return found.choices[0].message.content


class Fruit(BaseModel):
    """A schema for answers."""

    name: str = Field(max_length=12)
    is_red: bool
    count: int = Field(ge=1, le=9)


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def parsed(client: OpenAI) -> Any:
    """Structured output through the library's models."""
    asked = seeded() | {"messages": MESSAGES, "max_tokens": 120, "response_format": Fruit}
    found = client.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(found, Fruit)
    return found.model_dump()


def tool_calls(client: OpenAI) -> Any:
    """A required call, its result, and a stream that the library's helper collects."""
    question = {"role": "user", "content": "What is the weather in Paris?"}
    asked: Any = seeded() | {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 80}
    asked |= {"parallel_tool_calls": False, "messages": [question]}
    choice = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        collected = stream.get_final_completion().choices[0]
    (call,) = choice.message.tool_calls or ()
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    turns = [question, choice.message.model_dump(exclude_none=True), result]
    after = client.chat.completions.create(messages=turns, tools=[WEATHER], **seeded())
    found = [choice, collected, after.choices[0]]
    return [one.model_dump() for one in found]


def at_once(client: OpenAI) -> Any:
    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as many:
            calls = [
                many.completions.create(prompt=PROMPT, **seeded(i)) for i in range(NUM_AT_ONCE)
            ]
            return [found.choices[0].text for found in await asyncio.gather(*calls)]

    return asyncio.run(ask())


def errors(client: OpenAI) -> Any:
    wrong_key = client.with_options(api_key="wrong")
    tool = {"type": "function", "function": {"parameters": {}}}

    def chat(**changes: Any) -> Any:
        return client.chat.completions.create(**{"messages": MESSAGES, **seeded(), **changes})

    calls = {
        "value": lambda: chat(temperature=-1),
        "type": lambda: chat(max_tokens="many"),
        "unknown": lambda: chat(extra_body={"max_tokns": 1}),
        "tools": lambda: chat(tools=[tool]),
        "length": lambda: chat(messages=[{"role": "user", "content": "word " * 1000}]),
        "model": lambda: chat(model="another"),
        "route": lambda: client.embeddings.create(model=MODEL, input="a"),
        "key": lambda: wrong_key.models.list(),
        "stream": lambda: list(chat(stream=True, top_p=2)),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except openai.APIStatusError as error:
            found[name] = [type(error).__name__, error.status_code, error.code, error.param]
    return found


def leaving(client: OpenAI) -> Any:
    """Run into a timeout, and close streams after their first chunk."""
    long: Any = {
        "prompt": PROMPT,
        **seeded(),
        "max_tokens": 200,
        "extra_body": {"ignore_eos": True},
    }
    found = []
    try:
        client.with_options(timeout=0.2, max_retries=0).completions.create(**long)
    except openai.APITimeoutError as error:
        found.append(type(error).__name__)
    with client.completions.create(**long, stream=True) as stream:
        found.append(type(next(iter(stream))).__name__)

    async def cancel() -> None:
        async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as other:
            task = asyncio.create_task(other.completions.create(**long))
            await asyncio.sleep(0.2)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                found.append("CancelledError")

    asyncio.run(cancel())
    return found


CALLS = (
    *(models, chat, chat_stream, chat_helper, samples, completion, completion_stream),
    *(batch, stop, extensions, parsed, tool_calls, at_once, errors, leaving),
)

if __name__ == "__main__":
    with OpenAI(base_url=f"{GIVEN['address']}/v1", api_key=GIVEN["key"]) as made:
        print(json.dumps({call.__name__: call(made) for call in CALLS}))
