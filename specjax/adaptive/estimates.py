"""Acceptance of drafts by position, estimated from the counts of verified rounds.

Position i is the i-th drafted token; its conditional acceptance is the share of rows that accept
it among those that accepted all before it. A row that ran ``steps`` drafts and accepted k tells
about positions 1 to min(k + 1, steps): k that were accepted, and the one that was not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

# Acceptance assumed of the first draft before any was verified; one row's evidence.
FIRST_GUESS = 0.7
# Rows that the acceptance one position earlier weighs in the estimate of a position without any of
# its own; with n rows of its own, 1 / (1 + n) of that.
NEIGHBOUR_ROWS = 2.0
# Rows of evidence that a position keeps while no row reaches it: its estimate stays, and a single
# fresh round outweighs it.
STALE_ROWS = 1.0


@dataclass(frozen=True)
class AcceptanceEstimates:
    """Exponentially weighted rows that tried, and that accepted, each position from the first."""

    tried: tuple[float, ...]
    accepted: tuple[float, ...]

    @classmethod
    def of_length(cls, num_positions: int) -> "AcceptanceEstimates":
        """Estimates of ``num_positions`` positions before any round."""
        nothing = (0.0,) * num_positions
        return cls(((1.0, *nothing))[:num_positions], ((FIRST_GUESS, *nothing))[:num_positions])


def observe(
    estimates: AcceptanceEstimates,
    num_accepted_drafts: Sequence[int],
    executed_steps: int,
    window: float,
) -> AcceptanceEstimates:
    """Estimates after one round.

    Args:
        estimates: those before.
        num_accepted_drafts: counts of the live rows, each at most ``executed_steps``.
        executed_steps: drafts of each row; 0 for a plain round.
        window: rounds over which the weight of evidence falls to 1/e. Without new evidence it
            falls as fast, but not below ``STALE_ROWS``.
    """
    keep = 1.0 - 1.0 / window
    tried, accepted = list(estimates.tried), list(estimates.accepted)
    # rows that accepted at least i drafts
    reached = [0] * (len(tried) + 1)
    for count in num_accepted_drafts:
        reached[min(count, len(tried))] += 1
    for i in range(len(tried) - 1, -1, -1):
        reached[i] += reached[i + 1]
    for i in range(len(tried)):
        if i < executed_steps and reached[i]:
            tried[i] = keep * tried[i] + reached[i]
            accepted[i] = keep * accepted[i] + reached[i + 1]
        elif tried[i] > STALE_ROWS:
            weight = max(keep, STALE_ROWS / tried[i])
            tried[i] *= weight
            accepted[i] *= weight
    return AcceptanceEstimates(tuple(tried), tuple(accepted))


def conditional_acceptance(estimates: AcceptanceEstimates) -> tuple[float, ...]:
    """The estimate for each position; one without evidence takes that of the one before."""
    result: list[float] = []
    for tried, accepted in zip(estimates.tried, estimates.accepted, strict=True):
        if result:
            rows = NEIGHBOUR_ROWS / (1.0 + tried)
            tried, accepted = tried + rows, accepted + rows * result[-1]
        result.append(accepted / tried)
    return tuple(result)


def proven_acceptance(estimates: AcceptanceEstimates, num_positions: int) -> tuple[float, ...]:
    """:func:`conditional_acceptance`, but behind ``num_positions`` only as high as was seen.

    There the acceptance one position earlier counts for nothing, and a position that no row has
    reached has none.
    """
    expected = conditional_acceptance(estimates)
    seen = [
        accepted / tried if tried else 0.0
        for tried, accepted in zip(estimates.tried, estimates.accepted, strict=True)
    ]
    return expected[:num_positions] + tuple(map(min, expected, seen))[num_positions:]


def expected_tokens(acceptance: Sequence[float]) -> list[float]:
    """Tokens of a row in a round of 0, 1, 2 and so on drafts, with the bonus token."""
    return list(accumulate(accumulate(acceptance, mul, initial=1.0)))
