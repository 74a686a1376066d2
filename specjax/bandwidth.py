"""The bandwidth that a large copy reaches: what kernels bound by memory are compared with."""

import statistics
import time

import jax
import jax.numpy as jnp

REPEATS = 5
COPIES = 4


def copy_bandwidth(device: jax.Device) -> float:
    """Bytes read and written a second by an elementwise pass over 4 GiB (64 MiB on a CPU)."""
    size = 2**30 if device.platform == "gpu" else 2**24
    x = jnp.arange(size, dtype=jnp.float32)
    copy = jax.jit(lambda x: x + 1.0)
    copy(x).block_until_ready()
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(COPIES):
            y = copy(x)
        y.block_until_ready()
        seconds.append((time.perf_counter() - started) / COPIES)
    return 2 * x.nbytes / statistics.median(seconds)
