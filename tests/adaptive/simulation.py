"""A model of decoding: drafts are accepted at random, and rounds take the measured time."""

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specjax.adaptive import BudgetPolicy
from specjax.adaptive.survival import RoundRecord
from specjax.types import DraftShape

Times = Mapping[int, tuple[float, ...]]
Seconds = Mapping[tuple[DraftShape, int], float]

# milliseconds per round with 0, 1, 3 and 7 steps on an H200
LLAMA_8B: Times = {
    1: (4.19, 4.44, 4.89, 5.75),
    8: (4.52, 4.73, 5.19, 6.60),
    32: (5.57, 5.95, 7.30, 10.52),
}
SMOLLM2: Times = {1: (0.95, 1.30, 1.75, 2.65)}


def chain_seconds(seconds: Mapping[tuple[int, int], float]) -> Seconds:
    """Round times by chain shape and batch, from times by steps and batch."""
    return {(DraftShape.chain(steps), batch): value for (steps, batch), value in seconds.items()}


def round_seconds(table: Times) -> Seconds:
    return {
        (DraftShape.chain(steps), bucket): ms * 1e-3
        for bucket, row in table.items()
        for steps, ms in zip((0, 1, 3, 7), row, strict=True)
    }


class Policy(Protocol):
    def tier_for_batch(self, batch_size: int) -> DraftShape: ...

    def on_verify_complete(
        self, num_accepted_drafts: Sequence[int], *, tier: DraftShape, batch_size: int
    ) -> bool: ...


@dataclass(frozen=True)
class Static:
    steps: int

    def tier_for_batch(self, batch_size: int) -> DraftShape:
        return DraftShape.chain(self.steps)

    def on_verify_complete(
        self, num_accepted_drafts: Sequence[int], *, tier: DraftShape, batch_size: int
    ) -> bool:
        return False


@dataclass(frozen=True)
class Phase:
    """Tokens per row, and the acceptance rate of the first drafts (the last one repeats)."""

    tokens: int
    acceptance: tuple[float, ...]

    def chance(self, position: int) -> float:
        return self.acceptance[min(position, len(self.acceptance) - 1)]


@dataclass(frozen=True)
class Outcome:
    tokens: int
    seconds: float
    tiers: tuple[int, ...]  # one per round

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def simulate(
    policy: Policy,
    phases: Sequence[Phase],
    times: Seconds,
    *,
    batch_size: int = 1,
    delay: int = 2,
    seed: int = 0,
) -> Outcome:
    """Run the phases; the policy gets a round's result after ``delay`` more rounds started."""
    rng = random.Random(seed)
    results: deque[tuple[DraftShape, list[int]]] = deque()
    tokens, seconds, tiers = 0, 0.0, []
    for phase in phases:
        left = phase.tokens * batch_size
        while left > 0:
            tier = policy.tier_for_batch(batch_size)
            counts = []
            for _ in range(batch_size):
                count = 0
                while count < tier.depth and rng.random() < phase.chance(count):
                    count += 1
                counts.append(count)
            made = sum(counts) + batch_size
            tokens += made
            left -= made
            seconds += times[tier, batch_size]
            tiers.append(tier.steps)
            results.append((tier, counts))
            if len(results) > delay:
                executed, reported = results.popleft()
                policy.on_verify_complete(reported, tier=executed, batch_size=batch_size)
    return Outcome(tokens, seconds, tuple(tiers))


@dataclass(frozen=True)
class Stretch:
    """Tokens per second of a batch, and the seconds until a round first ran in a good tier."""

    rate: float
    seconds_to_good: float


def simulate_batch(
    policy: BudgetPolicy | DraftShape,
    stretches: Sequence[Sequence[float | tuple[float, ...]]],
    times: Seconds,
    *,
    seconds: float = 3.0,
    good: Callable[[DraftShape], bool] = bool,
    delay: int = 2,
    seed: int = 0,
    is_timed: bool = False,
) -> list[Stretch]:
    """Run stretches of time in which each request of a batch has its own acceptance rate.

    A tuple holds the rates by position. A packed tier verifies the drafts that the policy
    expects to survive. If ``is_timed`` is set, the policy gets the time of each round.
    """
    rng = random.Random(seed)
    results: deque[tuple[DraftShape, list[int], list[int]]] = deque()
    found = []
    for chances in stretches:
        size, tokens, passed, reached = len(chances), 0, 0.0, float("inf")
        while passed < seconds:
            tier = policy
            if not isinstance(tier, DraftShape):
                tier = policy.tier_for_batch(size, RoundRecord((), 0.0, range(size)))
            limits = [tier.depth] * size
            if tier.packed:
                survival = policy.survival.survival(range(size))[:, : tier.depth]
                best = np.argsort(-survival.ravel(), kind="stable")[: size * (tier.packed - 1)]
                limits = np.bincount(best // tier.depth, minlength=size).tolist()
            counts = []
            for chance, limit in zip(chances, limits, strict=True):
                count, by_position = 0, chance if isinstance(chance, tuple) else (chance,) * limit
                while count < limit and rng.random() < by_position[count]:
                    count += 1
                counts.append(count)
            if good(tier):
                reached = min(reached, passed)
            tokens += sum(counts) + size
            passed += times[tier, size]
            results.append((tier, counts, limits))
            if len(results) > delay and not isinstance(policy, DraftShape):
                executed, reported, proposed = results.popleft()
                taken = times[executed, size] if is_timed else 0.0
                record = RoundRecord(proposed, 0.0, range(size), seconds=taken)
                options = {"tier": executed, "batch_size": size, "record": record}
                policy.on_verify_complete(reported, **options)
        found.append(Stretch(tokens / passed, reached))
    return found
