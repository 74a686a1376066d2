"""Train block drafters: one pass drafts the tokens after many anchors in each packed row.

An anchor is a known token at position p of a packed row. Its block sees the target features before
p in the same text and the block's own rows. It predicts the target's tokens at positions p + 1 to
p + G. The Markov head reads the tokens of the text. The mask is DFlash's (arXiv 2602.06036).

Axes: B rows, T tokens per row, N anchors per row, R rows and G drafts per block, D hidden, V vocab.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.config import BlockConfig, ModelConfig
from specjax.kernels.rope_store import normed, rotate
from specjax.models.block import BlockDraft
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel, Weights
from specjax.models.layers import Attend, dense_attention, rotated
from specjax.models.rope import RopeTables
from specjax.training.trainer import Trainer, TrainState, layer_shape
from specjax.training.ttt import PackedBatch, StepStatistics, labels_of, packed_attend

# weight of each draft's loss relative to that of the previous draft
DRAFT_DECAY = 0.85
CONFIDENCE_WEIGHT = 0.1
# temperature at which the loss wants drafts to be accepted, apart from 0
TEMPERATURE = 0.8
# number of blocks whose logits exist at the same time
BLOCKS_AT_ONCE = 1024
# number of blocks that attend together, masked apart; 64 blocks of 8 rows are 1/8 of 4096 keys
GROUP = 64


def block_draft_config(model: ModelConfig, **changes: Any) -> BlockConfig:
    """Configure a block drafter with the target's layer shape, except for ``changes``.

    Its mask token is the last token id, which is unused if the target's vocabulary is padded.
    """
    if model.num_layers < 3:
        raise ValueError(f"--model has {model.num_layers} layers; block drafters need 3 or more")
    shape = layer_shape(model)
    draft = {
        "checkpoint_format": "dspark",
        "num_layers": 3,
        "target_hidden_size": model.hidden_size,
        "feature_layers": tuple(sorted(model.default_feature_layers)),  # the deepest one is last
        "num_drafts": 7,
        "anchor_first": True,
        "mask_token_id": model.vocab_size - 1,
        "markov_head": "vanilla",
        "markov_rank": 32,
        "has_confidence_head": True,
        "confidence_with_markov": True,
    }
    reduced = changes["draft_vocab_size"] < model.vocab_size
    return BlockConfig(**shape | draft | changes, has_own_lm_head=reduced)


@dataclass(frozen=True)
class BlockTrainer(Trainer):
    """Trains a block drafter.

    ``feature_scale`` f32 ``[F]`` is a typical magnitude of each target feature. The trained ``fc``
    reads features divided by it, because the optimizer changes all weights by similar amounts, but
    some features are a hundred times larger than others. The exported ``fc`` includes the division.
    """

    feature_scale: np.ndarray

    @cached_property
    def flat(self) -> FlatModel[Any]:
        return FlatModel.of(partial(BlockDraft, self.draft, implementation="xla"))

    def init(self, initial: Mapping[str, Any] = MappingProxyType({})) -> TrainState:
        fc = "fc.kernel"
        scaled = {fc: initial[fc] * self.feature_scale[:, None]} if initial else {}
        return super().init({**initial, **scaled})

    def begin(self, named: dict[str, Any], target: Mapping[str, Any]) -> None:
        """Begin with the target's last layers, as if the context were its last feature.

        After 400 steps, the accept length of a drafter for SmolLM2-135M was 2.0; with random
        weights, it was 1.5. Weights that copy other weights are removed.
        """
        named.pop("context.kernel")
        super().begin(named, target)
        layers = {name.split(".")[1] for name in target if name.startswith("layers.")}
        for i in range(self.draft.num_layers):
            last = f"layers.{len(layers) - self.draft.num_layers + i}."
            for name in (name for name in named if name.startswith(f"layers.{i}.")):
                source = target.get(name.replace(f"layers.{i}.", last))
                if source is not None and source.shape == named[name].shape:
                    named[name] = source
        size = self.draft.hidden_size
        if self.draft.target_hidden_size == size:
            identity = jnp.eye(size) * jnp.asarray(self.feature_scale)[-size:, None]
            named["fc.kernel"] = named["fc.kernel"].astype(jnp.float32).at[-size:].add(identity)
            named["hidden_norm.scale"] = named["layers.0.input_norm.scale"]
        if "markov.output.kernel" in named:
            named["markov.output.kernel"] = jnp.zeros_like(named["markov.output.kernel"])
        if not self.draft.has_own_lm_head:
            del named["lm_head.kernel"]

    def named_weights(self, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        scaled = params["fc.kernel"] / jnp.asarray(self.feature_scale)[:, None]
        named = super().named_weights({**params, "fc.kernel": scaled})
        ends = self.draft.head_dim * np.cumsum([self.draft.num_heads, self.draft.num_kv_heads])
        kernels = (named[f"layers.{i}.attention.qkv.kernel"] for i in range(self.draft.num_layers))
        _, keys, values = zip(*(jnp.split(kernel, ends, axis=1) for kernel in kernels), strict=True)
        return named | {"context.kernel": jnp.concatenate((*keys, *values), axis=1)}

    def loss(
        self, draft: BlockDraft, target: CausalLM, batch: PackedBatch, step: jax.Array
    ) -> tuple[jax.Array, StepStatistics]:
        key = jax.random.fold_in(jax.random.key(self.config.seed), step)
        vocabulary = jnp.asarray(self.vocabulary, jnp.int32)
        chosen = self.config.anchors, self.config.hard_weight
        return block_loss(draft, target, batch, vocabulary, key, *chosen)


def feature_scale(
    model: FlatModel[CausalLM], weights: Weights, layers: tuple[int, ...], rows: PackedBatch
) -> np.ndarray:
    """The median magnitude f32 ``[F]`` of each target feature in packed rows; at least 1e-3."""

    def features(weights: Weights, batch: PackedBatch) -> jax.Array:
        attend = packed_attend(batch.texts)
        return model.rebuild(weights)(batch.tokens, batch.positions, None, attend, layers)[1]

    values = np.asarray(jax.jit(features)(weights, rows), np.float32)
    return np.maximum(np.median(np.abs(values[rows.segments > 0]), axis=0), 1e-3)


class Anchors(NamedTuple):
    """The anchors in packed rows, and the positions of their drafts."""

    rows: jax.Array  # i32[B, N], p
    is_real: jax.Array  # bool[B, N]; False for padding
    after: jax.Array  # i32[B, N, G], p to p + G - 1, clipped to the row
    is_drafted: jax.Array  # bool[B, N, G], whether the token that follows is in the same answer


def draw_anchors(batch: PackedBatch, count: int, num_drafts: int, key: jax.Array) -> Anchors:
    """Draw ``count`` different anchors, each with at least one draft, from every packed row."""
    length = batch.tokens.shape[1]
    segments = jnp.pad(batch.segments, ((0, 0), (1, num_drafts)))
    # a round may start after the positions marked in `starts`; the token that follows is an anchor
    may_start = jnp.pad(batch.starts, ((0, 0), (1, 0)))[:, :-1] & (batch.segments > 0)
    is_anchor = may_start & (segments[:, :length] == batch.segments)
    is_anchor &= segments[:, 2 : length + 2] == batch.segments
    scores = jnp.where(is_anchor, jax.random.uniform(key, batch.tokens.shape), -1.0)
    best, rows = jax.lax.top_k(scores, min(count, length))
    is_real = best >= 0
    ahead = rows[..., None] + jnp.arange(num_drafts, dtype=jnp.int32)
    anchor_segments = jnp.take_along_axis(batch.segments, rows, axis=1)[..., None]
    lines = jnp.arange(len(rows))[:, None, None]
    is_drafted = is_real[..., None] & (segments[lines, ahead + 2] == anchor_segments)
    return Anchors(rows, is_real, jnp.minimum(ahead, length - 1), is_drafted)


def context_store(kv: Any, layer: int, k: jax.Array, v: jax.Array, rope: RopeTables) -> Any:
    """A ``Store`` that appends a layer's rotated keys and its values to the tuple ``kv``."""
    return (*kv, (rotate(normed(k, k, rope.norms)[1], rope.cos, rope.sin), v))


