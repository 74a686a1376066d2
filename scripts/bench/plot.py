"""Plots: throughput by phase and latencies over time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw(result: Mapping[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    modes, groups = list(result["settings"]), result["rows"]
    settings = result["settings"][modes[0]]
    figure = Figure(figsize=(11, 3), layout="constrained")
    axis = figure.subplots()
    width = 0.8 / len(modes)
    for i, mode in enumerate(modes):
        places = [group - 0.4 + (i + 0.5) * width for group in range(len(groups))]
        heights = [rows[mode]["output_throughput"] for rows in groups.values()]
        axis.bar(places, heights, width=0.92 * width, label=mode)
    axis.set_xticks(range(len(groups)), list(groups))
    axis.set_ylabel("tokens / s")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(about(settings))
    figure.savefig(path, format="png", dpi=120)


def draw_mix(result: Mapping[str, Any], traces: Sequence[Any], path: Path) -> None:
    """Time to first token and time between chunks, over the time of a run of a mixed load."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    settings, row = result["settings"], result["runs"]["Poisson"]
    figure = Figure(figsize=(11, 6), layout="constrained")
    first, gaps = figure.subplots(2, sharex=True)
    for axis in (first, gaps):
        for trace in traces:
            if trace.is_long:
                axis.axvline(trace.arrival, color="tab:red", alpha=0.35, linewidth=0.8, zorder=0)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(LogFormatter())
        axis.yaxis.set_minor_formatter(LogFormatter())
        axis.grid(axis="y", alpha=0.3)
    done = [trace for trace in traces if trace.error is None]
    for is_long, color, label in ((False, "tab:blue", "short"), (True, "tab:red", "long")):
        some = [trace for trace in done if trace.is_long == is_long]
        ttft = [1e3 * (trace.chunks[0][0] - trace.arrival) for trace in some]
        first.plot(
            [t.arrival for t in some], ttft, "o", color=color, markersize=4, label=f"{label} prompt"
        )
    first.set_ylabel("time to first token, ms")
    first.set_title("by arrival; red lines: long prompts arrive", fontsize="medium")
    first.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    points = [(end, 1e3 * gap) for trace in done for end, gap, _ in trace.gaps]
    if points:
        gaps.plot(*zip(*points, strict=True), ".", color="tab:blue", markersize=2, alpha=0.5)
        for name, style in (("p50", "--"), ("p99", ":")):
            gaps.axhline(row["chunk_gap_ms"][name], color="black", linestyle=style, label=name)
        gaps.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    gaps.set_ylabel("between chunks, ms")
    gaps.set_xlabel("s")
    figure.suptitle(f"{about(settings)}, {row['request_rate']:.2f} requests/s")
    figure.savefig(path, format="png", dpi=120)


def about(settings: Mapping[str, Any]) -> str:
    """What a picture is of, and whether acceptance was real."""
    simulated = settings["simulate_accept_length"]
    label = "" if simulated is None else f", SIMULATED: {simulated:g} tokens a verify"
    return f"{settings['model']}, {settings['dtype']}, {settings['device_kind']}{label}"
