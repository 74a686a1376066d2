"""The cost-aware policy: owner of estimates, ledgers and the tier they lead to."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.adaptive.config import AdaptiveConfig, load_adaptive_config
from specjax.adaptive.cost import CostModel, CostState, next_steps, update_cost
from specjax.adaptive.estimates import AcceptanceEstimates, conditional_acceptance
from specjax.adaptive.round_times import RoundTimes
from specjax.checks import check_integer


class CostAwarePolicy:
    """Chooses the tier of the most expected tokens a second, from acceptance and round times.

    Acceptance is estimated for each drafted position from the counts of every verified round,
    whichever tier it ran with; a tier yields ``1 + p1 + p1 p2 + ...`` tokens a round. The tier
    changes for a gain of more than ``rate_hysteresis``, and at once if it loses to step 0.

    What a tier shows of deeper positions is little, and step 0 shows nothing. So a deeper tier is
    chosen for what it has shown only, and probes are what it shows it in: after
    ``min_probe_interval`` results the next deeper candidate that could win at all (now and then
    one deeper still) runs until a result that loses to the chosen tier. The wait doubles up to
    ``max_probe_interval`` while that changes nothing, and there is none behind a move to a deeper
    tier from which more is expected. Two ledgers bound the cost:

    - A probe begins only when what earlier ones lost to the chosen tier is below ``probe_budget``
      (2 %) of the time since. Over any run they lose at most that share and one probe: the first
      round that loses and those started before its result is reported.
    - With 0 among the candidates, all rounds together lose at most ``probe_budget`` of the time
      of plain rounds to plain decoding, and ``max_deficit_rounds`` and the rounds in flight. At
      that deficit speculation stops until the budget has repaid most of it; a credit of up to
      ``max_credit_rounds`` earned before pays for the end of a stretch of high acceptance.

    Both count time by the table of round times.

    Args:
        times: seconds of a round for every candidate, and for every batch that is reported.
        initial_steps: the tier to start with, moved to the nearest candidate (the larger of two).
            ``None`` starts with the deepest.
        config: a mapping, a path or a loaded configuration; see
            :func:`specjax.adaptive.load_adaptive_config`.

    Raises:
        ValueError: naming the key and value that is wrong, or a candidate without times.
    """

    def __init__(
        self,
        times: RoundTimes,
        initial_steps: int | None = None,
        config: "AdaptiveConfig | Mapping[str, Any] | str | os.PathLike[str] | None" = None,
    ) -> None:
        self.config = load_adaptive_config(config).resolve("cost")
        missing = sorted(set(self.config.candidate_steps) - set(times.steps))
        if missing:
            raise ValueError(
                f"candidate_steps={missing} have no round times; measured: {times.steps}"
            )
        self.model = CostModel(self.config, times)
        candidates = self.model.candidates(1)
        deepest = self.config.candidate_steps[-1]
        if initial_steps is None:
            initial_steps = deepest
        check_integer("initial_steps", initial_steps, at_least=0)
        wanted = initial_steps
        self.state = CostState(
            estimates=AcceptanceEstimates.of_length(deepest),
            steps=min(candidates, key=lambda c: (abs(c - wanted), -c)),
            bucket=times.buckets[0],
            probe_interval=self.config.cost.min_probe_interval,
        )

    @property
    def candidate_steps(self) -> tuple[int, ...]:
        """The tiers of all slots, ascending."""
        return self.config.candidate_steps

    @property
    def current_steps(self) -> int:
        """The tier that runs next if the batch stays as it is; a probe's while one runs."""
        probe = self.state.probe_steps
        return self.state.steps if probe is None else probe

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Estimated conditional acceptance of each drafted position."""
        return conditional_acceptance(self.state.estimates)

    def steps_for_batch(self, batch_size: int) -> int:
        """The tier for the next round of ``batch_size`` rows."""
        return next_steps(self.model, self.state, batch_size)

    def on_verify_complete(
        self, num_accepted_drafts: Sequence[int], *, executed_steps: int, batch_size: int
    ) -> bool:
        """Take in one round; whether the tier for ``batch_size`` changed.

        Args:
            num_accepted_drafts: accepted drafts of each live row, without the bonus token.
            executed_steps: the tier the round ran with; 0 for a plain round.
            batch_size: rows of the round.
        """
        before = self.steps_for_batch(batch_size)
        self.state = update_cost(
            self.model, self.state, num_accepted_drafts, executed_steps, batch_size
        )
        return self.steps_for_batch(batch_size) != before

    def describe(self) -> dict[str, Any]:
        """The policy's figures for server information."""
        return {
            "policy": "cost",
            "acceptance": [round(p, 4) for p in self.acceptance],
            "is_probing": self.state.probe_steps is not None,
            "probe_interval": self.state.probe_interval,
            "plain_deficit_seconds": self.state.deficit,
        }
