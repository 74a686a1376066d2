"""JAX's persistent compilation cache: where it lies, and how to compile past it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

_BYPASS = threading.RLock()


def set_cache_folder(path: Path) -> None:
    """Let JAX keep all that it compiles in a folder."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _set("jax_compilation_cache_dir", str(path))


@contextmanager
def bypassed() -> Iterator[dict[str, str | bool]]:
    """Compile without JAX's persistent cache inside; one thread at a time, others wait.

    An executable that came out of that cache cannot be serialized: it fails when it runs, not when
    it is loaded. The setting is the whole process's: what other threads compile meanwhile is not
    kept either. Yields compiler options that keep XLA's autotuning results, which go with the cache
    otherwise.
    """
    with _BYPASS:
        options = _autotune_options()
        was_enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
        _set("jax_enable_compilation_cache", False)
        try:
            yield options
        finally:
            _set("jax_enable_compilation_cache", was_enabled)


def _set(name: str, value: object) -> None:
    jax.config.update(name, value)
    # the cache object, and whether it is used, would stay those of the first compile
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
