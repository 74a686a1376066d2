"""Structured output and tools through LangChain and Instructor; arguments and results are JSON."""

import json
import sys
from typing import Any

import instructor
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel, Field


class Fruit(BaseModel):
    """A fruit."""

    name: str = Field(max_length=12)
    count: int = Field(ge=1, le=9)


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


def main(address: str, key: str, model: str, limit: int = 100) -> dict[str, Any]:
    base = f"{address}/v1"
    drawn = {"temperature": 0.8, "seed": 3, "max_completion_tokens": limit}
    chat = ChatOpenAI(base_url=base, api_key=key, model=model, **drawn)
    found: dict[str, Any] = {}
    for method in ("json_schema", "function_calling"):
        fruit = chat.with_structured_output(Fruit, method=method).invoke("Name a fruit.")
        found[f"langchain {method}"] = fruit.model_dump()
    bound = chat.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False)
    question = "What is the weather in Paris?"
    answer = bound.invoke(question)
    found["langchain tools"] = [[call["name"], sorted(call["args"])] for call in answer.tool_calls]
    merged = None
    for chunk in bound.stream(question):
        merged = chunk if merged is None else merged + chunk
    assert merged is not None
    found["langchain stream"] = [[call["name"], sorted(call["args"])] for call in merged.tool_calls]
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(OpenAI(base_url=base, api_key=key), mode=mode)
        ask = [{"role": "user", "content": "Name a fruit."}]
        fruit = client.chat.completions.create(
            model=model, messages=ask, response_model=Fruit, max_tokens=limit, seed=1, max_retries=1
        )
        found[f"instructor {mode.name}"] = fruit.model_dump()
    return found


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
