"""Measure loads on an HTTP server or an engine: tokens/s, TTFT, inter-token latency, E2E latency.

    specjax bench serving --load "burst prompt=256 output=1" --load "mix rate=12" --dtype bfloat16
    specjax bench serving --url http://127.0.0.1:30000 --load "steady temperature=0.8"
    specjax bench serving --ways engine,whole,stream --load "burst clients=16 prompt=text"

A load is a kind and its values; other names are sampling parameters:

- burst: each client sends one request, all at the same time;
- steady: each client cycles through the prompts and sends the next one after each answer;
- mix: lengths are random, at most ``prompt`` and ``output`` tokens, but one prompt in 20 has
  ``long`` tokens. Half of the requests are greedy, a quarter uses top-p and a quarter top-p and
  top-k. They arrive all at once, or as a Poisson process at ``rate`` per second;
- prompts: while others decode, a long prompt with one completion token comes every ``interval`` s.

Prompts are random tokens, or texts with ``prompt=text``. Every turn repeats the same prompts; pass
--disable-radix-cache to compute them again. Answers come as a ``stream`` or ``whole``, from --url
or from a ``specjax serve`` process started with the engine options. ``engine`` calls ``generate``
in this process: once for a burst, in a thread per client for a steady load. Loads and ways
alternate, and the median turn is shown. Clients of a server run in separate processes. Latencies
start when a request is due. A chunk is one event of a stream.
"""

import argparse
import gc
import json
import multiprocessing
import os
import re
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException
from itertools import chain, pairwise, product, repeat
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import Request as UrlRequest
from urllib.request import urlopen

import numpy as np

from bench import common
from specjax import Engine, SamplingParams
from specjax.checks import check_integer, check_number
from specjax.cli.commands import API_KEY
from specjax.cli.options import add_start_options, engine_arguments, with_preset

LOADS: dict[str, dict[str, Any]] = {
    "burst": {"clients": 64, "prompt": 64, "output": 128},
    "steady": {"clients": 16, "prompt": 64, "output": 128, "requests": 8},
    "mix": {"requests": 300, "prompt": 600, "long": 4096, "output": 256, "rate": 1e9},
    "prompts": {"running": 16, "requests": 40, "prompt": 4096, "interval": 0.3},
}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
MIX = ({"temperature": 0.0}, {"temperature": 0.0}, SAMPLED, SAMPLED | {"top_k": 50})
LONG_EVERY = 20
RUNNING_PROMPT, RUNNING_OUTPUT = 512, 8192  # tokens of the requests that decode in "prompts"
SETTLING = 1.0  # seconds until all of them decode
IDS = (3, 60)  # range of token ids of random prompts; every vocabulary has them
WAYS = ("engine", "whole", "stream")
MEMORY = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
PROCESSES, LEAD = 8, 0.5  # LEAD: seconds until the clients of all processes start
ENGINE_OPTIONS = ("load_format", "skip_tokenizer_init", "simulate_accept_length", "overlap")
ENGINE_OPTIONS += ("disable_radix_cache",)
OPENAI_NAMES = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}
LATENCIES = {
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "chunk_ms": "chunk gap",
    "itl_ms": "token gap",
    "e2e_ms": "E2E",
}
COLUMNS = (
    ("load", "load", ""),
    ("way", "way", ""),
    ("done", "done", "d"),
    ("seconds", "seconds", ".3f"),
    ("best", "best", ".3f"),
    ("requests/s", "requests_per_second", ".2f"),
    ("tokens/s", "tokens_per_second", ",.0f"),
    ("/ engine", "over_engine", ".3f"),
    ("accept", "accept_length_pooled", ".2f"),
    *((f"{text}: ms mean, p50, p99", f"{name}_text", "") for name, text in LATENCIES.items()),
)


class Request(NamedTuple):
    """One request; times are seconds since the start of the load."""

    prompt: Any  # text or token ids; for HTTP the whole encoded request
    sampling: Mapping[str, Any] = {}
    arrival: float = 0.0
    until: float | None = None  # time at which its client disconnects


@dataclass
class Trace:
    """Timing of one request; a chunk has seconds since the due time and, if known, tokens."""

    until: float | None = None
    chunks: list[tuple[float, int | None]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)  # final ``meta_info``
    end: float = 0.0  # seconds since the start of the load
    error: str | None = None


