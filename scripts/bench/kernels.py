"""Time the kernels of a round at serving sizes: XLA's fused reference against Pallas.

    specjax bench kernels --output kernels.jsonl    # the small kernels
    specjax bench attention                         # paged attention, compared with a copy
    specjax bench experts                           # experts of mixtures, with random routing
    specjax bench kernels --smoke                   # tiny sizes, also on a CPU

Each program calls a kernel many times in one dispatch, and every call needs the result of the
previous call. The metric is microseconds per call, as the median over repeats, minus those of the
same program without the kernel. Data that fits the GPU's L2 cache is read from the cache, as in a
round that has just written it. Attention reads its keys and values from memory: its pages are
shuffled over a larger pool. Experts are those of several layers, of which a row counts the bytes of
the distinct ones that are chosen. Both are first compared with a float32 reference.
"""

import json
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from specjax.kernels.accept_tree import SlotRows, accept_tree, compact_tree
from specjax.kernels.grouped_experts import grouped_experts
from specjax.kernels.kv_rows import move_kv
from specjax.kernels.mxfp4 import BIAS
from specjax.kernels.paged import PagedInputs
from specjax.kernels.tree_attention import tree_attention

from bench import common

# maximum error of attention and experts in bfloat16: max|a - b| / max|b|
BOUND = 2e-2
# pairs of width A and rows T
TREES = ((2, 2), (6, 6), (4, 8), (8, 32), (16, 64))
# batch sizes and trees; the other sizes are those of the 8B shape
SERVING = {"batch": [1, 8, 32, 64], "trees": TREES, "features": 3 * 4096}
SERVING |= {"layers": 32, "heads": 8, "dim": 128, "context": 128}
SMOKE = {"batch": [2], "trees": ((3, 5),), "features": 24}
SMOKE |= {"layers": 2, "heads": 1, "dim": 8, "context": 4}
# a pool of about 2 GB; a dispatch reads far more of it than the L2 cache holds
ATTENTION = {"pages": (1, 16, 64), "calls": 20, "layers": 3}
ATTENTION |= {"B": 32, "T": 4, "context": 4096, "N": 32, "KV": 8, "H": 128}
ATTENTION_SMOKE = {"pages": (16, 64), "calls": 2, "layers": 2}
ATTENTION_SMOKE |= {"B": 2, "T": 4, "context": 64, "N": 4, "KV": 2, "H": 16}
# experts, choices, hidden and inner size: layers of Qwen3-30B-A3B and gpt-oss-20b
EXPERTS = {"shapes": ((128, 8, 2048, 768), (32, 4, 2880, 2880)), "layers": 6}
EXPERTS |= {"rows": (1, 2, 8, 32, 128, 512, 2048, 8192)}
EXPERTS_SMOKE = {"shapes": ((4, 2, 128, 128),), "layers": 1, "rows": (1,)}
# bits of their values; words are packed MXFP4
BITS = {"bfloat16": 16, "float8_e4m3fn": 8, "uint16": 4}
COLUMNS = (
    ("kernel", "kernel", ""),
    ("sizes", "size_text", ""),
    ("error", "error", ".1e"),
    ("xla µs", "xla", ".1f"),
    ("pallas µs", "pallas", ".1f"),
    ("xla / pallas", "speed_up", ".2f"),
    ("pallas GB/s", "gb_s", ".0f"),
    ("TFLOP/s", "tflop_s", ".1f"),
    ("of a copy", "ratio", ".2f"),
)
Arrays = tuple[jax.Array, ...]


class Case(NamedTuple):
    """One kernel at one size.

    A step maps ``(state, constants, index of the call, implementation)`` to the state of the next
    call and to outputs that must be written. ``none`` is a step without the kernel.
    """

    sizes: dict[str, int]
    state: Any  # arrays
    constants: Arrays
    step: Callable[..., tuple[Any, Any]]
    num_bytes: int  # bytes read and written per call
    implementations: tuple[str, ...] = ("xla", "pallas", "none")
    error: float | None = None  # difference from the reference
    timing: tuple[int, int, int] = (32, 10, 9)  # calls per dispatch, dispatches per repeat, repeats
    num_operations: int = 0  # additions and multiplications per call


def _link(state: jax.Array, out: jax.Array) -> jax.Array:
    """Return the state unchanged (``out`` is >= 0) in a form that XLA cannot optimize away."""
    state, out = jax.lax.optimization_barrier((state, out))
    column = out.reshape(state.shape[0], -1)[:, :1].astype(state.dtype)
    return state + jnp.minimum(column, 0).reshape(-1, *(1,) * (state.ndim - 1))


