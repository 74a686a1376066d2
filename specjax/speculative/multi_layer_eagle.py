"""Multi-token prediction: chains drafted by one module (layer) a drafted token, each with its KV.

Positions and alignment: KV index ``i`` of module ``k`` holds the pair (state of token ``i`` that
module ``k - 1`` gave, token ``i + k + 1``), whose output predicts token ``i + k + 2``. With L
tokens in the target's pool, token L is known and those behind it are drafted. So module ``k`` is
final up to index ``L - 1 - k``, and its last ``k`` indices depend on drafts.

Each pass works on rows: row ``r`` of module ``k`` stands at position ``r - k``. All modules then
read the same tokens at the same rows, and what module ``k`` reads of module ``k - 1`` is one row
earlier. Of a round it takes

* ``extend``: every module over the A accepted tokens, rows ``L .. L + A - 1``. What it gives at the
  last accepted row is kept, for the next module's first row of the passes to come;
* ``propose``: module ``k`` over the ``k`` tokens drafted so far, the rows behind the text. Its last
  row stands at the text's last token and drafts the next one. These rows hold the KV that depends
  on drafts; the next ``extend`` begins at the same rows, with the tokens that came true.

So each draft is what a dense computation over the text and the drafts before it gives, and no row
is computed twice but those of drafts. Near the start of a text, and behind what came out of the
prefix cache, the first rows of a module have no position, or one that must not be written:
:func:`skip_rows` leaves them out.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.checkpoints.draft import MtpCheckpoint, open_mtp
from specjax.checkpoints.target import TargetCheckpoint
from specjax.config import ModelConfig
from specjax.models.eagle import MtpHead
from specjax.models.flat import FlatModel, Networks
from specjax.models.layers import pick_row
from specjax.speculative.algorithm import Batch, PromptChunks, State, StateSizes
from specjax.speculative.drafting import NetworkAlgorithm, best_tokens, drafted_chain
from specjax.speculative.future_map import FutureMap
from specjax.types import DraftShape, VerifyInput, VerifyOutput


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModuleInput:
    """What the modules of a row start from, beside its bonus token and its length."""

    first_ids: jax.Array  # i32 [B], the first drafted token
    is_drafted: jax.Array  # i32 [B], 0 where a round left nothing to draft from
    hidden: jax.Array  # [B, M, D], what each module gave at the newest row


@dataclass(frozen=True)
class MultiLayerEagle(NetworkAlgorithm):
    """Chains of at most as many drafts as there are modules.

    Trees are refused: the last ``k`` KV indices of module ``k`` stand at tokens of the text but
    depend on drafts, so every branch would need its own values at the same indices.

    Rows are a :class:`ModuleInput`.

    Attributes:
        num_modules: M, those that are loaded and kept up to date: the steps of the largest tier.
    """

    num_modules: int = 1
    default_steps: ClassVar[int] = 1  # every checkpoint with modules has one

    # host side

    def create_worker(self, args: Any) -> "MultiLayerEagle":
        """With as many modules as the arguments' largest tier has steps."""
        super().create_worker(args)
        steps = [1, args.speculative_num_steps or 1]
        if args.adaptive is not None:
            steps += args.adaptive.candidate_steps
        return replace(self, num_modules=max(steps))

    def draft_shape(self, args: Any, steps: int | None = None) -> DraftShape:
        topk = args.speculative_eagle_topk
        if topk != 1:
            raise ValueError(
                f"speculative_eagle_topk={topk} must be 1: {self.name} drafts chains, since drafts "
                "change keys and values of the text itself, which branches would have to share"
            )
        return super().draft_shape(args, steps)

    def open_draft(
        self, args: Any, target: TargetCheckpoint, draft: Any
    ) -> tuple[MtpCheckpoint, ...]:
        """The modules of the checkpoint that ``draft`` names, or of the target's own."""
        theta = args.draft_rope_theta
        return (open_mtp(draft, target, num_modules=self.num_modules, rope_theta=theta),)

    def draft_model(self, config: ModelConfig, implementation: str | None) -> FlatModel[MtpHead]:
        return FlatModel.of(partial(MtpHead, config, implementation=implementation))

    def abstract_rows(self, networks: Networks, sizes: StateSizes) -> ModuleInput:
        config, slots = networks.draft_config, sizes.num_slots
        states = (slots, config.num_layers, config.hidden_size)
        ints: Any = jax.ShapeDtypeStruct((slots,), jnp.dtype(jnp.int32))
        hidden: Any = jax.ShapeDtypeStruct(states, config.dtypes.activations)
        return ModuleInput(ints, ints, hidden)

    @property
    def lookahead(self) -> int:
        """KV index ``i`` of the last module holds token ``i + num_modules``."""
        return self.num_modules

    def is_eagle(self) -> bool:
        return True

    # traced

    def build_disagg_draft_input(
        self,
        rows: ModuleInput | None,
        bonus_tokens: jax.Array,
        seq_lens: jax.Array,
        slots: jax.Array,
        future: FutureMap,
    ) -> ModuleInput | None:
        """States of the first M modules, where prefill ran more of them."""
        if rows is None:
            return None
        return replace(rows, hidden=rows.hidden[:, : future.rows.hidden.shape[1]])

    def prefill(
        self,
        batch: Batch,
        state: State,
        rows: ModuleInput,
        chunks: PromptChunks,
        features: jax.Array,
    ) -> tuple[State, ModuleInput]:
        """Every module over the chunks' rows; earlier chunks left what comes before the first."""
        draft, segments = batch.draft, chunks.segments
        owner, last = segments.index, segments.last
        place = jnp.arange(owner.shape[0], dtype=jnp.int32)
        is_first = (place == (last - segments.counts + 1)[owner])[:, None]
        embeds, hidden = draft.embed(chunks.next_tokens, batch.target)[0], features[0]
        newest = []
        for module in range(len(draft.modules)):
            if module:
                before = rows.hidden[owner, module - 1]
                hidden = jnp.where(is_first, before, jnp.roll(hidden, 1, axis=0))
            begins = segments.starts - module
            starts = jnp.maximum(begins, chunks.num_cached)
            skipped = (starts - begins)[owner]
            source = jnp.minimum(place + skipped, last[owner])
            moved = segments.positions + (starts - segments.starts)[owner]
            moved = jnp.where(segments.is_real, moved, 0)
            attend = batch.pages.attend_packed(replace(segments, starts=starts, positions=moved))
            inputs = (x[source][None] for x in (embeds, hidden))
            given, state = draft(module, *inputs, moved[None], state, attend)
            hidden = given[0, jnp.maximum(place - skipped, 0)]
            newest.append(hidden[last])
        lens = chunks.positions[0, last] + 1
        return state, next_input(batch, jnp.stack(newest, axis=1), lens)

    def propose(
        self, batch: Batch, state: State, rows: ModuleInput, shape: DraftShape
    ) -> tuple[VerifyInput, State]:
        """The first draft comes with the rows; the others take one pass of their module each."""
        num_proposed = jnp.where(rows.is_drafted > 0, jnp.int32(shape.steps), 0)
        drafts = [rows.first_ids] if shape.steps else []
        hidden, states = rows.hidden[:, :1], [rows.hidden[:, :1]]
        for module in range(1, shape.steps):
            embeds = batch.draft.embed(jnp.stack(drafts, axis=1), batch.target)
            given, state = run_module(batch, state, module, embeds, hidden)
            lens = batch.seq_lens[:, None] + module + 1
            drafts.append(best_tokens(batch, given[:, -1:], lens, 1)[1][:, 0, 0])
            hidden = jnp.concatenate([rows.hidden[:, module, None], given], axis=1)
            states.append(given[:, -1:])
        tokens = [batch.bonus_tokens, *drafts]
        return drafted_chain(batch, tokens, num_proposed, states, shape), state

    def extend(
        self,
        batch: Batch,
        state: State,
        rows: ModuleInput,
        verified: VerifyOutput,
        shape: DraftShape,
    ) -> tuple[State, ModuleInput]:
        """Every module over the accepted tokens, whatever the tier: all KV stays up to date."""
        counts = verified.num_accepted_tokens
        embeds = batch.draft.embed(verified.accept_tokens, batch.target)
        hidden, newest = verified.features, []
        for module in range(len(batch.draft.modules)):
            if module:
                hidden = jnp.concatenate([rows.hidden[:, module - 1, None], hidden[:, :-1]], axis=1)
            hidden, state = run_module(batch, state, module, embeds, hidden)
            newest.append(pick_row(hidden, verified.num_accepted_drafts)[:, 0])
        following = next_input(batch, jnp.stack(newest, axis=1), batch.seq_lens + counts)
        if shape.steps == 0:
            following = replace(following, is_drafted=jnp.zeros_like(rows.is_drafted))
        return state, following


