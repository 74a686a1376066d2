"""The devices of an engine, and why JAX may not use the GPU of this machine."""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from glob import glob
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from specjax.compiling.pool import usable_cores
from specjax.models.shards import AXIS, Split

logger = logging.getLogger(__name__)

_to_int4 = jax.jit(lambda values: values.astype(jnp.int4))


# maps each CUDA release that JAX is built for, newest first, to the lowest driver version
DRIVERS = {13: 580, 12: 525}
# Threads per device of a CPU that appears as several. Devices that wait for the others block them:
# with 4 threads, 3 devices wait for ever.
THREADS = 8
# Devices of a mesh wait for each other, so all of them must run the calls of all engines and
# threads in one order. There is a lock for each set of devices that engines use.
_IN_ORDER: dict[frozenset[jax.Device], Lock] = {}
_IN_USE = WeakKeyDictionary[Any, "Placement"]()  # by what uses the devices


def driver_version() -> str:
    """Version of the NVIDIA driver, or an empty text if Linux reports none."""
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        if version := re.search(r"Module.*?\s(\d+\.\d+[\d.]*)\s", text):
            return version[1]
    return ""


def newest_cuda(driver: str) -> int:
    """Newest CUDA release that this driver version supports; 0 if it is too old for all."""
    major = int(driver.partition(".")[0] or DRIVERS[13])  # unknown: assume a recent one
    return next((cuda for cuda, least in DRIVERS.items() if major >= least), 0)


