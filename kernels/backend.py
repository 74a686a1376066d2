"""Pallas on NVIDIA GPUs: the one module that knows the Triton lowering.

JAX changed the default Pallas backend of GPUs between versions, so every call names it through its
compiler parameters. The Triton lowering is deprecated upstream: kernels import ``load`` and
``store`` from here, and a change of backend is a change of this file.

Rules for kernel bodies: array sizes are powers of two (pad and mask), loop bounds may be traced,
every output element is written or aliased to an initialised input, and the Python name of the body
is the name that profiles show.
"""

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxlib.triton import dialect

# plain jax.numpy, which is the reference; the same with attention as a loop over the context; one
# launch on a GPU; the kernel of that launch in Pallas' interpreter, which runs anywhere
IMPLEMENTATIONS = ("xla", "chunked", "pallas", "interpret")

# MLIR's bindings look for the module of a dialect under this name whenever they return one of its
# types. jaxlib has it elsewhere, and every search through the path was in vain: half of the time to
# lower a kernel (jax 0.10 to 0.12).
sys.modules.setdefault("jaxlib.mlir.dialects.tt", dialect)

# Read and write ``ref.at[index]`` where ``mask`` is true, and touch nothing elsewhere. Lanes that a
# store masks off must not share an index with a live one: the interpreter writes their old value
# back.
load, store = triton.load, triton.store


def resolve(
    implementation: str | None = None, *, head_dim: int | None = None, is_attention: bool = False
) -> str:
    """The implementation that runs; nothing else decides this.

    ``None`` follows the default backend. A GPU runs the Pallas kernel unless it cannot take
    ``head_dim``, and a CPU runs XLA, attention in chunks. ValueError for an unknown name.
    """
    if implementation is None:
        if jax.default_backend() == "cpu":
            implementation = "chunked"
        else:
            implementation = "pallas" if head_dim is None or takes_head_dim(head_dim) else "xla"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is not one of {list(IMPLEMENTATIONS)}")
    return "xla" if implementation == "chunked" and not is_attention else implementation


def takes_head_dim(head_dim: int) -> bool:
    """Whether the Pallas kernels take a head dim: their blocks are powers of two."""
    return 16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size`` (1 for 0)."""
    return 1 << max(size - 1, 0).bit_length()


def triton_call(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    implementation: str,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """``pl.pallas_call`` through the Triton lowering with explicit parameters.

    The kernel is a body over whole arrays, or a ``functools.partial`` of one with hashable options.
    Only the first of at most three grid sizes may pass 65,535. Aliases map an input to the output
    that shares its buffer. The function returned is the same object for equal arguments, so that a
    model that calls it in each layer traces and lowers it once.
    """
    # raised by every lowering since jax 0.11, after the call that traced the kernel has returned:
    # it can only be ignored in the whole process
    warnings.filterwarnings(
        "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
    )
    body = kernel if isinstance(kernel, partial) else partial(kernel)
    if body.args:
        raise ValueError(f"{body.func.__name__} has positional options {body.args}; name them")
    return _jitted_call(
        body.func,
        # 1, 1.0 and True are equal, and kernels of them are not
        tuple((name, type(value), value) for name, value in body.keywords.items()),
        grid,
        out_shape,
        num_warps,
        num_stages,
        implementation == "interpret",
        tuple((input_output_aliases or {}).items()),
    )


@lru_cache(maxsize=1024)
def _jitted_call(
    body: Callable[..., None],
    options: tuple[tuple[str, type, Any], ...],
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    aliases: tuple[tuple[int, int], ...],
) -> Callable[..., Any]:
    # A bare call is lowered anew wherever it stands (20 to 40 ms), a jitted one once in a module:
    # tracing and lowering a round of 32 layers takes 0.8 s instead of 7.
    return jax.jit(
        pl.pallas_call(
            partial(body, **{name: value for name, _, value in options}),
            name=body.__name__,
            out_shape=out_shape,
            grid=grid,
            input_output_aliases=dict(aliases),
            interpret=interpret,
            compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        )
    )
