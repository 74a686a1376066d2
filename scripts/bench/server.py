"""Measures output tokens a second through HTTP against ``Engine.generate``.

    python scripts/bench server --dtype bfloat16 --clients 1,16,64

The same requests go to an engine here and to a ``specjax serve`` process, whose answers come whole
or as a stream; the three take turns, since a machine's speed drifts. There are two loads:

- ``burst``: a request of every client at once, the next ones when all have been answered; the
  engine gets them as a list.
- ``steady``: every client sends its next request when it has an answer, with the prompts in turn;
  the engine is called by as many threads. A turn begins with empty places and ends with them.

Clients over HTTP keep their connections, live in processes of their own, and look at nothing but
the end of an answer. Engines without a tokenizer are asked for tokens, by ``/generate``. Both
engines are on the GPU at once, with 0.45 of its memory each; ``XLA_PYTHON_CLIENT_MEM_FRACTION``
changes that. Prompts come again and again: but for their ends the prefix cache has them.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench import common
from bench.clients import Clients, server
from bench.data import PROMPTS, read_lines
from specjax.cli.options import add_options, add_start_options, engine_arguments, with_preset
from specjax.engine.args import EngineArgs

HTTP_WAYS = ("whole", "stream")
# what says how much of the GPU's memory a process takes; both at once are refused by jax
MEMORY_NAMES = {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}
COLUMNS = (
    ("clients", "clients", "d"),
    ("load", "load", "s"),
    ("Engine.generate tok/s", "direct", ".0f"),
    ("whole tok/s", "whole", ".0f"),
    ("ratio", "whole_ratio", ".3f"),
    ("stream tok/s", "stream", ".0f"),
    ("ratio", "stream_ratio", ".3f"),
)


def parse_arguments(name: str, argv: Sequence[str]) -> argparse.Namespace:
    parser = common.engine_parser(name, __doc__)
    more = parser.add_argument_group("more of the engine")
    add_start_options(more)
    add_options(more, EngineArgs, ["load_format", "skip_tokenizer_init", "simulate_accept_length"])
    add = parser.add_argument_group("run", argument_default=None).add_argument
    add("--clients", type=common.numbers, default=[1, 16, 64])
    add("--max-tokens", type=int, default=128)
    add("--prompt-len", type=int, default=64, help="tokens, where there is no tokenizer")
    add("--temperature", type=float, default=0.0)
    add("--requests", type=int, default=8, help="of each client in a turn")
    add("--turns", type=int, default=4, help="behind one that counts nothing")
    add("--output", type=Path, metavar="FILE", help="append one JSON line")
    args = parser.parse_args(argv)
    common.check_at_least(parser, args, 1, "max_tokens", "prompt_len", "requests", "turns")
    return args


def sampling_params(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "max_new_tokens": args.max_tokens,
        "temperature": args.temperature,
        "ignore_eos": True,
    }


def body_of(args: argparse.Namespace, prompt: Any, *, stream: bool) -> bytes:
    """A request as it goes over the connection."""
    own: dict[str, Any]
    if isinstance(prompt, str):
        path = "/v1/completions"
        own = {"prompt": prompt, "max_tokens": args.max_tokens, "ignore_eos": True}
        own |= {"temperature": args.temperature, "stream": stream}
        own |= {"stream_options": {"include_usage": True}} if stream else {}
    else:
        path = "/generate"
        own = {"input_ids": prompt, "sampling_params": sampling_params(args), "stream": stream}
    body = json.dumps(own).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def prompts_of(args: argparse.Namespace, engine: Any) -> list[Any]:
    """A different one for each client."""
    most = max(args.clients)
    if engine.tokenizer is not None:
        texts = [row["turns"][0] for row in read_lines(PROMPTS, ["turns"])]
        return [f"{i}. {texts[i % len(texts)]}" for i in range(most)]
    rng = np.random.default_rng(0)
    size = engine.target.config.vocab_size
    return [rng.integers(size, size=args.prompt_len).tolist() for _ in range(most)]


def in_turn(items: Sequence[Any], times: int) -> list[list[Any]]:
    """For each of as many clients ``times`` items, each time all of them, by another client each.

    Prompts differ in how many drafts are accepted; nobody has but slow ones.
    """
    count = len(items)
    return [[items[(i + k) % count] for k in range(times)] for i in range(count)]


class Direct:
    """Calls of an engine in this process."""

    def __init__(self, engine: Any, prompts: list[Any], params: Mapping[str, Any]) -> None:
        self._engine, self._prompts, self._params = engine, prompts, params
        self._name = "prompt" if isinstance(prompts[0], str) else "input_ids"

    def burst(self, times: int) -> int:
        return sum(self._tokens(self._prompts) for _ in range(times))

    def steady(self, times: int) -> int:
        def call(prompts: list[Any]) -> int:
            return sum(self._tokens([prompt]) for prompt in prompts)

        with ThreadPoolExecutor(len(self._prompts)) as pool:
            return sum(pool.map(call, in_turn(self._prompts, times)))

    def _tokens(self, prompts: list[Any]) -> int:
        outs = self._engine.generate(sampling_params=self._params, **{self._name: prompts})
        return sum(len(out["output_ids"]) for out in outs)


class Http:
    """Requests to the server."""

    def __init__(self, clients: Clients, requests: list[bytes]) -> None:
        self._clients, self._requests = clients, requests

    def burst(self, times: int) -> int:
        return sum(self._clients.ask(in_turn(self._requests, 1)) for _ in range(times))

    def steady(self, times: int) -> int:
        return self._clients.ask(in_turn(self._requests, times))


def rates_of(args: argparse.Namespace, ways: Mapping[str, Any], load: str) -> dict[str, float]:
    """Median tokens a second of turns, behind one that counts nothing."""
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(args.turns + 1):
        for way, answers in ways.items():
            started = time.perf_counter()
            tokens = getattr(answers, load)(args.requests)
            if turn:
                rates[way].append(tokens / (time.perf_counter() - started))
    return {way: statistics.median(found) for way, found in rates.items()}


def main(name: str, argv: Sequence[str]) -> int:
    from specjax import Engine

    args = parse_arguments(name, argv)
    if not MEMORY_NAMES & set(os.environ):
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.45"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        options = with_preset(engine_arguments(args), args.preset, Path(folder))
        options.setdefault("max_running_requests", max(args.clients))
        with (
            Engine(**options) as engine,
            server(options) as port,
            Clients(port, max(args.clients)) as clients,
        ):
            gc.collect()
            gc.freeze()  # as the server does
            settings = common.engine_settings(engine)
            prompts = prompts_of(args, engine)
            for count in args.clients:
                some = prompts[:count]
                ways: dict[str, Any] = {"direct": Direct(engine, some, sampling_params(args))}
                for way in HTTP_WAYS:
                    bodies = [body_of(args, prompt, stream=way == "stream") for prompt in some]
                    ways[way] = Http(clients, bodies)
                for load in ("burst", "steady"):
                    rates = rates_of(args, ways, load)
                    ratios = {f"{way}_ratio": rates[way] / rates["direct"] for way in HTTP_WAYS}
                    rows.append({"clients": count, "load": load} | rates | ratios)
    run = {name: getattr(args, name) for name in ("requests", "turns", "max_tokens", "temperature")}
    common.append_json(args.output, {"rows": rows, "settings": settings, "run": run})
    print("{model}, {dtype}, {num_devices} x {device_kind}\n".format(**settings))
    print(common.table_of(COLUMNS, rows))
    return 0
