"""The round over request slots: its three stages, the fused call, and several rounds in one.

All functions here have the form ``(target, head, pools, future, view, sampling, ..., config)`` and
return the pools and the rows between rounds first, so that both can be donated. Contexts and
parameters are looked up by request slot, 0 for padding; a row whose request has nothing left to
produce is treated as padding.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from specjax.models.decoder import CausalLM
from specjax.runtime.paging import PageView
from specjax.speculative.future_map import FutureMap, publish, resolve, spend, stash
from specjax.speculative.stages import Head, draft, extend, verify
from specjax.types import KVPools, SamplingTable, VerifyInput, VerifyOutput


@dataclass(frozen=True, kw_only=True)
class RoundConfig:
    """Static sizes of a round.

    Attributes:
        num_steps: drafted tokens a row; 0 decodes plainly, without a head.
        feature_layers: target layers that the head reads.
        num_rounds: rounds in one call.
        simulate_accept_length: accept this many tokens on average, for measurements of speed.
    """

    num_steps: int
    feature_layers: tuple[int, ...] = ()
    num_rounds: int = 1
    simulate_accept_length: float | None = None


def rows_of(table: SamplingTable, slots: jax.Array) -> SamplingTable:
    """Sampling parameters of request slots i32 ``[B]``."""
    return jax.tree.map(lambda leaf: leaf[slots], table)


def _active(future: FutureMap, slots: jax.Array) -> jax.Array:
    return jnp.where(future.remaining[slots] > 0, slots, 0)


def _pages_of(view: PageView, slots: jax.Array) -> PageView:
    return replace(view, page_table=view.page_table[slots])


def draft_stage(
    target: CausalLM,
    head: Head | None,
    pools: KVPools,
    future: FutureMap,
    view: PageView,
    sampling: SamplingTable,
    slots: jax.Array,
    *,
    config: RoundConfig,
) -> tuple[KVPools, FutureMap, VerifyInput]:
    """Draft a chain for each of the slots i32 ``[B]``."""
    slots = _active(future, slots)
    inputs = resolve(future, slots)
    tree, kv = draft(target, head, pools.draft, inputs, _pages_of(view, slots), config.num_steps)
    return replace(pools, draft=kv), future, tree


def verify_stage(
    target: CausalLM,
    head: Head | None,
    pools: KVPools,
    future: FutureMap,
    view: PageView,
    sampling: SamplingTable,
    slots: jax.Array,
    tree: VerifyInput,
    *,
    config: RoundConfig,
) -> tuple[KVPools, FutureMap, VerifyOutput]:
    """Verify the chains and publish the new lengths; without a head, the next root as well."""
    slots = _active(future, slots)
    inputs = resolve(future, slots)
    params = rows_of(sampling, slots)
    verified, kv = verify(
        target,
        pools.target,
        tree,
        inputs.seq_lens,
        _pages_of(view, slots),
        params,
        slots > 0,
        num_steps=config.num_steps,
        feature_layers=config.feature_layers,
        simulate_accept_length=config.simulate_accept_length,
    )
    counts = verified.num_accepted_tokens
    future = publish(future, slots, inputs.seq_lens + counts)
    future = spend(future, slots, verified.accept_tokens, counts, params.end_token_ids)
    if head is None:
        future = stash(future, slots, replace(inputs, bonus_tokens=verified.bonus_tokens))
    return replace(pools, target=kv), future, verified


def extend_stage(
    target: CausalLM,
    head: Head | None,
    pools: KVPools,
    future: FutureMap,
    view: PageView,
    sampling: SamplingTable,
    slots: jax.Array,
    verified: VerifyOutput,
    *,
    config: RoundConfig,
) -> tuple[KVPools, FutureMap, jax.Array]:
    """Let the head read what was accepted, and pack what the host wants to know.

    Returns:
        The pools, the rows for the next round, and i32 ``[B, A + 2]``: ``accept_tokens``,
        ``num_accepted_drafts``, ``num_accepted_tokens``.
    """
    counts = verified.num_accepted_tokens
    if head is not None and pools.draft is not None:
        # verification has published the new lengths, and the end of a request
        slots = jnp.where(counts > 0, slots, 0)
        before = resolve(future, slots).seq_lens - counts
        pages = _pages_of(view, slots)
        following, kv = extend(target, head, pools.draft, verified, before, pages)
        pools, future = replace(pools, draft=kv), stash(future, slots, following)
    columns = [verified.accept_tokens, verified.num_accepted_drafts[:, None], counts[:, None]]
    return pools, future, jnp.concatenate(columns, axis=1)


def spec_round(
    target: CausalLM,
    head: Head | None,
    pools: KVPools,
    future: FutureMap,
    view: PageView,
    sampling: SamplingTable,
    slots: jax.Array,
    *,
    config: RoundConfig,
) -> tuple[KVPools, FutureMap, jax.Array]:
    """One round: draft, verify, compact and extend; plain decoding where ``num_steps`` is 0.

    Args:
        target: the target model.
        head: the draft head; ``None`` only with ``num_steps`` 0.
        pools: KV pools, to be donated.
        future: rows by request slot, to be donated.
        view: page tables by request slot.
        sampling: parameters by request slot.
        slots: i32 ``[B]``, the request slots of this batch, 0 for padding.
        config: static sizes.

    Returns:
        The pools, the rows for the next round, and what the host reads, see :func:`extend_stage`.
    """
    fixed = (view, sampling, slots)
    pools, future, tree = draft_stage(target, head, pools, future, *fixed, config=config)
    pools, future, out = verify_stage(target, head, pools, future, *fixed, tree, config=config)
    return extend_stage(target, head, pools, future, *fixed, out, config=config)


def spec_rounds(
    target: CausalLM,
    head: Head | None,
    pools: KVPools,
    future: FutureMap,
    view: PageView,
    sampling: SamplingTable,
    slots: jax.Array,
    *,
    config: RoundConfig,
) -> tuple[KVPools, FutureMap, jax.Array]:
    """``config.num_rounds`` rounds in one call, for models whose round is short.

    Returns:
        As :func:`spec_round`, with what the host reads stacked to i32 ``[num_rounds, B, A + 2]``.
    """
    fixed = (view, sampling, slots)
    if config.num_rounds == 1:
        pools, future, packed = spec_round(target, head, pools, future, *fixed, config=config)
        return pools, future, packed[None]

    def step(
        i: jax.Array, carry: tuple[KVPools, FutureMap, jax.Array]
    ) -> tuple[KVPools, FutureMap, jax.Array]:
        pools, future, packed = carry
        pools, future, values = spec_round(target, head, pools, future, *fixed, config=config)
        return pools, future, packed.at[i].set(values)

    packed = jnp.zeros((config.num_rounds, slots.shape[0], config.num_steps + 3), jnp.int32)
    return jax.lax.fori_loop(0, config.num_rounds, step, (pools, future, packed))
