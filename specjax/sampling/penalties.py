"""Penalties, logit bias and the minimum length: changes of the logits at every verified row.

Every row sees the tokens before it on its own path: the history of the request, and the drafts
between the root and the row. What a row is charged for is therefore what plain decoding would have
charged at that position, and accepting drafts changes no token.

The order is SGLang's: frequency and presence, repetition, logit bias. Temperature and filters come
after. Frequency and presence count the tokens that the request produced; repetition takes those of
the prompt as well, as in vLLM and Hugging Face transformers.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.types import SamplingTable, VerifyInput


def is_adjusting(tree: VerifyInput, sampling: SamplingTable) -> jax.Array:
    """Whether :func:`adjust_logits` would change anything in the batch, bool ``[]``."""
    return jnp.any(
        _counts_tokens(sampling)
        | (sampling.bias_ids[:, 0] >= 0)
        | _is_too_early(tree, sampling)[:, 0]
    )


def adjust_logits(
    logits: jax.Array, tree: VerifyInput, sampling: SamplingTable, history: jax.Array
) -> jax.Array:
    """Adjust logits f32 ``[B, T, V]``; ``history [B, C]`` are the tokens up to the trees' roots."""
    logits = _penalize(logits, tree, sampling, history)
    logits = _at(logits, sampling.bias_ids[:, None]).add(sampling.bias_values[:, None], mode="drop")
    ends = sampling.end_token_ids[:, None]
    forbidden = jnp.where(_is_too_early(tree, sampling)[:, :, None], ends, -1)
    return _at(logits, forbidden).set(-jnp.inf, mode="drop")


def _counts_tokens(sampling: SamplingTable) -> jax.Array:
    """Rows bool ``[B]`` that are charged for tokens before."""
    return (
        (sampling.repetition_penalties != 1)
        | (sampling.frequency_penalties != 0)
        | (sampling.presence_penalties != 0)
    )


def _is_too_early(tree: VerifyInput, sampling: SamplingTable) -> jax.Array:
    """Rows bool ``[B, T]`` at which the request has produced less than its minimum."""
    produced = tree.positions + 1 - sampling.prompt_lens[:, None]
    return produced < sampling.min_new_tokens[:, None]


def _at(values: jax.Array, ids: jax.Array) -> Any:
    """``values`` ``[B, T, V]`` at tokens i32 ``[B, 1 or T, N]``, for updates; -1 is left out."""
    batch, rows, vocab_size = values.shape
    # -1 would wrap to the last token
    ids = jnp.where(ids >= 0, ids, vocab_size)
    b = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    t = jnp.arange(rows, dtype=jnp.int32)[None, :, None]
    return values.at[b, t, ids]


def _penalize(
    logits: jax.Array, tree: VerifyInput, sampling: SamplingTable, history: jax.Array
) -> jax.Array:
    """Charge for the tokens of the history, counted once a request, and of each row's own path."""
    batch, rows, vocab_size = logits.shape
    index = jnp.arange(history.shape[1], dtype=jnp.int32)
    is_prompt = index < sampling.prompt_lens[:, None]
    is_known = (index <= tree.positions[:, :1]) & _counts_tokens(sampling)[:, None]
    once = jnp.zeros((batch, 1, vocab_size), jnp.int32)

    def count(mask: jax.Array) -> jax.Array:
        ids = jnp.where(mask, history, -1)[:, None]
        return _at(once, ids).add(1, mode="drop")

    produced = jnp.broadcast_to(count(is_known & ~is_prompt), logits.shape)
    tokens = jnp.arange(vocab_size, dtype=jnp.int32)
    # the root, in column 0, is in the history already; one pass over the logits with these sums
    for i in range(1, rows):
        on_path = tree.tree_mask[:, :, i, None] & (tree.draft_tokens[:, i, None, None] == tokens)
        produced = produced + on_path.astype(jnp.int32)
    was_produced = produced > 0
    was_seen = was_produced | (count(is_known & is_prompt) > 0)
    frequency, presence = sampling.frequency_penalties, sampling.presence_penalties
    charged = logits - frequency[:, None, None] * produced.astype(jnp.float32)
    charged = charged - presence[:, None, None] * was_produced.astype(jnp.float32)
    penalty = jnp.where(was_seen, sampling.repetition_penalties[:, None, None], 1.0)
    return jnp.where(charged > 0, charged / penalty, charged * penalty)
