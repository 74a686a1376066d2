"""Measures what users feel while requests of a mixed load arrive at random.

    python scripts/bench serving_mix --preset llama3.1-8b --dtype bfloat16 \\
        --speculative-num-steps 3 --simulate-accept-length 2.5 --output mix.jsonl --plot mix.png

Prompts are random tokens: most are short, one in ``--long-every`` is long. Half of the requests are
greedy, a quarter is sampled with top-p and a quarter with top-k too. A seed gives the same load and
the same pattern of arrivals in every run.

All requests at once give the capacity; then they arrive as a Poisson process at ``--utilization``
times that rate, each in an asyncio task of its own that reads a stream. Times are those that the
tasks see, beside the engine's thread in one process, from the moment a request should have arrived.
A chunk is what one item of a stream adds. The time between two chunks counts once as a chunk gap,
and for each token of the second chunk, divided by their number, as inter-token latency.
"""

import argparse
import asyncio
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import common
from specjax.cli.options import add_options, add_start_options, engine_arguments, with_preset
from specjax.engine.args import EngineArgs

SAMPLED = {"temperature": 0.8, "top_p": 0.95}
SAMPLING = ({"temperature": 0.0}, {"temperature": 0.0}, SAMPLED, SAMPLED | {"top_k": 50})
MORE_OPTIONS = ["load_format", "skip_tokenizer_init", "simulate_accept_length", "overlap"]
GIVEN = [*MORE_OPTIONS, "preset", "speculative_algorithm", "speculative_adaptive"]
GIVEN += ["num_prompts", "prompt_len", "long_prompt_len", "long_every", "output_len", "seed"]
GIVEN += ["utilization", "warmup"]
RUN_COLUMNS = (
    ("arrivals", "arrivals", ""),
    ("asked req/s", "request_rate", ".2f"),
    ("done", "successful_requests", "d"),
    ("failed", "failed_requests", "d"),
    ("seconds", "seconds", ".2f"),
    ("req/s", "request_throughput", ".2f"),
    ("out tok/s", "output_throughput", ".1f"),
    ("running", "running_mean", ".1f"),
    ("at most", "running_max", "d"),
    ("accept", "accept_length_pooled", ".2f"),
)
LATENCIES = ("ttft_ms", "itl_ms", "chunk_gap_ms", "e2e_ms")
STATISTICS = ("mean", "p50", "p99", "max", "p99/p50")
LATENCY_COLUMNS = (("latency", "latency", ""), *((name, name, ".2f") for name in STATISTICS))


class MixRequest(NamedTuple):
    """Prompt tokens, sampling parameters, and whether it is one of the long prompts."""

    input_ids: list[int]
    sampling: dict[str, Any]
    is_long: bool


@dataclass
class Trace:
    """What the task of one request saw; times in seconds since the run began."""

    arrival: float  # when it should have been submitted
    is_long: bool
    submitted: float = 0.0  # when it was
    chunks: list[tuple[float, int]] = field(default_factory=list)  # time, tokens that it brought
    meta: dict[str, Any] = field(default_factory=dict)  # ``meta_info`` of the last item
    error: str | None = None  # why it failed

    @property
    def gaps(self) -> list[tuple[float, float, int]]:
        """End and length in seconds of each time between two chunks, and tokens of the second."""
        return [(end, end - start, count) for (start, _), (end, count) in pairwise(self.chunks)]


def parse_arguments(name: str, argv: Sequence[str]) -> argparse.Namespace:
    parser = common.engine_parser(name, __doc__)
    more = parser.add_argument_group("more of the engine")
    add_start_options(more)
    add_options(more, EngineArgs, [*MORE_OPTIONS, "disable_radix_cache"])
    add = parser.add_argument_group("run", argument_default=None).add_argument
    add("--num-prompts", type=int, default=400)
    add("--prompt-len", type=common.numbers, default=[100, 600], help="least and most tokens")
    add("--long-prompt-len", type=int, default=4096)
    add("--long-every", type=int, default=20, help="one prompt in so many is long")
    add("--output-len", type=common.numbers, default=[64, 256], help="least and most tokens")
    add("--request-rate", type=float, help="requests/s, instead of a share of the capacity")
    add("--utilization", type=float, default=0.7, help="share of the capacity")
    add("--warmup", type=int, help="requests before; by default as many as run at once")
    add("--output", type=Path, metavar="FILE", help="append one JSON line")
    add("--plot", type=Path, metavar="PNG", help="needs the extra bench")
    args = parser.parse_args(argv)
    args.seed = getattr(args, "seed", EngineArgs.seed)
    common.check_at_least(parser, args, 1, "num_prompts", "long_prompt_len", "long_every")
    common.check_at_least(parser, args, 0, "warmup")
    for name in ("prompt_len", "output_len"):
        ends = getattr(args, name)
        if len(ends) != 2 or not 1 <= ends[0] <= ends[1]:
            parser.error(f"--{name.replace('_', '-')} {ends} must be two ascending numbers from 1")
    for name in ("request_rate", "utilization"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} {value} must be a number above 0")
    if args.request_rate is not None:
        args.utilization = None
    common.check_plot(parser, args.plot)
    return args