def block_attend(batch: PackedBatch, anchors: Anchors, num_rows: int) -> Attend:
    """Make an ``Attend`` for all blocks ``[B, N * R]`` over their contexts and own rows.

    Blocks are processed in groups: a query is compared with all keys in its group.
    """
    count = anchors.rows.shape[1]
    size = next(n for n in range(min(GROUP, count), 0, -1) if count % n == 0)
    groups = count // size

    def grouped(x: jax.Array) -> jax.Array:
        return x.reshape(len(x) * groups, -1, *x.shape[2:])

    lines = jnp.arange(len(anchors.rows))[:, None]
    context = jnp.arange(batch.tokens.shape[1]) < anchors.rows[..., None]
    context &= batch.texts[:, None] == batch.texts[lines, anchors.rows][..., None]
    context = jnp.repeat(grouped(context), num_rows, axis=1)
    block = jnp.arange(size * num_rows) // num_rows
    in_block = jnp.broadcast_to(block[:, None] == block, (len(context), len(block), len(block)))
    mask = jnp.concatenate([context, in_block], axis=2)[:, None]

    @rotated
    def attend(
        kv: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[Any, jax.Array]:
        keys, values = (
            jnp.concatenate([jnp.repeat(context_side, groups, axis=0), grouped(block_side)], axis=1)
            for context_side, block_side in zip(kv[layer], (k, v), strict=True)
        )
        is_fused = q.dtype == jnp.bfloat16 and jax.default_backend() == "gpu"
        implementation = "cudnn" if is_fused else None
        out = dense_attention(grouped(q), keys, values, mask=mask, implementation=implementation)
        return kv, out.reshape(q.shape)

    return attend


def block_loss(
    draft: BlockDraft,
    target: CausalLM,
    batch: PackedBatch,
    vocabulary: jax.Array,
    key: jax.Array,
    num_anchors: int,
    hard_weight: float,
) -> tuple[jax.Array, StepStatistics]:
    """Compute the loss and statistics of ``num_anchors`` random blocks per packed row.

    The loss of draft j has weight ``DRAFT_DECAY ** (j - 1)``. ``hard_weight`` is the weight of
    accepted greedy drafts, and the rest is that of accepted drafts at ``TEMPERATURE``. Drafts
    without a loss are as in :func:`specjax.training.ttt.ttt_loss`. The confidence head learns
    whether a draft is the target's most probable token; its loss has no effect on other weights.
    """
    config = draft.config
    attend, layers = packed_attend(batch.texts), config.feature_layers
    states, features, _ = target(batch.tokens, batch.positions, None, attend, layers)
    best = jnp.argmax(target.logits(states), axis=-1).astype(jnp.int32)
    states, features = jax.lax.stop_gradient((states, features))
    kv = draft.store(features, batch.positions, (), context_store)
    anchors = draw_anchors(batch, num_anchors, config.num_drafts, key)
    lines = jnp.arange(len(anchors.rows))[:, None]
    shape = (*anchors.rows.shape, config.block)
    masks = jnp.full(shape, config.mask_token_id, jnp.int32)
    tokens = masks.at[..., 0].set(batch.tokens[lines, anchors.rows]).reshape(len(lines), -1)
    ahead = jnp.arange(config.block, dtype=jnp.int32)
    positions = batch.positions[lines, anchors.rows][..., None] + ahead
    blocks = block_attend(batch, anchors, config.block)
    hidden, _ = draft(tokens, positions.reshape(tokens.shape), kv, blocks, blocks, target)
    hidden = hidden.reshape(*shape, -1)[:, :, config.block - config.num_drafts :]
    before, best, states = (
        x[lines[..., None], anchors.after] for x in (batch.tokens, best, states)
    )

    def split(x: jax.Array) -> jax.Array:
        # [B, N, ...] to [C, B * N / C, ...]
        x = x.reshape(-1, *x.shape[2:])
        count = max(1, -(-len(x) // BLOCKS_AT_ONCE))
        x = jnp.pad(x, [(0, -len(x) % count)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(count, -1, *x.shape[1:])

    # logits of all blocks at once would take gigabytes, forwards and backwards
    @jax.checkpoint
    def sums(chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, StepStatistics]:
        return _sums(draft, target, vocabulary, hard_weight, *chunk)

    chunks = tuple(map(split, (hidden, states, before, best, anchors.is_drafted)))
    confidence, total = jax.tree.map(lambda x: x.sum(axis=0), jax.lax.map(sums, chunks))
    decay = DRAFT_DECAY ** jnp.arange(config.num_drafts, dtype=jnp.float32)
    loss = jnp.sum(decay * total.loss / jnp.maximum(total.weight, 1.0))
    loss += CONFIDENCE_WEIGHT * confidence / jnp.maximum(total.rows.sum(), 1.0)
    return loss, jax.lax.stop_gradient(total)


def acceptance_loss(
    logits: jax.Array, target_logits: jax.Array, label: jax.Array, hard_weight: float
) -> jax.Array:
    """Minus the logarithm of the probability that a draft is accepted, f32 ``[...]``.

    At temperature 0, this probability is that of the target's token, ``label`` i32 ``[...]``. At
    ``TEMPERATURE``, it is the sum of the smaller of both probabilities of each token (LK losses,
    arXiv 2602.23881). Logits are ``[..., W]`` over the draft vocabulary; the target's distribution
    is normalised over it. Labels outside their axis have no meaning.
    """
    inside = jnp.minimum(label, logits.shape[-1] - 1)[..., None]
    hard = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), inside, axis=-1)[..., 0]
    draft, target = (jax.nn.softmax(x / TEMPERATURE, axis=-1) for x in (logits, target_logits))
    soft = jnp.log(jnp.maximum(jnp.minimum(draft, target).sum(axis=-1), 1e-6))
    return -hard_weight * hard - (1.0 - hard_weight) * soft


def _sums(
    draft: BlockDraft,
    target: CausalLM,
    vocabulary: jax.Array,
    hard_weight: float,
    hidden: jax.Array,
    states: jax.Array,
    before: jax.Array,
    best: jax.Array,
    is_drafted: jax.Array,
) -> tuple[jax.Array, StepStatistics]:
    """The summed loss of the confidence head, and sums by draft, over blocks ``[N, G]``.

    ``hidden`` and ``states`` are the draft's and the target's states that predict the drafted
    tokens. ``before`` are the previous tokens, and ``best`` the target's most probable tokens.
    """
    label, in_vocabulary = labels_of(best, vocabulary)
    logits = draft.logits(hidden, target)
    if draft.markov is not None:
        state, biases = draft.markov.start(len(hidden)), []
        for j in range(hidden.shape[1]):
            bias, state = draft.markov(before[:, j], hidden[:, j], state)
            biases.append(bias)
        logits = logits + jnp.stack(biases, axis=1)
    target_logits = jax.lax.stop_gradient(target.logits_of(states, vocabulary))
    losses = acceptance_loss(logits, target_logits, label, hard_weight)
    hit = is_drafted & (jnp.argmax(logits, axis=-1).astype(jnp.int32) == label)
    alive = jnp.cumprod(hit, axis=1, dtype=jnp.int32) > 0
    reached = is_drafted & jnp.pad(alive[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    carries = is_drafted & in_vocabulary
    columns = (losses * carries, carries, is_drafted, reached, alive)
    statistics = StepStatistics(*(x.sum(axis=0, dtype=jnp.float32) for x in columns))
    # only the confidence head learns from its own loss
    fixed, hidden = jax.lax.stop_gradient((draft, hidden))
    fixed.confidence_head = draft.confidence_head
    if (probability := fixed.confidences(hidden, before)) is None:
        return jnp.zeros((), jnp.float32), statistics
    probability = jnp.clip(probability, 1e-6, 1.0 - 1e-6)
    entropy = -jnp.where(hit, jnp.log(probability), jnp.log1p(-probability))
    return jnp.sum(entropy * is_drafted), statistics
