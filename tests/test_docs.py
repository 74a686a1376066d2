"""The documents agree with the data that they show, and their links lead somewhere."""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md")})
BATCHES = ("1", "8", "32")
LENGTHS = ("accept length",)


def measured(name: str) -> list[dict[str, str]]:
    with (ROOT / "docs" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table_of(name: str) -> list[list[str]]:
    """Cells of the table that follows the comment with the name of the data."""
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    table = text.split(f"<!-- {name}.csv -->\n", 1)[1].split("\n\n", 1)[0].replace("*", "")
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]
    ]


def test_the_table_of_rounds_shows_the_data() -> None:
    shown, drafts = [], ""
    for cells in table_of("rounds"):
        drafts = cells[0] or drafts
        shown.append((drafts, *cells[1:]))
    rows = sorted(measured("rounds"), key=lambda row: int(row["drafts"]))
    assert shown == [
        (row["drafts"], f"{row['engine']} {row['version']}", *(row[b] for b in BATCHES))
        for row in rows
    ]


def test_the_table_of_acceptance_shows_the_data() -> None:
    shown = [cells[:3] for cells in table_of("acceptance") if cells[0] != "both"]
    assert shown == [list(row.values()) for row in measured("acceptance")]


def test_the_table_of_contexts_shows_the_data() -> None:
    shown, head = [], ""
    for cells in table_of("contexts"):
        head = cells[0] or head
        shown.append([head, *cells[1:]])
    rows = [list(row.values()) for row in measured("contexts")]
    assert shown == [[head, f"{int(count):,}", *values] for head, count, *values in rows]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("name", "columns"), [("rounds", BATCHES), ("acceptance", LENGTHS)])
def test_the_plots_show_the_data(name: str, columns: tuple[str, ...], theme: str) -> None:
    text = (ROOT / "docs" / f"{name}-{theme}.svg").read_text(encoding="utf-8")
    drawn = sorted(re.findall(r">\s*(\d+\.\d\d)</text>", text))
    assert drawn == sorted(row[column] for row in measured(name) for column in columns)


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


def test_programs_make_the_clients_as_the_table_says() -> None:
    text = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    table = text.split("| client | settings | checked |\n|---|---|---|\n", 1)[1].split("\n\n", 1)[0]
    by_hand = []
    for client, settings, checked in (line.strip("| ").split(" | ") for line in table.splitlines()):
        if checked == "by hand":
            by_hand.append(client)
            continue
        programs = ""
        for test in re.findall(r"`(tests/clients/\w+\.py)`", checked):
            source = (ROOT / test).read_text(encoding="utf-8")
            for name in re.findall(r"run_program\(\s*\"(\w+)\"", source):
                path = ROOT / "tests" / "clients" / "programs" / f"{name}.py"
                programs += path.read_text(encoding="utf-8")
        (call,) = re.match(r"`([\w.]+)", settings).groups()  # type: ignore[union-attr]
        assert re.search(rf"\b{re.escape(call)}\b", programs), client
    assert len(by_hand) == 7
