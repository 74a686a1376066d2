"""Run one round (draft, verify, extend) for request slots, or several rounds in one call.

Functions take read-only arguments first, then the device state, which can be donated. They return
the new state first. A request that may not produce more tokens is treated as padding.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax.kv.pages import PageView, Segments
from specjax.models.decoder import CausalLM
from specjax.sampling.draw import SamplingConfig, target_tokens, zero_logprobs
from specjax.sampling.logit_processor import LogitInputs, NewTokens, keep_allowed
from specjax.sampling.table import unpack_sampling
from specjax.speculative.algorithm import Batch, SpeculativeAlgorithm
from specjax.speculative.future_map import DeviceState, FutureMap, advance, resolve, stash
from specjax.speculative.packing import keep_best, tried, verified_rows
from specjax.speculative.tree import accept, drawn_count, spread_count, truncate, with_forced
from specjax.types import (
    DraftShape,
    NodeOutputs,
    Pools,
    RoundOutput,
    VerifyInput,
    VerifyOutput,
)


@dataclass(frozen=True, kw_only=True)
class RoundConfig:
    """The static configuration of a round."""

    algorithm: SpeculativeAlgorithm
    shape: DraftShape
    sampling: SamplingConfig
    feature_layers: tuple[int, ...] = ()  # target layers that the algorithm reads
    num_rounds: int = 1  # rounds per call
    # mean number of accepted tokens per round, for speed measurements
    simulate_accept_length: float | None = None
    simulates_acceptance: bool = False  # instead, accept drafts by SamplingTable.acceptances

    @property
    def reports_confidence(self) -> bool:
        """Whether outputs include the confidences of the drafts that were tried."""
        return self.sampling.reads_confidence and self.shape.depth > 0


class SlotInputs(NamedTuple):
    """Read-only inputs of every call, by request slot; the host uploads them if they change."""

    pages: PageView
    sampling: Array  # packed, i32 [R, K]
    calibration: Array | None = None  # f32 [1 + S + R], as in packing.survival
    masks: Array | None = None  # i32 [R, V / 32], bits of the tokens that may follow a prompt


@dataclass(frozen=True)
class Resident:
    """Read-only inputs of every call."""

    target: CausalLM
    draft: object
    by_slot: SlotInputs


def make_batch(resident: Resident, future: FutureMap, slots: Array, config: RoundConfig) -> Batch:
    """Make the batch of request slots i32 ``[B]``."""
    return Batch(
        target=resident.target,
        draft=resident.draft,
        pages=jax.tree.map(lambda table: table[slots], resident.by_slot.pages),
        sampling=unpack_sampling(resident.by_slot.sampling, slots),
        slots=slots,
        seq_lens=future.seq_lens[slots],
        bonus_tokens=future.bonus_tokens[slots],
        tokens=future.tokens,
        draw=config.sampling,
    )


def active_batch(resident: Resident, future: FutureMap, slots: Array, config: RoundConfig) -> Batch:
    """Make the batch of request slots; those that may not produce more tokens become padding."""
    return make_batch(resident, future, jnp.where(future.remaining[slots] > 0, slots, 0), config)


class TargetPass(NamedTuple):
    """The target's results for a tree; those of a packed tier have no axis for requests."""

    logits: Array  # f32 [B, T, V]
    hidden: Array  # [B, T, D]
    features: Array  # [B, T, F]
    rows: Segments | None = None  # of a packed tier


def run_target(
    batch: Batch, kv: Pools, tree: VerifyInput, config: RoundConfig
) -> tuple[TargetPass, Pools]:
    """Run the target once over a drafted tree.

    A chain needs no attention mask, because its mask is causal.
    """
    target, shape = batch.target, config.shape
    mask = None if shape.topk == 1 else tree.tree_mask
    form: Any = {"tree_mask": mask, "positions": tree.positions}
    drafts, positions, rows = tree.draft_tokens, tree.positions, None
    if shape.packed:
        rows = verified_rows(tree, shape, batch.slots)
        attend = tuple(pages.attend_packed(rows, **form) for pages in batch.target_pages)
        drafts, positions = rows.gather(drafts), rows.gather(positions)
    else:
        lens, count = batch.seq_lens, shape.nodes
        attend = tuple(pages.attend(lens, count, **form) for pages in batch.target_pages)
    hidden, features, kv = target(drafts, positions, kv, attend, config.feature_layers)
    return TargetPass(target.logits(hidden), hidden, features, rows), kv


