"""Rounds in which a grammar limits a request: two calls, between which the host computes masks.

The first call is the target pass over the drafts. While it runs, the host reads the tokens of the
round before, gets the masks of the drafts from the processes of the grammars, and uploads masks and
forced tokens. The second call draws, accepts, extends, and drafts for the next round, whose first
call follows at once. Rows whose masks are late leave the round, and join a later one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from specjax.runtime.runner import Dispatched, ModelRunner
from specjax.runtime.runner_config import pick_bucket
from specjax.sampling.grammar_request import Tree, await_answers
from specjax.scheduling.request import RunningRequest
from specjax.speculative.round import TargetPass
from specjax.types import DraftShape, VerifyInput


@dataclass(frozen=True)
class StartedRound:
    """A round whose first call has been dispatched."""

    rows: Sequence[RunningRequest]
    tier: DraftShape
    tree: VerifyInput
    passed: TargetPass

    @cached_property
    def trees(self) -> dict[RunningRequest, Tree]:
        """The drafts of each row; waits for the device."""
        tree = self.tree
        arrays = map(np.asarray, (tree.draft_tokens, tree.parents, tree.num_proposed))
        nodes = zip(self.rows, *(array.tolist() for array in arrays), strict=False)
        return {row: (tokens[: 1 + n], parents[: 1 + n]) for row, tokens, parents, n in nodes}


def is_constrained(rows: Sequence[RunningRequest]) -> bool:
    return any(row.request.constraint is not None for row in rows)


class ConstrainedRounds:
    """Runs one round at a time; a request may end between its calls."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._started: StartedRound | None = None
        # masks and forced tokens by batch size and tier (new memory of 2 MB takes 1 ms, filling 0.3
        # ms), the nodes in use of each row, and the last call that reads them
        self._buffers: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
        self._written: dict[int, int] = {}
        self._last: jax.Array | None = None
        # rows and tier of the round before, and its drafts for the next one
        self._drafted: tuple[Sequence[RunningRequest], DraftShape, VerifyInput] | None = None

    @property
    def rows(self) -> list[RunningRequest]:
        """The rows of a started round that take part in its second call."""
        rows = self._started.rows if self._started else ()
        return [row for row in rows if not (row.is_released or row.is_late)]

    def tree(self, row: RunningRequest) -> Tree | None:
        """The drafts of a row in the started round; ``None`` if it takes no part."""
        started = self._started
        return started.trees.get(row) if started is not None and row in started.rows else None

    def clear(self) -> None:
        self._started = self._drafted = self._last = None
        self._buffers = {}  # a failed call may still read them

    def start(self, rows: Sequence[RunningRequest], tier: DraftShape) -> None:
        """Dispatch the first call, and before it the drafting if the rows or the tier are new."""
        slots = [row.slot for row in rows]
        # compare requests, because a slot may have a new one
        if self._drafted is not None and self._drafted[:2] == (rows, tier):
            tree = self._drafted[2]
        else:
            tree = self._runner.dispatch("draft", slots, tier)
        for array in (tree.draft_tokens, tree.parents, tree.num_proposed):
            array.copy_to_host_async()
        passed = self._runner.dispatch("target", slots, tier, tree)
        self._started, self._drafted = StartedRound(rows, tier, tree, passed), None

    def finish(self) -> tuple[Sequence[RunningRequest], Dispatched | None]:
        """Compute the masks and dispatch the second call; the texts of all rows must be known.

        Returns the rows with their results, ``None`` if all have ended. A request whose grammar
        allows no token is finished without one.
        """
        assert self._started is not None
        masks, forced = self._limits(self._started)
        started, self._started = self._started, None
        rows, tier = started.rows, started.tier
        is_live = [not (row.is_released or row.is_late or row.request.is_finished) for row in rows]
        if not any(is_live):
            return rows, None
        slots = [row.slot if live else 0 for row, live in zip(rows, is_live, strict=True)]
        result, tree = self._runner.finish_round(
            slots, tier, started.tree, started.passed, masks, forced
        )
        self._last = result.tokens
        if not any(row.is_late for row in rows):  # it has no drafts for them
            self._drafted = rows, tier, tree
        return rows, result

    def _limits(self, started: StartedRound) -> tuple[np.ndarray, np.ndarray]:
        """Masks i32 ``[bucket, T, V / 32]`` and forced tokens i32 ``[bucket, T, 1 + S]``."""
        rows, tier = started.rows, started.tier
        batch = pick_bucket(len(rows), self._runner.config.batch_buckets)
        if (batch, tier) not in self._buffers:
            limits = self._runner.open_limits(batch, tier)
            self._buffers, self._written = {(batch, tier): limits}, {}
        masks, forced = self._buffers[batch, tier]
        limited = {
            i: constraint
            for i, row in enumerate(rows)
            if (constraint := row.request.constraint) and not (row.is_released or row.is_late)
        }
        for i, constraint in limited.items():  # most have sent it with the tokens before it
            constraint.send([], started.trees[rows[i]])
        await_answers(limited.values())
        jax.block_until_ready(self._last)
        stale, self._written = self._written, {}
        for i, constraint in limited.items():
            if constraint.error:
                rows[i].request.check_constraint()
            elif not constraint.is_busy:
                self._written[i] = constraint.read(masks[i], forced[i])
        for i, count in stale.items():
            free = slice(self._written.get(i, 0), count)
            masks[i, free] = forced[i, free] = -1
        return masks, forced
