"""Libraries for agents: LangChain's tool binding and structured output, and Instructor."""


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
