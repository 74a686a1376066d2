"""Engines over the tiny checkpoint, and questions to them that tests share."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax import Engine

from .settings import kept_cache_settings
from .tiny_checkpoints import write_head, write_target

STEPS = 3


@dataclass
class Files:
    """Directories that all engines of a module share."""

    target: Path
    head: Path
    cache: Path

    def engine(self, *, speculative: bool = True, **changes: Any) -> Engine:
        arguments: dict[str, Any] = {
            "page_size": 4,
            "max_running_requests": 2,
            "chunked_prefill_size": 16,
            "compile_cache_dir": self.cache,
        }
        if speculative:
            arguments |= {
                "draft": self.head,
                "speculative_algorithm": "EAGLE3",
                "speculative_num_steps": STEPS,
            }
        arguments |= changes
        return Engine(arguments.pop("target", self.target), **arguments)

    def small(self, **changes: Any) -> Engine:
        """An engine with as little to compile as can be."""
        return self.engine(**({"max_running_requests": 1, "chunked_prefill_size": 1} | changes))


@contextmanager
def engine_files(root: Path) -> Iterator[Files]:
    """Written checkpoints; the compile cache is in the same folder."""
    with kept_cache_settings():
        yield Files(write_target(root / "target"), write_head(root / "head"), root / "cache")


def num_held(engine: Engine) -> int:
    """Pages of running requests, once the engine's thread has done what it was asked for."""
    allocator, cache = engine._scheduler._allocator, engine._scheduler._budget._cache
    return engine._loop.run(
        lambda: allocator.num_pages - 1 - allocator.num_free - (cache.num_pages if cache else 0)
    )


def is_idle(engine: Engine) -> bool:
    """Whether the engine has forgotten every call, once its thread did what it was asked for."""
    loop, scheduler = engine._loop, engine._scheduler
    if loop.run(lambda: scheduler.has_work):
        return False
    deadline = time.monotonic() + 5.0
    while loop.run(lambda: bool(loop._calls or loop._by_rid)):  # their callers are told last
        if time.monotonic() > deadline:
            return False
    return True
