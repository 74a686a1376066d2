"""Lower a function for an NVIDIA GPU on a machine without one."""

import re
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import triton
from jax.sharding import AbstractDevice, AbstractMesh
from jaxlib.mlir import ir
from jaxlib.triton import dialect

# the name is public since jax 0.11
TRITON_CALL = getattr(triton, "CUSTOM_CALL_TARGET_NAME", "__gpu$xla.gpu.triton")


def lower_for_cuda(function: Callable[..., Any], *args: Any, **jit_options: Any) -> str:
    """The StableHLO text of ``jit(function)(*args)`` for one H200.

    Also checks that every kernel in it is a valid Triton module, which lowering does not check.

    Args:
        function: must request its kernels with ``implementation="pallas"``.
        *args: arrays or ``jax.ShapeDtypeStruct``.
        **jit_options: options of ``jax.jit``.
    """
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        exported = jax.export.export(
            jax.jit(function, **jit_options),
            platforms=["cuda"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(TRITON_CALL)],
        )(*args)
    text = exported.mlir_module()
    for escaped in re.findall(
        rf"@{re.escape(TRITON_CALL)}\(.*?\bir = \"((?:[^\"\\]|\\.)*)\"", text
    ):
        with ir.Context() as context:
            dialect.register_dialect(context)
            ir.Module.parse(_unescaped(escaped))
    return text


def _unescaped(text: str) -> bytes:
    """The bytes of an MLIR string attribute."""
    # in one pass, because bytes that were escaped may look like an escape
    parts = re.sub(
        r"\\(?:([0-9A-Fa-f]{2})|(.))", lambda m: chr(int(m[1], 16)) if m[1] else m[2], text
    )
    return parts.encode("latin-1")
