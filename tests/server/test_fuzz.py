"""Fuzz tests: no request, by fields or by bytes, makes the server answer with a failure."""

import json
import re
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specjax.testing import Client, is_idle, num_held

# valid values for a few fields, so that the checks of the others are reached
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "ab", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/decisions": {
        "input": "ab",
        "questions": [{"type": "predicate", "instructions": "a"}],
    },
    "/generate": {"text": "ab", "sampling_params": {"max_new_tokens": 2}},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [1, 2]},
    "/abort_request": {"rid": "none"},
    "/flush_cache": {},
    "/update_weights_from_disk": {"model_path": "none"},
}
FIELDS = (
    "model prompt messages text input_ids tokens sampling_params max_tokens max_completion_tokens "
    "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty n seed "
    "stop stop_token_ids logit_bias min_tokens ignore_eos speculative echo logprobs top_logprobs "
    "best_of stream stream_options suffix rid return_logprob top_logprobs_num logprob_start_len "
    "user tools response_format chat_template_kwargs return_text_in_logprobs add_special_tokens "
    "add_generation_prompt model_path draft_path abort_all return_token_strs skip_special_tokens "
    "input questions safety_identifier return_token_ids system instructions include reasoning "
    "thinking tool_choice text output_config stop_sequences max_output_tokens metadata "
    "return_routed_experts routed_experts_start_len"
).split()
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, 2, -1, 3, 98, 2**31, -(2**63), 2**64, 10**30, 0.5, -0.0, 1e308, 1e-320]),
    st.sampled_from(["", "a", "ab", "tiny", "user", "1", "\ud800", "\0", "é", "a" * 300]),
)
# items of Responses, blocks of Messages and types of fields, and what they may have
KINDS = st.sampled_from(
    "message reasoning function_call function_call_output item_reference text input_text thinking "
    "output_text redacted_thinking tool_use tool_result image function custom auto any tool "
    "required enabled disabled adaptive json_schema allowed_tools ephemeral".split()
)
PARTS = (
    "role content text name arguments call_id output id input tool_use_id thinking summary "
    "signature encrypted_content parameters input_schema strict schema format mode tools effort "
    "budget_tokens cache_control".split()
)


def make_question(kind: str, instructions: Any, value: Any) -> Any:
    """A list with a question that has this value in its options, if any."""
    options = {"choices": [{"value": value}, {"value": "b"}]} if kind == "choice" else {}
    if kind == "score":
        options = {"levels": [{"label": "a"}, {"label": "b", "description": value}]}
    return [{"type": kind, "instructions": instructions, **options}]


VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "n", "stop", "0", "7", "name"]),
            inner,
            max_size=3,
        ),
        st.lists(
            st.fixed_dictionaries({"type": KINDS}, optional=dict.fromkeys(PARTS, inner)), max_size=3
        ),
        st.builds(make_question, st.sampled_from(["choice", "score", "predicate"]), inner, inner),
    ),
    max_leaves=5,
)
ERROR = {"message", "type", "param", "code"}
# route -> the first lines of the last events of streams
ENDS = {
    "/v1/responses": {b"event: response.completed", b"event: response.incomplete"},
    "/v1/messages": {b"event: message_stop"},
}
SECONDS = 20.0
PATHS = (*BASES, "/v1/models", "/v1/models/%ff", "/health", "/metrics", "/", "/%00", "*", "//x")
METHODS = ("POST",) * 6 + ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "post", "CONNECT", "P\0ST")
HEADERS = (
    ("content-type", "text/plain"),
    ("content-type", "application/json; charset=utf-16"),
    ("content-encoding", "gzip"),
    ("content-encoding", "identity"),
    ("authorization", "Bearer \xff"),
    ("accept", "x/y"),
    ("expect", "100-continue"),
    ("upgrade", "websocket"),
    ("upgrade", "h2c"),
    ("host", "a b"),
    ("host", ""),
    ("origin", "http://[::"),
    ("x", "y" * 9000),
    ("x y", "z"),
    ("", "z"),
)
# mutations of a body's text
MUTATIONS: tuple[Callable[[bytes, int], bytes], ...] = (
    lambda data, i: data[: i % (len(data) + 1)],
    lambda data, i: data + b"}" * (i % 5),
    lambda data, i: data.replace(b'"', b"'"),
    lambda data, i: data.decode().encode("utf-16"),
    lambda data, i: b"\xef\xbb\xbf" + data,
    lambda data, i: data[:i] + b"\xff" + data[i:],
    lambda data, i: data[:i] + b"\0" + data[i:],
    lambda data, i: b"[" * (i * 997) + data,
    lambda data, i: data[:-1] + b', "x": ' + b'{"x": ' * (i * 499) + b"1" + b"}" * (i * 499 + 1),
    lambda data, i: data[:-1] + b', "logprobs": NaN, "seed": Infinity}',
    lambda data, i: data[:-1] + b', "seed": ' + b"9" * (i * 200 + 1) + b"}",
    lambda data, i: data[:-1] + b', "temperature": 1e' + b"9" * (i + 1) + b"}",
    lambda data, i: data[:-1] + b', "max_tokens": 1, "max_tokens": 2}',
    lambda data, i: data[:-1] + b', "stop": "\\ud83d", "user": "\\udead"}',
    lambda data, i: data[:-1] + b', "user": "' + b"a" * (i * 1000) + b'"}',
    lambda data, i: json.dumps([json.loads(data)]).encode(),
    lambda data, i: b"",
)
ODD_FRAMES = (
    "content-length: -1\r\n",
    "content-length: x\r\n",
    "content-length: 99999999999999999999999\r\n",
    "content-length: 1\r\ncontent-length: 2\r\n",
    "transfer-encoding: chunked\r\ncontent-length: 5\r\n",
    "transfer-encoding: gzip\r\n",
    "transfer-encoding: chunked\r\n",
    "",
)
EXAMPLES = pytest.mark.parametrize("examples", [500, pytest.param(20_000, marks=pytest.mark.long)])


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Any]:
    route = draw(st.sampled_from(sorted(BASES)))
    changes = draw(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))
    return route, BASES[route] | changes


