"""The cost-aware policy: choose the tier with the most expected tokens per second.

Its constants come from simulations with the round times of an 8B and a 135M model on an H200.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

from specjax.adaptive.config import ConfigSource, load_adaptive_config, nearest
from specjax.adaptive.controller import check_counts
from specjax.checks import check_number
from specjax.types import NO_DRAFTS, DraftShape

Rates = Mapping[DraftShape, float]

WINDOW = 16.0  # number of rounds over which the weight of old counts falls to 1/e
FIRST_GUESS = 0.7  # initial acceptance of the first draft; weighs as much as one row
HYSTERESIS = 0.02  # minimum relative gain in tokens per second to change the tier
# maximum share of time that probes lose to the chosen tier, and that rounds lose to plain decoding
LOSS_BUDGET = 0.02
# One in this many failed probes may skip the next tier: deep drafts may pay off although the next
# tier does not show it, for example if some rows of a batch accept everything.
PROBES_A_TURN = 8
# Time lost compared with plain decoding, in plain rounds: the maximum before speculation stops, the
# maximum to resume (less prolongs an unlucky start), and the maximum gain to offset later losses.
MAX_DEFICIT, RESUME_DEFICIT, MAX_CREDIT = 10.0, 3.0, 40.0


class AcceptanceEstimates:
    """Counts the rows that tried and accepted each drafted position; old rounds weigh less."""

    def __init__(self, num_positions: int) -> None:
        self.tried = [1.0, *(0.0,) * num_positions][:num_positions]
        self.accepted = [FIRST_GUESS, *(0.0,) * num_positions][:num_positions]

    def observe(self, num_accepted_drafts: Sequence[int], depth: int) -> None:
        """Record one round: a row that accepts k drafts has tried k + 1, or all of them."""
        keep = 1.0 - 1.0 / WINDOW
        for i in range(min(depth, len(self.tried), max(num_accepted_drafts) + 1)):
            self.tried[i] = keep * self.tried[i] + sum(k >= i for k in num_accepted_drafts)
            self.accepted[i] = keep * self.accepted[i] + sum(k > i for k in num_accepted_drafts)

    def acceptance(self, num_positions: int) -> list[float]:
        """Acceptance by position; if unseen, the previous one's, or 0 from ``num_positions`` on."""
        shares: list[float] = []
        for i, (tried, accepted) in enumerate(zip(self.tried, self.accepted, strict=True)):
            unseen = shares[-1] if shares and i < num_positions else 0.0
            shares.append(accepted / tried if tried else unseen)
        return shares


def expected_tokens(acceptance: Sequence[float]) -> list[float]:
    """Expected tokens per row in a round with 0, 1, 2, ... drafts, including the bonus token."""
    return list(accumulate(accumulate(acceptance, mul, initial=1.0)))


