"""Request fields: unknown ones, and those that clients of other engines send and expect."""

import asyncio
import logging
import re
import time
from typing import Any
from unittest.mock import Mock

import pytest

from specjax.server import app, fields, generating, make_app
from specjax.server.exchange import Exchange, UnreadAnswers
from specjax.server.service import Service
from specjax.testing import Client, running

from .bodies import CHAT, COMPLETIONS, ENGINE_GREEDY, GENERATE, GREEDY, HELLO, TOOL

ROUTES = {COMPLETIONS: {"prompt": "hello"}, CHAT: HELLO, GENERATE: {"text": "hello"}}


def counted(client: Client) -> float:
    for line in client.get("/metrics").body.decode().splitlines():
        if line.startswith("specjax:ignored_request_fields_total "):
            return float(line.split()[1])
    raise AssertionError("metric not found")


@pytest.mark.parametrize("route", ROUTES)
def test_unknown_fields_are_counted_and_logged_once(client, route, caplog) -> None:
    before = counted(client)
    asked = ROUTES[route] | {f"nonsense of {route}": {"a": [1]}}
    with caplog.at_level(logging.WARNING, "specjax"):
        for _ in range(2):
            assert client.post(route, asked).status == 200
    assert counted(client) == before + 2
    assert [record.message for record in caplog.records] == [
        f"ignoring unknown request field {f'nonsense of {route}'!r}"
    ]


def test_simulated_acceptance_reaches_the_engine(client) -> None:
    """This engine was not started with the option, so it refuses the value."""
    own = {"simulate_acceptance": 0.5}
    for route, body in ROUTES.items():
        asked = body | ({"sampling_params": own} if route == GENERATE else own)
        answer = client.post(route, asked)
        assert answer.status == 400
        assert answer.error["param"] == (None if route == GENERATE else "simulate_acceptance")
        assert "simulate_acceptance=0.5 needs the engine option" in answer.error["message"]


def test_a_priority_is_refused(client) -> None:
    routes = ROUTES | {"/v1/responses": {"input": "hello"}, "/v1/messages": HELLO}
    assert client.post(COMPLETIONS, ROUTES[COMPLETIONS] | {"priority": 0}).status == 200
    for route, body in routes.items():
        for priority in (1, -1, "high"):
            answer = client.post(route, body | {"priority": priority})
            assert answer.status == 400
            assert "priority is not supported: callers take turns" in answer.error["message"]


def test_requests_without_a_limit_have_the_servers(engine) -> None:
    texts = {"text": ["hello", "a"], "sampling_params": [None, {"ignore_eos": True}]}
    bodies = [(route, body | {"ignore_eos": True}) for route, body in ROUTES.items()]
    with running(make_app(engine, default_max_tokens=3)) as port:
        client = Client(port)
        for route, body in bodies[:2]:
            for added, count in (({}, 3), ({"max_tokens": 5}, 5), ({"max_tokens": None}, 3)):
                assert (
                    client.post(route, body | added).json()["usage"]["completion_tokens"] == count
                )
        scored = client.post(CHAT, HELLO | {"logprobs": True, "ignore_eos": True}).json()
        assert scored["usage"]["completion_tokens"] == 3
        answer = client.post("/v1/responses", {"input": "hello", "ignore_eos": True}).json()
        assert answer["usage"]["output_tokens"] == 3
        answer = client.post("/v1/messages", HELLO | {"ignore_eos": True}).json()
        assert answer["usage"]["output_tokens"] == 3
        results = client.post(GENERATE, texts).json()
        params = {"max_new_tokens": 4, "ignore_eos": True}
        results.append(client.post(GENERATE, {"text": "a", "sampling_params": params}).json())
    assert [one["meta_info"]["completion_tokens"] for one in results[1:]] == [3, 4]
    assert results[0]["meta_info"]["completion_tokens"] <= 3
    with pytest.raises(ValueError, match="default_max_tokens=0 must be an integer of at least 1"):
        make_app(engine, default_max_tokens=0)


def test_few_names_are_logged(caplog) -> None:
    ignored = fields.IgnoredFields()
    with caplog.at_level(logging.WARNING, "specjax"):
        for i in range(100):
            ignored.add(f"{i}" * 1000)
    assert ignored.count == 100
    assert len(caplog.records) == fields.MAX_NAMES
    assert max(len(record.message) for record in caplog.records) < 150


