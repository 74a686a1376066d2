"""Algorithms by name, and the shapes that they draft."""

from typing import Any

import pytest

from specjax.engine.args import EngineArgs
from specjax.speculative import registry
from specjax.speculative.algorithm import SpeculativeAlgorithm
from specjax.types import DraftShape


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (None, "NONE"),
        ("none", "NONE"),
        ("eagle", "EAGLE"),
        ("Eagle3", "EAGLE3"),
        ("NextN", "EAGLE"),
    ],
)
def test_names_in_any_case(given, name) -> None:
    assert SpeculativeAlgorithm.from_string(given).name == name


@pytest.mark.parametrize("given", ["EAGLE2", "", 3])
def test_unknown_names_are_refused(given) -> None:
    with pytest.raises(
        ValueError, match=r"speculative_algorithm=.* is not one of \['NONE', 'EAGLE'"
    ):
        SpeculativeAlgorithm.from_string(given)


@pytest.mark.parametrize("name", registry.names())
def test_what_it_is(name) -> None:
    found = SpeculativeAlgorithm.from_string(name)
    assert found.is_speculative() != found.is_none()
    assert found.is_none() == (name == "NONE")
    assert found.is_eagle() == name.startswith("EAGLE")
    assert found.is_eagle3() == (name == "EAGLE3")
    assert not any((found.is_ngram(), found.is_standalone(), found.is_dflash()))
    assert not found.supports_target_verify_for_draft()
    assert found.lookahead == found.is_eagle()
    assert eval(repr(found), {type(found).__name__: type(found)}) == found  # a key of the cache


def test_shapes() -> None:
    chain = DraftShape.chain(3)
    assert chain == (3, 1, 4)
    assert (chain.accept_width, chain.overhang) == (4, 0)
    assert DraftShape(3, 4, 20).overhang == 19


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculative_algorithm": "EAGLE2"}, "speculative_algorithm='EAGLE2' is not one of"),
        ({"speculative_num_steps": 0}, "speculative_num_steps=0 .* speculative_algorithm=None"),
        ({"speculative_num_steps": 64}, "speculative_num_steps=64"),
        ({"speculative_num_steps": 3.0}, "speculative_num_steps=3.0"),
        ({"speculative_eagle_topk": 4}, "speculative_eagle_topk=4: only chains"),
        ({"speculative_num_draft_tokens": 5}, r"speculative_num_draft_tokens=5 .* \+ 1 = 4"),
    ],
)
def test_what_cannot_be_drafted_is_refused(changes: dict[str, Any], message: str) -> None:
    good = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3}
    assert EngineArgs(**good).shape == DraftShape.chain(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        EngineArgs(**(good | changes))
