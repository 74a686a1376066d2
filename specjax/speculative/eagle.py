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
from specjax.config import MAX_STEPS, DraftConfig
from specjax.models.decoder import CausalLM
from specjax.models.eagle import Eagle3Head, EagleHead, build_head
from specjax.models.flat import FlatModel
from specjax.models.networks import Networks
from specjax.speculative.algorithm import (
    Batch,
    PromptChunks,
    SpeculativeAlgorithm,
    StateSizes,
    kv_pool,
)
from specjax.speculative.tree import chain_input
from specjax.types import DraftShape, VerifyInput, VerifyOutput

DEFAULT_STEPS = 5


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftInput:
    """What the draft of a row starts from, beside its bonus token and its length."""

    # f32 [B, K]; 1 in a chain, where a softmax would change nothing; 0 where a round left nothing
    # to draft from, whose tokens are no proposals then
    topk_probs: jax.Array
    topk_ids: jax.Array  # i32 [B, K], target token ids of the first drafted level
    hidden: jax.Array  # [B, D], the recurrent state that predicted topk_ids


@dataclass(frozen=True)
class Eagle(SpeculativeAlgorithm):
    """Chains of drafts, one pass of the draft for each token but the first.

    State is the draft's KV pool ``[L, num_kv, 2, KV, H]``; rows are a :class:`DraftInput`.
    """

    # host side

    def draft_shape(self, args: Any, steps: int | None = None) -> DraftShape:
        if steps is not None:
            return DraftShape.chain(steps)
        steps = args.speculative_num_steps
        steps = DEFAULT_STEPS if steps is None else steps
        least = 0 if args.speculative_adaptive else 1
        if type(steps) is not int or not least <= steps <= MAX_STEPS:
            raise ValueError(
                f"speculative_num_steps={steps} must be an integer from {least} to {MAX_STEPS}; "
                "set speculative_algorithm=None to decode without speculation"
            )
        if args.speculative_eagle_topk != 1:
            raise ValueError(
                f"speculative_eagle_topk={args.speculative_eagle_topk}: only chains (1) are "
                "supported; tree drafting is not implemented yet"
            )
        nodes = args.speculative_num_draft_tokens
        if nodes not in (None, steps + 1):
            raise ValueError(
                f"speculative_num_draft_tokens={nodes} must equal speculative_num_steps + 1 = "
                f"{steps + 1} for a chain (speculative_eagle_topk=1)"
            )
        return DraftShape.chain(steps)

    def open_draft(self, args: Any, target: TargetCheckpoint) -> tuple[DraftCheckpoint, ...]:
        """The checkpoint that ``draft`` names, or the one that comes with the target."""
        theta = args.draft_rope_theta
        return (open_draft(args.draft, target, algorithm=self.name, rope_theta=theta),)

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
    def lookahead(self) -> int:
        """A KV index holds the token behind its position."""
        return 1

    def is_eagle(self) -> bool:
        return True

    def is_eagle3(self) -> bool:
        return self.name == "EAGLE3"

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
        return state, first_level(draft, batch.target, hidden[0])

    def propose(
        self, batch: Batch, state: jax.Array, rows: DraftInput, shape: DraftShape
    ) -> tuple[VerifyInput, jax.Array]:
        """The first token comes with the rows; the others take one pass of the draft each."""
        draft, tokens = batch.draft, [batch.bonus_tokens]
        hidden, ids = rows.hidden[:, None], rows.topk_ids[:, 0]
        for step in range(shape.steps):
            tokens.append(ids)
            if step == shape.steps - 1:
                break
            lens = batch.seq_lens + step
            embeds = draft.embed(ids[:, None], batch.target)
            hidden, state = draft(embeds, hidden, lens[:, None], state, batch.pages.attend(lens, 1))
            ids = first_level(draft, batch.target, hidden[:, 0]).topk_ids[:, 0]
        num_proposed = jnp.where(rows.topk_probs[:, 0] > 0, jnp.int32(shape.steps), 0)
        return chain_input(jnp.stack(tokens, axis=1), batch.seq_lens, num_proposed), state

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
        return state, first_level(draft, batch.target, hidden[:, 0])


def first_level(draft: Eagle3Head | EagleHead, target: CausalLM, hidden: jax.Array) -> DraftInput:
    """The draft's best next token behind recurrent states ``[B, D]``."""
    best = jnp.argmax(draft.logits(hidden, target), axis=-1, keepdims=True).astype(jnp.int32)
    return DraftInput(jnp.ones(best.shape, jnp.float32), draft.target_ids(best), hidden)


EAGLE = Eagle("EAGLE")
EAGLE3 = Eagle("EAGLE3")
