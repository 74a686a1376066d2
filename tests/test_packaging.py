"""The installed package matches the source tree and pyproject.toml."""

import importlib
import importlib.util
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points, metadata, version
from pathlib import Path

import pytest

import specjax

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def source_packages() -> set[str]:
    """List all folders with Python files under specjax/, and kernels/ as specjax.kernels."""
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "specjax").rglob("*.py")}
    return {".".join(folder.parts) for folder in folders} | {"specjax.kernels"}


def test_packages_equal_the_source_tree() -> None:
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(source_packages())


def test_every_package_has_an_init_file() -> None:
    folders = {name: ROOT.joinpath(*name.split(".")) for name in source_packages()}
    folders["specjax.kernels"] = ROOT / "kernels"
    assert [name for name, folder in folders.items() if not (folder / "__init__.py").exists()] == []


def test_kernels_is_flat() -> None:
    assert list((ROOT / "kernels").glob("*/*.py")) == []


def test_versions_agree() -> None:
    assert specjax.__version__ == version("specjax") == PYPROJECT["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{specjax.__version__}]" in changelog


def test_kernels_import_under_specjax_only() -> None:
    assert importlib.import_module("specjax.kernels").__name__ == "specjax.kernels"
    assert str(ROOT) not in sys.path
    found = importlib.util.find_spec("kernels")
    assert found is None or not str(found.origin).startswith(str(ROOT))


def test_the_command_is_installed() -> None:
    (command,) = entry_points(group="console_scripts", name="specjax")
    assert command.value == "specjax.cli:main"
    assert callable(command.load())


def test_metadata() -> None:
    assert metadata("specjax")["License-Expression"] == "Apache-2.0"
    extras = set(metadata("specjax").get_all("Provides-Extra") or ())
    assert {"cuda12", "cuda13", "demo", "train", "dev"} <= extras


def test_public_names_are_exported() -> None:
    assert {"Engine", "SamplingParams"} <= set(specjax.__all__)
    assert [name for name in specjax.__all__ if not hasattr(specjax, name)] == []


@pytest.mark.slow
def test_import_has_no_side_effects() -> None:
    code = (
        "import os, sys, logging; before = dict(os.environ); import specjax.testing; import jax;"
        "assert dict(os.environ) == before;"
        "assert logging.getLogger('specjax').handlers == [];"
        "assert not jax._src.xla_bridge._backends, 'a backend was started';"
        "assert not {'pytest', 'hypothesis', 'uvicorn', 'starlette'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "tests", timeout=120)


@pytest.mark.slow
def test_wheel_contents(tmp_path: Path) -> None:
    # a copy, as setuptools writes files next to the sources and packages files that it finds there
    source = tmp_path / "source"
    for name in ("specjax", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*command, "--wheel-dir", tmp_path, source], check=True, timeout=600)
    (wheel,) = tmp_path.glob("specjax-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {f"specjax/{path.relative_to(ROOT / 'specjax')}" for path in modules_in("specjax")}
    modules |= {f"specjax/kernels/{path.name}" for path in modules_in("kernels")}
    assert {name for name in names if name.endswith(".py")} == modules
    data = {"specjax/py.typed", "specjax/engine/names.toml", "specjax/training/openings.json"}
    assert data <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"specjax"}
    heads = (ROOT / "specjax" / "checkpoints" / "heads").rglob("*")
    assert {str(path.relative_to(ROOT)) for path in heads if path.is_file()} <= names
    assert wheel.stat().st_size < 44_000_000


def modules_in(folder: str) -> list[Path]:
    """List the Python files under a folder of the source tree."""
    return list((ROOT / folder).rglob("*.py"))
