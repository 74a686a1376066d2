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

from specjax.config import MtpConfig
from specjax.models.decoder import CausalLM, DecoderLayer
from specjax.models.layers import Attend, Linear, RMSNorm, rope_tables


class MtpModule(nnx.Module):
    """Two norms, the projection of the joined inputs, a decoder layer and the final norm."""

    def __init__(self, config: MtpConfig, kernels: str) -> None:
        size, dtype = config.hidden_size, config.jnp_dtype
        norm = partial(RMSNorm, size, eps=config.rms_norm_eps, dtype=dtype)
        self.hidden_norm, self.token_norm = norm(), norm()
        self.fc = Linear(2 * size, size, bias=False, dtype=dtype)
        self.layer = DecoderLayer(config, kernels)
        self.norm = norm(kernels=kernels)


class MtpHead(nnx.Module):
    """The modules; embeddings and output head are the target's."""

    def __init__(self, config: MtpConfig, kernels: str = "xla") -> None:
        self.config = config
        self.modules = nnx.List(MtpModule(config, kernels) for _ in range(config.num_layers))

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
        rope = rope_tables(self.config, positions)
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
