"""Target language models of any registered family (flax nnx).

A Python loop runs the layers, because ``lax.scan`` would copy their stacked weights: a decode step
at the Llama-3.1-8B shape would take 12.4 ms instead of 4.3 (one H200, jax 0.11.2).
"""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.config import ModelConfig
from specjax.kernels.add_norm import rms_norm
from specjax.kernels.backend import resolve
from specjax.models.columns import Columns
from specjax.models.declare import Cache, Part, pool_layers, pool_windows, request_layers
from specjax.models.layers import Attend, DecoderLayer, Embedding, Linear
from specjax.models.registry import layer_kinds
from specjax.models.rope import rope_tables
from specjax.models.routes import route_caches
from specjax.models.weights import Kernel, dot, take_outputs
from specjax.types import TokenInputs


class CausalLM(nnx.Module):
    """Decoder-only language model; the caller supplies attention and KV storage."""

    def __init__(
        self, config: ModelConfig, implementation: str | None = None, shards: int = 1
    ) -> None:
        """``shards`` devices share it; see models/shards.py."""
        self.config, self.shards = config, shards
        self.implementation = implementation
        dtypes, size, vocab_size = config.dtypes, config.hidden_size, config.vocab_size
        kinds = layer_kinds(config, implementation, shards)
        how: dict[str, Any] = {"implementation": implementation, "shards": shards}
        is_tied = config.tie_word_embeddings
        # a device looks up tokens faster than it could get the rows of others
        how |= {"split": "vocab" if is_tied else None}
        table = "model.embed_tokens"
        self.embedding = Embedding(vocab_size, size, table, dtype=dtypes.activations, **how)
        at = "model.layers."
        self.layers = nnx.List(DecoderLayer(config, x, f"{at}{i}.") for i, x in enumerate(kinds))
        last = kinds[-1]
        if last.output_norm_offset is not None:
            last = replace(last, norm_offset=last.output_norm_offset)
        self.norm = last.norm(config, size, "model.norm")
        how |= {"bias": False, "dtypes": dtypes, "split": "vocab"}
        head = partial(Linear, size, Part("lm_head", (vocab_size,)), **how)
        self.lm_head = None if is_tied else head()

    def __call__(
        self,
        tokens: Array,
        positions: Array,
        kv: Any,
        attend: Attend | tuple[Attend, ...],
        feature_layers: tuple[int, ...] = (),
        by_token: TokenInputs | None = None,
        routes: list[Array] | None = None,
    ) -> tuple[Array, Array, Any]:
        """Return hidden states ``[B, T, D]`` after the final norm, features ``[B, T, F]`` and kv.

        Tokens and rotary positions are i32 ``[B, T]``. ``kv`` is the state that ``attend`` updates
        (a KV pool, a dense cache, or nothing), or both are tuples, with an entry for each pool. If
        layers are recurrent, the last entries are a ``Recur`` and the pool of requests. The
        features are the un-normed residual stream after each of ``feature_layers`` (EAGLE-3's
        auxiliary hidden states). If ``feature_layers`` is empty, the feature is the hidden state,
        as in EAGLE-1/2. ``by_token`` is what layers may read of the tokens and their requests;
        mixtures of experts read no expert for padding. To ``routes``, if it is a list, each layer
        with experts appends those that its router chose, i32 ``[B * T, K]``, or -1 for padding.
        """
        x = self.embedding(tokens)
        if self.config.normalises_embeddings:
            ones = jnp.ones(x.shape[-1], x.dtype)
            x = rms_norm(x, ones, self.config.rms_norm_eps, self.implementation)
        if self.config.embedding_scale != 1.0:
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        delta: Array | None = None
        ropes = dict.fromkeys(layer.kind.rope for layer in self.layers)
        tables = {rope: rope_tables(rope, positions) for rope in ropes}

        attends: tuple[Any, ...] = attend if isinstance(attend, tuple) else (attend,)
        pools = [*kv] if attends is attend else [kv]

        def run(pool: int, structure: Any, weights: Any, *inputs: Any) -> Any:
            layer = nnx.merge(structure, weights)
            outputs = layer(*inputs, attends[pool], by_token=by_token)
            return outputs, jax.tree.leaves(nnx.pop(layer, nnx.Intermediate))

        if resolve(self.implementation) != "xla":
            # kernels take the layer index as an operand, so one trace serves all layers. With 32
            # layers, this saves a third of the tracing time and gives the same program
            run = jax.jit(run, static_argnums=(0, 1), inline=True)
        recurrent = [layers] if (layers := request_layers(self.caches)) else []
        of_tokens = self.pool_layers(len(pools) - len(recurrent))
        if attends is not attend:  # one state for all layers
            of_tokens = [[i for layers in of_tokens for i in layers]]
        of_pools = [*of_tokens, *recurrent]
        places = {i: (n, x.index(i)) for n, x in enumerate(of_pools) for i in x}
        outputs, experts = {}, list[Array]()
        for i, layer in enumerate(self.layers):
            pool, index = places[i]
            inputs = x, delta, tables[layer.kind.rope], pools[pool], index
            results, chosen = run(pool, *nnx.split(layer), *inputs)
            outputs[i - 1], x, delta, pools[pool] = results
            experts += chosen
        if routes is not None:
            routes += experts
        if (place := places.get(len(self.layers))) is not None:  # of the routes
            pool, _ = place
            pools[pool] = attends[pool].keep(pools[pool], jnp.stack(experts, axis=1))
        outputs[len(self.layers) - 1], hidden = self.norm.add(x, delta)
        features = [outputs[i] for i in feature_layers]
        updated = tuple(pools) if attends is attend else pools[0]
        return hidden, jnp.concatenate(features, axis=-1) if features else hidden, updated

    @property
    def caches(self) -> tuple[Cache, ...]:
        """The cache of each layer, then that of the routes, if they are kept."""
        return (*(layer.attention.cache for layer in self.layers), *route_caches(self.config))

    def pool_layers(self, count: int) -> list[list[int]]:
        """The layers of each of ``count`` pools of tokens; layers with windows may have some."""
        split = pool_layers(self.caches, 1 + len(pool_windows(self.caches)))
        return list(split if len(split) == count else pool_layers(self.caches, 1))

    def logits(self, hidden: Array) -> Array:
        """Float32 logits ``[..., V]`` of final hidden states ``[..., D]``."""
        return self.columns(hidden).whole()

    def columns(self, hidden: Array) -> Columns:
        """The device's own columns of the logits of final hidden states ``[..., D]``."""
        if self.lm_head is None:
            logits = self.embedding.attend(hidden)
        else:
            logits = self.lm_head(hidden, jnp.float32)
        return Columns(self._shaped(logits), self.config.vocab_size, self.shards)

    def logits_of(self, hidden: Array, tokens: Array) -> Array:
        """Float32 logits ``[..., W]`` of selected token ids i32 ``[W]``."""
        return self.logits_with(hidden, self.head_columns(tokens))

    def head_columns(self, tokens: Array) -> Kernel:
        """The columns of the output head ``[D, W]`` for token ids i32 ``[W]``."""
        if self.lm_head is None:
            return self.embedding.table[...][tokens].T
        return take_outputs(self.lm_head.kernel[...], tokens)

    def logits_with(self, hidden: Array, columns: Kernel) -> Array:
        """Float32 logits ``[..., W]`` from columns of the output head."""
        return self._shaped(dot(hidden, columns, jnp.float32))

    def _shaped(self, logits: Array) -> Array:
        """Apply the scale and the soft limit of the family."""
        scale, cap = self.config.logit_scale, self.config.logit_softcap
        logits = logits if scale == 1.0 else logits * scale
        return logits if cap is None else cap * jnp.tanh(logits / cap)


class TargetVocabulary:
    """A draft network whose logits have the target's vocabulary."""

    vocabulary: ClassVar[None] = None

    def target_ids(self, draft_ids: Array) -> Array:
        return draft_ids


class DraftLM(TargetVocabulary, CausalLM):
    """A model of a target family that drafts for another model with the same vocabulary.

    Its recurrent state is the last hidden state, which its passes do not read.
    """

    def logits(self, hidden: Array, target: CausalLM | None = None) -> Array:
        """Float32 logits ``[..., V]`` of final hidden states ``[..., D]``; ignores ``target``."""
        return super().logits(hidden)

    def columns(self, hidden: Array, target: CausalLM | None = None) -> Columns:
        """The device's own columns of the logits; ignores ``target``."""
        return super().columns(hidden)
