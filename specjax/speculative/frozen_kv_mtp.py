"""FROZEN_KV_MTP: a drafter that reads the target's KV and has none of its own (Gemma 4).

Drafting needs the bonus token and the target's state that predicted it. All passes of a round are
at the position of the bonus token, n = ``seq_lens``, and see the keys before it that a row there
would see. Nothing is computed for prompts, nor after verification.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from specjax.checkpoints.assistant import AssistantCheckpoint, open_assistant
from specjax.checkpoints.target import TargetCheckpoint
from specjax.models.flat import Networks
from specjax.models.gemma4_assistant import Gemma4Assistant
from specjax.speculative.algorithm import Batch, PromptChunks, Proposal, Rows, State, StateSizes
from specjax.speculative.drafting import NetworkAlgorithm, check_topk, draft_levels, first_level
from specjax.speculative.tree import chain_input
from specjax.types import DraftShape, VerifyOutput


@dataclass(frozen=True)
class FrozenKVMTP(NetworkAlgorithm):
    """Drafts chains and trees; rows are the target's states ``[B, D]``, of zeros if there is none.

    The state is empty.
    """

    network: ClassVar[Any] = Gemma4Assistant
    default_steps: ClassVar[int] = 4

    # host side

    def validate(self, args: Any) -> None:
        super().validate(args)
        if args.draft is None:
            raise ValueError(
                f"draft=None, but speculative_algorithm={self.name} needs an assistant; pass its "
                "directory or repo id"
            )

    def reads(self, option: str) -> bool:
        # its layers have the windows of the target's
        ignored = "draft_rope_theta", "speculative_draft_"
        return not option.startswith(ignored) and super().reads(option)

    def open_draft(
        self, args: Any, target: TargetCheckpoint, draft: Any
    ) -> tuple[AssistantCheckpoint, ...]:
        check_topk(args.speculative_eagle_topk, target.config.vocab_size)
        return (open_assistant(draft, target),)

    def fit_shapes(self, args: Any, config: Any) -> tuple[DraftShape, ...]:
        return tuple(shape._replace(stores_drafts=False) for shape in args.shapes)

    def abstract_state(self, networks: Networks, sizes: StateSizes) -> State:
        return ()

    def abstract_rows(self, networks: Networks, sizes: StateSizes) -> Rows:
        config = networks.target_config
        shape = sizes.num_slots, config.hidden_size
        return jax.ShapeDtypeStruct(shape, config.dtypes.activations)

    # traced

    def prefill(
        self, batch: Batch, state: State, rows: Rows, chunks: PromptChunks, features: Array
    ) -> tuple[State, Rows]:
        return state, features[0, chunks.last]

    def propose(self, batch: Batch, state: State, rows: Rows, shape: DraftShape) -> Proposal:
        if shape.steps == 0:
            return chain_input(batch.bonus_tokens[:, None], batch.seq_lens), state

        def run(tokens: Array, hidden: Array) -> Array:
            positions = jnp.broadcast_to(batch.seq_lens[:, None], tokens.shape)
            read = partial(batch.read_target, positions=positions)
            return batch.draft(tokens, hidden, positions, batch.target, read)  # type: ignore[no-any-return]

        def step(_: int, tokens: Array, hidden: Array, *where: Any) -> tuple[Array, State]:
            return run(tokens, batch.draft.following(hidden)), state

        hidden = run(batch.bonus_tokens[:, None], rows[:, None])
        drafted = first_level(batch, hidden[:, 0], batch.seq_lens, shape.topk)
        is_known = jnp.any(rows != 0, axis=1, keepdims=True)
        drafted = replace(drafted, topk_probs=jnp.where(is_known, drafted.topk_probs, 0.0))
        tree, state = draft_levels(batch, state, drafted, shape, step)
        return replace(tree, draft_rows=None), state

    def extend(
        self, batch: Batch, state: State, rows: Rows, verified: VerifyOutput, shape: DraftShape
    ) -> tuple[State, Rows]:
        last = verified.num_accepted_drafts[:, None, None]
        return state, jnp.take_along_axis(verified.features, last, axis=1)[:, 0]


FROZEN_KV_MTP = FrozenKVMTP("FROZEN_KV_MTP")
