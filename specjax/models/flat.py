"""Represent a model as a static structure and a flat tuple of arrays, which jit accepts cheaply.

JAX traverses an nnx object in Python at every call. A flat tuple avoids this; the traced function
rebuilds the module from it.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from glob import glob
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import SingleDeviceSharding

from specjax.config import ModelConfig, TransformerConfig
from specjax.models.declare import Recipes, leaves
from specjax.models.decoder import CausalLM

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=nnx.Module)
Weights = tuple[Array, ...]


@dataclass(frozen=True)
class FlatModel(Generic[M]):
    """The structure of a module: the names, shapes, dtypes and declarations of its weights.

    ``names[i]`` is the dotted path of weight ``i``, for example ``layers.0.attention.qkv.kernel``
    (``....kernel.values`` and so on if quantised). ``initial[i]`` is the mean and
    standard deviation of its random initial values, and ``splits[i]`` the axis that a mesh may
    cut. ``recipes`` says by name which tensors of a checkpoint fill the weights.
    """

    graphdef: Any
    treedef: Any
    names: tuple[str, ...]
    abstract: tuple[jax.ShapeDtypeStruct, ...]
    initial: tuple[tuple[float, float], ...] = ()
    splits: tuple[str | None, ...] = ()
    recipes: Recipes = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, build: Callable[[], M]) -> "FlatModel[M]":
        """The structure of the module that ``build`` returns, whose weights may be abstract."""
        graphdef, state = nnx.split(build())
        arrays, treedef = jax.tree.flatten(state)
        abstract = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays)
        paths, initial, splits, recipes = zip(*leaves(state), strict=True)
        names = tuple(".".join(map(str, path)) for path in paths)
        by_name = {name: recipe for name, recipe in zip(names, recipes, strict=True) if recipe}
        return cls(graphdef, treedef, names, abstract, initial, splits, by_name)

    @classmethod
    def empty(cls) -> "FlatModel[Any]":
        """A structure without a module: it has no weights and rebuilds to ``None``."""
        return cls(None, jax.tree.structure(()), (), ())

    def rebuild(self, weights: Weights) -> M:
        """Rebuild the module over ``weights``; call this inside a traced function."""
        state = jax.tree.unflatten(self.treedef, list(weights))
        return nnx.merge(self.graphdef, state) if self.names else None  # type: ignore[return-value]

    def random(self, seed: int) -> Weights:
        """Draw random weights as ``initial`` states, on the device, without building the module.

        One small function is compiled per shape, so that models with many weights start fast.
        """
        key = jax.random.key(seed)
        drawn = {}
        # the largest first: it is drawn in float32, while most of the memory is free
        for i in sorted(range(len(self.abstract)), key=lambda i: -self.abstract[i].size):
            leaf, (mean, stddev) = self.abstract[i], self.initial[i]
            if stddev:
                drawn[i] = _normal(jax.random.fold_in(key, i), leaf.shape, leaf.dtype, stddev)
            else:
                drawn[i] = jnp.full(leaf.shape, mean, leaf.dtype)
        return tuple(drawn[i] for i in range(len(drawn)))

    def order(self, named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the values of a mapping by weight name, in the order of the weights."""
        missing = sorted(set(self.names) - set(named))
        unknown = sorted(set(named) - set(self.names))
        if missing or unknown:
            raise ValueError(f"weights do not fit the model: missing {missing}, unknown {unknown}")
        return tuple(named[name] for name in self.names)


# not cached by configuration: equal ones may have other exponents of keys and values
def recipes_of(network: Callable[..., nnx.Module], config: TransformerConfig) -> Recipes:
    """The recipe of each weight of a network, by name."""
    return FlatModel.of(partial(network, config)).recipes


@partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: Array, shape: tuple[int, ...], dtype: jnp.dtype, stddev: float) -> Array:
    values = stddev * jax.random.normal(key, shape)
    if jnp.issubdtype(dtype, jnp.integer):  # conversion wraps around
        values = values.clip(jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
    return values.astype(dtype)


def dtype_bits(dtype: jnp.dtype) -> int:
    """Bits of a value on a GPU; numpy counts a byte for 4-bit integers."""
    return 4 if dtype == jnp.int4 else 8 * jnp.dtype(dtype).itemsize


_to_int4 = jax.jit(lambda values: values.astype(jnp.int4))


# maps each CUDA release that JAX is built for, newest first, to the lowest driver version
DRIVERS = {13: 580, 12: 525}


def driver_version() -> str:
    """Version of the NVIDIA driver, or an empty text if Linux reports none."""
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        if found := re.search(r"Module.*?\s(\d+\.\d+[\d.]*)\s", text):
            return found[1]
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
        wanted = installed or 12
        remedy = f"CUDA {wanted} in JAX needs driver {DRIVERS[wanted]} or newer; update the driver"
        if newest:
            remedy += f", or run: pip uninstall -y jax-cuda{installed}-plugin && {command}"
    elif not installed:
        remedy = f"JAX has no CUDA plugin; run: {command}"
    else:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        remedy = f"JAX cannot use it (CUDA_VISIBLE_DEVICES={shown!r}); for the reason run: "
        remedy += "JAX_PLATFORMS=cuda python -c 'import jax; jax.devices()'"
    return f"an NVIDIA GPU (driver {driver or 'unknown'}) is present, but {remedy}"


@dataclass(frozen=True)
class Placement:
    """The device that holds weights, KV pools and tables, and runs every function on them."""

    device: jax.Device

    @classmethod
    def on(cls, index: int = 0) -> "Placement":
        """Device ``index`` of the default backend."""
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
        if devices[index].platform == "cpu" and not is_chosen and (reason := unused_gpu()):
            logger.warning("running on the CPU: %s", reason)
        return cls(devices[index])

    @property
    def on_cpu(self) -> bool:
        return self.device.platform == "cpu"

    @property
    def sharding(self) -> SingleDeviceSharding:
        return SingleDeviceSharding(self.device)

    def put(self, values: Any) -> Any:
        # with a device, this takes 30 us on the host; with its sharding, 110
        return jax.device_put(values, self.device)

    def put_weights(self, values: Any) -> Any:
        """Put weights.

        4-bit integers are not committed to the device, because compiled functions would refuse
        them: JAX states their layout differently for arrays and for functions (0.10, 0.11).
        """

        def put(value: Any) -> Any:
            if value.dtype != jnp.int4:
                return self.put(value)
            is_array = isinstance(value, jax.Array)
            if is_array and value.devices() == {self.device} and not value.committed:
                return value
            with jax.default_device(self.device):
                return _to_int4(jax.device_put(np.asarray(value).astype(np.int8)))

        return jax.tree.map(put, values)

    def abstract(self, values: Any) -> Any:
        """Shapes and dtypes of a pytree of arrays that will be on this device."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.sharding),
            values,
        )

    def ints(self, *shape: int) -> Any:
        """An abstract i32 array that will be on this device."""
        return self.abstract(jax.ShapeDtypeStruct(shape, jnp.int32))

    def zeros(self, abstract: Any) -> Any:
        """Compile a function that returns a pytree of zeros with these shapes and dtypes."""
        make = jax.jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract),
            out_shardings=self.sharding,
        )
        return make.lower().compile()


@dataclass(frozen=True)
class Networks:
    """The structures of target and draft."""

    target: FlatModel[CausalLM]
    draft: FlatModel[Any]  # the algorithm's draft network; empty if it needs none
    target_config: ModelConfig
    draft_config: Any  # ``None`` if the algorithm needs no network
    placement: Placement  # device of both

    @property
    def configs(self) -> tuple[TransformerConfig, ...]:
        """The configurations of the target and, if the draft is a network, of the draft."""
        configs = (self.target_config, self.draft_config)
        return tuple(config for config in configs if isinstance(config, TransformerConfig))

    @property
    def models(self) -> tuple[ModelConfig, ...]:
        """Configurations whose layers a model family describes."""
        return tuple(config for config in self.configs if isinstance(config, ModelConfig))

    @property
    def weight_bytes(self) -> int:
        leaves = (*self.target.abstract, *self.draft.abstract)
        return sum(leaf.size * dtype_bits(leaf.dtype) // 8 for leaf in leaves)
