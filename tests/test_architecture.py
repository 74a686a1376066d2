"""The structure of the sources: floors, files at the top, and who may ask which algorithm it is."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from specjax.speculative import registry

ROOT = Path(__file__).parents[1]
# from the ground up; rooms of one floor may not import each other, a room its own files only
FLOORS = (
    ("checks",),
    ("types", "config", "json_file"),
    ("kernels",),
    ("models",),
    ("kv", "sampling", "text"),
    ("checkpoints",),
    ("speculative",),
    ("compiling",),
    ("runtime",),
    ("adaptive", "metrics"),
    ("scheduling",),
    ("disaggregation",),
    ("engine",),
    ("server", "training"),
    ("cli",),
    ("testing",),
)
FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}


def sources() -> Iterator[tuple[Path, str]]:
    """Files of the package with the module names that they install as."""
    for base, prefix in ((ROOT / "specjax", "specjax"), (ROOT / "kernels", "specjax.kernels")):
        for path in sorted(base.rglob("*.py")):
            yield path, ".".join((prefix, *path.relative_to(base).with_suffix("").parts))


def imported(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def room_of(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


def test_nothing_imports_upwards_and_rooms_of_one_floor_stay_apart() -> None:
    wrong = []
    for path, module in sources():
        room = room_of(module)
        if room in ("__init__", "__main__"):
            continue
        for name in imported(path):
            other = room_of(name)
            if not name.startswith("specjax.") or other == room or other not in FLOOR:
                continue
            if FLOOR[other] >= FLOOR[room]:
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(module) for _, module in sources()}
    assert rooms - {"__init__", "__main__"} == set(FLOOR)


def test_no_circle_between_files() -> None:
    modules = {module.removesuffix(".__init__"): path for path, module in sources()}

    def known(name: str) -> str | None:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name or None

    def top_level(path: Path) -> Iterator[str]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    graph = {m: {k for n in top_level(p) if (k := known(n)) and k != m} for m, p in modules.items()}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above, module))
        if module not in done:
            for other in graph[module]:
                visit(other, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_the_top_is_small() -> None:
    assert len(list((ROOT / "specjax").glob("*.py"))) <= 8


def test_the_files_on_the_way_of_a_token_are_listed() -> None:
    """In docs/architecture.md: cells like ``kv/`` budget, pages, each folder in backticks."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    ((count, table),) = re.findall(r"^These (\d+) files [^|]*((?:\|.*\n)+)", page, re.MULTILINE)
    files = []
    for folder, names in re.findall(r"`(\w+)/?`([\w, ]*)", table):
        top = ROOT / "kernels" if folder == "kernels" else ROOT / "specjax" / folder
        files += [top / f"{name}.py" for name in re.findall(r"\w+", names)] or [
            top.with_suffix(".py")
        ]
    assert [path for path in files if not path.is_file()] == []
    assert len(set(files)) == len(files) == int(count)


def outside() -> list[Path]:
    """Sources that must not know which algorithm it is, scripts included."""
    inside = ("specjax/speculative/", "specjax/checkpoints/", "specjax/testing/")
    paths = [p for top in ("specjax", "kernels", "scripts") for p in (ROOT / top).rglob("*.py")]
    return [p for p in paths if not p.relative_to(ROOT).as_posix().startswith(inside)]


@pytest.mark.parametrize("path", outside(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_nobody_asks_which_algorithm_it_is(path) -> None:
    """Neither by a literal of its name, nor by its predicate, nor by whether there is a draft."""
    text = path.read_text()
    names = {*registry.names(), *registry.ALIASES}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value not in names, f"{path.name}:{node.lineno} {node.value!r}"
    kinds = "none|speculative|eagle3?|standalone|ngram|dflash"
    assert not re.search(rf"\.is_({kinds})\(", text)
    assert not re.search(r"\b(heads?|drafts?)(_config|_model)? is (not )?None", text)
