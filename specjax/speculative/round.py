"""The round over request slots: draft, verify, commit, extend; and several rounds in one call.

All functions here take what is read only first, then KV pools and rows between rounds, and return
both of these first, so that they can be donated. A row whose request has nothing left to produce is
treated as padding.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from specjax.kernels.compact_tree import compact_tree
from specjax.kv.pages import PageView
from specjax.models.decoder import CausalLM
from specjax.sampling.draw import rows_of, target_tokens
from specjax.sampling.logprobs import zero_logprobs
from specjax.speculative.algorithm import Batch, SpeculativeAlgorithm, State
from specjax.speculative.future_map import FutureMap, consume, publish, record, resolve, stash
from specjax.speculative.tree import accept
from specjax.types import (
    DraftShape,
    KVPools,
    RoundOutput,
    SamplingTable,
    VerifyInput,
    VerifyOutput,
)


@dataclass(frozen=True, kw_only=True)
class RoundConfig:
    """What is static about a round.

    Attributes:
        algorithm: drafts.
        shape: of the drafted tree.
        feature_layers: target layers that the algorithm reads.
        num_rounds: rounds in one call.
        max_top_logprobs: most likely tokens that a row may ask for.
        greedy: rows are greedy, with nothing that changes logits, and ask for no log-probabilities.
        simulate_accept_length: accept this many tokens on average, for measurements of speed.
    """

    algorithm: SpeculativeAlgorithm
    shape: DraftShape
    feature_layers: tuple[int, ...] = ()
    num_rounds: int = 1
    max_top_logprobs: int = 0
    greedy: bool = False
    simulate_accept_length: float | None = None


@dataclass(frozen=True)
class Resident:
    """What every call reads and none writes; pages and parameters are by request slot."""

    target: CausalLM
    draft: object
    pages: PageView
    sampling: SamplingTable


def make_batch(resident: Resident, future: FutureMap, slots: jax.Array) -> Batch:
    """The batch of request slots i32 ``[B]``."""
    return Batch(
        target=resident.target,
        draft=resident.draft,
        pages=replace(resident.pages, page_table=resident.pages.page_table[slots]),
        sampling=rows_of(resident.sampling, slots),
        slots=slots,
        seq_lens=future.seq_lens[slots],
        bonus_tokens=future.bonus_tokens[slots],
        tokens=future.tokens,
    )


def active_batch(resident: Resident, future: FutureMap, slots: jax.Array) -> Batch:
    """The batch of those slots that may still produce tokens."""
    return make_batch(resident, future, jnp.where(future.remaining[slots] > 0, slots, 0))


def verify(
    batch: Batch, kv: jax.Array, tree: VerifyInput, config: RoundConfig
) -> tuple[VerifyOutput, jax.Array]:
    """One target pass over a drafted chain: draw the target's token at every row and accept.

    The mask of a chain is causal, so the attention needs none.

    Args:
        batch: rows.
        kv: the target's KV pool.
        tree: a chain.
        config: static sizes.
    """
    target = batch.target
    attend = batch.pages.attend(batch.seq_lens, config.shape.nodes)
    hidden, features, kv = target(
        tree.draft_tokens, tree.positions, kv, attend, config.feature_layers
    )
    tokens, logprobs = target_tokens(
        target.logits(hidden),
        tree,
        batch.sampling,
        batch.tokens,
        batch.slots,
        num_top=config.max_top_logprobs,
        greedy=config.greedy,
    )
    verified = accept(
        tree, tokens, features, batch.slots > 0, config.shape.steps, config.simulate_accept_length
    )
    compacted = jax.tree.map(lambda v: compact_tree(v, verified.accept_index), logprobs)
    return replace(verified, logprobs=compacted), kv


def commit(future: FutureMap, batch: Batch, verified: VerifyOutput) -> FutureMap:
    """Record what was accepted: lengths, bonus tokens, history, and what may still come."""
    slots, counts = batch.slots, verified.num_accepted_tokens
    future = publish(future, slots, batch.seq_lens + counts, verified.bonus_tokens)
    future = record(future, slots, batch.seq_lens + 1, verified.accept_tokens, counts)
    return consume(future, slots, verified.accept_tokens, counts, batch.sampling.end_token_ids)


def _extend(
    batch: Batch,
    state: State,
    future: FutureMap,
    verified: VerifyOutput,
    config: RoundConfig,
) -> tuple[State, FutureMap, RoundOutput]:
    rows = resolve(future, batch.slots)
    state, rows = config.algorithm.extend(batch, state, rows, verified, config.shape)
    columns = (
        verified.num_proposed_drafts,
        verified.num_accepted_drafts,
        verified.num_accepted_tokens,
    )
    packed = jnp.concatenate([verified.accept_tokens, jnp.stack(columns, axis=1)], axis=1)
    return state, stash(future, batch.slots, rows), RoundOutput(packed, verified.logprobs)


def spec_round(
    resident: Resident,
    pools: KVPools,
    future: FutureMap,
    slots: jax.Array,
    *,
    config: RoundConfig,
) -> tuple[KVPools, FutureMap, RoundOutput]:
    """One round: draft, verify, commit and extend.

    Args:
        resident: models, pages and sampling parameters.
        pools: KV pools, to be donated.
        future: rows by request slot, to be donated.
        slots: i32 ``[B]``, the request slots of this batch, 0 for padding.
        config: static sizes.

    Returns:
        The pools, the rows for the next round, and what the host reads.
    """
    batch = active_batch(resident, future, slots)
    rows = resolve(future, batch.slots)
    tree, state = config.algorithm.propose(batch, pools.draft, rows, config.shape)
    verified, kv = verify(batch, pools.target, tree, config)
    future = commit(future, batch, verified)
    state, future, out = _extend(batch, state, future, verified, config)
    return KVPools(target=kv, draft=state), future, out


def spec_rounds(
    resident: Resident,
    pools: KVPools,
    future: FutureMap,
    slots: jax.Array,
    *,
    config: RoundConfig,
) -> tuple[KVPools, FutureMap, RoundOutput]:
    """``config.num_rounds`` rounds in one call, for models whose round is short.

    Returns:
        As :func:`spec_round`, with a leading axis of ``num_rounds`` on what the host reads.
    """
    if config.num_rounds == 1:
        pools, future, out = spec_round(resident, pools, future, slots, config=config)
        return pools, future, jax.tree.map(lambda leaf: leaf[None], out)

    def step(
        i: jax.Array, carry: tuple[KVPools, FutureMap, RoundOutput]
    ) -> tuple[KVPools, FutureMap, RoundOutput]:
        pools, future, outs = carry
        pools, future, out = spec_round(resident, pools, future, slots, config=config)
        return pools, future, jax.tree.map(lambda all, new: all.at[i].set(new), outs, out)

    rounds, width = (config.num_rounds, slots.shape[0]), config.shape.accept_width
    outs = RoundOutput(
        jnp.zeros((*rounds, width + 3), jnp.int32),
        None if config.greedy else zero_logprobs((*rounds, width), config.max_top_logprobs),
    )
    return jax.lax.fori_loop(0, config.num_rounds, step, (pools, future, outs))


# the stages as functions of their own, for tests and profiles: the three in turn are a round


def draft_stage(
    resident: Resident,
    pools: KVPools,
    future: FutureMap,
    slots: jax.Array,
    *,
    config: RoundConfig,
) -> tuple[KVPools, FutureMap, VerifyInput]:
    """Draft a tree for each of the slots i32 ``[B]``."""
    batch = active_batch(resident, future, slots)
    rows = resolve(future, batch.slots)
    tree, state = config.algorithm.propose(batch, pools.draft, rows, config.shape)
    return replace(pools, draft=state), future, tree


def verify_stage(
    resident: Resident,
    pools: KVPools,
    future: FutureMap,
    slots: jax.Array,
    tree: VerifyInput,
    *,
    config: RoundConfig,
) -> tuple[KVPools, FutureMap, VerifyOutput]:
    """Verify the trees and commit what was accepted."""
    batch = active_batch(resident, future, slots)
    verified, kv = verify(batch, pools.target, tree, config)
    return replace(pools, target=kv), commit(future, batch, verified), verified


def extend_stage(
    resident: Resident,
    pools: KVPools,
    future: FutureMap,
    slots: jax.Array,
    verified: VerifyOutput,
    *,
    config: RoundConfig,
) -> tuple[KVPools, FutureMap, RoundOutput]:
    """Let the algorithm read what was accepted, and pack what the host wants to know."""
    counts = verified.num_accepted_tokens
    # the batch as it was: verification has published new lengths, and the end of a request
    slots = jnp.where(counts > 0, slots, 0)
    before = future.seq_lens[slots] - counts
    batch = replace(
        make_batch(resident, future, slots),
        seq_lens=before,
        bonus_tokens=future.tokens[slots, before],
    )
    state, future, out = _extend(batch, pools.draft, future, verified, config)
    return replace(pools, draft=state), future, out
