"""Draft heads: EAGLE-1/2, EAGLE-3, and modules for multi-token prediction (flax nnx).

The EAGLE heads share one interface, so that code outside this file does not depend on the version:

* ``fuse(features [B,T,F]) -> [B,T,D]`` projects target features to the head's hidden width.
* ``__call__(embeds [B,T,D], hidden [B,T,D], positions [B,T], kv, attend, row=None) -> (hidden,
  kv)`` runs one pass. The returned hidden state ``[B,T,D]`` is the recurrent input of the next
  draft step. With ``row`` i32 ``[B]``, only this row of each request is returned, as ``[B,1,D]``,
  because the next round starts from it. The other rows only store their keys and values.
* ``store(embeds, hidden, positions, kv, store) -> kv`` does only that, for a head of one layer.
* ``embed(tokens, target)`` and ``logits(hidden, target)`` use the target's tables by default.
* ``target_ids(draft_ids)`` maps draft vocabulary ids to target vocabulary ids.

Sources: EAGLE (arXiv 2401.15077), EAGLE-3 (arXiv 2503.01840) and the published checkpoints.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.config import BlockConfig, DraftConfig, ModelConfig
from specjax.kernels.add_norm import whole
from specjax.models.columns import Columns
from specjax.models.declare import Part, weight
from specjax.models.decoder import CausalLM
from specjax.models.family import Modules, draft_kinds
from specjax.models.hot_head import DraftVocabulary, HotHead, TargetHead
from specjax.models.layers import (
    MLP,
    Attend,
    Attention,
    DecoderLayer,
    Embedding,
    LayerKind,
    Linear,
    RMSNorm,
    Store,
    pick_row,
)
from specjax.models.registry import family_of, layer_kinds
from specjax.models.rope import rope_tables


class DraftHead(TargetHead, nnx.Module):
    """The common parts of EAGLE heads and block drafters: embeddings, output head, vocabulary.

    Declarations have the names of tensors in published files, without ``model.``.
    """

    config: Any

    def __init__(self, config: DraftConfig | BlockConfig, shards: int = 1) -> None:
        """``shards`` devices share layers and the output head; the rest is whole on each."""
        self.config, self.shards = config, shards
        dtypes, size = config.dtypes, config.hidden_size
        own_head = config.has_own_lm_head and not config.ties_lm_head
        self.embedding = (
            Embedding(config.vocab_size, size, "embed_tokens", dtype=dtypes.activations)
            if config.has_own_embedding
            else None
        )
        head = Part("lm_head", (config.draft_vocab_size,))
        linear = partial(Linear, bias=False, dtypes=dtypes, split="vocab")
        self.lm_head = linear(size, head) if own_head else None
        # target id = draft id + offset, as in published `d2t` tensors
        offsets = partial(weight, "d2t", (config.draft_vocab_size,), jnp.int32)
        is_reduced = config.draft_vocab_size != config.vocab_size
        self.d2t = offsets(kind=DraftVocabulary) if is_reduced else None
        self.hot_head = HotHead.of(config)

    def embed(self, tokens: Array, target: CausalLM) -> Array:
        """Embeddings ``[..., D]`` of target token ids ``[...]``: the head's own or the target's."""
        table = target.embedding if self.embedding is None else self.embedding
        return table(tokens).astype(self.config.dtypes.activations)

    @property
    def offsets(self) -> Array | None:
        return super().offsets if self.d2t is None else self.d2t[...]

    def columns(self, hidden: Array, target: CausalLM) -> Columns:
        """The device's own columns of the logits of recurrent states ``[..., D]``."""
        if self.lm_head is not None:
            logits = self.lm_head(hidden, jnp.float32)
            return Columns(logits, self.config.draft_vocab_size, self.shards)
        if self.config.ties_lm_head:
            table = target.embedding if self.embedding is None else self.embedding
            return Columns(table.attend(hidden), self.config.vocab_size, table.shards)
        return super().columns(hidden, target)