def judge(
    batch: Batch,
    kv: Pools,
    future: FutureMap,
    tree: VerifyInput,
    passed: TargetPass,
    config: RoundConfig,
    masks: Array | None = None,
) -> tuple[VerifyOutput, Pools, FutureMap]:
    """Draw the target's token after every row, and accept drafts.

    ``masks`` i32 ``[B, T, V / 32]`` are the bits of the tokens that a grammar allows. The KV of a
    tree's accepted path is moved to where a chain would have stored it.
    """
    is_chain, spread = config.shape.topk == 1, lambda x: x
    if passed.rows is not None:
        spread = partial(passed.rows.spread, width=config.shape.nodes)
    # a greedy batch needs only its tokens, so its logits need not be spread
    before, after = (lambda x: x, spread) if batch.draw.greedy else (spread, lambda x: x)
    inputs = LogitInputs(batch.sampling, batch.tokens, batch.slots)
    logits = before(passed.logits)
    if masks is not None:
        logits = keep_allowed(logits, masks)
    tokens, logprobs = target_tokens(logits, tree, inputs, batch.draw, future.logit_states)
    tokens, hidden, features = after(tokens), spread(passed.hidden), spread(passed.features)
    # a greedy batch needs only its tokens
    states = None if batch.draw.greedy else hidden
    outputs = NodeOutputs(tokens, features, logprobs, states, tree.draft_rows)
    count = None
    if config.simulate_accept_length is not None:
        count = spread_count(batch.seq_lens, config.shape.depth, config.simulate_accept_length)
    elif config.simulates_acceptance:
        count = drawn_count(batch.seq_lens, config.shape.depth, batch.sampling)
    verified, future = accept(
        tree,
        outputs,
        future,
        batch.slots,
        batch.sampling.end_token_ids,
        config.shape,
        implementation=batch.draw.implementation,
        simulated=count,
    )
    if not batch.draw.greedy:  # a greedy batch has no active logit processors
        new = NewTokens(
            verified.accept_tokens, verified.num_accepted_tokens, batch.seq_lens + 1, batch.sampling
        )
        future = advance(future, batch.slots, new)
    if config.reports_confidence:
        found = tried(tree, verified.accept_index, future.remaining[batch.slots] > 0)
        bits = jax.lax.bitcast_convert_type(found, jnp.int32)
        parts = verified.packed[:, :-3], bits, verified.packed[:, -3:]
        verified = replace(verified, packed=jnp.concatenate(parts, axis=1))
    kv = batch.pages.commit(kv, batch.seq_lens, verified.accept_index, is_chain=is_chain)
    return verified, kv, future


# The stages of a round. Tests and profiles compile a stage separately; it then builds the batch.


def draft_stage(
    resident: Resident,
    state: DeviceState,
    slots: Array,
    *,
    config: RoundConfig,
    batch: Batch | None = None,
) -> tuple[DeviceState, VerifyInput]:
    """Draft a tree for each of the slots i32 ``[B]``."""
    batch = batch or active_batch(resident, state.future, slots, config)
    pools, rows = state.pools, resolve(state.future, batch.slots)
    tree, draft = config.algorithm.propose(batch, pools.draft, rows, config.shape)
    # a request that does not use speculation proposes no drafts
    num_proposed = jnp.where(batch.sampling.speculates > 0, tree.num_proposed, 0)
    tree = truncate(replace(tree, num_proposed=num_proposed), config.shape.nodes)
    if not config.reports_confidence:
        tree = replace(tree, confidences=None)
    elif tree.confidences is None:  # the algorithm has none
        tree = replace(tree, confidences=jnp.full(tree.draft_tokens[:, 1:].shape, 0.5))
    if config.shape.packed:
        num_slots, calibration = len(state.future.seq_lens), resident.by_slot.calibration
        assert calibration is not None
        tree = keep_best(tree, config.shape, batch.slots, calibration, num_slots)
    return replace(state, pools=replace(pools, draft=draft)), tree


def verify_stage(
    resident: Resident,
    state: DeviceState,
    slots: Array,
    tree: VerifyInput,
    *,
    config: RoundConfig,
    batch: Batch | None = None,
) -> tuple[DeviceState, VerifyOutput]:
    batch = batch or active_batch(resident, state.future, slots, config)
    state, passed = target_stage(resident, state, slots, tree, config=config, batch=batch)
    verified, kv, future = judge(batch, state.pools.target, state.future, tree, passed, config)
    return DeviceState(replace(state.pools, target=kv), future), verified


def extend_stage(
    resident: Resident,
    state: DeviceState,
    slots: Array,
    verified: VerifyOutput,
    *,
    config: RoundConfig,
    batch: Batch | None = None,
) -> tuple[DeviceState, RoundOutput]:
    """Let the algorithm process the accepted tokens, and pack the outputs for the host."""
    if batch is None:  # rebuild the batch as it was before verification
        counts = verified.num_accepted_tokens
        slots = jnp.where(counts > 0, slots, 0)
        before = state.future.seq_lens[slots] - counts
        batch = replace(
            make_batch(resident, state.future, slots, config),
            seq_lens=before,
            bonus_tokens=state.future.tokens[slots, before],
        )
    pools, resolved = state.pools, resolve(state.future, batch.slots)
    draft, rows = config.algorithm.extend(batch, pools.draft, resolved, verified, config.shape)
    future = stash(state.future, batch.slots, rows, resolved)
    state = DeviceState(replace(pools, draft=draft), future)
    outputs = verified.outputs
    return state, RoundOutput(verified.packed, outputs.logprobs, outputs.hidden_states)


