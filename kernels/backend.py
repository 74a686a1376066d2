"""Pallas on NVIDIA GPUs: the one module that knows the Triton lowering.

JAX changed the default Pallas backend of GPUs between versions, so every call names it through its
compiler parameters. The Triton lowering is deprecated upstream: kernels import ``load``, ``store``
and ``dot`` from here, and a change of backend is a change of this file.

Rules for kernel bodies: array sizes are powers of two (pad and mask), loop bounds may be traced,
every output element is written or aliased to an initialised input, and the Python name of the body
is the name that profiles show.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

IMPLEMENTATIONS = ("xla", "pallas")


def check_implementation(implementation: str) -> None:
    """Refuse a name that is not in ``IMPLEMENTATIONS``.

    Raises:
        ValueError: naming the value and the known ones.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is not one of {list(IMPLEMENTATIONS)}")


def resolve_interpret(interpret: bool | None) -> bool:
    """Whether to interpret a kernel; ``None`` is yes where the default backend is a CPU.

    A Python value, to be resolved outside traced code.
    """
    return jax.default_backend() == "cpu" if interpret is None else interpret


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size`` (1 for 0)."""
    return 1 << max(size - 1, 0).bit_length()


def silence_triton_deprecation() -> None:
    """Ignore the warning that every lowering of a Triton kernel raises since jax 0.11.

    Process-wide: it is raised when the caller's jit is lowered, after the call that traced the
    kernel has returned, so it cannot be caught around that call.
    """
    warnings.filterwarnings(
        "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
    )


def triton_call(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    interpret: bool | None,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """``pl.pallas_call`` through the Triton lowering with explicit parameters.

    Args:
        kernel: the body, over whole arrays, or a ``functools.partial`` with hashable options.
        grid: at most three sizes; only the first may pass 65,535.
        out_shape: ``jax.ShapeDtypeStruct``, or a tuple of them.
        num_warps: warps of 32 threads a program.
        num_stages: depth of software pipelining of loops.
        interpret: see :func:`resolve_interpret`.
        input_output_aliases: input index to the output index that shares its buffer.

    Returns:
        A function of the input arrays; the same object for equal arguments, so that a function
        that calls it for each layer of a model traces and lowers it once.
    """
    silence_triton_deprecation()
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
        resolve_interpret(interpret),
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


def load(ref: Any, *, mask: jax.Array | None = None, other: Any = None) -> jax.Array:
    """Read ``ref.at[index]``; ``other`` where ``mask`` is false, and no memory access there."""
    return triton.load(ref, mask=mask, other=other)


def store(ref: Any, value: jax.Array, *, mask: jax.Array | None = None) -> None:
    """Write ``value`` to ``ref.at[index]`` where ``mask`` is true.

    Lanes that are masked off must not share an index with a live lane: the interpreter writes their
    old value back.
    """
    triton.store(ref, value, mask=mask)


def dot(a: jax.Array, b: jax.Array, **options: Any) -> jax.Array:
    """Matrix product of two blocks, with the options of ``pallas.triton.dot``."""
    return triton.dot(a, b, **options)
