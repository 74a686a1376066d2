"""Plot of an adaptive run: tier and accept length over time, and throughput of all modes."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.bench_adaptive import is_steps

# rounds over which the plotted accept length is averaged
PLOT_WINDOW = 16
PHASE_COLORS = {"low": "#e8eef7", "high": "#fbead7"}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Tier and accept length over time of each adaptive mode, and throughput by phase, as a PNG.

    Args:
        result: what :func:`specjax.bench_adaptive.summarize` returns.
        path: the file to write.
    """
    from matplotlib.figure import Figure

    timelines, settings = result["timelines"], result["settings"]
    figure = Figure(figsize=(11, 2.7 * (len(timelines) + 1)), layout="constrained")
    axes = figure.subplots(len(timelines) + 1, squeeze=False)[:, 0]
    for axis, (mode, line) in zip(axes, timelines.items(), strict=False):
        draw_timeline(axis, mode, line)
        axis.set_xlim(0, max(line["phases"][-1]["end"] for line in timelines.values()))
    draw_bars(axes[-1], result)
    figure.suptitle(
        f"{settings['model']}, {settings['dtype']}, {settings['device_kind']}: "
        f"{settings['max_tokens']} tokens a request, {settings['concurrency']} at once"
    )
    figure.savefig(path, format="png", dpi=120)


def draw_timeline(axis: Any, mode: str, line: Mapping[str, Any]) -> None:
    """Drafted tokens of each round and accept length of its verifies, phases shaded by kind."""
    for phase in line["phases"]:
        axis.axvspan(phase["start"], phase["end"], color=PHASE_COLORS[phase["kind"]], lw=0)
        middle = (phase["start"] + phase["end"]) / 2
        axis.annotate(
            phase["name"], (middle, 0.99), xycoords=("data", "axes fraction"), ha="center", va="top"
        )
    times = [record["time"] for record in line["rounds"]]
    steps = [record["steps"] for record in line["rounds"]]
    axis.step(times, steps, where="post", color="tab:blue", lw=0.8, label="drafted tokens")
    verified = [record for record in line["rounds"] if record["steps"] and record["rows"]]
    lengths = [1 + record["accepted"] / record["rows"] for record in verified]
    average = [
        statistics.fmean(lengths[max(0, i + 1 - PLOT_WINDOW) : i + 1]) for i in range(len(lengths))
    ]
    verify_times = [record["time"] for record in verified]
    label = f"accept length,\nmean of {PLOT_WINDOW} verifies"
    axis.plot(verify_times, average, color="tab:red", lw=1.6, label=label)
    axis.set_ylim(0, 1.25 * (max(steps, default=1) + 1))
    axis.set_xlabel("seconds")
    axis.set_title(f"policy {mode}", loc="left", fontsize="medium")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)


def draw_bars(axis: Any, result: Mapping[str, Any]) -> None:
    """Throughput of every mode in each phase and in the whole run."""
    groups = {**result["phases"], "whole run": result["overall"]}
    modes = result["settings"]["modes"]
    width = 0.8 / len(modes)
    for i, mode in enumerate(modes):
        places = [group - 0.4 + (i + 0.5) * width for group in range(len(groups))]
        heights = [rows[mode]["throughput"] for rows in groups.values()]
        label = f"{mode} drafted" if is_steps(mode) else mode
        axis.bar(places, heights, width=0.92 * width, label=label, color=f"C{i}")
    axis.set_xticks(range(len(groups)), list(groups))
    axis.set_ylabel("tokens / s")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)