def make_load(args: argparse.Namespace, vocab_size: int, count: int, seed: int) -> list[MixRequest]:
    """Requests with random tokens; how many are long and of each kind of sampling is fixed."""
    rng = np.random.default_rng(seed)
    is_long = rng.permutation(count) % args.long_every == 0
    kinds = rng.permutation(count) % len(SAMPLING)
    lengths = rng.integers(*args.prompt_len, size=count, endpoint=True)
    lengths[is_long] = args.long_prompt_len
    outputs = rng.integers(*args.output_len, size=count, endpoint=True)
    requests = []
    for i in range(count):
        ids = rng.integers(vocab_size, size=lengths[i]).tolist()
        own = {"max_new_tokens": int(outputs[i]), "sampling_seed": int(rng.integers(2**32))}
        sampling = SAMPLING[kinds[i]] | own | {"ignore_eos": True}
        requests.append(MixRequest(ids, sampling, bool(is_long[i])))
    return requests


def make_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the first arrival of a Poisson process to each; ``rate`` a second.

    The pattern of a seed is the same at every rate, stretched.
    """
    gaps = np.random.default_rng((seed, 1)).exponential(size=count)
    gaps[0] = 0.0
    return [float(at) / rate for at in np.cumsum(gaps)]


async def ask(engine: Any, request: MixRequest, arrival: float, start: float) -> Trace:
    """Sleeps until the arrival and reads the stream; what goes wrong is noted in the trace."""
    trace = Trace(arrival, request.is_long)
    await asyncio.sleep(start + arrival - time.perf_counter())
    inputs = {"input_ids": request.input_ids, "sampling_params": request.sampling}
    seen = 0
    try:
        stream = await engine.async_generate(**inputs, stream=True)
        trace.submitted = time.perf_counter() - start
        async for output in stream:
            trace.meta = output["meta_info"]
            count = trace.meta["completion_tokens"] - seen
            if count:
                trace.chunks.append((time.perf_counter() - start, count))
                seen += count
    except Exception as error:  # of this request; the others go on
        trace.error = f"{type(error).__name__}: {error}"
    reason = trace.meta.get("finish_reason") or {}
    if trace.error is None and (reason.get("type") == "abort" or not trace.chunks):
        trace.error = str(reason.get("message", "no tokens"))
    return trace


def run_load(
    engine: Any, requests: Sequence[MixRequest], arrivals: Sequence[float]
) -> tuple[list[Trace], float]:
    """Traces of all requests, and seconds until the last has ended; the cache is empty before."""

    async def run() -> tuple[list[Trace], float]:
        start = time.perf_counter()
        pairs = zip(requests, arrivals, strict=True)
        traces = await asyncio.gather(*(ask(engine, one, at, start) for one, at in pairs))
        return traces, time.perf_counter() - start

    engine.flush_cache()
    return asyncio.run(run())


def summary(seconds: Sequence[float]) -> dict[str, float | None]:
    """``STATISTICS`` in ms but for the ratio; ``None`` where there is nothing."""
    if not seconds:
        return dict.fromkeys(STATISTICS)
    ms = np.asarray(seconds) * 1e3
    p50, p99 = np.percentile(ms, (50, 99)).tolist()
    values = float(ms.mean()), p50, p99, float(ms.max()), p99 / p50 if p50 else None
    return dict(zip(STATISTICS, values, strict=True))


def most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """How many of the spans (start, end) overlap at most; one may begin where another ends."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    return max(accumulate(change for _, change in changes), default=0)


