"""Verification, replay and rows in order give the same bits.

XLA fuses a product and a sum on a CPU, and so rounds once instead of twice, in some loops and not
in others. Without such instructions, only the order of operations is left to change bits. The flag
for this must be set before the first use of JAX, so the cases of the interpreter run in a process
of their own.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
from specjax.kernels.delta_inputs import RequestRows
from specjax.kernels.delta_rule import DeltaPool

from .delta import Case, Sizes, draw, scan, verify
from .runs import RUNS

FLAG = "--xla_cpu_max_isa=SSE4_2"
IS_EXACT = FLAG in os.environ.get("XLA_FLAGS", "")
inner = pytest.mark.skipif(not IS_EXACT, reason="runs in the process of the last test")
BITS = pytest.mark.parametrize(
    "run", [pytest.param(*RUNS[1].values, marks=inner, id="interpret"), RUNS[2]]
)
MOST = 8  # rows of a request
SIZES = Sizes()


def of_one(case: Case, request: int, rows, pool=None) -> Case:
    """The case of one request with some of its rows, from the states of ``pool``."""
    start = int(case.rows.starts[request])
    index = [start + row for row in rows]
    cut = {x: getattr(case, x)[:, index] for x in ("mixed", "products")}
    slot, source = int(case.rows.slots[request]), int(case.rows.sources[request])
    values = slot, source if pool is None else slot, 0, len(index)
    rows = RequestRows(*(np.array([x], np.int32) for x in values))
    pool = case.pool if pool is None else DeltaPool(*(np.asarray(x) for x in pool))
    return case._replace(rows=rows, pool=pool, **cut)


def one_by_one(case: Case, request: int, path, **how):
    """Outputs ``[L, len(path), Hv, V]`` of plain rounds, and the pool after each of them."""
    outs, pools, pool = [], [], None
    for row in path:
        out, pool = scan(of_one(case, request, [row], pool), 1, **how)
        outs.append(np.asarray(out))
        pools.append(DeltaPool(*(np.asarray(x) for x in pool)))
    return np.concatenate(outs, axis=1), pools


def drawn(num_rows: int, bias: float = -1.0, dtype: str = "float32", sizes=SIZES) -> Case:
    """Requests in slots 2, 5 and 1, of which the last one starts a text."""
    rows = RequestRows((2, 5, 1), (2, 5, -1), np.arange(3) * num_rows, (num_rows,) * 3)
    return draw(sizes, rows, 3 * num_rows, num_rows, bias, dtype)


@BITS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_chains_equal_plain_rounds(run, dtype):
    """And so does the pool after every number of accepted rows."""
    case = drawn(MOST, dtype=dtype)
    plain = [one_by_one(case, i, range(MOST), **run) for i in range(3)]
    for count in range(MOST + 1):
        path = np.where(np.arange(MOST) < count, np.arange(MOST), -1)
        paths = np.tile(path.astype(np.int32), (3, 1))
        outs, pool = verify(case, MOST, None, paths, **run)
        for i, (expected, pools) in enumerate(plain):
            rows = slice(i * MOST, (i + 1) * MOST)
            np.testing.assert_array_equal(np.asarray(outs)[:, rows], expected)
            slot, after = int(case.rows.slots[i]), pools[count - 1] if count else case.pool
            for now, then in zip(pool, after, strict=True):
                np.testing.assert_array_equal(np.asarray(now)[:, slot], then[:, slot])


@BITS
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_bits_do_not_depend_on_other_rows(run, num_rows):
    """Neither on their number nor on other requests, widths of tiles, or rows after them."""
    case = drawn(num_rows, sizes=Sizes(key_dim=64))
    outs, _ = verify(case, num_rows, **run)
    outs = np.asarray(outs)
    for width in (8, 16, 32):
        np.testing.assert_array_equal(verify(case, num_rows, width=width, **run)[0], outs)
        np.testing.assert_array_equal(scan(case, 1, width=width, **run)[0], outs)
    for i in range(3):
        alone, _ = verify(of_one(case, i, range(num_rows)), num_rows, **run)
        np.testing.assert_array_equal(alone, outs[:, i * num_rows : (i + 1) * num_rows])
    counts = np.array([1, num_rows, 1], np.int32)
    shorter = case._replace(rows=case.rows._replace(counts=counts))
    fewer = np.asarray(verify(shorter, num_rows, **run)[0])
    for i, count in enumerate(counts):
        rows = slice(i * num_rows, i * num_rows + count)
        np.testing.assert_array_equal(fewer[:, rows], outs[:, rows])


@BITS
@pytest.mark.parametrize("bias", [-6.0, 3.0])
def test_paths_of_trees_equal_plain_rounds(run, bias):
    case = drawn(MOST, bias)
    parents = np.array([[-1, 0, 0, 1, 1, 2, 3, 6], [-1, 0, 1, 2, 3, 4, 5, 6], [-1] + [0] * 7])
    leaves = {0: [0, 1, 3, 6, 7], 1: list(range(MOST)), 2: [0, 5]}
    paths = np.full((3, MOST), -1, np.int32)
    for i, path in leaves.items():
        paths[i, : len(path)] = path
    outs, pool = verify(case, MOST, parents.astype(np.int32), paths, **run)
    for i, path in leaves.items():
        expected, pools = one_by_one(case, i, path, **run)
        rows = [i * MOST + row for row in path]
        np.testing.assert_array_equal(np.asarray(outs)[:, rows], expected)
        slot = int(case.rows.slots[i])
        for now, then in zip(pool, pools[-1], strict=True):
            np.testing.assert_array_equal(np.asarray(now)[:, slot], then[:, slot])


@BITS
def test_a_prompt_row_by_row_equals_generated_rows(run):
    """So a prefix has one state, whether its tokens were a prompt's or generated."""
    case = drawn(40)
    outs, pool = scan(case, 1, **run)
    whole, _ = scan(of_one(case, 2, range(40)), 1, **run)
    np.testing.assert_array_equal(np.asarray(outs)[:, 80:], whole)
    _, prompt = scan(of_one(case, 2, range(35)), 1, **run)
    path = np.arange(5, dtype=np.int32)[None]
    rest, after = verify(of_one(case, 2, range(35, 40), prompt), 5, None, path, **run)
    np.testing.assert_array_equal(np.asarray(outs)[:, 115:], rest)
    for now, then in zip(after, pool, strict=True):
        np.testing.assert_array_equal(np.asarray(now)[:, 1], np.asarray(then)[:, 1])


@pytest.mark.slow
def test_the_interpreter_gives_equal_bits():
    command = [sys.executable, "-c", "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"]
    options = [
        "-q",
        "-m",
        "not gpu",
        "-k",
        "interpret and not interpreter",
        "-p",
        "no:cacheprovider",
    ]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*command, *options, __file__], env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 passed" in done.stdout, done.stdout
