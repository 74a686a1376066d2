"""Draw docs/rounds-light.svg and docs/rounds-dark.svg from docs/rounds.csv; needs matplotlib."""

import csv
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

DOCS = Path(__file__).parent.parent / "docs"
BATCHES = ("1", "8", "32")
INKS = {
    "light": ("#1f2328", {"specjax": "#0969da", "SGLang": "#afb8c1", "vLLM": "#6e7781"}),
    "dark": ("#e6edf3", {"specjax": "#58a6ff", "SGLang": "#6e7681", "vLLM": "#afb8c1"}),
}


def draw(rows: list[dict[str, str]], theme: str) -> None:
    """Write one picture: a panel per batch size, a group of bars per number of drafts."""
    ink, colours = INKS[theme]
    # texts stay texts, so that the figures can be read from the file
    style = {"svg.fonttype": "none", "svg.hashsalt": "specjax", "font.family": "sans-serif"}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "axes.edgecolor"), ink)
    with plt.rc_context(style):
        figure, panels = plt.subplots(1, 3, figsize=(9.6, 3.0), layout="constrained")
        for batch, axes in zip(BATCHES, panels, strict=True):
            for i, (engine, colour) in enumerate(colours.items()):
                mine = [row for row in rows if row["engine"] == engine]
                places = [x + 0.28 * (i - 1) for x in range(len(mine))]
                label = f"{engine} {mine[0]['version']}"
                values = [float(row[batch]) for row in mine]
                bars = axes.bar(places, values, 0.26, color=colour, label=label)
                axes.bar_label(bars, [row[batch] for row in mine], fontsize=6, padding=1.5)
            drafts = [int(row["drafts"]) for row in mine]
            names = ["plain", *(f"{n} draft{'s' * (n > 1)}" for n in drafts[1:])]
            axes.set_xticks(range(len(names)), names, fontsize=8)
            axes.set_yticks([])
            axes.spines[["top", "left", "right"]].set_visible(False)
            axes.set_title(f"batch of {batch}", fontsize=9)
        panels[0].set_ylabel("ms per round (lower is better)", fontsize=8)
        labels = panels[0].get_legend_handles_labels()
        figure.legend(*labels, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
        path = DOCS / f"rounds-{theme}.svg"
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    with (DOCS / "rounds.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for theme in INKS:
        draw(rows, theme)


if __name__ == "__main__":
    main()
