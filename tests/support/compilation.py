"""JAX settings and events that tests observe or restore."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental.compilation_cache import compilation_cache

CACHE_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@contextmanager
def kept_cache_settings() -> Iterator[None]:
    """Restore settings of the persistent compile cache that changed inside."""
    before = {name: getattr(jax.config, name) for name in CACHE_SETTINGS}
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """Yield a list that gets one event for every function traced or compiled inside."""
    events: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event.startswith("/jax/core/compile/"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
