"""The one place that knows Pallas' Triton lowering, which JAX has deprecated for GPUs.

Parameters are always explicit: the default backend of ``pl.pallas_call`` on CUDA changed between
jax 0.10 and 0.11. Arrays inside a kernel have sizes that are powers of two.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton


def triton_call(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """A Pallas call over whole arrays, lowered through Triton or interpreted.

    Args:
        kernel: the body; its function name is the kernel's name in profiles.
        grid: at most three dimensions.
        out_shape: of the outputs.
        num_warps: of 32 threads, per program.
        num_stages: loads in flight of the software pipeline.
        interpret: run the body as plain JAX, on any platform.
        input_output_aliases: inputs whose buffers become outputs.
    """
    call = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        interpret=interpret,
        input_output_aliases=dict(input_output_aliases or {}),
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
    )

    def run(*operands: jax.Array) -> Any:
        return call(*operands)

    return run


def silence_triton_deprecation() -> None:
    """Ignore the warning that every lowering of a Triton kernel raises since jax 0.11."""
    warnings.filterwarnings(
        "ignore", message=".*Pallas Triton.*deprecated.*", category=DeprecationWarning
    )
