"""Verified and replayed rows of the gated delta rule, compared with one row at a time in numpy."""

from functools import partial
from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specjax.kernels.delta_inputs import DeltaInputs, ReplayRows, RequestRows
from specjax.kernels.delta_rule import DeltaPool, choose_width, delta_replay, delta_verify

from ..support.lowering import TRITON_CALL, lower_for_cuda
from .delta import Sizes, check_pool, close, draw, owned, verify, walk, with_padding
from .runs import DEVICE, INTERPRET, RUNS


class Form(NamedTuple):
    """Rows per request, whether they are trees, and sizes of heads."""

    num_rows: int
    is_tree: bool
    sizes: Sizes = Sizes()


FORMS = [
    Form(2, True),
    Form(1, False),
    Form(5, False),
    Form(16, True, Sizes(layers=1)),
    Form(4, False, Sizes(key_heads=1, value_heads=3, value_dim=16, taps=3)),
    Form(3, True, Sizes(key_dim=32, value_heads=2, value_dim=64, layers=3, taps=2)),
    Form(4, True, Sizes(key_dim=12, value_dim=8)),  # sizes that XLA computes
]


def ancestors(parents: np.ndarray, row: int) -> list[int]:
    """The rows from the root to a row."""
    return [*(ancestors(parents, parents[row]) if parents[row] >= 0 else []), row]


def check_round(case, num_rows, parents, paths, implementation, tolerance=2e-5) -> None:
    """Compare outputs of all rows, and the pool after a replay of ``paths``."""
    path = np.full((len(paths), num_rows), -1, np.int32)
    for request, rows in enumerate(paths):
        path[request, : len(rows)] = rows
    outs, pool = verify(with_padding(case), num_rows, parents, path, implementation)
    outs = np.asarray(outs)
    np.testing.assert_array_equal(outs[:, ~owned(case)], 0)
    chain = np.arange(num_rows) - 1
    for request, (slot, _, start, count) in enumerate(zip(*case.rows, strict=True)):
        of_rows = chain if parents is None else parents[request]
        for row in range(count if slot > 0 else 0):
            for layer, out in enumerate(outs):
                expected, _, _ = walk(case, layer, request, ancestors(of_rows, row))
                close(out[start + row], expected[-1], tolerance)
    check_pool(case, pool, paths, tolerance)


def random_trees(rng, batch, num_rows) -> np.ndarray:
    parents = [[-1, *(rng.integers(0, i) for i in range(1, num_rows))] for _ in range(batch)]
    return np.asarray(parents, np.int32)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_round_equals_one_row_at_a_time(run, form):
    """Slot 0 is padding, a request starts a text, and one continues another slot's state."""
    num_rows, is_tree, sizes = form
    rows = RequestRows((3, 0, 1, 5), (3, 0, -1, 2), np.arange(4) * num_rows, (num_rows,) * 4)
    case = draw(sizes, rows, 4 * num_rows, seed=num_rows)
    rng = np.random.default_rng(num_rows)
    parents = random_trees(rng, 4, num_rows) if is_tree else None
    of_rows = parents if is_tree else np.tile(np.arange(num_rows) - 1, (4, 1))
    leaves = num_rows - 1, 0, (num_rows - 1) // 2
    paths = [*(ancestors(of_rows[i], leaf) for i, leaf in enumerate(leaves)), []]
    check_round(case, num_rows, parents, paths, **run)


@st.composite
def rounds(draw_from):
    """Requests in W rows in any order with gaps, trees, and paths from no row to a whole one."""
    batch, num_rows, num_slots = 3, 4, 6
    counts = [draw_from(st.integers(0, num_rows)) for _ in range(batch)]
    slots = draw_from(st.permutations(range(1, num_slots)))[:batch]
    slots = [slot * draw_from(st.sampled_from([0, 1, 1, 1])) for slot in slots]
    free = [slot for slot in range(num_slots) if slot not in slots]
    sources = [draw_from(st.sampled_from([-1, slot, slot, *free[1:]])) for slot in slots]
    starts, end = [0] * batch, 0
    for i in draw_from(st.permutations(range(batch))):
        starts[i] = end + draw_from(st.integers(0, 1))
        end = starts[i] + counts[i]
    rng = np.random.default_rng(draw_from(st.integers(0, 2**32 - 1)))
    parents = random_trees(rng, batch, num_rows)
    paths = []
    for i in range(batch):
        leaf = draw_from(st.integers(-1, counts[i] - 1))
        paths.append(ancestors(parents[i], leaf) if leaf >= 0 and slots[i] else [])
    bias = draw_from(st.sampled_from([-6.0, -1.0, 4.0]))
    return RequestRows(slots, sources, starts, counts), parents, paths, bias


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_any_round_equals_one_row_at_a_time(run):
    """Rows without a request hold NaN, and change nothing."""

    @settings(max_examples=25, deadline=None)
    @given(rounds(), st.integers(0, 99))
    def check(round_, seed):
        rows, parents, paths, bias = round_
        case = draw(Sizes(), rows, 16, seed, bias)
        check_round(case, 4, parents, paths, **run)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_any_number_of_rows_is_accepted(run):
    """Request i accepts i rows of a chain; without rows, its slot stays as it is."""
    slots = [1, 2, 3, 4, 5]
    case = draw(Sizes(), RequestRows(slots, slots, np.arange(5) * 4, (4,) * 5), 20)
    check_round(case, 4, None, [list(range(i)) for i in range(5)], **run)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_bfloat16(run):
    rows = RequestRows((3, 1), (3, -1), (0, 4), (4, 3))
    case = draw(Sizes(), rows, 8, dtype="bfloat16")
    check_round(
        case, 4, random_trees(np.random.default_rng(0), 2, 4), [[0], [0, 1]], **run, tolerance=3e-2
    )


