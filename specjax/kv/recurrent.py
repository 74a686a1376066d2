"""States of recurrent layers: how a pass reads and writes the slots of its requests.

Prompt chunks, and rounds without drafts, compute rows in order and write the states after them. A
round with drafts writes no states, but leaves rows, of which ``delta_replay`` replays the accepted
ones.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from specjax.kernels.delta_inputs import (
    DeltaGates,
    ReplayRows,
    RequestRows,
    Taps,
    delta_inputs,
)
from specjax.kernels.delta_rule import MAX_ROWS, DeltaPool, delta_verify
from specjax.kernels.delta_scan import GROUP, Kept, delta_scan
from specjax.kv.pages import Segments
from specjax.models.declare import Cache, request_layers, request_shapes
from specjax.models.flat import Networks
from specjax.models.gated_delta import Recur
from specjax.types import DraftShape, VerifyInput


class DraftedStates(NamedTuple):
    """The pool in a round with drafts, and the rows that may be replayed."""

    pool: DeltaPool
    replay: ReplayRows

    @classmethod
    def of(cls, pool: DeltaPool, num_rows: int) -> "DraftedStates":
        """Make room for W = ``num_rows`` rows of all layers."""
        shape = len(pool.states), num_rows
        return cls(pool, ReplayRows.zeros(shape, pool.heads, pool.windows.dtype))


class RecurrentPass(NamedTuple):
    """Pools and functions that recurrent layers add to those of attention in a pass."""

    pools: tuple[Any, ...] = ()  # a DeltaPool or DraftedStates; none without such layers
    recurs: tuple[Recur, ...] = ()

    def split(self, pools: Any) -> tuple[Any, DeltaPool | None, ReplayRows | None]:
        """Split updated pools into those of tokens, that of requests, and rows to replay."""
        if not self.pools:
            return pools, None, None
        *of_tokens, states = pools
        if isinstance(states, DraftedStates):
            return tuple(of_tokens), *states
        return tuple(of_tokens), states, None


def abstract_pool(caches: Sequence[Cache], num_slots: int) -> Any:
    """Shapes of the pool of recurrent layers; ``None`` if there are none."""
    shapes = request_shapes(caches, num_slots)
    return DeltaPool(*shapes) if shapes else None


def check_networks(networks: Networks, args: Any, shapes: Sequence[DraftShape]) -> None:
    """Raise ValueError if a model has recurrent layers that options or draft shapes exclude."""
    if request_layers(networks.draft.caches):
        raise ValueError(
            f"draft={args.draft!r} has recurrent layers, whose states cannot take back rejected "
            "drafts; use a draft with attention in all layers, or another speculative_algorithm"
        )
    if not request_layers(networks.target.caches):
        return
    if (most := max(shape.nodes for shape in shapes)) > MAX_ROWS:
        raise ValueError(
            f"speculative_num_draft_tokens={most} must be at most {MAX_ROWS}, the rows that "
            "recurrent layers verify per request"
        )


def recurrent_prompts(
    pool: DeltaPool | None,
    segments: Segments,
    slots: Array,
    sources: Array,
    kept_counts: Array,
    kept_slots: Array,
    *,
    implementation: str | None,
) -> RecurrentPass:
    """Compute packed prompt chunks of requests in slots i32 ``[G]``.

    A chunk at position 0 starts from zeros, so slots need no clearing. Others start from their own
    slots, or from those in ``sources`` i32 ``[G]`` that are not 0. States after ``kept_counts`` i32
    ``[G]`` tokens also go to ``kept_slots``, see :class:`Kept`.
    """
    if pool is None:
        return RecurrentPass()
    sources = jnp.where(segments.starts > 0, jnp.where(sources > 0, sources, slots), -1)
    begins = segments.last - segments.counts + 1
    rows, num_rows = RequestRows(slots, sources, begins, segments.counts), len(segments.index)
    form = rows, num_rows, pool.num_taps, Kept(kept_slots, kept_counts)
    recur = recur_in_order(*form, implementation=implementation)
    return RecurrentPass((pool,), (recur,))


def drafted_rows(slots: Array, tree: VerifyInput, segments: Segments | None) -> RequestRows:
    """The verified rows of requests in slots i32 ``[B]``; of a packed tier, in segments."""
    if segments is not None:
        return RequestRows(slots, slots, segments.last - segments.counts + 1, segments.counts)
    batch, width = tree.draft_tokens.shape
    starts = jnp.arange(batch, dtype=jnp.int32) * width
    return RequestRows(slots, slots, starts, tree.num_proposed + 1)


def recurrent_drafts(
    pool: DeltaPool | None,
    rows: RequestRows,
    num_rows: int,
    tree: VerifyInput,
    shape: DraftShape,
    *,
    implementation: str | None,
    is_certain: bool,
) -> RecurrentPass:
    """Compute W = ``num_rows`` rows of drafted trees.

    A root alone is accepted if it ``is_certain`` that the request takes part in the whole round.
    """
    if pool is None:
        return RecurrentPass()
    form = rows, num_rows, pool.num_taps
    how: dict[str, Any] = {"implementation": implementation}
    if shape.nodes == 1 and is_certain:
        return RecurrentPass((pool,), (recur_in_order(*form, group=1, **how),))
    parents = None if shape.topk == 1 else tree.parents
    recur = recur_over_drafts(*form, shape.nodes, parents, **how)
    return RecurrentPass((DraftedStates.of(pool, num_rows),), (recur,))


def recur_in_order(
    rows: RequestRows,
    num_rows: int,
    num_taps: int,
    kept: Kept | None = None,
    *,
    group: int = GROUP,
    implementation: str | None = None,
) -> Recur:
    """Make a ``Recur`` over a :class:`DeltaPool`, whose states it moves after all rows.

    Args:
        rows: the rows of requests among W.
        num_rows: W.
        num_taps: J.
        kept: states that also go to other slots.
        group: rows at a time, see :func:`delta_scan`; 1 in plain rounds.
    """
    taps = Taps.of(rows, num_rows, num_taps)

    def recur(
        pool: DeltaPool, layer: int, mixed: Array, gates: DeltaGates, weights: Array
    ) -> tuple[DeltaPool, Array]:
        how: dict[str, Any] = {"implementation": implementation}
        of_layer = gates, weights, pool.windows, layer, taps, pool.heads
        inputs, replay = delta_inputs(mixed.reshape(num_rows, -1), *of_layer, **how)
        out, pool = delta_scan(inputs, replay, pool, layer, rows, kept, group=group, **how)
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
        of_layer = gates, weights, pool.windows, layer, taps, pool.heads, replay
        inputs, replay = delta_inputs(mixed.reshape(num_rows, -1), *of_layer, **how)
        out, replay = delta_verify(inputs, replay, pool, layer, rows, width, parents, **how)
        return DraftedStates(pool, replay), out.reshape(*mixed.shape[:2], *out.shape[1:])

    return recur
