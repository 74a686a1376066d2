"""Speculative figures of one request."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SpecCounts:
    """Counts without the bonus token, and without drafts behind a stop, accepted or not.

    So in the round that ends the request only drafts for the positions of kept tokens are proposed,
    except in a tree, whose nodes are no positions: all of them count.
    """

    width: int  # steps of a round, at most
    topk: int = 1  # branches of a level; 1 is a chain
    simulated: float | None = None  # tokens a round that were accepted right or wrong
    num_plain_tokens: int = 0  # from rounds with speculation off, which are no verifies
    num_switches: int = 0
    num_steps: int | None = None  # of the last round
    rounds_by_steps: dict[int, int] = field(default_factory=dict)
    ema_accept_len: float | None = None  # the engine's, where the drafted tokens adapt
    num_accepted_drafts: int = 0
    num_proposed_drafts: int = 0
    num_verifies: int = 0
    histogram: list[int] = field(default_factory=list)
    # proposed drafts, and the accepted ones of each verify, that nobody has asked for
    _new_proposed: int = 0
    _new_accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.histogram = [0] * (self.width + 1)

    def add(
        self, num_steps: int, num_proposed: int, num_accepted: int, num_kept: int, is_last: bool
    ) -> None:
        """Count one round of which ``num_kept`` tokens stay; plain if it had nothing to propose."""
        num_steps = num_steps if num_proposed else 0
        self.num_switches += self.num_steps not in (None, num_steps)
        self.num_steps = num_steps
        self.rounds_by_steps[num_steps] = self.rounds_by_steps.get(num_steps, 0) + 1
        if num_steps == 0:
            self.num_plain_tokens += num_kept
            return
        accepted = min(num_accepted, num_kept)
        self.num_accepted_drafts += accepted
        is_cut = is_last and self.topk == 1
        proposed = min(num_proposed, num_kept) if is_cut else num_proposed
        self.num_proposed_drafts += proposed
        self.num_verifies += 1
        self.histogram[accepted] += 1
        self._new_proposed += proposed
        self._new_accepted.append(accepted)

    def take_new(self) -> tuple[int, list[int]]:
        """Proposed drafts, and accepted ones of each verify, since this was asked for last."""
        new = self._new_proposed, self._new_accepted
        self._new_proposed, self._new_accepted = 0, []
        return new

    def meta_info(self, completion_tokens: int) -> dict[str, Any]:
        verifies, proposed = self.num_verifies, self.num_proposed_drafts
        ema, speculated = self.ema_accept_len, completion_tokens - self.num_plain_tokens
        return {
            "spec_verify_ct": verifies,
            "spec_accept_length": speculated / verifies if verifies else 0.0,
            "spec_accept_rate": self.num_accepted_drafts / proposed if proposed else 0.0,
            "spec_num_correct_drafts": self.num_accepted_drafts,
            "spec_num_proposed_drafts": proposed,
            "spec_num_wasted_drafts": proposed - self.num_accepted_drafts,
            "spec_correct_drafts_histogram": list(self.histogram),
            "spec_num_steps": self.num_steps,
            "spec_num_switches": self.num_switches,
            "spec_rounds_by_steps": {str(k): n for k, n in sorted(self.rounds_by_steps.items())},
        } | {
            name: value
            for name, value in (
                ("spec_ema_accept_len", ema),
                ("spec_simulate_accept_length", self.simulated),
            )
            if value is not None
        }
