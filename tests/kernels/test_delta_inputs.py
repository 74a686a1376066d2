"""Inputs of the gated delta rule, compared with numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.kernels.delta_inputs import (
    DeltaGates,
    ReplayRows,
    RequestRows,
    Taps,
    delta_inputs,
)

from ..support.lowering import TRITON_CALL, lower_for_cuda
from .delta import Sizes, close, draw, inputs_of
from .runs import DEVICE, INTERPRET, RUNS


@partial(jax.jit, static_argnames=("layer", "heads", "implementation"))
def compute(case, layer, heads, taps, implementation):
    layers, total = case.mixed.shape[:2]
    replay = ReplayRows.zeros((layers, total), heads, case.mixed.dtype)
    rest = case.weights[layer], case.pool.windows, layer, taps, heads
    how = {"implementation": implementation}
    both = (
        delta_inputs(case.mixed[layer], case.gates[layer], *rest, x, **how) for x in (replay, None)
    )
    return *next(both), *next(both)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "sizes", [Sizes(), Sizes(key_heads=1, key_dim=24, value_heads=3, value_dim=8, taps=3)]
)
def test_equals_numpy(run, sizes):
    """A tree of five rows after a window, four rows at a text's start, and padding before both."""
    parents = np.array([[-1, 0, 1, 2, 0], [-1, 0, 1, 2, 3]], np.int32)
    case = draw(sizes, RequestRows((2, 4), (5, -1), (6, 1), (5, 4)), 11)
    taps = Taps.of(case.rows, 11, sizes.taps, parents)
    inputs, replay, *alone = compute(case, 1, sizes.heads, taps, **run)
    before = {6: [], 7: [6], 8: [6, 7], 9: [6, 7, 8], 10: [6], 1: [], 2: [1], 3: [1, 2]}
    before[4] = [1, 2, 3]
    window = {True: case.pool.windows[1, 5], False: np.zeros_like(case.pool.windows[1, 5])}
    for row, earlier in before.items():
        text = [*window[row > 5], *case.mixed[1, earlier], case.mixed[1, row]]
        expected = inputs_of(case, 1, text[-sizes.taps :], case.products[1, row])
        arrays = inputs.queries, replay.keys[1], inputs.values, inputs.betas, replay.log_decays[1]
        for array, value in zip(arrays, expected, strict=True):
            close(array[row], value, 2e-6)
    np.testing.assert_array_equal(replay.mixed[1], case.mixed[1])
    for array in replay:
        assert not np.asarray(array[0]).any()
    # without rows of all layers, those of this one are new
    assert alone[1].deltas is None
    pairs = [
        *zip(inputs, alone[0], strict=True),
        *((x[1], y[0]) for x, y in zip(replay[:3], alone[1][:3], strict=True)),
    ]
    for ours, others in pairs:
        close(ours, np.asarray(others), 1e-6)


@pytest.mark.parametrize("run", RUNS)
def test_gates_of_large_products_are_finite(run):
    """A decay may be 0 or 1, and the logarithm keeps the digits of a decay near 1."""
    sizes = Sizes(layers=1)
    case = draw(sizes, RequestRows((1,), (1,), (0,), (4,)), 4)
    of_decay = np.array([-30.0, -12.0, 0.0, 500.0], np.float32)
    products = np.repeat(np.array([-200.0, 0.0, 200.0, 1.0], np.float32)[:, None], 4, axis=1)
    products = np.concatenate([products, np.repeat(of_decay[:, None], 4, axis=1)], axis=1)
    case = case._replace(products=products[None], biases=np.zeros((1, 4), np.float32))
    taps = Taps.of(case.rows, 4, sizes.taps)
    inputs, replay, *_ = compute(case, 0, sizes.heads, taps, **run)
    rates = np.exp(case.log_rates[0].astype(np.float64))
    expected = -np.logaddexp(0, of_decay.astype(np.float64))[:, None] * rates
    np.testing.assert_allclose(replay.log_decays[0], expected, rtol=2e-6)
    expected = np.array([0, 0.5, 1, 1 / (1 + np.exp(-1))])
    np.testing.assert_allclose(inputs.betas[:, 0], expected, rtol=1e-6, atol=1e-30)


def test_a_row_without_a_request_has_no_window():
    rows = RequestRows(*(jnp.asarray(x) for x in ((0, 3), (0, 3), (0, 2), (2, 2))))
    taps = Taps.of(rows, 5, 3)
    np.testing.assert_array_equal(taps.sources, [-1, -1, 3, 3, -1])
    np.testing.assert_array_equal(taps.rows, [[-2, -1], [-2, -1], [-2, -1], [-1, 2], [-2, -1]])


def shapes_of(rows, **changes):
    spec, (layers, heads, channels) = jax.ShapeDtypeStruct, (24, (16, 128, 32, 128), 8192)
    gates = DeltaGates(spec((rows, 64), "float32"), *(spec((32,), "float32"),) * 2)
    arrays = {
        "mixed": spec((rows, channels), "bfloat16"),
        "gates": gates,
        "weights": spec((channels, 4), "bfloat16"),
        "windows": spec((layers, 33, 3, channels), "bfloat16"),
        "layer": spec((), "int32"),
        "taps": Taps(spec((rows, 3), "int32"), spec((rows,), "int32")),
        "replay": jax.eval_shape(partial(ReplayRows.zeros, (layers, rows), heads, "bfloat16")),
    }
    return tuple((arrays | changes).values())


def with_heads(*arrays, implementation):
    return delta_inputs(*arrays[:6], (16, 128, 32, 128), *arrays[6:], implementation=implementation)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("rows", [1, 32, 4096])
def test_lowers_for_cuda(rows, is_kept):
    changes = {} if is_kept else {"replay": None}
    text = lower_for_cuda(partial(with_heads, **DEVICE), *shapes_of(rows, **changes))
    assert text.count(f"custom_call @{TRITON_CALL}") == 1
    assert "specjax_delta_inputs" in text
    assert text.count("output_operand_alias<") == 3 * is_kept


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("mixed", (8, 8000), r"mixed \(8, 8000\) must be \(8, 8192\)"),
        ("weights", (8192, 3), r"weights \(8192, 3\) must be \(8192, 4\)"),
        ("windows", (24, 33, 3, 8000), r"windows \(8000,\) must be \(8192,\)"),
    ],
)
def test_bad_shapes_are_refused(name, shape, message):
    changes = {name: jax.ShapeDtypeStruct(shape, "bfloat16")}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(partial(with_heads, **INTERPRET), *shapes_of(8, **changes))
