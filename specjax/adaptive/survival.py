"""Survival of drafts: the probability that a draft is accepted if its parent was, learned online.

The model is the one of adaptive verification in vLLM, with an intercept per request in addition.
Axes: N requests of a round, D positions of a draft.
"""

from collections.abc import Hashable, Sequence
from math import exp, sqrt
from typing import NamedTuple

import numpy as np

WINDOW = 16.0  # number of observations over which the weight of old ones falls to 1/e
PRIOR = 1.0  # precision of an offset's prior around 0; a draft at 50 % adds 0.25
MOST_ODDS = 6.0  # limit of log-odds; at 6, one draft in 400 is rejected
LEAST_Q = 1.0 / (1.0 + exp(MOST_ODDS))
FIRST_SLOPE, FIRST_INTERCEPT = 0.5, 0.85  # the intercept stands for an acceptance of 0.7
RIDGE = 0.25  # weight of the first guess in the fit, like that of one draft
KEPT_REQUESTS = 4096
BINS = 10


class RoundRecord(NamedTuple):
    """What is known about a verified round of N live rows besides its accepted drafts."""

    num_proposed_drafts: Sequence[int] = ()  # [N]; empty if all drafts of the tier were proposed
    context: float = 0.0  # mean number of tokens per request; 0 if unknown
    requests: Sequence[Hashable] = ()  # [N], identify the requests; empty if unknown
    # f32 [N, D], the drafter's probability of the draft that was tried at each depth, 0 if none was
    confidences: Sequence[Sequence[float]] | np.ndarray = ()


NOTHING_KNOWN = RoundRecord()


class SurvivalEstimator:
    """Fits ``logit p = slope * logit q + intercept[position] + offset[request]``.

    q is the drafter's probability of the draft, where it is known. Each observation takes one
    damped Newton step; old ones weigh less. A request's offset starts at 0 and follows its own
    record, so that requests of one batch can differ.
    """

    def __init__(self, num_positions: int) -> None:
        self.slope = FIRST_SLOPE
        self.intercepts = np.full(num_positions, FIRST_INTERCEPT)
        self._hessian = RIDGE * np.eye(1 + num_positions)
        # by request: its offset, and the information in its record
        self._requests: dict[Hashable, Sequence[float]] = {}
        # sums of predicted acceptance, of acceptance and of drafts, by predicted acceptance
        self._checks = np.zeros((3, BINS))

    @property
    def calibration_error(self) -> float:
        """Mean distance of predicted and observed acceptance, over ten ranges of predictions."""
        predicted, observed, drafts = self._checks
        return float(np.abs(predicted - observed).sum() / max(drafts.sum(), 1.0))

    def offsets(self, requests: Sequence[Hashable]) -> np.ndarray:
        """The offsets f64 ``[N]`` of requests; 0 for a request without a record."""
        return np.array([self._requests.get(one, (0.0, 0.0))[0] for one in requests])

    def survival(self, requests: Sequence[Hashable]) -> np.ndarray:
        """Probability f64 ``[N, D]`` that all drafts up to each position are accepted.

        These are drafts of a later round, whose q is not known yet.
        """
        logits = self.intercepts + self.offsets(requests)[:, None]
        return np.cumprod(_sigmoid(logits), axis=1)

    def share(self, requests: Sequence[Hashable], num_drafts: int, depth: int) -> float:
        """Share of the accepted drafts that remains if only the best ``num_drafts`` are verified.

        Each request has ``depth`` drafts.
        """
        survival = self.survival(requests)[:, :depth].ravel()
        if num_drafts >= len(survival):
            return 1.0
        best = np.partition(survival, -num_drafts)[-num_drafts:] if num_drafts else survival[:0]
        return float(best.sum() / survival.sum())

    def observe(
        self,
        requests: Sequence[Hashable],
        num_accepted: Sequence[int],
        num_proposed: Sequence[int],
        confidences: Sequence[Sequence[float]] | np.ndarray = (),
    ) -> None:
        """Record N rounds of requests, of which at most D drafts are read.

        ``confidences`` f32 ``[N, D]`` is q of each draft, if the drafter knows it; 0 marks a draft
        that was not tried, because the request ended before it.
        """
        position = np.arange(len(self.intercepts))
        accepted = np.asarray(num_accepted)[:, None]
        is_tried = (position <= accepted) & (position < np.asarray(num_proposed)[:, None])
        is_hit = position < accepted
        known = np.zeros(is_tried.shape)
        if len(confidences):
            q = np.asarray(confidences, float)[:, : len(position)]
            width = q.shape[1]
            is_tried[:, :width] &= q != 0.0
            q = np.minimum(np.maximum(np.where(np.isnan(q), 0.5, q), LEAST_Q), 1.0 - LEAST_Q)
            known[:, :width] = np.log(q / (1.0 - q))
        records = [self._requests.get(one, (0.0, 0.0)) for one in requests]
        offsets, old = np.array(records).reshape(-1, 2).T
        chance = _sigmoid(self.slope * known + self.intercepts + offsets[:, None])
        error = np.where(is_tried, is_hit - chance, 0.0)
        information = np.where(is_tried, chance * (1.0 - chance), 0.0)
        self._fit(known, error, information)
        total = (1.0 - 1.0 / WINDOW) * old + information.sum(axis=1)
        offsets = offsets + (error.sum(axis=1) - PRIOR * offsets / WINDOW) / (total + PRIOR)
        moved = _limited(offsets, MOST_ODDS).tolist()
        for one, *record in zip(requests, moved, total.tolist(), strict=True):
            self._requests.pop(one, None)  # put it last
            self._requests[one] = record
        while len(self._requests) > KEPT_REQUESTS:  # those not seen for the longest time
            del self._requests[next(iter(self._requests))]
        guesses, hits = chance[is_tried], is_hit[is_tried]
        bins = np.minimum((BINS * guesses).astype(int), BINS - 1)
        self._checks *= 1.0 - 0.1 / WINDOW
        for sums_by_bin, weights in zip(self._checks, (guesses, hits, None), strict=True):
            sums_by_bin += np.bincount(bins, weights, BINS)

    def _fit(self, known: np.ndarray, error: np.ndarray, information: np.ndarray) -> None:
        # positions that were not tried are not forgotten
        is_new = np.append(information.any(), information.any(axis=0))
        keep = np.where(is_new, sqrt(1.0 - 1.0 / WINDOW), 1.0)
        self._hessian *= keep[:, None] * keep
        cross = (information * known).sum(axis=0)
        self._hessian[0, 0] += (information * known**2).sum()
        self._hessian[0, 1:] += cross
        self._hessian[1:, 0] += cross
        self._hessian += np.diag(np.append(0.0, information.sum(axis=0)))
        gradient = np.append((error * known).sum(), error.sum(axis=0))
        damped = self._hessian + RIDGE * np.eye(len(gradient))
        step = _limited(np.linalg.solve(damped, gradient), 1.0)
        self.slope = min(max(self.slope + float(step[0]), 0.0), MOST_ODDS)
        self.intercepts = _limited(self.intercepts + step[1:], MOST_ODDS)


def _limited(x: np.ndarray, most: float) -> np.ndarray:
    # np.clip takes four times as long
    result: np.ndarray = np.minimum(np.maximum(x, -most), most)
    return result


def _sigmoid(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = 1.0 / (1.0 + np.exp(-x))
    return result
