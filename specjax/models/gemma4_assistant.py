"""Gemma 4's assistant: a drafter whose layers have queries only, over keys of the target's layers.

Each pass reads the embedding of a token and a state of the target's width: first the target's after
its final norm, then those that the drafter predicts. All passes of a round stand at the position of
the bonus token and see the keys before it. Source: transformers, ``Gemma4AssistantForCausalLM``.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.config import Positive
from specjax.kernels.rope_store import rotate
from specjax.models.declare import Part
from specjax.models.decoder import CausalLM, TargetVocabulary
from specjax.models.gemma4 import Gemma4Config, full_sizes
from specjax.models.layers import DecoderLayer, Embedding, LayerKind, Linear, pick_row
from specjax.models.registry import layer_kinds
from specjax.models.rope import RopeTables, rope_tables


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(Gemma4Config):
    """A drafter for a target of this width, whose layers it reads: see :func:`read_layers`."""

    target_hidden_size: Positive


def read_layers(target: Any) -> tuple[int, int]:
    """The target's last layer with a window, and its last one without."""
    windowed = set(range(target.num_layers)) - {*target.full_layers}
    return max(windowed), max(target.full_layers)


class QueryAttention(nnx.Module):
    """Attention without keys and values of its own."""

    def __init__(
        self, config: Gemma4Config, kind: LayerKind, at: str, *, is_full: bool = False
    ) -> None:
        sizes = full_sizes(config) if is_full else config
        at, self.shape = f"{at}self_attn.", (sizes.num_heads, sizes.head_dim)
        width = sizes.num_heads * sizes.head_dim
        self.kind, linear = kind, partial(kind.linear, bias=kind.qkv_bias)
        self.query = linear(config.hidden_size, at, Part("q_proj", (width,)))
        self.q_norm = kind.norm(config, sizes.head_dim, f"{at}q_norm")
        self.output = linear(width, at, Part("o_proj", (config.hidden_size,)))

    def __call__(
        self,
        x: Array,
        rope: RopeTables,
        kv: Any,
        layer: int,
        attend: Any,
        row: Array | None = None,
        by_token: Any = None,
    ) -> tuple[Array, Any]:
        """Map ``[B, T, D]`` to ``[B, T, D]`` with queries over ``layer`` of the target.

        ``attend(layer, q [B, T, N, H])`` returns values in the shape of the queries.
        """
        q = self.query(x).reshape(*x.shape[:-1], *self.shape)
        # scores of the target have no scale
        q = self.q_norm(q) * jnp.asarray(self.shape[1] ** 0.5, q.dtype)
        out = attend(layer, rotate(q, rope.cos, rope.sin)).reshape(*x.shape[:-1], -1)
        return self.output(pick_row(out, row)), kv


class Gemma4Assistant(TargetVocabulary, nnx.Module):
    """The network; its state is the last hidden state, after the norm."""

    def __init__(self, config: AssistantConfig, implementation: str | None = None) -> None:
        self.config, size, wide = config, config.hidden_size, config.target_hidden_size
        dtypes, plain = config.dtypes, partial(Linear, bias=False, dtypes=config.dtypes)
        kinds, layers = layer_kinds(config, implementation), []
        for i, kind in enumerate(kinds):
            mixer = partial(QueryAttention, is_full=i in config.full_layers)
            layers.append(DecoderLayer(config, replace(kind, mixer=mixer), f"model.layers.{i}."))
        self.layers = nnx.List(layers)
        self.norm = kinds[-1].norm(config, size, "model.norm")
        self.pre_projection = plain(2 * wide, Part("pre_projection", (size,)))
        self.post_projection = plain(size, Part("post_projection", (wide,)))
        table = "model.embed_tokens"
        self.embedding = Embedding(config.vocab_size, size, table, dtype=dtypes.activations)

    def __call__(
        self, tokens: Array, hidden: Array, positions: Array, target: CausalLM, read: Any
    ) -> Array:
        """States ``[B, T, h]`` from tokens i32 ``[B, T]`` and states ``hidden [B, T, D]``.

        ``read(layer, q)`` attends to the KV of a layer of the target.
        """
        x = target.embedding(tokens)
        x = x * jnp.asarray(target.config.embedding_scale, x.dtype)
        x = self.pre_projection(jnp.concatenate([x, hidden.astype(x.dtype)], axis=-1))
        tables = {kind.rope: rope_tables(kind.rope, positions) for kind in self.kinds}
        windowed, full = read_layers(target.config)
        delta = None
        for i, (layer, kind) in enumerate(zip(self.layers, self.kinds, strict=True)):
            at = full if i in self.config.full_layers else windowed
            _, x, delta, _ = layer(x, delta, tables[kind.rope], None, at, read)
        return self.norm.add(x, delta)[1]

    @property
    def kinds(self) -> list[LayerKind]:
        return [layer.kind for layer in self.layers]

    def following(self, hidden: Array) -> Array:
        """The states ``[B, T, D]`` of the target that states ``[B, T, h]`` predict."""
        return self.post_projection(hidden)

    def logits(self, hidden: Array, target: CausalLM | None = None) -> Array:
        """Float32 logits ``[..., V]`` of states ``[..., h]``; ignores ``target``."""
        return self.embedding.attend(hidden)
