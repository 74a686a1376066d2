"""Workloads, records and figures of the benchmark of adaptive speculation.

The prompts are chosen for SmolLM2-135M with its shipped head. With seven drafted tokens the accept
length of each kind is in ``docs/adaptive_decoding.md``; for other models measure it first.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

POLICIES = ("cost", "ema")
WORKLOADS = {
    "low": ("low",),
    "high": ("high",),
    "transition": ("low", "high", "low", "high"),
}
PROMPTS: dict[str, tuple[str, ...]] = {
    "high": (
        "Count from 1 to 100. Write one number on each line and nothing else.",
        "List the even numbers from 2 to 200, separated by commas.",
        "Draw a line of 200 stars, like this: * * * * * *",
        "List the odd numbers from 1 to 199, separated by commas.",
        "Print the number 1 on 256 lines, one number on each line, and nothing else.",
        "List the multiples of 5 from 5 to 500, separated by commas.",
        "Write A B A B A B and go on for 200 letters.",
        "Write the numbers from 1 to 90 as a numbered list, with the number as a word.",
    ),
    "low": (
        "Describe what a passenger sees from a slow night train across Siberia.",
        "Tell a story about two sisters who inherit an island and quarrel over a goat.",
        "Escribe una carta a un amigo sobre un viaje en tren por las montañas.",
        "Tell me about an old man who repairs umbrellas in Lisbon, and why he stopped.",
        "Schreibe eine kurze Geschichte über einen Bäcker und einen Drachen.",
        "Write the opening of a detective novel in which a baker is missing.",
        "Write about what colours would sound like if they were instruments in an orchestra.",
        "Tell a strange story about a clockmaker who finds a door in a lake.",
    ),
}
# rounds that one tier runs in the warm-up before the next has its turn
WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Phase:
    """Prompts of one kind that are answered together."""

    name: str
    kind: str
    prompts: tuple[str, ...]


class Round(NamedTuple):
    """One round as the policy heard of it; a tuple, since it is made in the engine's loop."""

    time: float  # seconds of time.perf_counter()
    steps: int
    rows: int
    accepted: int  # drafts of all rows


@dataclass(frozen=True)
class PhaseRun:
    """What one run of a phase took and gave."""

    start: float
    seconds: float
    metas: list[dict[str, Any]]
    output_ids: list[list[int]]


