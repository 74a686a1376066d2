"""Time the kernels of a round: XLA's fused reference against Pallas, at the sizes of serving.

Each program calls a kernel many times in one dispatch, and every call needs the result of the one
before; dispatches run ahead and the host waits once at the end. A figure is the median over
repeats of the microseconds of one call, less those of the same program without the kernel. The
operands are the same every time, so what fits the GPU's L2 cache is read from there, as in a round
that has just written it.

    python scripts/bench_kernels.py --output kernels.jsonl
    python scripts/bench_kernels.py --smoke   # tiny sizes, also on a CPU (interpreter)
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from specjax.kernels.compact_tree import compact_tree
from specjax.kernels.fill_bonus import fill_bonus_tokens
from specjax.kernels.move_kv import move_kv

import specjax

State: TypeAlias = jax.Array
Constants: TypeAlias = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Case:
    """One kernel at one size.

    A step takes ``(state, constants, **options)`` to ``(state, kept)``: the state of the next call,
    and outputs that must be written. A further kernel is one more function that yields cases.
    """

    kernel: str
    sizes: dict[str, int]
    make: Callable[[], tuple[State, Constants]]
    step: Callable[..., tuple[State, Any]]
    num_bytes: int  # read and written by one call
    # the step without the kernel; None where it is nothing
    baseline: Callable[[State, Constants], tuple[State, Any]] | None = None
    options: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {
            "xla": {"implementation": "xla"},
            "pallas": {"implementation": "pallas"},
        }
    )


def _link(state: State, out: jax.Array) -> State:
    """The state unchanged, in a way that XLA can neither see nor fuse away: ``out`` is >= 0."""
    state, out = jax.lax.optimization_barrier((state, out))
    first = out.reshape(state.shape[0], -1)[:, :1].astype(state.dtype)
    return state + jnp.minimum(first, 0).reshape(-1, *(1,) * (state.ndim - 1))


def _accepted(rng: np.random.Generator, batch: int, rows: int, width: int) -> np.ndarray:
    """Rows of accepted paths of random length, root first, then -1."""
    out = np.full((batch, width), -1, np.int32)
    for request in range(batch):
        length = int(rng.integers(1, min(rows, width) + 1))
        drafts = np.sort(rng.choice(np.arange(1, rows), length - 1, replace=False))
        out[request, :length] = [0, *drafts]
    return out


def fill_bonus_cases(grid: dict[str, Any]) -> Iterator[Case]:
    """``fill_bonus_tokens``; the state is the counts."""

    def step(counts: State, constants: Constants, **options: Any) -> tuple[State, Any]:
        bonus = fill_bonus_tokens(constants[0], counts, **options)
        return _link(counts, bonus), bonus

    def baseline(counts: State, constants: Constants) -> tuple[State, Any]:
        return _link(counts, constants[0][:, 0]), None

    for batch in grid["batch"]:
        for width in grid["width"]:

            def make(batch: int = batch, width: int = width) -> tuple[State, Constants]:
                rng = np.random.default_rng(0)
                tokens = rng.integers(0, 1000, (batch, width), dtype=np.int32)
                counts = rng.integers(1, width + 1, batch, dtype=np.int32)
                return jnp.asarray(counts), (jnp.asarray(tokens),)

            sizes = {"B": batch, "A": width}
            yield Case("fill_bonus", sizes, make, step, 12 * batch, baseline)


def compact_tree_cases(grid: dict[str, Any]) -> Iterator[Case]:
    """``compact_tree`` of bfloat16 features; the state is the index."""

    def step(index: State, constants: Constants, **options: Any) -> tuple[State, Any]:
        out = compact_tree(constants[0], index, **options)
        return _link(index, out), out

    def baseline(index: State, constants: Constants) -> tuple[State, Any]:
        return _link(index, constants[0][:, 0, :1]), None

    for batch in grid["batch"]:
        for width, rows in zip(grid["width"], grid["rows"], strict=True):
            features = grid["features"]
            index = _accepted(np.random.default_rng(0), batch, rows, width)

            def make(
                shape: tuple[int, ...] = (batch, rows, features), index: np.ndarray = index
            ) -> tuple[State, Constants]:
                values = jax.random.uniform(jax.random.key(0), shape, jnp.bfloat16)
                return jnp.asarray(index), (values,)

            sizes = {"B": batch, "A": width, "T": rows, "F": features}
            num_bytes = 2 * features * int((index >= 0).sum() + index.size)
            yield Case("compact_tree", sizes, make, step, num_bytes, baseline)


def move_kv_cases(grid: dict[str, Any]) -> Iterator[Case]:
    """``move_kv`` of a bfloat16 pool; the state is the pool."""

    def step(pool: State, constants: Constants, **options: Any) -> tuple[State, Any]:
        return move_kv(pool, *constants, **options), None

    layers, heads, dim, context = (grid[name] for name in ("layers", "heads", "dim", "context"))
    for batch in grid["batch"]:
        for width, rows in zip(grid["width"], grid["rows"], strict=True):
            index = _accepted(np.random.default_rng(0), batch, rows, width)
            # request b owns the slots b * (context + T) on, its tree behind the context
            base = (np.arange(batch, dtype=np.int32) * (context + rows) + context)[:, None]
            source = np.where(index >= 0, base + index, -1).astype(np.int32)
            destination = base + np.arange(width, dtype=np.int32)

            def make(
                num_slots: int = batch * (context + rows) + width,
                indices: tuple[np.ndarray, ...] = (source, destination),
            ) -> tuple[State, Constants]:
                shape = (layers, num_slots, 2, heads, dim)
                return jnp.zeros(shape, jnp.bfloat16), tuple(map(jnp.asarray, indices))

            sizes = {"B": batch, "A": width, "T": rows, "L": layers, "KV": heads, "H": dim}
            moved = int(((source >= 0) & (source != destination)).sum())
            num_bytes = 2 * 2 * layers * moved * 2 * heads * dim
            yield Case("move_kv", sizes, make, step, num_bytes)


KERNELS = {
    "fill_bonus": fill_bonus_cases,
    "compact_tree": compact_tree_cases,
    "move_kv": move_kv_cases,
}
SERVING = {
    "batch": (1, 8, 32, 64),
    "width": (4, 8, 16),
    "rows": (8, 32, 64),
    "features": 3 * 4096,
    "layers": 32,
    "heads": 8,
    "dim": 128,
    "context": 128,
}
SMOKE = {
    "batch": (2,),
    "width": (3,),
    "rows": (5,),
    "features": 24,
    "layers": 2,
    "heads": 1,
    "dim": 8,
    "context": 4,
}


def microseconds(
    step: Callable[[State, Constants], tuple[State, Any]], case: Case, args: argparse.Namespace
) -> float:
    """Median time of one step inside a program of ``args.calls`` dependent steps."""

    def program(state: State, constants: Constants) -> tuple[State, list[Any]]:
        kept = []
        for _ in range(args.calls):
            state, out = step(state, constants)
            kept.append(out)
        return state, kept

    state, constants = case.make()
    run = jax.jit(program, donate_argnums=0).lower(state, constants).compile()
    times = []
    # the first repeat warms up
    for _ in range(args.repeats + 1):
        jax.block_until_ready(state)
        started = time.perf_counter()
        for _ in range(args.dispatches):
            state, _ = run(state, constants)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - started) / (args.dispatches * args.calls) * 1e6)
    return statistics.median(times[1:])


def measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """One row: microseconds a call by implementation."""
    empty = microseconds(case.baseline, case, args) if case.baseline else 0.0
    spent = {
        name: microseconds(partial(case.step, **options), case, args) - empty
        for name, options in case.options.items()
    }
    device = jax.devices()[0]
    return {
        "kernel": case.kernel,
        "sizes": case.sizes,
        "microseconds": spent,
        "baseline_microseconds": empty,
        "bytes": case.num_bytes,
        "calls": args.calls,
        "device": device.device_kind,
        "jax": jax.__version__,
        "specjax": specjax.__version__,
    }


def parse_args() -> argparse.Namespace:
    """The command line; ``--smoke`` sets what is not given to the least."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", default=",".join(KERNELS), help="comma-separated names")
    parser.add_argument("--batch", help="comma-separated batch sizes")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, two of everything")
    parser.add_argument("--calls", type=int, help="calls in one dispatch (32)")
    parser.add_argument("--dispatches", type=int, help="dispatches of one repeat (10)")
    parser.add_argument("--repeats", type=int, help="timed repeats (9)")
    parser.add_argument("--output", type=Path, help="append one JSON line a row")
    args = parser.parse_args()
    for name, usual in (("calls", 32), ("dispatches", 10), ("repeats", 9)):
        if getattr(args, name) is None:
            setattr(args, name, 2 if args.smoke else usual)
    args.kernels = args.kernels.split(",")
    unknown = set(args.kernels) - set(KERNELS)
    if unknown:
        parser.error(f"--kernels {sorted(unknown)} not among {list(KERNELS)}")
    return args


