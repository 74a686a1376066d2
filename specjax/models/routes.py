"""Routes: the experts that the target's routers chose for each token, kept with its KV.

They have a pool of their own with the pages of the first pool, so that whatever stores, moves,
caches, sends or frees the KV of a token does the same with its routes.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.checks import refused
from specjax.config import ModelConfig
from specjax.models.declare import Cache
from specjax.models.experts import MixtureConfig

OPTION = "enable_return_routed_experts"
# tokens that are read in one call: 200 kB with 48 layers and 8 experts
ROUTES_PER_CALL = 512
# pieces of any requests that are on the device: 13 MB with these sizes
MAX_PIECES = 64


def with_routes(config: ModelConfig, args: Any) -> ModelConfig:
    """The configuration of a target that keeps routes if the engine option asks for them.

    Raises ValueError if the option is set for a model without experts.
    """
    if not args.enable_return_routed_experts:
        return config
    if not isinstance(config, MixtureConfig) or not _routed_layers(config):
        raise ValueError(
            f"{OPTION}=True needs a mixture of experts, but model={args.model!r} has none; leave "
            "it out"
        )
    return replace(config, enable_return_routed_experts=True)


def route_caches(config: ModelConfig) -> tuple[Cache, ...]:
    """The cache of a target that keeps routes: experts ``[layers with experts, K]`` of a token."""
    if not isinstance(config, MixtureConfig) or not config.enable_return_routed_experts:
        return ()
    # not uint16, which is the dtype of 8-bit KV in pools
    dtype = jnp.uint8 if config.num_experts <= 256 else jnp.int16
    shape = len(_routed_layers(config)), config.num_experts_per_tok
    return (Cache(jax.ShapeDtypeStruct(shape, dtype), is_extra=True),)


def _routed_layers(config: MixtureConfig) -> list[int]:
    return [i for i in range(config.num_layers) if i not in config.dense_layers]


def take_routes(pool: Array, index: Array) -> Array:
    """The routes ``[W, layers with experts, K]`` of the tokens at KV indices i32 ``[W]``."""
    return pool[0, index]


@dataclass
class RoutesPiece:
    """The routes ``[W, layers with experts, K]`` of ``count`` tokens.

    They may still be on their way from the device.
    """

    values: Any
    count: int

    def read(self) -> np.ndarray:
        """Wait for the values, and leave the device's memory."""
        self.values = values = np.asarray(self.values)
        return values


@dataclass
class Routes:
    """The routes of the tokens of one request; its last token has none."""

    config: MixtureConfig
    pieces: list[RoutesPiece] = field(default_factory=list)

    @classmethod
    def wanted(cls, config: ModelConfig, is_wanted: bool) -> "Routes | None":
        """The routes of a new request. Raises ValueError if the engine does not keep them."""
        if not is_wanted:
            return None
        if not isinstance(config, MixtureConfig) or not config.enable_return_routed_experts:
            demand = f"needs the engine option {OPTION}, which is False"
            raise refused("return_routed_experts", True, demand)
        return cls(config)

    @property
    def per_token(self) -> int:
        """Number of experts that the array has for a token."""
        return self.config.num_layers * self.config.num_experts_per_tok

    def array(self) -> np.ndarray:
        """The experts i32 ``[tokens, layers, K]``, zeros for layers without experts."""
        config, num_tokens = self.config, sum(piece.count for piece in self.pieces)
        shape = num_tokens, config.num_layers, config.num_experts_per_tok
        experts, at = np.zeros(shape, np.int32), 0
        for piece in self.pieces:
            end = at + piece.count
            experts[at:end, _routed_layers(config)] = piece.read()[: piece.count]
            at = end
        return experts


def with_array(output: dict[str, Any]) -> dict[str, Any]:
    """An output of a request, with the array of its routes in their place."""
    meta = output.get("meta_info", {})
    if isinstance(routes := meta.get("routed_experts"), Routes):
        return output | {"meta_info": meta | {"routed_experts": routes.array()}}
    return output
