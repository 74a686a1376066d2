"""A ``specjax serve`` process, and clients that ask it as fast as it answers."""

import asyncio
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

CLIENTS_A_PROCESS = 8
SERVES = "import sys; from specjax.cli import main; sys.exit(main())"
TAIL = 4096  # bytes of an answer that are kept: its end has the counts
COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


class Client(asyncio.Protocol):
    """One connection: sends a request and waits for the end of its answer."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.done: asyncio.Future[int] | None = None

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
                self._end(ValueError(data.decode(errors="replace")))
                return
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            self.left = int(length[1]) - len(body) if length else -1
        elif self.left > 0:
            self.left -= len(data)
        self.tail = (self.tail + data)[-TAIL:]
        if self.left == 0 or (self.left < 0 and self.tail.endswith(b"\r\n0\r\n\r\n")):
            counts = COMPLETION_TOKENS.findall(self.tail)
            self._end(int(counts[-1]) if counts else ValueError(self.tail.decode(errors="replace")))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(ConnectionError(f"the server closed a connection: {exc}"))

    def _end(self, result: int | Exception) -> None:
        if self.done is None or self.done.done():
            return
        if isinstance(result, int):
            self.done.set_result(result)
        else:
            self.done.set_exception(result)


def clients_process(pipe: Any, port: int) -> None:
    """Clients of one process: each gets requests to send one after the other."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        clients: dict[int, Client] = {}

        async def send(index: int, requests: Sequence[bytes]) -> int:
            client = clients.get(index)
            # the server closes connections that were idle for long
            if client is None or client.transport.is_closing():
                _, client = await loop.create_connection(Client, "127.0.0.1", port)
                clients[index] = client
            return sum([await client.ask(request) for request in requests])

        while (shares := await loop.run_in_executor(None, pipe.recv)) is not None:
            try:
                answer = sum(await asyncio.gather(*map(send, range(len(shares)), shares)))
            except (ValueError, OSError) as error:
                answer = error
            pipe.send(answer)

    asyncio.run(run())


class Clients:
    """Clients of a server, spread over processes."""

    def __init__(self, port: int, most: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        for _ in range(0, most, CLIENTS_A_PROCESS):
            here, there = context.Pipe()
            context.Process(target=clients_process, args=(there, port), daemon=True).start()
            self._pipes.append(here)

    def ask(self, shares: Sequence[Sequence[bytes]]) -> int:
        """Completion tokens of requests, of which each client sends a share one after the other.

        Raises:
            ValueError, OSError: what the first answer that failed was, or why there was none.
        """
        size = -(-len(shares) // len(self._pipes))
        parts = [shares[at : at + size] for at in range(0, len(shares), size)]
        pipes = self._pipes[: len(parts)]
        for pipe, part in zip(pipes, parts, strict=True):
            pipe.send(part)
        answers = [pipe.recv() for pipe in pipes]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return sum(answers)

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in self._pipes:
            pipe.send(None)


@contextmanager
def server(options: Mapping[str, Any]) -> Iterator[int]:
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
