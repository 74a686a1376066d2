"""Draft chains and trees with a network, level by level; limit their sizes.

The algorithm chooses the network and provides a :data:`Step`. This module uses only ``logits``,
``vocabulary`` and ``target_ids`` of ``batch.draft``. Positions are absolute: with ``seq_lens`` n,
the bonus token is at position n, and the first drafted level at n + 1.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from specjax.config import MAX_NODES
from specjax.kernels.tree_attention import MAX_MASKED
from specjax.models.columns import Columns
from specjax.models.flat import Networks
from specjax.models.layers import Attend
from specjax.sampling.draw import LEAST_CONFIDENCE, draft_probs, draft_tokens
from specjax.speculative.algorithm import Batch, SpeculativeAlgorithm, State, StateSizes, kv_pool
from specjax.speculative.tree import chain_input, select_tree
from specjax.types import DraftShape, VerifyInput

# step(level, tokens i32 [B, N], hidden [B, N, D], positions i32 [B, N], state, attend) -> (hidden
# [B, N, D], state): one pass over the drafted tokens of a level (0, 1, 2, ...). `hidden` are the
# recurrent states that predicted them; the returned states predict the tokens of the next level.
Step = Callable[[int, Array, Array, Array, State, Attend], tuple[Array, State]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftInput:
    """Inputs of a request's next draft, in addition to its bonus token and length.

    If one pass drafts all levels, K counts levels instead of the candidates of the first level.
    """

    # f32 [B, K], scores; always 1 in a chain, which needs no softmax unless confidences are read. 0
    # means that the round left nothing to draft from, so the tokens are not proposed.
    topk_probs: Array
    topk_ids: Array  # i32 [B, K], target token ids
    hidden: Array  # [B, D], the recurrent state that predicted topk_ids; or [B, K, D]

    @property
    def topk(self) -> int:
        return self.topk_ids.shape[1]


@dataclass(frozen=True)
class NetworkAlgorithm(SpeculativeAlgorithm):
    """Drafts with a network. The state is the network's KV pool ``[L, num_kv, 2, KV, H]``."""

    default_steps: ClassVar[int] = 5
    supports_rejection_sampling: ClassVar[bool] = True

    def reads(self, option: str) -> bool:
        return option.startswith("speculative_draft_") or super().reads(option)

    def draft_shape(self, args: Any, steps: int | None = None) -> DraftShape:
        topk, nodes = args.speculative_eagle_topk, args.speculative_num_draft_tokens
        if steps is not None:  # one tier; a smaller one may have fewer candidates
            if topk > 1 and steps > 0:
                return tree_shape(steps, topk, nodes and min(nodes, most_nodes(steps, topk)))
            # num_steps + 1 rows verify the whole chain, and then set no limit for other tiers
            is_cut = nodes is not None and nodes <= args.speculative_num_steps
            return DraftShape.chain(steps, nodes if is_cut else None)
        steps = args.speculative_num_steps
        if steps is None and nodes is not None:
            raise ValueError(
                f"speculative_num_draft_tokens={nodes} needs speculative_num_steps, which is None; "
                "set both"
            )
        steps = self.checked_steps(args, self.default_steps if steps is None else steps)
        if args.speculative_adaptive and topk > 1:  # the first tier may be any of them
            if nodes is not None and not 2 <= nodes <= MAX_NODES:
                raise ValueError(
                    f"speculative_num_draft_tokens={nodes} must be from 2 to {MAX_NODES}"
                )
            return self.draft_shape(args, steps)
        if topk == 1:
            if nodes is not None and not min(2, steps + 1) <= nodes <= steps + 1:
                raise ValueError(
                    f"speculative_num_draft_tokens={nodes} must be from {min(2, steps + 1)} to "
                    f"speculative_num_steps + 1 = {steps + 1} for a chain "
                    "(speculative_eagle_topk=1)"
                )
            return DraftShape.chain(steps, nodes)
        return tree_shape(steps, topk, nodes)

    def abstract_state(self, networks: Networks, sizes: StateSizes) -> Any:
        return kv_pool(networks.draft_config, sizes.num_kv)


# sizes


def most_nodes(steps: int, topk: int) -> int:
    """Maximum number of rows to verify in a tree of this size."""
    return min(DraftShape(steps, topk, 0).num_candidates + 1, MAX_NODES)


