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

from specjax.kernels.delta_inputs import ReplayRows
from specjax.kernels.delta_rule import delta_replay
from specjax.kv.pages import PageView, Segments
from specjax.kv.recurrent import drafted_rows, recurrent_drafts
from specjax.models.columns import Columns
from specjax.models.decoder import CausalLM
from specjax.models.experts import mean_distinct
from specjax.sampling.draw import SamplingConfig, target_tokens
from specjax.sampling.logit_processor import LogitInputs, NewTokens, keep_allowed
from specjax.sampling.table import unpack_sampling
from specjax.speculative.algorithm import Batch, SpeculativeAlgorithm
from specjax.speculative.future_map import DeviceState, FutureMap, advance, resolve, stash
from specjax.speculative.packing import keep_best, tried_confidences, verified_rows
from specjax.speculative.tree import accept, drawn_count, spread_count, truncate, with_forced
from specjax.types import (
    DraftShape,
    NodeOutputs,
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

    logits: Array | Columns  # f32 [B, T, V]; of a greedy batch, a device may have its own columns
    hidden: Array  # [B, T, D]
    features: Array  # [B, T, F]
    rows: Segments | None = None  # of a packed tier
    # f32 [], the mean number of distinct experts that a layer read; None without such layers
    distinct_experts: Array | None = None
    replay: ReplayRows | None = None  # of recurrent layers, for the accepted rows


def draft(
    batch: Batch, state: DeviceState, calibration: Array | None, config: RoundConfig
) -> tuple[DeviceState, VerifyInput]:
    """Draft a tree for each request."""
    pools, rows = state.pools, resolve(state.future, batch.slots)
    batch = replace(batch, target_kv=pools.target)
    tree, drafted = config.algorithm.propose(batch, pools.draft, rows, config.shape)
    # a request that does not use speculation proposes no drafts
    num_proposed = jnp.where(batch.sampling.speculates > 0, tree.num_proposed, 0)
    tree = truncate(replace(tree, num_proposed=num_proposed), config.shape.nodes)
    if not config.reports_confidence:
        tree = replace(tree, confidences=None)
    elif tree.confidences is None:  # the algorithm has none
        tree = replace(tree, confidences=jnp.full(tree.draft_tokens[:, 1:].shape, 0.5))
    if config.shape.packed:
        assert calibration is not None
        num_slots = len(state.future.seq_lens)
        tree = keep_best(tree, config.shape, batch.slots, calibration, num_slots)
    return replace(state, pools=replace(pools, draft=drafted)), tree


def run_target(
    batch: Batch,
    state: DeviceState,
    tree: VerifyInput,
    config: RoundConfig,
    *,
    is_certain: bool = True,
) -> tuple[DeviceState, TargetPass]:
    """Run the target once over a drafted tree.

    A chain needs no attention mask, because its mask is causal. With ``is_certain``, all requests
    take part in the rest of the round.
    """
    target, shape = batch.target, config.shape
    mask = None if shape.topk == 1 else tree.tree_mask
    form: Any = {"tree_mask": mask, "positions": tree.positions}
    drafts, positions, rows = tree.draft_tokens, tree.positions, None
    pages = replace(batch.pages, implementation=target.implementation)
    if shape.packed:
        rows = verified_rows(tree, shape, batch.slots)
        attend = tuple(pool.attend_packed(rows, **form) for pool in pages.pools)
        drafts, positions = rows.gather(drafts), rows.gather(positions)
        by_token = batch.inputs_of_segments(rows)
    else:
        lens, count = batch.seq_lens, shape.nodes
        attend = tuple(pool.attend(lens, count, **form) for pool in pages.pools)
        by_token = batch.inputs_of_rows(tree.is_node)
    routes: list[Array] = []
    of_rows = drafted_rows(batch.slots, tree, rows), drafts.size, tree, shape
    how: dict[str, Any] = {"implementation": pages.implementation, "is_certain": is_certain}
    recurrent = recurrent_drafts(state.pools.requests, *of_rows, **how)
    hidden, features, kv = target(
        drafts,
        positions,
        (*state.pools.target, *recurrent.pools),
        (*attend, *recurrent.recurs),
        config.feature_layers,
        by_token,
        routes,
    )
    kv, requests, replay = recurrent.split(kv)
    experts = mean_distinct(target.config, routes)
    logits = target.columns(hidden).needed(is_greedy=batch.draw.greedy)
    passed = TargetPass(logits, hidden, features, rows, experts, replay)
    return replace(state, pools=replace(state.pools, target=kv, requests=requests)), passed


def draw_and_accept(
    batch: Batch,
    state: DeviceState,
    tree: VerifyInput,
    passed: TargetPass,
    config: RoundConfig,
    masks: Array | None = None,
) -> tuple[DeviceState, VerifyOutput]:
    """Draw the target's token after every row, and accept drafts.

    ``masks`` i32 ``[B, T, V / 32]`` are the bits of the tokens that a grammar allows. The KV of a
    tree's accepted path is moved to where a chain would have stored it.
    """
    future, kv, scatter = state.future, state.pools.target, lambda x: x
    if passed.rows is not None:
        scatter = partial(passed.rows.scatter, width=config.shape.nodes)
    # a greedy batch needs only its tokens, so its logits need not be scattered
    before, after = (lambda x: x, scatter) if batch.draw.greedy else (scatter, lambda x: x)
    inputs = LogitInputs(batch.sampling, batch.tokens, batch.slots)
    logits = before(passed.logits)
    if masks is not None:
        logits = keep_allowed(logits, masks)
    tokens, logprobs = target_tokens(logits, tree, inputs, batch.draw, future.logit_states)
    tokens, hidden, features = after(tokens), scatter(passed.hidden), scatter(passed.features)
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
        added = NewTokens(
            verified.accept_tokens, verified.num_accepted_tokens, batch.seq_lens + 1, batch.sampling
        )
        future = advance(future, batch.slots, added)
    if config.reports_confidence:
        confidences = tried_confidences(
            tree, verified.accept_index, future.remaining[batch.slots] > 0
        )
        bits = jax.lax.bitcast_convert_type(confidences, jnp.int32)
        results = verified.results._replace(confidence_bits=bits)
        verified = replace(verified, packed=results.pack())
    is_chain = config.shape.topk == 1
    kv = batch.pages.commit(kv, batch.seq_lens, verified.accept_index, is_chain=is_chain)
    requests = state.pools.requests
    if passed.replay is not None:
        path = drafted_rows(batch.slots, tree, passed.rows), verified.accept_index
        how: dict[str, Any] = {"implementation": batch.target.implementation}
        requests = delta_replay(requests, passed.replay, *path, **how)
    return DeviceState(replace(state.pools, target=kv, requests=requests), future), verified


def extend(
    batch: Batch,
    state: DeviceState,
    passed: TargetPass,
    verified: VerifyOutput,
    config: RoundConfig,
) -> tuple[DeviceState, RoundOutput]:
    """Let the algorithm process the accepted tokens, and pack the outputs for the host."""
    pools, resolved = state.pools, resolve(state.future, batch.slots)
    batch = replace(batch, target_kv=pools.target)
    drafted, rows = config.algorithm.extend(batch, pools.draft, resolved, verified, config.shape)
    future = stash(state.future, batch.slots, rows, resolved)
    state, outputs = DeviceState(replace(pools, draft=drafted), future), verified.outputs
    packed = verified.packed
    if passed.distinct_experts is not None:
        bits = jax.lax.bitcast_convert_type(passed.distinct_experts, jnp.int32)
        packed = jax.lax.pad(packed, bits, ((0, 1, 0), (0, 0, 0)))
    return state, RoundOutput(packed, outputs.logprobs, outputs.hidden_states)


def spec_round(
    resident: Resident, state: DeviceState, slots: Array, *, config: RoundConfig
) -> tuple[DeviceState, RoundOutput]:
    """Run one round for request slots i32 ``[B]`` (0 for padding): draft, verify and extend."""
    batch = active_batch(resident, state.future, slots, config)
    state, tree = draft(batch, state, resident.by_slot.calibration, config)
    state, passed = run_target(batch, state, tree, config)
    state, verified = draw_and_accept(batch, state, tree, passed, config)
    return extend(batch, state, passed, verified, config)


def spec_rounds(
    resident: Resident, state: DeviceState, slots: Array, *, config: RoundConfig
) -> tuple[DeviceState, RoundOutput]:
    """Run ``config.num_rounds`` rounds in one call, for models whose rounds are short.

    Outputs for the host have a leading axis ``[num_rounds]``.
    """
    if config.num_rounds == 1:
        state, out = spec_round(resident, state, slots, config=config)
        return state, jax.tree.map(lambda leaf: leaf[None], out)

    def step(state: DeviceState, _: None) -> tuple[DeviceState, RoundOutput]:
        return spec_round(resident, state, slots, config=config)

    return jax.lax.scan(step, state, length=config.num_rounds)


# A round in three calls, if a grammar limits a request or the round is watched. The last one needs
# bits from the host, which walks the grammar over the drafts during the target pass. It also drafts
# for the next round, whose target pass then needs nothing from the host.


def draft_stage(
    resident: Resident, state: DeviceState, slots: Array, *, config: RoundConfig
) -> tuple[DeviceState, VerifyInput]:
    batch = active_batch(resident, state.future, slots, config)
    return draft(batch, state, resident.by_slot.calibration, config)


def target_stage(
    resident: Resident, state: DeviceState, slots: Array, tree: VerifyInput, *, config: RoundConfig
) -> tuple[DeviceState, TargetPass]:
    batch = active_batch(resident, state.future, slots, config)
    # a request whose mask is late leaves the round after this call
    return run_target(batch, state, tree, config, is_certain=False)


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
    watched: bool = False,
) -> tuple[DeviceState, tuple[RoundOutput, VerifyInput, VerifyOutput | None]]:
    """Draw with ``masks`` i32 ``[B, T, V / 32]``, accept, extend, and draft for the next round.

    ``forced`` i32 ``[B, T, 1 + S]`` are the tokens that the grammar forces after each node, then
    -1. If the text ends with the first one, the others become the drafts. Also returns the result
    of verification if the round is ``watched``.
    """
    batch = active_batch(resident, state.future, slots, config)
    state, verified = draw_and_accept(batch, state, tree, passed, config, masks)
    state, out = extend(batch, state, passed, verified, config)
    state, tree = draft_stage(resident, state, slots, config=config)
    if config.shape.steps and config.algorithm.takes_forced_drafts:
        last = jnp.maximum(verified.num_accepted_tokens - 1, 0)
        node = jnp.take_along_axis(verified.accept_index, last[:, None], axis=1)
        after = jnp.take_along_axis(forced, jnp.maximum(node, 0)[:, :, None], axis=1)[:, 0]
        fits = (node[:, 0] >= 0) & (after[:, 0] == verified.bonus_tokens)
        fits &= batch.sampling.speculates > 0
        tree = with_forced(tree, jnp.where(fits[:, None], after[:, 1:], -1))
    out = jax.tree.map(lambda leaf: leaf[None], out)
    return state, (out, tree, verified if watched else None)