class Eagle3Head(DraftHead):
    """EAGLE-3: a layer over ``[norm(embed(token)), norm(hidden)]`` that reads three target layers.

    A P-EAGLE head may have more ``layers``. Its ``mask_hidden [1, 1, F]`` is the feature of a mask
    token. Mask tokens after the text predict several tokens in one pass, without recurrence.

    EAGLE 3.1 (arXiv 2605.09992) has two options. ``has_fc_norm`` normalises each captured feature
    before ``fc``. With ``norm_output``, the normalised output is the input of the next step.
    ``norm_before_fc``, from the library speculators, normalises the concatenated features once.
    """

    def __init__(
        self, config: DraftConfig, implementation: str | None = None, shards: int = 1
    ) -> None:
        super().__init__(config, shards)
        size, norm = config.hidden_size, partial(RMSNorm, config)
        kind, *kinds = draft_kinds(config, implementation, shards)
        at = "midlayer."
        self.attention = Attention(config, kind, at, in_size=2 * size)
        self.post_attention_norm = kind.norm(config, size, f"{at}post_attention_layernorm")
        self.mlp = MLP(config, kind, at)
        width, dtypes = config.feature_size, config.dtypes
        self.fc = Linear(width, Part("fc", (size,)), bias=config.fc_bias, dtypes=dtypes)
        self.feature_norm = norm(width, "input_norm") if config.norm_before_fc else None
        names = [f"fc_norm.{i}" for i in range(len(config.feature_layers))]
        fc_norms = (norm(config.target_hidden_size, name) for name in names)
        self.fc_norms = nnx.List(fc_norms) if config.has_fc_norm else None
        self.input_norm = norm(size, f"{at}input_layernorm")
        self.hidden_norm, self.norm = norm(size, f"{at}hidden_norm"), norm(size, "norm")
        numbered = enumerate(kinds, start=1)
        self.layers = nnx.List(DecoderLayer(config, x, f"layers.{i}.") for i, x in numbered)
        mask = partial(weight, "mask_hidden", (1, 1, width), dtypes.activations, stddev=1.0)
        self.mask_hidden = None if config.mask_token_id is None else mask()

    def fuse(self, features: Array) -> Array:
        """Project the captured target features ``[B, T, 3 * D_target]`` to ``[B, T, D]``."""
        features = features.astype(self.config.dtypes.activations)
        if self.feature_norm is not None:
            features = self.feature_norm(features)
        if self.fc_norms is not None:
            chunks = jnp.split(features, len(self.fc_norms), axis=-1)
            normed = [norm(x) for norm, x in zip(self.fc_norms, chunks, strict=True)]
            features = jnp.concatenate(normed, axis=-1)
        return self.fc(features)

    def __call__(
        self,
        embeds: Array,
        hidden: Array,
        positions: Array,
        kv: Any,
        attend: Attend,
        row: Array | None = None,
    ) -> tuple[Array, Any]:
        """Run the head once. Without ``norm_output``, it returns states before the final norm."""
        x, normed = self._join(embeds, hidden)
        residual = normed if self.config.norm_before_residual else hidden
        rope = rope_tables(self.config.rope, positions)
        rows = [None] * len(self.layers) + [row]  # only the last layer selects rows
        mixed, kv = self.attention(x, rope, kv, 0, attend, rows[0])
        x, normed = self.post_attention_norm.add(pick_row(residual, rows[0]), mixed)
        delta = self.mlp(normed)
        for i, layer in enumerate(self.layers, start=1):
            _, x, delta, kv = layer(x, delta, rope, kv, i, attend, rows[i])
        x = x + whole(delta, x.ndim, x.dtype)
        return (self.norm(x) if self.config.norm_output else x), kv

    def store(self, embeds: Array, hidden: Array, positions: Array, kv: Any, store: Store) -> Any:
        x, rope = self._join(embeds, hidden)[0], rope_tables(self.config.rope, positions)
        return self.attention.store(x, rope, kv, 0, store)

    def _join(self, embeds: Array, hidden: Array) -> tuple[Array, Array]:
        """Return the input of the first layer, and the normalised ``hidden``."""
        normed = self.hidden_norm(hidden)
        return jnp.concatenate([self.input_norm(embeds), normed], axis=-1), normed

    def columns(self, hidden: Array, target: CausalLM) -> Columns:
        return super().columns(hidden if self.config.norm_output else self.norm(hidden), target)


class EagleHead(DraftHead):
    """EAGLE-1/2: ``fc([embed(token), hidden])``, Llama layers, and the target's output head.

    The target feature is the hidden state after the target's final norm.
    """

    def __init__(
        self, config: DraftConfig, implementation: str | None = None, shards: int = 1
    ) -> None:
        super().__init__(config, shards)
        size = config.hidden_size
        in_size = size + config.target_hidden_size
        self.fc = Linear(in_size, Part("fc", (size,)), bias=config.fc_bias, dtypes=config.dtypes)
        self.layers = nnx.List(
            DecoderLayer(config, kind, f"layers.{i}.", has_input_norm=i > 0)
            for i, kind in enumerate(draft_kinds(config, implementation, shards))
        )

    def fuse(self, features: Array) -> Array:
        """Return the features as they are; ``__call__`` joins them with the embeddings."""
        return features.astype(self.config.dtypes.activations)

    def __call__(
        self,
        embeds: Array,
        hidden: Array,
        positions: Array,
        kv: Any,
        attend: Attend,
        row: Array | None = None,
    ) -> tuple[Array, Any]:
        """Run the head once; logits and the next step both read the returned states."""
        x = self._join(embeds, hidden)
        rope = rope_tables(self.config.rope, positions)
        delta: Array | None = None
        for i, layer in enumerate(self.layers):
            is_last = i == len(self.layers) - 1
            _, x, delta, kv = layer(x, delta, rope, kv, i, attend, row if is_last else None)
        assert delta is not None  # a head has layers
        return x + whole(delta, x.ndim, x.dtype), kv

    def store(self, embeds: Array, hidden: Array, positions: Array, kv: Any, store: Store) -> Any:
        x, rope = self._join(embeds, hidden), rope_tables(self.config.rope, positions)
        return self.layers[0].store(x, rope, kv, 0, store)

    def _join(self, embeds: Array, hidden: Array) -> Array:
        return self.fc(jnp.concatenate([embeds, hidden], axis=-1))


