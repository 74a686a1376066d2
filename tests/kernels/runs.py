"""The implementations and modes that every kernel case runs with."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

# keyword arguments of the public functions
INTERPRET = {"implementation": "interpret"}
DEVICE = {"implementation": "pallas"}
RUNS = [
    pytest.param({"implementation": "xla"}, id="reference"),
    pytest.param(INTERPRET, id="interpret"),
    pytest.param(DEVICE, id="gpu", marks=pytest.mark.gpu),
]


@cache
def _jitted(function: Callable[..., Any], options: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(partial(function, **dict(options)))


def run_jitted(function: Callable[..., Any], run: dict[str, Any], *args: np.ndarray) -> Any:
    """``function(*args, **run)`` under jit, compiled once for each shape."""
    return jax.tree.map(np.asarray, _jitted(function, tuple(run.items()))(*map(jnp.asarray, args)))