# The two calls of a round in which a grammar limits a request. The second needs bits from the host,
# which walks the grammar over the drafts during the first. It also drafts for the next round, so
# that the next first call needs nothing from the host.


def target_stage(
    resident: Resident,
    state: DeviceState,
    slots: Array,
    tree: VerifyInput,
    *,
    config: RoundConfig,
    batch: Batch | None = None,
) -> tuple[DeviceState, TargetPass]:
    batch = batch or active_batch(resident, state.future, slots, config)
    passed, kv = run_target(batch, state.pools.target, tree, config)
    return DeviceState(replace(state.pools, target=kv), state.future), passed


def finish_stage(
    resident: Resident,
    state: DeviceState,
    slots: Array,
    tree: VerifyInput,
    passed: TargetPass,
    masks: Array,
    forced: Array,
    *,
    config: RoundConfig,
) -> tuple[DeviceState, tuple[RoundOutput, VerifyInput]]:
    """Draw with ``masks`` i32 ``[B, T, V / 32]``, accept, extend, and draft for the next round.

    ``forced`` i32 ``[B, T, 1 + S]`` are the tokens that the grammar forces after each node, then
    -1. If the text ends with the first one, the others become the drafts.
    """
    batch = active_batch(resident, state.future, slots, config)
    verified, kv, future = judge(
        batch, state.pools.target, state.future, tree, passed, config, masks
    )
    state = DeviceState(replace(state.pools, target=kv), future)
    state, out = extend_stage(resident, state, slots, verified, config=config, batch=batch)
    state, tree = draft_stage(resident, state, slots, config=config)
    if config.shape.steps and config.algorithm.takes_forced_drafts:
        last = jnp.maximum(verified.num_accepted_tokens - 1, 0)
        node = jnp.take_along_axis(verified.accept_index, last[:, None], axis=1)
        after = jnp.take_along_axis(forced, jnp.maximum(node, 0)[:, :, None], axis=1)[:, 0]
        fits = (node[:, 0] >= 0) & (after[:, 0] == verified.bonus_tokens)
        fits &= batch.sampling.speculates > 0
        tree = with_forced(tree, jnp.where(fits[:, None], after[:, 1:], -1))
    return state, (jax.tree.map(lambda leaf: leaf[None], out), tree)


def spec_round(
    resident: Resident, state: DeviceState, slots: Array, *, config: RoundConfig
) -> tuple[DeviceState, RoundOutput]:
    """Run one round for request slots i32 ``[B]`` (0 for padding): draft, verify and extend."""
    batch = active_batch(resident, state.future, slots, config)
    state, tree = draft_stage(resident, state, slots, config=config, batch=batch)
    state, verified = verify_stage(resident, state, slots, tree, config=config, batch=batch)
    return extend_stage(resident, state, slots, verified, config=config, batch=batch)


def spec_rounds(
    resident: Resident, state: DeviceState, slots: Array, *, config: RoundConfig
) -> tuple[DeviceState, RoundOutput]:
    """Run ``config.num_rounds`` rounds in one call, for models whose rounds are short.

    Outputs for the host have a leading axis ``[num_rounds]``.
    """
    if config.num_rounds == 1:
        state, out = spec_round(resident, state, slots, config=config)
        return state, jax.tree.map(lambda leaf: leaf[None], out)

    def step(i: Array, carry: tuple[DeviceState, RoundOutput]) -> tuple[DeviceState, RoundOutput]:
        state, out = spec_round(resident, carry[0], slots, config=config)
        return state, jax.tree.map(lambda all, new: all.at[i].set(new), carry[1], out)

    sampling, width = config.sampling, config.shape.accept_width
    rounds = (config.num_rounds, slots.shape[0])
    columns = width + 3 + (width - 1) * config.reports_confidence
    outs = RoundOutput(jnp.zeros((*rounds, columns), jnp.int32), None, None)
    if not sampling.greedy:
        model = resident.target.config
        outs = replace(
            outs,
            logprobs=zero_logprobs((*rounds, width), sampling.max_top_logprobs),
            hidden_states=jnp.zeros((*rounds, width, model.hidden_size), model.dtypes.activations),
        )
    return jax.lax.fori_loop(0, config.num_rounds, step, (state, outs))
