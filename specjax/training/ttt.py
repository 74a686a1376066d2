"""Training-time test: unroll the draft over its own outputs, and compute its loss.

Row i of a sequence pairs the target feature ``f_i`` with the embedding of token ``t_{i+1}`` at
position i. It predicts ``t_{i+2}``, that is, the target's distribution at row i + 1. In step j the
token and the prediction move on by j, and the rotary position is i + j. The hidden input is the
draft's output of step j - 1 at row i. Source: EAGLE-3 (arXiv 2503.01840) and its code.

Axes: B rows, T tokens per row, S steps, D hidden, V vocabulary, W draft vocabulary.
"""

from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.models.decoder import CausalLM
from specjax.models.eagle import Eagle3Head
from specjax.models.layers import Attend, dense_attention, rotated
from specjax.models.weights import precision_for

STEP_DECAY = 0.8


class PackedBatch(NamedTuple):
    """Packed rows of sequences, each a prompt and its answer. Segment 0 is padding.

    Tokens see earlier tokens of their text, which is one sequence or several after each other.
    Positions restart in each text. ``starts`` marks the rows at which drafting may start during
    serving: the last prompt token and every answer token.
    """

    tokens: jax.Array  # i32[B, T]
    segments: jax.Array  # i32[B, T], the sequence, from 1
    texts: jax.Array  # i32[B, T], the text, from 1
    positions: jax.Array  # i32[B, T]
    starts: jax.Array  # bool[B, T]


class TargetOutputs(NamedTuple):
    """Outputs of the frozen target at each row of a packed batch."""

    features: jax.Array  # [B, T, F]
    draft_logits: jax.Array  # f32[B, T, W], over the draft vocabulary
    argmax: jax.Array  # i32[B, T], over the whole vocabulary


class StepStatistics(NamedTuple):
    """Sums over a batch by draft step. Divide them to get means; add them to combine batches."""

    loss: jax.Array  # f32[S], summed over `weight` rows
    weight: jax.Array  # f32[S], rows that carry loss
    rows: jax.Array  # f32[S], rows whose prediction is in the answer
    reached: jax.Array  # f32[S], those of `rows` whose earlier steps all hit
    accepted: jax.Array  # f32[S], those of `reached` whose prediction hits in this step too

    def acceptance(self) -> jax.Array:
        """Acceptance rate f32[S] of each step, given that the earlier steps were accepted."""
        return self.accepted / jnp.maximum(self.reached, 1.0)

    def accept_length(self) -> float:
        """Predicted accept length of a chain of S steps: ``1 + a_1 + a_1 a_2 + ...``."""
        return float(1.0 + jnp.cumprod(self.acceptance()).sum())


def _shift_left(x: jax.Array, count: int) -> jax.Array:
    """Shift ``x [B, T, ...]`` by ``count`` rows to the left, with zeros at the end."""
    return jnp.pad(x[:, count:], [(0, 0), (0, count)] + [(0, 0)] * (x.ndim - 2))


def target_outputs(
    target: CausalLM, batch: PackedBatch, vocabulary: jax.Array, feature_layers: tuple[int, ...]
) -> TargetOutputs:
    """Run the target over packed rows; ``vocabulary`` i32[W] holds the draft's target ids."""
    attend = packed_attend(batch.texts)
    hidden, features, _ = target(batch.tokens, batch.positions, None, attend, feature_layers)
    argmax = jnp.argmax(target.logits(hidden), axis=-1).astype(jnp.int32)
    # a second, small product is cheaper: a gather from [B, T, V] logits would read all of them
    return TargetOutputs(features, target.logits_of(hidden, vocabulary), argmax)


def ttt_states(
    draft: Eagle3Head, target: CausalLM, batch: PackedBatch, features: jax.Array, num_steps: int
) -> Iterator[jax.Array]:
    """Yield the recurrent states ``[B, T, D]`` of steps 0 to ``num_steps - 1``."""
    hidden = draft.fuse(features)
    attend = ttt_attend(batch.texts)
    kv: tuple[tuple[jax.Array, jax.Array], ...] = ()
    for step in range(num_steps):
        embeds = draft.embed(_shift_left(batch.tokens, step + 1), target)
        hidden, kv = draft(embeds, hidden, batch.positions + step, kv, attend)
        yield hidden


def step_mask(batch: PackedBatch, step: int) -> jax.Array:
    """Mark the rows, bool ``[B, T]``, that predict a token of their own answer in ``step``."""
    in_answer = _shift_left(batch.segments, step + 2) == batch.segments
    return batch.starts & in_answer & (batch.segments > 0)