def skip_rows(x: jax.Array, counts: jax.Array) -> jax.Array:
    """Shift rows ``[B, T, D]`` by counts i32 ``[B]``, repeating the first or last row."""
    width = x.shape[1]
    index = jnp.arange(width, dtype=jnp.int32) + counts[:, None]
    return pick_row(x, jnp.clip(index, 0, width - 1))


def run_module(
    batch: Batch, state: State, module: int, embeds: jax.Array, hidden: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """States ``[B, T, D]`` of a module at the T rows behind the texts, and the KV pool.

    The first row is that of the first token behind the ``seq_lens`` in the pool. States at
    positions before a text's start are of no meaning.
    """
    width = embeds.shape[1]
    starts = jnp.maximum(batch.seq_lens - module, 0)
    skipped = starts - batch.seq_lens + module
    if module:
        embeds, hidden = skip_rows(embeds, skipped), skip_rows(hidden, skipped)
    positions = starts[:, None] + jnp.arange(width, dtype=jnp.int32)
    attend = batch.pages.attend(starts, width)
    given, state = batch.draft(module, embeds, hidden, positions, state, attend)
    return skip_rows(given, -skipped) if module else given, state


def next_input(batch: Batch, hidden: jax.Array, seq_lens: jax.Array) -> ModuleInput:
    """What the next round drafts from, behind the modules' newest states ``[B, M, D]``.

    ``seq_lens`` i32 ``[B]`` are those of the next round, whose bonus token stands there.
    """
    _, ids = best_tokens(batch, hidden[:, :1], seq_lens[:, None] + 1, 1)
    return ModuleInput(ids[:, 0, 0], jnp.ones_like(seq_lens), hidden)


MULTI_LAYER_EAGLE = MultiLayerEagle("MULTI_LAYER_EAGLE")
