"""Engines over the tiny checkpoints, and checks of their state."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax import Engine, SamplingParams
from specjax.testing.dense import Job, dense_decode
from specjax.testing.files import write_head, write_target

STEPS = 3


@dataclass
class Files:
    """Folders of a target, of its EAGLE-3 head, and of the compile cache that engines share."""

    target: Path
    head: Path
    cache: Path | None = None

    def arguments(self, *, speculative: bool = True, **changes: Any) -> dict[str, Any]:
        """Return engine arguments for the tiny model, or for a similar ``target``."""
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
        """Create an engine; it drafts with the head unless ``speculative`` is False.

        It compiles each function at its first use, unless ``compile_on_use`` is False.
        """
        changes.setdefault("compile_on_use", True)
        arguments = self.arguments(speculative=speculative, **changes)
        return kind(arguments.pop("model"), **arguments)

    def small(self, **changes: Any) -> Engine:
        """Create an engine with the smallest functions: one request, 1-token chunks."""
        sizes: dict[str, Any] = {
            "max_running_requests": 1,
            "batch_buckets": (1,),
            "chunked_prefill_size": 1,
        }
        return self.engine(**sizes | changes)


def write_files(folder: Path, cache: Path | None = None) -> Files:
    """Write the tiny checkpoints; without a ``cache`` folder, every engine compiles again."""
    return Files(write_target(folder / "target"), write_head(folder / "head"), cache)


def check_tokens(engine: Engine, prompts: Sequence[Sequence[int]], count: int = 24) -> int:
    """Check float32 tokens against dense decoding; return the number of accepted drafts."""
    accepted = 0
    for temperature in (0.0, 0.8):
        params = SamplingParams(
            temperature=temperature, max_new_tokens=count, sampling_seed=3, ignore_eos=True
        )
        outputs = engine.generate(input_ids=prompts, sampling_params=params)
        for prompt, output in zip(prompts, outputs, strict=True):
            job = Job(prompt=tuple(prompt), params=params, seed=3)
            dense = dense_decode(engine.runner.weights[0], job, engine.target.config)
            assert output["output_ids"] == dense.tokens, prompt
            accepted += output["meta_info"].get("spec_num_correct_drafts", 0)
    return accepted


def num_held(engine: Engine) -> int:
    """Return the pages held by requests, after the engine's thread has run all commands."""
    return engine.debug_state()["pages_held"]


def is_idle(engine: Engine) -> bool:
    """Return whether the engine has finished all calls and its thread all commands."""
    state = engine.debug_state()
    if state["running"] or state["waiting"]:
        return False
    deadline = time.monotonic() + 5.0
    while engine.debug_state()["calls"]:  # callers are notified last
        if time.monotonic() > deadline:
            return False
    return True
