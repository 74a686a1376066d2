"""Target language models: Llama 2/3.x, Mistral, Qwen2/2.5 and Qwen3 (flax nnx).

The families differ in biases, query/key norms, rotary scaling and tying only, all of which
:class:`~specjax.config.ModelConfig` says; one module serves them. Layers are a Python loop over
per-layer weights: ``lax.scan`` over stacked weights copies them (12.4 ms against 4.3 for a decode
step at the Llama-3.1-8B shape on one H200, jax 0.11.2).
"""

from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.config import ModelConfig, MtpConfig
from specjax.models.layers import (
    MLP,
    Attend,
    Attention,
    Embedding,
    Linear,
    RMSNorm,
    RopeTables,
    dot,
    rope_tables,
)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward block with residual connections."""

    def __init__(self, config: ModelConfig | MtpConfig, kernels: str = "xla") -> None:
        norm = partial(
            RMSNorm,
            config.hidden_size,
            eps=config.rms_norm_eps,
            dtype=config.jnp_dtype,
            kernels=kernels,
        )
        self.input_norm = norm()
        self.attention = Attention(
            config,
            in_size=config.hidden_size,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            qk_norm=config.qk_norm,
            kernels=kernels,
        )
        self.post_attention_norm = norm()
        self.mlp = MLP(config, bias=config.mlp_bias, kernels=kernels)

    def __call__(
        self,
        x: jax.Array,
        delta: jax.Array | None,
        rope: RopeTables,
        kv: Any,
        layer: int,
        attend: Attend,
    ) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        """``x + delta``, the layer's output for it as two summands, and kv as ``attend`` left it.

        Additions wait for the norm behind them, with which they make one kernel.
        """
        x, normed = self.input_norm.add(x, delta)
        mixed, kv = self.attention(normed, rope, kv, layer, attend)
        middle, normed = self.post_attention_norm.add(x, mixed)
        return x, middle, self.mlp(normed), kv


class CausalLM(nnx.Module):
    """Decoder-only language model whose attention and KV storage are supplied by the caller."""

    def __init__(self, config: ModelConfig, kernels: str = "xla") -> None:
        self.config = config
        self.kernels = kernels
        dtype, size, vocab_size = config.jnp_dtype, config.hidden_size, config.vocab_size
        self.embedding = Embedding(vocab_size, size, dtype=dtype)
        self.layers = nnx.List(DecoderLayer(config, kernels) for _ in range(config.num_layers))
        self.norm = RMSNorm(size, eps=config.rms_norm_eps, dtype=dtype, kernels=kernels)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(size, vocab_size, bias=False, dtype=dtype)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        kv: Any,
        attend: Attend,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Hidden states ``[B, T, D]`` after the final norm, features ``[B, T, F]`` and kv.

        Tokens and rotary positions are i32 ``[B, T]``; ``kv`` is whatever ``attend`` threads
        through (a KV pool, a dense cache, nothing). The residual-stream outputs of
        ``feature_layers``, un-normed, are the EAGLE-3 feature (auxiliary hidden states); without
        layers the feature is the hidden state, as EAGLE-1/2 take it.
        """
        x = self.embedding(tokens)
        delta: jax.Array | None = None
        rope = rope_tables(self.config, positions)

        def run(structure: Any, weights: Any, *inputs: Any) -> Any:
            return nnx.merge(structure, weights)(*inputs, attend)

        if self.kernels == "pallas":
            # kernels take the layer as an operand, so that one trace serves all: the same program,
            # of 32 layers, in two thirds of the time to trace it
            run = jax.jit(run, static_argnums=0, inline=True)
        outputs = {}
        for i, layer in enumerate(self.layers):
            inputs = x, delta, rope, kv, i
            outputs[i - 1], x, delta, kv = run(*nnx.split(layer), *inputs)
        outputs[len(self.layers) - 1], hidden = self.norm.add(x, delta)
        features = [outputs[i] for i in feature_layers]
        return hidden, jnp.concatenate(features, axis=-1) if features else hidden, kv

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 logits ``[..., V]`` of final hidden states ``[..., D]``."""
        if self.lm_head is None:
            return self.embedding.attend(hidden)
        return dot(hidden, self.lm_head.kernel[...], jnp.float32)


class DraftLM(CausalLM):
    """A target family that drafts for another model over the same vocabulary.

    The recurrent state of drafting is its last hidden state, which its passes do not read.
    """

    vocabulary: ClassVar[None] = None  # a column of the logits is its token

    def logits(self, hidden: jax.Array, target: CausalLM | None = None) -> jax.Array:
        """Float32 logits ``[..., V]`` of final hidden states ``[..., D]``, all its own."""
        return super().logits(hidden)

    def target_ids(self, draft_ids: jax.Array) -> jax.Array:
        return draft_ids
