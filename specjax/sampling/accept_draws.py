"""Draws that accept drafts by a rule of probabilities instead of the target's own noise.

Both rules here draw a token behind every row of a tree *given* the drafts that hang there: one of
them with the rule's probability, else one of the residual distribution. Acceptance then follows the
drawn tokens as it does for any draw. Coins and residual draws are keyed by the request's seed and
the position of the drawn token, each in a stream of its own, and so are drafts to be judged by
their probabilities: were they drawn with noise that the target uses as well, the rules would not
hold. Rows of the accepted path alone matter, one a position.

Axes: B batch, T tree rows, V vocabulary.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from specjax.kernels.draw_tokens import draw_tokens, token_noise
from specjax.kernels.filter_logits import FLOAT32_TINY, kept_logits
from specjax.types import SamplingTable, VerifyInput

# What is added to a position; the target's own draws have 0. Far above any context.
DRAFT_STREAM, COIN_STREAM, RESIDUAL_STREAM = 1 << 28, 2 << 28, 3 << 28
LEAST_ACC = 1e-9  # replaces a lower threshold_acc, as in SGLang


@dataclass(frozen=True)
class Acceptance:
    """How drafts of rows with a temperature are accepted; by default only as the target's own draw.

    The others give up that a seed has the same text with and without speculation.
    ``uses_rejection`` keeps the distribution, and is for chains whose drafts come with
    probabilities; thresholds below 1 do not keep it. They are not combined.
    """

    uses_rejection: bool = False
    threshold_single: float = 1.0  # probability from which on a draft is accepted whatever the coin
    threshold_acc: float = 1.0  # divides the probabilities that the coin is compared with

    @property
    def has_thresholds(self) -> bool:
        return min(self.threshold_single, self.threshold_acc) < 1.0

    @property
    def is_coupled(self) -> bool:
        """Whether the target draws with its own noise alone."""
        return not (self.uses_rejection or self.has_thresholds)


COUPLED = Acceptance()


def filtered_probs(logits: jax.Array, temperatures: jax.Array, thresholds: jax.Array) -> jax.Array:
    """The softmax f32 ``[N, V]`` that a row is drawn from; zeros where all logits are -inf.

    Logits are f32 ``[N, V]`` before the temperature, thresholds f32 ``[N]`` the least that is kept.
    """
    kept = kept_logits(logits, temperatures[:, None], thresholds[:, None])
    best = jnp.max(kept, axis=-1, keepdims=True)
    weights = jnp.exp(kept - jnp.where(best > -jnp.inf, best, 0.0))
    return weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), FLOAT32_TINY)


def accept_tokens(
    probs: jax.Array,
    plain: jax.Array,
    tree: VerifyInput,
    sampling: SamplingTable,
    acceptance: Acceptance,
    implementation: str | None,
) -> jax.Array:
    """The token i32 ``[B, T]`` after every node, by a rule that is not coupled.

    ``probs`` f32 ``[B, T, V]`` are what the target draws from. Nodes without a real child, and
    those of greedy requests, keep the target's own draws ``plain`` i32 ``[B, T]``.
    """
    if acceptance.uses_rejection:
        tokens = rejection_tokens(probs, tree, sampling.seeds, implementation=implementation)
    else:
        tokens = threshold_tokens(
            probs, tree, sampling.seeds, acceptance, implementation=implementation
        )
    is_judged = tree.is_child.any(-1) & (sampling.temperatures > 0)[:, None]
    return jnp.where(is_judged, tokens, plain)


def rejection_tokens(
    probs: jax.Array, tree: VerifyInput, seeds: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """Speculative sampling of a chain (arXiv 2211.17192): tokens i32 ``[B, T]``.

    The draft ``x`` behind a row, drawn from q = ``tree.draft_probs``, is accepted with probability
    ``min(1, p(x) / q(x))`` of p = ``probs``; else the token is drawn from ``max(p - q, 0)``,
    normalised. The token is distributed as p then. A draft of ``q(x) = 0``, or a q that is not
    finite, counts as no draft: the token is drawn from p. ``seeds`` are u32 ``[B, 2]``.

    ValueError for a tree without ``draft_probs``.
    """
    if tree.draft_probs is None:
        raise ValueError("draft_probs=None of the tree: rejection sampling needs them")
    drafts = jnp.roll(tree.draft_tokens, -1, axis=1)  # nothing hangs behind the last row
    draft_probs = jnp.pad(tree.draft_probs, ((0, 0), (0, 1), (0, 0)))
    p, q = (
        jnp.take_along_axis(each, drafts[:, :, None], axis=2)[:, :, 0]
        for each in (probs, draft_probs)
    )
    is_drawn = (q > 0) & jnp.isfinite(draft_probs).all(-1)
    accepted = is_drawn & (draw_coins(seeds, tree) * q < p)
    residual = jnp.maximum(jnp.where(is_drawn[:, :, None], probs - draft_probs, probs), 0.0)
    return jnp.where(accepted, drafts, _draw_residual(residual, probs, seeds, tree, implementation))


def threshold_tokens(
    probs: jax.Array,
    tree: VerifyInput,
    seeds: jax.Array,
    acceptance: Acceptance,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Target-only sampling with SGLang's thresholds: tokens i32 ``[B, T]``.

    One coin a row. Its children come in the order of their rows, and the first is accepted for
    which ``coin <= prob_acc / threshold_acc``, where ``prob_acc`` sums ``probs`` of the children up
    to it, or whose own one is at least ``threshold_single``. If none is, the token is drawn from
    ``probs`` without the children. With both at 1 the token is distributed as ``probs``.
    """
    is_child, (batch, rows, vocab_size) = tree.is_child, probs.shape
    ids = jnp.broadcast_to(tree.draft_tokens[:, None, :], (batch, rows, rows))
    p = jnp.where(is_child, jnp.take_along_axis(probs, ids, axis=2), 0.0)
    coins = draw_coins(seeds, tree)[:, :, None]
    # coins are below 1: the strict comparison never accepts what has no probability
    index = jnp.arange(rows, dtype=jnp.int32)
    up_to = jnp.sum(jnp.where(index[:, None] >= index, p[:, :, None, :], 0.0), axis=3)
    is_likely = coins < up_to / max(acceptance.threshold_acc, LEAST_ACC)
    accepted = is_child & (is_likely | (p >= acceptance.threshold_single))
    first = jnp.argmax(accepted, axis=2)
    drafts = jnp.take_along_axis(tree.draft_tokens, first, axis=1)
    b = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    t = jnp.arange(rows, dtype=jnp.int32)[None, :, None]
    residual = probs.at[b, t, jnp.where(is_child, ids, vocab_size)].set(0.0, mode="drop")
    others = _draw_residual(residual, probs, seeds, tree, implementation)
    return jnp.where(accepted.any(-1), drafts, others)


