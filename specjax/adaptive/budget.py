"""The budget policy: choose the tier with the most expected tokens per second.

Its constants come from simulations with the round times of an 8B and a 135M model on an H200.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import accumulate
from math import sqrt
from operator import mul
from typing import Any

import numpy as np

from specjax.adaptive.config import ConfigSource, load_adaptive_config, nearest
from specjax.adaptive.controller import AdaptiveSpecPolicy, check_counts
from specjax.adaptive.cost import MOST_RATIO, CostTable, Seconds
from specjax.adaptive.survival import NO_RECORD, Counts, RoundRecord, SurvivalEstimator
from specjax.types import NO_DRAFTS, DraftShape

ByTier = Mapping[DraftShape, float]

YIELD_WINDOW = 64.0  # number of decisions over which the yield of packed rounds is forgotten
EMA_ALPHA = 0.2  # weight of a round in the average of accepted drafts that is reported
WINDOW = 16.0  # number of rounds over which the weight of old counts falls to 1/e
# A round this many standard deviations from the estimate shows that acceptance has changed. Old
# rounds then keep the second weight. Only batches of several requests are large enough for this.
JUMP, AFTER_JUMP = 3.0, 0.05
FIRST_GUESS = 0.7  # initial acceptance of the first draft; weighs as much as one row
HYSTERESIS = 0.02  # minimum relative gain in tokens per second to change the tier
# Maximum share of time that probes lose to the chosen tier, and that rounds lose to plain decoding.
# The second also limits probes of batches that show in one round what one request shows in several.
LOSS_BUDGET, PLAIN_LOSS_BUDGET, MANY_ROWS = 0.02, 0.01, 8
# One in this many failed probes may skip the next tier: deep drafts may pay off although the next
# tier does not show it, for example if some rows of a batch accept everything.
PROBES_A_TURN = 32
# While drafts pay off and no probe runs, a decision takes in the rounds of this time. A decision
# takes the host 0.1 ms, which matters if a round takes 1 ms, as those of a 135M model do.
DECISION_SECONDS = 6e-3
# Time lost compared with plain decoding, in plain rounds: the maximum before speculation stops, the
# maximum to resume (less prolongs an unlucky start), and the maximum gain to offset later losses.
MAX_DEFICIT, RESUME_DEFICIT, MAX_CREDIT = 10.0, 3.0, 40.0


class AcceptanceEstimates:
    """Counts the rows that tried and accepted each drafted position; old rounds weigh less."""

    def __init__(self, num_positions: int) -> None:
        self.tries = [1.0, *(0.0,) * num_positions][:num_positions]
        self.accepted = [FIRST_GUESS, *(0.0,) * num_positions][:num_positions]

    def observe(self, num_accepted: Counts, num_proposed: Counts, num_rounds: int = 1) -> None:
        """Record rounds: a row that accepts k drafts has tried k + 1, or all proposed ones."""
        usual, positions = (1.0 - 1.0 / WINDOW) ** num_rounds, len(self.tries)
        # rows by number of drafts tried and accepted; for few rows, lists are faster than numpy
        tries, accepts = [0] * (positions + 2), [0] * (positions + 1)
        for k, n in zip(num_accepted, num_proposed, strict=True):
            tries[k + (k < n)] += 1
            accepts[k] += 1
        num_tried, accepted = len(num_accepted), len(num_accepted)
        for i in range(positions):
            num_tried, accepted = num_tried - tries[i], accepted - accepts[i]
            if not num_tried:
                break
            share = self.accepted[i] / self.tries[i] if self.tries[i] else 0.5
            deviation = sqrt(num_tried * share * (1.0 - share) + 1.0)
            has_jumped = abs(accepted - num_tried * share) > JUMP * deviation
            keep = AFTER_JUMP if has_jumped else usual
            self.tries[i] = keep * self.tries[i] + num_tried
            self.accepted[i] = keep * self.accepted[i] + accepted

    def acceptance(self, num_positions: int) -> list[float]:
        """Acceptance by position; if unseen, the previous one's, or 0 from ``num_positions`` on."""
        shares: list[float] = []
        for i, (num_tried, accepted) in enumerate(zip(self.tries, self.accepted, strict=True)):
            unseen = shares[-1] if shares and i < num_positions else 0.0
            shares.append(accepted / num_tried if num_tried else unseen)
        return shares