class CostAwarePolicy:
    """Chooses the tier with the most expected tokens per second from acceptance and round times.

    The tier changes for a gain of more than 2 %, or immediately if it is slower than step 0. Before
    a deeper tier is chosen, it is probed: the next deeper candidate that could win runs until a
    round shows no gain. docs/adaptive_decoding.md describes when probes run.

    ``seconds`` maps (tier, batch bucket) to the time of a round, for all candidates and buckets.
    The first tier is the one nearest to ``initial_steps``, or with ``None`` the deepest.
    """

    def __init__(
        self,
        seconds: Mapping[tuple[DraftShape, int], float],
        initial_steps: int | None = None,
        config: ConfigSource = None,
    ) -> None:
        config = load_adaptive_config(config)
        self.config = config.resolve("cost", {tier for tier, _ in seconds})
        self.tiers = self.config.tiers
        self._buckets = sorted({bucket for _, bucket in seconds}) or [1]
        pairs = {(tier, bucket) for tier in self.tiers for bucket in self._buckets}
        if missing := sorted(pairs - set(seconds)):
            raise ValueError(f"round times are missing for (tier, batch)={missing}")
        self.seconds = {
            (tier, bucket): check_number(f"seconds of tier {tier} at {bucket}", value, above=0)
            for (tier, bucket), value in seconds.items()
        }
        first = self.tiers[-1].steps if initial_steps is None else initial_steps
        self.chosen = nearest(self.config.slots[0].tiers, first)
        self.probe: DraftShape | None = None  # a deeper tier that runs instead of the chosen one
        self.estimates = AcceptanceEstimates(max(tier.depth for tier in self.tiers))
        self.debt = 0.0  # seconds lost by probes beyond the allowed share
        self.deficit = 0.0  # seconds lost to plain decoding; negative is a credit
        self._bucket: int | None = None  # batch bucket of the last decision
        self._vain_probes = 0  # failed probes since the tier last changed

    @property
    def tier(self) -> DraftShape:
        """The tier of the next round at the same batch size, which may be that of a probe."""
        return self.chosen if self.probe is None else self.probe

    def tier_for_batch(self, batch_size: int) -> DraftShape:
        candidates, bucket = self._candidates(batch_size), self._bucket_of(batch_size)
        if self.probe in candidates:
            return self.tier
        if self.chosen in candidates and self._bucket in (None, bucket):
            return self.chosen
        return self._best(self._rates(candidates, bucket), bucket)

    def on_verify_complete(
        self, num_accepted_drafts: Sequence[int], *, tier: DraftShape, batch_size: int
    ) -> bool:
        if not num_accepted_drafts:
            return False
        check_counts(num_accepted_drafts, tier)
        before, bucket = self.tier_for_batch(batch_size), self._bucket_of(batch_size)
        seconds = self.seconds.get((tier, bucket))
        if seconds is None:
            raise ValueError(f"{tier=} has no round time for {bucket} rows")
        self.estimates.observe(num_accepted_drafts, tier.depth)
        rates = self._rates(self._candidates(batch_size), bucket)
        tokens = 1.0 + sum(num_accepted_drafts) / len(num_accepted_drafts)
        self._account(rates, tokens, seconds, tier, bucket)
        best = self._best(rates, bucket)
        if best != self.chosen:
            self.chosen, self.probe, self._vain_probes = best, None, 0
        elif self.probe is None:
            self.probe = self._next_probe(rates, bucket)
        elif self.probe not in rates or (
            tier == self.probe and tokens / seconds <= (1.0 + HYSTERESIS) * rates[best]
        ):
            self.probe = None
            self._vain_probes += 1
        self._bucket = bucket
        return self.tier_for_batch(batch_size) != before

    def describe(self) -> dict[str, Any]:
        return {
            "policy": "cost",
            "acceptance": [round(p, 4) for p in self.estimates.acceptance(self.chosen.depth)],
            "is_probing": self.probe is not None,
            "probe_debt_seconds": self.debt,
            "plain_deficit_seconds": self.deficit,
        }

    def _candidates(self, batch_size: int) -> tuple[DraftShape, ...]:
        return self.config.slots[self.config.slot_index(batch_size)].tiers

    def _bucket_of(self, batch_size: int) -> int:
        index = bisect_left(self._buckets, batch_size)
        if index == len(self._buckets):
            raise ValueError(f"batch_size={batch_size} exceeds the largest of {self._buckets}")
        return self._buckets[index]

    def _rates(self, candidates: Sequence[DraftShape], bucket: int) -> Rates:
        """Expected tokens per second and row of each candidate."""
        tokens = expected_tokens(self.estimates.acceptance(self.chosen.depth))
        return {tier: tokens[tier.depth] / self.seconds[tier, bucket] for tier in candidates}

    def _account(
        self, rates: Rates, tokens: float, seconds: float, tier: DraftShape, bucket: int
    ) -> None:
        """Update ``debt`` with the time a probe lost, ``deficit`` with what speculation lost."""
        is_probe = tier.depth > self.chosen.depth and self.chosen in rates
        lost = seconds - tokens / rates[self.chosen] if is_probe else -LOSS_BUDGET * seconds
        self.debt = max(0.0, self.debt + lost)
        if NO_DRAFTS in rates:
            plain = self.seconds[NO_DRAFTS, bucket]
            lost = seconds - tokens * plain if tier.steps else -LOSS_BUDGET * plain
            self.deficit = max(-MAX_CREDIT * plain, self.deficit + lost)

    def _best(self, rates: Rates, bucket: int) -> DraftShape:
        if NO_DRAFTS in rates:
            limit = MAX_DEFICIT if self.chosen.steps else RESUME_DEFICIT
            if self.deficit > limit * self.seconds[NO_DRAFTS, bucket]:
                return NO_DRAFTS
        best = max(rates, key=lambda tier: (rates[tier], -tier.depth))
        current, plain = rates.get(self.chosen, 0.0), rates.get(NO_DRAFTS, 0.0)
        is_enough = rates[best] > (1.0 + HYSTERESIS) * current or current < plain
        return best if is_enough else self.chosen

    def _next_probe(self, rates: Rates, bucket: int) -> DraftShape | None:
        limit = RESUME_DEFICIT * self.seconds.get((NO_DRAFTS, bucket), 0.0)
        if self.debt > 0.0 or (not self.chosen.steps and self.deficit > limit):
            return None
        wanted = (1.0 + HYSTERESIS) * rates[self.chosen]
        deeper = (tier for tier in rates if tier.depth > self.chosen.depth)
        possible = [t for t in deeper if t.accept_width / self.seconds[t, bucket] > wanted]
        turn, rest = divmod(self._vain_probes + 1, PROBES_A_TURN)
        return possible[0 if rest else turn % len(possible)] if possible else None
