"""Multi-token prediction: drafts chains. One module (layer), with its own KV, drafts each token.

Positions and alignment: KV index ``i`` of module ``k`` holds the pair (state of token ``i`` from
module ``k - 1``, token ``i + k + 1``). The output predicts token ``i + k + 2``. With L tokens in
the target's pool, token L is the bonus token, and the tokens after it are drafts. The KV of module
``k`` is therefore final up to index ``L - 1 - k``, and its last ``k`` indices depend on drafts.

Each pass works on rows: row ``r`` of module ``k`` is at position ``r - k``. All modules then read
the same tokens at the same rows, and module ``k`` reads the state of module ``k - 1`` from one row
earlier. ``extend`` runs every module over the A accepted tokens, rows ``L .. L + A - 1``, and saves
each module's state at the last accepted row, because the next module's first row reads it in a
later pass. ``propose`` runs module ``k`` over the ``k`` tokens drafted so far; the next ``extend``
writes these rows again. Near the start of a text, and after a prefix-cache hit, the first rows of a
module have no position, or one that must not be overwritten. :func:`skip_rows` leaves them out.

Position 0 is like any other, as in SGLang. For GLM-4.5, vLLM replaces its embedding by zeros, which
changes one key and value of the module. Only drafts can differ.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from specjax.checkpoints.draft import MtpCheckpoint, open_mtp
from specjax.checkpoints.target import TargetCheckpoint
from specjax.models.eagle import MtpHead
from specjax.models.flat import Networks
from specjax.models.layers import pick_row
from specjax.speculative.algorithm import Batch, PromptChunks, Proposal, State, StateSizes
from specjax.speculative.drafting import NetworkAlgorithm, chain_token, drafted_chain
from specjax.speculative.future_map import FutureMap
from specjax.types import DraftShape, VerifyOutput


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModuleInput:
    """Inputs of a request's next draft, in addition to its bonus token and length."""

    first_ids: Array  # i32 [B], the first drafted token
    first_probs: Array  # f32 [B], its score; 0 if the round left nothing to draft from
    hidden: Array  # [B, M, D], the state of each module at the last accepted row


