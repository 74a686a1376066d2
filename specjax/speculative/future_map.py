"""What the next round starts from, by request slot, resident on the device.

A round takes its rows from here and leaves the next round's rows here, so that the host can
dispatch a round before it has read the one before. Slot 0 is padding. Contract of SGLang's
``FutureMap``.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from specjax.sampling.logit_processor import NewTokens
from specjax.sampling.processors import advance_states
from specjax.types import KVPools, SamplingTable


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FutureMap:
    """Rows of R request slots.

    ``remaining`` is the number of tokens that a request may still produce; a row without any is
    treated as padding, so a request that ended is not advanced by the rounds already dispatched.
    ``tokens`` is the history by absolute position: prompt and produced tokens, the bonus token
    included. Behind them it holds anything.
    """

    rows: Any  # the algorithm's own, [R, ...]
    bonus_tokens: jax.Array  # i32 [R], the newest token; not in the KV pool yet
    seq_lens: jax.Array  # i32 [R], tokens in the target's KV pool
    remaining: jax.Array  # i32 [R]
    tokens: jax.Array  # i32 [R, C]
    logit_states: tuple[Any, ...] = ()  # what each logit processor keeps, [R, ...]

    @classmethod
    def abstract(cls, num_slots: int, context: int, rows: Any) -> "FutureMap":
        """Shapes and dtypes for ``num_slots`` slots of ``context`` tokens, padding included."""

        def ints(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(jnp.int32))

        return cls(
            rows=rows,
            bonus_tokens=ints(num_slots),
            seq_lens=ints(num_slots),
            remaining=ints(num_slots),
            tokens=ints(num_slots, context),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """All that rounds and prefill read and write, donated through every call."""

    pools: KVPools
    future: FutureMap


def resolve(future: FutureMap, slots: jax.Array) -> Any:
    """The algorithm's rows of request slots i32 ``[B]``."""
    return jax.tree.map(lambda leaf: leaf[slots], future.rows)


def stash(future: FutureMap, slots: jax.Array, rows: Any) -> FutureMap:
    """Record the algorithm's rows ``[B, ...]``."""
    kept = jax.tree.map(lambda a, b: a.at[slots].set(b.astype(a.dtype)), future.rows, rows)
    return replace(future, rows=kept)


def stash_handover(future: FutureMap, slots: jax.Array, rows: Any) -> FutureMap:
    """Record the rows that ``build_disagg_draft_input`` gave; zeros for ``None``.

    ValueError where they are not as wide as those here.
    """
    if rows is None:
        rows = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[slots]), future.rows)
    for own, given in zip(jax.tree.leaves(future.rows), jax.tree.leaves(rows), strict=True):
        if own.shape[1:] != given.shape[1:]:
            raise ValueError(
                f"rows of width {given.shape[1:]} come to an engine whose rows have width "
                f"{own.shape[1:]}; give both the same speculative arguments"
            )
    return stash(future, slots, rows)


def advance(future: FutureMap, slots: jax.Array, new: NewTokens) -> FutureMap:
    """Let the logit processors read what joined the texts of slots i32 ``[B]``."""
    return replace(future, logit_states=advance_states(future.logit_states, slots, new))


def restart(
    future: FutureMap, slots: jax.Array, counts: jax.Array, sampling: SamplingTable
) -> FutureMap:
    """Let the logit processors read the first ``counts`` i32 ``[B]`` tokens of the history."""
    if not jax.tree.leaves(future.logit_states):
        return future
    states = jax.tree.map(lambda leaf: leaf.at[slots].set(0), future.logit_states)
    new = NewTokens(future.tokens[slots], counts, jnp.zeros_like(counts), sampling)
    return advance(replace(future, logit_states=states), slots, new)


def record_cached(future: FutureMap, slot: jax.Array, tokens: jax.Array) -> FutureMap:
    """Replace the history of slot i32 ``[]`` by tokens i32 ``[C]``."""
    return replace(future, tokens=future.tokens.at[slot].set(tokens))