def check(client: Client, route: str, body: Any) -> None:
    answer = client.ask("POST", route, body)
    assert answer.status < 500, (route, body, answer.body)
    if answer.status != 200:
        is_messages = route.startswith("/v1/messages")
        assert set(answer.error) == ({"message", "type"} if is_messages else ERROR), (route, body)
    elif answer.headers["content-type"].startswith("text/event-stream"):
        last = answer.body.split(b"\n\n")[-2].partition(b"\n")[0]
        assert last in ENDS.get(route, {b"data: [DONE]"})
        assert b'"error"' not in answer.body
    else:
        answer.json()


@pytest.mark.slow
@EXAMPLES
def test_fields_of_any_value(client, examples: int) -> None:
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(requests())
    def run(request: tuple[str, Any]) -> None:
        check(client, *request)

    run()
    assert client.get("/health").status == 200


@settings(max_examples=100)
@given(data=st.binary(max_size=60), cut=st.integers(0, 60))
def test_bodies_of_any_bytes(client, data: bytes, cut: int) -> None:
    whole = b'{"prompt": "ab", "max_tokens": 1, "stop": ["a", "b"], "n": 1}'
    check(client, "/v1/completions", whole[:cut] + data + whole[cut + len(data) :])


@dataclass(frozen=True)
class Wire:
    """Bytes of a request; the server may wait for the rest of an incomplete one."""

    data: bytes
    is_whole: bool


@st.composite
def wires(draw: st.DrawFn) -> Wire:
    path, body = draw(requests())
    if draw(st.integers(0, 9)) == 0:
        path = draw(st.sampled_from(PATHS))
    data = json.dumps(body).encode()
    if draw(st.booleans()):
        data = draw(st.sampled_from(MUTATIONS))(data, draw(st.integers(0, 40)))
    method = draw(st.sampled_from(METHODS))
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    for name, value in draw(st.lists(st.sampled_from(HEADERS), max_size=2)):
        head += f"{name}: {value}\r\n"
    frame = draw(st.sampled_from(("whole",) * 6 + ("short", "long", "chunked", "odd")))
    if frame == "chunked":
        head += "transfer-encoding: chunked\r\n"
        parts = [part for part in (data[:9], data[9:]) if part]
        data = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    elif frame == "odd":
        head += draw(st.sampled_from(ODD_FRAMES))
    else:
        size = {"whole": len(data), "short": len(data) // 2, "long": len(data) + 7}[frame]
        head += f"content-length: {size}\r\n"
    whole = frame in ("whole", "chunked")
    return Wire(head.encode("latin-1") + b"\r\n" + data, whole)


def statuses(port: int, wire: Wire) -> list[int]:
    """Statuses of all answers until the server closes the connection or may wait for more."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        try:
            connection.sendall(wire.data)
            if not wire.is_whole:
                connection.settimeout(0.02)
            while part := connection.recv(2**16):
                found += part
        except TimeoutError:
            assert not wire.is_whole, (wire, found)
        except ConnectionError:
            pass  # the server closed the connection before it had read everything
    return [int(status) for status in re.findall(rb"^HTTP/1.1 (\d+) ", found, re.M)]


@pytest.mark.slow
@EXAMPLES
def test_requests_of_any_bytes(engine, client, examples: int) -> None:
    """Count statuses; 0 counts connections without an answer."""
    seen: Counter[int] = Counter()

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(wires())
    def run(wire: Wire) -> None:
        found = statuses(client.port, wire)
        assert all(status < 500 for status in found), (wire, found)
        assert found or not wire.is_whole, wire
        seen[found[-1] if found else 0] += 1

    run()
    print(seen)
    assert seen[200]
    assert is_idle(engine)
    assert num_held(engine) == 0
    good = client.post("/v1/completions", {"prompt": "ab", "max_tokens": 2})
    assert good.json()["usage"]["completion_tokens"] == 2
