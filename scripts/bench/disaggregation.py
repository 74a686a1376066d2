"""Measures what long prompts cost the requests that decode beside them, with and without a split.

    python scripts/bench disaggregation --preset llama3.1-8b --dtype bfloat16 \\
        --speculative-algorithm none

A few requests decode greedily while prompts of random tokens arrive at even intervals, each of
which ends with its first token. One engine does both, or one device computes the prompts for
another, which decodes (``--base-gpu-id``, and the next one; with ``--apart`` in two processes, the
first of which sees the second GPU alone). Times are those that asyncio tasks
see: between two chunks of a decoding request, and from when a prompt should have arrived to its
first token. Then KV of a prompt is moved from device to device by itself.
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench import common
from bench.serving_mix import MixRequest, Trace, ask, summary
from specjax.cli.options import add_options, add_start_options, engine_arguments, with_preset
from specjax.disaggregation.rows import RowPort
from specjax.engine.args import EngineArgs

COLUMNS = (
    ("engine", "engine", ""),
    ("prompts", "prompts", "d"),
    ("gap p50 ms", "p50", ".2f"),
    ("p99", "p99", ".2f"),
    ("max", "max", ".2f"),
    ("p99 / quiet p50", "ratio", ".2f"),
    ("TTFT p50 ms", "ttft", ".1f"),
    ("p99", "ttft_p99", ".1f"),
)
REPEATS = 10
SERVES = """import json, sys
from specjax import Engine
with Engine(**json.loads(sys.argv[1])) as engine:
    print(engine.disaggregation_address, flush=True)
    sys.stdin.read()
