"""Whatever comes as a request, no answer is a failure of the server."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specjax.testing import Client

# valid where they are few, so that other fields are reached
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
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
    "add_generation_prompt model_path draft_path abort_all return_token_strs skip_special_tokens"
).split()
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, 2, -1, 3, 98, 2**31, -(2**63), 2**64, 10**30, 0.5, -0.0, 1e308, 1e-320]),
    st.sampled_from(["", "a", "ab", "tiny", "user", "1", "\ud800", "\0", "é", "a" * 300]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "n", "stop", "0", "7", "name"]),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=5,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Any]:
    route = draw(st.sampled_from(sorted(BASES)))
    changes = draw(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))
    return route, BASES[route] | changes


def check(client: Client, route: str, body: Any) -> None:
    answer = client.ask("POST", route, body)
    assert answer.status < 500, (route, body, answer.body)
    if answer.status != 200:
        assert set(answer.error) == {"message", "type", "param", "code"}
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert b'"error"' not in answer.body
    else:
        answer.json()


def fuzz(client: Client, examples: int) -> None:
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(requests())
    def run(request: tuple[str, Any]) -> None:
        check(client, *request)

    run()
    assert client.get("/health").status == 200


@pytest.mark.slow
def test_fields_of_any_value(client) -> None:
    fuzz(client, 400)


@pytest.mark.long
@pytest.mark.slow
def test_fields_of_any_value_20000_times(client) -> None:
    fuzz(client, 20_000)


@settings(max_examples=100)
@given(data=st.binary(max_size=60), cut=st.integers(0, 60))
def test_bodies_of_any_bytes(client, data: bytes, cut: int) -> None:
    whole = b'{"prompt": "ab", "max_tokens": 1, "stop": ["a", "b"], "n": 1}'
    check(client, "/v1/completions", whole[:cut] + data + whole[cut + len(data) :])
