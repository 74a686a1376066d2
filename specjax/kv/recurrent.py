"""States of recurrent layers: how a pass reads and writes the slots of its requests.

A prompt chunk or a plain round computes its rows in order and writes the states after them. A round
with drafts writes no states, but keeps its rows; :func:`commit` then replays the accepted ones.
"""

from typing import NamedTuple

from jax import Array

from specjax.kernels.delta_inputs import (
    DeltaGates,
    DeltaInputs,
    ReplayRows,
    RequestRows,
    Taps,
    delta_inputs,
)
from specjax.kernels.delta_rule import DeltaPool, delta_replay, delta_verify
from specjax.kernels.delta_scan import GROUP, delta_scan
from specjax.models.gated_delta import Recur


class DraftedStates(NamedTuple):
    """The pool in a round with drafts, and the rows that may be replayed."""

    pool: DeltaPool
    replay: ReplayRows

    @classmethod
    def of(cls, pool: DeltaPool, num_rows: int) -> "DraftedStates":
        """Make room for W = ``num_rows`` rows of all layers."""
        return cls(pool, empty_rows(pool, len(pool.states), num_rows))


def empty_rows(pool: DeltaPool, num_layers: int, num_rows: int) -> ReplayRows:
    """Zeros for the rows of a pass, in the shapes that fit the pool."""
    value_heads, value_dim, key_dim = pool.states.shape[2:]
    key_heads = (pool.windows.shape[3] - value_heads * value_dim) // (2 * key_dim)
    heads = key_heads, key_dim, value_heads, value_dim
    return ReplayRows.zeros((num_layers, num_rows), heads, pool.windows.dtype)


def recur_in_order(
    rows: RequestRows,
    num_rows: int,
    num_taps: int,
    *,
    group: int = GROUP,
    implementation: str | None = None,
) -> Recur:
    """Make a ``Recur`` over a :class:`DeltaPool`, whose states it moves after all rows.

    Args:
        rows: the rows of requests among W.
        num_rows: W.
        num_taps: J.
        group: rows at a time, see :func:`delta_scan`; 1 in plain rounds.
    """
    taps = Taps.of(rows, num_rows, num_taps)

    def recur(
        pool: DeltaPool, layer: int, mixed: Array, gates: DeltaGates, weights: Array
    ) -> tuple[DeltaPool, Array]:
        replay, how = empty_rows(pool, 1, num_rows), {"implementation": implementation}
        inputs, replay = _inputs(mixed, gates, weights, pool, layer, taps, replay, implementation)
        out, pool = delta_scan(inputs, replay, pool, layer, rows, group=group, **how)
        return pool, out.reshape(*mixed.shape[:2], *out.shape[1:])

    return recur


def recur_over_drafts(
    rows: RequestRows,
    num_rows: int,
    num_taps: int,
    width: int,
    parents: Array | None = None,
    *,
    implementation: str | None = None,
) -> Recur:
    """Make a ``Recur`` over :class:`DraftedStates` for chains, or for trees with ``parents``.

    Args:
        rows: the rows of requests among W.
        num_rows: W.
        num_taps: J.
        width: T, the largest number of rows of a request.
        parents: i32 ``[B, T]``, as in ``VerifyInput``.
    """
    taps = Taps.of(rows, num_rows, num_taps, parents)

    def recur(
        states: DraftedStates, layer: int, mixed: Array, gates: DeltaGates, weights: Array
    ) -> tuple[DraftedStates, Array]:
        pool, replay, how = *states, {"implementation": implementation}
        inputs, replay = _inputs(mixed, gates, weights, pool, layer, taps, replay, implementation)
        out, replay = delta_verify(inputs, replay, pool, layer, rows, width, parents, **how)
        return DraftedStates(pool, replay), out.reshape(*mixed.shape[:2], *out.shape[1:])

    return recur


def commit(
    states: DraftedStates, rows: RequestRows, path: Array, implementation: str | None = None
) -> DeltaPool:
    """Keep, of the drafted rows, those of an accepted path i32 ``[B, A]``, which ends with -1."""
    return delta_replay(*states, rows, path, implementation=implementation)


def _inputs(
    mixed: Array,
    gates: DeltaGates,
    weights: Array,
    pool: DeltaPool,
    layer: int,
    taps: Taps,
    replay: ReplayRows,
    implementation: str | None,
) -> tuple[DeltaInputs, ReplayRows]:
    flat, how = mixed.reshape(-1, mixed.shape[-1]), {"implementation": implementation}
    return delta_inputs(flat, gates, weights, pool.windows, layer, taps, replay, **how)
