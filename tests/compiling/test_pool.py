"""The pool of compiled functions, and the folder of the persistent cache."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from specjax import compiling
from specjax.compiling.cache import FOLDER, open_compile_cache
from specjax.compiling.pool import CompilePool, on_progress, usable_cores

from ..support.compilation import kept_cache_settings


@pytest.fixture
def no_cache():
    """JAX without a compile cache; settings of a test end with it."""
    with kept_cache_settings():
        jax.config.update("jax_compilation_cache_dir", None)
        yield


def compile_something(tag: float) -> None:
    """Compile a function that nothing else compiles."""
    jax.jit(lambda x: x * tag + 1).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()


def num_files(folder: Path) -> int:
    return sum(path.is_file() for path in folder.iterdir())


def folder_of(directory: str | Path) -> Path:
    cache = open_compile_cache(directory)
    assert cache is not None
    assert cache.path.name == FOLDER
    return cache.path.parent


def configured() -> str | None:
    return jax.config.jax_compilation_cache_dir


def test_none_leaves_jax_alone(no_cache) -> None:
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    assert open_compile_cache(None) is None
    assert configured() is None
    assert jax.config.jax_persistent_cache_min_compile_time_secs == before


def test_another_folder_takes_over(no_cache, tmp_path) -> None:
    folder_of(tmp_path / "one")
    assert (tmp_path / "one").stat().st_mode & 0o077 == 0  # its contents are executed
    compile_something(1.5)
    assert num_files(tmp_path / "one") > 0
    count = num_files(tmp_path / "one")
    folder_of(str(tmp_path / "two"))
    compile_something(1.75)
    assert num_files(tmp_path / "one") == count
    assert num_files(tmp_path / "two") > 0


@pytest.mark.parametrize("xdg", [None, "", "xdg"])
def test_auto_is_the_users_cache_folder(no_cache, tmp_path, monkeypatch, xdg) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if xdg is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg and str(tmp_path / xdg))
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / (xdg or ".cache") / "specjax"
    assert folder_of("auto") == folder
    assert configured() == str(folder)


def test_auto_uses_jaxs_configured_folder(no_cache, tmp_path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    assert folder_of("auto") == tmp_path / "mine"
    assert configured() == str(tmp_path / "mine")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == before


def unknown_home(path: Path) -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("what", ["file", "shared", "inner", "home", "url"])
def test_a_folder_that_cannot_be_used(no_cache, tmp_path, monkeypatch, caplog, what) -> None:
    """``auto`` works without it, a named one is refused; JAX executes nothing from it."""
    named = tmp_path / "specjax"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if what == "file":
        named.write_text("")
    elif what == "home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "expanduser", unknown_home)
    elif what == "url":
        named = Path("gs://bucket")
        jax.config.update("jax_compilation_cache_dir", "gs://bucket/cache")
    else:
        folder = named / FOLDER if what == "inner" else named
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    before = configured()
    assert open_compile_cache("auto") is None
    assert "compile_cache_dir" in caplog.text
    for directory in (str(named), named, *([""] if what == "url" else [])):
        with pytest.raises(ValueError, match=r"compile_cache_dir=.* is refused: "):
            open_compile_cache(directory)
    assert configured() == before


@pytest.mark.parametrize("is_terminal", [True, False])
def test_pool_compiles_and_refuses_other_shapes(capsys, caplog, monkeypatch, is_terminal) -> None:
    caplog.set_level("INFO", "specjax.compiling")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    pool = CompilePool()
    double = jax.jit(lambda x: 2 * x)
    for n in (2, 3):
        pool.add(("double", n), double, (jax.ShapeDtypeStruct((n,), jnp.float32),))
    assert len(pool) == 0
    seen: list[tuple[int, int]] = []
    token = on_progress.set(lambda *counts: seen.append(counts))
    pool.compile(show_progress=True)
    on_progress.reset(token)
    assert sorted(seen) in ([(0, 2), (1, 2), (2, 2)], [(0, 2), (2, 2), (2, 2)])
    assert ("compiling: 100%" in capsys.readouterr().err) is is_terminal
    assert ("2 of 2 functions ready" in caplog.messages) is not is_terminal
    assert len(pool) == 2
    assert pool["double", 3](jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(TypeError):
        pool["double", 3](jnp.ones(2))
    pool.compile(show_progress=False)  # nothing left to do
    assert capsys.readouterr().err == ""


def test_a_function_is_compiled_at_its_first_use() -> None:
    pool = CompilePool()
    double = jax.jit(lambda x: 2 * x)
    for n in (2, 3, 4):
        pool.add(("double", n), double, (jax.ShapeDtypeStruct((n,), jnp.float32),))
    assert pool["double", 3](jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert pool["double", 4] is pool["double", 4]
    assert [found.key for found in pool.report] == ["double 3", "double 4"]
    with pytest.raises(KeyError):
        pool["double", 5]
    pool.compile(show_progress=False)
    assert [found.key for found in pool.report][2:] == ["double 2"]


@pytest.mark.parametrize(
    ("quota", "count"), [("max 100000", 3), ("150000 100000", 1), ("200000 100000", 2), ("", 3)]
)
def test_threads_use_the_cores_of_the_container(quota, count, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 5, 9}, raising=False)
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_cores(tmp_path / "cpu.max") == count
    assert usable_cores(tmp_path / "none") == 3


def test_no_pool_counts_the_cores_of_the_host() -> None:
    sources = Path(compiling.__file__).parents[1]
    users = [path.name for path in sources.rglob("*.py") if "cpu_count" in path.read_text()]
    assert users == ["commands.py"]  # which reports them
