"""Prefill: run prompt chunks, packed into one row of tokens, through the target and the draft."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.kv.pages import Segments
from specjax.kv.recurrent import recurrent_prompts
from specjax.models.layers import pick_row
from specjax.sampling.draw import logprobs_of, num_best, target_tokens
from specjax.sampling.logit_processor import LogitInputs, NewTokens, keep_allowed
from specjax.sampling.table import unpack_sampling
from specjax.speculative.algorithm import PromptChunks
from specjax.speculative.future_map import DeviceState, advance, resolve, restart, stash
from specjax.speculative.round import Resident, RoundConfig, make_batch
from specjax.speculative.tree import accept, chain_input
from specjax.types import NO_DRAFTS, KVPools, Logprobs, NodeOutputs, RoundOutput

# number of integers in the header of a packed chunk
HEADER = 10
UNLIMITED = 2**31 - 1


class Chunk(NamedTuple):
    """The tokens of one prompt that are computed in one pass."""

    slot: int  # request slot
    tokens: Sequence[int]
    start: int = 0  # number of tokens before the chunk, which are already in the pool
    following: int | None = None  # the prompt token after the chunk; ``None`` at the prompt's end
    budget: int = UNLIMITED  # maximum number of tokens to generate
    num_cached: int = 0  # number of leading tokens whose KV came from the prefix cache
    state_source: int = 0  # slot of the states before the chunk; 0: those of ``slot``
    # number of tokens of the chunk, and the slot that also gets the states after them; 0: none
    kept_states: tuple[int, int] = (0, 0)

    @classmethod
    def of(
        cls,
        slot: int,
        text: Sequence[int],
        start: int,
        end: int,
        budget: int = UNLIMITED,
        num_cached: int = 0,
    ) -> "Chunk":
        """Make a chunk of the tokens of a prompt from ``start`` to ``end``."""
        following = text[end] if end < len(text) else None
        return cls(slot, text[start:end], start, following, budget, num_cached)


def pack_chunks(chunks: Sequence[Chunk], width: int, limit: int) -> np.ndarray:
    """Pack at most ``limit`` chunks, with at most ``width`` tokens altogether, for the device.

    Returns i32 ``[limit * HEADER + width]``: the headers of all chunks, then all tokens.
    """
    headers = np.zeros((limit, HEADER), np.int32)
    tokens = np.zeros(width, np.int32)
    num_tokens = 0
    for i, (slot, ids, start, following, budget, num_cached, source, kept) in enumerate(chunks):
        after = 0 if following is None else following
        counts = start, len(ids), following is None, budget, after, num_cached
        headers[i] = slot, *counts, source, *kept
        tokens[num_tokens : num_tokens + len(ids)] = ids
        num_tokens += len(ids)
    return np.concatenate([headers.reshape(-1), tokens])


def prefill_chunks(
    resident: Resident,
    state: DeviceState,
    packed: Array,
    *,
    config: RoundConfig,
    limit: int,
    with_logprobs: bool = False,
) -> tuple[DeviceState, RoundOutput]:
    """Run ``limit`` chunks, which :func:`pack_chunks` packed, through the target and the draft.

    The output has the sampled tokens, ``packed`` i32 ``[limit]``, their log-probabilities
    ``[limit]`` and hidden states ``[limit, D]``. They are valid only for the last chunk of a
    prompt. With ``with_logprobs``, the output also has the log-probability, from raw logits, of the
    prompt token after each of the W tokens; the value after the end of a prompt is invalid.
    """
    pools, future = state.pools, state.future
    headers = packed[: limit * HEADER].reshape(limit, HEADER)
    slots, starts, counts, is_final, budgets, following, num_cached, *of_states = headers.T
    tokens = packed[limit * HEADER :]
    batch = replace(make_batch(resident, future, slots, config), seq_lens=starts)
    segments = Segments.of(starts, counts, tokens.shape[0])
    pages = replace(batch.pages, implementation=resident.target.implementation)
    attend = tuple(pool.attend_packed(segments) for pool in pages.pools)
    layers, by_token = config.feature_layers, batch.inputs_of_segments(segments)
    recurrent = recurrent_prompts(
        pools.requests, segments, slots, *of_states, implementation=pages.implementation
    )
    hidden, features, kv = resident.target(
        tokens[None],
        segments.positions[None],
        (*pools.target, *recurrent.pools),
        (*attend, *recurrent.recurs),
        layers,
        by_token,
    )
    kv, requests, _ = recurrent.split(kv)
    last, index = segments.last, segments.index
    # the prompt token after each token, or 0 at the prompt's end
    is_last = segments.is_real & (jnp.arange(tokens.shape[0], dtype=jnp.int32) == last[index])
    behind = jnp.where(is_last, following[index], jnp.roll(tokens, -1))
    prompt_logprobs, states = None, pick_row(hidden, last[None])
    if with_logprobs:
        logits = resident.target.logits(hidden[0])
        num_logprobs = jnp.where(segments.is_real, num_best(batch.sampling)[index], -1)
        prompt_logprobs = Logprobs(*logprobs_of(logits, behind, num_logprobs, config.sampling))
        logits = logits[last]
    else:
        logits = resident.target.logits(states)[0]
    new_lens = starts + counts
    owners = jnp.where(segments.is_real, slots[index], 0)
    places = jnp.where(segments.is_real, segments.positions, future.tokens.shape[1])
    future = replace(
        future,
        remaining=future.remaining.at[slots].set(budgets),
        tokens=future.tokens.at[owners, places].set(tokens, mode="drop"),
    )
    # before a prompt's end, use the greedy parameters of slot 0, so that no noise is drawn
    params = unpack_sampling(resident.by_slot.sampling, jnp.where(is_final > 0, slots, 0))
    roots = chain_input(tokens[last][:, None], new_lens - 1)
    future = restart(future, slots, new_lens, params)
    inputs = LogitInputs(params, future.tokens, slots)
    if (masks := resident.by_slot.masks) is not None:
        logits = keep_allowed(logits, masks[slots])
    drawn, logprobs = target_tokens(
        logits[:, None], roots, inputs, config.sampling, future.logit_states
    )
    future = advance(future, slots, NewTokens(drawn, is_final, new_lens, params))
    # before the end of a prompt the result is invalid, and the next chunk overwrites it
    _, future = accept(
        roots,
        NodeOutputs(drawn, drawn),
        future,
        slots,
        params.end_token_ids,
        NO_DRAFTS,
        implementation=config.sampling.implementation,
    )
    is_end = is_last & (is_final > 0)[index]
    chunks = PromptChunks(
        tokens=tokens[None],
        next_tokens=jnp.where(is_end, drawn[:, 0][index], behind)[None],
        positions=segments.positions[None],
        last=last,
        is_final=is_final > 0,
        attend=batch.pages.attend_packed(segments),
        segments=segments,
        num_cached=num_cached,
    )
    resolved, batch = resolve(future, slots), replace(batch, target_kv=kv)
    draft, rows = config.algorithm.prefill(batch, pools.draft, resolved, chunks, features)
    future = stash(future, slots, rows, resolved)
    logprobs = jax.tree.map(lambda leaf: leaf[:, 0], logprobs)
    out = RoundOutput(drawn[:, 0], logprobs, states[0], prompt_logprobs)
    return DeviceState(KVPools(kv, draft, requests), future), out
