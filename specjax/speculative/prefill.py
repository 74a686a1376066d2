"""Prefill: one chunk of a prompt through target and draft, as a pure function."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from specjax.kv.pages import PageView
from specjax.models.decoder import CausalLM
from specjax.models.layers import pick_row
from specjax.sampling.draw import rows_of, target_tokens
from specjax.speculative.future_map import FutureMap, publish, record, resolve, spend, stash
from specjax.speculative.round import RoundConfig
from specjax.speculative.stages import Head, propose
from specjax.speculative.tree import chain_input
from specjax.types import KVPools, RoundOutput, SamplingTable


def prefill_chunk(
    target: CausalLM,
    head: Head | None,
    pools: KVPools,
    future: FutureMap,
    view: PageView,
    sampling: SamplingTable,
    tokens: jax.Array,
    chunk: jax.Array,
    *,
    config: RoundConfig,
) -> tuple[KVPools, FutureMap, RoundOutput]:
    """Run one chunk of a prompt through target and draft.

    The draft reads the same positions with its token ids shifted left by one: behind the last
    token of a chunk comes the next prompt token, or the first sampled token where the prompt ends.

    Args:
        target: the target model.
        head: the draft head, or ``None``.
        pools: KV pools, to be donated.
        future: rows by request slot, to be donated.
        view: page tables by request slot.
        sampling: parameters by request slot.
        tokens: i32 ``[P + 1]``, the chunk, the token behind it (0 where the prompt ends), zeros.
        chunk: i32 ``[5]``: request slot, tokens already in the pool, tokens in this chunk, 1 where
            the prompt ends with it, and the tokens that the request may produce.
        config: static sizes of a round.

    Returns:
        The pools, the rows by slot, and what the host reads: ``packed`` i32 ``[1]``, the sampled
        token, and its log-probabilities ``[1]`` (of meaning only where the prompt ends).
    """
    slot, start, num_tokens, is_final, budget = (chunk[i : i + 1] for i in range(5))
    width = tokens.shape[0] - 1
    view = replace(view, page_table=view.page_table[slot])
    offsets = jnp.arange(width, dtype=jnp.int32)[None]
    positions = start[:, None] + offsets
    attend = view.attend(start, width, num_valid=num_tokens)
    hidden, features, kv_target = target(
        tokens[None, :-1], positions, pools.target, attend, config.feature_layers
    )
    last = num_tokens - 1
    logits = target.logits(pick_row(hidden, last))
    new_len = start + num_tokens
    future = publish(future, slot, new_len)
    future = record(future, slot, start, tokens[None, :-1], num_tokens)
    params = rows_of(sampling, jnp.where(is_final > 0, slot, 0))  # slot 0 is greedy: no noise
    root = chain_input(jnp.take(tokens, num_tokens - 1)[None], new_len - 1)
    drawn, logprobs = target_tokens(
        logits, root, params, future.tokens, slot, num_top=config.max_top_logprobs
    )
    token = drawn[:, 0]
    future = record(future, slot, new_len, drawn, is_final)
    future = replace(future, remaining=future.remaining.at[slot].set(budget))
    future = spend(future, slot, token[:, None], is_final, params.end_token_ids)
    inputs = replace(resolve(future, slot), bonus_tokens=token)
    kv_draft = pools.draft
    if head is not None:
        at_end = (offsets == num_tokens - 1) & (is_final > 0)
        shifted = jnp.where(at_end, token[:, None], tokens[None, 1:])
        states, kv_draft = head(
            head.embed(shifted, target), head.fuse(features), positions, kv_draft, attend, row=last
        )
        recurrent = states[:, 0]
        topk_probs, topk_ids = propose(head, target, recurrent)
        inputs = replace(inputs, topk_probs=topk_probs, topk_ids=topk_ids, hidden=recurrent)
    out = RoundOutput(token, jax.tree.map(lambda leaf: leaf[:, 0], logprobs))
    return KVPools(target=kv_target, draft=kv_draft), stash(future, slot, inputs), out
