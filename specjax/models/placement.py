"""Where an engine's arrays live."""

import os
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding


@dataclass(frozen=True)
class Placement:
    """The device that holds weights, KV pools and tables, and runs every function over them."""

    device: jax.Device

    @classmethod
    def on(cls, index: int = 0) -> "Placement":
        """Device ``index`` of the default backend."""
        try:
            devices = jax.devices()
        except (RuntimeError, AssertionError) as error:  # the plugin is absent or fails
            raise ValueError(
                f"JAX has no device for JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r}: "
                f"{error!r}; install the extra cuda12 or cuda13 (pip install '.[cuda13]')"
            ) from error
        if not 0 <= index < len(devices):
            raise ValueError(
                f"base_gpu_id={index}, but there are {len(devices)} devices of kind "
                f"{devices[0].device_kind}"
            )
        return cls(devices[index])

    @property
    def on_cpu(self) -> bool:
        return self.device.platform == "cpu"

    @property
    def sharding(self) -> SingleDeviceSharding:
        return SingleDeviceSharding(self.device)

    def put(self, values: Any) -> Any:
        return jax.device_put(values, self.sharding)

    def abstract(self, values: Any) -> Any:
        """Shapes and dtypes of a pytree of arrays that will be here."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.sharding),
            values,
        )

    def zeros(self, abstract: Any) -> Any:
        """A compiled function that makes a pytree of zeros of the given shapes and dtypes."""
        make = jax.jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract),
            out_shardings=self.sharding,
        )
        return make.lower().compile()

    def describe(self) -> str:
        """What tells functions compiled for one place from those for another."""
        return f"{self.device.device_kind} {self.device.id}"
