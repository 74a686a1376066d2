"""Sampling parameters: defaults, accepted types, rejected values."""

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax import SamplingParams
from specjax.checks import ParameterError


def test_defaults_are_those_of_sglang() -> None:
    assert dataclasses.asdict(SamplingParams()) == {
        "max_new_tokens": 128,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "min_new_tokens": 0,
        "n": 1,
        "stop": None,
        "stop_token_ids": None,
        "no_stop_trim": False,
        "skip_special_tokens": True,
        "ignore_eos": False,
        "sampling_seed": None,
        "speculative": True,  # not a parameter of SGLang
        "simulate_acceptance": None,  # nor this one
        "json_schema": None,
        "regex": None,
        "ebnf": None,
        "structural_tag": None,
        "allowed_token_ids": None,  # nor the next one; they are vLLM's
        "bad_words": None,
        "cache_salt": None,
        "thinking_token_budget": None,
    }


def test_of_takes_an_instance_a_mapping_or_nothing() -> None:
    params = SamplingParams(top_k=3)
    assert SamplingParams.of(params) is params
    assert SamplingParams.of({"top_k": 3}) == params
    assert SamplingParams.of(None) == SamplingParams.of({}) == SamplingParams()


def test_of_names_unknown_and_supported_parameters() -> None:
    with pytest.raises(ValueError, match=r"\['beams', 'top_a'\] are not supported.*'temperature'"):
        SamplingParams.of({"top_a": 2, "beams": 0.1, "top_k": 3})
    for wrong in ("greedy", 3, ["top_k"]):
        with pytest.raises(ValueError, match="must be SamplingParams, a mapping or None"):
            SamplingParams.of(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("stop_regex", "a+", "patterns"),
        ("spaces_between_special_tokens", True, "the tokenizer decides"),
        ("custom_params", {}, "logit processors"),
        ("stream_interval", 4, "as soon as"),
    ],
)
def test_parameters_of_sglang_are_refused_with_the_reason(name, value, reason) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*not supported: .*{reason}") as caught:
        SamplingParams.of({name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("max_tokens", "max_new_tokens"), ("min_tokens", "min_new_tokens"), ("seed", "sampling_seed")],
)
def test_names_of_other_engines_lead_to_ours(theirs, ours) -> None:
    with pytest.raises(ValueError, match=f"'{theirs}' is not supported; use '{ours}'"):
        SamplingParams.of({theirs: 1})


NAN, INF = float("nan"), float("inf")
WRONG: dict[str, list[Any]] = {
    "max_new_tokens": [-1, 1.0, None, True],
    "temperature": [-0.1, NAN, INF, None, "0", 10**400, 1e39],
    "top_p": [0.0, 1.01, NAN, None, True],
    "top_k": [0, -2, 1.5],
    "min_p": [-0.1, 1.1, NAN, True, None],
    "frequency_penalty": [2.1, -2.1, "1"],
    "presence_penalty": [2.1, INF],
    "repetition_penalty": [0, 2.1, 0.0099, 1e-38, -1.0, False],
    "min_new_tokens": [-1, 129, 1.0, 2**31],
    "n": [0, 1.0, True],
    "logit_bias": [3, [3], {1: 0.5, "1": 0.5}, *({i: 0.5} for i in (-1, 1.0, "x", "-1", "", True))],
    "stop": ["", ["a", ""], "a" * 257, [3], 3, b"x"],
    "stop_token_ids": [["a"], [1.0], 3, "3"],
    "allowed_token_ids": [["a"], [1.0], [-1], [True], [], 3, "[3]"],
    "cache_salt": ["", "a" * 257, 3, ["a"], "\ud800"],
    "bad_words": [[3], ["a", ""], 3, "a", {"a": 1}],
    "ignore_eos": [1],
    "sampling_seed": [-1, 2**64, 1.0, True],
    "simulate_acceptance": [-0.1, 1.1, NAN, True, "0.5"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_refusals_name_the_parameter_and_its_value(name, value) -> None:
    with pytest.raises(ParameterError, match=name) as caught:
        SamplingParams(**{name: value})
    assert repr(value) in str(caught.value)
    assert caught.value.param == name


@pytest.mark.parametrize("value", ["2", None, True, float("-inf"), 1e39, 100.5, -100.5])
def test_a_bias_is_refused_with_its_token(value) -> None:
    with pytest.raises(ValueError, match=r"logit_bias\[7\]=.* at least -100 and at most 100"):
        SamplingParams(logit_bias={3: 1.0, 7: value})


def test_stop_strings_are_limited() -> None:
    assert len(SamplingParams(stop=["a" * 256] * 128).stop_strings) == 128
    with pytest.raises(ValueError, match="stop has 20000 strings; at most 128 are supported"):
        SamplingParams(stop=["a"] * 20_000)


def test_arguments_are_copied() -> None:
    stop, ids, bias = ["a"], [3], {3: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("b")
    ids[0] = "x"  # type: ignore[call-overload]
    bias |= {4: 1e99, 3: 0.0}
    assert (params.stop_strings, params.stop_token_ids) == (("a",), (3,))
    assert params.logit_bias == {3: 1.0}
    params.logit_bias[5] = 1e99  # type: ignore[index]
    assert params.biases == ((3, 1.0),)
    for again in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params)):
        assert again.biases == params.biases


@pytest.mark.parametrize(
    ("params", "is_greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": 1e-7}, True),
        ({"temperature": 1e-6}, False),
        ({"temperature": 0.8, "top_k": 1}, True),
        ({"temperature": 0.8, "top_k": 2}, False),
        ({}, False),
    ],
)
def test_greedy(params, is_greedy) -> None:
    assert SamplingParams(**params).is_greedy is is_greedy


