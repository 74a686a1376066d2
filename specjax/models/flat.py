"""Models as a static structure plus a flat tuple of arrays, the form in which they enter jit.

An nnx object on the hot path costs a Python traversal per call; a flat tuple costs nothing beyond
its buffers, and the module is rebuilt inside the traced function.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

M = TypeVar("M", bound=nnx.Module)
Weights = tuple[jax.Array, ...]


@dataclass(frozen=True)
class FlatModel(Generic[M]):
    """Structure of a module: names and abstract arrays of its weights, and how to rebuild it.

    ``names[i]`` is the dotted path of weight ``i``, for example ``layers.0.attention.qkv.kernel``.
    """

    graphdef: Any
    treedef: Any
    names: tuple[str, ...]
    abstract: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, build: Callable[[nnx.Rngs], M]) -> "FlatModel[M]":
        """The structure of ``build(rngs)``, without allocating any weight."""
        module = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
        graphdef, state = nnx.split(module)
        leaves, treedef = jax.tree.flatten(state)
        names = tuple(".".join(str(key) for key in path) for path, _ in nnx.to_flat_state(state))
        abstract = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        return cls(graphdef, treedef, names, abstract)

    def rebuild(self, weights: Weights) -> M:
        """The module over ``weights``; meant to be called inside a traced function."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, list(weights)))

    def init(self, build: Callable[[nnx.Rngs], M], seed: int) -> Weights:
        """Random weights, made on the device in one compiled call."""
        make = jax.jit(lambda key: tuple(jax.tree.leaves(nnx.split(build(nnx.Rngs(key)))[1])))
        return make(jax.random.key(seed))

    def random(self, seed: int) -> Weights:
        """Random weights by name and shape, made on the device without building the module.

        One small compiled function a shape, so that a model of billions of weights starts at once:
        norms are ones, biases zeros, matrices normal with variance 1 / fan-in.
        """
        normal = jax.jit(
            lambda key, shape, dtype, scale: (scale * jax.random.normal(key, shape)).astype(dtype),
            static_argnums=(1, 2, 3),
        )
        key = jax.random.key(seed)
        weights = []
        for i, (name, leaf) in enumerate(zip(self.names, self.abstract, strict=True)):
            kind = name.rsplit(".", 1)[-1]
            if kind in ("kernel", "table"):
                fan_in = leaf.shape[0] if kind == "kernel" else leaf.shape[1]
                made = normal(jax.random.fold_in(key, i), leaf.shape, leaf.dtype, fan_in**-0.5)
            else:
                made = jnp.full(leaf.shape, 1 if kind == "scale" else 0, leaf.dtype)
            weights.append(made)
        return tuple(weights)

    def order(self, named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Values of a name map in weight order.

        Raises:
            ValueError: if names are missing or unknown.
        """
        missing = sorted(set(self.names) - set(named))
        unknown = sorted(set(named) - set(self.names))
        if missing or unknown:
            raise ValueError(f"weights do not fit the model: missing {missing}, unknown {unknown}")
        return tuple(named[name] for name in self.names)