def draw_coins(seeds: jax.Array, tree: VerifyInput) -> jax.Array:
    """A uniform number f32 ``[B, T]`` from 0 to below 1 a row, for the position behind it."""
    keys, places = _flat_keys(seeds, tree)
    noise = token_noise(keys, places + COIN_STREAM, jnp.zeros(1, jnp.int32))
    # what Gumbel noise is made of
    return jnp.exp(-jnp.exp(-noise)).reshape(tree.positions.shape)


def _draw_residual(
    weights: jax.Array,
    probs: jax.Array,
    seeds: jax.Array,
    tree: VerifyInput,
    implementation: str | None,
) -> jax.Array:
    """Tokens i32 ``[B, T]`` by weights f32 ``[B, T, V]``; by ``probs`` where rounding left none."""
    weights = jnp.where(jnp.any(weights > 0, axis=2, keepdims=True), weights, probs)
    logits = jnp.log(weights).reshape(-1, weights.shape[2])
    keys, places = _flat_keys(seeds, tree)
    ones = jnp.ones(places.shape, jnp.float32)
    tokens = draw_tokens(
        logits, ones, -jnp.inf * ones, keys, places + RESIDUAL_STREAM, implementation=implementation
    )
    return tokens.reshape(tree.positions.shape)


def _flat_keys(seeds: jax.Array, tree: VerifyInput) -> tuple[jax.Array, jax.Array]:
    """Seed u32 ``[B * T, 2]`` of each row, and position i32 ``[B * T]`` of the token behind it."""
    return jnp.repeat(seeds, tree.positions.shape[1], axis=0), (tree.positions + 1).reshape(-1)
