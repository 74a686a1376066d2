"""A request whose grammar limits nothing any more, as after a budget of its reasoning."""

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from specjax.sampling.grammar_process import Answer
from specjax.sampling.grammar_request import RequestGrammar
from specjax.sampling.params import SamplingParams
from specjax.scheduling.constrained import is_constrained
from specjax.types import DraftShape

from ..support.runners import make_request


@pytest.mark.parametrize("is_free", [False, True])
def test_a_free_request_needs_no_rounds_of_two_calls(is_free: bool) -> None:
    process = Mock()
    grammar = RequestGrammar(Mock(), {})
    grammar._process = process
    request = make_request([7], SamplingParams(max_new_tokens=20), width=3)
    request.constraint = grammar
    rows = cast(Any, [SimpleNamespace(request=request)])

    def answer(num_accepted: int, is_free: bool) -> None:
        grammar.answer = Answer(num_accepted, False, is_free, False, "")

    answer(1, False)
    request.append_first(8)
    answer(2, False)
    request.append_round([9, 10, 11], 3, 2, DraftShape.chain(3))
    assert is_constrained(rows)
    process.end.assert_not_called()
    answer(3, is_free)
    request.append_round([12, 13, 14], 3, 2, DraftShape.chain(3))
    # the tokens of the last answer count, and the text goes on
    assert request.output_ids == [8, 9, 10, 12, 13, 14]
    assert not request.is_finished
    assert is_constrained(rows) == (not is_free)
    assert process.end.call_count == is_free
    request.append_round([15, 16, 17, 18], 3, 3, DraftShape.chain(3))
    assert request.output_ids[6:] == ([15, 16, 17, 18] if is_free else [15, 16, 17])