Clients, Traces = Sequence[Sequence[Request]], list[Trace]
# completion tokens so far, if known, and the final ``meta_info``
Chunks = Generator[tuple[int | None, dict[str, Any]]]
Client = Callable[[Request], Chunks]


@contextmanager
def http_client(address: tuple[str, int], headers: dict[str, str]) -> Iterator[Client]:
    """Create a client with its own connection, which is opened again after a failure."""
    http = HTTPConnection(*address)
    http.connect()

    def chunks(request: Request) -> Chunks:
        (path, body, is_stream), is_whole = request.prompt, False
        try:
            http.request("POST", path, body, headers)
            answer = http.getresponse()
            if answer.status != 200:
                raise ValueError(answer.read().decode(errors="replace"))
            data, read = b"", answer.read1 if is_stream else answer.read
            while piece := read():
                data += piece
                if not is_stream or data.endswith(b"\n\n"):
                    for event in data.removesuffix(b"data: [DONE]\n\n").splitlines():
                        if event:
                            yield read_answer(event.removeprefix(b"data: "))
                    data = b""
            is_whole = True
        finally:
            if not is_whole:
                http.close()

    with closing(http):
        yield chunks


def read_answer(data: bytes) -> tuple[int | None, dict[str, Any]]:
    if data.startswith(b'{"error"'):
        raise ValueError(data.decode(errors="replace"))
    meta: dict[str, Any] = {}
    if b'"meta_info"' in data and b'"finish_reason":null' not in data:
        value = json.loads(data)
        choice = value.get("choices", [value])[0]
        reason = choice.get("finish_reason")  # /generate has it in meta_info
        meta = choice["meta_info"] | ({"finish_reason": {"type": reason}} if reason else {})
    count = re.search(rb'"completion_tokens":(\d+)', data)
    return int(count[1]) if count else None, meta


def ask(client: Client, requests: Sequence[Request], start: float) -> Traces:
    """Send the requests of one client in sequence, each at its arrival time or later."""
    traces: Traces = []
    for request in requests:
        due = max(request.arrival, traces[-1].end if traces else 0.0)
        traces.append(trace := Trace(request.until))
        time.sleep(max(0.0, start + due - time.monotonic()))
        sent = 0
        chunks = client(request)
        try:
            for count, trace.meta in chunks:
                trace.end = time.monotonic() - start
                if count is None or count > sent:
                    # streams of texts report the count only at the end
                    is_known = count is not None and (sent > 0 or not trace.chunks)
                    trace.chunks.append((trace.end - due, count - sent if is_known else None))
                    sent = count or 0
                if request.until is not None and trace.end > request.until:
                    break
            else:
                reason = (trace.meta.get("finish_reason") or {}).get("type")
                if not trace.chunks or reason in (None, "abort"):
                    raise ValueError(
                        f"the answer ended after {sent} tokens (finish_reason={reason}), before it "
                        "was complete"
                    )
        except (ValueError, RuntimeError, OSError, HTTPException) as error:
            trace.error = f"{type(error).__name__}: {error}"
        finally:
            chunks.close()
    return traces


def ask_all(askers: Sequence[Client], clients: Clients, start: float) -> Traces:
    with ThreadPoolExecutor(len(clients)) as pool:
        return list(chain.from_iterable(pool.map(ask, askers, clients, repeat(start))))


def run_engine(engine: Engine, clients: Clients) -> Traces:
    """Run clients in threads; if each sends a single request, make one call for all."""

    def answers(requests: Sequence[Request]) -> list[dict[str, Any]]:
        name = "prompt" if isinstance(requests[0].prompt, str) else "input_ids"
        inputs = {name: [request.prompt for request in requests]}
        sampling = [request.sampling for request in requests]
        outs = engine.generate(**inputs, sampling_params=sampling)
        return [out["meta_info"] for out in outs]

    def chunks(request: Request) -> Chunks:
        (meta,) = answers([request])
        yield meta["completion_tokens"], meta

    start = time.monotonic()
    if any(len(requests) > 1 for requests in clients):
        return ask_all([chunks] * len(clients), clients, start)
    metas = answers([request for (request,) in clients])
    end = time.monotonic() - start
    return [Trace(None, [(end, meta["completion_tokens"])], meta, end) for meta in metas]


def run_http(address: Any, headers: dict[str, str], clients: Clients, start: float) -> Traces:
    """Run clients in this process; connect them before the load starts."""
    with ExitStack() as stack:
        askers = [stack.enter_context(http_client(address, headers)) for _ in clients]
        return ask_all(askers, clients, start)


