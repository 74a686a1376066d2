"""EAGLE-1/2 and EAGLE-3: a draft of one to a few layers that reads the target's own features.

Positions and alignment: the draft's KV index ``i`` holds the pair (target feature of token ``i``,
token ``i + 1``), so the first recurrent draft pass sits at position ``seq_len``. See
``docs/how_it_works.md`` for a worked example.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints.draft import DraftCheckpoint, open_draft
from specjax.checkpoints.target import TargetCheckpoint
from specjax.config import MAX_NODES, MAX_STEPS, DraftConfig
from specjax.kernels.tree_attention import MAX_MASKED
from specjax.models.eagle import Eagle3Head, EagleHead, build_head
from specjax.models.flat import FlatModel
from specjax.models.networks import Networks
from specjax.sampling.draw import draft_probs, draft_tokens
from specjax.speculative.algorithm import (
    Batch,
    PromptChunks,
    SpeculativeAlgorithm,
    StateSizes,
    kv_pool,
)
from specjax.speculative.tree import DraftTree, chain_input, select_tree
from specjax.types import DraftShape, VerifyInput, VerifyOutput

DEFAULT_STEPS = 5


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftInput:
    """What the draft of a row starts from, beside its bonus token and its length."""

    # f32 [B, K], scores; 1 in a chain, where a softmax would change nothing; 0 where a round left
    # nothing to draft from, whose tokens are no proposals then
    topk_probs: jax.Array
    topk_ids: jax.Array  # i32 [B, K], target token ids of the first drafted level
    hidden: jax.Array  # [B, D], the recurrent state that predicted topk_ids


@dataclass(frozen=True)
class Eagle(SpeculativeAlgorithm):
    """Chains and trees of drafts, one pass of the draft for each level but the first.

    State is the draft's KV pool ``[L, num_kv, 2, KV, H]``; rows are a :class:`DraftInput`.

    Attributes:
        checkpoint_format: of the drafts that it opens, ``"eagle-1"`` or ``"eagle-3"``.
    """

    checkpoint_format: str

    # host side

    def draft_shape(self, args: Any, steps: int | None = None) -> DraftShape:
        topk, nodes = args.speculative_eagle_topk, args.speculative_num_draft_tokens
        if steps is not None:  # a tier, which may have fewer candidates than the largest
            if topk == 1 or steps == 0:
                return DraftShape.chain(steps)
            return tree_shape(steps, topk, nodes and min(nodes, most_nodes(steps, topk)))
        steps = args.speculative_num_steps
        steps = DEFAULT_STEPS if steps is None else steps
        least = 0 if args.speculative_adaptive else 1
        if type(steps) is not int or not least <= steps <= MAX_STEPS:
            raise ValueError(
                f"speculative_num_steps={steps} must be an integer from {least} to {MAX_STEPS}; "
                "set speculative_algorithm=None to decode without speculation"
            )
        if args.speculative_adaptive and topk > 1:  # any tier may be the first
            if nodes is not None and not 2 <= nodes <= MAX_NODES:
                raise ValueError(
                    f"speculative_num_draft_tokens={nodes} must be from 2 to {MAX_NODES}"
                )
            return self.draft_shape(args, steps)
        if topk == 1:
            if nodes not in (None, steps + 1):
                raise ValueError(
                    f"speculative_num_draft_tokens={nodes} must equal speculative_num_steps + 1 = "
                    f"{steps + 1} for a chain (speculative_eagle_topk=1)"
                )
            return DraftShape.chain(steps)
        return tree_shape(steps, topk, nodes)

    def open_draft(self, args: Any, target: TargetCheckpoint) -> tuple[DraftCheckpoint, ...]:
        """The checkpoint that ``draft`` names, or the one that comes with the target."""
        theta, topk = args.draft_rope_theta, args.speculative_eagle_topk
        draft = open_draft(
            args.draft, target, checkpoint_format=self.checkpoint_format, rope_theta=theta
        )
        if topk > draft.config.draft_vocab_size:
            raise ValueError(
                f"speculative_eagle_topk={topk} exceeds the draft vocabulary of "
                f"{draft.config.draft_vocab_size} tokens"
            )
        return (draft,)

    def draft_model(self, config: DraftConfig, kernels: str) -> FlatModel[Eagle3Head | EagleHead]:
        return FlatModel.of(partial(build_head, config, kernels=kernels))

    def abstract_state(self, networks: Networks, sizes: StateSizes) -> Any:
        return kv_pool(networks.draft_config, sizes.num_kv)

    def abstract_rows(self, networks: Networks, sizes: StateSizes) -> DraftInput:
        config, slots, topk = networks.draft_config, sizes.num_slots, sizes.shape.topk
        fields: dict[str, Any] = {
            "topk_probs": jax.ShapeDtypeStruct((slots, topk), jnp.dtype(jnp.float32)),
            "topk_ids": jax.ShapeDtypeStruct((slots, topk), jnp.dtype(jnp.int32)),
            "hidden": jax.ShapeDtypeStruct((slots, config.hidden_size), config.jnp_dtype),
        }
        return DraftInput(**fields)

    def feature_layers(self, networks: Networks) -> tuple[int, ...]:
        """Those of the checkpoint; none for EAGLE-1/2, which reads the last hidden state."""
        layers: tuple[int, ...] = networks.draft_config.feature_layers
        return layers

    @property
    def supports_rejection_sampling(self) -> bool:
        return True

    @property
    def lookahead(self) -> int:
        """A KV index holds the token behind its position."""
        return 1

    def is_eagle(self) -> bool:
        return True

    def is_eagle3(self) -> bool:
        return self.checkpoint_format == "eagle-3"

    # traced

    def prefill(
        self,
        batch: Batch,
        state: jax.Array,
        rows: DraftInput,
        chunks: PromptChunks,
        features: jax.Array,
    ) -> tuple[jax.Array, DraftInput]:
        """One pass over the same positions with the token ids shifted left by one."""
        draft = batch.draft
        hidden, state = draft(
            draft.embed(chunks.next_tokens, batch.target),
            draft.fuse(features),
            chunks.positions,
            state,
            chunks.attend,
            row=chunks.last[None],
        )
        lens = chunks.positions[0, chunks.last] + 1
        return state, first_level(batch, hidden[0], lens, rows)

    def propose(
        self, batch: Batch, state: jax.Array, rows: DraftInput, shape: DraftShape
    ) -> tuple[VerifyInput, jax.Array]:
        """The first level comes with the rows; the others take one pass of the draft each."""
        num_proposed = jnp.where(rows.topk_probs[:, 0] > 0, jnp.int32(shape.nodes - 1), 0)
        if shape.topk > 1:
            tree, state = draft_tree(batch, state, rows, shape)
            return tree.verify_input(batch.seq_lens, num_proposed), state
        draft, tokens = batch.draft, [batch.bonus_tokens]
        hidden, ids = rows.hidden[:, None], rows.topk_ids[:, 0]
        states = [hidden]
        for step in range(shape.steps):
            tokens.append(ids)
            if step == shape.steps - 1:
                break
            lens = batch.seq_lens + step
            embeds = draft.embed(ids[:, None], batch.target)
            hidden, state = draft(embeds, hidden, lens[:, None], state, batch.pages.attend(lens, 1))
            ids = best_tokens(batch, hidden, lens[:, None] + 2, 1)[1][:, 0, 0]
            states.append(hidden)
        chain = chain_input(jnp.stack(tokens, axis=1), batch.seq_lens, num_proposed)
        if batch.draw.acceptance.uses_rejection and shape.steps:
            chain = replace(chain, draft_probs=chain_probs(batch, jnp.concatenate(states, axis=1)))
        return chain, state

    def extend(
        self,
        batch: Batch,
        state: jax.Array,
        rows: DraftInput,
        verified: VerifyOutput,
        shape: DraftShape,
    ) -> tuple[jax.Array, DraftInput]:
        """Draft-extend: one pass over the accepted tokens with their true target features.

        It replaces what the recurrent passes left in the draft's KV pool; rows behind the accepted
        ones leave values that the next round overwrites. A round without drafts keeps the KV only,
        so that drafting can begin again later: attention, feed-forward and output head are not
        computed for a draft of one layer.
        """
        draft = batch.draft
        width = verified.accept_tokens.shape[1]
        positions = batch.seq_lens[:, None] + jnp.arange(width, dtype=jnp.int32)
        hidden, state = draft(
            draft.embed(verified.accept_tokens, batch.target),
            draft.fuse(verified.features),
            positions,
            state,
            batch.pages.attend(batch.seq_lens, width),
            row=jnp.maximum(verified.num_accepted_tokens - 1, 0),
        )
        if shape.steps == 0:
            return state, replace(rows, topk_probs=jnp.zeros_like(rows.topk_probs))
        lens = batch.seq_lens + verified.num_accepted_tokens
        return state, first_level(batch, hidden[:, 0], lens, rows)


def most_nodes(steps: int, topk: int) -> int:
    """Rows of a verify, at most, that a tree can fill."""
    return min(DraftShape(steps, topk, 0).num_candidates + 1, MAX_NODES)


def tree_shape(steps: int, topk: int, nodes: int | None) -> DraftShape:
    """The shape of a tree; by default one node a branch and level. ValueError with the limits."""
    most = most_nodes(steps, topk)
    nodes = min(steps * topk + 1, most) if nodes is None else nodes
    shape = DraftShape(steps, topk, nodes)
    if shape.draft_rows > MAX_MASKED:
        raise ValueError(
            f"speculative_eagle_topk={topk} times speculative_num_steps - 1 = {steps - 1} must be "
            f"at most {MAX_MASKED}, the rows that drafting attends over"
        )
    if not 2 <= nodes <= most:
        raise ValueError(
            f"speculative_num_draft_tokens={nodes} must be from 2 to {most}: a tree of "
            f"{steps} steps and topk {topk} has {shape.num_candidates} candidates beside its root, "
            f"and at most {MAX_NODES} rows are verified"
        )
    return shape


def draft_tree(
    batch: Batch, state: jax.Array, rows: DraftInput, shape: DraftShape
) -> tuple[DraftTree, jax.Array]:
    """A pass of the draft for each level but the last, over the K best candidates of the level.

    Their keys and values lie behind the text, K rows a level, and each sees its own ancestors.
    """
    draft, topk = batch.draft, shape.topk
    own = jnp.broadcast_to(jnp.eye(topk, dtype=bool), (batch.slots.shape[0], topk, topk))
    first = jnp.broadcast_to(jnp.arange(-1, topk, dtype=jnp.int32), (own.shape[0], topk + 1))
    # a larger tier has more branches
    best, ids, mask = rows.topk_probs[:, :topk], rows.topk_ids[:, :topk], own
    scores, tokens, parents = [best], [ids], [first]
    hidden = jnp.repeat(rows.hidden[:, None], topk, axis=1)
    for level in range(shape.steps - 1):
        positions = jnp.broadcast_to(batch.seq_lens[:, None] + level, ids.shape)
        stored = level * topk
        attend = batch.pages.attend(batch.seq_lens, topk, tree_mask=mask, first=stored)
        embeds = draft.embed(ids, batch.target)
        hidden, state = draft(embeds, hidden, positions, state, attend)
        probs, found = best_tokens(batch, hidden, positions + 2, topk)
        scores.append((best[:, :, None] * probs).reshape(own.shape[0], -1))
        tokens.append(found.reshape(own.shape[0], -1))
        if level == shape.steps - 2:
            break
        best, chosen = jax.lax.top_k(scores[-1], topk)
        parents.append(chosen + topk + level * topk**2)
        ids, origin = jnp.take_along_axis(tokens[-1], chosen, axis=1), (chosen // topk)[:, :, None]
        hidden = jnp.take_along_axis(hidden, origin, axis=1)
        mask = jnp.concatenate([jnp.take_along_axis(mask, origin, axis=1), own], axis=2)
    joined = (jnp.concatenate(parts, axis=1) for parts in (scores, tokens, parents))
    tree = select_tree(batch.bonus_tokens, *joined, topk=topk, num_draft_tokens=shape.nodes)
    return tree, state


def best_tokens(
    batch: Batch, hidden: jax.Array, positions: jax.Array, topk: int
) -> tuple[jax.Array, jax.Array]:
    """The draft's K tokens for positions i32 ``[B, N]``, behind recurrent states ``[B, N, D]``.

    Scores f32 ``[B, N, K]`` and target token ids i32 ``[B, N, K]``.
    """
    draft, logits = batch.draft, batch.draft.logits(hidden, batch.target)
    probs, best = draft_tokens(
        logits, draft.vocabulary, positions, batch.sampling, batch.draw, topk
    )
    return probs, draft.target_ids(best)


def chain_probs(batch: Batch, hidden: jax.Array) -> jax.Array:
    """What the drafts of a chain were drawn from, f32 ``[B, S, V]`` over the target's vocabulary.

    The logits are computed again from the recurrent states ``[B, S, D]``: those of the first level
    would have to be kept from the round before, and all levels are one product.
    """
    draft, size = batch.draft, batch.target.config.vocab_size
    logits = draft.logits(hidden, batch.target)
    return draft_probs(logits, draft.vocabulary, batch.sampling, batch.draw, size)


def first_level(
    batch: Batch, hidden: jax.Array, seq_lens: jax.Array, rows: DraftInput
) -> DraftInput:
    """What the next round drafts from, behind recurrent states ``[B, D]``.

    ``seq_lens`` i32 ``[B]`` are those of the next round, whose bonus token stands there.
    """
    topk = rows.topk_ids.shape[1]
    probs, ids = best_tokens(batch, hidden[:, None], seq_lens[:, None] + 1, topk)
    return DraftInput(probs[:, 0], ids[:, 0], hidden)


EAGLE = Eagle("EAGLE", "eagle-1")
EAGLE3 = Eagle("EAGLE3", "eagle-3")
