"""Compiling what serving dispatches ahead of the first start, without loading weights."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import jax

from specjax.compiling.cache import open_compile_cache
from specjax.compiling.pool import CompiledFunction
from specjax.engine.args import EngineArgs
from specjax.engine.build import compile_runner, plan_parts


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """What a warm-up found and made."""

    folder: str  # where the entries lie
    functions: tuple[CompiledFunction, ...]  # all that serving dispatches
    seconds: float
    weight_bytes: int  # device memory of the weights, which were not loaded
    kv_bytes: int  # and of the KV pools, which were not allocated
    device: str  # its kind

    @property
    def num_compiled(self) -> int:
        """Functions that were compiled; the others had been present."""
        return sum(not function.is_hit for function in self.functions)

    @property
    def num_bytes(self) -> int:
        return sum(function.num_bytes or 0 for function in self.functions)

    @property
    def is_complete(self) -> bool:
        """Whether every function is on disk now."""
        return all(function.num_bytes is not None for function in self.functions)

    def as_dict(self) -> dict[str, Any]:
        derived = {"num_compiled": self.num_compiled, "num_bytes": self.num_bytes}
        return asdict(self) | derived | {"jax": jax.__version__}

    def table(self) -> str:
        """The figures as lines of text; sizes in MB."""
        width = max(len(each.key) for each in self.functions)
        lines = [f"{'function':<{width}}  seconds  MB on disk  MB arguments  MB temporary"]
        for each in self.functions:
            kept = "-" if each.num_bytes is None else f"{each.num_bytes / 1e6:.2f}"
            lines.append(
                f"{each.key:<{width}}{each.seconds:>9.2f}{kept:>12}"
                f"{each.argument_bytes / 1e6:>14.2f}{each.temp_bytes / 1e6:>14.2f}  "
                f"{'present' if each.is_hit else 'compiled'}"
            )
        most = max(function.temp_bytes for function in self.functions)
        lines += [
            f"{len(self.functions)} functions, {self.num_compiled} compiled, in "
            f"{self.seconds:.1f} s; {self.num_bytes / 1e6:.2f} MB in {self.folder}",
            f"device memory of a start on {self.device}: weights {self.weight_bytes / 1e9:.2f} GB, "
            f"KV {self.kv_bytes / 1e9:.2f} GB, at most {most / 1e9:.2f} GB while a function runs",
        ]
        return "\n".join(lines)


def warm_up(args: EngineArgs, *, stages: bool = False) -> WarmUp:
    """Compile what an engine with these arguments dispatches, into its ``compile_cache_dir``.

    What is present is read and left as it is, so that an interrupted warm-up goes on where it
    stopped. Neither weights nor KV pools are allocated. ``stages`` adds draft, verify and extend as
    functions of their own. Without a folder that is a ``ValueError``.
    """
    started = time.perf_counter()
    plan = plan_parts(args)
    cache = open_compile_cache(args.compile_cache_dir)
    if cache is None:
        raise ValueError(
            f"compile_cache_dir={args.compile_cache_dir!r} leaves no folder to compile into; give "
            "a folder of your own"
        )
    runner = plan.make_runner(cache)
    compile_runner(args, runner, stages=stages)
    return WarmUp(
        folder=str(cache.path),
        functions=tuple(runner.compiled.report),
        seconds=time.perf_counter() - started,
        weight_bytes=plan.pools.weight_bytes,
        kv_bytes=plan.pools.kv_bytes,
        device=plan.networks.placement.device.device_kind,
    )
