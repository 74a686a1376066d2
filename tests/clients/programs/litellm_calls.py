"""Call a server with LiteLLM; arguments and results are JSON."""

import json
import sys
from typing import Any

import litellm


def main(address: str, key: str, model: str, messages: Any, prompt: str) -> dict[str, Any]:
    given: dict[str, Any] = {"api_base": f"{address}/v1", "api_key": key, "num_retries": 0}
    asked = given | {"max_tokens": 8, "temperature": 0.8, "seed": 7}
    chat = asked | {"messages": messages}
    name = f"openai/{model}"
    found: dict[str, Any] = {"chat": litellm.completion(name, **chat).model_dump()}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = litellm.completion(name, **chat, **options)
    found["stream"] = [chunk.model_dump() for chunk in chunks]
    whole = litellm.text_completion(prompt, f"text-completion-openai/{model}", **asked)
    found["completion"] = whole.model_dump()
    errors = found["errors"] = {}
    for label, other, changes in (
        ("value", name, {"temperature": -1}),
        ("model", "openai/another", {}),
        ("key", name, {"api_key": "wrong"}),
    ):
        try:
            litellm.completion(other, **(chat | changes))
        except Exception as error:  # exceptions have several base classes
            errors[label] = type(error).__name__
    return found


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
