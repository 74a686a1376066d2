"""Draw docs/NAME-light.svg and docs/NAME-dark.svg from docs/NAME.csv; needs matplotlib."""

import csv
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

DOCS = Path(__file__).parent.parent / "docs"
BATCHES = ("1", "8", "32")
INKS = {
    "light": ("#1f2328", {"specjax": "#0969da", "SGLang": "#afb8c1", "vLLM": "#6e7781"}),
    "dark": ("#e6edf3", {"specjax": "#58a6ff", "SGLang": "#6e7681", "vLLM": "#afb8c1"}),
}
LINES = {"1 draft": "s:", "3 drafts": "D--", "7 drafts": "^-.", "budget policy": "o-"}
WINDOWS = {"no window": "o-", "1,024 + 4": "^-.", "512 + 4": "D--", "256 + 4": "s:"}
PARTS = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
# keep text as text, so that values can be read from the file
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "specjax", "legend.frameon": False}


def draw_rounds(rows: list[dict[str, str]], colours: dict[str, str]) -> Any:
    """Draw a panel per batch size, with a group of bars per number of drafts."""
    figure, panels = plt.subplots(1, 3, figsize=(9.6, 3.0), layout="constrained")
    for batch, axes in zip(BATCHES, panels, strict=True):
        for i, (engine, colour) in enumerate(colours.items()):
            mine = [row for row in rows if row["engine"] == engine]
            centres = [x + 0.28 * (i - 1) for x in range(len(mine))]
            label = f"{engine} {mine[0]['version']}"
            values = [float(row[batch]) for row in mine]
            bars = axes.bar(centres, values, 0.26, color=colour, label=label)
            axes.bar_label(bars, [row[batch] for row in mine], fontsize=6, padding=1.5)
        drafts = [int(row["drafts"]) for row in mine]
        names = ["plain", *(f"{n} draft{'s' * (n > 1)}" for n in drafts[1:])]
        axes.set_xticks(range(len(names)), names)
        axes.set_title(f"batch of {batch}", fontsize=9)
    panels[0].set_ylabel("ms per round (lower is better)", fontsize=8)
    return figure


def draw_acceptance(rows: list[dict[str, str]], colours: dict[str, str]) -> Any:
    """Draw one bar for each kind of prompt."""
    figure, axes = plt.subplots(figsize=(9.6, 2.4), layout="constrained")
    lengths = [row["accept length"] for row in rows]
    bars = axes.bar(range(len(rows)), list(map(float, lengths)), 0.6, color=colours["specjax"])
    axes.bar_label(bars, lengths, fontsize=8, padding=1.5)
    names = [row["prompts"].replace(" ", "\n", 1) + f"\nn = {row['requests']}" for row in rows]
    axes.set_xticks(range(len(rows)), names)
    axes.axhline(1.0, color="gray", linewidth=0.8, linestyle="--")
    axes.set_ylabel("accept length (plain decoding: 1)", fontsize=8)
    return figure


def draw_load(rows: list[dict[str, str]], colours: dict[str, str]) -> Any:
    """Draw a panel per acceptance, with a line per number of drafts and one for the policy."""
    figure, panels = plt.subplots(1, 4, figsize=(9.6, 2.8), layout="constrained")
    rates = sorted({row["acceptance"] for row in rows})
    for rate, axes in zip(rates, panels, strict=True):
        mine = [row for row in rows if row["acceptance"] == rate]
        for name, style in LINES.items():
            speeds = [float(row[name]) / float(row["plain"]) for row in mine]
            colour = colours["specjax" if name == "budget policy" else "vLLM"]
            axes.plot(range(len(mine)), speeds, style, color=colour, label=name, markersize=4)
        axes.axhline(1.0, color="gray", linewidth=0.8, linestyle="--")
        axes.set_xticks(range(len(mine)), [row["batch"] for row in mine])
        axes.set_title(f"acceptance {rate}", fontsize=9)
    panels[0].set_ylabel("tokens/s (plain decoding: 1)", fontsize=8)
    figure.supxlabel("requests per batch", fontsize=8)
    return figure


def draw_rows(rows: list[dict[str, str]], colours: dict[str, str]) -> Any:
    """Draw the verified rows per request over time, with a line per acceptance."""
    figure, axes = plt.subplots(figsize=(9.6, 2.4), layout="constrained")
    times = [float(row["seconds"]) for row in rows]
    for rate, engine in zip(("0.9", "0.3", "0.05"), colours, strict=True):
        values = [float(row[rate] or "nan") for row in rows]
        axes.plot(times, values, color=colours[engine], label=f"acceptance {rate}")
    axes.set_xlabel("seconds", fontsize=8)
    axes.set_ylabel("verified rows per request", fontsize=8)
    axes.set_ylim(0, 8.5)
    return figure


def draw_break_even(rows: list[dict[str, str]], colours: dict[str, str]) -> Any:
    """Draw a panel per model with the accept length from which drafts gain."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 2.8), layout="constrained", sharey=True)
    for model, axes in zip(models, panels, strict=True):
        mine = [row for row in rows if row["model"] == model]
        batches = [int(row["batch"]) for row in mine]
        for (name, style), colour in zip(list(LINES.items())[:3], colours.values(), strict=True):
            lengths = [float(row[name]) / float(row["plain"]) for row in mine]
            axes.plot(batches, lengths, style, color=colour, label=name, markersize=4)
        axes.axhline(1.0, color="gray", linewidth=0.8, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, batches)
        axes.minorticks_off()
        axes.set_title(model, fontsize=9)
    panels[0].set_ylabel("accept length to gain", fontsize=8)
    figure.supxlabel("requests per batch", fontsize=8)
    return figure


def draw_contexts(rows: list[dict[str, str]], colours: dict[str, str]) -> Any:
    """Draw a panel per head, with a line per window of its drafts over the length of contexts."""
    heads = list(dict.fromkeys(row["head"] for row in rows))
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 2.8), layout="constrained", sharey=True)
    for head, axes in zip(heads, panels, strict=True):
        mine = [row for row in rows if row["head"] == head]
        lengths = [int(row["context"]) for row in mine]
        for name, style in WINDOWS.items():
            colour = colours["specjax" if name[0].isdigit() else "vLLM"]
            values = [float(row[name]) for row in mine]
            axes.plot(lengths, values, style, color=colour, label=name, markersize=4)
        axes.set_title(f"head trained on {head}", fontsize=9)
        axes.set_ylim(1.0, 3.5)
    panels[0].set_ylabel("accept length (plain decoding: 1)", fontsize=8)
    figure.supxlabel("tokens before the prompt", fontsize=8)
    return figure


DRAWINGS = (draw_rounds, draw_acceptance, draw_load, draw_rows, draw_break_even, draw_contexts)


def main() -> None:
    for draw in DRAWINGS:
        name = draw.__name__.removeprefix("draw_")
        with (DOCS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        for theme, (ink, colours) in INKS.items():
            with plt.rc_context(STYLE | dict.fromkeys(PARTS, ink)):
                figure = draw(rows, colours)
                for axes in figure.axes:
                    axes.tick_params(labelsize=8)
                    if axes.containers:  # bars have their values as text
                        axes.set_yticks([])
                    axes.spines[["top", "left", "right"]].set_visible(False)
                labels = figure.axes[0].get_legend_handles_labels()
                if any(labels):
                    figure.legend(*labels, loc="outside upper center", ncols=4, fontsize=9)
                path = DOCS / f"{name}-{theme}.svg"
                figure.savefig(path, transparent=True, metadata={"Date": None})
                plt.close(figure)


if __name__ == "__main__":
    main()
