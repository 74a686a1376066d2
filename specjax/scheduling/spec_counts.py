"""Speculative figures of one request."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class SpecTotals(NamedTuple):
    """Verifies, and drafts proposed and accepted by them."""

    verifies: int = 0
    proposed: int = 0
    correct: int = 0


@dataclass
class SpecCounts:
    """Speculative figures of a request; every accepted-draft count is without the bonus token.

    Drafts behind a stop do not count, accepted or not: in the round that ends the request, only
    drafts for the positions of kept tokens are proposals.
    """

    width: int  # drafted tokens a round, at most
    num_plain_tokens: int = 0  # from rounds with speculation off, which are no verifies
    num_switches: int = 0
    num_steps: int | None = None  # of the last round
    rounds_by_steps: dict[int, int] = field(default_factory=dict)
    ema_accept_len: float | None = None  # the engine's, where the drafted tokens adapt
    num_correct_drafts: int = 0
    num_proposed_drafts: int = 0
    num_verifies: int = 0
    histogram: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.histogram = [0] * (self.width + 1)

    def add(self, num_steps: int, num_accepted_drafts: int, num_kept: int, is_last: bool) -> None:
        """Count one round of which ``num_kept`` tokens stay; it is a verify if it drafted."""
        self.num_switches += self.num_steps not in (None, num_steps)
        self.num_steps = num_steps
        self.rounds_by_steps[num_steps] = self.rounds_by_steps.get(num_steps, 0) + 1
        if num_steps == 0:
            self.num_plain_tokens += num_kept
            return
        correct = min(num_accepted_drafts, num_kept)
        self.num_correct_drafts += correct
        self.num_proposed_drafts += min(num_steps, num_kept) if is_last else num_steps
        self.num_verifies += 1
        self.histogram[correct] += 1

    @property
    def totals(self) -> SpecTotals:
        """The counts so far."""
        return SpecTotals(self.num_verifies, self.num_proposed_drafts, self.num_correct_drafts)

    def meta_info(self, completion_tokens: int) -> dict[str, Any]:
        """The figures under SGLang's names."""
        verifies, proposed = self.num_verifies, self.num_proposed_drafts
        ema = self.ema_accept_len
        speculated = completion_tokens - self.num_plain_tokens
        return {
            "spec_verify_ct": verifies,
            "spec_accept_length": speculated / verifies if verifies else 0.0,
            "spec_accept_rate": self.num_correct_drafts / proposed if proposed else 0.0,
            "spec_num_correct_drafts": self.num_correct_drafts,
            "spec_num_proposed_drafts": proposed,
            "spec_num_wasted_drafts": proposed - self.num_correct_drafts,
            "spec_correct_drafts_histogram": list(self.histogram),
            "spec_num_steps": self.num_steps,
            "spec_num_switches": self.num_switches,
            "spec_rounds_by_steps": {str(k): n for k, n in sorted(self.rounds_by_steps.items())},
        } | ({} if ema is None else {"spec_ema_accept_len": ema})
