"""Sampling parameters: defaults, forms, refusals."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax import SamplingParams


def test_defaults_are_those_of_sglang() -> None:
    assert dataclasses.asdict(SamplingParams()) == {
        "max_new_tokens": 128,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "stop": None,
        "stop_token_ids": None,
        "ignore_eos": False,
        "sampling_seed": None,
    }


def test_of_takes_an_instance_a_mapping_or_nothing() -> None:
    params = SamplingParams(top_k=3)
    assert SamplingParams.of(params) is params
    assert SamplingParams.of({"top_k": 3}) == params
    assert SamplingParams.of(None) == SamplingParams.of({}) == SamplingParams()


def test_of_names_what_is_unknown_and_what_is_supported() -> None:
    with pytest.raises(ValueError, match=r"\['min_p', 'n'\] are not supported.*'temperature'"):
        SamplingParams.of({"n": 2, "min_p": 0.1, "top_k": 3})
    for wrong in ("greedy", 3, ["top_k"]):
        with pytest.raises(ValueError, match="must be a SamplingParams, a mapping or None"):
            SamplingParams.of(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -1),
        ("max_new_tokens", 1.0),
        ("max_new_tokens", None),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", None),
        ("temperature", "0"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("top_p", None),
        ("top_k", 0),
        ("top_k", -2),
        ("top_k", 1.5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [3]),
        ("stop", 3),
        ("stop", b"x"),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", 3),
        ("stop_token_ids", "3"),
        ("ignore_eos", 1),
        ("sampling_seed", -1),
        ("sampling_seed", 2**64),
        ("sampling_seed", 1.0),
        ("sampling_seed", True),
    ],
)
def test_refusals_name_the_parameter_and_its_value(name, value) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**{name: value})
    assert repr(value) in str(caught.value)


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


def test_stop_strings_are_a_tuple_in_every_form() -> None:
    for stop, strings in (
        (None, ()),
        ("abc", ("abc",)),
        (["a", "b"], ("a", "b")),
        (("a",), ("a",)),
        ([], ()),
    ):
        assert SamplingParams(stop=stop).stop_strings == strings


@given(st.integers(0, 2**64 - 1), st.floats(0, 1e6), st.floats(0, 1, exclude_min=True))
def test_whole_ranges_are_allowed(seed, temperature, top_p) -> None:
    params = SamplingParams(sampling_seed=seed, temperature=temperature, top_p=top_p)
    assert (params.sampling_seed, params.temperature, params.top_p) == (seed, temperature, top_p)


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().top_k = 3  # type: ignore[misc]