"""
MS_A_ROUND = 3  # at least


def parse_arguments(name: str, argv: Sequence[str]) -> argparse.Namespace:
    parser = common.engine_parser(name, __doc__)
    more = parser.add_argument_group("more of the engine")
    add_start_options(more)
    add_options(more, EngineArgs, ["load_format", "skip_tokenizer_init", "simulate_accept_length"])
    add = parser.add_argument_group("run", argument_default=None).add_argument
    add("--running", type=int, default=16, help="requests that decode")
    add("--running-len", type=int, default=512, help="tokens of their prompts")
    add("--num-prompts", type=int, default=40, help="long prompts of a run")
    add("--prompt-len", type=int, default=4096)
    add("--interval", type=float, default=0.3, help="seconds between two of them")
    add("--apart", action="store_true", default=False, help="the two sides in two processes")
    add("--output", type=Path, metavar="FILE", help="append one JSON line")
    args = parser.parse_args(argv)
    common.check_at_least(parser, args, 1, "running", "running_len", "num_prompts", "prompt_len")
    return args


def random_ids(engine: Any, rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(engine.target.config.vocab_size, size=count).tolist()


def run(
    args: argparse.Namespace, engine: Any, num_prompts: int, seconds: float, seed: int
) -> tuple[list[Trace], list[Trace]]:
    """Traces of what decoded, for as long as prompts came, and of the prompts."""
    rng = np.random.default_rng(seed)
    own = {"temperature": 0.0, "ignore_eos": True}
    most = engine.context_length - args.running_len - 1
    running = [
        MixRequest(random_ids(engine, rng, args.running_len), own | {"max_new_tokens": most}, False)
        for _ in range(args.running)
    ]
    prompts = [
        MixRequest(random_ids(engine, rng, args.prompt_len), own | {"max_new_tokens": 1}, True)
        for _ in range(num_prompts)
    ]

    async def serve() -> tuple[list[Trace], list[Trace]]:
        start = time.perf_counter()
        decoding = [asyncio.create_task(ask(engine, one, 0.0, start)) for one in running]
        await asyncio.sleep(1.0)  # until all decode
        begun = time.perf_counter() - start
        arrivals = [begun + i * args.interval for i in range(num_prompts)]
        traces = await asyncio.gather(
            *(ask(engine, one, at, start) for one, at in zip(prompts, arrivals, strict=True))
        )
        await asyncio.sleep(max(0.0, begun + seconds - (time.perf_counter() - start)))
        ended = time.perf_counter() - start
        engine.abort_request(abort_all=True)
        decoded = await asyncio.gather(*decoding)
        for trace in decoded:
            trace.chunks = [(at, n) for at, n in trace.chunks if begun <= at <= ended]
        return decoded, traces

    engine.flush_cache()
    return asyncio.run(serve())


def rows_of(args: argparse.Namespace, name: str, engine: Any) -> list[dict[str, Any]]:
    """A row without prompts and one with them."""
    seconds = args.num_prompts * args.interval
    run(args, engine, 4, 0.0, 9)  # what is loaded or captured once
    gc.collect()
    gc.freeze()  # as servers do, so that no collection looks at all that was made at the start
    rows = []
    for seed, count in enumerate((0, args.num_prompts)):
        decoded, prompts = run(args, engine, count, seconds, seed)
        failed = [one.error for one in prompts if one.error is not None]
        if failed:
            raise ValueError(f"{len(failed)} prompts failed: {failed[0]}")
        gaps = summary([gap for trace in decoded for _, gap, _ in trace.gaps])
        times = summary([trace.chunks[0][0] - trace.arrival for trace in prompts])
        quiet = rows[0]["p50"] if rows else gaps["p50"]
        assert gaps["p99"] is not None
        row = {"engine": name, "prompts": count, **gaps, "ratio": gaps["p99"] / quiet}
        rows.append(row | {"ttft": times["p50"], "ttft_p99": times["p99"]})
    return rows


def transfer(engine: Any, num_tokens: int) -> dict[str, float]:
    """Seconds and bytes of the KV of a prompt, from the prefill side's pool to the other's.

    ``copy`` are those of one array of as many bytes.
    """
    source, target = engine.prefill.runner, engine.runner
    here, there = RowPort(source), RowPort(target)
    counts = (-(-num_tokens // runner.config.page_size) for runner in (source, target))
    pages = [range(1, 1 + count) for count in counts]

    def move() -> int:
        moved = 0
        for start, count, kv in here.take(pages[0], 0, num_tokens):
            there.put(pages[1], start, count, kv)
            moved += sum(leaf.nbytes for leaf in kv)
        jax.block_until_ready(target.on_device)
        return moved

    num_bytes = move()
    whole = np.random.default_rng(0).integers(256, size=num_bytes, dtype=np.uint8)
    array = source.networks.placement.put(whole)
    copied = _median(lambda: target.networks.placement.put(array).block_until_ready())
    return {"bytes": num_bytes, "seconds": _median(move), "copy": copied}


@contextmanager
def prefill_process(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A prefill side in a process of its own; gives the options of its decode side."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
        map(str, range(len(jax.devices())))
    )
    device = visible.split(",")[options.get("base_gpu_id", 0) + 1]
    there = options | {
        "base_gpu_id": 0,
        "disaggregation_mode": "prefill",
        "disaggregation_address": "127.0.0.1:0",
        "show_progress": False,
    }
    process = subprocess.Popen(
        [sys.executable, "-c", SERVES, json.dumps(there)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": device},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        if not address:
            raise ValueError(f"the prefill side ended with status {process.wait()}")
        yield options | {"disaggregation_mode": "decode", "disaggregation_address": address}
    finally:
        process.stdin.close()  # it ends with its input
        process.wait()


def _median(function: Any) -> float:
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main(name: str, argv: Sequence[str]) -> int:
    from specjax import DisaggregatedEngine, Engine

    args = parse_arguments(name, argv)
    moved: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        options = with_preset(engine_arguments(args), args.preset, Path(folder))
        # what decodes shall not end before the prompts do
        seconds = 2 + args.num_prompts * args.interval
        tokens = int(1000 * seconds * (1 + getattr(args, "speculative_num_steps", 0)))
        longest = args.running_len + tokens // MS_A_ROUND
        options.setdefault("context_length", max(longest, args.prompt_len + 1))
        options.setdefault("max_running_requests", 2 * args.running)
        with Engine(**options) as engine:
            rows = rows_of(args, "one", engine)
            settings = common.engine_settings(engine)
        if args.apart:
            with prefill_process(options) as own, Engine(**own) as engine:
                rows += rows_of(args, "two processes", engine)
                here = engine.metrics.snapshot().prefilled_tokens
            print(f"{here} tokens of prompts were computed by the side that decodes")
        else:
            with DisaggregatedEngine(**options) as engine:
                rows += rows_of(args, "split", engine)
                moved = transfer(engine, args.prompt_len)
    common.append_json(args.output, {"rows": rows, "transfer": moved, "settings": settings})
    print("{model}, {dtype}, {num_devices} x {device_kind}\n".format(**settings))
    print(common.table_of(COLUMNS, rows))
    if not moved:
        return 0
    share = moved["seconds"] * 1e3 / rows[-1]["ttft"]
    print(
        f"\nKV of {args.prompt_len} tokens: {moved['bytes'] / 1e6:.0f} MB in "
        f"{1e3 * moved['seconds']:.2f} ms, {moved['bytes'] / moved['seconds'] / 1e9:.0f} GB/s "
        f"(one array {moved['bytes'] / moved['copy'] / 1e9:.0f}), {100 * share:.1f} % of the TTFT"
    )
    return 0
