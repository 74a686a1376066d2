"""Survival of drafts: the probability that a draft is accepted if its parent was, learned online.

The model is the one of adaptive verification in vLLM, with an intercept per request in addition.
Axes: N requests of a round, D positions of a draft.
"""

from collections.abc import Hashable, Sequence
from itertools import accumulate
from math import exp
from typing import Any, NamedTuple

import numpy as np

WINDOW = 16.0  # number of observations over which the weight of old ones falls to 1/e
PRIOR = 1.0  # precision of an offset's prior around 0; a draft at 50 % adds 0.25
MOST_ODDS = 6.0  # limit of log-odds; at 6, one draft in 400 is rejected
LEAST_Q = 1.0 / (1.0 + exp(MOST_ODDS))
FIRST_SLOPE, FIRST_INTERCEPT = 0.5, 0.85  # the intercept stands for an acceptance of 0.7
RIDGE = 0.25  # weight of the first guess in the fit, like that of one draft
KEPT_REQUESTS, KEPT_BATCHES = 4096, 8
# the host takes 0.1 ms per fit at 64 rows, and a round 1 to 5 ms
ROUNDS_PER_FIT = 4
BINS = 10
Counts = Sequence[int] | np.ndarray


class RoundRecord(NamedTuple):
    """Facts about one round of N requests that a policy gets in addition to the accepted counts."""

    num_proposed_drafts: Sequence[int] = ()  # [N]; empty if all drafts of the tier were proposed
    context: float = 0.0  # mean number of tokens per request; 0 if unknown
    requests: Sequence[Hashable] = ()  # [N], identify the requests; empty if unknown
    share: float = 1.0  # of the live requests, those that draft; others verify only their root
    # f32 [N, D], the drafter's probability of the draft that was tried at each depth, 0 if none was
    confidences: Sequence[Sequence[float]] | np.ndarray = ()
    # time since the result before, if the round was already dispatched when that was read; else 0
    seconds: float = 0.0


NO_RECORD = RoundRecord()


