"""Responses and Messages, LangChain's tools and structured output, and Instructor."""

import pytest

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def apis(run_program, given):
    return run_program("agent_apis", sampling={"temperature": 0.8, "seed": 7}, **given)


@pytest.mark.parametrize("name", ["responses", "messages"])
def test_both_apis_answer_as_the_engine(engine, apis, name) -> None:
    found, sampling = apis[name], {"max_new_tokens": 8, "temperature": 0.8, "sampling_seed": 7}
    said = engine.generate(messages=QUESTION, sampling_params=sampling)
    counts = [said["meta_info"][key] for key in ("prompt_tokens", "completion_tokens")]
    assert found["text"] == said["text"]
    assert found["streamed"] == [said["text"]] * 2
    assert found["tokens"] == counts
    called, arguments = found["call"]
    assert (called, set(arguments)) == ("weather", {"city"})
    assert arguments["city"] in ("Paris", "Rome")
    assert found["after the call"] == [{"responses": "message", "messages": "text"}[name]]


def test_structured_output_and_tools(run_program, given) -> None:
    found = run_program("agent_calls", **given)
    for name in ("langchain tools", "langchain stream"):
        assert found.pop(name) == [["get_weather", ["city"]]]
    assert set(found) == {
        *("langchain json_schema", "langchain function_calling"),
        *("instructor TOOLS", "instructor JSON_SCHEMA"),
    }
    for fruit in found.values():
        assert set(fruit) == {"name", "count"}
        assert 1 <= fruit["count"] <= 9
