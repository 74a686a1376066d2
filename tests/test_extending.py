"""Run the algorithm of docs/extending.md as extracted from the page."""

import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from specjax.speculative import catalog

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_line_count_matches_the_page() -> None:
    module = blocks("python")[0]
    assert len(module.splitlines()) <= 60


@pytest.mark.parametrize(
    ("module", "names"), re.findall(r"^\| `(specjax[\w.]*)` \| (.*) \|$", PAGE, re.MULTILINE)
)
def test_stable_names_exist(module: str, names: str) -> None:
    found = import_module(module)
    assert [name for name in re.findall(r"`(\w+)`", names) if not hasattr(found, name)] == []


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin is installed under its entry point and passes its own test."""
    module, test, _ = blocks("python")
    (source,) = blocks("toml")
    settings = tomllib.loads(source)
    ((name, package),) = settings["project"]["entry-points"][catalog.GROUP].items()
    assert settings["tool"]["setuptools"]["py-modules"] == [package]
    (tmp_path / f"{package}.py").write_text(module)
    info = tmp_path / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{catalog.GROUP}]\n{name} = {package}\n")
    monkeypatch.setattr(catalog, "custom", {})
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}
    exec(test, names)
    try:
        names["test_lookup"](tmp_path)
    finally:
        sys.modules.pop(package, None)
