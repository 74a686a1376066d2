"""Compile the functions of an engine in advance, without its weights."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import jax

from specjax.compiling.pool import CompiledFunction
from specjax.engine.args import EngineArgs
from specjax.engine.build import compile_plan, open_cache
from specjax.engine.plan import plan_engine


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Result of a warm-up."""

    folder: str  # folder of the cache entries
    functions: tuple[CompiledFunction, ...]  # all functions that serving dispatches
    seconds: float
    weight_bytes: int  # device memory of the weights, which are not loaded
    state_bytes: int  # device memory of the states of recurrent layers
    kv_bytes: int  # device memory of the KV pools, which are not allocated
    temporary_bytes: int  # device memory that any function takes while it runs
    device: str  # kind of device

    @property
    def num_compiled(self) -> int:
        """Number of functions that were compiled; the others were in the cache."""
        return sum(not function.is_hit for function in self.functions)

    @property
    def num_bytes(self) -> int:
        return sum(function.num_bytes or 0 for function in self.functions)

    @property
    def is_complete(self) -> bool:
        """Whether every function is on disk."""
        return all(function.num_bytes is not None for function in self.functions)

    def as_dict(self) -> dict[str, Any]:
        derived = {"num_compiled": self.num_compiled, "num_bytes": self.num_bytes}
        return asdict(self) | derived | {"jax": jax.__version__}

    def table(self) -> str:
        """Format the result as lines of text, with sizes in MB."""
        width = max(len(fn.key) for fn in self.functions)
        states = f"states {self.state_bytes / 1e9:.2f} GB, " if self.state_bytes else ""
        lines = [f"{'function':<{width}}  seconds  MB on disk  MB arguments  MB temporary"]
        for fn in self.functions:
            size = "-" if fn.num_bytes is None else f"{fn.num_bytes / 1e6:.2f}"
            lines.append(
                f"{fn.key:<{width}}{fn.seconds:>9.2f}{size:>12}"
                f"{fn.argument_bytes / 1e6:>14.2f}{fn.temp_bytes / 1e6:>14.2f}  "
                f"{'present' if fn.is_hit else 'compiled'}"
            )
        lines += [
            f"{len(self.functions)} functions, {self.num_compiled} compiled, in "
            f"{self.seconds:.1f} s; {self.num_bytes / 1e6:.2f} MB in {self.folder}",
            f"device memory on {self.device}: weights {self.weight_bytes / 1e9:.2f} GB, "
            f"{states}KV {self.kv_bytes / 1e9:.2f} GB, temporary up to "
            f"{self.temporary_bytes / 1e9:.2f} GB",
        ]
        return "\n".join(lines)


def warm_up(args: EngineArgs) -> WarmUp:
    """Compile the functions of an engine with these arguments into its ``compile_cache_dir``.

    Functions on disk are read, not compiled, so an interrupted warm-up resumes. Neither weights
    nor KV pools are allocated. Raises ValueError if the folder is not usable.
    """
    started = time.perf_counter()
    plan = plan_engine(args)
    cache = open_cache(plan)
    if cache is None:
        raise ValueError(
            "compiled functions cannot be stored in "
            f"compile_cache_dir={args.compile_cache_dir!r}; pass a folder that you own"
        )
    plan, runner = compile_plan(plan)
    return WarmUp(
        folder=str(cache.path),
        functions=tuple(runner.compiled.report),
        seconds=time.perf_counter() - started,
        weight_bytes=plan.weight_bytes,
        state_bytes=plan.state_bytes,
        kv_bytes=plan.kv_bytes,
        temporary_bytes=plan.needs.temporary_bytes,
        device=plan.networks.placement.device.device_kind,
    )
