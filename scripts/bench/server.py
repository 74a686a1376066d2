"""Measures output tokens a second through HTTP against ``Engine.generate``.

    python scripts/bench_server.py --dtype bfloat16 --clients 1,16,64

Waves of as many requests as there are clients, all of a wave at once: given to the engine as a
list, then sent to a ``specjax serve`` process, whose answers come whole or as a stream. Clients
keep their connections, live in processes of their own, and look at nothing but the end of an
answer. Engines without a tokenizer are asked for tokens, by ``/generate``.
"""

import argparse
import asyncio
import json
import multiprocessing
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench import common
from bench.data import PROMPTS, read_lines
from specjax.cli.options import add_options, add_start_options, engine_arguments, with_preset
from specjax.engine.args import EngineArgs

CLIENTS_A_PROCESS = 8
COLUMNS = (
    ("clients", "clients", "d"),
    ("Engine.generate tok/s", "direct", ".0f"),
    ("whole tok/s", "whole", ".0f"),
    ("ratio", "whole_ratio", ".3f"),
    ("stream tok/s", "stream", ".0f"),
    ("ratio", "stream_ratio", ".3f"),
)
SERVES = "import sys; from specjax.cli import main; sys.exit(main())"
TAIL = 4096  # bytes of an answer that are kept: its end has the counts
COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


def parse_arguments(door: str, argv: Sequence[str]) -> argparse.Namespace:
    parser = common.engine_parser(door, __doc__)
    more = parser.add_argument_group("more of the engine")
    add_start_options(more)
    add_options(more, EngineArgs, ["load_format", "skip_tokenizer_init", "simulate_accept_length"])
    add = parser.add_argument_group("run", argument_default=None).add_argument
    add("--clients", type=common.numbers, default=[1, 16, 64])
    add("--max-tokens", type=int, default=128)
    add("--prompt-len", type=int, default=64, help="tokens, where there is no tokenizer")
    add("--temperature", type=float, default=0.0)
    add("--waves", type=int, default=10)
    add("--output", type=Path, metavar="FILE", help="append one JSON line")
    args = parser.parse_args(argv)
    common.check_at_least(parser, args, 1, "max_tokens", "prompt_len", "waves")
    return args


class Client(asyncio.Protocol):
    """One connection: sends a request and waits for the end of its answer."""

    transport: asyncio.Transport
    done: asyncio.Future[int]

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def ask(self, request: bytes) -> "asyncio.Future[int]":
        """Completion tokens of the answer."""
        self.done = asyncio.get_running_loop().create_future()
        self.tail, self.left = b"", -1
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        if not self.tail:
            head, _, body = data.partition(b"\r\n\r\n")
            if b" 200 " not in head.split(b"\r\n", 1)[0]:
                self.done.set_exception(ValueError(data.decode(errors="replace")))
                return
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            self.left = int(length[1]) - len(body) if length else -1
        elif self.left > 0:
            self.left -= len(data)
        self.tail = (self.tail + data)[-TAIL:]
        if self.left == 0 or (self.left < 0 and self.tail.endswith(b"\r\n0\r\n\r\n")):
            counts = COMPLETION_TOKENS.findall(self.tail)
            self.done.set_result(int(counts[-1]))


def clients_process(pipe: Any, port: int) -> None:
    """Clients of one process: a list of requests comes in, their completion tokens go out."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        clients: list[Client] = []
        while (requests := await loop.run_in_executor(None, pipe.recv)) is not None:
            while len(clients) < len(requests):
                _, client = await loop.create_connection(Client, "127.0.0.1", port)
                clients.append(client)
            asked = [client.ask(r) for client, r in zip(clients, requests, strict=False)]
            pipe.send(sum(await asyncio.gather(*asked)))

    asyncio.run(run())


@contextmanager
def server(options: Mapping[str, Any]) -> Any:
    """Port of a ``specjax serve`` process, once it is ready."""
    command = [sys.executable, "-c", SERVES, "serve", "--port", "0"]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            command += [flag] if value else []
        elif isinstance(value, list | tuple):
            command += [flag, ",".join(map(str, value))]
        else:
            command += [flag, "none" if value is None else str(value)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"http://[^ ]*:(\d+)", line):
                break
        else:
            raise ValueError(f"the server ended with status {process.wait()}")
        yield int(found[1])
    finally:
        process.terminate()
        process.wait()


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


def rate(waves: int, wave: Any) -> float:
    """Median tokens a second of waves, behind two that count nothing."""
    rates = []
    for i in range(waves + 2):
        started = time.perf_counter()
        tokens = wave()
        seconds = time.perf_counter() - started
        if i > 1:
            rates.append(tokens / seconds)
    return statistics.median(rates)


def directly(args: argparse.Namespace, engine: Any, prompts: list[Any]) -> dict[int, float]:
    params = sampling_params(args)
    name = "prompt" if isinstance(prompts[0], str) else "input_ids"
    found = {}
    for count in args.clients:

        def wave(count: int = count) -> int:
            outs = engine.generate(sampling_params=params, **{name: prompts[:count]})
            return sum(len(out["output_ids"]) for out in outs)

        found[count] = rate(args.waves, wave)
    return found


def through_http(
    args: argparse.Namespace, port: int, prompts: list[Any], *, stream: bool
) -> dict[int, float]:
    requests = [body_of(args, prompt, stream=stream) for prompt in prompts]
    context = multiprocessing.get_context("spawn")
    ends = []
    for _ in range(0, max(args.clients), CLIENTS_A_PROCESS):
        here, there = context.Pipe()
        context.Process(target=clients_process, args=(there, port), daemon=True).start()
        ends.append(here)
    found = {}
    for count in args.clients:

        def wave(count: int = count) -> int:
            used = []
            # a few clients are spread over processes as many are
            share = -(-count // len(ends))
            for i, at in enumerate(range(0, count, share)):
                ends[i].send(requests[at : min(at + share, count)])
                used.append(ends[i])
            return sum(end.recv() for end in used)

        found[count] = rate(args.waves, wave)
    for end in ends:
        end.send(None)
    return found


def main(door: str, argv: Sequence[str]) -> int:
    from specjax import Engine

    args = parse_arguments(door, argv)
    with tempfile.TemporaryDirectory() as folder:
        options = with_preset(engine_arguments(args), args.preset, Path(folder))
        options.setdefault("max_running_requests", max(args.clients))
        with Engine(**options) as engine:
            prompts = prompts_of(args, engine)
            direct = directly(args, engine, prompts)
            settings = common.engine_settings(engine)
        with server(options) as port:
            whole = through_http(args, port, prompts, stream=False)
            stream = through_http(args, port, prompts, stream=True)
    rows = [
        {
            "clients": count,
            "direct": direct[count],
            "whole": whole[count],
            "whole_ratio": whole[count] / direct[count],
            "stream": stream[count],
            "stream_ratio": stream[count] / direct[count],
        }
        for count in args.clients
    ]
    common.append_json(args.output, {"rows": rows, "settings": settings})
    print("{model}, {dtype}, {num_devices} x {device_kind}\n".format(**settings))
    print(common.table_of(COLUMNS, rows))
    return 0
