"""Experts of mixtures, compared with a loop over rows; rows of a batch, compared with one alone."""

from functools import cache, partial
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.kernels import mxfp4
from specjax.kernels.grouped_experts import ExpertTiles, grouped_experts

from ..support.lowering import TRITON_CALL, lower_for_cuda
from .runs import DEVICE, INTERPRET, RUNS, run_jitted


def swiglu(gate, up):
    return gate / (1 + jnp.exp(-gate)) * up


def clamped(gate, up):
    gate, up = jnp.minimum(gate, 1.5), jnp.clip(up, -1.5, 1.5)
    return (up + 1) * gate / (1 + jnp.exp(-1.7 * gate))


class Case(NamedTuple):
    """Sizes, and what the experts have in addition to values in the dtype of x."""

    rows: int
    top_k: int
    experts: int
    hidden: int
    inner: int
    # "channel", or "groups" of 128 inputs, of 8-bit floats; "mxfp4": 4-bit values, groups of 32
    scales: str = "none"
    routing: str = "random"  # "one" expert for all rows; "padded": the last two rows choose none
    has_biases: bool = False


CASES = [
    Case(40, 2, 8, 96, 160, routing="padded"),
    Case(1, 2, 8, 96, 32),
    Case(2, 3, 32, 48, 96, routing="padded"),
    Case(40, 3, 6, 128, 48, has_biases=True),
    Case(37, 1, 8, 64, 32, routing="one"),
    Case(5, 2, 6, 160, 96, "channel"),
    Case(1, 2, 16, 288, 144, "groups", has_biases=True),
    Case(20, 2, 8, 288, 144, "groups", routing="padded"),
    Case(20, 2, 8, 192, 64, "mxfp4", routing="padded", has_biases=True),
    Case(2, 3, 6, 64, 320, "mxfp4"),
    Case(300, 4, 8, 96, 80),
    Case(12, 2, 4, 40, 24, has_biases=True),  # sizes that XLA computes
]


class Arrays(NamedTuple):
    x: np.ndarray
    experts: np.ndarray
    weights: np.ndarray
    w_in: np.ndarray
    w_out: np.ndarray
    scales: tuple[np.ndarray, np.ndarray] | None
    biases: tuple[np.ndarray, np.ndarray] | None


