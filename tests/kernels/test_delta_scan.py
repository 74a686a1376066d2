"""Rows of the gated delta rule in order, compared with one row at a time in numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specjax.kernels.delta_inputs import DeltaInputs, ReplayRows, RequestRows
from specjax.kernels.delta_rule import DeltaPool
from specjax.kernels.delta_scan import Kept, delta_scan

from ..support.lowering import TRITON_CALL, lower_for_cuda
from .delta import Sizes, check_pool, close, draw, owned, scan, walk, with_padding
from .runs import DEVICE, RUNS

# groups of 1 row are the recurrence; larger ones are the matrix form
GROUPS = [16, 1]


def check_rows(case, group, implementation, tolerance=2e-5) -> None:
    """Compare outputs and the pool; rows without a request hold NaN."""
    outs, pool = scan(with_padding(case), group, implementation)
    outs = np.asarray(outs)
    np.testing.assert_array_equal(outs[:, ~owned(case)], 0)
    live = [range(n * (slot > 0)) for slot, n in zip(case.rows[0], case.rows[3], strict=True)]
    for request, path in enumerate(live):
        start = case.rows.starts[request]
        for layer in range(len(outs)):
            expected, _, _ = walk(case, layer, request, path)
            close(outs[layer, start : start + len(path)], expected, tolerance)
    check_pool(case, pool, live, tolerance)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("group", GROUPS)
def test_packed_prompts_equal_one_row_at_a_time(run, group):
    """A new prompt, a continued one, one after another slot, padding, and one without rows."""
    rows = RequestRows((1, 2, 0, 4, 5), (-1, 2, 0, 3, 5), (0, 20, 22, 24, 42), (20, 2, 2, 17, 0))
    case = draw(Sizes(layers=1), rows, 42)
    check_rows(case, group, **run)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bias", [-6.0, 6.0])
def test_layers_with_long_and_short_memory(run, group, bias):
    """Decays are near 1 or 0, in two layers with other sizes of heads."""
    sizes = Sizes(key_heads=1, key_dim=32, value_heads=2, value_dim=64)
    case = draw(sizes, RequestRows((1, 2), (-1, 2), (0, 70), (70, 26)), 100, bias=bias)
    check_rows(case, 32 if group > 1 else 1, **run, tolerance=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_any_packing_equals_one_row_at_a_time(run):
    @settings(max_examples=15, deadline=None)
    @given(
        st.lists(st.integers(0, 20), min_size=3, max_size=3),
        st.permutations(range(1, 6)),
        st.sampled_from(GROUPS),
        st.data(),
    )
    def check(counts, slots, group, data):
        slots = [slot * data.draw(st.sampled_from([0, 1, 1])) for slot in slots[:3]]
        sources = [data.draw(st.sampled_from([-1, slot])) for slot in slots]
        starts = np.cumsum([0, *counts[:2]])
        seed = data.draw(st.integers(0, 2**32 - 1))
        case = draw(Sizes(layers=1), RequestRows(slots, sources, starts, counts), 64, seed)
        check_rows(case, group, **run)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_equal_keys_with_full_weights(run):
    """The inverse of a group has cancelling entries if each row replaces the one before it."""
    sizes = Sizes(layers=1)
    case = draw(sizes, RequestRows((1,), (1,), (0,), (64,)), 64, bias=-30.0)
    products = np.concatenate([np.full((1, 64, 4), 30.0), case.products[..., 4:]], axis=2)
    mixed = np.repeat(case.mixed[:, :1], 64, axis=1)
    mixed[..., 64:] = case.mixed[..., 64:]  # values differ
    case = case._replace(products=products.astype(np.float32), mixed=mixed)
    check_rows(case, 64, **run)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("cut", [32, 5])
@pytest.mark.parametrize("group", GROUPS)
def test_a_prompt_may_be_cut_anywhere(run, group, cut):
    """Bits are the same if groups are, which is any cut in the form of one row."""
    text = draw(Sizes(layers=1), RequestRows((3,), (-1,), (0,), (48,)), 48)
    outs, pool = scan(text, group, **run)
    head = text._replace(rows=RequestRows(*(np.array([x], np.int32) for x in (3, -1, 0, cut))))
    tail = [np.array([x], np.int32) for x in (3, 3, 0, 48 - cut)]
    rolled = {x: np.roll(getattr(text, x), -cut, axis=1) for x in ("mixed", "products")}
    first, middle = scan(head, group, **run)
    middle = DeltaPool(*(np.asarray(x) for x in middle))
    second, end = scan(text._replace(rows=RequestRows(*tail), pool=middle, **rolled), group, **run)
    pairs = [(first[:, :cut], outs[:, :cut]), (second[:, : 48 - cut], outs[:, cut:])]
    pairs += [(x[:, 3], y[:, 3]) for x, y in zip(end, pool, strict=True)]
    for now, expected in pairs:
        if cut % group == 0:
            np.testing.assert_array_equal(now, expected)
        else:
            close(now, np.asarray(expected))


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("group", GROUPS)
def test_states_are_kept_as_if_the_rows_ended_there(run, group):
    """After a group of a continued prompt, after all rows of a new one, and not of a third."""
    rows = RequestRows((1, 2, 3), (1, -1, 3), (0, 20, 22), (20, 2, 9))
    case = draw(Sizes(layers=1, slots=8), rows, 32)
    counts = np.array([16, 2, 9], np.int32)
    outs, pool = scan(case, group, kept=Kept(np.array([7, 5, 0], np.int32), counts), **run)
    expected_outs, expected = scan(case, group, **run)
    _, ended = scan(case._replace(rows=case.rows._replace(counts=counts)), group, **run)
    np.testing.assert_array_equal(outs, expected_outs)
    for now, plain, early, before in zip(pool, expected, ended, case.pool, strict=True):
        np.testing.assert_array_equal(now[:, [7, 5]], early[:, [1, 2]])
        np.testing.assert_array_equal(now[:, 1:4], plain[:, 1:4])
        np.testing.assert_array_equal(now[:, [0, 4, 6]], before[:, [0, 4, 6]])


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("group", GROUPS)
def test_the_state_of_a_long_text_does_not_drift(run, group):
    """After 4,096 rows with long memory, 32 calls of 128 rows."""
    sizes = Sizes(layers=1, key_heads=1, value_heads=2, value_dim=16)
    case = draw(sizes, RequestRows((1,), (-1,), (0,), (4096,)), 4096, bias=-6.0)
    _, state, window = walk(case, 0, 0, range(4096))
    pool, source = case.pool, -1
    for start in range(0, 4096, 128):
        part = {x: getattr(case, x)[:, start : start + 128] for x in ("mixed", "products")}
        rows = RequestRows(*(np.array([x], np.int32) for x in (1, source, 0, 128)))
        _, pool = scan(case._replace(pool=pool, rows=rows, **part), group, **run)
        source = 1
    close(pool.states[0, 1], state, 2e-5)
    np.testing.assert_array_equal(pool.windows[0, 1], window)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("group", GROUPS)
def test_bfloat16(run, group):
    rows = RequestRows((1, 2), (-1, 2), (0, 20), (20, 9))
    check_rows(draw(Sizes(layers=1), rows, 32, dtype="bfloat16"), group, **run, tolerance=4e-2)


# heads of the 9B model, its layers and channels
HEADS, LAYERS, CHANNELS = (16, 128, 32, 128), 24, 8192


def shapes_of(batch, total, slots=33):
    spec, (key_heads, key_dim, value_heads, value_dim) = jax.ShapeDtypeStruct, HEADS
    inputs = DeltaInputs(
        spec((total, key_heads, key_dim), "bfloat16"),
        spec((total, value_heads, value_dim), "bfloat16"),
        spec((total, value_heads), "float32"),
    )
    replay = jax.eval_shape(partial(ReplayRows.zeros, (1, total), HEADS, "bfloat16"))
    states = spec((LAYERS, slots, value_heads, value_dim, key_dim), "float32")
    pool = DeltaPool(states, spec((LAYERS, slots, 3, CHANNELS), "bfloat16"))
    rows = RequestRows(*(spec((batch,), "int32") for _ in range(4)))
    return inputs, replay, pool, spec((), "int32"), rows


@pytest.mark.parametrize(
    ("batch", "total", "group", "is_kept", "names"),
    [
        (32, 32, 1, False, ["steps"]),
        (2, 4096, 1, True, ["steps"]),
        (2, 4096, 64, True, ["inverse", "groups"]),
        (8, 300, 32, False, ["inverse", "groups"]),
    ],
)
def test_lowers_for_cuda(batch, total, group, is_kept, names):
    """The last launch writes states and windows in place."""
    shapes = shapes_of(batch, total)
    kept = (Kept(*shapes[-1][:2]),) if is_kept else ()
    text = lower_for_cuda(partial(delta_scan, group=group, **DEVICE), *shapes, *kept)
    assert text.count(f"custom_call @{TRITON_CALL}") == len(names)
    assert all(f"specjax_delta_{name}" in text for name in names)
    assert text.count("output_operand_alias<") == 2


def test_invariant_implementations_compute_row_by_row():
    call = partial(delta_scan, implementation="invariant")
    text = lower_for_cuda(call, *shapes_of(1, 64))
    assert "specjax_delta_steps" in text
    assert "specjax_delta_groups" not in text


@pytest.mark.slow
@pytest.mark.parametrize("run", [RUNS[0], RUNS[2]])
@pytest.mark.parametrize("is_kept", [False, True])
def test_the_pool_is_not_copied(run, is_kept):
    """XLA aliases a donated pool, and temporary values are smaller than the states."""
    sizes = Sizes(layers=2, slots=512)
    case = draw(sizes, RequestRows((1,), (1,), (0,), (16,)), 16)

    def call(pool, case):
        kept = Kept(*(jnp.array([x], jnp.int32) for x in (2, 16))) if is_kept else None
        return scan.__wrapped__(case._replace(pool=pool), 16, kept=kept, **run)[1]

    memory = jax.jit(call, donate_argnums=0).lower(case.pool, case).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= case.pool.states.nbytes
    assert memory.temp_size_in_bytes < case.pool.states.nbytes


@pytest.mark.parametrize("group", [0, 8, 24])
def test_other_groups_are_refused(group):
    with pytest.raises(ValueError, match=f"group={group} must be 1, or a power of two"):
        jax.eval_shape(partial(delta_scan, group=group), *shapes_of(1, 64))