def main() -> None:
    """Run the grid, print one JSON line a row and a table."""
    args = parse_args()
    grid: dict[str, Any] = dict(SMOKE if args.smoke else SERVING)
    if args.batch:
        grid["batch"] = tuple(int(part) for part in args.batch.split(","))
    console = Console(width=120)
    device = jax.devices()[0]
    if device.platform == "cpu" and not args.smoke:
        raise SystemExit("no GPU found: on a CPU only --smoke runs, in the interpreter")
    table = Table(title=f"microseconds a call, {device.device_kind}, jax {jax.__version__}")
    for column in ("kernel", "sizes", "xla", "pallas", "xla / pallas", "pallas GB/s"):
        table.add_column(column, justify="left" if column in ("kernel", "sizes") else "right")
    for name in args.kernels:
        for case in KERNELS[name](grid):
            row = measure(case, args)
            line = json.dumps(row)
            console.print(line, soft_wrap=True, highlight=False)
            if args.output:
                with args.output.open("a") as file:
                    file.write(line + "\n")
            xla, pallas = (max(row["microseconds"][key], 1e-3) for key in ("xla", "pallas"))
            sizes = " ".join(f"{axis}={size}" for axis, size in case.sizes.items())
            figures = (f"{xla:.1f}", f"{pallas:.1f}", f"{xla / pallas:.2f}")
            table.add_row(name, sizes, *figures, f"{case.num_bytes / pallas / 1e3:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
