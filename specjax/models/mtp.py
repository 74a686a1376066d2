"""Multi-token prediction: a chain of modules, each of which drafts one token further (flax nnx).

Module ``k`` takes the state of token ``i`` that module ``k - 1`` gave, the target's last hidden
state for the first one, and the embedding of token ``i + k + 1``; it predicts token ``i + k + 2``.
Both inputs are normed, joined as ``[state, embedding]``, projected to the hidden width, and go
through one decoder layer of the target's family and a final norm. What comes out is both the state
for the next module and the input of the target's output head.

Sources: DeepSeek-V3 (arXiv 2412.19437), and the modules of MiMo-7B (arXiv 2505.07608), which are
dense.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.config import ModelConfig
from specjax.models.decoder import CausalLM
from specjax.models.layers import Attend, DecoderLayer, LayerKind, Linear, RMSNorm, rope_tables
from specjax.models.registry import layer_kinds


class MtpModule(nnx.Module):
    """Two norms, the projection of the joined inputs, a decoder layer and the final norm."""

    def __init__(self, config: ModelConfig, kind: LayerKind, kernels: str) -> None:
        size = config.hidden_size
        norm = partial(RMSNorm, config, size)
        self.hidden_norm, self.token_norm = norm(), norm()
        self.fc = Linear(2 * size, size, bias=False, dtypes=config.dtypes)
        self.layer = DecoderLayer(config, kind, kernels)
        self.norm = norm(kernels=kernels)


class MtpHead(nnx.Module):
    """The modules; embeddings and output head are the target's."""

    def __init__(self, config: ModelConfig, kernels: str = "xla") -> None:
        self.config = config
        kinds = layer_kinds(config)
        self.modules = nnx.List(MtpModule(config, kind, kernels) for kind in kinds)

    def __call__(
        self,
        index: int,
        embeds: jax.Array,
        hidden: jax.Array,
        positions: jax.Array,
        kv: Any,
        attend: Attend,
    ) -> tuple[jax.Array, Any]:
        """States ``[B, T, D]`` of module ``index``, whose keys and values are that layer of ``kv``.

        ``embeds`` and ``hidden`` are ``[B, T, D]``, positions i32 ``[B, T]`` those of the states.
        """
        module = self.modules[index]
        x = jnp.concatenate([module.hidden_norm(hidden), module.token_norm(embeds)], axis=-1)
        rope = rope_tables(module.layer.kind.rope, positions)
        _, x, delta, kv = module.layer(module.fc(x), None, rope, kv, index, attend)
        return module.norm.add(x, delta)[1], kv

    def embed(self, tokens: jax.Array, target: CausalLM) -> jax.Array:
        """Embeddings ``[..., D]`` of token ids ``[...]``."""
        return target.embedding(tokens)

    def logits(self, hidden: jax.Array, target: CausalLM) -> jax.Array:
        """Float32 logits ``[..., V]`` of states ``[..., D]`` of any module."""
        return target.logits(hidden)

    @property
    def vocabulary(self) -> None:
        """The target's."""
        return None

    def target_ids(self, draft_ids: jax.Array) -> jax.Array:
        return draft_ids
