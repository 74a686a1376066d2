"""Block drafters (DFlash, DSpark): one pass drafts a whole block of tokens (flax nnx).

The context is a projection of target features: ``c = hidden_norm(fc(features))``. For tokens of the
text, each layer's keys and values come from ``c`` alone, so they are written once per token. A
draft pass runs the last token and mask tokens through pre-norm decoder layers with query and key
norms. Every row sees the whole context, and in a layer that is not causal also the whole block.

``context.kernel`` is a second copy of the key and value projections of all layers, in one matrix,
so that one product computes them all. Otherwise, XLA would concatenate them in every round.

Sources: DFlash (arXiv 2602.06036), DSpark, and the published checkpoints.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.config import BlockConfig
from specjax.models.decoder import CausalLM
from specjax.models.eagle import DraftHead
from specjax.models.family import (
    Part,
    Recipe,
    Recipes,
    decoder_layer,
    draft_kinds,
    linear,
    vectors,
    vocabulary_recipes,
)
from specjax.models.layers import (
    Attend,
    DecoderLayer,
    Embedding,
    Linear,
    RMSNorm,
    Store,
)
from specjax.models.rope import rope_tables


class MarkovHead(nnx.Module):
    """Computes a low-rank bias for the logits of a draft from the token before it.

    ``vanilla`` reads only the previous token. ``gated`` also reads the hidden state. ``rnn`` reads
    both, and a state that it carries from token to token. Axes: R rank, V draft vocabulary.
    """

    def __init__(self, config: BlockConfig) -> None:
        dtypes, rank, size = config.dtypes, config.markov_rank, config.hidden_size
        self.kind, self.rank = config.markov_head, rank
        self.embedding = Embedding(config.vocab_size, rank, dtype=dtypes.activations)
        self.output = Linear(rank, config.draft_vocab_size, bias=False, dtypes=dtypes)
        gated, joint = self.kind == "gated", self.kind == "rnn"
        self.gate = Linear(size + rank, rank, bias=True, dtypes=dtypes) if gated else None
        self.joint = Linear(size + 2 * rank, 3 * rank, bias=True, dtypes=dtypes) if joint else None

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

    def __init__(self, config: BlockConfig, implementation: str | None = None) -> None:
        DraftHead.__init__(self, config)
        dtypes, size = config.dtypes, config.hidden_size
        kv_size = 2 * config.num_kv_heads * config.head_dim
        self.fc = Linear(config.feature_size, size, bias=False, dtypes=dtypes)
        self.hidden_norm = RMSNorm(config, size)
        self.context = Linear(
            size, config.num_layers * kv_size, bias=config.qkv_bias, dtypes=dtypes
        )
        self.layers = nnx.List(
            DecoderLayer(config, kind, implementation) for kind in draft_kinds(config)
        )
        self.norm = RMSNorm(config, size, implementation=implementation)
        self.markov = MarkovHead(config) if config.markov_head else None
        inputs, is_there = config.confidence_size, config.has_confidence_head
        self.confidence_head = Linear(inputs, 1, bias=True, dtypes=dtypes) if is_there else None

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
        shape = (*joined.shape[:-1], 2, config.num_layers, config.num_kv_heads, config.head_dim)
        keys, values = jnp.moveaxis(joined.reshape(shape), -4, 0)
        rope = rope_tables(config.rope, positions)
        for i, layer in enumerate(self.layers):
            own = layer.attention.key_rope(rope)
            kv = store(kv, i, keys[..., i, :, :], values[..., i, :, :], own)
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


def block_recipes(config: BlockConfig) -> Recipes:
    """Recipes for all weights of a block drafter, by weight name; tensors have canonical names."""
    size, dtypes, rank = config.hidden_size, config.dtypes, config.markov_rank
    kv_size = config.num_kv_heads * config.head_dim
    recipes = vocabulary_recipes(config)
    recipes |= linear("fc", {"fc": size}, config.feature_size, dtypes)
    recipes |= vectors(size, {"hidden_norm": "hidden_norm", "norm": "norm"})
    names = [f"layers.{i}.self_attn.{x}_proj" for x in "kv" for i in range(config.num_layers)]
    parts = dict.fromkeys(names, kv_size)
    recipes |= linear("context", parts, size, dtypes, bias=config.qkv_bias)
    for i, kind in enumerate(draft_kinds(config)):
        recipes |= decoder_layer(config, kind, f"layers.{i}.", f"layers.{i}.")
    if config.markov_head:
        table = Part("markov_head.markov_w1.weight", (config.vocab_size, rank))
        recipes["markov.embedding.table"] = Recipe((table,))
        width = {"markov_head.markov_w2": config.draft_vocab_size}
        recipes |= linear("markov.output", width, rank, dtypes)
    if config.markov_head == "gated":
        gate = {"markov_head.gate_proj": rank}
        recipes |= linear("markov.gate", gate, size + rank, dtypes, bias=True)
    if config.markov_head == "rnn":
        joint = {"markov_head.joint_proj": 3 * rank}
        recipes |= linear("markov.joint", joint, size + 2 * rank, dtypes, bias=True)
    if config.has_confidence_head:
        proj, inputs = {"confidence_head.proj": 1}, config.confidence_size
        recipes |= linear("confidence_head", proj, inputs, dtypes, bias=True)
    return recipes