def tree_shape(steps: int, topk: int, nodes: int | None) -> DraftShape:
    """The shape of a tree; by default with one node per branch and level.

    Raises ValueError if the tree is too large, or if ``nodes`` is out of range.
    """
    most = most_nodes(steps, topk)
    nodes = min(steps * topk + 1, most) if nodes is None else nodes
    shape = DraftShape(steps, topk, nodes)
    if shape.draft_rows > MAX_MASKED:
        raise ValueError(
            f"lower speculative_eagle_topk={topk} or speculative_num_steps={steps}: topk x (steps "
            f"- 1) must be at most {MAX_MASKED}"
        )
    if not 2 <= nodes <= most:
        raise ValueError(
            f"speculative_num_draft_tokens={nodes} must be from 2 to {most}: a tree of "
            f"{steps} steps and topk {topk} has {shape.num_candidates} candidates and a root, "
            f"and at most {MAX_NODES} rows are verified"
        )
    return shape


def check_topk(topk: int, vocab_size: int) -> None:
    """Raise ValueError if there are more branches than tokens in the draft vocabulary."""
    if topk > vocab_size:
        raise ValueError(
            f"speculative_eagle_topk={topk} exceeds the draft vocabulary of {vocab_size} tokens"
        )


# traced


def draft_levels(
    batch: Batch, state: State, drafted: DraftInput, shape: DraftShape, step: Step, start: int = 0
) -> tuple[VerifyInput, State]:
    """Draft a chain or tree for each bonus token. ``drafted`` holds the first drafted level.

    Every level except the last needs one draft pass. The first pass runs at ``seq_lens + start``.
    """
    num_proposed = jnp.where(drafted.topk_probs[:, 0] > 0, jnp.int32(shape.nodes - 1), 0)
    if shape.topk > 1:
        return draft_tree(batch, state, drafted, num_proposed, shape, step, start)
    tokens, scores = [batch.bonus_tokens], [drafted.topk_probs[:, 0]]
    hidden, ids = drafted.hidden[:, None], drafted.topk_ids[:, 0]
    states = [hidden]
    for level in range(shape.steps):
        tokens.append(ids)
        if level == shape.steps - 1:
            break
        lens = batch.seq_lens + (start + level)
        attend = batch.pages.attend(lens, 1)
        hidden, state = step(level, ids[:, None], hidden, lens[:, None], state, attend)
        score, ids = chain_token(batch, hidden, lens[:, None] + (2 - start))
        states.append(hidden)
        scores.append(score)
    return drafted_chain(batch, tokens, scores, num_proposed, states, shape), state