class SurvivalEstimator:
    """Fits ``logit p = slope * logit q + intercept[position] + offset[request]``.

    q is the drafter's probability of the draft, where it is known. Every few rounds, one damped
    Newton step takes in their observations; old ones weigh less. A request's offset starts at 0 and
    follows its own record, so that requests of one batch can differ.
    """

    def __init__(self, num_positions: int) -> None:
        self.slope = FIRST_SLOPE
        self.intercepts = np.full(num_positions, FIRST_INTERCEPT)
        self._hessian = RIDGE * np.eye(1 + num_positions)
        self._odds = np.zeros((2, num_positions))  # sums of log-odds of q, and of drafts
        # by request: an index of the offsets, and of the information in the records
        self._requests: dict[Hashable, int] = {}
        self._offsets, self._information = np.zeros((2, KEPT_REQUESTS + 1))  # the last one stays 0
        self._batch: tuple[Sequence[Hashable], np.ndarray] = (), np.empty(0)  # and their indices
        self._rounds: list[tuple[Any, ...]] = []  # not fitted yet
        # by depth and requests: survivors of the best 0, 1, 2, ... drafts
        self._survivors: dict[tuple[Hashable, ...], np.ndarray] = {}
        # sums of predicted acceptance, of acceptance and of drafts, by predicted acceptance
        self._checks = np.zeros((3, BINS))

    @property
    def calibration_error(self) -> float:
        """Mean distance of predicted and observed acceptance, over ten ranges of predictions."""
        predicted, observed, drafts = self._checks
        return float(np.abs(predicted - observed).sum() / max(drafts.sum(), 1.0))

    def offsets(self, requests: Sequence[Hashable]) -> np.ndarray:
        """The offsets f64 ``[N]`` of requests; 0 for a request without a record."""
        return self._offsets[[self._requests.get(request, KEPT_REQUESTS) for request in requests]]

    def survival(self, requests: Sequence[Hashable]) -> np.ndarray:
        """Probability f64 ``[N, D]`` that all drafts up to each position are accepted.

        These are drafts of a later round, whose q is not known yet, so the mean log-odds stand for
        it.
        """
        sums, counts = self._odds
        usual = self.slope * sums / np.maximum(counts, 1.0)
        logits = usual + self.intercepts + self.offsets(requests)[:, None]
        return np.cumprod(_sigmoid(logits), axis=1)

    def survivors(self, requests: Sequence[Hashable], num_drafts: int, depth: int) -> float:
        """Expected accepted drafts per request if only the best ``num_drafts`` are verified.

        Each request has ``depth`` drafts.
        """
        key = (depth, *requests)
        if key not in self._survivors:
            if len(self._survivors) == KEPT_BATCHES:
                self._survivors.clear()
            best = np.sort(self.survival(requests)[:, :depth], axis=None)[::-1].cumsum()
            self._survivors[key] = np.append(0.0, best / len(requests))
        expected = self._survivors[key]
        return float(expected[min(num_drafts, len(expected) - 1)])

    def observe(
        self,
        requests: Sequence[Hashable],
        num_accepted: Counts,
        num_proposed: Counts,
        confidences: Sequence[Sequence[float]] | np.ndarray = (),
    ) -> None:
        """Record N rounds of requests, of which at most D drafts are read.

        ``confidences`` f32 ``[N, D]`` is q of each draft, if the drafter knows it; 0 marks a draft
        that was not tried, because the request ended before it.
        """
        if len(requests):
            key = tuple(requests)
            if key != self._batch[0]:  # most batches have the requests of the one before
                self._batch = key, np.array([self._index(request) for request in requests])
            self._rounds.append((self._batch[1], num_accepted, num_proposed, confidences))
        if len(self._rounds) >= ROUNDS_PER_FIT:
            self.fit()

    def fit(self) -> None:
        """Learn from the recorded rounds, at least one; :meth:`observe` calls this."""
        rounds, self._rounds, self._survivors = self._rounds, [], {}
        *columns, _ = zip(*rounds, strict=True)
        requests, hits, proposed = map(np.concatenate, columns)
        ends = list(accumulate(len(entry[0]) for entry in rounds))
        depth = len(self.intercepts)
        q = np.full((ends[-1], depth), 0.5)
        for end, (indices, *_, confidences) in zip(ends, rounds, strict=True):
            if len(confidences):
                values = np.asarray(confidences)[:, :depth]
                q[end - len(indices) : end, : values.shape[1]] = values
        num_tried = np.minimum(hits + 1, proposed)
        is_tried = (np.arange(depth) < num_tried[:, None]) & (q != 0.0)
        # from here on, arrays are by tried draft
        row, position = is_tried.nonzero()
        q = q[row, position]
        q = _limited(np.where(np.isnan(q), 0.5, q), LEAST_Q, 1.0 - LEAST_Q)
        log_odds = np.log(q / (1.0 - q))
        request, is_hit = requests[row], position < hits[row]
        logits = self.slope * log_odds + self.intercepts[position] + self._offsets[request]
        chance = _sigmoid(logits)
        error, information = is_hit - chance, chance * (1.0 - chance)
        inputs = np.eye(1 + depth).take(1 + position, axis=0)
        inputs[:, 0] = log_odds
        # positions that were not tried are not forgotten
        num_rounds = np.logical_or.reduceat(is_tried, [0, *ends[:-1]]).sum(axis=0)
        self._odds *= (1.0 - 1.0 / WINDOW) ** num_rounds
        self._odds += [np.bincount(position, x, depth) for x in (log_odds, None)]
        keep = (1.0 - 1.0 / WINDOW) ** (0.5 * np.append(num_rounds.max(), num_rounds))
        self._hessian *= keep[:, None] * keep
        self._hessian += (inputs.T * information) @ inputs
        damped = self._hessian + RIDGE * np.eye(1 + depth)
        gradient, before = error @ inputs, self.slope
        step = min(max(float(np.linalg.solve(damped, gradient)[0]), -1.0), 1.0)
        self.slope = min(max(before + step, 0.0), MOST_ODDS)
        # If the slope is at its limit, intercepts must not make up for what it does not move: with
        # confidences that are all alike, they would move away from acceptance, further every time.
        gradient = gradient[1:] - (self.slope - before) * damped[1:, 0]
        steps = _limited(np.linalg.solve(damped[1:, 1:], gradient), -1.0, 1.0)
        self.intercepts = _limited(self.intercepts + steps, -MOST_ODDS, MOST_ODDS)
        counts = np.bincount(requests, minlength=KEPT_REQUESTS)
        active = counts.nonzero()[0]
        count, offsets = counts[active], self._offsets[active]
        gained = np.bincount(request, information, KEPT_REQUESTS)[active]
        total = (1.0 - 1.0 / WINDOW) ** count * self._information[active] + gained
        errors = np.bincount(request, error, KEPT_REQUESTS)[active]
        offsets += (errors - PRIOR * count / WINDOW * offsets) / (total + PRIOR)
        self._offsets[active] = _limited(offsets, -MOST_ODDS, MOST_ODDS)
        self._information[active] = total
        bins = np.minimum((BINS * chance).astype(int), BINS - 1)
        self._checks *= (1.0 - 0.1 / WINDOW) ** len(rounds)
        for sums_by_bin, weights in zip(self._checks, (chance, is_hit, None), strict=True):
            sums_by_bin += np.bincount(bins, weights, BINS)

    def _index(self, request: Hashable) -> int:
        """Index of a request's record; a new one replaces the one not seen for the longest time."""
        index = self._requests.pop(request, None)
        if index is None:
            index = len(self._requests)
            if index == KEPT_REQUESTS:
                index = self._requests.pop(next(iter(self._requests)))
                self._offsets[index] = self._information[index] = 0.0
        self._requests[request] = index  # put it last
        return index


def _limited(x: np.ndarray, least: float, most: float) -> np.ndarray:
    # np.clip takes four times as long
    result: np.ndarray = np.minimum(np.maximum(x, least), most)
    return result


def _sigmoid(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = 1.0 / (1.0 + np.exp(-x))
    return result
