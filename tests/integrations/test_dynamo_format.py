"""Requests of Dynamo as arguments of the engine, and outputs of the engine as Dynamo's chunks."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.checks import ParameterError
from specjax.integrations.dynamo_format import chunk, generate_arguments
from specjax.sampling.params import SamplingParams

# as Dynamo 1.6.1 sends it: every field is present
REQUEST: dict[str, Any] = {
    "model": "tiny",
    "token_ids": [0, 1, 2],
    "stop_conditions": {
        "max_tokens": None,
        "stop": None,
        "stop_token_ids": None,
        "stop_token_ids_visible": None,
        "stop_token_ids_hidden": [95],
        "min_tokens": None,
        "ignore_eos": None,
        "max_thinking_tokens": None,
    },
    "sampling_options": {
        "n": None,
        "best_of": None,
        "presence_penalty": None,
        "frequency_penalty": None,
        "repetition_penalty": None,
        "temperature": None,
        "top_p": None,
        "top_k": None,
        "min_p": None,
        "use_beam_search": None,
        "length_penalty": None,
        "seed": None,
        "include_stop_str_in_output": None,
        "guided_decoding": None,
    },
    "output_options": {
        "logprobs": None,
        "prompt_logprobs": None,
        "skip_special_tokens": None,
        "formatted_prompt": None,
        "return_tokens_as_token_ids": None,
    },
    "eos_token_ids": [95],
    "annotations": [],
    "routing": {},
    "router_config_override": None,
}
CONTEXT = 128


def request(**fields: Any) -> dict[str, Any]:
    """A request of which fields in any part have other values."""
    changed = dict(REQUEST)
    for name, value in fields.items():
        parts = [part for part in REQUEST if part.endswith("s") and name in REQUEST[part]]
        (part,) = parts
        changed[part] = changed[part] | {name: value}
    return changed


def params(**fields: Any) -> dict[str, Any]:
    return generate_arguments(request(**fields), CONTEXT)["sampling_params"]


def test_a_plain_request() -> None:
    assert generate_arguments(REQUEST, CONTEXT) == {
        "input_ids": [0, 1, 2],
        "sampling_params": {"max_new_tokens": 128, "stop_token_ids": [95]},
    }
    assert generate_arguments({"token_ids": [7]}, 9) == {
        "input_ids": [7],
        "sampling_params": {"max_new_tokens": 9, "stop_token_ids": []},
    }


def test_all_options() -> None:
    changed = request(
        max_tokens=8,
        min_tokens=3,
        ignore_eos=True,
        max_thinking_tokens=5,
        stop_token_ids=[3, 4],
        stop_token_ids_visible=[3],
        temperature=0.5,
        top_p=0.9,
        top_k=0,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        seed=-3,
    ) | {"extra_args": {"nvext": {"cache_salt": "s"}}}
    made = generate_arguments(changed, CONTEXT)["sampling_params"]
    assert made == {
        "max_new_tokens": 8,
        "min_new_tokens": 3,
        "ignore_eos": True,
        "thinking_token_budget": 5,
        "stop_token_ids": [3, 4, 95],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "sampling_seed": 2**64 - 3,
        "cache_salt": "s",
    }
    SamplingParams.of(made)


def test_max_tokens_0_scores_the_prompt() -> None:
    assert params(max_tokens=0)["max_new_tokens"] == 0


@pytest.mark.parametrize(
    ("guided", "grammar"),
    [
        ({"json": {"type": "object"}, "regex": None}, {"json_schema": {"type": "object"}}),
        ({"regex": "a+", "backend": "xgrammar"}, {"regex": "a+"}),
        ({"grammar": "start: x"}, {"ebnf": "start: x"}),
        ({"structural_tag": "{}"}, {"structural_tag": "{}"}),
        ({"choice": ['a"', "b"]}, {"ebnf": r'start: "a\"" | "b"'}),
        ({"choice": [], "json": None}, {}),
    ],
)
def test_grammars(guided, grammar) -> None:
    made = params(guided_decoding=guided)
    assert made == {"max_new_tokens": 128, "stop_token_ids": [95]} | grammar


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "best_of": 1, "use_beam_search": False, "length_penalty": 1.0},
        {"stop": ["x"], "include_stop_str_in_output": True},
    ],
)
def test_options_that_change_nothing_in_the_engine(fields) -> None:
    assert params(**fields) == params()


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", 2), ("best_of", 3), ("use_beam_search", True), ("length_penalty", 1.5)],
)
def test_unsupported_options_are_refused(name, value) -> None:
    with pytest.raises(ParameterError, match=f"{name}={value}"):
        params(**{name: value})


def test_unknown_options_are_refused() -> None:
    changed = request(temperature=1.0)
    changed["sampling_options"]["typical_p"] = 0.5
    with pytest.raises(ParameterError, match=r"typical_p=0\.5"):
        generate_arguments(changed, CONTEXT)
    with pytest.raises(ParameterError, match="guided_whitespace_pattern='a'"):
        params(guided_decoding={"json": {}, "whitespace_pattern": "a"})


@pytest.mark.parametrize("name", ["multi_modal_data", "prompt_embeds", "encoder_result"])
def test_input_that_is_not_text_is_refused(name) -> None:
    with pytest.raises(ParameterError, match=name):
        generate_arguments(REQUEST | {name: {"image": []}}, CONTEXT)
    assert generate_arguments(REQUEST | {name: None}, CONTEXT)["input_ids"] == [0, 1, 2]


def output(ids: list[int], reason: Any = None, **meta: Any) -> dict[str, Any]:
    """A cumulative output of the engine for a prompt of 3 tokens."""
    numbers = {"prompt_tokens": 3, "completion_tokens": len(ids), "cached_tokens": 1}
    return {
        "text": "",
        "output_ids": ids,
        "meta_info": {"finish_reason": reason, **numbers, **meta},
    }


def test_chunks_have_the_new_tokens() -> None:
    chosen = [(-0.5, 7, None), (-1.5, 8, None), (-2.5, 9, None)]
    top = [[(-0.5, 7, None)], [(-1.0, 6, None)], [(-2.5, 9, None), (-3.0, 1, None)]]
    reports = {"output_token_logprobs": chosen, "output_top_logprobs": top}
    assert chunk(output([7, 8, 9]), 1) == {"index": 0, "token_ids": [8, 9]}
    assert chunk(output([7, 8, 9], **reports), 1) == {
        "index": 0,
        "token_ids": [8, 9],
        "log_probs": [-1.5, -2.5],
        "top_logprobs": [
            [{"rank": 1, "token_id": 6, "token": None, "logprob": -1.0}],
            [
                {"rank": 1, "token_id": 9, "token": None, "logprob": -2.5},
                {"rank": 2, "token_id": 1, "token": None, "logprob": -3.0},
            ],
        ],
    }


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ({"type": "stop", "matched": 95}, "stop"),
        ({"type": "length", "length": 2}, "length"),
        ({"type": "abort"}, "cancelled"),
        ({"type": "abort", "message": "the request timed out"}, "error: the request timed out"),
    ],
)
def test_the_last_chunk_has_the_reason_and_the_usage(reason, expected) -> None:
    assert chunk(output([7, 8], reason), 2) == {
        "index": 0,
        "token_ids": [],
        "finish_reason": expected,
        "completion_usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


@given(st.lists(st.integers(0, 99)), st.data())
def test_chunks_together_are_the_output(ids, data) -> None:
    """Outputs are cumulative, and a slow reader gets only some of them."""
    ends = [0, *sorted(data.draw(st.sets(st.integers(0, len(ids))))), len(ids)]
    chunks = [chunk(output(ids[:end]), start) for start, end in itertools.pairwise(ends)]
    assert [token for part in chunks for token in part["token_ids"]] == ids