def package_version(name: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def unused_gpu() -> str | None:
    """Explain why JAX does not use this machine's GPU, with a remedy; ``None`` without a GPU."""
    if not glob("/dev/nvidia[0-9]*"):
        return None
    newest = newest_cuda(driver := driver_version())
    plugins = (cuda for cuda in DRIVERS if package_version(f"jax-cuda{cuda}-plugin"))
    installed, command = next(plugins, 0), f"pip install -e '.[cuda{newest}]'"
    if not newest or installed > newest:
        cuda = installed or 12
        remedy = f"CUDA {cuda} in JAX needs driver {DRIVERS[cuda]} or newer; update the driver"
        if newest:
            remedy += f", or run: pip uninstall -y jax-cuda{installed}-plugin && {command}"
    elif not installed:
        remedy = f"JAX has no CUDA plugin; run: {command}"
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        remedy = f"JAX cannot use it (CUDA_VISIBLE_DEVICES={visible!r}); for the reason run: "
        remedy += "JAX_PLATFORMS=cuda python -c 'import jax; jax.devices()'"
    return f"an NVIDIA GPU (driver {driver or 'unknown'}) is present, but {remedy}"


@dataclass(frozen=True)
class Placement:
    """The devices that hold weights, KV pools and tables, and run every function on them.

    Several are a mesh of one axis: each has a piece of what is split, and the whole of the rest.
    """

    devices: tuple[jax.Device, ...]

    @classmethod
    def on(cls, index: int = 0, count: int = 1) -> "Placement":
        """``count`` devices of the default backend from ``index`` on.

        The threads of a CPU follow a container's quota. Raises ValueError if there are too few.
        """
        # JAX's runtime reads no quota
        threads = usable_cores() if count == 1 else max(usable_cores(), THREADS * count)
        os.environ.setdefault("PJRT_NPROC", str(threads))
        try:
            devices = jax.devices()
        except (RuntimeError, AssertionError) as error:  # the plugin is absent or fails
            hint = unused_gpu()
            raise ValueError(
                f"JAX has no device for JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r}: "
                f"{error!r}; set JAX_PLATFORMS=cpu, or for a GPU install the extra cuda12 or "
                f"cuda13 (pip install -e '.[cuda13]'){'' if hint is None else f'; {hint}'}"
            ) from error
        if not 0 <= index < len(devices):
            raise ValueError(
                f"base_gpu_id={index} must be below {len(devices)}, the number of devices of kind "
                f"{devices[0].device_kind}"
            )
        is_chosen = "cpu" in (jax.config.jax_platforms or "")  # type: ignore[attr-defined]
        reason = None if devices[0].platform != "cpu" or is_chosen else unused_gpu()
        if index + count > len(devices):
            raise ValueError(
                f"tp_size={count} needs {count} devices from base_gpu_id={index} on, but this "
                f"process has {len(devices)} of kind {devices[0].device_kind}; lower tp_size to at "
                f"most {len(devices) - index}{'' if reason is None else f'; {reason}'}"
            )
        if reason is not None:
            logger.warning("running on the CPU: %s", reason)
        return cls(tuple(devices[index : index + count]))

    @property
    def device(self) -> jax.Device:
        """The first device."""
        return self.devices[0]

    @property
    def count(self) -> int:
        return len(self.devices)

    @property
    def on_cpu(self) -> bool:
        return self.device.platform == "cpu"

    @property
    def in_order(self) -> AbstractContextManager[Any]:
        """Hold this while a function is dispatched on the devices of an engine."""
        if self.count == 1:
            return nullcontext()
        return _IN_ORDER.setdefault(frozenset(self.devices), Lock())

    @contextmanager
    def in_order_of_all(self) -> Iterator[None]:
        """Hold this instead if an array came with the devices: engines may have some of them."""
        with ExitStack() as stack:
            if self.count > 1:
                _IN_ORDER.setdefault(frozenset(self.devices), Lock())
                common = [x for x in list(_IN_ORDER) if not x.isdisjoint(self.devices)]
                for devices in sorted(common, key=lambda x: sorted(device.id for device in x)):
                    stack.enter_context(_IN_ORDER[devices])
            yield

    def check_others(self) -> None:
        """Raise ValueError if another mesh in use has some of these devices, but not all.

        Their calls have no common order, so the devices could wait for each other for ever.
        """
        for mesh in list(_IN_USE.values()):
            ids, others = ([x.id for x in place.devices] for place in (self, mesh))
            if 1 not in (self.count, mesh.count) and set(ids) != set(others) and {*ids} & {*others}:
                raise ValueError(
                    f"tp_size={self.count} on devices {ids}: another engine of this process has "
                    f"devices {others}; choose base_gpu_id and tp_size so that both have the same "
                    "devices, or none in common"
                )

    def reserve(self, user: Any) -> None:
        """Keep overlapping meshes away until ``user`` releases the devices or is gone."""
        self.check_others()
        _IN_USE[user] = self

    def release(self, user: Any) -> None:
        _IN_USE.pop(user, None)

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), (AXIS,))

    def sharding(self, axis: int | None = None) -> SingleDeviceSharding | NamedSharding:
        """Where an array is: in pieces of ``axis`` if that is set, else whole on each device."""
        if self.count == 1:
            return SingleDeviceSharding(self.device)
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)
        return NamedSharding(self.mesh, spec)

    def put(self, values: Any) -> Any:
        """Put arrays, whole, on each device."""
        # with a device, this takes 30 us on the host; with its sharding, 110
        return jax.device_put(values, self.device if self.count == 1 else self.sharding())

    def put_weights(self, values: Any) -> Any:
        """Put weights, whole, on each device.

        4-bit integers are not committed to the device, because compiled functions would refuse
        them: JAX states their layout differently for arrays and for functions (0.10, 0.11).
        """

        def put(value: Any) -> Any:
            if value.dtype != jnp.int4 or self.count > 1:
                return self.put(value)
            is_array = isinstance(value, jax.Array)
            if is_array and value.devices() == {self.device} and not value.committed:
                return value
            with jax.default_device(self.device):
                return _to_int4(jax.device_put(np.asarray(value).astype(np.int8)))

        return jax.tree.map(put, values)

    def move(self, weights: Any, placed: Any) -> Any:
        """Put the weights of another placement with as many devices to where ``placed`` says."""
        if self.count == 1:
            return self.put_weights(weights)
        return jax.device_put(weights, jax.tree.map(lambda leaf: leaf.sharding, placed))

    def put_pieces(self, weight: Any, split: Split | None) -> Any:
        """Put a whole weight: each device gets its piece if there is a ``split``."""
        if self.count == 1 or split is None:
            return self.put_weights(weight)
        weight = np.asarray(weight)
        pieces = (split.piece(weight, i, self.count) for i in range(self.count))
        arrays = list(map(jax.device_put, pieces, self.devices))
        sharding = self.sharding(split.axis)
        shape = split.stored(weight.shape, self.count)
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    def abstract(self, values: Any, axis: int | None = None) -> Any:
        """Shapes and dtypes of a pytree of arrays that will be on the devices, cut on ``axis``."""
        sharding = self.sharding(axis)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), values
        )

    def ints(self, *shape: int) -> Any:
        """An abstract i32 array that will be whole on each device."""
        return self.abstract(jax.ShapeDtypeStruct(shape, jnp.int32))

    def zeros(self, abstract: Any) -> Any:
        """Compile a function that returns a pytree of zeros with these shapes and dtypes.

        They are where :meth:`abstract` says.
        """
        make = jax.jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract),
            out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract),
        )
        return make.lower().compile()
