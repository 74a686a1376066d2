"""Engines over the tiny checkpoint, and questions to them that tests share."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax import Engine
from specjax.testing.files import write_head, write_target

STEPS = 3


@dataclass
class Files:
    """Directories that all engines share."""

    target: Path
    head: Path
    cache: Path

    def arguments(self, *, speculative: bool = True, **changes: Any) -> dict[str, Any]:
        """Those of an engine over the tiny model, or over a ``target`` of its kind."""
        arguments: dict[str, Any] = {
            "model": changes.pop("target", self.target),
            "page_size": 4,
            "max_running_requests": 2,
            "batch_buckets": (2,),
            "chunked_prefill_size": 16,
            "compile_cache_dir": self.cache,
        }
        if speculative:
            arguments |= {
                "draft": self.head,
                "speculative_algorithm": "EAGLE3",
                "speculative_num_steps": STEPS,
            }
        return arguments | changes

    def engine(
        self, *, speculative: bool = True, kind: type[Engine] = Engine, **changes: Any
    ) -> Engine:
        arguments = self.arguments(speculative=speculative, **changes)
        return kind(arguments.pop("model"), **arguments)

    def small(self, **changes: Any) -> Engine:
        """An engine with as little to compile as can be."""
        sizes: dict[str, Any] = {
            "max_running_requests": 1,
            "batch_buckets": (1,),
            "chunked_prefill_size": 1,
        }
        return self.engine(**(sizes | changes))


def engine_files(root: Path, cache: Path) -> Files:
    """Checkpoints written below a folder."""
    return Files(write_target(root / "target"), write_head(root / "head"), cache)


def num_held(engine: Engine) -> int:
    """Pages of running requests, once the engine's thread has done what it was asked for."""
    return engine.debug_state()["pages_held"]


def is_idle(engine: Engine) -> bool:
    """Whether the engine has forgotten every call, once its thread did what it was asked for."""
    state = engine.debug_state()
    if state["running"] or state["waiting"]:
        return False
    deadline = time.monotonic() + 5.0
    while engine.debug_state()["calls"]:  # their callers are told last
        if time.monotonic() > deadline:
            return False
    return True
