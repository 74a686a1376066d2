"""Requests that go on where another runner computed their prompts."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.runtime.runner import ModelRunner
from specjax.sampling.params import SamplingParams
from specjax.sampling.table import HostTables
from specjax.speculative.future_map import publish, record, stash_handover
from specjax.testing import Job

from ..runners import copied_runner
from .driver import start

COUNT, STEPS = 20, 4
PARAMS = [
    SamplingParams(max_new_tokens=COUNT, temperature=0.0),
    SamplingParams(max_new_tokens=COUNT, temperature=0.8),
]
# the one of two chunks
PROMPTS = [(7, 30, 12, 9), tuple(range(20, 41))]
JOBS = [
    Job(prompt=prompt, params=params, seed=3)
    for prompt, params in zip(PROMPTS, PARAMS, strict=True)
]
# prefilled in slots 1 and 2, decoded in these
SLOTS = [4, 2]


def another(runner: ModelRunner) -> ModelRunner:
    """A runner with the same compiled functions and weights, and its own pools and rows."""
    other = copy.copy(runner)
    config, vocab_size = runner.config, runner.networks.target_config.vocab_size
    other.tables = HostTables(config.num_slots, config.pages_per_request, vocab_size)
    other._slots_on_device = {}
    other.load(*runner.weights)
    return other


@dataclass
class Served:
    """What the rounds of each request brought."""

    tokens: list[list[int]]
    proposed: list[list[int]]
    accepted: list[list[int]]


def decode(runner: ModelRunner, slots: list[int], first: list[int]) -> Served:
    served = Served([[token] for token in first], [[] for _ in slots], [[] for _ in slots])
    while any(len(tokens) < COUNT for tokens in served.tokens):
        for row in runner.round(slots).read():
            for i, (*tokens, proposed, accepted, count) in enumerate(row[: len(slots)].tolist()):
                if len(served.tokens[i]) < COUNT:
                    served.tokens[i] += tokens[:count]
                    served.proposed[i].append(proposed)
                    served.accepted[i].append(accepted)
    served.tokens = [tokens[:COUNT] for tokens in served.tokens]
    return served


def hand_over(here: ModelRunner, there: ModelRunner, slots: list[int], *, rows: bool) -> None:
    """What slots 1, 2, ... of one runner have goes to slots of another, pools as a whole."""
    owners = np.arange(1, len(slots) + 1)
    old = here.on_device.future
    lens, bonus = old.seq_lens[owners], old.bonus_tokens[owners]
    left: Any = jax.tree.map(lambda leaf: leaf[owners], old.rows) if rows else None
    pools = jax.tree.map(jnp.copy, here.on_device.pools)
    targets, future = jnp.asarray(slots, jnp.int32), there.on_device.future
    future = publish(future, targets, lens, bonus)
    future = record(future, targets, jnp.zeros_like(lens), old.tokens[owners], lens + 1)
    kept = future.remaining.at[targets].set(old.remaining[owners])
    future = replace(future, remaining=kept)
    build = there.config.algorithm.build_disagg_draft_input
    given = build(left, bonus, lens, targets, future)
    assert (given is None) == (left is None)
    future = stash_handover(future, targets, given)
    there.on_device = replace(there.on_device, pools=pools, future=future)


def prefilled(runner: ModelRunner) -> list[int]:
    return [int(start(runner, i, job).read()[0]) for i, job in enumerate(JOBS, start=1)]


def taken_over(steps: int, *, rows: bool) -> Served:
    """The jobs, prefilled by one runner and decoded by another, in other slots."""
    here = copied_runner(steps)
    there = another(here)
    first = prefilled(here)
    for i, (slot, job) in enumerate(zip(SLOTS, JOBS, strict=True), start=1):
        there.set_slot(slot, job.params, seed=job.seed, prompt_len=len(job.prompt))
        there.set_pages(slot, here.tables.page_table[i].tolist())
    hand_over(here, there, SLOTS, rows=rows)
    for i in (1, 2):
        here.clear_slot(i)
    return decode(there, SLOTS, first)


@pytest.fixture(scope="module")
def whole() -> Served:
    """The jobs on one runner."""
    runner = copied_runner(STEPS)
    served = decode(runner, [1, 2], prefilled(runner))
    for slot in (1, 2):
        runner.clear_slot(slot)
    assert all(sum(accepted) > 3 for accepted in served.accepted)
    return served


def test_rows_that_come_along_go_on_as_if_nothing_had_happened(whole: Served) -> None:
    assert taken_over(STEPS, rows=True) == whole


def test_without_rows_the_first_round_drafts_nothing_and_the_next_ones_do(whole: Served) -> None:
    served = taken_over(STEPS, rows=False)
    assert served.tokens == whole.tokens
    for proposed, accepted in zip(served.proposed, served.accepted, strict=True):
        assert proposed[0] == accepted[0] == 0
        assert set(proposed[1:]) == {STEPS}
        assert sum(accepted) > 3


def test_plain_decoding_needs_no_rows(whole: Served) -> None:
    for rows in (True, False):
        assert taken_over(0, rows=rows).tokens == whole.tokens


@pytest.mark.parametrize("rows", [True, False])
def test_an_empty_batch_changes_nothing(rows: bool) -> None:
    here = copied_runner(STEPS)
    there = another(here)
    hand_over(here, there, [], rows=rows)
    for old, new in zip(
        jax.tree.leaves(another(here).on_device.future),
        jax.tree.leaves(there.on_device.future),
        strict=True,
    ):
        assert np.array_equal(old, new)