def connect(url: str, pool: ProcessPoolExecutor) -> tuple[Callable[..., Traces], dict[str, Any]]:
    """Return a function that runs clients in the processes of ``pool``, and the server info."""
    split = urlsplit(url)
    if split.scheme != "http" or split.hostname is None:
        raise ValueError(f"--url {url} must be http://HOST:PORT")
    key = os.environ.get(API_KEY)
    headers = {"content-type": "application/json"} | ({"x-api-key": key} if key else {})
    address = split.hostname, split.port or 80

    def run(clients: Clients, *, is_stream: bool) -> Traces:
        encoded = [[encode(request, is_stream=is_stream) for request in x] for x in clients]
        shares, start = [encoded[i::PROCESSES] for i in range(PROCESSES)], time.monotonic() + LEAD
        jobs = [pool.submit(run_http, address, headers, share, start) for share in shares if share]
        return list(chain.from_iterable(job.result() for job in jobs))

    with urlopen(UrlRequest(f"{url.rstrip('/')}/get_server_info", None, headers)) as info:
        return run, json.loads(info.read())


def encode(request: Request, *, is_stream: bool) -> Request:
    """Replace the prompt of a request by (path, body, is_stream)."""
    body = dict(request.sampling)
    if isinstance(request.prompt, str):
        path, body["prompt"] = "/v1/completions", request.prompt
        body |= {theirs: body.pop(ours) for ours, theirs in OPENAI_NAMES.items() if ours in body}
    else:
        path, body = "/generate", {"sampling_params": body, "input_ids": request.prompt}
        body["incremental"] = is_stream
    data = json.dumps(body | {"stream": is_stream}).encode()
    return request._replace(prompt=(path, data, is_stream), sampling={})


def clients_of(load: str, chances: Sequence[float] = ()) -> Clients:
    """Parse a load and make its clients. If a value is invalid, the ``ValueError`` names it."""
    kind, pairs = common.pairs_of("--load", load)
    if kind not in LOADS:
        raise ValueError(f"--load {load!r}: {kind!r} must be one of {list(LOADS)}")
    defaults = LOADS[kind]
    values = defaults | {name: value for name, value in pairs.items() if name in defaults}
    sampling = {name: value for name, value in pairs.items() if name not in defaults}
    for name, value in values.items():
        where = f"--load {load!r}: {name}"
        if isinstance(defaults[name], float):
            check_number(where, value, above=0)
        elif name != "prompt" or value != "text" or kind not in ("burst", "steady"):
            check_integer(where, value, 0 if kind == "prompts" and name == "requests" else 1)
    rng, mixed = np.random.default_rng(0), np.random.default_rng(1)
    order = chain.from_iterable(mixed.permutation(chances).tolist() for _ in repeat(None))

    def request(prompt: Any, output: int, arrival: float = 0.0, **changes: Any) -> Request:
        chance = {"simulate_acceptance": next(order)} if chances else {}
        params = {"temperature": 0.0, "ignore_eos": True} | chance | changes | sampling
        SamplingParams.of(params)
        if not isinstance(prompt, str):
            prompt = rng.integers(*IDS, size=prompt).tolist()
        return Request(prompt, params | {"max_new_tokens": output}, arrival)

    return list(MAKERS[kind](values, rng, request))


Make = Callable[..., Request]


def simple_clients(values: Mapping[str, Any], _: Any, request: Make) -> Iterator[list[Request]]:
    """Make clients of ``burst`` and ``steady``; each begins with another prompt, then cycles."""
    count, prompts = values["clients"], [values["prompt"]] * values["clients"]
    if values["prompt"] == "text":
        texts = [row["turns"][0] for row in common.read_lines(common.PROMPTS, ["turns"])]
        prompts = [f"{i}. {texts[i % len(texts)]}" for i in range(count)]
    output = values["output"]
    requests = [request(prompt, output, sampling_seed=i) for i, prompt in enumerate(prompts)]
    for i in range(count):
        yield [requests[(i + k) % count] for k in range(values.get("requests", 1))]


