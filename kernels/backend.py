"""Pallas on NVIDIA GPUs: the only module that depends on the Triton lowering.

JAX versions differ in the default Pallas backend for GPUs, so every call names Triton in its
compiler parameters. The Triton lowering is deprecated upstream. Kernels import ``load`` and
``store`` from here, so only this file must change for another backend.

Rules for kernel bodies: array sizes are powers of two (pad and mask). Loop bounds may be traced.
Every output element is written, or aliased to an initialised input. Profiles show the body's name.
"""

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxlib.triton import dialect

# "xla": plain jax.numpy, the reference; "chunked": as "xla", but attention loops over the context;
# "pallas": one GPU launch; "interpret": the Pallas kernel in the interpreter, on any platform.
# "invariant" and "invariant-interpret": as these two, but a row of a product, of attention or of a
# norm has the same bits in any batch (kernels/invariant_*.py)
INVARIANT = {"invariant": "pallas", "invariant-interpret": "interpret"}
IMPLEMENTATIONS = ("xla", "chunked", "pallas", "interpret", *INVARIANT)

# MLIR's bindings import the module of a dialect by this name whenever they return one of its types.
# jaxlib has the module under another name, so each import fails after searching the whole path.
# That took half of the time to lower a kernel (jax 0.10 to 0.12).
sys.modules.setdefault("jaxlib.mlir.dialects.tt", dialect)

# Read or write only the elements of ``ref.at[index]`` whose ``mask`` is true. In a store, a masked
# lane must not have the index of an active lane, because the interpreter writes old values back.
load, store = triton.load, triton.store
inline_ptx = triton.elementwise_inline_asm
power_of_two = pl.next_power_of_2

WIDEST = 512  # head dim
# of two values of KV, see kv_format.py
WORD = jnp.dtype(jnp.uint16)

# Four values of e4m3 to bfloat16, which has the same bits in other places: each byte becomes the
# high one of two, its exponent and mantissa move right by 4, and a product with 2^120, the
# difference of the exponents' biases, makes subnormal values normal.
FROM_E4M3 = """{
    .reg .b32 x, y, s, one, zero;
    mov.b32 one, 0x7b807b80; mov.b32 zero, 0x80008000;
    prmt.b32 x, $2, 0, 0x1404; prmt.b32 y, $2, 0, 0x3424;
    and.b32 s, x, 0x80008000; shr.u32 x, x, 4; and.b32 x, x, 0x07f007f0; or.b32 x, x, s;
    fma.rn.bf16x2 $0, x, one, zero;
    and.b32 s, y, 0x80008000; shr.u32 y, y, 4; and.b32 y, y, 0x07f007f0; or.b32 y, y, s;
    fma.rn.bf16x2 $1, y, one, zero;
}"""


def resolve(
    implementation: str | None = None,
    *,
    head_dim: int | None = None,
    kv_dtype: jnp.dtype | None = None,
    is_attention: bool = False,
) -> str:
    """Choose the implementation to run; no other code decides this.

    With ``None``, a GPU runs the Pallas kernel if it supports ``head_dim``, else XLA. A CPU runs
    XLA with chunked attention. Raises ValueError for an unknown name.
    """
    if implementation is None:
        if jax.default_backend() == "cpu":
            implementation = "chunked"
        else:
            is_taken = head_dim is None or takes_head_dim(head_dim, kv_dtype)
            implementation = "pallas" if is_taken else "xla"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{implementation=} must be one of {list(IMPLEMENTATIONS)}")
    if implementation == "chunked" and not is_attention:
        return "xla"
    return INVARIANT.get(implementation, implementation)


def takes_head_dim(head_dim: int, kv_dtype: jnp.dtype | None = None) -> bool:
    """Whether the Pallas kernels support a head dim: a multiple of 16 from 16 to 256, or 512.

    With two values in a word, the words of a head must be a multiple of 16.
    """
    least = 32 if kv_dtype == WORD else 16
    return head_dim == WIDEST or (least <= head_dim <= 256 and head_dim % least == 0)


def spans(size: int, start: int = 0) -> tuple[Any, ...]:
    """Cut an axis into slices whose sizes are powers of two, largest first: 96 is 64 and 32."""
    slices = []
    for power in reversed(range(size.bit_length())):
        if size >> power & 1:
            slices.append(pl.ds(start, 1 << power))
            start += 1 << power
    return tuple(slices)


def row_dot(x: jax.Array, y: jax.Array, *, transpose: bool) -> jax.Array:
    """``x @ y`` (or ``x @ y.T``) accumulated in float32; float32 operands keep full precision."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    contracting = ((1,), (1 if transpose else 0,))
    return jax.lax.dot_general(
        x, y, (contracting, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def widen(x: jax.Array, dtype: jnp.dtype | type, implementation: str) -> jax.Array:
    """Cast values of a matrix in a kernel; NaN of e4m3 may become a number.

    The compiler converts e4m3 to bfloat16 by way of float16 and float32, which takes longer than
    reading the values from memory.
    """
    is_fast = x.dtype == jnp.float8_e4m3fn and dtype == jnp.bfloat16
    if implementation != "pallas" or not is_fast:
        return x.astype(dtype)
    (wide,) = inline_ptx(
        FROM_E4M3,
        args=[x],
        constraints="=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)],
    )
    return wide


def triton_call(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int,
    implementation: str,
    num_stages: int = 1,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """``pl.pallas_call`` through the Triton lowering with explicit parameters.

    The kernel body gets whole arrays. A ``functools.partial`` may bind its options, which must be
    hashable. The grid has up to three sizes, of which only the first may exceed 65,535. Aliases map
    an input to the output that shares its buffer. Equal arguments return the same function object,
    so a model that calls it in every layer traces and lowers it once.
    """
    # since jax 0.11 each lowering warns. It happens after the traced call has returned, so the
    # warning can be ignored only for the whole process
    warnings.filterwarnings(
        "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
    )
    body = kernel if isinstance(kernel, partial) else partial(kernel)
    if body.args:
        raise ValueError(f"pass the options {body.args} of {body.func.__name__} by keyword")
    return _jitted_call(
        body.func,
        # include the type: 1, 1.0 and True are equal but give different kernels
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
    # A bare call is lowered again at every use (20 to 40 ms), a jitted one only once per module.
    # This reduces tracing and lowering of a round with 32 layers from 7 s to 0.8 s.
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
