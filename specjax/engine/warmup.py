"""Compiling what serving dispatches ahead of the first start, without loading weights."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax

from specjax.compiling.pool import CompiledFunction
from specjax.engine.args import EngineArgs
from specjax.engine.build import open_cache, plan_parts, shows_progress


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """What a warm-up found and made.

    Attributes:
        folder: where the entries lie.
        functions: one for each function that serving dispatches.
        seconds: from the call to its end.
        weight_bytes: device memory of the weights, which were not loaded.
        kv_bytes: device memory of the KV pools, which were not allocated.
        device: kind of the device.
    """

    folder: str
    functions: tuple[CompiledFunction, ...]
    seconds: float
    weight_bytes: int
    kv_bytes: int
    device: str

    @property
    def num_compiled(self) -> int:
        """Functions that were compiled; the others had been present."""
        return sum(not function.is_hit for function in self.functions)

    @property
    def num_bytes(self) -> int:
        """Size of all entries on disk."""
        return sum(function.num_bytes or 0 for function in self.functions)

    @property
    def is_complete(self) -> bool:
        """Whether every function is on disk now."""
        return all(function.num_bytes is not None for function in self.functions)

    def as_dict(self) -> Mapping[str, Any]:
        """All figures for JSON."""
        functions = [asdict(function) | {"key": function.label} for function in self.functions]
        return asdict(self) | {
            "functions": functions,
            "num_compiled": self.num_compiled,
            "num_bytes": self.num_bytes,
            "jax": jax.__version__,
        }

    def table(self) -> str:
        """The figures as lines of text; sizes in MB."""
        rows = [("function", "seconds", "MB on disk", "MB arguments", "MB temporary", "")]
        for function in self.functions:
            kept = "-" if function.num_bytes is None else _megabytes(function.num_bytes)
            rows.append(
                (
                    function.label,
                    f"{function.seconds:.2f}",
                    kept,
                    _megabytes(function.argument_bytes),
                    _megabytes(function.temp_bytes),
                    _state(function),
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for name, *figures, state in rows:
            cells = [f"{cell:>{width}}" for cell, width in zip(figures, widths[1:], strict=False)]
            lines.append("  ".join([f"{name:<{widths[0]}}", *cells, state]).rstrip())
        most = max((function.temp_bytes for function in self.functions), default=0)
        return "\n".join(
            [
                *lines,
                f"{len(self.functions)} functions, {self.num_compiled} compiled, in "
                f"{self.seconds:.1f} s; {_megabytes(self.num_bytes)} MB in {self.folder}",
                f"device memory of a start on {self.device}: weights "
                f"{self.weight_bytes / 1e9:.2f} GB, KV {self.kv_bytes / 1e9:.2f} GB, at most "
                f"{most / 1e9:.2f} GB while a function runs",
            ]
        )


def warm_up(args: EngineArgs, *, stages: bool = False) -> WarmUp:
    """Compile what an engine with these arguments dispatches, into its compile cache.

    What is present already is read and left as it is, so that an interrupted warm-up goes on where
    it stopped. Neither weights nor KV pools are allocated.

    Args:
        args: arguments of the engine; ``compile_cache_dir`` is where to.
        stages: also draft, verify and extend as functions of their own.

    Raises:
        ValueError: if there is no folder to compile into, or the arguments do not work.
    """
    started = time.perf_counter()
    cache = open_cache(args)
    if cache is None:
        raise ValueError(
            f"compile_cache_dir={args.compile_cache_dir!r} leaves no folder to compile into; give "
            "a folder of your own"
        )
    plan = plan_parts(args)
    runner = plan.make_runner(cache)
    runner.compile(show_progress=shows_progress(args), stages=stages)
    return WarmUp(
        folder=str(cache.path),
        functions=runner.compiled.report,
        seconds=time.perf_counter() - started,
        weight_bytes=plan.pools.weight_bytes,
        kv_bytes=plan.pools.kv_bytes,
        device=jax.devices()[0].device_kind,
    )


def _state(function: CompiledFunction) -> str:
    if not function.is_hit:
        return "compiled"
    return "present, traced anew" if function.is_traced else "present"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f}"
