"""JAX's persistent compilation cache: where it lies, and how to compile past it."""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from specjax.compiling.folder import PrivateFolder

logger = logging.getLogger(__name__)

_bypass_lock = threading.Lock()
_num_bypasses = 0
_was_enabled = True


def enable_compile_cache(directory: str | Path | None) -> Path | None:
    """Point JAX's persistent compilation cache at a folder.

    Args:
        directory: a folder, ``"auto"`` for the one JAX is already configured with or else
            ``specjax`` in the user's cache folder, or ``None`` to leave JAX's setting alone.

    Returns:
        The folder in use, if any.

    Raises:
        ValueError: if a folder that was asked for by name cannot be made, or is not the user's
            alone.
    """
    if directory is None:
        return None
    name = os.fspath(directory)
    if not name or ":/" in name:  # of a URL; a path object has dropped its second slash
        raise ValueError(
            f"compile_cache_dir={str(directory)!r} is no local folder; executables are kept in one "
            "alone, and JAX takes a URL for its own cache from JAX_COMPILATION_CACHE_DIR"
        )
    configured = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    is_auto = directory == "auto"
    if is_auto:
        if configured is not None:
            return Path(configured)
        directory = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "specjax"
    path = Path(directory)
    try:
        path = path.expanduser()
        PrivateFolder(path)
    except (OSError, ValueError, RuntimeError) as error:  # the last: a home that is not known
        if not is_auto:
            reason = "is refused" if isinstance(error, ValueError) else "cannot be made"
            raise ValueError(f"compile_cache_dir={str(path)!r} {reason}: {error}") from error
        logger.warning("compiled functions are not kept: %s; pass compile_cache_dir", error)
        return None
    if configured != str(path):
        jax.config.update("jax_compilation_cache_dir", str(path))
        # the cache object is made at the first compile and would keep its first folder
        compilation_cache.reset_cache()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


@contextmanager
def bypassed() -> Iterator[dict[str, str | bool]]:
    """Compile without JAX's persistent cache inside.

    An executable that came out of that cache cannot be serialized: what is written then has no code
    in it on a CPU (jax 0.10.2, 0.11.2 and 0.12.0.1) and fails when it runs, not when it is loaded.

    The setting is the whole process's: what other threads compile meanwhile is not kept either.

    Yields:
        Compiler options that keep XLA's autotuning results, which go with the cache otherwise.
    """
    global _num_bypasses, _was_enabled
    options = _autotune_options()
    with _bypass_lock:
        _num_bypasses += 1
        if _num_bypasses == 1:
            _was_enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
            _set_enabled(False)
    try:
        yield options
    finally:
        with _bypass_lock:
            _num_bypasses -= 1
            if _num_bypasses == 0:
                _set_enabled(_was_enabled)


def _set_enabled(value: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", value)
    # whether the cache is used is decided once, at the first compile
    compilation_cache.reset_cache()


def _autotune_options() -> dict[str, str | bool]:
    """What JAX itself sets while its cache is on."""
    folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    name = "xla_gpu_per_fusion_autotune_cache_dir"
    wanted = jax.config.jax_persistent_cache_enable_xla_caches or ""  # type: ignore[attr-defined]
    if folder is None or jax.default_backend() != "gpu" or not (wanted == "all" or name in wanted):
        return {}
    return {
        name: str(Path(folder) / name),
        "xla_gpu_experimental_autotune_cache_mode": "AUTOTUNE_CACHE_MODE_UPDATE",
    }
