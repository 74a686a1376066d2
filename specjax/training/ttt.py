"""Training-time test: unroll the draft over its own outputs, and compute its loss.

Row i of a sequence pairs the target feature ``f_i`` with the embedding of token ``t_{i+1}`` at
position i. It predicts ``t_{i+2}``, that is, the target's distribution at row i + 1. In step j, the
token and the prediction are j tokens later, the rotary position is i + j, and the hidden input is
the draft's output in step j - 1 at row i. Source: EAGLE-3 (arXiv 2503.01840) and its code.

Axes: B rows, T tokens per row, S steps, D hidden, V vocabulary, W draft vocabulary.
"""

from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax.kernels.dot import precision_for
from specjax.models.decoder import CausalLM
from specjax.models.eagle import Eagle3Head
from specjax.models.layers import Attend, dense_attention, rotated

STEP_DECAY = 0.8


class PackedBatch(NamedTuple):
    """Packed rows of sequences. A sequence is a prompt and its answer.

    A text is one sequence or several in a row. Tokens see earlier tokens of their text, and
    positions restart in each text. ``starts`` marks the tokens at which a draft may start when
    serving: the last prompt token and every answer token.
    """

    tokens: Array  # i32[B, T]
    segments: Array  # i32[B, T], number of the sequence, from 1; 0 is padding
    texts: Array  # i32[B, T], number of the text, from 1
    positions: Array  # i32[B, T]
    starts: Array  # bool[B, T]


class TargetOutputs(NamedTuple):
    """The outputs of the frozen target for each token of a packed batch."""

    features: Array  # [B, T, F]
    draft_logits: Array  # f32[B, T, W], over the draft vocabulary
    argmax: Array  # i32[B, T], over the whole vocabulary


class StepStatistics(NamedTuple):
    """Sums over a batch by draft step; add them to combine batches."""

    loss: Array  # f32[S], sum of losses
    weight: Array  # f32[S], number of rows with a loss
    rows: Array  # f32[S], number of rows whose prediction is in the answer
    reached: Array  # f32[S], number of `rows` with correct predictions in all earlier steps
    accepted: Array  # f32[S], number of `reached` rows with a correct prediction

    def acceptance(self) -> Array:
        """Acceptance rate f32[S] of each step if all earlier steps were accepted."""
        return self.accepted / jnp.maximum(self.reached, 1.0)

    def accept_length(self) -> float:
        """Predicted accept length of a chain with S steps: ``1 + a_1 + a_1 a_2 + ...``."""
        return float(1.0 + jnp.cumprod(self.acceptance()).sum())


def _shift_left(x: Array, count: int) -> Array:
    """Shift ``x [B, T, ...]`` by ``count`` rows to the left, with zeros at the end."""
    return jnp.pad(x[:, count:], [(0, 0), (0, count)] + [(0, 0)] * (x.ndim - 2))


def target_outputs(
    target: CausalLM, batch: PackedBatch, vocabulary: Array, feature_layers: tuple[int, ...]
) -> TargetOutputs:
    """Run the target over packed rows; ``vocabulary`` i32[W] has the target ids of draft ids."""
    attend = packed_attend(batch.texts)
    hidden, features, _ = target(batch.tokens, batch.positions, None, attend, feature_layers)
    argmax = jnp.argmax(target.logits(hidden), axis=-1).astype(jnp.int32)
    # a second, small product is cheaper than a gather, which would read all [B, T, V] logits
    return TargetOutputs(features, target.logits_of(hidden, vocabulary), argmax)


def ttt_states(
    draft: Eagle3Head, target: CausalLM, batch: PackedBatch, features: Array, num_steps: int
) -> Iterator[Array]:
    """Yield the recurrent states ``[B, T, D]`` of steps 0 to ``num_steps - 1``."""
    hidden = draft.fuse(features)
    attend = ttt_attend(batch.texts)
    kv: tuple[tuple[Array, Array], ...] = ()
    for step in range(num_steps):
        embeds = draft.embed(_shift_left(batch.tokens, step + 1), target)
        hidden, kv = draft(embeds, hidden, batch.positions + step, kv, attend)
        yield hidden


def step_mask(batch: PackedBatch, step: int) -> Array:
    """Mark the rows, bool ``[B, T]``, that predict a token in their own answer in ``step``."""
    in_answer = _shift_left(batch.segments, step + 2) == batch.segments
    return batch.starts & in_answer & (batch.segments > 0)


def ttt_loss(
    draft: Eagle3Head,
    target: CausalLM,
    batch: PackedBatch,
    outputs: TargetOutputs,
    vocabulary: Array,
    num_steps: int,
    hard_weight: float,
) -> tuple[Array, StepStatistics]:
    """Compute the loss of the unrolled draft, ``sum_j 0.8^j loss_j``, and its statistics.

    The label of a row is ``1 - hard_weight`` times the target's softmax over the draft vocabulary
    (i32[W], ascending), plus ``hard_weight`` times the target's most probable token. If this token
    is outside the draft vocabulary, the row has no loss and counts as rejected.
    """
    label, in_vocabulary = labels_of(outputs.argmax, vocabulary)
    soft = jax.nn.softmax(outputs.draft_logits, axis=-1)
    total = jnp.zeros((), jnp.float32)
    alive = jnp.ones(batch.tokens.shape, bool)
    sums: list[tuple[Array, ...]] = []
    states = ttt_states(draft, target, batch, outputs.features, num_steps)
    for step, hidden in enumerate(states):
        mask = step_mask(batch, step)
        step_label = _shift_left(label, step + 1)
        carries = (mask & _shift_left(in_vocabulary, step + 1)).astype(jnp.float32)
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


