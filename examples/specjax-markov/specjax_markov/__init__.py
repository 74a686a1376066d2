"""A speculative algorithm that drafts from a Markov table of earlier prompts and answers.

For each pair of consecutive tokens, the table holds the token that most recently followed it. All
requests share the table. Their outputs do not depend on it, but the number of accepted drafts, and
with it the latency, reveals what other requests contained.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from specjax.speculative.algorithm import SpeculativeAlgorithm, register_algorithm
from specjax.speculative.tree import chain_input
from specjax.types import DraftShape


@dataclass(frozen=True)
class Markov(SpeculativeAlgorithm):
    """Draft chains from a table i32 ``[size]``: the id of the token after each pair, plus 1.

    Rows i32 ``[B]`` hold the id of the token before the bonus token, plus 1. 0 is unknown in both.
    """

    size: int = 2**20

    def reads(self, option):
        """Whether the algorithm has this option; options for networks and trees are refused."""
        trees = ("speculative_eagle_topk", "speculative_num_draft_tokens")
        return option not in ("draft", "draft_rope_theta", *trees) and super().reads(option)

    def draft_shape(self, args, steps=None):
        given = args.speculative_num_steps if steps is None else steps
        return DraftShape.chain(4 if given is None else given)

    def abstract_state(self, networks, sizes):
        return jax.ShapeDtypeStruct((self.size,), jnp.int32)

    def create_future_map(self, max_running_requests, *sizes, rows=()):
        rows = jax.ShapeDtypeStruct((max_running_requests + 1,), jnp.int32)
        return super().create_future_map(max_running_requests, *sizes, rows=rows)

    def build_disagg_draft_input(self, rows, bonus_tokens, seq_lens, slots, future):
        return future.tokens[slots, seq_lens - 1] + 1  # as in prefill; rows sent are ignored

    def prefill(self, batch, state, rows, chunks, features):
        tokens, positions = chunks.tokens[0], chunks.positions[0]
        # learn nothing from the first token of a chunk, nor from padding
        follows = jnp.diff(positions, prepend=positions[:1]) == 1
        before = jnp.where(follows, jnp.roll(tokens, 1) + 1, 0)
        state = self.learn(state, before, tokens, chunks.next_tokens[0])
        return state, tokens[chunks.last] + 1

    def propose(self, batch, state, rows, shape):
        chain, before, is_known = [batch.bonus_tokens], rows, rows > 0
        count = jnp.zeros_like(rows)
        for _ in range(shape.steps):
            found = state[self.places(before, chain[-1])]
            is_known &= found > 0
            count += is_known.astype(jnp.int32)
            before = chain[-1] + 1
            chain.append(jnp.maximum(found - 1, 0))
        return chain_input(jnp.stack(chain, axis=1), batch.seq_lens, count), state

    def extend(self, batch, state, rows, verified, shape):
        tokens, counts = verified.accept_tokens, verified.num_accepted_tokens[:, None]
        text = jnp.concatenate([batch.bonus_tokens[:, None], tokens], axis=1)
        before = jnp.concatenate([rows[:, None], text[:, :-1] + 1], axis=1)
        is_real = jnp.arange(tokens.shape[1], dtype=jnp.int32) < counts
        known = jnp.where(is_real, before[:, :-1], 0)
        state = self.learn(state, known, text[:, :-1], tokens)
        return state, jnp.take_along_axis(before, counts, axis=1)[:, 0]

    def learn(self, table, before, tokens, following):
        """Store the token after each pair, unless the first token of the pair is unknown."""
        places = jnp.where(before > 0, self.places(before, tokens), self.size)
        return table.at[places].set(following + 1, mode="drop")

    def places(self, before, tokens):
        """Hash pairs to table indices i32; pairs with the same index overwrite each other."""
        mixed = before.astype(jnp.uint32) * jnp.uint32(2654435761) + tokens.astype(jnp.uint32)
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(2246822519)
        return ((mixed ^ (mixed >> 13)) % self.size).astype(jnp.int32)


@register_algorithm("markov", supports_overlap=True)
def make_markov(args):
    """Make the algorithm from the engine arguments."""
    return Markov("MARKOV")