def _accepted(batch: int, rows: int, width: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    out = np.full((batch, width), -1, np.int32)
    for request in range(batch):
        length = int(rng.integers(1, min(rows, width) + 1))
        drafts = np.sort(rng.choice(np.arange(1, rows), length - 1, replace=False))
        out[request, :length] = [0, *drafts]
    return out


def _accept_tree(grid: dict[str, Any], batch: int, width: int, rows: int) -> Case:
    rng, slots = np.random.default_rng(0), np.arange(1, batch + 1)
    parents = [[-1, *(rng.integers(0, i) for i in range(1, rows))] for _ in range(batch)]
    ends = np.full((batch, 8), -1)
    drafts, target = rng.integers(0, 4, (2, batch, rows))
    proposed, lens = np.full(batch, rows - 1), np.full(batch, grid["context"] // 2)
    arrays = drafts, parents, proposed, target, ends, slots, lens
    constants = tuple(jnp.asarray(array, jnp.int32) for array in arrays)
    zeros = jnp.zeros(batch + 1, jnp.int32)
    state = SlotRows(zeros, zeros, zeros, jnp.zeros((batch + 1, grid["context"]), jnp.int32))

    def step(state: SlotRows, constants: Arrays, call: int, implementation: str) -> Any:
        out, state = accept_tree(
            *constants, state, num_steps=width - 1, implementation=implementation
        )
        return state, out

    sizes = {"B": batch, "A": width, "T": rows}
    num_bytes = 4 * batch * (3 * rows + 2 * width)
    return Case(sizes, state, constants, step, num_bytes, ("xla", "pallas"))


def _compact_tree(grid: dict[str, Any], batch: int, width: int, rows: int) -> Case:
    features, index = grid["features"], _accepted(batch, rows, width)
    values = jax.random.uniform(jax.random.key(0), (batch, rows, features), jnp.bfloat16)

    def step(index: jax.Array, constants: Arrays, call: int, implementation: str) -> Any:
        if implementation == "none":
            return _link(index, constants[0][:, 0, :1]), None
        out = compact_tree(constants[0], index, implementation=implementation)
        return _link(index, out), out

    num_bytes = 2 * features * int((index >= 0).sum() + index.size)
    sizes = {"B": batch, "A": width, "T": rows, "F": features}
    return Case(sizes, jnp.asarray(index), (values,), step, num_bytes)


def _move_kv(grid: dict[str, Any], batch: int, width: int, rows: int) -> Case:
    layers, heads, dim, context = (grid[name] for name in ("layers", "heads", "dim", "context"))
    index = _accepted(batch, rows, width)
    # request b owns the KV slots from b * (context + T), with its tree after its context
    base = (np.arange(batch, dtype=np.int32) * (context + rows) + context)[:, None]
    source = np.where(index >= 0, base + index, -1).astype(np.int32)
    destination = base + np.arange(width, dtype=np.int32)
    pool = jnp.zeros((layers, batch * (context + rows) + width, 2, heads, dim), jnp.bfloat16)

    def step(pool: jax.Array, constants: Arrays, call: int, implementation: str) -> Any:
        return move_kv(pool, *constants, implementation=implementation), None

    num_bytes = 2 * 2 * layers * int(((source >= 0) & (source != destination)).sum())
    num_bytes *= 2 * heads * dim
    sizes = {"B": batch, "A": width, "T": rows, "L": layers, "KV": heads, "H": dim}
    constants = jnp.asarray(source), jnp.asarray(destination)
    return Case(sizes, pool, constants, step, num_bytes, ("xla", "pallas"))


def _attention(grid: dict[str, Any], page_size: int) -> Case:
    """Make the case of paged attention over full contexts, with queries ``[B, T, N, H]``."""
    sizes = {name: grid[name] for name in ("B", "T", "context", "N", "KV", "H")}
    batch, rows, context, heads, kv_heads, dim = sizes.values()
    pages, layers = context // page_size, grid["layers"]
    rng = np.random.default_rng(0)
    table = rng.permutation(np.arange(1, batch * pages + 1)).reshape(batch, pages)
    shape = (layers, (batch * pages + 1) * page_size, 2, kv_heads, dim)
    pool = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    q = jnp.asarray(rng.standard_normal((batch, rows, heads, dim)), jnp.bfloat16)
    ints = [jnp.asarray(x, jnp.int32) for x in (table, np.full(batch, context - rows))]

    def step(q: jax.Array, constants: Arrays, call: int, implementation: str) -> Any:
        pool, table, lens = constants
        inputs = PagedInputs(pool, call % layers, table, page_size)
        return tree_attention(q, inputs, lens, None, implementation=implementation), None

    wide = PagedInputs(pool[1:2].astype(jnp.float32), 0, ints[0], page_size)
    exact = tree_attention(q.astype(jnp.float32), wide, ints[1], None, implementation="xla")
    got = jax.jit(lambda q, *fixed: step(q, fixed, 1, _runnable("pallas"))[0])(q, pool, *ints)
    error = _error(f"page size {page_size}", got, exact)
    # keys and values of all contexts in bfloat16
    num_bytes = 2 * 2 * batch * context * kv_heads * dim
    sizes = {"page": page_size} | sizes
    timing = (grid["calls"], 3, 7)
    return Case(sizes, q, (pool, *ints), step, num_bytes, ("pallas",), error, timing)


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _experts(grid: dict[str, Any], shape: tuple[int, ...], dtype: str) -> Iterator[Case]:
    """Make the cases of one mixture; each row chooses experts at random in every layer."""
    (num_experts, top_k, hidden, inner), rng = shape, np.random.default_rng(0)
    shapes = (num_experts, 2 * inner, hidden), (num_experts, hidden, inner)
    is_scaled, is_packed = dtype != "bfloat16", dtype == "uint16"

    @partial(jax.jit, static_argnums=1)
    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if is_packed:
            return jax.random.bits(key, (shape[0], -(-shape[2] // 128), shape[1], 32), dtype)
        values = jax.random.normal(key, shape, jnp.bfloat16)
        return (values * (1 if is_scaled else shape[2] ** -0.5)).astype(dtype)

    layers = []
    for layer in range(grid["layers"]):
        keys = jax.random.split(jax.random.key(layer))
        groups = ((*s[:2], -(-s[2] // 128)) for s in shapes)
        scales = tuple(jnp.full(g, s[2] ** -0.5) for g, s in zip(groups, shapes, strict=True))
        if is_packed:  # of values of a similar size
            groups = ((s[0], -(-s[2] // 128), s[1]) for s in shapes)
            scales = tuple(jnp.full(g, (120 + BIAS) * 0x01010101, jnp.uint32) for g in groups)
        matrices = map(draw, keys, shapes)
        layers.append((*matrices, scales if is_scaled else None))
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(layers[0])) // num_experts

    def step(x: jax.Array, constants: Any, call: int, implementation: str) -> Any:
        layers, choices, weights = constants
        if implementation == "none":
            return _link(x, weights), None
        w_in, w_out, scales = layers[call % len(layers)]
        out = grouped_experts(
            *(x, choices[call % len(layers)], weights, w_in, w_out),
            activation=_swiglu,
            scales=scales,
            implementation=implementation,
        )
        zeros = jnp.maximum(jnp.minimum(out[0, :, :1], 0), 0)
        return x + zeros.astype(x.dtype), out

    for rows in grid["rows"]:
        x = jax.random.normal(jax.random.key(rows), (rows, hidden), jnp.bfloat16)
        ids = [np.argsort(rng.random((rows, num_experts)), axis=1)[:, :top_k] for _ in layers]
        distinct = round(statistics.fmean(len(np.unique(chosen)) for chosen in ids))
        weights = jnp.full((rows, top_k), 1 / top_k, jnp.float32)
        constants = layers, [jnp.asarray(chosen, jnp.int32) for chosen in ids], weights

        def sums(count: int, implementation: str, x: Any = x, constants: Any = constants) -> Any:
            layers, choices, weights = constants
            inputs = layers, [chosen[:count] for chosen in choices], weights[:count]
            run = jax.jit(step, static_argnums=(2, 3))
            return run(x[:count], inputs, 0, implementation)[1][:, :64]

        exact = sums(min(rows, 64), "xla")
        error = _error(f"{rows} rows", sums(rows, _runnable("pallas")), exact)
        sizes = {"R": rows, "E": num_experts, "k": top_k, "D": hidden, "I": inner}
        sizes |= {"bits": BITS[dtype], "distinct": distinct}
        yield Case(
            sizes,
            x,
            constants,
            step,
            distinct * num_bytes,
            ("pallas", "none"),
            error,
            (4 * grid["layers"], 3, 7),
            2 * 3 * rows * top_k * hidden * inner,
        )


def _error(name: str, got: jax.Array, exact: jax.Array) -> float:
    """Return max|a - b| / max|b|, or refuse a kernel that differs from the reference."""
    error = float(jnp.max(jnp.abs(got.astype(jnp.float32) - exact)) / jnp.max(jnp.abs(exact)))
    if not error <= BOUND:
        raise ValueError(
            f"{name}: the kernel's result differs from the reference by {error:.1e}, more than "
            f"{BOUND:.1e}"
        )
    return error


def _runnable(implementation: str) -> str:
    """Select the interpreter for kernels on a CPU."""
    is_kernel = implementation == "pallas" and jax.default_backend() == "cpu"
    return "interpret" if is_kernel else implementation


def _microseconds(case: Case, implementation: str, timing: tuple[int, int, int]) -> float:
    calls, dispatches, repeats = timing

    def program(state: Any, constants: Arrays) -> tuple[Any, list[Any]]:
        outputs = []
        for call in range(calls):
            state, out = case.step(state, constants, call, _runnable(implementation))
            outputs.append(out)
        return state, outputs

    state = jax.tree.map(jnp.copy, case.state)  # donated
    run = jax.jit(program, donate_argnums=0).lower(state, case.constants).compile()
    times = []
    # the first repeat warms up
    for _ in range(repeats + 1):
        jax.block_until_ready(state)
        started = time.perf_counter()
        for _ in range(dispatches):
            state, _ = run(state, case.constants)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - started) / (dispatches * calls) * 1e6)
    return statistics.median(times[1:])


def _measure(kernel: str, case: Case, *, is_smoke: bool) -> dict[str, Any]:
    """Return a row with microseconds per call by implementation, and bytes/s of Pallas."""
    timing = (2, 2, 2) if is_smoke else case.timing
    spent = {name: _microseconds(case, name, timing) for name in case.implementations}
    empty = spent.pop("none", 0.0)
    spent = {name: max(time - empty, 1e-3) for name, time in spent.items()}
    return {
        "kernel": kernel,
        "sizes": case.sizes,
        "error": case.error,
        "microseconds": spent,
        "baseline_microseconds": empty,
        "bytes": case.num_bytes,
        "bytes_per_second": case.num_bytes / spent["pallas"] * 1e6,
        "operations": case.num_operations,
    }


def _cases(name: str, *, is_smoke: bool) -> Iterator[tuple[str, Case]]:
    if name == "attention":
        sizes: dict[str, Any] = ATTENTION_SMOKE if is_smoke else ATTENTION
        for page_size in sizes["pages"]:
            yield "attention", _attention(sizes, page_size)
        return
    if name == "experts":
        sizes = EXPERTS_SMOKE if is_smoke else EXPERTS
        for shape in sizes["shapes"]:
            for dtype in BITS:
                for case in _experts(sizes, shape, dtype):
                    yield "experts", case
        return
    grid: dict[str, Any] = SMOKE if is_smoke else SERVING
    for make in (_accept_tree, _compact_tree, _move_kv):
        for batch in grid["batch"]:
            for width, rows in grid["trees"]:
                yield make.__name__[1:], make(grid, batch, width, rows)


def main(name: str, argv: Sequence[str]) -> int:
    parser = ArgumentParser(prog=f"specjax bench {name}", description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="run tiny sizes, twice each")
    parser.add_argument("--output", type=Path, help="file to append one JSON line per row to")
    args = parser.parse_args(argv)
    if jax.default_backend() == "cpu" and not args.smoke:
        raise ValueError("no GPU found; pass --smoke to run in the interpreter on a CPU")
    bandwidth = common.copy_bandwidth()
    rows = []
    for kernel, case in _cases(name, is_smoke=args.smoke):
        row = _measure(kernel, case, is_smoke=args.smoke)
        row |= {"copy": bandwidth, **common.software()}
        print(json.dumps(row), flush=True)
        common.append_json(args.output, row)
        spent, speed = row["microseconds"], row["bytes_per_second"]
        row |= {"size_text": " ".join(f"{axis}={size}" for axis, size in case.sizes.items())}
        row |= spent | {"gb_s": speed / 1e9, "ratio": speed / bandwidth}
        row |= {"tflop_s": row["operations"] / spent["pallas"] / 1e6 or None}
        rows.append(row | ({"speed_up": spent["xla"] / spent["pallas"]} if "xla" in spent else {}))
    print(f"µs per call, {rows[0]['device_kind']}, jax {jax.__version__}")
    print(common.table_of(COLUMNS, rows))
    return 0
