"""Stream the weights of a checkpoint from its files, so that few are in host memory at once."""

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from specjax.checkpoints.checkpoint import Checkpoint
from specjax.checkpoints.tensors import TensorInfo, TensorSource, make_weight
from specjax.compiling.pool import usable_cores
from specjax.models.declare import Recipe

# Host memory for weights that are read ahead, in sizes of the largest weight. The weight before
# them, or its pieces for the devices, adds one size: 8.2 at most in 120 loads.
SIZES_AHEAD = 7
MAX_THREADS = 8


def stream_weights(checkpoint: Checkpoint[Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Read the weights of a checkpoint by the engine's names, as whole arrays, the largest first.

    Threads read ahead, in at most ``SIZES_AHEAD`` times the memory of the largest weight. Raises
    ValueError if a tensor does not fit the configuration or cannot be read.
    """
    checkpoint.check_weights()
    if checkpoint.is_in_memory:
        yield from checkpoint.load_weights().items()
        return
    source, recipes = checkpoint.source(), checkpoint.recipes
    costs = {name: _cost(recipe, source) for name, recipe in recipes.items()}
    room = SIZES_AHEAD * max(map(_own_bytes, recipes.values()))
    waiting = deque(sorted(recipes, key=lambda name: -costs[name]))
    started = deque[tuple[str, Future[np.ndarray]]]()
    used = 0
    pool = ThreadPoolExecutor(min(MAX_THREADS, usable_cores()))
    try:
        while waiting or started:
            while waiting and (not started or used + costs[waiting[0]] <= room):
                name = waiting.popleft()
                used += costs[name]
                dtype = np.dtype(recipes[name].dtype)
                started.append((name, pool.submit(make_weight, recipes[name], source, dtype)))
            name, future = started.popleft()
            yield name, future.result()
            del future
            used -= costs[name]
    finally:
        pool.shutdown(cancel_futures=True)


def _cost(recipe: Recipe, source: TensorSource) -> int:
    """The most bytes of host memory while a weight is made: itself and its tensors."""
    dtype = np.dtype(recipe.dtype)

    def read_bytes(info: TensorInfo) -> int:
        size, stored = math.prod(info.shape), np.dtype(info.dtype)
        # a conversion of bfloat16 needs twice the memory of its result
        return size * stored.itemsize + (0 if stored == dtype else 2 * size * dtype.itemsize)

    infos = [source.infos[part.name] for part in recipe.parts]
    if recipe.stacks:  # a stack is held until its last slice is read
        return _own_bytes(recipe) + sum(map(read_bytes, infos))
    # each tensor is held until the next one is read
    held = max(math.prod(info.shape) for info in infos) * dtype.itemsize if len(infos) > 1 else 0
    return _own_bytes(recipe) + max(map(read_bytes, infos)) + held


def _own_bytes(recipe: Recipe) -> int:
    return math.prod(recipe.shape) * np.dtype(recipe.dtype).itemsize