def draw(case: Case, dtype: str = "float32") -> Arrays:
    rng = np.random.default_rng(sum(case[:5]))
    shapes = (case.experts, 2 * case.inner, case.hidden), (case.experts, case.hidden, case.inner)
    matrices = [rng.standard_normal(shape) / shape[2] ** 0.5 for shape in shapes]
    scales = biases = None
    if case.scales == "mxfp4":
        matrices = [
            rng.integers(256, size=(*s[:2], s[2] // 32, 16), dtype=np.uint8) for s in shapes
        ]
        powers = [rng.integers(121, 125, (*s[:2], s[2] // 32), np.uint8) for s in shapes]
        matrices, scales = list(map(mxfp4.pack, matrices)), tuple(map(mxfp4.pack_scales, powers))
    elif case.scales != "none":
        groups = [1 if case.scales == "channel" else -(-shape[2] // 128) for shape in shapes]
        scales = tuple(
            rng.uniform(0.5, 2, (*shape[:2], count)).astype(np.float32)
            for shape, count in zip(shapes, groups, strict=True)
        )
    if case.has_biases:
        biases = tuple(rng.standard_normal(shape[:2]).astype(np.float32) for shape in shapes)
    stored = {"none": dtype, "mxfp4": "uint16"}.get(case.scales, "float8_e4m3fn")
    w_in, w_out = (np.asarray(jnp.asarray(matrix, stored)) for matrix in matrices)
    order = np.argsort(rng.random((case.rows, case.experts)), axis=1)
    experts = order[:, : case.top_k].astype(np.int32)
    if case.routing == "one":
        experts[:] = 3
    x = rng.standard_normal((case.rows, case.hidden))
    if case.routing == "padded":
        experts[-2:], x[-2:] = -1, np.nan  # must not reach a result
    x = np.asarray(jnp.asarray(x, dtype))
    weights = rng.random(experts.shape).astype(np.float32)
    return Arrays(x, experts, weights, w_in, w_out, scales, biases)


def values_of(packed: np.ndarray, scales: np.ndarray, size: int) -> np.ndarray:
    """Values f64 ``[E, outputs, size]`` of packed MXFP4, by a table."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = [
        packed >> last & 7 | (packed >> sign & 1) << 3
        for sign, last in ((15, 6), (12, 3), (14, 0), (13, 9))
    ]
    values = np.concatenate([table, -table])[np.stack(codes, axis=-2)].swapaxes(1, 2)
    octets = scales.swapaxes(1, 2)[..., None].copy().view(np.uint8)
    powers = 2.0 ** (octets.astype(np.float64) - 126 - 127)
    return (values * powers[..., None]).reshape(*octets.shape[:2], -1)[..., :size]


def brute_force(arrays: Arrays, activation) -> np.ndarray:
    """A loop over rows and their choices in float64; hidden values have the dtype of x."""
    x, experts, weights, *matrices, scales, biases = arrays
    wide = [matrix.astype(np.float64) for matrix in matrices]
    if matrices[0].dtype == np.uint16:
        sizes = x.shape[1], matrices[0].shape[2] // 2
        wide, scales = list(map(values_of, matrices, scales, sizes)), None
    for i, values in enumerate(scales or ()):
        size = 128 if values.shape[2] > 1 else wide[i].shape[2]
        wide[i] *= np.repeat(values, size, axis=2)[..., : wide[i].shape[2]]
    zeros = np.zeros((1, 1))
    bias_in, bias_out = biases or (np.broadcast_to(zeros, wide[0].shape[:2]), zeros.repeat(99, 0))
    out = np.zeros((experts.shape[1], *x.shape))
    for row, choice in np.argwhere(experts >= 0):
        expert = experts[row, choice]
        gate, up = np.split(wide[0][expert] @ x[row].astype(np.float64) + bias_in[expert], 2)
        hidden = np.asarray(activation(gate, up)).astype(x.dtype).astype(np.float64)
        out[choice, row] = weights[row, choice] * (wide[1][expert] @ hidden + bias_out[expert])
    return out


@cache
def call_of(structure, activation, tiles):
    """``grouped_experts`` of flattened arrays: the same object for equal arguments."""

    def call(*leaves, implementation):
        *inputs, scales, biases = jax.tree.unflatten(structure, leaves)
        options = {"scales": scales, "biases": biases, "tiles": tiles}
        how = {"activation": activation, "implementation": implementation}
        return grouped_experts(*inputs, **options, **how)

    return call


def compute(arrays: Arrays, run, activation=swiglu, tiles=None) -> np.ndarray:
    leaves, structure = jax.tree.flatten(tuple(arrays))
    return run_jitted(call_of(structure, activation, tiles), run, *leaves)


def rows_of(arrays: Arrays, rows) -> Arrays:
    return arrays._replace(
        x=arrays.x[rows], experts=arrays.experts[rows], weights=arrays.weights[rows]
    )


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("activation", [swiglu, clamped])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_a_loop_over_rows(case, activation, run):
    arrays = draw(case)
    out = compute(arrays, run, activation)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, brute_force(arrays, activation), rtol=1e-5, atol=1e-5)
    assert not out.transpose(1, 0, 2)[arrays.experts < 0].any()


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("case", [CASES[0], CASES[7], CASES[8]], ids=str)
def test_bfloat16(case, run):
    arrays = draw(case, "bfloat16")
    expected = brute_force(arrays, swiglu)
    # an input of the second product that is rounded to the other neighbour
    np.testing.assert_allclose(compute(arrays, run), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("run", RUNS[1:])
@pytest.mark.parametrize("rows", [slice(7, 8), slice(20, 23), slice(21, 38)], ids=str)
@pytest.mark.parametrize("scales", ["none", "channel", "groups", "mxfp4"])
def test_a_row_has_the_same_bits_in_any_batch(scales, rows, run):
    """The slots of one row are a group each; those of more rows are grouped by expert."""
    sizes = {"groups": (160, 32), "mxfp4": (192, 64)}.get(scales, (96, 32))
    arrays = draw(Case(40, 2, 8, *sizes, scales, "padded"), "bfloat16")
    batch = compute(arrays, run)
    alone = compute(rows_of(arrays, rows), run)
    assert alone.any(axis=2).all()
    np.testing.assert_array_equal(alone, batch[:, rows])


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS[1:])
@pytest.mark.parametrize("lanes", [3, 1])
def test_tiles_of_many_rows(lanes, run):
    """An expert has several tiles, or none; its programs take turns."""
    arrays = draw(Case(150, 1, 2, 96, 80))
    arrays.experts[:] = np.where(np.arange(150) % 5 == 0, 0, 1)[:, None]
    tiles = ExpertTiles(32, 32, 32, lanes, 4, 3)
    out = compute(arrays, run, tiles=tiles)
    np.testing.assert_allclose(out, brute_force(arrays, swiglu), rtol=1e-5, atol=1e-5)


def test_many_rows_have_sums_of_their_dtype_except_in_deterministic_inference():
    spec = jax.ShapeDtypeStruct

    def dtype_of(rows, implementation):
        shapes = ((rows, 32), "bfloat16"), ((rows, 2), "int32"), ((rows, 2), "float32")
        matrices = ((4, 64, 32), "bfloat16"), ((4, 32, 32), "bfloat16")
        call = partial(grouped_experts, activation=swiglu, implementation=implementation)
        return jax.eval_shape(call, *(spec(*each) for each in (*shapes, *matrices))).dtype

    assert dtype_of(512, "xla") == jnp.float32
    assert dtype_of(513, "xla") == dtype_of(513, "interpret") == jnp.bfloat16
    assert dtype_of(513, "invariant-interpret") == jnp.float32


# experts, choices, D and I
QWEN3, GPT_OSS = (128, 8, 2048, 768), (32, 4, 2880, 2880)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "scales"),
    [*product((QWEN3, GPT_OSS), ("none", "groups")), (GPT_OSS, "mxfp4")],
    ids=str,
)
def test_bits_of_real_layers_do_not_depend_on_the_number_of_rows(shape, scales):
    """Rows select the form of groups and the height of tiles, from 16 to 128."""
    num, top_k, size, inner = shape
    shapes, keys = ((num, 2 * inner, size), (num, size, inner)), jax.random.split(jax.random.key(0))
    matrices = [jax.random.normal(k, s, "bfloat16") for k, s in zip(keys, shapes, strict=True)]
    options = {}
    if scales == "mxfp4":
        drawn = (
            jax.random.bits(k, (*s[:2], s[2] // 32, 16), "uint8")
            for k, s in zip(keys, shapes, strict=True)
        )
        matrices = [jnp.asarray(mxfp4.pack(np.asarray(blocks))) for blocks in drawn]
        scales_of = (np.full((*s[:2], s[2] // 32), 120, "uint8") for s in shapes)
        options["scales"] = tuple(jnp.asarray(mxfp4.pack_scales(x)) for x in scales_of)
    elif scales == "groups":
        matrices = [matrix.astype("float8_e4m3fn") for matrix in matrices]
        options["scales"] = tuple(
            jax.random.uniform(k, (*s[:2], -(-s[2] // 128)), minval=0.5) / s[2] ** 0.5
            for k, s in zip(keys, shapes, strict=True)
        )
    else:
        matrices = [matrix * matrix.shape[2] ** -0.5 for matrix in matrices]
    rng, most = np.random.default_rng(0), 3000
    chosen = np.argsort(rng.random((most, num)), axis=1)[:, :top_k].astype(np.int32)
    weights = rng.random((most, top_k)).astype(np.float32)
    x = jax.random.normal(keys[0], (most, size), "bfloat16")
    call = partial(grouped_experts, activation=swiglu)
    run = jax.jit(call, static_argnames="implementation")

    def result(rows, implementation="invariant"):
        inputs = x[rows], chosen[rows], weights[rows], *matrices
        return run(*inputs, **options, implementation=implementation)

    expected = result(slice(0, most))
    for count in (1, 2, 3, 17, 40, 130, 300, 700, 1500):
        rows = slice(most - count - count % 5, most - count % 5)
        assert bool((result(rows) == expected[:, rows]).all()), count
    exact, rows = result(slice(0, 32), "xla"), slice(0, 32)
    assert float(jnp.abs(expected[:, rows] - exact).max() / jnp.abs(exact).max()) < 2e-2


@pytest.mark.parametrize(
    ("rows", "shape", "scales", "has_biases"),
    [
        (8, QWEN3, "none", False),
        (1, QWEN3, "none", False),
        (512, QWEN3, "none", False),
        (8192, QWEN3, "none", False),
        (1, QWEN3, "channel", False),
        (32, QWEN3, "groups", False),
        (8192, QWEN3, "groups", False),
        (2, GPT_OSS, "none", True),
        (64, GPT_OSS, "none", True),
        (2048, GPT_OSS, "groups", True),
        (1, GPT_OSS, "mxfp4", True),
        (64, GPT_OSS, "mxfp4", True),
        (4096, GPT_OSS, "mxfp4", True),
    ],
)
def test_lowers_for_cuda(rows, shape, scales, has_biases):
    num, top_k, size, inner = shape
    spec = jax.ShapeDtypeStruct
    dtype = {"none": jnp.bfloat16, "mxfp4": jnp.uint16}.get(scales, jnp.float8_e4m3fn)
    stored = shapes = (num, 2 * inner, size), (num, size, inner)
    options = {}
    if scales == "mxfp4":
        options["scales"] = tuple(spec((s[0], -(-s[2] // 128), s[1]), jnp.uint32) for s in shapes)
        stored = tuple((s[0], -(-s[2] // 128), s[1], 32) for s in shapes)
    elif scales != "none":
        groups = (1 if scales == "channel" else -(-s[2] // 128) for s in shapes)
        options["scales"] = tuple(
            spec((*s[:2], count), jnp.float32) for s, count in zip(shapes, groups, strict=True)
        )
    if has_biases:
        options["biases"] = tuple(spec(s[:2], jnp.bfloat16) for s in shapes)
    choices = (rows, top_k)
    text = lower_for_cuda(
        lambda arrays, options: grouped_experts(*arrays, activation=swiglu, **DEVICE, **options),
        (
            spec((rows, size), jnp.bfloat16),
            spec(choices, jnp.int32),
            spec(choices, jnp.float32),
            *(spec(s, dtype) for s in stored),
        ),
        options,
    )
    names = ["experts_in", "experts_out"] + ["group_rows"] * (rows > 2)
    assert text.count(f"custom_call @{TRITON_CALL}") == len(names)
    assert all(f"specjax_{name}" in text for name in names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": np.zeros((40, 3), np.int32)}, r"\(40, 3\) and weights \(40, 2\)"),
        ({"w_in": np.zeros((8, 320, 64), np.float32)}, r"w_in \(8, 320, 64\) must be"),
        ({"w_out": np.zeros((8, 96, 80), np.float32)}, r"w_out .* must be \(8, 96, 160\)"),
        ({"scales": (np.ones((8, 320, 1)), np.ones((8, 96, 7)))}, r"scales \(8, 96, 7\) of w_out"),
        (
            {
                "w_in": np.ones((8, 1, 320, 16), np.uint16),
                "w_out": np.ones((8, 2, 96, 32), np.uint16),
            },
            r"w_in \(8, 320, 96\) in MXFP4 must be \(8, 1, 320, 32\), not \(8, 1, 320, 16\)",
        ),
        ({"biases": (np.ones((8, 320)), np.ones((8, 160)))}, r"biases \(8, 160\) of w_out"),
    ],
)
def test_bad_shapes_are_refused(change, message):
    arrays = draw(CASES[0])._replace(**change)
    with pytest.raises(ValueError, match=message):
        compute(arrays, INTERPRET)


def test_sizes_that_kernels_do_not_take_are_refused_where_bits_must_be_equal():
    arrays = draw(CASES[-1])
    with pytest.raises(ValueError, match="size=40 and inner=24 of experts must be multiples of 16"):
        compute(arrays, {"implementation": "invariant-interpret"})


def test_offsets_beyond_31_bits_are_refused():
    spec, shape = jax.ShapeDtypeStruct, (64, 8192, 4096)
    shapes = ((1, 4096), "float32"), ((1, 2), "int32"), ((1, 2), "float32")
    matrices = (shape, "float8_e4m3fn"), ((64, 4096, 4096), "float8_e4m3fn")
    with pytest.raises(ValueError, match=r"2147483648 values .* 2\*\*31"):
        jax.eval_shape(
            partial(grouped_experts, activation=swiglu),
            *(spec(*each) for each in (*shapes, *matrices)),
        )
