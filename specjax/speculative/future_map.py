"""State on the device, by request slot, from which the next round starts.

A round reads its rows here and writes the next round's rows here. The host can therefore dispatch a
round before it has read the previous one. Slot 0 is padding. It follows SGLang's ``FutureMap``.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.sampling.logit_processor import NewTokens, advance_states
from specjax.types import KVPools, SamplingTable


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FutureMap:
    """The state of R request slots.

    ``remaining`` is the number of tokens that a request may still produce. A slot with 0 counts as
    padding, so rounds that are already dispatched do not advance a request that has ended.
    ``tokens`` is the history by absolute position: prompt and produced tokens, including the bonus
    token. Entries after it are invalid.
    """

    rows: Any  # the algorithm's rows, [R, ...]
    bonus_tokens: Array  # i32 [R], the last token of each request; not in the KV pool yet
    seq_lens: Array  # i32 [R], tokens in the target's KV pool
    remaining: Array  # i32 [R]
    tokens: Array  # i32 [R, C]
    logit_states: tuple[Any, ...] = ()  # one per logit processor, [R, ...]

    @classmethod
    def abstract(cls, num_slots: int, context: int, rows: Any) -> "FutureMap":
        """Shapes and dtypes for R = ``num_slots`` and C = ``context``."""

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
    """Everything that rounds and prefill read and write; every call donates it."""

    pools: KVPools
    future: FutureMap


def resolve(future: FutureMap, slots: Array) -> Any:
    """Gather the algorithm's rows for request slots i32 ``[B]``."""
    return jax.tree.map(lambda leaf: leaf[slots], future.rows)


def stash(future: FutureMap, slots: Array, rows: Any, resolved: Any) -> FutureMap:
    """Store the algorithm's rows ``[B, ...]`` in request slots i32 ``[B]``.

    ``resolved`` are the rows that :func:`resolve` gave for these slots. Leaves that are the same
    objects are not stored: each scatter takes 3 us or more.
    """

    def stored(leaf: Array, row: Array, resolved_row: Array) -> Array:
        return leaf if row is resolved_row else leaf.at[slots].set(row.astype(leaf.dtype))

    return replace(future, rows=jax.tree.map(stored, future.rows, rows, resolved))


def stash_handover(future: FutureMap, slots: Array, rows: Any) -> FutureMap:
    """Store the rows that ``build_disagg_draft_input`` returned; ``None`` stores zeros.

    Raises ValueError if their width differs from the width of the rows here.
    """
    resolved = resolve(future, slots)
    if rows is None:
        rows = jax.tree.map(jnp.zeros_like, resolved)
    for leaf, received in zip(jax.tree.leaves(future.rows), jax.tree.leaves(rows), strict=True):
        if leaf.shape[1:] != received.shape[1:]:
            raise ValueError(
                f"received rows of width {received.shape[1:]} must have width "
                f"{leaf.shape[1:]}; give both engines the same speculative arguments"
            )
    return stash(future, slots, rows, resolved)


def advance(future: FutureMap, slots: Array, added: NewTokens) -> FutureMap:
    """Let the logit processors read the tokens added to slots i32 ``[B]``."""
    return replace(future, logit_states=advance_states(future.logit_states, slots, added))


def restart(future: FutureMap, slots: Array, counts: Array, sampling: SamplingTable) -> FutureMap:
    """Let the logit processors read the first ``counts`` i32 ``[B]`` tokens of the history."""
    if not jax.tree.leaves(future.logit_states):
        return future
    states = jax.tree.map(lambda leaf: leaf.at[slots].set(0), future.logit_states)
    history = NewTokens(future.tokens[slots], counts, jnp.zeros_like(counts), sampling)
    return advance(replace(future, logit_states=states), slots, history)


def record_cached(future: FutureMap, slot: Array, tokens: Array) -> FutureMap:
    """Replace the history in slot i32 ``[]`` by tokens i32 ``[C]``."""
    return replace(future, tokens=future.tokens.at[slot].set(tokens))
