"""An engine in a process of its own, which answers lines on standard input; and who asks it."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from specjax import Engine

SECONDS = 120.0  # to start; nothing takes longer unless it hangs


class Process:
    """The other end: starts an engine of these options, and asks it."""

    def __init__(self, **options: Any) -> None:
        command = [sys.executable, str(Path(__file__)), json.dumps(options, default=str)]
        self.running = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self._answers: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self._started = False

    @property
    def address(self) -> str:
        """Where it listens, once it does."""
        if not self._started:
            self._address = self._answer()
            self._started = True
        return self._address

    def tell(self, name: str, **options: Any) -> None:
        """Ask something without waiting for the answer."""
        assert self.running.stdin is not None
        self.running.stdin.write(json.dumps([name, options]) + "\n")
        self.running.stdin.flush()

    def ask(self, name: str, **options: Any) -> Any:
        """``"state"`` or ``"generate"``; an error comes as ``{"error": ...}``."""
        assert self.address != ""
        self.tell(name, **options)
        return self._answer()

    def kill(self) -> None:
        """SIGKILL."""
        self.running.kill()
        self.running.wait(SECONDS)

    def close(self) -> None:
        """Let it end by itself, if it is not dead."""
        assert self.running.stdin is not None
        assert self.running.stdout is not None
        try:
            self.running.stdin.close()
            self.running.wait(SECONDS)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.kill()

    def _read(self) -> None:
        assert self.running.stdout is not None
        with self.running.stdout:
            for line in self.running.stdout:
                self._answers.put(line)
        self._answers.put('"it has ended"')

    def _answer(self) -> Any:
        return json.loads(self._answers.get(timeout=SECONDS))


def main() -> None:
    with Engine(**json.loads(sys.argv[1])) as engine:
        _say(engine.disaggregation_address or "here")
        for line in sys.stdin:
            name, options = json.loads(line)
            try:
                if name == "state":
                    count = engine.metrics.snapshot().prefilled_tokens
                    _say(engine.debug_state() | {"prefilled_tokens": count})
                else:
                    _say(engine.generate(**options))
            except ValueError as error:
                _say({"error": str(error)})


def _say(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
