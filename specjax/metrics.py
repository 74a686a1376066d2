"""Metrics of an engine; the Prometheus names are SGLang's with the prefix ``specjax:``."""

import logging
import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from specjax.config import MAX_NODES
from specjax.types import NO_DRAFTS, DraftShape

logger = logging.getLogger(__name__)

WINDOW_SECONDS = 5.0
MARKS_A_WINDOW = 50
# An accept length below LOW_ACCEPT_LENGTH in the first verifies suggests that the draft is read
# wrongly: if target layers are shifted by one or the rope style is wrong, it is about 1.1.
LOW_ACCEPT_LENGTH, FIRST_VERIFIES = 1.2, 200
# Tokens in the context from which on verifies count for the next group. Heads are trained on texts
# of about 2,048 to 8,192 tokens.
CONTEXT_BOUNDS = 2048, 8192
CONTEXTS = "0-2047", "2048-8191", "8192+"


class Throughput:
    """Units per second over the last ``window`` seconds with work; idle time does not lower it."""

    def __init__(self, window: float = WINDOW_SECONDS) -> None:
        self._window = window
        self._busy = 0.0  # seconds with work until _now
        self._now = 0.0
        self._total = 0
        self._has_work = False
        # earlier (busy seconds, total); the first one is at least a window old
        self._marks: deque[tuple[float, int]] = deque([(0.0, 0)])

    def resume(self, now: float) -> None:
        """Record that there is work from ``now`` on."""
        if not self._has_work:
            self._has_work = True
            self._now = now

    def advance(self, now: float, total: int, has_work: bool) -> None:
        """Record the number of units so far, and whether there is more work."""
        if self._has_work:
            self._busy += now - self._now
        if self._has_work or has_work:
            self._now = now
        self._has_work, self._total = has_work, total
        marks, busy = self._marks, self._busy
        if busy - marks[-1][0] >= self._window / MARKS_A_WINDOW:
            marks.append((busy, total))
            while len(marks) > 1 and marks[1][0] <= busy - self._window:
                marks.popleft()

    def rate(self, now: float, total: int) -> float:
        """Return units per second until ``now`` or, without work, until the last work ended."""
        busy = self._busy + (now - self._now if self._has_work else 0.0)
        start = self._marks[0]
        for mark in (*self._marks, (self._busy, self._total)):
            if mark[0] > busy - self._window:
                break
            start = mark
        seconds = busy - start[0]
        return (total - start[1]) / seconds if seconds > 0 else 0.0

    def is_idle(self, now: float) -> bool:
        return not self._has_work and now - self._now >= self._window


# SGLang's bounds in seconds, and smaller ones, because a small model takes 1/3 ms per token
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
LENGTH_BOUNDS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))  # tokens


