"""``specjax serve`` as a process."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from specjax.cli.commands import API_KEY
from specjax.testing import Client

COMMAND = [sys.executable, "-P", "-c", "import sys; from specjax.cli import main; sys.exit(main())"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Convert engine arguments to options of the command."""
    found = []
    for name, value in arguments.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        found += [f"--{name.replace('_', '-')}", text]
    return found


@contextmanager
def serving(
    arguments: Mapping[str, Any],
    *more: str,
    key: str | None = None,
    program: Sequence[str] = COMMAND,
    descriptors: int | None = None,
) -> Iterator[tuple[Any, Client]]:
    """The process, which may not be ready yet, and a client of it."""
    port = free_port()
    command = [*program, "serve", *flags(arguments), "--port", str(port), *more]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    variables = {} if key is None else {API_KEY: key}
    if descriptors is not None:
        command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command]
    process = subprocess.Popen(command, env=os.environ | variables, **pipes)
    try:
        yield process, Client(port, **({} if key is None else {"authorization": f"Bearer {key}"}))
    finally:
        process.kill()
        process.communicate()


def wait_until_ready(process: Any, client: Client) -> set[int]:
    """Wait until the server is ready; return the answers of ``/health`` before that."""
    seen: set[int] = set()
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            try:
                seen.add(client.get("/health").status)
            except OSError:
                time.sleep(0.01)  # nothing listens yet

    thread = threading.Thread(target=look)
    thread.start()
    line = process.stdout.readline()
    over.set()
    thread.join()
    assert line.endswith(f" at http://127.0.0.1:{client.port}\n"), process.stderr.read()
    return seen
