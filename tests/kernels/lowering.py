"""Lowering of a function for an NVIDIA GPU on a machine that has none."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import triton
from jax.sharding import AbstractDevice, AbstractMesh

# the name is public from jax 0.11 on
TRITON_CALL = getattr(triton, "CUSTOM_CALL_TARGET_NAME", "__gpu$xla.gpu.triton")


def lower_for_cuda(function: Callable[..., Any], *args: Any, **jit_options: Any) -> str:
    """The StableHLO text of ``jit(function)(*args)`` for one H200.

    Args:
        function: its kernels must be asked for with ``interpret=False``.
        *args: arrays or ``jax.ShapeDtypeStruct``.
        **jit_options: of ``jax.jit``.
    """
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        exported = jax.export.export(
            jax.jit(function, **jit_options),
            platforms=["cuda"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(TRITON_CALL)],
        )(*args)
    return exported.mlir_module()
