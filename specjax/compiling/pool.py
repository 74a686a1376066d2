"""Functions compiled ahead of time, so that serving never compiles."""

import logging
import os
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from jax.stages import Compiled, Lowered
from tqdm import tqdm

from specjax.compiling import keys
from specjax.compiling.cache import CompileCache
from specjax.compiling.jax_cache import bypassed
from specjax.compiling.jax_cache import enable_compile_cache as enable_compile_cache

logger = logging.getLogger(__name__)

# each compilation has threads of its own, and autotuning shares the device
MAX_THREADS = 8
CompilerOptions = dict[str, str | bool] | None


@dataclass(frozen=True)
class CompiledFunction:
    """How one function came to be.

    Attributes:
        key: its key in the pool.
        is_hit: it was read from the cache.
        is_traced: it was traced and lowered, since sources or configuration are new to the cache.
        seconds: of reading, tracing, lowering and compiling.
        num_bytes: of its entry on disk; ``None`` where it is not kept.
        argument_bytes: device memory of its arguments.
        temp_bytes: device memory that it takes while it runs.
        alias_bytes: of its arguments, what its results are written into.
        code_bytes: of its code.
    """

    key: Hashable
    is_hit: bool
    is_traced: bool
    seconds: float
    num_bytes: int | None
    argument_bytes: int
    temp_bytes: int
    alias_bytes: int
    code_bytes: int

    @property
    def label(self) -> str:
        """The key as words."""
        return label_of(self.key)


@dataclass(frozen=True)
class _Job:
    key: Hashable
    function: Any
    arguments: Sequence[Any]
    options: CompilerOptions

    def lower(self) -> Lowered:
        return self.function.lower(*self.arguments)


class CompilePool:
    """Compiled functions by key; everything registered is compiled at once, in threads.

    Calling a compiled function with other shapes or dtypes raises instead of compiling again.

    Attributes:
        cache: executables of earlier processes; what it has is neither traced nor compiled. It has
            to be bound to all that the functions close over.
    """

    def __init__(self, cache: CompileCache | None = None) -> None:
        self.cache = cache
        self._jobs: list[_Job] = []
        self._compiled: dict[Hashable, Compiled] = {}
        self._report: list[CompiledFunction] = []

    def add(
        self,
        key: Hashable,
        function: Any,
        arguments: Sequence[Any],
        compiler_options: CompilerOptions = None,
    ) -> None:
        """Register a jitted function with abstract arguments under ``key``."""
        self._jobs.append(_Job(key, function, tuple(arguments), compiler_options))

    def compile(self, *, show_progress: bool) -> list[CompiledFunction]:
        """Compile what was added, or read it from the cache.

        Tracing happens in this thread, reading and compiling in others.

        Returns:
            What became of each function, in the order in which they were added.
        """
        jobs, self._jobs = self._jobs, []
        started = time.perf_counter()
        done: dict[Hashable, CompiledFunction] = {}
        bar = tqdm(total=len(jobs), desc="compiling", unit="fn", disable=not show_progress)

        def finish(job: _Job, work: Callable[[], CompiledFunction | None]) -> None:
            function = work()
            if function is not None:
                done[job.key] = function
                bar.set_postfix_str(f"{function.label}{' (cached)' if function.is_hit else ''}")
                bar.update()

        with bar, ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as executor:
            try:
                if self.cache is not None:
                    list(executor.map(lambda job: finish(job, lambda: self._load(job)), jobs))
                missing = [job for job in jobs if job.key not in done]
                if missing:
                    context: AbstractContextManager[dict[str, str | bool]] = nullcontext({})
                    if self.cache is not None:
                        context = bypassed()
                    with context as extra:
                        pending = []
                        for job in missing:
                            work = self._build(job, extra)
                            pending.append(executor.submit(finish, job, work))
                        for future in pending:
                            future.result()
            except BaseException:
                # an interrupt must not wait for what has not begun
                executor.shutdown(wait=False, cancel_futures=True)
                raise
        seconds = time.perf_counter() - started
        num_hits = sum(function.is_hit for function in done.values())
        logger.info(
            "%d functions in %.1f s: %d compiled, %d read from the cache",
            len(jobs),
            seconds,
            len(jobs) - num_hits,
            num_hits,
        )
        report = [done[job.key] for job in jobs]
        self._report += report
        return report

    @property
    def report(self) -> tuple[CompiledFunction, ...]:
        """What became of each function so far."""
        return tuple(self._report)

    def _load(self, job: _Job) -> CompiledFunction | None:
        assert self.cache is not None
        started = time.perf_counter()
        found = self.cache.load(label_of(job.key), self._function_key(job), job.arguments)
        if found is None:
            return None
        self._compiled[job.key], num_bytes = found
        return self._described(job, started, num_bytes, is_hit=True, is_traced=False)

    def _build(
        self, job: _Job, extra: dict[str, str | bool]
    ) -> Callable[[], CompiledFunction | None]:
        """Trace and lower now; returns what is left to do."""
        started = time.perf_counter()
        lowered = job.lower()
        waited = time.perf_counter()

        def compile_and_store() -> CompiledFunction:
            # time in the executor's queue is no work
            began = started + time.perf_counter() - waited
            cache, label, entry = self.cache, label_of(job.key), ""
            found = num_bytes = None
            if cache is not None:
                key = self._function_key(job)
                entry = keys.lowered_key(job.key, lowered, job.options) or key
                found = cache.load_entry(label, entry, job.arguments)
            if found is not None:
                self._compiled[job.key], num_bytes = found
            else:
                options = {**(job.options or {}), **extra} or None
                compiled = lowered.compile(compiler_options=options)
                self._compiled[job.key] = compiled
                if cache is not None:
                    num_bytes = cache.store(label, entry, compiled)
            if cache is not None and num_bytes is not None:
                cache.link(label, key, entry)
            return self._described(job, began, num_bytes, is_hit=found is not None, is_traced=True)

        return compile_and_store

    def _function_key(self, job: _Job) -> str:
        assert self.cache is not None
        return self.cache.function_key(job.key, job.function, job.arguments, job.options)

    def _described(
        self, job: _Job, started: float, num_bytes: int | None, *, is_hit: bool, is_traced: bool
    ) -> CompiledFunction:
        seconds = time.perf_counter() - started
        memory = self._compiled[job.key].memory_analysis()

        def size(name: str) -> int:
            return int(getattr(memory, f"{name}_size_in_bytes", 0))

        return CompiledFunction(
            key=job.key,
            is_hit=is_hit,
            is_traced=is_traced,
            seconds=seconds,
            num_bytes=num_bytes,
            argument_bytes=size("argument"),
            temp_bytes=size("temp"),
            alias_bytes=size("alias"),
            code_bytes=size("generated_code"),
        )

    def __getitem__(self, key: Hashable) -> Compiled:
        return self._compiled[key]

    def __contains__(self, key: Hashable) -> bool:
        return key in self._compiled

    def __len__(self) -> int:
        return len(self._compiled)


def label_of(key: Hashable) -> str:
    """A pool's key as words."""
    return " ".join(map(str, key)) if isinstance(key, tuple) else str(key)