@dataclass
class Histogram:
    """Counts of values up to each bound; the last count is for values above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass
class Totals:
    """Metrics of an engine since its start.

    Only the scheduler's thread writes: it sets single metrics directly and updates related ones
    through the methods. Any thread may take a :meth:`snapshot`. ``docs/metrics.md`` explains them.
    """

    clock: Callable[[], float] = time.perf_counter
    max_total_tokens: int = 1
    max_window_tokens: int | None = None  # of the pool of layers with a window, if there is one
    drafts: bool = False  # rounds may draft, so there is a tier
    depth: int = 0  # maximum number of drafts that a round can accept
    chains: bool = False  # all drafts are chains, so the n-th draft of a request has position n
    is_mixture: bool = False  # the target is a mixture of experts
    adapts: bool = False  # the tier adapts to the acceptance
    # current values of fields that depend on the controller of the tiers
    adaptive: Callable[[], Mapping[str, Any]] = dict
    # number of tokens to accept per round, right or wrong, to measure only speed
    simulate_accept_length: float | None = None
    simulate_acceptance: float | None = None  # instead, the default probability per draft
    checks_acceptance: bool = False  # warn once if the first verifies accept few drafts
    num_dropped_drafts: int = 0  # accepted drafts after the end of their request

    tier: DraftShape = NO_DRAFTS  # tier of the next rounds
    ema_accept_len: float = 0.0
    num_switches: int = 0
    wasted_drafts: int = 0
    num_rounds: int = 0
    num_plain_rounds: int = 0
    expected_tokens: float | None = None  # ``None``, like the next two, if no policy reports it
    realised_tokens: float | None = None
    calibration_error: float | None = None

    num_running: int = 0
    num_waiting: int = 0
    num_used_tokens: int = 0
    num_window_tokens: int = 0  # as used in that pool
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_stopped: int = 0  # ended by an end token or a stop string
    num_cut: int = 0  # ended at their length limit
    num_retracted: int = 0
    num_verifies: int = 0
    num_proposed_drafts: int = 0
    num_accepted_drafts: int = 0
    verifies_by_accepted: list[int] = field(default_factory=list)  # by number of accepted drafts
    # by length of the context, like the next one
    verifies_by_context: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CONTEXTS, 0))
    accepted_by_context: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CONTEXTS, 0))
    # requests of rounds, by the number of their verified drafts, which is 0 in plain rounds
    rows_by_proposed: list[int] = field(default_factory=lambda: [0] * MAX_NODES)
    queue_time: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BOUNDS))
    e2e_latency: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    prompt_length: Histogram = field(default_factory=lambda: Histogram(LENGTH_BOUNDS))
    completion_length: Histogram = field(default_factory=lambda: Histogram(LENGTH_BOUNDS))
    expert_rounds: int = 0  # rounds that read experts
    num_experts_read: float = 0.0  # distinct experts per layer, summed over these rounds
    gen_throughput: float = 0.0  # tokens/s over the last window with work; 0 after an idle window
    last_gen_throughput: float = 0.0  # the same, but keeps its last value while idle
    throughput: Throughput = field(default_factory=Throughput)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def snapshot(self) -> "Totals":
        with self.lock:
            now = self.clock()
            rate = self.throughput.rate(now, self.generated_tokens)
            speed = 0.0 if self.throughput.is_idle(now) else rate
            changes: dict[str, Any] = {"gen_throughput": speed, "last_gen_throughput": rate}
            for name, value in vars(self).items():
                if isinstance(value, list | dict | Histogram):
                    changes[name] = deepcopy(value)
            return replace(self, **changes, **self.adaptive())

    def queue_changed(
        self, num_running: int, num_waiting: int, num_used_tokens: int, num_window_tokens: int = 0
    ) -> None:
        with self.lock:
            self.num_running = num_running
            self.num_waiting = num_waiting
            self.num_used_tokens = num_used_tokens
            self.num_window_tokens = num_window_tokens
            has_work = num_running + num_waiting > 0
            self.throughput.advance(self.clock(), self.generated_tokens, has_work)

    def request_admitted(
        self, num_prompt_tokens: int, num_cached_tokens: int, queue_seconds: float | None
    ) -> None:
        """Count the start of a prefill; ``queue_seconds`` is ``None`` for a resumed request."""
        with self.lock:
            self.throughput.resume(self.clock())
            self.reused_tokens += num_cached_tokens
            if queue_seconds is not None:
                self.prompt_tokens += num_prompt_tokens
                self.cached_tokens += num_cached_tokens
                self.queue_time.observe(queue_seconds)

    def tokens_generated(self, num_tokens: int, seconds: float | None) -> None:
        """Count tokens that a request got at once, ``seconds`` after its previous tokens."""
        with self.lock:
            self.generated_tokens += num_tokens
            if seconds is not None:
                self.inter_token_latency.observe(seconds / num_tokens, num_tokens)

    def drafts_verified(
        self, num_proposed: int, accepted: Sequence[tuple[int, int]], context: int
    ) -> None:
        """Count verifies of one request: accepted drafts of each, in the output and in all.

        ``context`` is the number of tokens in its KV after them. If ``checks_acceptance`` is set,
        warns once if the first verifies accept few drafts in all.
        """
        with self.lock:
            self.num_verifies += len(accepted)
            self.num_proposed_drafts += num_proposed
            group = CONTEXTS[bisect_right(CONTEXT_BOUNDS, context)]
            self.verifies_by_context[group] += len(accepted)
            self.accepted_by_context[group] += sum(count for count, _ in accepted)
            for count, in_all in accepted:
                self.num_accepted_drafts += count
                self.num_dropped_drafts += in_all - count
                while count >= len(self.verifies_by_accepted):
                    self.verifies_by_accepted.append(0)
                self.verifies_by_accepted[count] += 1
            is_due = self.checks_acceptance and self.num_verifies >= FIRST_VERIFIES
            self.checks_acceptance = self.checks_acceptance and not is_due
        length = self.accept_length + self.num_dropped_drafts / max(self.num_verifies, 1)
        if is_due and length < LOW_ACCEPT_LENGTH:
            logger.warning(
                "the accept length of the first %d verify passes is %.2f, bonus tokens included; "
                "usual causes, if the draft was trained for this target: target layers shifted by "
                "one, the wrong layout of a block drafter (anchor-first or fill-in), or another "
                "rope style or base; 'specjax inspect' shows how the draft is read",
                self.num_verifies,
                length,
            )

    def experts_read(self, counts: Sequence[float]) -> None:
        """Count the distinct experts that a layer read in each round; 0 of a round of padding."""
        with self.lock:
            self.num_experts_read += sum(counts)
            self.expert_rounds += len(counts) - counts.count(0.0)

    def request_finished(
        self, reason: str, seconds: float, num_prompt_tokens: int, num_completion_tokens: int
    ) -> None:
        """Count the end of a request, ``seconds`` after its submission."""
        with self.lock:
            self.num_finished += 1
            self.num_aborted += reason == "abort"
            self.num_stopped += reason == "stop"
            self.num_cut += reason == "length"
            if reason != "abort":
                self.e2e_latency.observe(seconds)
                self.prompt_length.observe(num_prompt_tokens)
                self.completion_length.observe(num_completion_tokens)

    @property
    def token_usage(self) -> float:
        return self.num_used_tokens / self.max_total_tokens

    @property
    def cache_hit_rate(self) -> float:
        """Share of prompt tokens served from the prefix cache."""
        return self.cached_tokens / max(self.prompt_tokens, 1)

    @property
    def accept_length(self) -> float:
        """Tokens per verify pass, including the bonus token; 0 before the first verify."""
        return (self.num_verifies + self.num_accepted_drafts) / max(self.num_verifies, 1)

    @property
    def accept_length_by_context(self) -> dict[str, float]:
        """The same by length of the context; 0 for lengths that no verify had."""
        pairs = zip(
            self.verifies_by_context.items(), self.accepted_by_context.values(), strict=True
        )
        return {group: (n + accepted) / max(n, 1) for (group, n), accepted in pairs}

    @property
    def accepted_by_position(self) -> list[int]:
        """Number of verifies that accepted the first draft, the second draft, and so on."""
        counts = list(accumulate(self.verifies_by_accepted[:0:-1]))[::-1]
        return counts + [0] * (self.depth - len(counts))

    @property
    def verified_by_position(self) -> list[int]:
        """Number of requests of rounds whose first draft was verified, whose second, and so on."""
        return [sum(self.rows_by_proposed[i + 1 :]) for i in range(self.depth)]

    @property
    def verified_rows(self) -> int:
        return sum(count * rows for rows, count in enumerate(self.rows_by_proposed, 1))

    @property
    def experts_read_per_layer(self) -> float:
        return self.num_experts_read / max(self.expert_rounds, 1)

    @property
    def accept_rate(self) -> float:
        return self.num_accepted_drafts / max(self.num_proposed_drafts, 1)


PREFIX = "specjax:"
_EMA = (
    "Accepted drafts per verify pass, moving average. It excludes the bonus token, which "
    "spec_accept_length includes."
)
_FIXED, _DRAWN = "simulate_accept_length", "simulate_acceptance"
_SIMULATED = "Tokens accepted per verify, correct or not (benchmark mode; output is meaningless)."
_CHANCE = "Default probability that a draft is accepted, correct or not (benchmark mode)."
_WANTED, _DISTANCE = "expected_tokens", "calibration_error"
_REALTIME = "realtime_tokens"
_MODES = (
    "Tokens by mode: prefill_compute (computed), prefill_cache (found in the prefix cache), decode "
    "(generated). Includes requests resumed after preemption."
)
_SPEED = "Generated tokens per second over the last 5 s with active requests; 0 when idle."
_HITS = "Fraction of prompt tokens found in the prefix cache since the start."
_LENGTH = "Mean tokens per verify pass since the start, including the bonus token."
_WINDOWS = "max_window_tokens"
_WINDOW_USED = "Tokens in pages for layers with a window, including those of cached texts."
_WINDOW_SIZE = "Capacity in tokens of the KV pool for layers with a window."
_RATE = "Fraction of proposed draft tokens that were accepted, since the start."
_VERIFIES = "Verify passes; a pass over a batch counts once for each request."
_PROPOSED = "Draft tokens proposed to the target."
_ACCEPTED = "Draft tokens that were accepted."
_BY_CONTEXT = "Mean tokens per verify pass since the start, by tokens in the context."
_VERIFIES_AT = "Verify passes by tokens in the context."
_ACCEPTED_AT = "Draft tokens that were accepted, by tokens in the context."
_SWITCHES = "How often adaptive decoding changed the draft size."
_VERIFIED = "Tokens verified per round and request."
_STEPS = "Depth of the draft, in tokens, in the current setting."
_WASTED = "Draft tokens computed but not accepted (adaptive decoding only)."
_ROWS = "Rows that the target computed in rounds: roots and verified drafts, without padding."
_POSITIONS = "Verified drafts by position, from 0 (chains only)."
_ROUNDS = "Rounds; a round of a batch counts once (adaptive decoding only)."
_EXPECTED = "Tokens that the budget policy expected from rounds with drafts, bonus tokens included."
_REALISED = "Tokens that the rounds of spec_expected_tokens gave."
_CALIBRATION = "Mean distance of predicted and observed acceptance of drafts in packed rounds."
_PER_LAYER = "experts_read_per_layer"
_EXPERTS = "Mean distinct experts that a layer read per round since the start, over its layers."
_EXPERTS_READ = "Distinct experts that a layer read, summed over rounds."
_EXPERT_ROUNDS = "Rounds that read experts; a round of a batch counts once."
_FIRST = "Seconds from arrival to the first token."
_BETWEEN = "Seconds between tokens."
_LATENCY = "Seconds from arrival to the end of the request, without aborted ones."
_KINDS: dict[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


# of the samples of a metric with several values
LABELS: dict[type, tuple[str, ...]] = {list: ("position",), dict: ("context",)}


class Metric(NamedTuple):
    """One metric of an engine."""

    name: str  # name in Prometheus, without the prefix and the ``_total`` of counters
    kind: str
    field: str  # field of Totals
    help: str
    needs: str = ""  # omit the metric if this field of Totals is False or None
    label: tuple[str, str] | None = None  # distinguishes metrics of the same name

    def of(self, totals: Totals) -> Any:
        return attrgetter(self.field)(totals)


METRICS = (
    Metric("num_running_reqs", "gauge", "num_running", "Running requests."),
    Metric("num_queue_reqs", "gauge", "num_waiting", "Waiting requests, including preempted ones."),
    Metric("num_used_tokens", "gauge", "num_used_tokens", "Tokens in pages of running requests."),
    Metric("max_total_num_tokens", "gauge", "max_total_tokens", "KV pool capacity in tokens."),
    Metric("num_used_window_tokens", "gauge", "num_window_tokens", _WINDOW_USED, _WINDOWS),
    Metric("max_window_num_tokens", "gauge", _WINDOWS, _WINDOW_SIZE, _WINDOWS),
    Metric("token_usage", "gauge", "token_usage", "Fraction of the KV pool in use, from 0 to 1."),
    Metric("gen_throughput", "gauge", "gen_throughput", _SPEED),
    Metric("cache_hit_rate", "gauge", "cache_hit_rate", _HITS),
    Metric("spec_accept_length", "gauge", "accept_length", _LENGTH),
    Metric("spec_accept_rate", "gauge", "accept_rate", _RATE),
    Metric("prompt_tokens", "counter", "prompt_tokens", "Prompt tokens of admitted requests."),
    Metric("cached_tokens", "counter", "cached_tokens", "Prompt tokens from the prefix cache."),
    Metric("generation_tokens", "counter", "generated_tokens", "Completion tokens."),
    Metric("num_requests", "counter", "num_finished", "Finished requests, including aborted ones."),
    Metric("num_aborted_requests", "counter", "num_aborted", "Requests ended by abort or timeout."),
    Metric("num_retracted_requests", "counter", "num_retracted", "Number of preemptions."),
    Metric("spec_verify_calls", "counter", "num_verifies", _VERIFIES),
    Metric("spec_proposed_drafts", "counter", "num_proposed_drafts", _PROPOSED),
    Metric("spec_accepted_drafts", "counter", "num_accepted_drafts", _ACCEPTED),
    Metric("spec_context_accept_length", "gauge", "accept_length_by_context", _BY_CONTEXT),
    Metric("spec_context_verify_calls", "counter", "verifies_by_context", _VERIFIES_AT),
    Metric("spec_context_accepted_drafts", "counter", "accepted_by_context", _ACCEPTED_AT),
    Metric("spec_verified_rows", "counter", "verified_rows", _ROWS, "drafts"),
    Metric("spec_verified_drafts", "counter", "verified_by_position", _POSITIONS, "chains"),
    Metric("spec_num_steps", "gauge", "tier.steps", _STEPS, "drafts"),
    Metric("spec_num_draft_tokens", "gauge", "tier.verified", _VERIFIED, "drafts"),
    Metric("spec_ema_accept_len", "gauge", "ema_accept_len", _EMA, "adapts"),
    Metric("spec_num_switches", "counter", "num_switches", _SWITCHES, "adapts"),
    Metric("spec_simulate_accept_length", "gauge", _FIXED, _SIMULATED, _FIXED),
    Metric("spec_simulate_acceptance", "gauge", _DRAWN, _CHANCE, _DRAWN),
    Metric("spec_wasted_drafts", "counter", "wasted_drafts", _WASTED, "adapts"),
    Metric("spec_rounds", "counter", "num_rounds", _ROUNDS, "adapts"),
    Metric("spec_plain_rounds", "counter", "num_plain_rounds", "Rounds without drafts.", "adapts"),
    Metric("spec_expected_tokens", "counter", _WANTED, _EXPECTED, _WANTED),
    Metric("spec_realised_tokens", "counter", "realised_tokens", _REALISED, _WANTED),
    Metric("spec_calibration_error", "gauge", _DISTANCE, _CALIBRATION, _DISTANCE),
    Metric(_PER_LAYER, "gauge", _PER_LAYER, _EXPERTS, "is_mixture"),
    Metric("experts_read", "counter", "num_experts_read", _EXPERTS_READ, "is_mixture"),
    Metric("expert_rounds", "counter", "expert_rounds", _EXPERT_ROUNDS, "is_mixture"),
    Metric(_REALTIME, "counter", "prefilled_tokens", _MODES, label=("mode", "prefill_compute")),
    Metric(_REALTIME, "counter", "reused_tokens", _MODES, label=("mode", "prefill_cache")),
    Metric(_REALTIME, "counter", "generated_tokens", _MODES, label=("mode", "decode")),
    Metric("queue_time_seconds", "histogram", "queue_time", "Seconds from arrival until prefill."),
    Metric("time_to_first_token_seconds", "histogram", "time_to_first_token", _FIRST),
    Metric("inter_token_latency_seconds", "histogram", "inter_token_latency", _BETWEEN),
    Metric("e2e_request_latency_seconds", "histogram", "e2e_latency", _LATENCY),
)


class EngineMetrics(Collector):
    """Metrics of one engine, for Prometheus and for code; ``model_name`` labels all of them.

    Attributes:
        registry: all metrics, for ``prometheus_client``; one per engine.
        snapshot: returns consistent current metrics as :class:`Totals`; any thread may call it.
    """

    def __init__(self, model_name: str, totals: Totals) -> None:
        self._model_name = model_name
        self.snapshot = totals.snapshot
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterable[Any]:
        """Return all families; the registry calls this for each scrape."""
        return families(self.snapshot(), METRICS, PREFIX, self._model_name)


def families(
    totals: Totals, metrics: Iterable[Metric], prefix: str, model_name: str
) -> Iterable[Any]:
    """Convert metrics to Prometheus families; each sample has the label ``model_name``."""
    families_by_name: dict[str, Any] = {}
    for metric in metrics:
        if metric.needs and any(getattr(totals, metric.needs) is no for no in (False, None)):
            continue
        labels = {"model_name": model_name} | dict([metric.label] if metric.label else ())
        name, values = prefix + metric.name, tuple(labels.values())
        value = metric.of(totals)
        if name not in families_by_name:
            names = *labels, *LABELS.get(type(value), ())
            families_by_name[name] = _KINDS[metric.kind](name, metric.help, labels=names)
        if isinstance(value, list | dict):
            for group, count in value.items() if isinstance(value, dict) else enumerate(value):
                families_by_name[name].add_metric((*values, str(group)), count)
        elif isinstance(value, Histogram):
            bounds = [*map(floatToGoString, value.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(value.counts), strict=True))
            families_by_name[name].add_metric(values, buckets, value.total)
        else:
            families_by_name[name].add_metric(values, value)
    return families_by_name.values()
