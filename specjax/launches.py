"""What rounds launch on a GPU, from a profile."""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData


@dataclass(frozen=True)
class Launches:
    """Figures of one round, averaged.

    Attributes:
        kernels: launches by the name of the kernel.
        microseconds: time on the device by the name of the kernel.
    """

    kernels: Mapping[str, float]
    microseconds: Mapping[str, float]

    @property
    def busy(self) -> float:
        """Milliseconds that kernels run, added up."""
        return sum(self.microseconds.values()) / 1e3

    def table(self, num_rows: int = 20) -> str:
        """The kernels that take most as lines of text."""
        lines = [f"{'us a round':>10}  {'launches':>8}  kernel"]
        ordered = sorted(self.microseconds.items(), key=lambda item: -item[1])
        for name, time in ordered[:num_rows]:
            lines.append(f"{time:10.1f}  {self.kernels[name]:8.1f}  {name[:90]}")
        lines.append(
            f"{1e3 * self.busy:10.1f}  {sum(self.kernels.values()):8.1f}  all {len(ordered)}"
        )
        return "\n".join(lines)


def profile_rounds(run: Callable[[], object], num_rounds: int) -> Launches:
    """Profile ``run``, which dispatches ``num_rounds`` rounds and waits for the last.

    XLA launches the kernels of its CUDA graphs one by one while it is profiled, unless
    ``XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true`` is set.
    """
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        run()
        jax.profiler.stop_trace()
        (file,) = Path(folder).rglob("*.xplane.pb")
        return read_launches(ProfileData.from_file(str(file)).planes, num_rounds)


def read_launches(planes: Iterable[Any], num_rounds: int) -> Launches:
    """The figures in a profile: planes of lines of events, as ``jax.profiler.ProfileData`` has."""
    kernels: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    for plane in planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            # the other lines of a device span what its streams run
            if line.name.startswith("Stream"):
                for event in line.events:
                    kernels[event.name] += 1
                    microseconds[event.name] += event.duration_ns / 1e3

    def mean(counter: Counter[str]) -> dict[str, float]:
        return {name: value / num_rounds for name, value in counter.items()}

    return Launches(mean(kernels), mean(microseconds))
