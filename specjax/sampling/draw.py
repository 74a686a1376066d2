"""Draw the target's next tokens, greedy or sampled, with noise that is independent of batching.

Lossless speculation rests on one rule: at every verified row, the noise with which the target draws
its token depends only on the request's seed and the token's position (docs/how_it_works.md). The
optional rules in :mod:`specjax.sampling.accept_draws` replace the draws of rows with drafts.

The order is SGLang's: logit processors, temperature, top-k, top-p, min-p.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.kernels.backend import resolve
from specjax.kernels.draw_tokens import draw_tokens, token_noise
from specjax.kernels.filter_logits import kept_logits, logit_thresholds
from specjax.kernels.token_logprobs import token_logprobs
from specjax.models.columns import Columns
from specjax.sampling.accept_draws import (
    COUPLED,
    DRAFT_STREAM,
    Acceptance,
    accept_tokens,
    filtered_probs,
)
from specjax.sampling.logit_processor import LogitInputs, adjust_logits
from specjax.types import Logprobs, SamplingTable, VerifyInput


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The static configuration of sampling.

    With ``greedy``, only argmax is compiled: all rows take the most likely token, without logit
    processors and log-probabilities, and ``acceptance`` has no effect. Log-probabilities are those
    of the raw logits, before penalties, bias, temperature and filters. With ``processed``, they are
    those of the distribution that is sampled; temperature 0 counts as 1. Plain XLA skips work that
    no row needs. Pallas kernels do not, because on a GPU each conditional makes the host read a
    value in the middle of a round.
    """

    max_top_logprobs: int = 0  # maximum number of most likely tokens to report per row
    greedy: bool = False
    processed: bool = False
    implementation: str | None = None
    acceptance: Acceptance = COUPLED
    # whether drafters compute VerifyInput.confidences, for which chains need a softmax
    reads_confidence: bool = False


# confidence of a draft that the drafter gives no probability
LEAST_CONFIDENCE = 1e-30


def target_tokens(
    logits: Array | Columns,
    tree: VerifyInput,
    inputs: LogitInputs,
    config: SamplingConfig,
    states: tuple[Any, ...] = (),
) -> tuple[Array, Logprobs | None]:
    """Draw the target's token i32 ``[B, T]`` after every node of the tree, with log-probabilities.

    Logits f32 ``[B, T, V]`` are raw. ``states`` are the states of the logit processors, by request
    slot. Requests that did not ask for log-probabilities get zeros. Of a greedy batch, a device may
    have only its own columns.
    """
    if isinstance(logits, Columns):
        return logits.best()[1][..., 0], None
    if config.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), None
    shape, backend = logits.shape[:2], resolve(config.implementation)
    sampling = inputs.sampling

    def adjust() -> Array:
        return adjust_logits(tree, logits, states, inputs)

    if backend == "xla":
        adjusted = jax.lax.cond(jnp.any(sampling.is_adjusted > 0), adjust, lambda: logits)
    else:
        adjusted = adjust()

    flat = adjusted.reshape(-1, logits.shape[-1])
    per_row = partial(jnp.repeat, repeats=shape[1], axis=0)
    temperatures = per_row(sampling.temperatures)
    thresholds = _thresholds(flat, sampling, shape[1], config)
    seeds, positions = per_row(sampling.seeds), (tree.positions + 1).reshape(-1)
    tokens = draw_tokens(flat, temperatures, thresholds, seeds, positions, implementation=backend)
    if shape[1] > 1 and not config.acceptance.is_coupled:
        probs = filtered_probs(flat, temperatures, thresholds).reshape(logits.shape)
        tokens = tokens.reshape(shape)
        tokens = accept_tokens(probs, tokens, tree, sampling, config.acceptance, backend)
        tokens = tokens.reshape(-1)
    num_tops = per_row(num_best(sampling))
    if config.processed:
        values = logprobs_of(flat, tokens, num_tops, config, temperatures, thresholds)
    else:
        values = logprobs_of(logits.reshape(flat.shape), tokens, num_tops, config)
    reshaped = (value.reshape(*shape, *value.shape[1:]) for value in values)
    return tokens.reshape(shape), Logprobs(*reshaped)


def _thresholds(flat: Array, sampling: SamplingTable, rows: int, config: SamplingConfig) -> Array:
    """Call :func:`logit_thresholds` for logits f32 ``[B * rows, V]`` of B requests."""
    limits = sampling.temperatures, sampling.top_ks, sampling.top_ps, sampling.min_ps
    by_row = (jnp.repeat(limit, rows, axis=0) for limit in limits)
    return logit_thresholds(flat, *by_row, implementation=config.implementation)


