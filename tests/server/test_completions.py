"""``/v1/completions`` against the engine itself."""

import pytest

GREEDY = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
ENGINE_GREEDY = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True}
ROUTE = "/v1/completions"


def text_of(chunks) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


@pytest.mark.parametrize("prompt", ["hello", [4, 5, 6], ["hello", "The sky"], [[4, 5], [6, 7, 8]]])
def test_texts_are_the_engines(engine, client, prompt) -> None:
    kind = "prompt" if isinstance(prompt[0], str) else "input_ids"
    expected = engine.generate(sampling_params=ENGINE_GREEDY, **{kind: prompt})
    expected = expected if isinstance(expected, list) else [expected]
    body = client.post(ROUTE, {"prompt": prompt} | GREEDY).json()
    assert body["object"] == "text_completion"
    assert [choice["text"] for choice in body["choices"]] == [one["text"] for one in expected]
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    used = body["usage"]
    assert used["completion_tokens"] == 20 * len(expected)
    assert used["prompt_tokens"] == sum(one["meta_info"]["prompt_tokens"] for one in expected)
    assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]


def test_a_stream_adds_up_to_the_text(engine, client) -> None:
    expected = engine.generate("hello", ENGINE_GREEDY)
    options = {"stream_options": {"include_usage": True}}
    chunks = client.stream(ROUTE, {"prompt": "hello"} | GREEDY | options)
    assert text_of(chunks) == expected["text"]
    assert len(chunks) > 3
    *parts, last = chunks
    assert all(chunk["usage"] is None for chunk in parts)
    assert [chunk["choices"][0]["finish_reason"] for chunk in parts[:-1]] == [None] * (
        len(parts) - 1
    )
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 20
