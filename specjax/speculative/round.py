"""The round over request slots: its three stages, the fused call, and several rounds in one.

All functions here have the form ``(target, head, pools, future, view, sampling, ..., config)`` and
return the pools and the rows between rounds first, so that both can be donated. Contexts and
parameters are looked up by request slot, 0 for padding; a row whose request has nothing left to
produce is treated as padding.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from specjax.kv.pages import PageView
from specjax.models.decoder import CausalLM
from specjax.sampling.draw import rows_of
from specjax.sampling.logprobs import zero_logprobs
from specjax.speculative.future_map import FutureMap, publish, record, resolve, spend, stash
from specjax.speculative.stages import Head, draft, extend, verify
from specjax.types import KVPools, RoundOutput, SamplingTable, VerifyInput, VerifyOutput


@dataclass(frozen=True, kw_only=True)
class RoundConfig:
    """Static sizes of a round.

    Attributes:
        num_steps: drafted tokens a row; 0 decodes plainly, without a head.
        feature_layers: target layers that the head reads.
        num_rounds: rounds in one call.
        max_top_logprobs: most likely tokens that a row may ask for.
        greedy: rows are greedy, with nothing that changes logits, and ask for no log-probabilities.
        drafts_next: leave what the next round drafts from. Without, a head keeps its KV only, so
            that drafting can begin again later: its attention, feed-forward and output head are not
            computed for a head of one layer. A round that drafts after all proposes a stale token.
        simulate_accept_length: accept this many tokens on average, for measurements of speed.
    """

    num_steps: int
    feature_layers: tuple[int, ...] = ()
    num_rounds: int = 1
    max_top_logprobs: int = 0
    greedy: bool = False
    drafts_next: bool = True
    simulate_accept_length: float | None = None


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
        future.tokens,
        slots,
        num_steps=config.num_steps,
        feature_layers=config.feature_layers,
        num_top_logprobs=config.max_top_logprobs,
        greedy=config.greedy,
        simulate_accept_length=config.simulate_accept_length,
    )
    counts = verified.num_accepted_tokens
    future = publish(future, slots, inputs.seq_lens + counts)
    future = record(future, slots, inputs.seq_lens + 1, verified.accept_tokens, counts)
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
) -> tuple[KVPools, FutureMap, RoundOutput]:
    """Let the head read what was accepted, and pack what the host wants to know."""
    counts = verified.num_accepted_tokens
    if head is not None and pools.draft is not None:
        # verification has published the new lengths, and the end of a request
        slots = jnp.where(counts > 0, slots, 0)
        inputs = resolve(future, slots)
        before, pages = inputs.seq_lens - counts, _pages_of(view, slots)
        following, kv = extend(target, head, pools.draft, verified, before, pages)
        if not config.drafts_next:
            following = replace(inputs, bonus_tokens=verified.bonus_tokens)
        pools, future = replace(pools, draft=kv), stash(future, slots, following)
    columns = [verified.accept_tokens, verified.num_accepted_drafts[:, None], counts[:, None]]
    return pools, future, RoundOutput(jnp.concatenate(columns, axis=1), verified.logprobs)


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
) -> tuple[KVPools, FutureMap, RoundOutput]:
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
        The pools, the rows for the next round, and what the host reads.
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
) -> tuple[KVPools, FutureMap, RoundOutput]:
    """``config.num_rounds`` rounds in one call, for models whose round is short.

    Returns:
        As :func:`spec_round`, with a leading axis of ``num_rounds`` on what the host reads.
    """
    fixed = (view, sampling, slots)
    if config.num_rounds == 1:
        pools, future, out = spec_round(target, head, pools, future, *fixed, config=config)
        return pools, future, jax.tree.map(lambda leaf: leaf[None], out)

    def step(
        i: jax.Array, carry: tuple[KVPools, FutureMap, RoundOutput]
    ) -> tuple[KVPools, FutureMap, RoundOutput]:
        pools, future, outs = carry
        pools, future, out = spec_round(target, head, pools, future, *fixed, config=config)
        return pools, future, jax.tree.map(lambda all, new: all.at[i].set(new), outs, out)

    rounds = (config.num_rounds, slots.shape[0])
    accepted = (*rounds, config.num_steps + 1)
    outs = RoundOutput(
        jnp.zeros((*rounds, config.num_steps + 3), jnp.int32),
        None if config.greedy else zero_logprobs(accepted, config.max_top_logprobs),
    )
    return jax.lax.fori_loop(0, config.num_rounds, step, (pools, future, outs))
