"""The passes of a draft network: their tokens and positions, and the positions of draws."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.sampling.draw import SamplingConfig
from specjax.speculative import drafting
from specjax.speculative.drafting import DraftInput, draft_levels
from specjax.types import DraftShape

LENS, BONUS = np.array([3, 10], np.int32), np.array([5, 6], np.int32)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("topk", [1, 2])
def test_a_level_reads_the_drafts_of_the_level_before_it(
    start: int, topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bonus token has the position ``LENS``, and the drafts of level i ``LENS + i + 1``.

    A pass over level i runs there with ``start`` 1, and one position before with 0. It draws
    level i + 1.
    """
    shape = DraftShape(3, topk, 4 if topk == 1 else 7)
    ids = np.array([[11, 12], [13, 14]], np.int32)[:, :topk]
    probs = np.array([[0.6, 0.4], [0.6, 0.4]], np.float32)[:, :topk]
    passes: list[Any] = []
    draws: list[Any] = []

    def step(level: int, ids: Any, hidden: Any, positions: Any, state: int, attend: Any) -> Any:
        passes.append((ids, hidden[..., 0], positions, *attend))
        assert state == level
        return 10.0 * hidden + ids[..., None].astype(jnp.float32), state + 1

    def best(batch: Any, hidden: Any, positions: Any, count: int) -> Any:
        """Tokens 20, 22, ... of level 1, 40, 42, ... of level 2; the best ones have lower ids."""
        draws.append(positions)
        assert count == topk
        ids = 20 * len(draws) + 2 * np.arange(hidden.shape[1] * topk, dtype=np.int32)
        ids = np.broadcast_to(ids.reshape(1, -1, topk), (2, hidden.shape[1], topk))
        return jnp.asarray(1 / (ids + 1.0), jnp.float32), jnp.asarray(ids)

    def run(lens: Any, bonus: Any, *first: Any) -> Any:
        batch: Any = SimpleNamespace(
            bonus_tokens=bonus,
            seq_lens=lens,
            slots=np.arange(2),
            pages=SimpleNamespace(attend=lambda lens, rows, **options: (lens, rows)),
            draw=SamplingConfig(greedy=True),
        )
        tree, state = draft_levels(batch, 0, DraftInput(*first), shape, step, start)
        assert state == len(passes) == len(draws) == 2
        return tree.draft_tokens, passes, draws

    monkeypatch.setattr(drafting, "best_tokens", best)
    states = np.array([[7.0], [9.0]], np.float32)
    tokens, *records = jax.jit(run)(LENS, BONUS, probs, ids, states)
    for level, (inputs, positions) in enumerate(zip(*records, strict=True)):
        # both of the best drafts of level 2 come after the first one of level 1
        hidden = 10 * states + ids[:, :1] if level else states
        expected = (
            np.array([[20, 22], [20, 22]])[:, :topk] if level else ids,
            hidden.repeat(topk, axis=1),
            (LENS + start + level)[:, None].repeat(topk, axis=1),
            LENS + start + (level if topk == 1 else 0),
            topk,
        )
        for found, values in zip(inputs, expected, strict=True):
            np.testing.assert_array_equal(found, values)
        np.testing.assert_array_equal(positions, (LENS + level + 2)[:, None].repeat(topk, axis=1))
    np.testing.assert_array_equal(tokens[:, 0], BONUS)
    if topk == 1:
        np.testing.assert_array_equal(tokens, [[5, 11, 20, 40], [6, 13, 20, 40]])
