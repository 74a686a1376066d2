"""Time the paged attention kernel: KV bytes read a second, beside a copy in the same run.

Pages are shuffled over the pool and the layers of a pool larger than the L2 cache take turns, so
that keys and values come from memory; the merge is included where a context is split. Every size is
first compared with the reference in float32 arithmetic.

    python scripts/bench_attention.py
    python scripts/bench_attention.py --smoke   # tiny sizes, also on a CPU (interpreter)
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from specjax.kernels.tree_attention import (
    has_kernel,
    tree_attention_pallas,
    tree_attention_reference,
)

import specjax
from specjax.bandwidth import copy_bandwidth

# the pool holds about this many bytes, and what one dispatch reads at least several L2 caches
POOL_BYTES = 2e9
MIN_BYTES_READ = 4e8
REPEATS = 7
DISPATCHES = 3
# at most max|a - b| / max|b|
BOUND = 2e-2
SIZES = ("batch", "rows", "context", "heads", "kv_heads", "head_dim", "calls")


def operands(args: argparse.Namespace, page_size: int, num_layers: int) -> tuple[jax.Array, ...]:
    """Queries ``[B, T, N, H]``, a pool, a shuffled page table and lengths for full contexts."""
    rng = np.random.default_rng(0)
    pages = args.context // page_size
    table = rng.permutation(np.arange(1, args.batch * pages + 1)).reshape(args.batch, pages)
    shape = (num_layers, (args.batch * pages + 1) * page_size, 2, args.kv_heads, args.head_dim)
    pool = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    q = rng.standard_normal((args.batch, args.rows, args.heads, args.head_dim))
    lens = np.full(args.batch, pages * page_size - args.rows)
    ints = (jnp.asarray(x, jnp.int32) for x in (table, lens))
    return jnp.asarray(q, jnp.bfloat16), pool, *ints


def bytes_of_layer(args: argparse.Namespace) -> int:
    """Keys and values of all contexts in bfloat16, which one call reads."""
    return int(2 * 2 * args.batch * args.context * args.kv_heads * args.head_dim)


def measure(args: argparse.Namespace, page_size: int) -> dict[str, Any]:
    """One row: error against the reference, microseconds a call and bytes a second."""
    layer_bytes = bytes_of_layer(args)
    num_layers = 2 if args.smoke else max(2, min(args.calls, int(POOL_BYTES / layer_bytes)))
    q, *fixed = operands(args, page_size, num_layers)

    def attend(q: jax.Array, pool: jax.Array, *ints: jax.Array, layer: int) -> jax.Array:
        return tree_attention_pallas(
            q, pool, layer, *ints, None, page_size, interpret=args.interpret
        )

    def many(q: jax.Array, *fixed: jax.Array) -> jax.Array:
        for call in range(args.calls):  # each needs the result of the one before
            q = attend(q, *fixed, layer=call % num_layers)
        return q

    pool, *ints = fixed
    exact = tree_attention_reference(
        q.astype(jnp.float32), pool[1:2].astype(jnp.float32), 0, *ints, None, page_size
    )
    got = jax.jit(lambda q, *fixed: attend(q, *fixed, layer=1))(q, *fixed)
    error = float(jnp.max(jnp.abs(got.astype(jnp.float32) - exact)) / jnp.max(jnp.abs(exact)))
    if not error <= BOUND:
        raise SystemExit(f"page size {page_size}: error {error:.1e} against the reference")
    run = jax.jit(many)
    run(q, *fixed).block_until_ready()
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(DISPATCHES):
            out = run(q, *fixed)
        out.block_until_ready()
        seconds.append((time.perf_counter() - started) / DISPATCHES / args.calls)
    call = statistics.median(seconds)
    return {
        "page_size": page_size,
        "error": error,
        "microseconds": call * 1e6,
        "bytes_per_second": layer_bytes / call,
    }


def parse_args() -> argparse.Namespace:
    """The command line; ``--smoke`` replaces the sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rows", type=int, default=4, help="T, query rows a request")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-sizes", type=numbers, default=[1, 16, 64])
    parser.add_argument("--calls", type=int, default=20, help="calls in one dispatch")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--output", type=Path, help="append one JSON line a row")
    args = parser.parse_args()
    if args.smoke:
        args.batch, args.context, args.heads, args.kv_heads, args.head_dim = 2, 64, 4, 2, 16
        args.calls = 2
    args.interpret = jax.default_backend() == "cpu"
    if args.interpret and not args.smoke:
        raise SystemExit("no GPU found: on a CPU only --smoke runs, in the interpreter")
    if not 1 <= args.rows < args.context:
        parser.error(f"--rows {args.rows} must be at least 1 and below --context {args.context}")
    if not has_kernel(args.head_dim):
        parser.error(f"--head-dim {args.head_dim} must be a power of two from 16 to 256")
    for size in args.page_sizes:
        if size < 1 or args.context % size:
            parser.error(f"--page-sizes {size}: --context {args.context} must be a multiple of it")
    num_bytes = args.calls * bytes_of_layer(args)
    if num_bytes < MIN_BYTES_READ and not args.smoke:
        parser.error(
            f"--calls {args.calls} read {num_bytes / 1e6:.0f} MB, which the L2 cache may hold; "
            "raise --calls, --batch or --context"
        )
    return args


def main() -> None:
    """Measure every page size and print a table."""
    args = parse_args()
    device = jax.devices()[0]
    bandwidth = copy_bandwidth(device)
    sizes = f"B={args.batch} T={args.rows} context={args.context}"
    table = Table(title=f"attention, {sizes}, {device.device_kind}, jax {jax.__version__}")
    for column in ("page size", "error", "µs", "TB/s", "copy TB/s", "ratio"):
        table.add_column(column, justify="right")
    for page_size in args.page_sizes:
        row = measure(args, page_size)
        speed = row["bytes_per_second"]
        table.add_row(
            str(page_size),
            f"{row['error']:.1e}",
            f"{row['microseconds']:.1f}",
            f"{speed / 1e12:.2f}",
            f"{bandwidth / 1e12:.2f}",
            f"{speed / bandwidth:.2f}",
        )
        if args.output:
            given = {name: getattr(args, name) for name in SIZES}
            named = {"device": device.device_kind, "jax": jax.__version__}
            line = row | given | named | {"copy": bandwidth, "specjax": specjax.__version__}
            with args.output.open("a") as file:
                file.write(json.dumps(line) + "\n")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
