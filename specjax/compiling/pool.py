"""Functions compiled ahead of time, so that serving never compiles."""

import logging
import os
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jax.stages import Compiled, Lowered
from tqdm import tqdm

from specjax.compiling.cache import CompileCache, bypassed

logger = logging.getLogger(__name__)

# limited, since each compilation starts its own threads and autotuning shares the device
MAX_THREADS = 8
CompilerOptions = dict[str, str | bool] | None
# called by any thread with two numbers: functions that are ready, and all functions
on_progress: ContextVar[Callable[[int, int], None]] = ContextVar(
    "on_progress", default=lambda num_ready, num_all: None
)


@dataclass(frozen=True)
class CompiledFunction:
    """One function of a pool: where it came from, and its time and memory."""

    key: str  # key in the pool, as words
    is_hit: bool  # read from the cache, neither traced nor compiled
    seconds: float  # time to read it, or to trace, lower and compile it
    num_bytes: int | None  # size of its entry on disk; ``None`` if it is not stored
    argument_bytes: int  # device memory of its arguments
    temp_bytes: int  # temporary device memory while it runs
    output_bytes: int  # device memory of results that do not replace arguments


def usable_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Number of cores that this process may use, by its affinity and the quota of its container."""
    count = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # a quota of "max" does not limit it
        quota, period = quota_file.read_text().split()
        count = min(count, max(1, int(quota) // int(period)))
    return count


class _Job(NamedTuple):
    key: Hashable
    label: str
    function: Any
    arguments: tuple[Any, ...]
    options: CompilerOptions


class CompilePool(dict[Hashable, Compiled]):
    """Compiled functions by key; all registered functions are compiled together, in threads.

    Calling a compiled function with other shapes or dtypes raises instead of compiling again.
    ``cache`` has executables from earlier processes; its key must cover all that the functions
    close over. ``report`` describes each compiled function in the order of compiling. An added
    function that is used before :meth:`compile` is compiled at that use.
    """

    def __init__(self, cache: CompileCache | None = None) -> None:
        super().__init__()
        self.cache = cache
        self.shows_progress = False  # for functions that are compiled at their first use
        self.report: list[CompiledFunction] = []
        self._jobs: dict[Hashable, _Job] = {}

    def add(
        self,
        key: Hashable,
        function: Any,
        arguments: Sequence[Any],
        compiler_options: CompilerOptions = None,
    ) -> None:
        """Register a jitted function with abstract arguments under ``key``.

        The function must not be shared: JAX reuses an equal executable in memory, and one that came
        from JAX's own cache cannot be serialized. Pass a module-level function as
        ``jax.jit(partial(function))``; otherwise ValueError is raised.
        """
        if "." not in getattr(function.__wrapped__, "__qualname__", "."):
            remedy = "wrap it: jax.jit(partial(function))"
            raise ValueError(f"{function=} may be shared with other callers of jax.jit; {remedy}")
        label = " ".join(map(str, key)) if isinstance(key, tuple) else str(key)
        self._jobs[key] = _Job(key, label, function, tuple(arguments), compiler_options)

    @property
    def temporary_bytes(self) -> int:
        """Device memory that any function needs besides state, with results of another one.

        The second call of a round takes the logits that the first one returns.
        """
        temporary = max((function.temp_bytes for function in self.report), default=0)
        return temporary + max((function.output_bytes for function in self.report), default=0)

    def has(self, key: Hashable) -> bool:
        """Whether a function is compiled, or added to be compiled."""
        return key in self or key in self._jobs

    def __missing__(self, key: Hashable) -> Compiled:
        """Compile an added function at its first use."""
        self._compile([self._jobs.pop(key)], self.shows_progress)
        return self[key]

    def compile(self, *, show_progress: bool) -> None:
        """Compile the added functions or read them from the cache; only this thread traces."""
        jobs, self._jobs = list(self._jobs.values()), {}
        self._compile(jobs, show_progress)

    def _compile(self, jobs: Sequence[_Job], show_progress: bool) -> None:
        cache, started = self.cache, time.perf_counter()
        names = {} if cache is None else {job.key: cache.key(*job[1:]) for job in jobs}
        done: dict[Hashable, CompiledFunction] = {}
        report = on_progress.get()
        report(0, len(jobs))
        # tqdm: None shows the bar on a terminal only; elsewhere log lines suffice
        is_off = None if show_progress else True
        bar = tqdm(total=len(jobs), desc="compiling", unit="fn", disable=is_off)

        def finish(
            job: _Job, compiled: Compiled, num_bytes: int | None, began: float, *, is_hit: bool
        ) -> None:
            facts = job.label, is_hit, time.perf_counter() - began, num_bytes
            analysis, kinds = compiled.memory_analysis(), ("argument", "temp", "output", "alias")
            arguments, temporary, results, replaced = (
                int(getattr(analysis, f"{kind}_size_in_bytes", 0)) for kind in kinds
            )
            memory = arguments, temporary, results - replaced
            done[job.key] = CompiledFunction(*facts, *memory)
            self[job.key] = compiled
            bar.set_postfix_str(f"{job.label}{' (cached)' if is_hit else ''}")
            bar.update()
            report(len(done), len(jobs))
            if bar.disable and show_progress and not is_hit:  # no terminal
                line = f"{len(done)} of {len(jobs)} functions ready"
                logger.info(line)
                if not logger.isEnabledFor(logging.INFO):
                    print(line, file=sys.stderr)

        def load(job: _Job) -> None:
            began = time.perf_counter()
            if cache is not None and (stored := cache.load(names[job.key], job.arguments)):
                finish(job, *stored, began, is_hit=True)

        def build(job: _Job, lowered: Lowered, spent: float, extra: dict[str, str | bool]) -> None:
            began = time.perf_counter() - spent
            compiled = lowered.compile(compiler_options={**(job.options or {}), **extra} or None)
            num_bytes = None if cache is None else cache.store(names[job.key], compiled)
            finish(job, compiled, num_bytes, began, is_hit=False)

        num_threads = min(MAX_THREADS, usable_cores())
        with bar, ExitStack() as stack, ThreadPoolExecutor(num_threads) as executor:
            try:
                list(executor.map(load, jobs))
                missing = [job for job in jobs if job.key not in done]
                extra = stack.enter_context(bypassed()) if missing and cache is not None else {}
                pending = []
                for job in missing:
                    began = time.perf_counter()
                    lowered = job.function.lower(*job.arguments)
                    spent = time.perf_counter() - began  # excludes time in the queue
                    pending.append(executor.submit(build, job, lowered, spent, extra))
                for future in pending:
                    future.result()
            except BaseException:
                # an interrupt must not wait for jobs that have not started
                executor.shutdown(wait=False, cancel_futures=True)
                raise
        logger.info(
            "%d function%s in %.1f s: %d compiled, %d read from the cache",
            len(jobs),
            "s" * (len(jobs) != 1),
            time.perf_counter() - started,
            len(missing),
            len(jobs) - len(missing),
        )
        self.report += [done[job.key] for job in jobs]
