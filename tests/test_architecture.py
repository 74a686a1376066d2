"""Structure of the sources: layers, top-level files, and code that may depend on the algorithm."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from specjax.speculative import catalog

ROOT = Path(__file__).parents[1]
# lowest layer first; a package may import only its own files and packages of lower layers
LAYERS = (
    ("checks",),
    ("types", "config", "json_file", "logs"),
    ("kernels",),
    ("compiling",),
    ("models",),
    ("kv", "sampling", "text"),
    ("checkpoints",),
    ("speculative",),
    ("runtime",),
    ("adaptive", "metrics"),
    ("scheduling",),
    ("disaggregation",),
    ("engine",),
    ("server", "training"),
    ("cli",),
    ("integrations",),
    ("testing",),
)
LAYER = {package: i for i, packages in enumerate(LAYERS) for package in packages}


def sources() -> Iterator[tuple[Path, str]]:
    """Files of the package with their installed module names."""
    for base, prefix in ((ROOT / "specjax", "specjax"), (ROOT / "kernels", "specjax.kernels")):
        for path in sorted(base.rglob("*.py")):
            yield path, ".".join((prefix, *path.relative_to(base).with_suffix("").parts))


def imported(path: Path) -> Iterator[str]:
    """Modules that a file imports, anywhere in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def package_of(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


def test_imports_point_to_lower_layers() -> None:
    wrong = []
    for path, module in sources():
        package = package_of(module)
        if package in ("__init__", "__main__"):
            continue
        for name in imported(path):
            other = package_of(name)
            if not name.startswith("specjax.") or other == package or other not in LAYER:
                continue
            if LAYER[other] >= LAYER[package]:
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_every_package_has_a_layer() -> None:
    packages = {package_of(module) for _, module in sources()}
    assert packages - {"__init__", "__main__"} == set(LAYER)


def test_no_import_cycle() -> None:
    modules = {module.removesuffix(".__init__"): path for path, module in sources()}

    def owner(name: str) -> str | None:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name or None

    def top_level(path: Path) -> Iterator[str]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    graph = {m: {k for n in top_level(p) if (k := owner(n)) and k != m} for m, p in modules.items()}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above, module))
        if module not in done:
            for other in graph[module]:
                visit(other, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def resolved(path: Path) -> Iterator[tuple[str, ...]]:
    """Modules of the tests that a test file imports, as parts of their names."""
    folder = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            yield from ((*base, alias.name) for alias in node.names if base[0] == "tests")
        elif isinstance(node, ast.Import):
            names = (tuple(alias.name.split(".")) for alias in node.names)
            yield from (name for name in names if name[0] == "tests")


def test_tests_import_helpers_of_their_own_folder_or_of_tests_support() -> None:
    """No module imports a test's module; ``conftest`` of the tests may be imported anywhere."""
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for _, *names in resolved(path):
            home = [*path.relative_to(ROOT / "tests").parent.parts]
            is_near = names[0] in ("support", "conftest") or names[: len(home)] == home != []
            if not is_near or any(name.startswith("test_") for name in names):
                wrong.append(f"{path.relative_to(ROOT)} imports {'.'.join(names)}")
    assert not wrong


def test_few_files_at_the_top_level() -> None:
    assert len(list((ROOT / "specjax").glob("*.py"))) <= 8


def test_the_files_on_the_path_of_a_token_are_listed() -> None:
    """docs/architecture.md lists them in cells such as ``kv/`` budget, pages."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    ((count, table),) = re.findall(r"these (\d+) files [^|]*((?:\|.*\n)+)", page, re.MULTILINE)
    files = []
    for folder, names in re.findall(r"`(\w+)/?`([\w, ]*)", table):
        top = ROOT / "kernels" if folder == "kernels" else ROOT / "specjax" / folder
        files += [top / f"{name}.py" for name in re.findall(r"\w+", names)] or [
            top.with_suffix(".py")
        ]
    assert [path for path in files if not path.is_file()] == []
    assert len(set(files)) == len(files) == int(count)


def outside() -> list[Path]:
    """Sources that must not depend on the algorithm, including scripts."""
    inside = ("specjax/speculative/", "specjax/checkpoints/", "specjax/testing/")
    inside += ("specjax/training/", "scripts/train_draft.py")  # make drafts for an algorithm
    paths = [p for top in ("specjax", "kernels", "scripts") for p in (ROOT / top).rglob("*.py")]
    return [p for p in paths if not p.relative_to(ROOT).as_posix().startswith(inside)]


@pytest.mark.parametrize("path", outside(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_code_outside_does_not_depend_on_the_algorithm(path) -> None:
    """It contains no names or predicates of algorithms and does not test for a draft."""
    text = path.read_text()
    known = {*catalog.names(), *catalog.ALIASES}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value not in known, f"{path.name}:{node.lineno} {node.value!r}"
    kinds = "none|speculative|eagle3?|standalone|ngram|dflash"
    assert not re.search(rf"\.is_({kinds})\(", text)
    assert not re.search(r"\b(heads?|drafts?)(_config|_model)? is (not )?None", text)
