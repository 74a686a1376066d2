"""Test-wide settings: everything runs on the CPU unless a GPU is asked for."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from hypothesis import settings

from .tiny_engines import Files, engine_files

# the same examples in every run
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")

MANY_MAPPINGS = 15_000


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where the default backend is no GPU."""
    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(autouse=True, scope="module")
def _few_executables(request: pytest.FixtureRequest) -> Iterator[None]:
    """Executables of a module go with it, and those that modules share where there are many.

    On a CPU each takes several memory mappings, and a process that has used up the 65,530 that
    Linux grants crashes inside the compiler.
    """
    yield
    modules = [request.module]
    if num_mappings() > MANY_MAPPINGS:
        modules = [module for name, module in sys.modules.items() if name.startswith("tests.")]
    for module in modules:
        for value in list(vars(module).values()):
            clear = getattr(value, "cache_clear", None)
            if clear is not None and value.__module__ == module.__name__:
                clear()
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    """Tiny checkpoints, and the compile cache that the engines of a module share."""
    with engine_files(tmp_path_factory.mktemp("engine")) as made:
        yield made


def num_mappings() -> int:
    """Memory mappings of this process; 0 where the system does not tell."""
    try:
        return len(Path("/proc/self/maps").read_bytes().splitlines())
    except OSError:
        return 0