@dataclass(frozen=True)
class MultiLayerEagle(NetworkAlgorithm):
    """Drafts chains with at most one token per module.

    Trees are not supported: the last ``k`` KV indices of module ``k`` belong to tokens of the text
    but depend on drafts, so each branch would need different values at the same indices.

    Rows are a :class:`ModuleInput`. ``num_modules``, M, is the number of steps in the largest tier;
    that many modules are loaded and kept up to date.
    """

    network: ClassVar[Any] = MtpHead
    num_modules: int = 1
    default_steps: ClassVar[int] = 1  # every MTP checkpoint has at least one module

    # host side

    def create_worker(self, args: Any) -> "MultiLayerEagle":
        """Return the algorithm with one module per step of the largest tier."""
        steps = [1, args.speculative_num_steps or 1]
        if args.adaptive is not None:
            steps += args.adaptive.candidate_steps
        return replace(self, num_modules=max(steps))

    def draft_shape(self, args: Any, steps: int | None = None) -> DraftShape:
        topk = args.speculative_eagle_topk
        if topk != 1:
            raise ValueError(
                f"speculative_eagle_topk={topk} must be 1: {self.name} drafts only chains, because "
                "drafts change the KV of the text, which all branches of a tree share"
            )
        if steps is not None and steps > self.num_modules:
            raise ValueError(f"candidate_steps={steps} exceeds num_modules={self.num_modules}")
        return super().draft_shape(args, steps)

    def open_draft(
        self, args: Any, target: TargetCheckpoint, draft: Any
    ) -> tuple[MtpCheckpoint, ...]:
        """Open the modules in the checkpoint that ``draft`` names, or else in the target's."""
        theta = args.draft_rope_theta
        return (open_mtp(draft, target, num_modules=self.num_modules, rope_theta=theta),)

    def abstract_rows(self, networks: Networks, sizes: StateSizes) -> ModuleInput:
        config, slots = networks.draft_config, sizes.num_slots
        states = (slots, config.num_layers, config.hidden_size)
        make: Any = jax.ShapeDtypeStruct
        ids, probs = (make((slots,), dtype) for dtype in (jnp.int32, jnp.float32))
        return ModuleInput(ids, probs, make(states, config.dtypes.activations))

    @property
    def lookahead(self) -> int:
        """KV index ``i`` of the last module depends on token ``i + num_modules``."""
        return self.num_modules

    # traced

    def build_disagg_draft_input(
        self,
        rows: ModuleInput | None,
        bonus_tokens: Array,
        seq_lens: Array,
        slots: Array,
        future: FutureMap,
    ) -> ModuleInput | None:
        """Keep the states of the first M modules; the prefill engine may have run more."""
        if rows is None:
            return None
        return replace(rows, hidden=rows.hidden[:, : future.rows.hidden.shape[1]])

    def prefill(
        self, batch: Batch, state: State, rows: ModuleInput, chunks: PromptChunks, features: Array
    ) -> tuple[State, ModuleInput]:
        """Run all modules over chunks. For each, ``rows`` hold the states before its first row."""
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
            by_token = batch.inputs_of_segments(segments)
            where = moved[None], state, module, attend
            outputs, state = draft.modules[module](*inputs, *where, by_token=by_token)
            hidden = outputs[0, jnp.maximum(place - skipped, 0)]
            newest.append(hidden[last])
        lens = chunks.positions[0, last] + 1
        return state, next_input(batch, jnp.stack(newest, axis=1), lens)

    def propose(self, batch: Batch, state: State, rows: ModuleInput, shape: DraftShape) -> Proposal:
        """Begin with the draft in ``rows``; each further draft takes a pass of one module."""
        num_proposed = jnp.where(rows.first_probs > 0, jnp.int32(shape.steps), 0)
        scores = [rows.first_probs]
        drafts = [rows.first_ids] if shape.steps else []
        hidden, states = rows.hidden[:, :1], [rows.hidden[:, :1]]
        for module in range(1, shape.steps):
            embeds = batch.draft.embed(jnp.stack(drafts, axis=1), batch.target)
            outputs, state = run_module(batch, state, module, embeds, hidden, module)
            lens = batch.seq_lens[:, None] + module + 1
            score, ids = chain_token(batch, outputs[:, -1:], lens)
            scores.append(score)
            drafts.append(ids)
            hidden = jnp.concatenate([rows.hidden[:, module, None], outputs], axis=1)
            states.append(outputs[:, -1:])
        tokens = [batch.bonus_tokens, *drafts]
        return drafted_chain(batch, tokens, scores, num_proposed, states, shape), state

    def extend(
        self,
        batch: Batch,
        state: State,
        rows: ModuleInput,
        verified: VerifyOutput,
        shape: DraftShape,
    ) -> tuple[State, ModuleInput]:
        """Run all modules over the accepted tokens, in every tier, so that no KV is missing."""
        counts = verified.num_accepted_tokens
        embeds = batch.draft.embed(verified.accept_tokens, batch.target)
        hidden, newest = verified.features, []
        for module in range(len(batch.draft.modules)):
            if module:
                hidden = jnp.concatenate([rows.hidden[:, module - 1, None], hidden[:, :-1]], axis=1)
            hidden, state = run_module(batch, state, module, embeds, hidden, counts[:, None])
            newest.append(pick_row(hidden, verified.num_accepted_drafts)[:, 0])
        following = next_input(batch, jnp.stack(newest, axis=1), batch.seq_lens + counts)
        if shape.steps == 0:
            following = replace(following, first_probs=jnp.zeros_like(rows.first_probs))
        return state, following


def skip_rows(x: Array, counts: Array) -> Array:
    """Shift the rows of ``x [B, T, D]`` back by ``counts`` i32 ``[B]``; repeat the end rows."""
    width = x.shape[1]
    index = jnp.arange(width, dtype=jnp.int32) + counts[:, None]
    return pick_row(x, jnp.clip(index, 0, width - 1))


def run_module(
    batch: Batch,
    state: State,
    module: int,
    embeds: Array,
    hidden: Array,
    counts: Array | int,
) -> tuple[Array, Array]:
    """Run a module over the T rows from row ``seq_lens`` on, of which ``counts`` are used.

    Returns states ``[B, T, D]``, invalid in rows before the start of a text, and the KV pool.
    """
    width = embeds.shape[1]
    starts = jnp.maximum(batch.seq_lens - module, 0)
    skipped = starts - batch.seq_lens + module
    if module:
        embeds, hidden = skip_rows(embeds, skipped), skip_rows(hidden, skipped)
    places = jnp.arange(width, dtype=jnp.int32)
    positions = starts[:, None] + places
    by_token = batch.inputs_of_rows(skipped[:, None] + places < counts)
    attend = batch.pages.attend(starts, width)
    inputs = embeds, hidden, positions, state, module, attend
    outputs, state = batch.draft.modules[module](*inputs, by_token=by_token)
    return skip_rows(outputs, -skipped) if module else outputs, state


def next_input(batch: Batch, hidden: Array, seq_lens: Array) -> ModuleInput:
    """Draft the next round's first token from the modules' last states ``[B, M, D]``.

    ``seq_lens`` i32 ``[B]`` are the lengths in the next round.
    """
    score, ids = chain_token(batch, hidden[:, :1], seq_lens[:, None] + 1)
    return ModuleInput(ids, score, hidden)


MULTI_LAYER_EAGLE = MultiLayerEagle("MULTI_LAYER_EAGLE")
