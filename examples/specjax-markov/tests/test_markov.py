"""Tests of the table alone, and of an engine that drafts from it."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from specjax_markov import Markov

from specjax.engine.args import EngineArgs
from specjax.testing import check_tokens, write_files
from specjax.types import DraftShape

TABLE = Markov("MARKOV", size=2**12)


def ints(*values):
    return jnp.asarray(values, jnp.int32)


def batch_of(bonus_tokens):
    return SimpleNamespace(bonus_tokens=bonus_tokens, seq_lens=bonus_tokens)


def prefilled(*texts, width=16):
    """Prefill prompts that end with a sampled token; return the table and the rows."""
    tokens, following, positions, last = [], [], [], []
    for text in texts:
        tokens += text[:-1]
        following += text[1:]
        positions += range(len(text) - 1)
        last.append(len(tokens) - 1)
    padded = (np.pad(part, (0, width - len(part))) for part in (tokens, following, positions))
    names = ("tokens", "next_tokens", "positions")
    chunks = dict(zip(names, (ints(*part)[None] for part in padded), strict=True))
    chunks = SimpleNamespace(last=ints(*last), **chunks)
    return TABLE.prefill(None, jnp.zeros(TABLE.size, jnp.int32), None, chunks, None)


def drafts(table, before, bonus, steps=4):
    """The real drafts after two tokens, without padding."""
    rows = ints(before)
    tree, _ = TABLE.propose(batch_of(ints(bonus)), table, rows, DraftShape.chain(steps))
    count = int(tree.num_proposed[0])
    return tree.draft_tokens[0, 1 : count + 1].tolist()


def test_a_prompt_drafts_itself_up_to_what_is_unknown():
    table, rows = prefilled([7, 0, 9, 3, 5], [8, 2, 6])
    assert rows.tolist() == [4, 3]
    assert drafts(table, 7 + 1, 0) == [9, 3, 5]
    assert drafts(table, 7 + 1, 0, steps=2) == [9, 3]
    assert drafts(table, 8 + 1, 2) == [6]
    assert drafts(table, 3 + 1, 8) == []  # the boundary between two chunks
    assert drafts(table, 0, 0) == []  # the token before is unknown
    assert np.count_nonzero(table) == 4


def test_what_was_accepted_is_learned():
    """Learning continues across rounds; a row without accepted tokens teaches nothing."""
    table, rows, bonus = jnp.zeros(TABLE.size, jnp.int32), ints(5, 9), ints(6, 9)
    for tokens, counts in (([[7, 8, 0], [1, 2, 3]], (2, 0)), ([[9, 1, 2], [4, 5, 6]], (1, 0))):
        verified = SimpleNamespace(accept_tokens=ints(*tokens), num_accepted_tokens=ints(*counts))
        table, rows = TABLE.extend(batch_of(bonus), table, rows, verified, None)
        bonus = ints(tokens[0][counts[0] - 1], 9)
    assert drafts(table, 4 + 1, 6) == [7, 8, 9]
    assert rows.tolist() == [8 + 1, 9]
    assert np.count_nonzero(table) == 3


def test_rows_of_a_prompt_computed_elsewhere_are_those_of_prefill():
    _, rows = prefilled([7, 1, 9, 3, 5], [8, 2, 6])
    history = ints([0] * 6, [8, 2, 6, 0, 0, 0], [7, 1, 9, 3, 5, 0])
    future = SimpleNamespace(tokens=history)
    found = TABLE.build_disagg_draft_input(None, ints(5, 6), ints(4, 2), ints(2, 1), future)
    assert found.tolist() == rows.tolist()
    empty = jnp.zeros(0, jnp.int32)
    assert TABLE.build_disagg_draft_input(None, empty, empty, empty, future).shape == (0,)


def test_its_map_has_a_token_for_each_request():
    future = TABLE.create_future_map(4, 16, 64, None)
    assert future.rows.shape == future.seq_lens.shape == (5,)
    assert future.tokens.shape == (5, 64)


def test_arguments():
    assert EngineArgs(speculative_algorithm="Markov").shape == DraftShape.chain(4)
    with pytest.raises(ValueError, match=r"speculative_eagle_topk.* no effect"):
        EngineArgs(speculative_algorithm="markov", speculative_eagle_topk=2)


def test_a_prompt_served_again_is_drafted_by_its_own_answer(tmp_path):
    """The tokens equal those of dense decoding."""
    prompts = [[7, 9, 11], [21, 40, 8, 3]]
    files = write_files(tmp_path)
    with files.engine(speculative=False, speculative_algorithm="markov") as engine:
        first, again = (check_tokens(engine, prompts) for _ in range(2))
    assert again >= max(24, first)
