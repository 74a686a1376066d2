"""Test-wide settings: everything runs on the CPU unless a GPU is asked for."""

import gc
from collections.abc import Iterator

import jax
import pytest


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
    """Executables of a module go with it.

    On a CPU each takes several memory mappings, and a process that has used up the 65,530 that
    Linux grants crashes inside the compiler.
    """
    yield
    for value in vars(request.module).values():
        clear = getattr(value, "cache_clear", None)
        if clear is not None and getattr(value, "__module__", None) == request.module.__name__:
            clear()
    jax.clear_caches()
    gc.collect()