def ttt_loss(
    draft: Eagle3Head,
    target: CausalLM,
    batch: PackedBatch,
    outputs: TargetOutputs,
    vocabulary: jax.Array,
    num_steps: int,
    hard_weight: float,
) -> tuple[jax.Array, StepStatistics]:
    """Compute the loss of the unrolled draft, ``sum_j 0.8^j loss_j``, and its statistics.

    The label of a row is ``(1 - hard_weight)`` times the target's softmax over the draft
    vocabulary (i32[W], ascending) plus ``hard_weight`` times its most probable token. If that token
    is outside the draft vocabulary, the row carries no loss and counts as a miss.
    """
    label, known = labels_of(outputs.argmax, vocabulary)
    soft = jax.nn.softmax(outputs.draft_logits, axis=-1)
    total = jnp.zeros((), jnp.float32)
    alive = jnp.ones(batch.tokens.shape, bool)
    sums: list[tuple[jax.Array, ...]] = []
    states = ttt_states(draft, target, batch, outputs.features, num_steps)
    for step, hidden in enumerate(states):
        mask = step_mask(batch, step)
        step_label = _shift_left(label, step + 1)
        carries = (mask & _shift_left(known, step + 1)).astype(jnp.float32)
        logits = draft.logits(hidden, target)
        losses = cross_entropy(logits, _shift_left(soft, step + 1), step_label, hard_weight)
        loss = jnp.sum(losses * carries)
        total = total + STEP_DECAY**step * loss / jnp.maximum(carries.sum(), 1.0)
        hit = mask & (jnp.argmax(logits, axis=-1).astype(jnp.int32) == step_label)
        reached = mask & alive
        alive = alive & hit
        counts = (loss, carries.sum(), mask.sum(), reached.sum(), alive.sum())
        sums.append(tuple(jnp.asarray(c, jnp.float32) for c in counts))
    columns = (jnp.stack(column) for column in zip(*sums, strict=True))
    return total, jax.lax.stop_gradient(StepStatistics(*columns))


def labels_of(tokens: jax.Array, vocabulary: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draft ids i32 of target tokens, and whether each is in the draft vocabulary i32[W].

    The id of a token outside it is W, which no draft hits.
    """
    width = vocabulary.shape[0]
    label = jnp.minimum(jnp.searchsorted(vocabulary, tokens), width - 1).astype(jnp.int32)
    known = vocabulary[label] == tokens
    return jnp.where(known, label, width), known


def cross_entropy(
    logits: jax.Array, soft: jax.Array, label: jax.Array, hard_weight: float
) -> jax.Array:
    """Cross entropy f32 ``[...]`` of logits ``[..., W]`` with ``soft [..., W]`` and ``label``.

    The label i32 ``[...]`` has the weight ``hard_weight`` and the distribution the rest.
    """
    expected = jnp.sum(soft * logits, axis=-1)
    inside = jnp.minimum(label, logits.shape[-1] - 1)
    picked = jnp.take_along_axis(logits, inside[..., None], axis=-1)[..., 0]
    mixed = (1.0 - hard_weight) * expected + hard_weight * picked
    return jax.nn.logsumexp(logits, axis=-1) - mixed


_NEGATIVE = -1e30


def packed_attend(texts: jax.Array) -> Attend:
    """Causal attention within the texts ``i32[B, T]`` of packed rows, without a KV cache.

    Scores and softmax are float32. On a GPU, cuDNN computes it in bfloat16.
    """
    mask = _causal_mask(texts)[:, None]

    @rotated
    def attend(
        kv: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[Any, jax.Array]:
        is_fused = q.dtype == jnp.bfloat16 and jax.default_backend() == "gpu"
        implementation = "cudnn" if is_fused else None
        return kv, dense_attention(q, k, v, mask=mask, implementation=implementation)

    return attend


def ttt_attend(texts: jax.Array) -> Attend:
    """Attention of the unrolled draft steps of training-time test over packed rows.

    ``kv`` is the tuple of the earlier steps' ``(k, v)``. A query of row i at step j sees the keys
    of step 0 at rows up to i of its text. Of steps 1 to j it sees only row i. A chain that is
    drafted from row i during serving sees the same keys.
    """
    mask = _causal_mask(texts)[:, None, None]

    @rotated
    def attend(
        kv: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[Any, jax.Array]:
        kv = (*kv, (k, v))
        (first_k, first_v), later = kv[0], kv[1:]
        # [B, T, KV, G, H]
        grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
        scale = q.shape[-1] ** -0.5
        causal = _product("btkgh,blkh->bkgtl", grouped, first_k) * scale
        causal = jnp.where(mask, causal, _NEGATIVE)
        # [B, KV, G, T] each: products of a row with its own keys of the later steps
        own = [_product("btkgh,btkh->bkgt", grouped, step_k) * scale for step_k, _ in later]
        peak = jax.lax.stop_gradient(reduce(jnp.maximum, own, causal.max(axis=-1)))
        weights = jnp.exp(causal - peak[..., None])
        own_weights = [jnp.exp(score - peak) for score in own]
        total = weights.sum(axis=-1) + sum(own_weights)
        out = _product("bkgtl,blkh->btkgh", weights.astype(v.dtype), first_v)
        for weight, (_, step_v) in zip(own_weights, later, strict=True):
            rows = jnp.moveaxis(weight, 3, 1)[..., None]
            out = out + rows * step_v.astype(jnp.float32)[:, :, :, None]
        out = out / jnp.moveaxis(total, 3, 1)[..., None]
        return kv, out.reshape(q.shape).astype(v.dtype)

    return attend


def _causal_mask(texts: jax.Array) -> jax.Array:
    # bool [B, T, T] of packed rows: the token itself and earlier tokens of the same text
    rows = jnp.arange(texts.shape[1])
    same = texts[:, :, None] == texts[:, None, :]
    return same & (rows[:, None] >= rows[None, :])


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    precision = precision_for(a.dtype)
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)