def expected_tokens(acceptance: Sequence[float]) -> list[float]:
    """Expected tokens per row in a round with 0, 1, 2, ... drafts, including the bonus token."""
    return list(accumulate(accumulate(acceptance, mul, initial=1.0)))


class BudgetPolicy(AdaptiveSpecPolicy):
    """Chooses the tier with the most expected tokens per second from acceptance and round times.

    The tier changes for a gain of more than 2 %, or immediately if it is slower than step 0. Before
    a deeper tier is chosen, it is probed: the next deeper candidate that could win runs until a
    round shows no gain. docs/adaptive_decoding.md describes when probes run.

    ``seconds`` has the measurements of a :class:`~specjax.adaptive.cost.CostTable`, for all
    candidates and buckets. The first tier is the one nearest to ``initial_steps``, or with ``None``
    the deepest.
    """

    def __init__(
        self, seconds: Seconds, initial_steps: int | None = None, config: ConfigSource = None
    ) -> None:
        config = load_adaptive_config(config)
        self.config = config.resolve("budget", {tier for tier, _ in seconds})
        self.tiers = self.config.tiers
        self.table = CostTable(seconds)
        steps = self.tiers[-1].steps if initial_steps is None else initial_steps
        self.chosen = nearest(self.config.slots[0].tiers, steps)
        self.probe: DraftShape | None = None  # a deeper tier that runs instead of the chosen one
        self.estimates = AcceptanceEstimates(max(tier.depth for tier in self.table.tiers))
        # drafts of packed tiers are chosen by it
        packed = any(tier.packed for tier in self.tiers)
        self.survival = SurvivalEstimator(self.tiers[-1].depth) if packed else None
        # accepted drafts of packed rounds, divided by expected ones: the drafts with the highest
        # estimates are those that are most likely to be overestimated
        self.packed_yield = 1.0
        self.debt = 0.0  # seconds lost by probes beyond the allowed share
        self.deficit = 0.0  # seconds lost to plain decoding; negative is a credit
        # tokens of requests in rounds with drafts, as expected before each round, and as accepted
        self.expected_tokens = self.realised_tokens = 0.0
        self._accept_len = 0.0  # moving average of accepted drafts per row
        self._expected: dict[DraftShape, float] = {}  # per request, at the last decision
        self._known_candidates: dict[int, tuple[DraftShape, ...]] = {}  # by batch size
        self._depths = {tier: (tier.depth, tier.verified) for tier, _ in seconds}
        self._bucket: int | None = None  # batch bucket of the last decision
        # since the last decision: accepted and proposed drafts by row, the number of rounds, and
        # their tier, their batch size and the record of the last one
        self._accepted: list[int] = []
        self._proposed: list[int] = []
        self._rounds = 0
        self._source: tuple[DraftShape, int, RoundRecord] | None = None
        self._vain_probes = 0  # failed probes since the tier last changed

    @property
    def tier(self) -> DraftShape:
        """The tier of the next round at the same batch size, which may be that of a probe."""
        return self.chosen if self.probe is None else self.probe

    @property
    def ema_accept_len(self) -> float:
        return self._accept_len

    def tier_for_batch(self, batch_size: int, record: RoundRecord = NO_RECORD) -> DraftShape:
        candidates, bucket = self._candidates(batch_size), self.table.bucket_of(batch_size)
        if self.probe in candidates:
            return self.tier
        if self.chosen in candidates and self._bucket in (None, bucket):
            return self.chosen
        times = self._times(candidates, bucket, record.context)
        return self._best(self._rates(times, bucket, record)[0], times)

    def on_verify_complete(
        self,
        num_accepted_drafts: Sequence[int],
        *,
        tier: DraftShape,
        batch_size: int,
        record: RoundRecord = NO_RECORD,
    ) -> bool:
        if not num_accepted_drafts:
            return False
        check_counts(num_accepted_drafts, tier)
        bucket = self.table.bucket_of(batch_size)
        if (tier, bucket) not in self.table.pairs:
            raise ValueError(f"{tier=} has no round time at {batch_size=}")
        before = None  # the tier before a decision
        if self._source is not None and self._source[:2] != (tier, batch_size):
            before = self.tier_for_batch(batch_size, record)
            self._decide(*self._source)
        rows, depth = len(num_accepted_drafts), tier.depth
        if tier.steps:
            self._accept_len += EMA_ALPHA * (sum(num_accepted_drafts) / rows - self._accept_len)
        limits = record.num_proposed_drafts or [depth] * rows
        if tier.topk > 1:
            limits = [min(n, depth) for n in limits]
        # no packed tier runs with one request, and a fit takes as long as all the rest
        if self.survival is not None and record.requests and tier.steps and bucket > 1:
            counts = np.array(num_accepted_drafts), np.array(limits)
            self.survival.observe(record.requests, *counts, record.confidences)
        self._accepted += num_accepted_drafts
        self._proposed += limits
        self._rounds += 1
        self._source = tier, batch_size, record
        is_settled = tier == self.chosen and tier.steps and self.probe is None
        seconds = self._rounds * self.table.seconds(tier, bucket)
        if self.deficit > 0.0 or not is_settled or seconds >= DECISION_SECONDS:
            before = before or self.tier_for_batch(batch_size, record)
            self._decide(*self._source)
        return before is not None and self.tier_for_batch(batch_size, record) != before

    def _decide(self, tier: DraftShape, batch_size: int, record: RoundRecord) -> None:
        """Learn from the rounds since the last decision, all in one tier, and choose the next."""
        accepted, proposed, rounds = self._accepted, self._proposed, self._rounds
        self._accepted, self._proposed, self._rounds, self._source = [], [], 0, None
        bucket, rows, total = self.table.bucket_of(batch_size), len(accepted), sum(accepted)
        if record.seconds > 0.0:
            self.table.observe(tier, bucket, record.context, record.seconds)
        if tier.steps and (expected := self._expected.get(tier)) is not None:
            self.expected_tokens += rows * expected
            self.realised_tokens += rows + total
            if tier.packed and expected > 1.0:
                ratio = self.packed_yield * total / (rows * (expected - 1.0))
                self.packed_yield += (min(ratio, MOST_RATIO) - self.packed_yield) / WINDOW
        if not tier.packed:  # what was realised before acceptance changed is forgotten
            self.packed_yield += (1.0 - self.packed_yield) / YIELD_WINDOW
        self.estimates.observe(accepted, proposed, rounds)
        candidates = self._candidates(batch_size)
        times = self._times({*candidates, tier}, bucket, record.context)
        rated = {candidate: times[candidate] for candidate in candidates}
        rates, self._expected = self._rates(rated, bucket, record)
        tokens = 1.0 + record.share * total / rows
        self._account(rates, times, tokens, tier, rows, rounds)
        best = self._best(rates, times)
        if best != self.chosen:
            self.chosen, self.probe, self._vain_probes = best, None, 0
        elif self.probe is None:
            self.probe = self._next_probe(rates, times, record.share)
        elif self.probe not in rates or (
            tier == self.probe and tokens / times[tier] <= (1.0 + HYSTERESIS) * rates[best]
        ):
            self.probe = None
            self._vain_probes += 1
        self._bucket = bucket

    def calibration(self, requests: Sequence[Hashable]) -> tuple[Any, Any, Any]:
        """Slope, intercepts by depth and offsets by request, of the survival of drafts."""
        assert self.survival is not None
        return self.survival.slope, self.survival.intercepts, self.survival.offsets(requests)

    def describe(self) -> dict[str, Any]:
        survival = self.survival
        return {
            **({} if survival is None else {"calibration_error": survival.calibration_error}),
            "policy": "budget",
            "expected_tokens": self.expected_tokens,
            "realised_tokens": self.realised_tokens,
            "acceptance": [round(p, 4) for p in self.estimates.acceptance(self.chosen.depth)],
            "is_probing": self.probe is not None,
            "probe_debt_seconds": self.debt,
            "plain_deficit_seconds": self.deficit,
        }

    def _candidates(self, batch_size: int) -> tuple[DraftShape, ...]:
        if batch_size not in self._known_candidates:
            tiers = self.config.slots[self.config.slot_index(batch_size)].tiers
            bucket = self.table.bucket_of(batch_size)
            candidates = tuple(tier for tier in tiers if (tier, bucket) in self.table.pairs)
            self._known_candidates[batch_size] = candidates
        return self._known_candidates[batch_size]

    def _times(self, tiers: Iterable[DraftShape], bucket: int, context: float) -> ByTier:
        return {tier: self.table.seconds(tier, bucket, context) for tier in tiers}

    def _rates(
        self, times: ByTier, bucket: int, record: RoundRecord
    ) -> tuple[ByTier, dict[DraftShape, float]]:
        """Expected tokens per second of each tier, for all live requests on average.

        Also return the expected tokens per round of a request with drafts.
        """
        tokens = expected_tokens(self.estimates.acceptance(self.chosen.depth))
        rates, expected = {}, {}
        for tier, seconds in times.items():
            depth, _ = self._depths[tier]
            gain = tokens[depth] - 1.0
            if depth and (tier.packed or self.chosen.packed):
                gain = self._survivors(tier, bucket, record, None if self.chosen.packed else gain)
            rates[tier] = (1.0 + record.share * gain) / seconds
            expected[tier] = 1.0 + gain
        return rates, expected

    def _survivors(
        self, tier: DraftShape, bucket: int, record: RoundRecord, unpacked: float | None
    ) -> float:
        """Expected accepted drafts per request, by the records of the requests.

        ``unpacked`` is the known number if all drafts are verified. After packed rounds it is not
        known, because they try late drafts only where those are likely to be accepted.
        """
        assert self.survival is not None
        requests, (depth, verified) = record.requests or [None], self._depths[tier]
        drafts = len(requests) * (verified - 1)
        if tier.packed and record.requests:  # rows of requests without drafts, and of padding, too
            drafts = bucket * verified - round(len(requests) / record.share)
        survivors = self.survival.survivors(requests, drafts, depth)
        if unpacked is not None:
            survivors *= unpacked / self.survival.survivors(requests, len(requests) * depth, depth)
        return survivors * (self.packed_yield if tier.packed else 1.0)

    def _is_deeper(self, tier: DraftShape) -> bool:
        # packed rounds may leave late drafts untried, so all rows may show more than some of them
        return self._depths[tier] > self._depths[self.chosen]

    def _account(
        self, rates: ByTier, times: ByTier, tokens: float, tier: DraftShape, rows: int, rounds: int
    ) -> None:
        """Update ``debt`` with the time a probe lost, ``deficit`` with what speculation lost."""
        seconds = times[tier]
        is_rare = not self.chosen.steps or self.chosen.packed or rows >= MANY_ROWS * rounds
        budget = PLAIN_LOSS_BUDGET if is_rare else LOSS_BUDGET
        is_probe = self._is_deeper(tier) and self.chosen in rates
        lost = seconds - tokens / rates[self.chosen] if is_probe else -budget * seconds
        self.debt = max(0.0, self.debt + rounds * lost)
        if NO_DRAFTS in rates:
            plain = times[NO_DRAFTS]
            lost = seconds - tokens * plain if tier.steps else -PLAIN_LOSS_BUDGET * plain
            self.deficit = max(-MAX_CREDIT * plain, self.deficit + rounds * lost)

    def _best(self, rates: ByTier, times: ByTier) -> DraftShape:
        if NO_DRAFTS in rates:
            limit = MAX_DEFICIT if self.chosen.steps else RESUME_DEFICIT
            if self.deficit > limit * times[NO_DRAFTS]:
                return NO_DRAFTS
        best = max(rates, key=rates.__getitem__)  # of equal ones, the first and least deep
        current, plain = rates.get(self.chosen, 0.0), rates.get(NO_DRAFTS, 0.0)
        is_enough = rates[best] > (1.0 + HYSTERESIS) * current or current < plain
        return best if is_enough else self.chosen

    def _next_probe(self, rates: ByTier, times: ByTier, share: float) -> DraftShape | None:
        limit = RESUME_DEFICIT * times.get(NO_DRAFTS, 0.0)
        if self.debt > 0.0 or (not self.chosen.steps and self.deficit > limit):
            return None
        least_rate = (1.0 + HYSTERESIS) * rates[self.chosen]
        deeper = filter(self._is_deeper, rates)
        possible = [t for t in deeper if (1.0 + share * t.depth) / times[t] > least_rate]
        may_skip = (self._vain_probes + 1) % PROBES_A_TURN == 0
        return possible[min(may_skip, len(possible) - 1)] if possible else None
