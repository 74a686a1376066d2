"""The cost table: seconds per round, by tier, batch bucket and context length."""

from bisect import bisect_left
from collections.abc import Mapping
from itertools import product

from specjax.checks import check_number
from specjax.types import DraftShape

# context lengths in tokens at which rounds are measured; between and above them, time is linear
CONTEXTS = (512, 4096)
# Served rounds differ from measured ones, by up to 20 % on an H200: under a constant load its power
# limit lowers the clock, which slows down rounds of many rows. A tier's ratio of the two follows
# the last rounds in this tier, and slowly also those in other tiers of the same bucket. But if
# rounds are slow, this says nothing about rounds of fewer rows, which may not be slow.
OWN_ROUNDS, OTHER_ROUNDS, MOST_RATIO = 8.0, 256.0, 2.0
MOST_CHANGE = 1.25  # a single round that took longer or shorter counts as this much
Seconds = Mapping[tuple[DraftShape, int], float | list[float]]


class CostTable:
    """Seconds per round, from measurements by (tier, batch bucket), at both contexts or for all.

    A round with more steps, rows or requests is never cheaper than one with fewer: noise in the
    measurements is smoothed upwards. Rounds while serving then correct them. Raises ValueError for
    times that are not above 0, or missing; only packed tiers may lack some.
    """

    def __init__(self, seconds: Seconds) -> None:
        self.tiers = tuple(sorted({tier for tier, _ in seconds}))
        self.buckets = sorted({bucket for _, bucket in seconds}) or [1]
        expected = product((tier for tier in self.tiers if not tier.packed), self.buckets)
        if missing := [pair for pair in expected if pair not in seconds]:
            raise ValueError(f"round times are missing for (tier, batch)={missing}")
        self.pairs = set(seconds)
        checked = {pair: self._checked(*pair, seconds[pair]) for pair in self.pairs}
        self._seconds = {
            (tier, bucket): tuple(
                max(
                    checked[other, size][i]
                    for other, size in self.pairs
                    if size <= bucket
                    and other.steps <= tier.steps
                    and other.verified <= tier.verified
                )
                for i in (0, 1)
            )
            for tier, bucket in self.pairs
        }
        self._ratios = {
            bucket: {tier: 1.0 for tier in self.tiers if (tier, bucket) in self.pairs}
            for bucket in self.buckets
        }

    def _checked(
        self, tier: DraftShape, bucket: int, values: float | list[float]
    ) -> tuple[float, float]:
        several = values if isinstance(values, list) else [values]
        name = f"seconds of tier {tier} at {bucket}"
        checked = [check_number(name, value, above=0) for value in several]
        return checked[0], checked[-1]

    def bucket_of(self, batch_size: int) -> int:
        """The smallest bucket for a batch. Raises ValueError if the batch is too large."""
        index = bisect_left(self.buckets, batch_size)
        if index == len(self.buckets):
            raise ValueError(f"batch_size={batch_size} exceeds the largest of {self.buckets}")
        return self.buckets[index]

    def seconds(self, tier: DraftShape, bucket: int, context: float = 0.0) -> float:
        """Seconds per round of a batch whose requests have ``context`` tokens on average."""
        short, long = self._seconds[tier, bucket]
        begin, end = CONTEXTS
        if context > begin and long > short:
            short += (long - short) * (context - begin) / (end - begin)
        return short * self._ratios[bucket][tier]

    def observe(self, tier: DraftShape, bucket: int, context: float, seconds: float) -> None:
        """Correct the table by the time of a round while serving."""
        ratios = self._ratios[bucket]
        change = seconds / self.seconds(tier, bucket, context)
        observed = ratios[tier] * min(max(change, 1.0 / MOST_CHANGE), MOST_CHANGE)
        observed = min(max(observed, 1.0 / MOST_RATIO), MOST_RATIO)
        updated = ratios[tier] + (observed - ratios[tier]) / OWN_ROUNDS
        for other, ratio in ratios.items():
            if updated < ratio or (other.steps >= tier.steps and other.verified >= tier.verified):
                ratios[other] = ratio + (updated - ratio) / OTHER_ROUNDS
        ratios[tier] = updated
