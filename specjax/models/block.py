"""Block drafters (DFlash, DSpark): one pass drafts a whole block of tokens (flax nnx).

The context is a projection of target features: ``c = hidden_norm(fc(features))``. For tokens of the
text, each layer's keys and values come from ``c`` alone, so they are written once per token. A
draft pass runs the last token and mask tokens through pre-norm decoder layers with query and key
norms. Every row sees the whole context, and in a layer that is not causal also the whole block.

``context.kernel`` is a second copy of the key and value projections of all layers, in one matrix,
so that one product computes them all. Otherwise, XLA would concatenate them in every round.

Sources: DFlash (arXiv 2602.06036), DSpark, and the published checkpoints.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.config import BlockConfig
from specjax.models.declare import Part
from specjax.models.decoder import CausalLM
from specjax.models.eagle import DraftHead
from specjax.models.family import draft_kinds
from specjax.models.layers import Attend, DecoderLayer, Embedding, Linear, RMSNorm, Store
from specjax.models.rope import rope_tables


class MarkovHead(nnx.Module):
    """Computes a low-rank bias for the logits of a draft from the token before it.

    ``vanilla`` reads only the previous token. ``gated`` also reads the hidden state. ``rnn`` reads
    both, and a state that it carries from token to token. Axes: R rank, V draft vocabulary.
    """

    def __init__(self, config: BlockConfig) -> None:
        dtypes, rank, size = config.dtypes, config.markov_rank, config.hidden_size
        at, linear = "markov_head.", partial(Linear, dtypes=dtypes)
        self.kind, self.rank = config.markov_head, rank
        table = f"{at}markov_w1"
        self.embedding = Embedding(config.vocab_size, rank, table, dtype=dtypes.activations)
        output = Part(f"{at}markov_w2", (config.draft_vocab_size,))
        self.output = linear(rank, output, bias=False)
        gate, joint = Part(f"{at}gate_proj", (rank,)), Part(f"{at}joint_proj", (3 * rank,))
        self.gate = linear(size + rank, gate, bias=True) if self.kind == "gated" else None
        self.joint = linear(size + 2 * rank, joint, bias=True) if self.kind == "rnn" else None

    def start(self, batch: int) -> Array:
        """The state ``[B, R]`` before the first token of a block."""
        return jnp.zeros((batch, self.rank), self.embedding.table.dtype)

    def __call__(self, tokens: Array, hidden: Array, state: Array) -> tuple[Array, Array]:
        """Return the bias f32 ``[B, V]`` and the next state ``[B, R]``.

        ``tokens`` i32 ``[B]`` are the target ids of the previous tokens. ``hidden [B, D]`` are the
        states of the rows whose logits are adjusted.
        """
        read = self.embedding(tokens)
        if self.gate is not None:
            read = jax.nn.sigmoid(self.gate(jnp.concatenate([hidden, read], axis=-1))) * read
        if self.joint is not None:
            joined = self.joint(jnp.concatenate([state, read, hidden], axis=-1))
            gate, candidate, read = jnp.split(joined, 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            state = gate * state + (1 - gate) * jnp.tanh(candidate)
            read = jnp.tanh(read)
        return self.output(read, jnp.float32), state


class BlockDraft(DraftHead):
    """The network of a :class:`~specjax.config.BlockConfig`.

    It uses the target's embeddings, and without ``has_own_lm_head`` also the target's output head.
    """

    config: BlockConfig

    def __init__(
        self, config: BlockConfig, implementation: str | None = None, shards: int = 1
    ) -> None:
        DraftHead.__init__(self, config, shards)
        linear, size = partial(Linear, dtypes=config.dtypes), config.hidden_size
        self.fc = linear(config.feature_size, Part("fc", (size,)), bias=False)
        self.hidden_norm = RMSNorm(config, size, "hidden_norm")
        numbers, kv_size = range(config.num_layers), config.num_kv_heads * config.head_dim
        names = [f"layers.{i}.self_attn.{x}_proj" for x in "kv" for i in numbers]
        tensors = (Part(name, (kv_size,)) for name in names)
        self.context = linear(size, *tensors, bias=config.qkv_bias, split="out")
        kinds = enumerate(draft_kinds(config, implementation, shards))
        self.layers = nnx.List(DecoderLayer(config, kind, f"layers.{i}.") for i, kind in kinds)
        self.norm = RMSNorm(config, size, "norm", implementation=implementation)
        self.markov = MarkovHead(config) if config.markov_head else None
        proj = Part("confidence_head.proj", (1,))
        head = partial(linear, config.confidence_size, proj, bias=True)
        self.confidence_head = head() if config.has_confidence_head else None

    def confidences(self, hidden: Array, before: Array) -> Array | None:
        """Probability f32 ``[B, N]`` that a draft is accepted if all drafts before it are.

        ``hidden [B, N, D]`` are the states that predict the drafts, and ``before`` i32 ``[B, N]``
        the tokens before the drafts. Without a confidence head, the result is ``None``.
        """
        if self.confidence_head is None:
            return None
        if self.config.confidence_with_markov:
            assert self.markov is not None
            hidden = jnp.concatenate([hidden, self.markov.embedding(before)], axis=-1)
        return jax.nn.sigmoid(self.confidence_head(hidden, jnp.float32)[..., 0])

    def store(self, features: Array, positions: Array, kv: Any, store: Store) -> Any:
        """Write the keys and values of text tokens in all layers, and return the updated ``kv``.

        ``features [B, T, K * D_target]`` are the target's features for these tokens. ``store``
        writes to their ``positions``, i32 ``[B, T]``.
        """
        config = self.config
        context = self.hidden_norm(self.fc(features.astype(config.dtypes.activations)))
        joined = self.context(context)
        kv_heads = config.num_kv_heads // self.shards
        shape = (*joined.shape[:-1], 2, config.num_layers, kv_heads, config.head_dim)
        keys, values = jnp.moveaxis(joined.reshape(shape), -4, 0)
        rope = rope_tables(config.rope, positions)
        for i, layer in enumerate(self.layers):
            layer_rope = layer.attention.key_rope(rope)
            kv = store(kv, i, keys[..., i, :, :], values[..., i, :, :], layer_rope)
        return kv

    def __call__(
        self,
        tokens: Array,
        positions: Array,
        kv: Any,
        attend: Attend,
        causal_attend: Attend,
        target: CausalLM,
    ) -> tuple[Array, Any]:
        """Return states ``[B, T, D]`` of the block after the final norm, and the updated ``kv``.

        Args:
            tokens: i32 ``[B, T]``: the last token, then mask tokens.
            positions: i32 ``[B, T]``.
            kv: the pool; the block's keys and values are written after the text.
            attend: attention for layers whose rows see the whole block.
            causal_attend: attention for causal layers.
            target: the model whose embeddings are used.
        """
        config = self.config
        x, delta = self.embed(tokens, target), None
        rope = rope_tables(config.rope, positions)
        for i, layer in enumerate(self.layers):
            how = causal_attend if config.causal[i] else attend
            _, x, delta, kv = layer(x, delta, rope, kv, i, how)
        return self.norm.add(x, delta)[1], kv
