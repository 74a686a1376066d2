"""What rounds launch on a GPU, from a profile: kernels and calls of the CUDA driver."""

import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

# calls that give the device work; everything else the driver is asked for is of no interest
LAUNCH_CALLS = ("cuLaunchKernel", "cuLaunchKernelEx", "cuGraphLaunch", "cuLaunchCooperativeKernel")


@dataclass(frozen=True)
class Launches:
    """Figures of one round, averaged.

    Attributes:
        kernels: launches by the name of the kernel.
        microseconds: time on the device by the name of the kernel.
        calls: calls of the driver that launch something, by name. A CUDA graph is one
            ``cuGraphLaunch``, however many kernels it holds.
    """

    kernels: Mapping[str, float]
    microseconds: Mapping[str, float]
    calls: Mapping[str, float]

    @property
    def busy(self) -> float:
        """Milliseconds that kernels run, added up."""
        return sum(self.microseconds.values()) / 1e3

    def table(self, num_rows: int = 20) -> str:
        """The kernels that take most, and the launches, as lines of text."""
        lines = [f"{'us a round':>10}  {'launches':>8}  kernel"]
        ordered = sorted(self.microseconds.items(), key=lambda item: -item[1])
        for name, time in ordered[:num_rows]:
            lines.append(f"{time:10.1f}  {self.kernels[name]:8.1f}  {name[:90]}")
        lines.append(
            f"{1e3 * self.busy:10.1f}  {sum(self.kernels.values()):8.1f}  all {len(ordered)}"
        )
        calls = ", ".join(f"{count:.1f} {name}" for name, count in sorted(self.calls.items()))
        lines.append(f"driver calls a round: {calls or 'none seen'}")
        return "\n".join(lines)


def profile_rounds(run: Callable[[], object], num_rounds: int) -> Launches:
    """Profile ``run``, which dispatches ``num_rounds`` rounds and waits for the last.

    XLA launches the kernels of its CUDA graphs one by one while it is profiled, unless
    ``XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true`` is set.
    """
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, create_perfetto_trace=True)
        run()
        jax.profiler.stop_trace()
        (file,) = Path(folder).rglob("perfetto_trace.json.gz")
        trace = json.loads(gzip.decompress(file.read_bytes()))
    return read_launches(trace["traceEvents"] if isinstance(trace, dict) else trace, num_rounds)


def read_launches(events: Iterable[Mapping[str, Any]], num_rounds: int) -> Launches:
    """The figures in the events of a trace, in Chrome's format."""
    events = list(events)
    processes = _names(events, "process_name", "pid")
    threads = _names(events, "thread_name", "pid", "tid")
    kernels: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        if event.get("ph") != "X":
            continue
        name = event["name"]
        if "GPU" not in processes.get((event["pid"],), ""):
            if name in LAUNCH_CALLS:
                calls[name] += 1
        elif "Stream" in threads.get((event["pid"], event.get("tid")), ""):
            kernels[name] += 1
            microseconds[name] += event["dur"]

    def mean(counter: Counter[str]) -> dict[str, float]:
        return {name: value / num_rounds for name, value in counter.items()}

    return Launches(mean(kernels), mean(microseconds), mean(calls))


def _names(
    events: Iterable[Mapping[str, Any]], kind: str, *keys: str
) -> dict[tuple[Any, ...], str]:
    return {
        tuple(event.get(key) for key in keys): event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event["name"] == kind
    }
