"""Draw tokens by rules that accept drafts by probability instead of the target's own draw.

Both rules draw the token after each row of a tree *given* the row's drafted children. With the
probability that the rule sets, it is one of the children, otherwise a token from the residual
distribution. Acceptance then follows the drawn tokens as usual. Random numbers and residual draws
depend on the request's seed and the position of the drawn token, each with its own stream of noise.
For rejection sampling, drafts have a third stream, because they must not share noise with the
target. Only rows on the accepted path matter, one per position.

Axes: B batch, T tree rows, V vocabulary.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from specjax.kernels.draw_tokens import draw_tokens, position_uniform
from specjax.kernels.filter_logits import FLOAT32_TINY, kept_logits
from specjax.types import SamplingTable, VerifyInput

# offsets added to positions, far above any context length; the target's own draws have 0
DRAFT_STREAM, COIN_STREAM, RESIDUAL_STREAM = 1 << 28, 2 << 28, 3 << 28
LEAST_ACC = 1e-9  # lower limit of threshold_acc, as in SGLang


@dataclass(frozen=True)
class Acceptance:
    """The rule that accepts drafts at temperatures above 0; by default, the target's own draw.

    Under the other rules, the same seed gives one text with speculation and another without.
    ``uses_rejection`` keeps the target's distribution and needs chains with ``draft_probs``.
    Thresholds below 1 change the distribution. The two rules cannot be combined.
    """

    uses_rejection: bool = False
    threshold_single: float = 1.0  # accept any draft with at least this probability
    threshold_acc: float = 1.0  # divides the acceptance probabilities

    @property
    def has_thresholds(self) -> bool:
        return min(self.threshold_single, self.threshold_acc) < 1.0

    @property
    def is_coupled(self) -> bool:
        """Whether the target draws only with its own noise."""
        return not (self.uses_rejection or self.has_thresholds)


COUPLED = Acceptance()


def filtered_probs(logits: Array, temperatures: Array, thresholds: Array) -> Array:
    """The probabilities f32 ``[N, V]`` with which rows are drawn; zeros if all logits are -inf.

    Logits f32 ``[N, V]`` are raw; thresholds f32 ``[N]`` are the lowest logits that are kept.
    """
    filtered = kept_logits(logits, temperatures[:, None], thresholds[:, None])
    best = jnp.max(filtered, axis=-1, keepdims=True)
    weights = jnp.exp(filtered - jnp.where(best > -jnp.inf, best, 0.0))
    return weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), FLOAT32_TINY)


def accept_tokens(
    probs: Array,
    plain: Array,
    tree: VerifyInput,
    sampling: SamplingTable,
    acceptance: Acceptance,
    implementation: str | None,
) -> Array:
    """Draw the token i32 ``[B, T]`` after every row, by rejection sampling or thresholds.

    ``probs`` f32 ``[B, T, V]`` are the target's distributions. Rows without a proposed child, and
    rows of greedy requests, keep the target's own draws ``plain`` i32 ``[B, T]``.
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
    probs: Array, tree: VerifyInput, seeds: Array, *, implementation: str | None = None
) -> Array:
    """Draw tokens i32 ``[B, T]`` by speculative sampling of a chain (arXiv 2211.17192).

    The draft ``x`` after a row, drawn from q = ``tree.draft_probs``, is accepted with probability
    ``min(1, p(x) / q(x))`` with p = ``probs``. If not, the token is drawn from ``max(p - q, 0)``,
    normalised. In total, the token is distributed as p. If ``q(x) = 0`` or q is not finite, the
    draft does not count, and the token is drawn from p. ``seeds`` are u32 ``[B, 2]``.

    Raises ValueError for a tree without ``draft_probs``.
    """
    if tree.draft_probs is None:
        raise ValueError("draft_probs=None in the tree: rejection sampling needs draft_probs")
    drafts = jnp.roll(tree.draft_tokens, -1, axis=1)  # the last row has no draft after it
    draft_probs = jnp.pad(tree.draft_probs, ((0, 0), (0, 1), (0, 0)))
    p, q = (
        jnp.take_along_axis(array, drafts[:, :, None], axis=2)[:, :, 0]
        for array in (probs, draft_probs)
    )
    is_drawn = (q > 0) & jnp.isfinite(draft_probs).all(-1)
    accepted = is_drawn & (draw_coins(seeds, tree) * q < p)
    residual = jnp.maximum(jnp.where(is_drawn[:, :, None], probs - draft_probs, probs), 0.0)
    return jnp.where(accepted, drafts, _draw_residual(residual, probs, seeds, tree, implementation))


def threshold_tokens(
    probs: Array,
    tree: VerifyInput,
    seeds: Array,
    acceptance: Acceptance,
    *,
    implementation: str | None = None,
) -> Array:
    """Draw tokens i32 ``[B, T]`` by SGLang's target-only sampling with thresholds.

    Each row has one random number ``u``. Its children are tried in row order. A child is accepted
    if its probability is at least ``threshold_single``, or if ``u < prob_acc / threshold_acc``;
    ``prob_acc`` adds up the probabilities of the children tried so far. If no child is accepted,
    the token is drawn from ``probs`` without the children. Thresholds of 1 keep the distribution.
    """
    is_child, (batch, rows, vocab_size) = tree.is_child, probs.shape
    ids = jnp.broadcast_to(tree.draft_tokens[:, None, :], (batch, rows, rows))
    p = jnp.where(is_child, jnp.take_along_axis(probs, ids, axis=2), 0.0)
    coins = draw_coins(seeds, tree)[:, :, None]
    # the strict comparison never accepts a draft with probability 0
    index = jnp.arange(rows, dtype=jnp.int32)
    up_to = jnp.sum(jnp.where(index[:, None] >= index, p[:, :, None, :], 0.0), axis=3)
    is_likely = coins < up_to / max(acceptance.threshold_acc, LEAST_ACC)
    accepted = is_child & (is_likely | (p >= acceptance.threshold_single))
    child = jnp.argmax(accepted, axis=2)
    drafts = jnp.take_along_axis(tree.draft_tokens, child, axis=1)
    b = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    t = jnp.arange(rows, dtype=jnp.int32)[None, :, None]
    residual = probs.at[b, t, jnp.where(is_child, ids, vocab_size)].set(0.0, mode="drop")
    residual_tokens = _draw_residual(residual, probs, seeds, tree, implementation)
    return jnp.where(accepted.any(-1), drafts, residual_tokens)


def draw_coins(seeds: Array, tree: VerifyInput) -> Array:
    """Draw a random number f32 ``[B, T]`` in [0, 1) for the position after each row."""
    return position_uniform(seeds, tree.positions + 1 + COIN_STREAM)


def _draw_residual(
    weights: Array, probs: Array, seeds: Array, tree: VerifyInput, implementation: str | None
) -> Array:
    """Draw i32 ``[B, T]`` by weights f32 ``[B, T, V]``, or by ``probs`` if all weights are 0."""
    weights = jnp.where(jnp.any(weights > 0, axis=2, keepdims=True), weights, probs)
    logits = jnp.log(weights).reshape(-1, weights.shape[2])
    # seeds of all rows, and positions of the tokens after them
    keys = jnp.repeat(seeds, tree.positions.shape[1], axis=0)
    at = (tree.positions + 1).reshape(-1)
    ones = jnp.ones(at.shape, jnp.float32)
    tokens = draw_tokens(
        logits, ones, -jnp.inf * ones, keys, at + RESIDUAL_STREAM, implementation=implementation
    )
    return tokens.reshape(tree.positions.shape)
