"""Represent a model as a static structure and a flat tuple of arrays, which jit accepts cheaply.

JAX traverses an nnx object in Python at every call. A flat tuple avoids this; the traced function
rebuilds the module from it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.config import ModelConfig, TransformerConfig
from specjax.models.declare import Cache, Recipes, leaves
from specjax.models.decoder import CausalLM
from specjax.models.placement import Placement
from specjax.models.shards import Split

M = TypeVar("M", bound=nnx.Module)
Weights = tuple[Array, ...]


@dataclass(frozen=True)
class FlatModel(Generic[M]):
    """The structure of a module: the names, shapes, dtypes and declarations of its weights.

    ``names[i]`` is the dotted path of weight ``i``, for example ``layers.0.attention.qkv.kernel``
    (``....kernel.values`` and so on if quantised). ``initial[i]`` is the mean and
    standard deviation of its random initial values, and ``splits[i]`` the axis that a mesh of
    ``shards`` devices cuts. Shapes are those of whole weights. ``recipes`` says by name which
    tensors of a checkpoint fill the weights. ``caches`` are those of a target's layers.
    """

    graphdef: Any
    treedef: Any
    names: tuple[str, ...]
    abstract: tuple[jax.ShapeDtypeStruct, ...]
    initial: tuple[tuple[float, float], ...] = ()
    splits: tuple[str | None, ...] = ()
    recipes: Recipes = field(default_factory=dict, hash=False)
    caches: tuple[Cache, ...] = ()
    shards: int = 1

    @classmethod
    def of(cls, build: Callable[[], M]) -> "FlatModel[M]":
        """The structure of the module that ``build`` returns, whose weights may be abstract."""
        module = build()
        graphdef, state = nnx.split(module)
        arrays, treedef = jax.tree.flatten(state)
        abstract = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays)
        paths, initial, splits, recipes = zip(*leaves(state), strict=True)
        names = tuple(".".join(map(str, path)) for path in paths)
        by_name = {name: recipe for name, recipe in zip(names, recipes, strict=True) if recipe}
        caches = module.caches if isinstance(module, CausalLM) else ()
        shards = getattr(module, "shards", 1)
        return cls(graphdef, treedef, names, abstract, initial, splits, by_name, caches, shards)

    @classmethod
    def empty(cls) -> "FlatModel[Any]":
        """A structure without a module: it has no weights and rebuilds to ``None``."""
        return cls(None, jax.tree.structure(()), (), ())

    def rebuild(self, weights: Weights) -> M:
        """Rebuild the module over ``weights``; call this inside a traced function.

        On a mesh, they are the pieces of one device.
        """
        state = jax.tree.unflatten(self.treedef, list(weights))
        return nnx.merge(self.graphdef, state) if self.names else None  # type: ignore[return-value]

    @property
    def split_bytes(self) -> int:
        """Bytes of the weights that a mesh may cut."""
        leaves = (x for x, split in zip(self.abstract, self.splits, strict=True) if split)
        return sum(x.size * dtype_bits(x.dtype) // 8 for x in leaves)

    def split(self, name: str) -> Split | None:
        """How a mesh cuts a weight; ``None`` if each device has all of it."""
        if self.shards == 1:
            return None
        kind = self.splits[self.names.index(name)]
        return None if kind is None else self.recipes[name].split(kind, self.shards)

    def placed(self, placement: Placement) -> Weights:
        """Shapes and dtypes of the weights on the devices, of all pieces joined."""

        def leaf(weight: jax.ShapeDtypeStruct, split: Split | None) -> Any:
            if split is None:
                return placement.abstract(weight)
            shape = split.stored(weight.shape, self.shards)
            return placement.abstract(jax.ShapeDtypeStruct(shape, weight.dtype), split.axis)

        return tuple(map(leaf, self.abstract, map(self.split, self.names)))

    def random(self, seed: int, placement: Placement | None = None) -> Weights:
        """Draw random weights as ``initial`` states, on the device, without building the module.

        With a ``placement`` of several devices, no device draws a whole weight that is split.

        One small function is compiled per shape, so that models with many weights start fast.
        """
        key = jax.random.key(seed)
        drawn = {}
        is_cut = placement is not None and placement.count > 1
        stored = self.placed(placement) if is_cut and placement else self.abstract
        # the largest first: it is drawn in float32, while most of the memory is free
        for i in sorted(range(len(stored)), key=lambda i: -stored[i].size):
            leaf, (mean, stddev) = stored[i], self.initial[i]
            if stddev:
                form = leaf.shape, leaf.dtype, stddev, leaf.sharding
                drawn[i] = _normal(jax.random.fold_in(key, i), *form)
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


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _normal(
    key: Array, shape: tuple[int, ...], dtype: jnp.dtype, stddev: float, sharding: Any = None
) -> Array:
    is_packed = dtype == jnp.uint16
    values = jax.random.bits(key, shape, dtype) if is_packed else jax.random.normal(key, shape)
    if sharding is not None:
        values = jax.lax.with_sharding_constraint(values, sharding)
    if is_packed:
        return values
    values = stddev * values
    if jnp.issubdtype(dtype, jnp.integer):  # conversion wraps around
        values = values.clip(jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
    return values.astype(dtype)


def dtype_bits(dtype: jnp.dtype) -> int:
    """Bits of a value on a GPU; numpy counts a byte for 4-bit integers."""
    return 4 if dtype == jnp.int4 else 8 * jnp.dtype(dtype).itemsize


@dataclass(frozen=True)
class Networks:
    """The structures of target and draft."""

    target: FlatModel[CausalLM]
    draft: FlatModel[Any]  # the algorithm's draft network; empty if it needs none
    target_config: ModelConfig
    draft_config: Any  # ``None`` if the algorithm needs no network
    placement: Placement  # devices of both; the draft may be whole on each

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
        """Bytes of the weights on a device."""
        return sum(num_bytes for num_bytes, _ in self._sizes())

    @property
    def replicated_bytes(self) -> int:
        """Bytes of the weights that each of several devices has whole."""
        return sum(num_bytes for num_bytes, is_whole in self._sizes() if is_whole)

    def _sizes(self) -> Iterator[tuple[int, bool]]:
        """The bytes of each weight on a device, and whether each of several has all of it."""
        for leaf in (*self.target.placed(self.placement), *self.draft.placed(self.placement)):
            shape: tuple[int, ...] = leaf.sharding.shard_shape(leaf.shape)
            num_bytes = math.prod(shape) * dtype_bits(leaf.dtype) // 8
            yield num_bytes, self.placement.count > 1 and shape == leaf.shape
