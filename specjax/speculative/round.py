"""The fused round and the prefill chunk: what serving dispatches, as pure functions."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from specjax.models.decoder import CausalLM
from specjax.runtime.paging import PageView
from specjax.speculative.future_map import FutureMap, publish, resolve, stash
from specjax.speculative.sampling import sample
from specjax.speculative.stages import Head, draft, extend, propose, verify
from specjax.types import KVPools, SamplingTable


def rows_of(table: SamplingTable, slots: jax.Array) -> SamplingTable:
    """Sampling parameters of request slots i32 ``[B]``."""
    return jax.tree.map(lambda leaf: leaf[slots], table)


def spec_round(
    target: CausalLM,
    head: Head | None,
    pools: KVPools,
    future: FutureMap,
    view: PageView,
    sampling: SamplingTable,
    slots: jax.Array,
    *,
    num_steps: int,
    feature_layers: tuple[int, ...],
    simulate_accept_length: float | None = None,
) -> tuple[KVPools, FutureMap, jax.Array]:
    """Draft, verify, compact and extend a batch; plain decoding where ``num_steps`` is 0.

    Args:
        target: the target model.
        head: the draft head; ``None`` only with ``num_steps`` 0.
        pools: KV pools, to be donated.
        future: rows by request slot, to be donated.
        view: page tables by request slot.
        sampling: parameters by request slot.
        slots: i32 ``[B]``, the request slots of this batch, 0 for padding.
        num_steps: drafted tokens a row.
        feature_layers: of the head.
        simulate_accept_length: for measurements of speed.

    Returns:
        The pools, the rows for the next round, and i32 ``[B, A + 2]`` for the host:
        ``accept_tokens``, ``num_accepted_drafts``, ``num_accepted_tokens``.
    """
    inputs = resolve(future, slots)
    view = replace(view, page_table=view.page_table[slots])
    tree, kv_draft = draft(target, head, pools.draft, inputs, view, num_steps)
    verified, kv_target = verify(
        target,
        pools.target,
        tree,
        inputs.seq_lens,
        view,
        rows_of(sampling, slots),
        slots > 0,
        num_steps=num_steps,
        feature_layers=feature_layers,
        simulate_accept_length=simulate_accept_length,
    )
    future = publish(future, slots, inputs.seq_lens + verified.num_accepted_tokens)
    if head is None:
        following = replace(inputs, bonus_tokens=verified.bonus_tokens)
    else:
        assert kv_draft is not None
        following, kv_draft = extend(target, head, kv_draft, verified, inputs.seq_lens, view)
    future = stash(future, slots, following)
    packed = jnp.concatenate(
        [
            verified.accept_tokens,
            verified.num_accepted_drafts[:, None],
            verified.num_accepted_tokens[:, None],
        ],
        axis=1,
    )
    return KVPools(target=kv_target, draft=kv_draft), future, packed


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
    feature_layers: tuple[int, ...],
) -> tuple[KVPools, FutureMap, jax.Array]:
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
        chunk: i32 ``[4]``: request slot, tokens already in the pool, tokens in this chunk, and 1
            where the prompt ends with it.
        feature_layers: of the head.

    Returns:
        The pools, the rows by slot, and i32 ``[1]``, the sampled token (of meaning only where the
        prompt ends).
    """
    slot, start, num_tokens, is_final = (chunk[i : i + 1] for i in range(4))
    width = tokens.shape[0] - 1
    view = replace(view, page_table=view.page_table[slot])
    offsets = jnp.arange(width, dtype=jnp.int32)[None]
    positions = start[:, None] + offsets
    attend = view.attend(start, width, num_valid=num_tokens)
    hidden, features, kv_target = target(
        tokens[None, :-1], positions, pools.target, attend, feature_layers
    )
    last = (num_tokens - 1)[:, None, None]
    logits = target.logits(jnp.take_along_axis(hidden, last, axis=1))
    new_len = start + num_tokens
    token = sample(logits, new_len[:, None], rows_of(sampling, slot))[:, 0]
    future = publish(future, slot, new_len)
    inputs = replace(resolve(future, slot), bonus_tokens=token)
    kv_draft = pools.draft
    if head is not None:
        at_end = (offsets == num_tokens - 1) & (is_final > 0)
        shifted = jnp.where(at_end, token[:, None], tokens[None, 1:])
        states, kv_draft = head(
            head.embed(shifted, target), head.fuse(features), positions, kv_draft, attend
        )
        recurrent = jnp.take_along_axis(states, last, axis=1)[:, 0]
        topk_probs, topk_ids = propose(head, target, recurrent)
        inputs = replace(inputs, topk_probs=topk_probs, topk_ids=topk_ids, hidden=recurrent)
    return KVPools(target=kv_target, draft=kv_draft), stash(future, slot, inputs), token
