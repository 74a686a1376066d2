"""Plot of a run: throughput of all modes by phase."""

from collections.abc import Mapping
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
    figure.suptitle(f"{settings['model']}, {settings['dtype']}, {settings['device_kind']}")
    figure.savefig(path, format="png", dpi=120)
