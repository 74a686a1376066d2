"""Functions compiled ahead of time, so that serving never compiles."""

import logging
import os
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax.stages import Compiled, Lowered
from tqdm import tqdm

logger = logging.getLogger(__name__)

# each compilation has threads of its own, and autotuning shares the device
MAX_THREADS = 8
CompilerOptions = dict[str, str | bool] | None


def enable_compile_cache(directory: str | Path | None) -> Path | None:
    """Point JAX's persistent compilation cache at a folder.

    Args:
        directory: a folder, ``"auto"`` for the one JAX is already configured with or else
            ``specjax`` in the user's cache folder, or ``None`` to leave JAX's setting alone.

    Returns:
        The folder in use, if any.

    Raises:
        ValueError: if a folder that was asked for by name cannot be made.
    """
    if directory is None:
        return None
    configured = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    is_auto = directory == "auto"
    if is_auto:
        if configured is not None:
            return Path(configured)
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = Path(base) / "specjax"
    path = Path(directory).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        if not is_auto:
            raise ValueError(f"compile_cache_dir={str(path)!r} cannot be made: {error}") from error
        logger.warning("compiled functions are not kept: %s; pass compile_cache_dir", error)
        return None
    if configured != str(path):
        jax.config.update("jax_compilation_cache_dir", str(path))
        from jax.experimental.compilation_cache import compilation_cache

        # the cache object is made at the first compile and would keep its first folder
        compilation_cache.reset_cache()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


class CompilePool:
    """Compiled functions by key; everything registered is compiled at once, in threads.

    Calling a compiled function with other shapes or dtypes raises instead of compiling again.
    """

    def __init__(self) -> None:
        self._jobs: list[tuple[Hashable, Callable[[], Lowered], CompilerOptions]] = []
        self._compiled: dict[Hashable, Compiled] = {}

    def add(
        self,
        key: Hashable,
        function: Any,
        arguments: Sequence[Any],
        compiler_options: CompilerOptions = None,
    ) -> None:
        """Register a jitted function with abstract arguments under ``key``."""
        self._jobs.append((key, lambda: function.lower(*arguments), compiler_options))

    def compile(self, *, show_progress: bool) -> None:
        """Compile what was added, tracing in this thread and compiling in others."""
        jobs, self._jobs = self._jobs, []
        started = time.perf_counter()
        bar = tqdm(total=len(jobs), desc="compiling", unit="fn", disable=not show_progress)

        def finish(key: Hashable, lowered: Lowered, options: CompilerOptions) -> None:
            self._compiled[key] = lowered.compile(compiler_options=options)
            bar.set_postfix_str(" ".join(map(str, key)) if isinstance(key, tuple) else str(key))
            bar.update()

        with bar, ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as executor:
            pending = [
                executor.submit(finish, key, lower(), options) for key, lower, options in jobs
            ]
            for future in pending:
                future.result()
        seconds = time.perf_counter() - started
        logger.info("compiled %d functions in %.1f s", len(jobs), seconds)

    def __getitem__(self, key: Hashable) -> Compiled:
        return self._compiled[key]

    def __len__(self) -> int:
        return len(self._compiled)
