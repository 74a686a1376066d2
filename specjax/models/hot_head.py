"""Drafts that use the target's output head, or its columns for a hot vocabulary.

They would read all of it for each drafted token: 1.05 GB at the Llama-3.1-8B shape, against 0.26 GB
for the 32,000 tokens that are most frequent. The columns are copied when weights are loaded, and
again when they are replaced. Source: FR-Spec (arXiv 2502.14856).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Optional

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.config import TransformerConfig
from specjax.models.columns import Columns
from specjax.models.declare import weight
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel, Networks, Weights
from specjax.models.weights import abstract_kernel, take_outputs

TOKEN_MAP = "token_map"  # a tensor with the ids of the tokens, each minus its index


class DraftVocabulary(nnx.Variable):
    """Integer vocabulary map of a draft head; training does not change it."""


class HotHead(nnx.Module):
    """The tokens i32 ``[W]`` and the columns ``[D, W]``, which :func:`hot_columns` makes."""

    def __init__(self, config: TransformerConfig) -> None:
        assert config.hot is not None
        shape, size = (config.hot.size,), config.hidden_size
        # target id = draft id + offset, so that random weights have different ids
        self.offsets = weight(TOKEN_MAP, shape, jnp.int32, kind=DraftVocabulary)
        dtypes = config.dtypes._replace(quantization=config.hot.head)
        kernel, ids = abstract_kernel(size, config.vocab_size, dtypes), self.offsets.get_value()
        columns = jax.eval_shape(take_outputs, kernel, ids)
        self.kernel = nnx.Param(columns, stddev=size**-0.5)

    @classmethod
    def of(cls, config: TransformerConfig) -> Optional["HotHead"]:
        """The head of a draft's configuration; ``None`` if it has no hot vocabulary."""
        return None if config.hot is None else cls(config)


def ids_of(offsets: Array) -> Array:
    """Target token ids i32 ``[W]`` of a draft vocabulary with these offsets."""
    return offsets + jnp.arange(offsets.shape[0], dtype=jnp.int32)


class TargetHead:
    """A draft network that uses the target's output head, or a :class:`HotHead` of it."""

    hot_head: HotHead | None

    @property
    def offsets(self) -> Array | None:
        """Target ids i32 ``[W]`` less draft ids; ``None`` if both are the same."""
        return None if self.hot_head is None else self.hot_head.offsets[...]

    @property
    def vocabulary(self) -> Array | None:
        """Target token ids i32 ``[W]`` of the logits; ``None`` if they are of all tokens."""
        return None if self.offsets is None else ids_of(self.offsets)

    def target_ids(self, draft_ids: Array) -> Array:
        return draft_ids if self.offsets is None else draft_ids + self.offsets[draft_ids]

    def logits(self, hidden: Array, target: CausalLM) -> Array:
        """Float32 logits ``[..., W]``, by default of all tokens, of states ``[..., D]``."""
        return self.columns(hidden, target).whole()

    def columns(self, hidden: Array, target: CausalLM) -> Columns:
        """The device's own columns of the logits of states ``[..., D]``."""
        if self.hot_head is None:
            return target.columns(hidden)
        logits = target.logits_with(hidden, self.hot_head.kernel[...])
        return Columns(logits, logits.shape[-1])


def hot_columns(nets: Networks, target: Weights, draft: Mapping[str, Any]) -> dict[str, Array]:
    """Make the columns of a draft's :class:`HotHead` by name; none if it has no such head.

    ``target`` are the target's weights, and ``draft`` those of the draft by name.
    """
    names = [name for name in nets.draft.names if name.startswith("hot_head.kernel")]
    if not names:
        return {}
    put = nets.placement.put_weights
    columns = put(_columns(nets.target, target, put(draft["hot_head.offsets"])))
    return dict(zip(names, jax.tree.leaves(columns), strict=True))


@partial(jax.jit, static_argnums=0)
def _columns(flat: FlatModel[CausalLM], weights: Weights, offsets: Array) -> Any:
    return flat.rebuild(weights).head_columns(ids_of(offsets))