class MtpModule(nnx.Module):
    """Two input norms, a projection of the joined inputs, a decoder layer and a final norm."""

    def __init__(self, config: ModelConfig, kind: LayerKind, at: str, stored: Modules) -> None:
        size, self.is_token_first = config.hidden_size, stored.is_token_first
        norm = partial(kind.norm, config, size)
        self.hidden_norm = norm(at + stored.hidden_norm)
        self.token_norm = norm(at + stored.token_norm)
        projection = Part(at + stored.projection, (size,))
        self.fc = Linear(2 * size, projection, bias=False, dtypes=config.dtypes)
        self.layer = DecoderLayer(config, kind, at + stored.layer)
        self.norm = norm(at + stored.norm)

    def join(self, embeds: Array, hidden: Array) -> Array:
        """The input of the layer."""
        inputs = [self.hidden_norm(hidden), self.token_norm(embeds)]
        return self.fc(jnp.concatenate(inputs[:: -1 if self.is_token_first else 1], axis=-1))

    def __call__(
        self,
        embeds: Array,
        hidden: Array,
        positions: Array,
        kv: Any,
        index: int,
        attend: Attend,
        **options: Any,
    ) -> tuple[Array, Any]:
        """Run the module, which uses layer ``index`` of ``kv``; return its states ``[B, T, D]``.

        ``embeds`` and ``hidden`` are ``[B, T, D]``; ``hidden`` is at positions i32 ``[B, T]``.
        ``options`` are those of a decoder layer.
        """
        rope = rope_tables(self.layer.kind.rope, positions)
        inputs = self.join(embeds, hidden), None, rope, kv, index, attend
        _, x, delta, kv = self.layer(*inputs, **options)
        return self.norm.add(x, delta)[1], kv


class MtpHead(TargetHead, nnx.Module):
    """The modules for multi-token prediction; embeddings and output head are the target's.

    To predict token ``i + k + 2``, module ``k`` reads the embedding of token ``i + k + 1`` and the
    state at token ``i``. The state comes from module ``k - 1``, or for module 0 from the target's
    last hidden layer. Both inputs are normalised, joined in the order of the family, projected to
    the hidden width, and passed through a decoder layer of the target's family and a final norm.
    The next module and the target's output head read the result.

    With the interface of EAGLE heads, module 0 drafts all tokens: further passes read the states
    that it returned, after its final norm.

    Sources: DeepSeek-V3 (arXiv 2412.19437), the dense modules of MiMo-7B (arXiv 2505.07608), the
    mixtures of GLM-4.5 (arXiv 2508.06471), and published engines for Qwen3.5.
    """

    def __init__(
        self, config: ModelConfig, implementation: str | None = None, shards: int = 1
    ) -> None:
        self.config, self.shards, self.hot_head = config, shards, HotHead.of(config)
        kinds, stored = layer_kinds(config, implementation, shards), family_of(config).modules
        self.modules = nnx.List(
            MtpModule(config, kind, stored.prefix(config.first_layer, i), stored)
            for i, kind in enumerate(kinds)
        )

    def fuse(self, features: Array) -> Array:
        """Return the features, to which module 0 applies its norm."""
        return features

    def __call__(
        self,
        embeds: Array,
        hidden: Array,
        positions: Array,
        kv: Any,
        attend: Attend,
        row: Array | None = None,
    ) -> tuple[Array, Any]:
        """Run module 0; logits and the next step both read the returned states."""
        return self.modules[0](embeds, hidden, positions, kv, 0, attend, row=row)

    def store(self, embeds: Array, hidden: Array, positions: Array, kv: Any, store: Store) -> Any:
        module: MtpModule = self.modules[0]
        rope = rope_tables(module.layer.kind.rope, positions)
        return module.layer.store(module.join(embeds, hidden), rope, kv, 0, store)

    def embed(self, tokens: Array, target: CausalLM) -> Array:
        """Embeddings ``[..., D]`` of token ids ``[...]``."""
        return target.embedding(tokens)


def build_head(
    config: DraftConfig | ModelConfig, implementation: str | None = None, shards: int = 1
) -> Eagle3Head | EagleHead | MtpHead:
    """The network of an EAGLE head, or with a target's configuration that of its modules."""
    if isinstance(config, ModelConfig):
        return MtpHead(config, implementation, shards)
    return (Eagle3Head if config.fuses_features else EagleHead)(config, implementation, shards)