def labels_of(tokens: Array, vocabulary: Array) -> tuple[Array, Array]:
    """Draft ids i32 of target tokens, and whether each is in the draft vocabulary i32[W].

    Tokens outside it get id W, which equals no draft.
    """
    width = vocabulary.shape[0]
    label = jnp.minimum(jnp.searchsorted(vocabulary, tokens), width - 1).astype(jnp.int32)
    in_vocabulary = vocabulary[label] == tokens
    return jnp.where(in_vocabulary, label, width), in_vocabulary


def cross_entropy(logits: Array, soft: Array, label: Array, hard_weight: float) -> Array:
    """Cross entropy f32 ``[...]`` of logits ``[..., W]``.

    The label i32 ``[...]`` has weight ``hard_weight``, the distribution ``soft [..., W]`` the rest.
    """
    expected = jnp.sum(soft * logits, axis=-1)
    inside = jnp.minimum(label, logits.shape[-1] - 1)
    picked = jnp.take_along_axis(logits, inside[..., None], axis=-1)[..., 0]
    mixed = (1.0 - hard_weight) * expected + hard_weight * picked
    return jax.nn.logsumexp(logits, axis=-1) - mixed


_NEGATIVE = -1e30


def packed_attend(texts: Array) -> Attend:
    """Make an ``Attend``: causal attention within each text i32[B, T], without a KV cache.

    Scores and softmax are float32. On a GPU, cuDNN computes bfloat16 attention.
    """
    mask = _causal_mask(texts)[:, None]

    @rotated
    def attend(
        kv: Any,
        layer: int,
        q: Array,
        k: Array,
        v: Array,
        *,
        window: int | None = None,
        **options: Any,
    ) -> tuple[Any, Array]:
        # heads of more than 128 dimensions are too large for cuDNN
        is_fused = q.dtype == jnp.bfloat16 and jax.default_backend() == "gpu"
        options["implementation"] = "cudnn" if is_fused and q.shape[-1] <= 128 else None
        visible = mask
        if window is not None:
            row = jnp.arange(texts.shape[1])
            visible = mask & (row[:, None] - row < window)
        return kv, dense_attention(q, k, v, mask=visible, **options)

    return attend


def ttt_attend(texts: Array) -> Attend:
    """Make an ``Attend`` for the unrolled draft steps over packed rows.

    ``kv`` is a tuple with ``(k, v)`` of each earlier step. A query at row i in step j sees the keys
    of step 0 at rows up to i of its text, and the keys of steps 1 to j only at row i. A chain that
    is drafted from row i when serving sees the same keys.
    """
    mask = _causal_mask(texts)[:, None, None]

    @rotated
    def attend(kv: Any, layer: int, q: Array, k: Array, v: Array) -> tuple[Any, Array]:
        kv = (*kv, (k, v))
        (first_k, first_v), later = kv[0], kv[1:]
        # [B, T, KV, G, H]
        grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
        scale = q.shape[-1] ** -0.5
        causal = _product("btkgh,blkh->bkgtl", grouped, first_k) * scale
        causal = jnp.where(mask, causal, _NEGATIVE)
        # [B, KV, G, T]: products of a row's query with its own keys from later steps
        step_scores = [_product("btkgh,btkh->bkgt", grouped, step_k) * scale for step_k, _ in later]
        peak = jax.lax.stop_gradient(reduce(jnp.maximum, step_scores, causal.max(axis=-1)))
        weights = jnp.exp(causal - peak[..., None])
        step_weights = [jnp.exp(score - peak) for score in step_scores]
        total = weights.sum(axis=-1) + sum(step_weights)
        out = _product("bkgtl,blkh->btkgh", weights.astype(v.dtype), first_v)
        for weight, (_, step_v) in zip(step_weights, later, strict=True):
            rows = jnp.moveaxis(weight, 3, 1)[..., None]
            out = out + rows * step_v.astype(jnp.float32)[:, :, :, None]
        out = out / jnp.moveaxis(total, 3, 1)[..., None]
        return kv, out.reshape(q.shape).astype(v.dtype)

    return attend


def _causal_mask(texts: Array) -> Array:
    # bool [B, T, T]: a token sees itself and earlier tokens of the same text
    rows = jnp.arange(texts.shape[1])
    is_same_text = texts[:, :, None] == texts[:, None, :]
    return is_same_text & (rows[:, None] >= rows[None, :])


def _product(spec: str, a: Array, b: Array) -> Array:
    precision = precision_for(a.dtype)
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)