def figures(traces: Sequence[Trace], seconds: float) -> dict[str, Any]:
    """Figures of a run; all but ``failed_requests`` and ``errors`` are of those that succeeded.

    A request runs from its admission to its end, both by the engine's clock. ``late_ms`` is how
    much later than planned requests were submitted; the latencies contain it.
    """
    done = [trace for trace in traces if trace.error is None]
    gaps = [(gap, count) for trace in done for _, gap, count in trace.gaps]
    metas = [trace.meta for trace in done]
    tokens = sum(meta["completion_tokens"] for meta in metas)
    spans = [
        (trace.submitted + trace.meta["queue_time"], trace.submitted + trace.meta["e2e_latency"])
        for trace in done
    ]
    return {
        "successful_requests": len(done),
        "failed_requests": len(traces) - len(done),
        "errors": dict(Counter(trace.error for trace in traces if trace.error is not None)),
        "seconds": seconds,
        "total_input_tokens": sum(meta["prompt_tokens"] for meta in metas),
        "total_output_tokens": tokens,
        "num_retractions": sum(meta["num_retractions"] for meta in metas),
        "request_throughput": len(done) / seconds,
        "output_throughput": tokens / seconds,
        "running_mean": sum(end - start for start, end in spans) / seconds,
        "running_max": most_at_once(spans),
        "ttft_ms": summary([trace.chunks[0][0] - trace.arrival for trace in done]),
        "itl_ms": summary([gap / count for gap, count in gaps for _ in range(count)]),
        "chunk_gap_ms": summary([gap for gap, _ in gaps]),
        "e2e_ms": summary([trace.chunks[-1][0] - trace.arrival for trace in done]),
        "late_ms": summary([trace.submitted - trace.arrival for trace in done]),
        **common.acceptance(metas),
    }


def measure(args: argparse.Namespace, engine: Any) -> tuple[dict[str, Any], list[Trace]]:
    """The JSON line, and the traces of the run with Poisson arrivals."""
    vocab_size = engine.target.config.vocab_size
    settings = common.engine_settings(engine)
    if args.warmup is None:
        args.warmup = settings["max_running_requests"]
    others = make_load(args, vocab_size, args.warmup, args.seed + 1)
    run_load(engine, others, [0.0] * len(others))
    requests = make_load(args, vocab_size, args.num_prompts, args.seed)
    runs, rate = {}, args.request_rate
    if rate is None:
        traces, seconds = run_load(engine, requests, [0.0] * len(requests))
        runs["at once"] = figures(traces, seconds) | {"request_rate": None}
        rate = args.utilization * runs["at once"]["request_throughput"]
        if not rate:
            raise ValueError(f"all requests failed: {traces[0].error}")
    traces, seconds = run_load(engine, requests, make_arrivals(rate, len(requests), args.seed))
    runs["Poisson"] = figures(traces, seconds) | {"request_rate": rate}
    settings |= {name: getattr(args, name, None) for name in GIVEN}
    return {"runs": runs, "settings": settings}, traces


def show(result: dict[str, Any]) -> None:
    """Prints a table of the runs, and one of what users felt in the last one."""
    settings, runs = result["settings"], result["runs"]
    for name, row in runs.items():
        for error, count in row["errors"].items():
            print(f"{name}: {count} failed: {error}", file=sys.stderr)
    print("{model}, {dtype}, {device_kind}\n".format(**settings))
    print(common.table_of(RUN_COLUMNS, [{"arrivals": name} | row for name, row in runs.items()]))
    rows = [{"latency": name} | runs["Poisson"][name] for name in LATENCIES]
    print(f"\n{common.table_of(LATENCY_COLUMNS, rows)}")


def main(name: str, argv: Sequence[str]) -> int:
    from specjax import Engine

    args = parse_arguments(name, argv)
    with tempfile.TemporaryDirectory() as folder:
        options = with_preset(engine_arguments(args), args.preset, Path(folder))
        longest = max(args.long_prompt_len, args.prompt_len[1]) + args.output_len[1]
        options.setdefault("context_length", longest)
        with Engine(**options) as engine:
            result, traces = measure(args, engine)
    common.append_json(args.output, result)
    if args.plot is not None:
        from bench.plot import draw_mix

        draw_mix(result, traces, args.plot)
    show(result)
    return int(any(row["failed_requests"] for row in result["runs"].values()))