def test_the_least_length_is_bounded_by_the_largest() -> None:
    assert SamplingParams(max_new_tokens=4, min_new_tokens=4).min_new_tokens == 4
    with pytest.raises(ValueError, match=r"min_new_tokens=5 must be .* max_new_tokens=4"):
        SamplingParams(max_new_tokens=4, min_new_tokens=5)


def test_biases_are_by_token_id() -> None:
    assert SamplingParams(logit_bias={7: 1, "12": -100}).biases == ((7, 1.0), (12, -100.0))
    assert SamplingParams().biases == SamplingParams(logit_bias={}).biases == ()


@pytest.mark.parametrize(
    ("params", "has_penalties"),
    [
        ({}, False),
        ({"logit_bias": {1: 2.0}, "min_new_tokens": 3}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"frequency_penalty": -0.5}, True),
        ({"presence_penalty": 0.5}, True),
    ],
)
def test_penalties(params, has_penalties) -> None:
    assert SamplingParams(**params).has_penalties is has_penalties


def test_stop_strings_are_a_tuple_in_every_form() -> None:
    for stop, strings in (
        (None, ()),
        ("abc", ("abc",)),
        (["a", "b"], ("a", "b")),
        (("a",), ("a",)),
        ([], ()),
    ):
        assert SamplingParams(stop=stop).stop_strings == strings


@given(
    st.fixed_dictionaries(
        {
            "sampling_seed": st.integers(0, 2**64 - 1),
            "temperature": st.floats(0, 1e6),
            "top_p": st.floats(0, 1, exclude_min=True),
            "min_p": st.floats(0, 1),
            "frequency_penalty": st.floats(-2, 2),
            "presence_penalty": st.floats(-2, 2),
            "repetition_penalty": st.floats(0.01, 2),
            "min_new_tokens": st.integers(0, 128),
            "n": st.integers(1, 100),
        }
    )
)
def test_whole_ranges_are_allowed(given_params) -> None:
    params = SamplingParams(**given_params)
    assert {name: getattr(params, name) for name in given_params} == given_params


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().top_k = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"bad_words": ["ab"] * 129}, "129 words; at most 128"),
        ({"bad_words": ["a" * 205] * 5}, "1025 characters; at most 1024"),
        ({"bad_words": ["a"], "ignore_eos": True}, "ignore_eos=False"),
        ({"bad_words": np.array(["a", "b"])}, "must be a list of at least one string"),
    ],
)
def test_limits_of_unwanted_words(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message) as refusal:
        SamplingParams(**params)
    assert refusal.value.param == "bad_words"


def test_allowed_tokens_are_listed_once() -> None:
    params = SamplingParams(allowed_token_ids=[7, 3, 7])
    assert params.grammar == ("allowed_token_ids", "[3, 7]")
