"""The documents agree with the data that they show, and their links lead somewhere."""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md")})
BATCHES = ("1", "8", "32")


def measured_rounds() -> list[dict[str, str]]:
    with (ROOT / "docs" / "rounds.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_table_of_rounds_shows_the_data() -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    table = text.split("<!-- rounds.csv -->\n", 1)[1].split("\n\n", 1)[0].replace("*", "")
    shown, drafts = [], ""
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        drafts = cells[0] or drafts
        shown.append((drafts, *cells[1:]))
    rows = sorted(measured_rounds(), key=lambda row: int(row["drafts"]))
    assert shown == [
        (row["drafts"], f"{row['engine']} {row['version']}", *(row[b] for b in BATCHES))
        for row in rows
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_plot_of_rounds_shows_the_data(theme: str) -> None:
    text = (ROOT / "docs" / f"rounds-{theme}.svg").read_text(encoding="utf-8")
    drawn = sorted(re.findall(r">\s*(\d+\.\d\d)</text>", text))
    assert drawn == sorted(row[batch] for row in measured_rounds() for batch in BATCHES)


def anchors_of(document: Path) -> set[str]:
    """The anchors that a page of GitHub gives to the titles of a document."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|srcset)=\"([^\"]+)\"", text)
    dead = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if "://" in path:
            continue
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            dead.append(link)
    assert dead == []