def draft_tokens(
    logits: Array | Columns,
    ids: Array | None,
    positions: Array,
    sampling: SamplingTable,
    config: SamplingConfig,
    topk: int,
) -> tuple[Array, Array]:
    """Choose the K columns of draft logits that the target will draw with the highest probability.

    At a temperature above 0, the draft draws with the target's filters and with the noise that the
    target will use for this position. Both draws then agree nearly as often as the distributions
    overlap, and the text still depends only on the seed. This is Gumbel coupling, or
    drafter-invariant speculation (arXiv 2408.07978). For rejection sampling, the draft's noise
    differs from the target's. With thresholds, it uses none: the most likely tokens are best.

    Args:
        logits: f32 ``[B, N, V]``, raw logits of the draft; own columns as in :func:`target_tokens`.
        ids: i32 ``[V]``, the token id of each column; ``None`` if columns are token ids.
        positions: i32 ``[B, N]``, absolute positions of the drafted tokens.
        topk: K.

    Returns:
        Scores f32 ``[B, N, K]`` from 0 to 1, and columns i32 ``[B, N, K]``, best first. A score is
        the softmax of the logits, plus noise if any, at the column. For K = 1 it is 1, or with
        ``reads_confidence`` the softmax of the raw logits at the column, above 0.
    """
    if isinstance(logits, Columns):
        return _greedy_drafts(logits, config, topk)
    shape, backend = logits.shape[:2], resolve(config.implementation)
    if config.acceptance.has_thresholds:
        config = replace(config, greedy=True)
    if config.acceptance.uses_rejection:
        positions = positions + DRAFT_STREAM
    if config.greedy and topk == 1:
        best = jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
        return _chain_scores(logits, best, config), best

    per_row = partial(jnp.repeat, repeats=shape[1], axis=0)
    flat, temperatures = logits.reshape(-1, logits.shape[-1]), per_row(sampling.temperatures)
    seeds, row_positions = per_row(sampling.seeds), positions.reshape(-1)
    thresholds = jnp.full(temperatures.shape, -jnp.inf)
    if not config.greedy:
        thresholds = _thresholds(flat, sampling, shape[1], config)
    if topk == 1:
        best = draw_tokens(
            flat, temperatures, thresholds, seeds, row_positions, ids, implementation=backend
        )
        best = best.reshape(*shape, 1)
        return _chain_scores(logits, best, config), best
    filtered = kept_logits(flat, temperatures[:, None], thresholds[:, None])

    def perturb() -> Array:
        columns = jnp.arange(flat.shape[1], dtype=jnp.int32) if ids is None else ids
        noise = token_noise(seeds, row_positions, columns)
        return jnp.where(temperatures[:, None] > 0, filtered + noise, filtered)

    if config.greedy:
        noisy = filtered
    elif backend == "xla":
        noisy = jax.lax.cond(jnp.any(temperatures > 0), perturb, lambda: filtered)
    else:
        noisy = perturb()
    values, best = jax.lax.top_k(noisy, topk)
    scores = jnp.exp(values - jax.nn.logsumexp(noisy, axis=1, keepdims=True))
    # rounding must not rank a child before its parent, or NaN before any number
    scores = jnp.where(scores > 0, jnp.minimum(scores, 1.0), 0.0)
    return scores.reshape(*shape, topk), best.reshape(*shape, topk)


def _greedy_drafts(logits: Columns, config: SamplingConfig, topk: int) -> tuple[Array, Array]:
    """The result of :func:`draft_tokens` for a greedy batch, from own columns."""
    least = LEAST_CONFIDENCE
    if topk > 1:
        logits, least = replace(logits, own=kept_logits(logits.own, 0.0, -jnp.inf)), 0.0
    has_scores = topk > 1 or config.reads_confidence
    values, best, total = logits.best(topk, has_total=has_scores)
    if total is None:
        return jnp.ones(best.shape, jnp.float32), best
    scores = jnp.exp(values - total)
    return jnp.where(scores > least, jnp.minimum(scores, 1.0), least), best


def _chain_scores(logits: Array, best: Array, config: SamplingConfig) -> Array:
    """Scores f32 ``[B, N, 1]`` of columns i32 ``[B, N, 1]`` in a chain."""
    if not config.reads_confidence:
        return jnp.ones(best.shape, jnp.float32)
    chosen = jnp.take_along_axis(logits, best, axis=-1)
    probs = jnp.exp(chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    # at least a little, because a score of 0 means that nothing was drafted
    return jnp.where(probs > LEAST_CONFIDENCE, jnp.minimum(probs, 1.0), LEAST_CONFIDENCE)


def draft_probs(
    logits: Array,
    ids: Array | None,
    sampling: SamplingTable,
    config: SamplingConfig,
    vocab_size: int,
) -> Array:
    """The distribution f32 ``[B, N, V]`` over target tokens from which the draft draws.

    Logits f32 ``[B, N, W]`` are raw; ``ids`` i32 ``[W]`` are the token ids of their columns, as in
    :func:`draft_tokens`. V is ``vocab_size``. Tokens outside the draft vocabulary get 0.
    """
    batch, rows = logits.shape[:2]
    flat, temperatures = logits.reshape(-1, logits.shape[-1]), sampling.temperatures
    thresholds = _thresholds(flat, sampling, rows, config)
    probs = filtered_probs(flat, jnp.repeat(temperatures, rows, axis=0), thresholds)
    probs = probs.reshape(logits.shape)
    if ids is None:
        return probs
    return jnp.zeros((batch, rows, vocab_size), jnp.float32).at[:, :, ids].set(probs)


def num_best(sampling: SamplingTable) -> Array:
    """Number i32 ``[B]`` of best tokens to report besides the chosen one; -1 reports nothing."""
    return jnp.where(sampling.wants_logprobs > 0, sampling.top_logprobs, -1)


def logprobs_of(
    logits: Array,
    tokens: Array,
    num_tops: Array,
    config: SamplingConfig,
    temperatures: Array | float = 1.0,
    thresholds: Array | float = -jnp.inf,
) -> tuple[Array, Array, Array]:
    """Call :func:`token_logprobs` for logits f32 ``[N, V]``; by default unscaled and unfiltered."""
    options = (
        jnp.broadcast_to(jnp.asarray(x, jnp.float32), tokens.shape)
        for x in (temperatures, thresholds)
    )
    limit, implementation = config.max_top_logprobs, config.implementation
    return token_logprobs(
        logits, tokens, *options, num_tops, limit=limit, implementation=implementation
    )