class RecordingPolicy:
    """A policy that also writes down every round.

    While ``is_warming`` it runs each tier in turn and keeps the rounds from the policy, which so
    begins its first measured round as at a start.
    """

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.rounds: list[Round] = []
        self.is_warming = False

    def steps_for_batch(self, batch_size: int) -> int:
        """The policy's tier; in the warm-up another one every few rounds."""
        if not self.is_warming:
            return int(self.policy.steps_for_batch(batch_size))
        tiers = self.policy.candidate_steps
        return int(tiers[len(self.rounds) // WARM_UP_ROUNDS % len(tiers)])

    def on_verify_complete(
        self, num_accepted_drafts: Sequence[int], *, executed_steps: int, batch_size: int
    ) -> bool:
        """Write a round down and hand it on."""
        self.rounds.append(
            Round(
                time.perf_counter(),
                executed_steps,
                len(num_accepted_drafts),
                sum(num_accepted_drafts),
            )
        )
        if self.is_warming:
            return False
        return bool(
            self.policy.on_verify_complete(
                num_accepted_drafts, executed_steps=executed_steps, batch_size=batch_size
            )
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)


def make_phases(workload: str, num_requests: int) -> list[Phase]:
    """The phases of a workload; a kind that comes again goes on with its next prompts."""
    used = dict.fromkeys(PROMPTS, 0)
    phases: list[Phase] = []
    for kind in WORKLOADS[workload]:
        first = used[kind]
        used[kind] += num_requests
        texts = PROMPTS[kind]
        chosen = tuple(texts[i % len(texts)] for i in range(first, used[kind]))
        number = 1 + sum(phase.kind == kind for phase in phases)
        is_alone = WORKLOADS[workload].count(kind) == 1
        phases.append(Phase(kind if is_alone else f"{kind}_{number}", kind, chosen))
    return phases


def is_steps(mode: str) -> bool:
    """Whether a mode is a fixed number of drafted tokens."""
    return mode.isascii() and mode.isdecimal() and not mode.startswith("0")


def figures(runs: Sequence[PhaseRun]) -> dict[str, Any]:
    """Figures of one or more phases that ran one after the other.

    ``accept_len`` is tokens a verify, prefill's included and plain rounds left out; ``latency``
    is from the moment a request is admitted.
    """
    metas = [meta for run in runs for meta in run.metas]
    tokens = sum(meta["completion_tokens"] for meta in metas)
    verifies = sum(meta.get("spec_verify_ct", 0) for meta in metas)
    speculated = sum(
        meta["spec_accept_length"] * meta["spec_verify_ct"]
        for meta in metas
        if meta.get("spec_verify_ct")
    )
    rounds: dict[str, int] = {}
    for meta in metas:
        for steps, count in meta.get("spec_rounds_by_steps", {}).items():
            rounds[steps] = rounds.get(steps, 0) + count
    seconds = sum(run.seconds for run in runs)
    return {
        "seconds": seconds,
        "completion_tokens": tokens,
        "throughput": tokens / seconds,
        "latency": statistics.fmean(m["e2e_latency"] - (m["queue_time"] or 0.0) for m in metas),
        "accept_len": speculated / verifies if verifies else None,
        "verifies": verifies,
        "wasted_drafts": sum(meta.get("spec_num_wasted_drafts", 0) for meta in metas),
        "row_rounds_by_steps": dict(sorted(rounds.items(), key=lambda item: int(item[0]))),
    }


def median_figures(repeats: Sequence[Sequence[PhaseRun]]) -> dict[str, Any]:
    """The figures of the repeat of median duration (the lower one of two)."""
    ordered = sorted(map(figures, repeats), key=lambda row: row["seconds"])
    return ordered[(len(ordered) - 1) // 2]


def ratios(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Throughput of each adaptive mode over the best and worst fixed tier and over plain decoding.

    Plain decoding is none of the fixed tiers, all of which draft.

    Args:
        rows: figures by mode.
    """
    fixed = [row["throughput"] for mode, row in rows.items() if is_steps(mode)]
    result: dict[str, dict[str, float]] = {}
    for mode in POLICIES:
        if mode in rows:
            own = rows[mode]["throughput"]
            result[mode] = {}
            if fixed:
                result[mode] |= {"best_static": own / max(fixed), "worst_static": own / min(fixed)}
            if "plain" in rows:
                result[mode]["plain"] = own / rows["plain"]["throughput"]
    return result


def timeline(
    phases: Sequence[Phase], runs: Sequence[PhaseRun], rounds: Sequence[Round]
) -> dict[str, Any]:
    """Phases and rounds of a run in seconds since its start, without the time between phases."""
    marks, records, start = [], [], 0.0
    for phase, run in zip(phases, runs, strict=True):
        end = start + run.seconds
        marks.append({"name": phase.name, "kind": phase.kind, "start": start, "end": end})
        records += [
            record._asdict() | {"time": record.time - run.start + start}
            for record in rounds
            if run.start <= record.time <= run.start + run.seconds
        ]
        start = end
    return {"phases": marks, "rounds": records}


def summarize(
    phases: Sequence[Phase],
    runs: Mapping[str, Sequence[Sequence[PhaseRun]]],
    records: Mapping[str, RecordingPolicy | None],
    policies: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that is shown and written, as JSON values."""
    overall = {mode: median_figures(repeats) for mode, repeats in runs.items()}
    by_phase = {
        phase.name: {
            mode: median_figures([[run[i]] for run in repeats]) for mode, repeats in runs.items()
        }
        for i, phase in enumerate(phases)
    }
    texts = [
        [ids for phase in run for ids in phase.output_ids]
        for repeats in runs.values()
        for run in repeats
    ]
    same = [
        ids == reference for other in texts for ids, reference in zip(other, texts[0], strict=True)
    ]
    timelines = {}
    for mode, record in records.items():
        if record is not None:
            ordered = sorted(runs[mode], key=lambda run: sum(phase.seconds for phase in run))
            shown = ordered[(len(ordered) - 1) // 2]
            timelines[mode] = timeline(phases, shown, record.rounds)
    return {
        "settings": dict(settings),
        "overall": overall,
        "phases": by_phase,
        "ratios": {"overall": ratios(overall)}
        | {name: ratios(rows) for name, rows in by_phase.items()},
        "seconds": {
            mode: [[phase.seconds for phase in run] for run in repeats]
            for mode, repeats in runs.items()
        },
        "full_depth": full_depth({p.name: p.kind for p in phases}, by_phase),
        "equal_share": sum(same) / len(same),
        "policies": dict(policies),
        "timelines": timelines,
    }


def full_depth(
    kinds: Mapping[str, str], by_phase: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> dict[str, Any] | None:
    """Accept length of each kind of prompt with the most steps of the fixed modes."""
    fixed = [int(mode) for rows in by_phase.values() for mode in rows if is_steps(mode)]
    if not fixed:
        return None
    steps = max(fixed)
    lengths = {}
    for kind in dict.fromkeys(kinds.values()):
        rows = [by_phase[name][str(steps)] for name in by_phase if kinds[name] == kind]
        verifies = sum(row["verifies"] for row in rows)
        lengths[kind] = sum(row["accept_len"] * row["verifies"] for row in rows) / verifies
    ratio = lengths["high"] / lengths["low"] if len(lengths) == 2 else None
    return {"steps": steps, "accept_len": lengths, "high_over_low": ratio}
