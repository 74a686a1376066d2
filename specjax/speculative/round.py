"""The fused round and the prefill chunk: what serving dispatches, as pure functions."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from specjax.models.decoder import CausalLM
from specjax.runtime.paging import PageView
from specjax.speculative.future_map import FutureMap, publish, resolve, spend, stash
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

    Rows whose request has nothing left to produce are treated as padding.

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
    slots = jnp.where(future.remaining[slots] > 0, slots, 0)
    inputs = resolve(future, slots)
    view = replace(view, page_table=view.page_table[slots])
    params = rows_of(sampling, slots)
    tree, kv_draft = draft(target, head, pools.draft, inputs, view, num_steps)
    verified, kv_target = verify(
        target,
        pools.target,
        tree,
        inputs.seq_lens,
        view,
        params,
        slots > 0,
        num_steps=num_steps,
        feature_layers=feature_layers,
        simulate_accept_length=simulate_accept_length,
    )
    counts = verified.num_accepted_tokens
    future = publish(future, slots, inputs.seq_lens + counts)
    future = spend(future, slots, verified.accept_tokens, counts, params.end_token_ids)
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


def spec_rounds(
    target: CausalLM,
    head: Head | None,
    pools: KVPools,
    future: FutureMap,
    view: PageView,
    sampling: SamplingTable,
    slots: jax.Array,
    *,
    num_rounds: int,
    num_steps: int,
    feature_layers: tuple[int, ...],
    simulate_accept_length: float | None = None,
) -> tuple[KVPools, FutureMap, jax.Array]:
    """``num_rounds`` rounds of :func:`spec_round` in one call, for models whose round is short.

    Returns:
        As :func:`spec_round`, with what is for the host stacked to i32 ``[num_rounds, B, A + 2]``.
    """

    def one(pools: KVPools, future: FutureMap) -> tuple[KVPools, FutureMap, jax.Array]:
        return spec_round(
            target,
            head,
            pools,
            future,
            view,
            sampling,
            slots,
            num_steps=num_steps,
            feature_layers=feature_layers,
            simulate_accept_length=simulate_accept_length,
        )

    if num_rounds == 1:
        pools, future, packed = one(pools, future)
        return pools, future, packed[None]

    def step(
        i: jax.Array, carry: tuple[KVPools, FutureMap, jax.Array]
    ) -> tuple[KVPools, FutureMap, jax.Array]:
        pools, future, packed = carry
        pools, future, values = one(pools, future)
        return pools, future, packed.at[i].set(values)

    packed = jnp.zeros((num_rounds, slots.shape[0], num_steps + 3), jnp.int32)
    return jax.lax.fori_loop(0, num_rounds, step, (pools, future, packed))


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
        chunk: i32 ``[5]``: request slot, tokens already in the pool, tokens in this chunk, 1 where
            the prompt ends with it, and the tokens that the request may produce.
        feature_layers: of the head.

    Returns:
        The pools, the rows by slot, and i32 ``[1]``, the sampled token (of meaning only where the
        prompt ends).
    """
    slot, start, num_tokens, is_final, budget = (chunk[i : i + 1] for i in range(5))
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
    params = rows_of(sampling, slot)
    token = sample(logits, new_len[:, None], params)[:, 0]
    future = publish(future, slot, new_len)
    future = replace(future, remaining=future.remaining.at[slot].set(budget))
    future = spend(future, slot, token[:, None], is_final, params.end_token_ids)
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