def draft_tree(
    batch: Batch,
    state: State,
    drafted: DraftInput,
    num_proposed: Array,
    shape: DraftShape,
    step: Step,
    start: int,
) -> tuple[VerifyInput, State]:
    """Draft a tree: one pass over the K best candidates of each level except the last.

    Each level stores K keys and values after the text. A row sees its ancestors.
    """
    topk, begin = shape.topk, batch.seq_lens + start
    diagonal = jnp.broadcast_to(jnp.eye(topk, dtype=bool), (batch.slots.shape[0], topk, topk))
    above = jnp.broadcast_to(jnp.arange(-1, topk, dtype=jnp.int32), (diagonal.shape[0], topk + 1))
    # rows of a larger tier have more branches
    best, ids, mask = drafted.topk_probs[:, :topk], drafted.topk_ids[:, :topk], diagonal
    scores, tokens, parents, factors = [best], [ids], [above], [best]
    hidden = jnp.repeat(drafted.hidden[:, None], topk, axis=1)
    for level in range(shape.steps - 1):
        positions = jnp.broadcast_to(begin[:, None] + level, ids.shape)
        attend = batch.pages.attend(
            begin, topk, tree_mask=mask, positions=positions, first=level * topk
        )
        hidden, state = step(level, ids, hidden, positions, state, attend)
        probs, next_ids = best_tokens(batch, hidden, positions + (2 - start), topk)
        factors.append(probs.reshape(diagonal.shape[0], -1))
        scores.append((best[:, :, None] * probs).reshape(diagonal.shape[0], -1))
        tokens.append(next_ids.reshape(diagonal.shape[0], -1))
        if level == shape.steps - 2:
            break
        best, chosen = jax.lax.top_k(scores[-1], topk)
        parents.append(chosen + topk + level * topk**2)
        ids, origin = jnp.take_along_axis(tokens[-1], chosen, axis=1), (chosen // topk)[:, :, None]
        hidden = jnp.take_along_axis(hidden, origin, axis=1)
        mask = jnp.concatenate([jnp.take_along_axis(mask, origin, axis=1), diagonal], axis=2)
    joined = [jnp.concatenate(levels, axis=1) for levels in (scores, tokens, parents)]
    roots = batch.bonus_tokens, batch.seq_lens, num_proposed
    tree, candidates = select_tree(*roots, *joined, topk=topk, num_draft_tokens=shape.nodes)
    # candidates that went through the draft network, in the order of their rows
    passed = joined[2][:, None, 1 : 1 + shape.draft_rows] == candidates[:, :, None]
    places = jnp.arange(start, start + shape.draft_rows, dtype=jnp.int32)
    rows = jnp.max(jnp.where(passed, places, -1), axis=2, initial=-1)
    rows = jnp.pad(rows, ((0, 0), (1, 0)), constant_values=start - 1)
    if batch.draw.reads_confidence:
        factor = jnp.take_along_axis(jnp.concatenate(factors, axis=1), candidates, axis=1)
        tree = replace(tree, confidences=jnp.maximum(factor, LEAST_CONFIDENCE))
    return replace(tree, draft_rows=rows), state


def draft_logits(batch: Batch, hidden: Array) -> Array | Columns:
    """Logits ``[B, N, V]`` of recurrent states ``[B, N, D]``, for :func:`draft_tokens`."""
    draft, target = batch.draft, batch.target
    # a plugin's network may have no columns
    if batch.draw.greedy and target.shards > 1 and hasattr(draft, "columns"):
        columns: Columns = draft.columns(hidden, target)
        return columns.needed(is_greedy=True)
    return draft.logits(hidden, target)  # type: ignore[no-any-return]


def best_tokens(batch: Batch, hidden: Array, positions: Array, topk: int) -> tuple[Array, Array]:
    """Choose K draft tokens for positions i32 ``[B, N]`` from recurrent states ``[B, N, D]``.

    Returns scores f32 ``[B, N, K]`` and target token ids i32 ``[B, N, K]``.
    """
    draft, logits = batch.draft, draft_logits(batch, hidden)
    probs, best = draft_tokens(
        logits, draft.vocabulary, positions, batch.sampling, batch.draw, topk
    )
    return probs, draft.target_ids(best)


def chain_token(batch: Batch, hidden: Array, positions: Array) -> tuple[Array, Array]:
    """Score f32 ``[B]`` and token i32 ``[B]`` of :func:`best_tokens` for K = 1 and N = 1."""
    scores, ids = best_tokens(batch, hidden, positions, 1)
    return scores[:, 0, 0], ids[:, 0, 0]


def drafted_chain(
    batch: Batch,
    tokens: list[Array],
    scores: list[Array],
    num_proposed: Array,
    states: list[Array],
    shape: DraftShape,
) -> VerifyInput:
    """Build a chain of tokens i32 ``[B]``, root first; states ``[B, 1, D]`` predicted the drafts.

    ``scores`` f32 ``[B]`` are those of the drafts, which are kept if confidences are read.
    For rejection sampling, the draft logits of all levels are computed again in one product.
    Otherwise, the logits of the first level would have to be kept from the previous round.
    """
    chain = chain_input(jnp.stack(tokens, axis=1), batch.seq_lens, num_proposed)
    if batch.draw.reads_confidence and shape.steps:
        chain = replace(chain, confidences=jnp.stack(scores[: shape.steps], axis=1))
    if not (batch.draw.acceptance.uses_rejection and shape.steps):
        return chain
    draft, size = batch.draft, batch.target.config.vocab_size
    logits = draft.logits(jnp.concatenate(states[: shape.nodes - 1], axis=1), batch.target)
    probs = draft_probs(logits, draft.vocabulary, batch.sampling, batch.draw, size)
    return replace(chain, draft_probs=probs)


def first_level(batch: Batch, hidden: Array, seq_lens: Array, topk: int) -> DraftInput:
    """Choose the first level of the next draft from recurrent states ``[B, D]``.

    ``seq_lens`` i32 ``[B]`` are the lengths in the round that will verify the draft.
    """
    probs, ids = best_tokens(batch, hidden[:, None], seq_lens[:, None] + 1, topk)
    return DraftInput(probs[:, 0], ids[:, 0], hidden)