# heads of the 9B model, and its layers
HEADS, LAYERS = (16, 128, 32, 128), 24


def shapes_of(batch, num_rows, layers=LAYERS, slots=33, heads=HEADS, dtype="bfloat16"):
    """Shapes of inputs, rows of a replay, pool and requests."""
    spec, total = jax.ShapeDtypeStruct, batch * num_rows
    key_heads, key_dim, value_heads, value_dim = heads
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    inputs = DeltaInputs(
        spec((total, key_heads, key_dim), dtype),
        spec((total, value_heads, value_dim), dtype),
        spec((total, value_heads), "float32"),
    )
    replay = jax.eval_shape(partial(ReplayRows.zeros, (layers, total), heads, dtype))
    pool = DeltaPool(
        spec((LAYERS, slots, value_heads, value_dim, key_dim), "float32"),
        spec((LAYERS, slots, 3, channels), dtype),
    )
    return inputs, replay, pool, RequestRows(*(spec((batch,), "int32") for _ in range(4)))


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize(("batch", "num_rows"), [(1, 4), (32, 1), (8, 16)])
def test_a_round_lowers_for_cuda(batch, num_rows, is_tree):
    """Each layer is one launch, and so is the replay of all of them, which writes the pool."""
    inputs, replay, pool, rows = shapes_of(batch, num_rows)
    table = jax.ShapeDtypeStruct((batch, num_rows), "int32")

    def call(inputs, replay, pool, rows, parents):
        return delta_verify(inputs, replay, pool, 5, rows, num_rows, parents, **DEVICE)

    text = lower_for_cuda(call, inputs, replay, pool, rows, table if is_tree else None)
    assert text.count(f"custom_call @{TRITON_CALL}") == 1
    assert "specjax_delta_verify" in text
    text = lower_for_cuda(partial(delta_replay, **DEVICE), pool, replay, rows, table)
    assert text.count(f"custom_call @{TRITON_CALL}") == 1
    assert text.count("output_operand_alias<") == 2


def test_trees_of_many_rows_take_narrow_tiles():
    """And lanes have 4 neighbours of a key."""
    assert [choose_width(128, 128, rows) for rows in (1, 4, 5, 16)] == [16, 16, 8, 8]
    assert [choose_width(key_dim, 64, 16) for key_dim in (64, 32, 16)] == [8, 8, 16]
    assert choose_width(16, 8) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_rows": 17}, "num_rows=17 .* 1 to 16"),
        ({"num_rows": 0}, "num_rows=0"),
        ({"parents": (2, 3)}, r"parents \(2, 3\) must be \(2, 4\)"),
        ({"heads": (2, 16, 4, 32)}, r"windows|keys|mixed"),
        ({"values": (8, 32, 64)}, r"values \(8, 32, 64\) must be \(8, 32, 128\)"),
    ],
)
def test_a_round_that_does_not_fit_is_refused(change, message):
    inputs, replay, pool, rows = shapes_of(2, 4)
    spec = jax.ShapeDtypeStruct
    if "heads" in change:
        replay = shapes_of(2, 4, heads=change["heads"])[1]
    if "values" in change:
        inputs = inputs._replace(values=spec(change["values"], "bfloat16"))
    parents = spec(change.get("parents", (2, 4)), "int32")
    call = partial(delta_verify, layer=0, num_rows=change.get("num_rows", 4), **INTERPRET)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            lambda i, r, p, rows, x: call(i, r, p, rows=rows, parents=x),
            *(inputs, replay, pool, rows, parents),
        )


def test_a_replay_of_other_layers_or_requests_is_refused():
    _, replay, pool, rows = shapes_of(2, 4, layers=1)
    path = jax.ShapeDtypeStruct((2, 4), "int32")
    with pytest.raises(ValueError, match=r"rows of 1 layers .* must be of 24 layers and 2"):
        jax.eval_shape(delta_replay, pool, replay, rows, path)
    _, replay, pool, rows = shapes_of(2, 4)
    path = jax.ShapeDtypeStruct((3, 4), "int32")
    with pytest.raises(ValueError, match=r"paths \(3, 4\) must be of 24 layers and 2 requests"):
        jax.eval_shape(delta_replay, pool, replay, rows, path)
