"""Layers of a network in float64, computed from its weights by name."""

from typing import Any

import numpy as np

from specjax.models.flat import FlatModel


def random_named(flat: FlatModel[Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random weights of a network by name."""
    pairs = zip(flat.names, flat.abstract, strict=True)
    return {name: rng.normal(size=leaf.shape).astype(leaf.dtype) for name, leaf in pairs}


class NumpyLayers:
    """Weights by name, and the computations on rows ``[T, D]``."""

    def __init__(self, named: dict[str, np.ndarray], eps: float) -> None:
        self.named, self.eps = {name: x.astype(np.float64) for name, x in named.items()}, eps

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.named[f"{name}.kernel"] + self.named.get(f"{name}.bias", 0.0)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        mean = np.mean(x**2, axis=-1, keepdims=True)
        return x / np.sqrt(mean + self.eps) * self.named[f"{name}.scale"]

    def mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        """The normed and gated feed-forward network, without the residual."""
        inner = self.linear(f"{name}mlp.gate_up", self.norm(f"{name}post_attention_norm", x))
        gate, up = np.split(inner, 2, axis=-1)
        return self.linear(f"{name}mlp.down", gate / (1 + np.exp(-gate)) * up)
