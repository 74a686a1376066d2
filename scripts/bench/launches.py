"""What rounds launch on a GPU, from a profile."""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData


def table(launches: Counter[str], microseconds: Counter[str], num_rows: int = 20) -> str:
    lines = [f"{'us a round':>10}  {'launches':>8}  kernel"]
    for name, time in microseconds.most_common(num_rows):
        lines.append(f"{time:10.1f}  {launches[name]:8.1f}  {name[:90]}")
    busy, count = microseconds.total(), launches.total()
    return "\n".join([*lines, f"{busy:10.1f}  {count:8.1f}  all {len(launches)}"])


def profile_rounds(run: Callable[[], object], num_rounds: int) -> tuple[Counter[str], Counter[str]]:
    """:func:`read_launches` of ``run``, which dispatches the rounds and waits for the last.

    XLA launches the kernels of its CUDA graphs one by one while it is profiled, unless
    ``XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true`` is set.
    """
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        run()
        jax.profiler.stop_trace()
        (file,) = Path(folder).rglob("*.xplane.pb")
        return read_launches(ProfileData.from_file(str(file)).planes, num_rounds)


def read_launches(planes: Iterable[Any], num_rounds: int) -> tuple[Counter[str], Counter[str]]:
    """Launches and microseconds on the device by the name of a kernel, of one round, averaged."""
    launches: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    for plane in planes:
        for line in plane.lines:
            # the other lines of a device span what its streams run
            if plane.name.startswith("/device:GPU") and line.name.startswith("Stream"):
                for event in line.events:
                    launches[event.name] += 1 / num_rounds  # type: ignore[assignment]
                    microseconds[event.name] += event.duration_ns / 1e3 / num_rounds
    return launches, microseconds