def mix_clients(values: Mapping[str, Any], rng: Any, request: Make) -> Iterator[list[Request]]:
    """Make clients of ``mix``; the rate only scales the arrival times."""
    count, prompt, output = (values[name] for name in ("requests", "prompt", "output"))
    arrivals = (np.cumsum(rng.exponential(size=count)) / values["rate"]).tolist()
    lengths = rng.integers(-(-prompt // 6), prompt, size=count, endpoint=True)
    lengths[rng.permutation(count) % LONG_EVERY == 0] = values["long"]
    outputs = rng.integers(-(-output // 4), output, size=count, endpoint=True).tolist()
    for i, kind in enumerate(rng.permutation(count) % len(MIX)):
        yield [request(lengths[i], outputs[i], arrivals[i], **MIX[kind], sampling_seed=i)]


def prompts_clients(values: Mapping[str, Any], _: Any, request: Make) -> Iterator[list[Request]]:
    """Make clients of ``prompts``: some decode until the last prompt, the others send prompts."""
    arrivals = [SETTLING + i * values["interval"] for i in range(values["requests"])]
    end = SETTLING + max(10, len(arrivals)) * values["interval"]
    for _ in range(values["running"]):
        yield [request(RUNNING_PROMPT, RUNNING_OUTPUT)._replace(until=end)]
    for arrival in arrivals:
        yield [request(values["prompt"], 1, arrival)]


MAKERS: dict[str, Any] = {"burst": simple_clients, "steady": simple_clients}
MAKERS |= {"mix": mix_clients, "prompts": prompts_clients}


def summary(seconds: Sequence[float]) -> dict[str, float] | None:
    """Compute statistics in ms; ``None`` if ``seconds`` is empty."""
    if not seconds:
        return None
    p50, p99 = np.percentile(seconds, (50, 99))
    values = {"mean": np.mean(seconds), "p50": p50, "p99": p99, "max": max(seconds)}
    return {name: float(1e3 * value) for name, value in values.items()}


def seconds_per_token(trace: Trace) -> list[float]:
    """The mean time per token after the first chunk; empty if their number is unknown or 0."""
    (first, _), *others = trace.chunks
    counts = [n for _, n in others if n is not None]
    is_known = len(counts) == len(others) and any(counts)
    return [(others[-1][0] - first) / sum(counts)] if is_known else []


def metrics(traces: Traces) -> dict[str, Any]:
    """Compute the metrics of a load over its successful requests.

    Gaps come from all of them, other metrics only from those whose client did not disconnect.
    ``itl_ms`` divides each gap by the tokens of its second chunk and counts it once per token.
    ``tpot_ms`` is the mean time per token of a request after its first chunk.
    """
    good = [trace for trace in traces if trace.error is None]
    done = [trace for trace in good if trace.until is None]
    gaps = [
        (end - start, count)
        for trace in good
        for (start, _), (end, count) in pairwise(trace.chunks)
        if trace.until is None or start >= SETTLING
    ]
    seconds = max((trace.end for trace in good), default=0.0)
    metas = [trace.meta for trace in done]
    tokens = sum(meta["completion_tokens"] for meta in metas)
    return {
        "done": len(done),
        "failed": len(traces) - len(good),
        "errors": Counter(trace.error for trace in traces if trace.error is not None),
        "seconds": seconds,
        "output_tokens": tokens,
        "tokens_per_second": tokens / seconds if good else 0.0,
        "requests_per_second": len(done) / seconds if good else 0.0,
        "ttft_ms": summary([trace.chunks[0][0] for trace in done]),
        "tpot_ms": summary([x for trace in done for x in seconds_per_token(trace)]),
        "chunk_ms": summary([gap for gap, _ in gaps]),
        "itl_ms": summary([gap / n for gap, n in gaps if n for _ in range(n)]),
        "e2e_ms": summary([trace.chunks[-1][0] for trace in done]),
        **common.acceptance(metas),
    }


def parse_arguments(name: str, argv: Sequence[str]) -> argparse.Namespace:
    parser = common.engine_parser(name, __doc__, ENGINE_OPTIONS)
    add_start_options(parser.add_argument_group("start"))
    add = parser.add_argument_group("run", argument_default=None).add_argument
    text = f"a load ({', '.join(LOADS)}), followed by NAME=VALUE settings; repeatable"
    add("--load", action="append", required=True, help=text)
    add("--ways", type=common.list_of(str, WAYS), default=["stream"], help=", ".join(WAYS))
    add("--url", help="address of a running server; engine options are then ignored")
    add("--split", action="store_true", help="compute prompts in a prefill server on another GPU")
    text = "values for requests, equally often in random order (the engine starts with the first)"
    add("--simulate-acceptance", dest="chances", type=common.list_of(float), default=[], help=text)
    add("--turns", type=int, default=4, help="measured turns, after one warm-up (default: 4)")
    add("--output", type=Path, metavar="FILE", help="file to append rows to, as JSON lines")
    args = parser.parse_args(argv)
    common.check_at_least(parser, args, 1, "turns")
    kinds = {load.split()[0] for load in args.load if load}
    if "engine" in args.ways and (args.url or args.split or kinds & {"mix", "prompts"}):
        parser.error("--ways engine does not support --url, --split, or the loads mix and prompts")
    return args


def start(
    args: argparse.Namespace, stack: ExitStack
) -> tuple[dict[str, Callable[[Clients], Traces]], dict[str, Any]]:
    """Start the engine and servers that the ways need; return a function per way, and settings."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    sim = {"simulate_acceptance": args.chances[0]} if args.chances else {}
    options = {} if args.url else with_preset(engine_arguments(args) | sim, args.preset, folder)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",") if args.split else [None]
    http, settings, ways = [way for way in args.ways if way != "engine"], {}, {}
    is_shared = len(http) < len(args.ways) > 1 or (args.split and len(gpus) == 1)
    if is_shared and not set(MEMORY) & set(os.environ):
        os.environ[MEMORY[1]] = "0.45"  # two processes use the same GPU
    if args.split:
        with socket.create_server(("127.0.0.1", 0)) as free:
            options["disaggregation_address"] = f"127.0.0.1:{free.getsockname()[1]}"
        stack.enter_context(common.serve(options | {"disaggregation_mode": "prefill"}, gpus[-1]))
        options["disaggregation_mode"] = "decode"
    if "engine" in args.ways:
        engine = stack.enter_context(Engine(**options))
        settings = common.settings_of(engine.get_server_info()) | common.software()
        gc.collect()
        gc.freeze()  # as the server does
        ways["engine"] = partial(run_engine, engine)
    if http:
        started = time.monotonic()
        url = args.url or stack.enter_context(common.serve(options, gpus[0]))
        settings |= {} if args.url else {"ready_s": time.monotonic() - started}
        context = multiprocessing.get_context("spawn")
        run, info = connect(url, stack.enter_context(ProcessPoolExecutor(PROCESSES, context)))
        settings |= common.settings_of(info)
        ways |= {way: partial(run, is_stream=way == "stream") for way in http}
    return ways, settings


def main(name: str, argv: Sequence[str]) -> int:
    args = parse_arguments(name, argv)
    loads = {load: clients_of(load, args.chances) for load in args.load}
    turns: list[dict[tuple[str, str], dict[str, Any]]] = []
    with ExitStack() as stack:
        ways, settings = start(args, stack)
        cells = [(load, way) for load in loads for way in ways]
        for _ in range(1 + args.turns):
            turns.append({(load, way): metrics(ways[way](loads[load])) for load, way in cells})
        settings |= {"peak_gb": common.peak_gb()} if "engine" in ways else {}
    rows: list[dict[str, Any]] = []
    for load, way in cells:
        timed = sorted((turn[load, way] for turn in turns[1:]), key=lambda row: row["seconds"])
        labels = {"load": load, "way": way, "turns": args.turns, "best": timed[0]["seconds"]}
        rows.append(labels | timed[(args.turns - 1) // 2] | settings)
        baseline = next(row for row in rows if row["load"] == load)
        if baseline["way"] == "engine" and baseline["done"]:
            rows[-1]["over_engine"] = rows[-1]["tokens_per_second"] / baseline["tokens_per_second"]
        common.append_json(args.output, rows[-1])
        for error, count in sum((turn[load, way]["errors"] for turn in turns), Counter()).items():
            print(f"{load}, {way}: {count} failed: {error}", file=sys.stderr)
    for row, key in product(rows, LATENCIES):
        if row[key] is not None:
            row[f"{key}_text"] = " ".join(f"{row[key][at]:.1f}" for at in ("mean", "p50", "p99"))
    print(common.table_of(COLUMNS, rows))
    facts = ("planned_gb", "peak_gb", "ready_s")
    print(", ".join(f"{fact} {settings[fact]:.2f}" for fact in facts if fact in settings))
    return int(any(row["failed"] for turn in turns for row in turn.values()))