@pytest.mark.parametrize("route", ROUTES)
def test_many_fields_are_refused_early(client, route) -> None:
    fields = {f"{i}": 0 for i in range(10**5)}
    started = time.monotonic()
    for body in (
        ROUTES[route] | fields,
        {"model": "tiny", "prompt": "a", "stream_options": fields},
    ):
        answer = client.post(route if "0" in body else COMPLETIONS, body)
        assert (answer.status, "256" in answer.error["message"]) == (400, True)
    assert time.monotonic() - started < 5


@pytest.fixture
def shown_template(engine, monkeypatch) -> None:
    """A chat template that prints its variables."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.arguments.x }}{% endfor %}{% endfor %}"
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)


def rendered(client: Client, engine: Any, **body: Any) -> str:
    return engine.tokenizer.decode(client.post("/tokenize", body).json()["tokens"])


def test_tools_and_tool_calls_of_agents_are_rendered(engine, client, shown_template) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "abc"}'}}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "1"},
    ]
    asked = {"messages": turns, "tools": [TOOL], "tool_choice": "none"}
    assert rendered(client, engine, **asked) == "<user>a<assistant>abc<tool>bf<assistant>"
    assert client.post(CHAT, asked | {"max_tokens": 1}).status == 200
    assert client.post(CHAT, asked | {"tool_choice": "auto"}).error["param"] == "tools"
    called = "messages[1].tool_calls[0].function"
    template = f"{{{{ {called}.name + {called}.arguments }}}}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.tokenizer, "chat_template", template)
        assert rendered(client, engine, messages=turns) == 'f{"x": "abc"}'
        assert client.post(CHAT, {"messages": turns, "max_tokens": 1}).status == 200
    broken = call | {"function": {"name": "f", "arguments": "not JSON"}}
    turns[1] = turns[1] | {"tool_calls": [broken]}
    assert client.post(CHAT, {"messages": turns, "max_tokens": 1}).status == 200


def test_the_final_message_is_continued(engine, client, shown_template) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc "}]
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    assert rendered(client, engine, messages=turns, **flags) == "<user>a<assistant>bc "
    # text that the template adds after the message is cut
    more = [*turns, {"role": "assistant", "content": "xyz", "tool_calls": []}]
    engine.tokenizer.chat_template += "end"
    assert rendered(client, engine, messages=more, **flags).endswith("<assistant>xyz")
    asked = {"messages": turns, "max_tokens": 8, "temperature": 0} | flags
    expected = engine.generate("<user>a<assistant>bc ", ENGINE_GREEDY | {"max_new_tokens": 8})
    assert client.post(CHAT, asked).json()["choices"][0]["message"]["content"] == expected["text"]
    empty = [{"role": "assistant", "content": ""}]
    assert client.post(CHAT, {"messages": empty} | flags).status == 400


def test_token_ids_are_returned(engine, client) -> None:
    expected = engine.generate("hello", ENGINE_GREEDY)["output_ids"]
    prompt = engine.tokenizer.encode("hello")
    asked = {"prompt": "hello", "return_token_ids": True} | GREEDY
    choice = client.post(COMPLETIONS, asked).json()["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (expected, prompt)
    parts = [event["choices"][0] for event in client.stream(COMPLETIONS, asked)]
    assert [token for part in parts for token in part["token_ids"]] == expected
    assert [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part] == [prompt]
    chat = client.post(CHAT, HELLO | {"return_token_ids": True, "max_tokens": 3}).json()
    assert len(chat["choices"][0]["token_ids"]) == 3
    assert engine.tokenizer.decode(chat["prompt_token_ids"]) == "<user>hello<assistant>"
    events = client.stream(CHAT, HELLO | {"return_token_ids": True, "max_tokens": 9, "n": 2})
    # in the chunk that begins a choice
    openings = [event for event in events if "role" in event["choices"][0]["delta"]]
    assert [event["prompt_token_ids"] for event in openings] == [chat["prompt_token_ids"]] * 2
    assert sum("prompt_token_ids" in event for event in events) == 2


def test_stop_strings_and_special_tokens_may_stay(engine, client) -> None:
    text = engine.generate("hello", ENGINE_GREEDY)["text"]
    stop = text[5:7]
    end = text.index(stop)
    for body, expected in (
        ({"stop": stop}, text[:end]),
        ({"stop": stop, "include_stop_str_in_output": True}, text[: end + 2]),
    ):
        asked = {"prompt": "hello"} | GREEDY | body
        assert client.post(COMPLETIONS, asked).json()["choices"][0]["text"] == expected
        streamed = client.stream(COMPLETIONS, asked)
        assert "".join(event["choices"][0]["text"] for event in streamed) == expected
    ids = engine.generate("hello", ENGINE_GREEDY)["output_ids"]
    params = ENGINE_GREEDY | {"stop_token_ids": [ids[4]], "no_stop_trim": True}
    assert engine.generate("hello", params)["text"] == engine.tokenizer.decode(ids[:5])
    eos = engine.tokenizer.eos_token_ids[0]
    bias = ENGINE_GREEDY | {"logit_bias": {eos: 100}, "ignore_eos": True, "max_new_tokens": 2}
    assert engine.generate("hello", bias)["text"] == ""
    shown = engine.generate("hello", bias | {"skip_special_tokens": False})["text"]
    assert shown == engine.tokenizer.decode([eos, eos], False) != ""


def test_request_ids_come_back(client) -> None:
    asked = {"prompt": "a", "max_tokens": 1}
    for given, is_kept in (("my id-7", True), ("x" * 129, False), ("é", False), ("", False)):
        own = client.post(COMPLETIONS, asked, x_request_id=given).headers["x-request-id"]
        assert own == given if is_kept else re.fullmatch("[0-9a-f]{32}", own)
    assert client.get("/v1/models", x_request_id="m").headers["x-request-id"] == "m"
    assert client.post(COMPLETIONS, {}, x_request_id="bad").headers["x-request-id"] == "bad"


def test_routes_that_other_engines_have(engine, client) -> None:
    assert client.get("/ping").status == client.post("/ping").status == 200
    assert set(client.get("/version").json()) == {"version"}
    info = client.get("/tokenizer_info").json()
    assert info["chat_template"] == engine.tokenizer.chat_template
    assert info["eos_token"] == engine.tokenizer.special_tokens["eos_token"]


def test_prompts_are_scored_without_a_new_token(engine, client) -> None:
    asked = {"prompt": ["hello", "ab"], "max_tokens": 0, "logprobs": 1}
    for body in (asked, asked | {"echo": True}):
        answer = client.post(COMPLETIONS, body).json()
        for choice, prompt in zip(answer["choices"], asked["prompt"], strict=True):
            is_echo = "echo" in body
            assert choice["text"] == prompt * is_echo
            assert len(choice["logprobs"]["tokens"]) == len(prompt) * is_echo
            assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0
        one = client.post(COMPLETIONS, body | {"max_tokens": 1} | GREEDY).json()
        for choice, other in zip(answer["choices"], one["choices"], strict=True):
            scored = choice["logprobs"]["token_logprobs"]
            assert other["logprobs"]["token_logprobs"][: len(scored)] == scored
    sampling = {"max_new_tokens": 0}
    native = {"text": "hello", "sampling_params": sampling, "return_logprob": True}
    meta = client.post(GENERATE, native | {"logprob_start_len": 0}).json()["meta_info"]
    asked = {"return_logprob": True, "logprob_start_len": 0}
    expected = engine.generate("hello", {"max_new_tokens": 1}, **asked)["meta_info"]
    assert meta["output_token_logprobs"] == []
    assert [value for value, *_ in meta["input_token_logprobs"][1:]] == [
        pytest.approx(value, abs=1e-6) for value, *_ in expected["input_token_logprobs"][1:]
    ]


def test_reported_log_probabilities_are_bounded(engine, client, monkeypatch) -> None:
    monkeypatch.setattr(generating, "MAX_REPORTED", 200)
    asked = {"prompt": "hello", "max_tokens": 5, "echo": True, "logprobs": 1}
    assert client.post(COMPLETIONS, asked | {"n": 10}).status == 200
    answer = client.post(COMPLETIONS, asked | {"n": 11})
    assert answer.status == 400
    assert "up to 220 log-probabilities" in answer.error["message"]


def test_the_oldest_unread_answer_gives_way() -> None:
    async def main() -> list[bool]:
        unread, stuck = UnreadAnswers(10), asyncio.Event()

        async def send(size: int) -> bool:
            exchange = Exchange({"headers": []}, wait, wait)

            async def work() -> None:
                with unread.holding(exchange, size):
                    await stuck.wait()

            try:
                await exchange.while_connected(work())
            except Exception:
                return False
            return True

        async def wait(*_: Any) -> Any:
            await asyncio.Event().wait()

        tasks = []
        for size in (4, 5, 8, 2):
            tasks.append(asyncio.create_task(send(size)))
            await asyncio.sleep(0.01)
        stuck.set()
        return [await task for task in tasks]

    assert asyncio.run(main()) == [False, False, True, True]


def test_native_streams_may_be_incremental(engine, client) -> None:
    asked = {"text": ["hello", "ab"], "sampling_params": ENGINE_GREEDY, "return_logprob": True}
    asked |= {"logprob_start_len": 0, "top_logprobs_num": 2}
    whole = client.post(GENERATE, asked).json()
    parts = client.stream(GENERATE, asked | {"incremental": True})
    for index, expected in enumerate(whole):
        own = [part for part in parts if part["index"] == index]
        assert len(own) > 1
        assert "".join(part["text"] for part in own) == expected["text"]
        assert [token for part in own for token in part["output_ids"]] == expected["output_ids"]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            joined = [one for part in own for one in part["meta_info"][name]]
            assert joined == expected["meta_info"][name]
        scored = [part["meta_info"].get("input_token_logprobs") for part in own]
        assert scored == [expected["meta_info"]["input_token_logprobs"]] + [None] * (len(own) - 1)


def test_a_long_message_is_searched_only_as_far_as_it_is_shown() -> None:
    started = time.monotonic()
    with pytest.raises(fields.ApiError), fields.client_names("prompt"):
        raise ValueError('\\"' * 30_000)  # quotes that never close
    assert time.monotonic() - started < 5


def test_reasoning_fields_are_variables_of_the_template(engine, client, monkeypatch) -> None:
    template = "{{ enable_thinking }}{{ reasoning_effort }}{{ messages[0].content }}"
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    turns = [{"role": "user", "content": "a"}]
    for asked, text in (
        ({"enable_thinking": True, "reasoning_effort": "low"}, "Truelowa"),
        ({"reasoning_effort": "none"}, "Falsenonea"),
        ({}, "a"),
    ):
        assert rendered(client, engine, messages=turns, **asked) == text
    wrong = client.post(CHAT, {"messages": turns, "reasoning_effort": "much"})
    assert (wrong.status, wrong.error["param"]) == (400, "reasoning_effort")


GRAMMAR_BODIES = [
    ('{"regex": "a"}', ()),
    ('{"\\u0065bnf": "start: A"}', ()),
    ('{"\\u0072\\u0065\\u0067\\u0065\\u0078": "a"}', ()),
    ('{"thinking_token_budget": 0}', ()),
    ('{"response_format": {"type": "text"}}', ()),
    ('{"tools": []}', ()),
    ('{"t\\u006fols": [{"type": "function"}]}', ()),
    ('{"text": {"format": {"type": "json_object"}}}', ("text",)),
    ('{"t\\u0065xt": {}}', ("text",)),
    ('{"thinking": {"type": "enabled"}}', ("thinking",)),
    ('{"thin\\u006bing": {"type": "enabled"}}', ("thinking",)),
    ('{"sampling_params": {"regex": "a"}}', ()),
    ('{"sampling_params": {"r\\u0065gex": "a"}}', ()),
    ('{"sampling\\u005fparams": {"\\u0065bnf": "a"}}', ()),
    ('{"sampling_params": [{}, {"json_schem\\u0061": "{}"}]}', ()),
    ('{"sampling_params": [[{"thinking_token_budg\\u0065t": 1}]]}', ()),
    # not looked into
    (f'{{"sampling_params": {{"stop": "{"x" * generating.INLINE_BYTES}"}}}}', ()),
]
OTHER_BODIES = [
    ("{}", ("text", "thinking")),
    ('{"prompt": "regex", "stop": ["ebnf"]}', ()),
    ('{"text": "hello", "thinking": 1}', ()),
    ('{"regex": null, "tools": null, "t\\u0065xt": null}', ("text",)),
    ('{"sampling_params": {"regex": null, "stop": "ebnf"}}', ()),
    ('{"sampling_params": [{"temperature": 1}, {}]}', ()),
    ('{"sampling_params": null}', ()),
    ('{"sampling_params": "regex"}', ()),
]


@pytest.mark.parametrize(
    ("body", "names", "expected"),
    [(*x, True) for x in GRAMMAR_BODIES] + [(*x, False) for x in OTHER_BODIES],
)
def test_grammars_are_seen_however_their_keys_are_written(body, names, expected) -> None:
    """Their requests are read in other threads, because a grammar can take seconds."""
    decoded = fields.parse_object(body.encode())
    assert generating._has_grammar(decoded, names) == expected


def test_routes_name_their_own_fields_of_grammars() -> None:
    router = app.route(Service(Mock()))
    endpoints = {entry.path: entry.endpoint for entry in router.routes}
    handlers = {path: getattr(endpoint, "handler", None) for path, endpoint in endpoints.items()}
    names = {
        path: handler.keywords["grammars"]
        for path, handler in handlers.items()
        if "grammars" in getattr(handler, "keywords", {})
    }
    assert names == {"/v1/responses": ("text",), "/v1/messages": ("thinking",)}
