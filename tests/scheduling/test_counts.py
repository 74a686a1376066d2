"""Speculative metrics and the ends of requests, over random rounds."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.sampling.params import SamplingParams
from specjax.scheduling.request import Request
from specjax.types import DraftShape

from ..support.runners import make_request
from ..support.schedulers import check_identities

END = 5  # of `make_request`


@dataclass
class Round:
    """A synthetic verify: ``num_drafts`` accepted drafts and a bonus token."""

    tokens: list[int]
    num_drafts: int


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, int, list[Round]]:
    """Drafts per round, ``max_new_tokens``, the first token, and rounds."""
    num_steps = draw(st.integers(1, 6))
    token = st.integers(0, 12)
    rounds = []
    for _ in range(draw(st.integers(0, 8))):
        num_drafts = draw(st.integers(0, num_steps))
        tokens = draw(st.lists(token, min_size=num_drafts + 1, max_size=num_drafts + 1))
        rounds.append(Round(tokens, num_drafts))
    return num_steps, draw(st.integers(1, 25)), draw(token), rounds


def play(num_steps: int, limit: int, first: int, rounds: list[Round]) -> Request:
    request = make_request([7], SamplingParams(max_new_tokens=limit), width=num_steps)
    request.append_first(first)
    for one in rounds:
        if request.is_finished:
            break
        request.append_round(one.tokens, num_steps, one.num_drafts, DraftShape.chain(num_steps))
    return request


@given(histories())
def test_metrics_follow_from_the_kept_positions(history) -> None:
    num_steps, limit, first, rounds = history
    request = play(*history)
    meta = request.result()["meta_info"]

    # expected: everything up to the first end token or the limit
    origin = [(first, None)]
    for number, one in enumerate(rounds):
        origin += [(token, (number, i)) for i, token in enumerate(one.tokens)]
    ends = [i for i, (token, _) in enumerate(origin) if token == END or i == limit - 1]
    kept = origin[: ends[0] + 1] if ends else origin
    assert request.output_ids == [token for token, _ in kept]
    assert request.is_finished == bool(ends)
    assert request.output_is_draft == [
        at is not None and at[1] < rounds[at[0]].num_drafts for _, at in kept
    ]

    entered = sorted({at[0] for _, at in kept if at is not None})
    correct = [
        sum(at is not None and at[0] == n and at[1] < rounds[n].num_drafts for _, at in kept)
        for n in entered
    ]
    proposed = [num_steps] * len(entered)
    if ends and entered:
        proposed[-1] = min(
            num_steps, sum(at is not None and at[0] == entered[-1] for _, at in kept)
        )
    histogram = meta["spec_correct_drafts_histogram"]
    assert histogram == [correct.count(i) for i in range(num_steps + 1)]
    assert meta["spec_num_correct_drafts"] == sum(correct) == sum(request.output_is_draft)
    assert meta["spec_num_proposed_drafts"] == sum(proposed)
    check_identities(request)


def test_plain_requests_have_no_speculative_metrics() -> None:
    request = make_request([7], SamplingParams(max_new_tokens=3))
    request.append_first(9)
    request.append_round([8], 0, 0, DraftShape.chain(0))
    assert not [name for name in request.result()["meta_info"] if name.startswith("spec_")]


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"max_new_tokens": 3}, {"type": "stop", "matched": END}),
        ({"max_new_tokens": 2}, {"type": "length", "length": 2}),
        # an end token that is also the last allowed one is a stop
        ({"max_new_tokens": 4, "ignore_eos": True}, {"type": "length", "length": 4}),
    ],
)
def test_finish_reason(params, reason) -> None:
    request = make_request([7], SamplingParams(**params), width=4)
    request.append_first(9)
    request.append_round([8, END, 6, 6], 4, 3, DraftShape.chain(4))
    assert request.finish_reason == reason
    assert request.result()["meta_info"]["finish_reason"] == reason


@pytest.mark.parametrize(("topk", "proposed"), [(1, 2 + 1), (2, 2 + 2)])
def test_all_nodes_of_a_tree_were_proposed(topk: int, proposed: int) -> None:
    """Also in the last round, since only drafts of a chain have positions; here T - 1 < S."""
    request = make_request([7], SamplingParams(max_new_tokens=4), width=3)
    request.append_first(8)
    for tokens, accepted in (([9, 10], 1), ([11], 0)):
        request.append_round(tokens, 2, accepted, DraftShape(3, topk, 3))
    assert request.is_finished
    assert request.result()["meta_info"]["spec_num_proposed_drafts"] == proposed
