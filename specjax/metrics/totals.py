"""Counts and times of an engine since its start, as plain numbers."""

from bisect import bisect_left
from dataclasses import dataclass, field, replace

# of SGLang's, with finer steps below: a small model makes a token in a third of a millisecond
FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400),
)
INTER_TOKEN_BOUNDS = (
    *(0.0001, 0.0002, 0.0004, 0.0006, 0.0008, 0.001),
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04),
    *(0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
LATENCY_BOUNDS = (*FIRST_TOKEN_BOUNDS, 600, 1200, 1800, 2400)


@dataclass
class Histogram:
    """How often values fell up to each bound; the last count is of those beyond all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, several times if asked to."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def num_values(self) -> int:
        """Values counted so far."""
        return sum(self.counts)

    def copy(self) -> "Histogram":
        """A copy that later values leave alone."""
        return replace(self, counts=list(self.counts))


@dataclass
class Totals:
    """Figures of an engine since its start.

    Attributes:
        num_running: requests that run now.
        num_waiting: requests that wait now, retracted ones included.
        num_used_tokens: what the KV pages of running requests hold now.
        prompt_tokens: of the requests whose prefill has begun, each counted once.
        cached_tokens: of those, found in the prefix cache.
        prefilled_tokens: given to prefill, those of resumed requests included.
        reused_tokens: found in the prefix cache instead, those of resumed requests included.
        generated_tokens: completion tokens.
        num_finished: requests that ended, the aborted ones included.
        num_aborted: of those, with finish reason ``abort``.
        num_retracted: times that a running request lost its pages.
        num_verifies: rounds that verified drafts, counted for each request.
        num_proposed_drafts: drafts for the positions of kept tokens.
        num_accepted_drafts: of those, without the bonus tokens.
        queue_time: seconds from a request's making to its prefill.
        time_to_first_token: seconds from a request's making to its first token.
        inter_token_latency: seconds a token after the first; tokens that came together share the
            time since the ones before.
        e2e_latency: seconds from the making to the end of a request that was not aborted.
        gen_throughput: tokens a second over the last ``throughput.WINDOW_SECONDS`` with work to do;
            0 where there has been none for as long.
        last_gen_throughput: the same, and what it was last where there is no work.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_used_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_retracted: int = 0
    num_verifies: int = 0
    num_proposed_drafts: int = 0
    num_accepted_drafts: int = 0
    queue_time: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BOUNDS))
    e2e_latency: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    gen_throughput: float = 0.0
    last_gen_throughput: float = 0.0

    @property
    def cache_hit_rate(self) -> float:
        """Share of the prompt tokens that the prefix cache had."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def accept_length(self) -> float:
        """Tokens a verify, the bonus token included; 0 before the first verify."""
        verifies = self.num_verifies
        return 1 + self.num_accepted_drafts / verifies if verifies else 0.0

    @property
    def accept_rate(self) -> float:
        """Share of the proposed drafts that was accepted."""
        proposed = self.num_proposed_drafts
        return self.num_accepted_drafts / proposed if proposed else 0.0
