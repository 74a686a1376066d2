"""An engine in its own process that answers lines on standard input, and its client."""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from specjax import Engine

SECONDS = 120.0  # start-up time; no step takes longer unless it hangs


class Process:
    """Client: starts an engine with these options and calls it; ``modules`` are imported first."""

    def __init__(self, modules: Sequence[str] = (), **options: Any) -> None:
        said = json.dumps([modules, options], default=str)
        command = [sys.executable, str(Path(__file__)), said]
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
        """Wait until the engine listens; return its address."""
        if not self._started:
            self._address = self._answer()
            self._started = True
        return self._address

    def tell(self, name: str, **options: Any) -> None:
        """Send a call without waiting for the answer."""
        assert self.running.stdin is not None
        self.running.stdin.write(json.dumps([name, options], default=str) + "\n")
        self.running.stdin.flush()

    def ask(self, name: str, **options: Any) -> Any:
        """Call ``"state"`` or a method; an error is returned as ``{"error": ...}``."""
        assert self.address != ""
        self.tell(name, **options)
        return self._answer()

    def kill(self) -> None:
        """SIGKILL."""
        self.running.kill()
        self.running.wait(SECONDS)

    def close(self) -> None:
        """Let the process exit on its own, if it still runs."""
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


class ApartEngine(Engine):
    """A decode side with its prefill side in a process, in the form of ``DisaggregatedEngine``."""

    def __init__(
        self,
        model: str,
        *,
        prefill: Mapping[str, Any],
        modules: Sequence[str] = (),
        share_weights_with: Engine | None = None,
        **options: Any,
    ) -> None:
        there = options | dict(prefill) | {"disaggregation_address": "127.0.0.1:0"}
        self.process = Process(modules, model=model, disaggregation_mode="prefill", **there)
        try:
            super().__init__(
                model,
                share_weights_with=share_weights_with,
                disaggregation_mode="decode",
                disaggregation_address=self.process.address,
                **options,
            )
        except BaseException:
            self.process.close()
            raise
        assert self.wait_for_peer(SECONDS)

    def flush_cache(self) -> None:
        self.process.ask("flush_cache")
        super().flush_cache()

    def update_weights_from_disk(self, model_path: Any = None, **options: Any) -> None:
        self.process.ask("update_weights_from_disk", model_path=model_path, **options)
        super().update_weights_from_disk(model_path, **options)

    def update_weights_from_tensor(self, named_tensors: Any, **options: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tensors.npz"
            np.savez(file, **named_tensors)
            self.process.ask("update_weights_from_tensor", named_tensors=str(file), **options)
        super().update_weights_from_tensor(named_tensors, **options)

    def close(self) -> None:
        super().close()
        self.process.close()


def main() -> None:
    modules, arguments = json.loads(sys.argv[1])
    for module in modules:
        import_module(module)
    with Engine(**arguments) as engine:
        _say(engine.disaggregation_address or "here")
        for line in sys.stdin:
            name, options = json.loads(line)
            try:
                if name == "state":
                    count = engine.metrics.snapshot().prefilled_tokens
                    _say(engine.debug_state() | {"prefilled_tokens": count})
                    continue
                if name == "update_weights_from_tensor":
                    options["named_tensors"] = dict(np.load(options["named_tensors"]))
                _say(getattr(engine, name)(**options))
            except ValueError as error:
                _say({"error": str(error)})


def _say(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
