"""Acceptance and its updates, compared with a walk in Python."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.kernels.accept_tree import SlotRows, accept_tree

from ..support.lowering import TRITON_CALL, lower_for_cuda
from .runs import DEVICE, RUNS, run_jitted

SLOTS, CONTEXT = 9, 24


def random_case(rng: np.random.Generator, batch: int, rows: int, vocab: int) -> list[np.ndarray]:
    """Trees (chains if there is one token) of requests in random slots, and padding."""
    parents = np.array([[-1, *(rng.integers(0, i) for i in range(1, rows))] for _ in range(batch)])
    if vocab == 1:
        parents[:] = np.arange(rows) - 1
    slots = rng.permutation(np.arange(1, SLOTS))[:batch]
    slots[rng.random(batch) < 0.2] = 0
    ends = np.full((batch, 3), -1)
    ends[:, 0] = rng.integers(0, 2 * vocab, batch)
    arrays = (
        rng.integers(0, vocab, (batch, rows)),
        parents,
        rng.integers(0, rows, batch),
        rng.integers(0, vocab, (batch, rows)),
        ends,
        slots,
        rng.integers(0, CONTEXT, batch),
        rng.integers(0, 50, SLOTS),
        rng.integers(0, 50, SLOTS),
        rng.integers(0, 6, SLOTS),
        rng.integers(100, 200, (SLOTS, CONTEXT)),
    )
    return [np.asarray(array, np.int32) for array in arrays]


def brute_force(case: list[np.ndarray], steps: int) -> list[np.ndarray]:
    drafts, parents, proposed, target, ends, slots, lens, *state = case
    all_lens, bonuses, remaining, history = (array.copy() for array in state)
    index, packed, bonus = [], [], []
    for b, slot in enumerate(slots):
        path = [0] if slot else []
        while path and len(path) <= steps:
            here = path[-1]
            rows = range(1, proposed[b] + 1)
            hits = [r for r in rows if parents[b, r] == here and drafts[b, r] == target[b, here]]
            if not hits:
                break
            path.append(hits[0])
        tokens = [int(target[b, r]) for r in path]
        pad = steps + 1 - len(path)
        index.append(path + [-1] * pad)
        counts = [int(proposed[b]), len(path) - 1, len(path)] if slot else [0, 0, 0]
        packed.append(tokens + [0] * pad + counts)
        bonus.append(tokens[-1] if tokens else 0)
        if slot:
            left = max(remaining[slot] - len(path), 0)
            remaining[slot] = 0 if set(tokens) & set(ends[b].tolist()) else left
            for i, token in enumerate(tokens):
                if lens[b] + 1 + i < CONTEXT:
                    history[slot, lens[b] + 1 + i] = token
        else:
            remaining[0] = 0
        all_lens[slot] = lens[b] + len(path) if slot else 0
        bonuses[slot] = bonus[-1]
    return [*map(np.asarray, (index, packed, bonus)), all_lens, bonuses, remaining, history]


def accepted(*arrays: jax.Array, num_steps: int, **run) -> list[jax.Array]:
    out, rows = accept_tree(*arrays[:7], SlotRows(*arrays[7:]), num_steps=num_steps, **run)
    return [*out, *rows]


def check(case: list[np.ndarray], steps: int, run: dict) -> None:
    found = run_jitted(accepted, run | {"num_steps": steps}, *case)
    for mine, truth in zip(found, brute_force(case, steps), strict=True):
        assert mine.dtype == np.int32
        np.testing.assert_array_equal(mine, truth)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("batch", "rows", "steps", "vocab"),
    [(1, 1, 0, 4), (3, 4, 3, 1), (8, 8, 7, 1), (5, 6, 3, 2), (8, 64, 6, 3), (2, 17, 4, 2)],
)
def test_random_trees(batch: int, rows: int, steps: int, vocab: int, run: dict) -> None:
    for seed in range(8):
        check(random_case(np.random.default_rng(seed), batch, rows, vocab), steps, run)


@pytest.mark.parametrize("run", RUNS)
def test_tokens_after_the_context_are_dropped(run: dict) -> None:
    case = random_case(np.random.default_rng(3), 2, 8, 1)
    case[2][:], case[5][:] = 7, [1, 2]
    for first in (CONTEXT - 9, CONTEXT - 4, CONTEXT - 1):
        case[6][:] = first
        check(case, 7, run)


@pytest.mark.parametrize(("batch", "rows", "steps"), [(1, 2, 1), (32, 8, 7), (8, 64, 6)])
def test_lowers_for_cuda_and_writes_in_place(batch: int, rows: int, steps: int) -> None:
    case = random_case(np.random.default_rng(0), 8, rows, 2)
    shapes = [(batch, *x.shape[1:]) for x in case[:7]] + [x.shape for x in case[7:]]
    text = lower_for_cuda(
        partial(accepted, num_steps=steps, **DEVICE),
        *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes),
    )
    assert text.count(TRITON_CALL) == 1
    assert "specjax_accept_tree" in text
    assert text.count("#stablehlo.output_operand_alias") == 4


def test_shapes_are_checked() -> None:
    case = list(map(jnp.asarray, random_case(np.random.default_rng(0), 2, 4, 2)))
    for broken in (1, 2, 4, 5, 6):
        arrays = [array[:1] if i == broken else array for i, array in enumerate(case)]
        with pytest.raises(ValueError, match="parents and target_tokens must be"):
            accepted(*arrays, num_steps=2)
