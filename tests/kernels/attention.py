"""Tree attention in float64, random inputs, and the implementations of attention."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

BOUNDS = {"float32": 1e-5, "bfloat16": 2e-2}


def make_case(case, dtype, tree, seed=0):
    batch, rows, heads, kv_heads, dim, page_size, pages = case
    rng = np.random.default_rng(seed)
    slots = (batch * pages + 1) * page_size
    pool = jnp.asarray(rng.standard_normal((2, slots, 2, kv_heads, dim)), dtype)
    q = jnp.asarray(rng.standard_normal((batch, rows, heads, dim)), dtype)
    table = rng.permutation(np.arange(1, batch * pages + 1)).reshape(batch, pages)
    lens = rng.integers(0, pages * page_size - rows + 1, size=batch)
    lens[0] = 0
    if batch > 2:
        # a padding row without pages
        table[1], lens[1] = 0, 0
    mask = np.broadcast_to(np.tri(rows, dtype=bool), (batch, rows, rows)).copy()
    if tree:
        for b in range(batch):
            for t in range(1, rows):
                mask[b, t, : t + 1] = mask[b, rng.integers(0, t), : t + 1]
                mask[b, t, t] = True
    ints = [jnp.asarray(x, jnp.int32) for x in (table, lens)]
    return q, pool, *ints, jnp.asarray(mask), page_size


def brute_force(
    q,
    pool,
    table,
    lens,
    mask,
    page_size,
    layer=1,
    window=None,
    *,
    tree=False,
    softcap=1e9,
    sinks=None,
    sink_tokens=0,
):
    """Each row in float64 over an explicit list of visible slots.

    The path of a row of a ``tree`` counts back from the row; other rows are consecutive.
    """
    q, pool, table, lens, mask = (np.asarray(x) for x in (q, pool, table, lens, mask))
    q, pool = q.astype(np.float64), pool.astype(np.float64)
    out = np.zeros_like(q)
    group = q.shape[2] // pool.shape[3]
    for b, t, n in np.ndindex(*q.shape[:3]):
        keys = np.r_[0 : lens[b], lens[b] + np.flatnonzero(mask[b, t])]
        if window is not None:
            places, end = keys, lens[b] + mask.shape[2] - mask.shape[1] + t
            if tree:
                places, end = np.arange(len(keys)), len(keys) - 1
            keys = keys[(places > end - window) | (places < sink_tokens)]
        slots = [table[b, j // page_size] * page_size + j % page_size for j in keys]
        k, v = pool[layer, slots, 0, n // group], pool[layer, slots, 1, n // group]
        scores = k @ q[b, t, n] / np.sqrt(q.shape[3])
        scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores)
        total = weights.sum() + (0.0 if sinks is None else np.exp(np.float64(sinks[n])))
        out[b, t, n] = weights @ v / total
    return out


def relative_error(out, expected):
    return np.abs(np.asarray(out, np.float64) - expected).max() / np.abs(expected).max()


class Forms:
    """The implementations of a function, and marks of tests that run each of them.

    Attributes:
        on_cpu: sets ``function`` to each implementation but the kernel.
        with_kernel: sets ``function`` to each implementation.
        with_kernel_dtypes: also sets ``dtype``, which is float32 except for the kernel.
    """

    def __init__(self, function):
        names = {"reference": "xla", "chunked": "chunked", "interpret": "interpret"}
        forms = {key: partial(function, implementation=name) for key, name in names.items()}
        self.reference, self.chunked, self.interpret = forms.values()
        self.pallas = partial(function, implementation="pallas")
        cases = [pytest.param(form, id=key) for key, form in forms.items()]
        self.on_cpu = pytest.mark.parametrize("function", cases)
        kernel = pytest.param(self.pallas, marks=pytest.mark.gpu, id="gpu")
        self.with_kernel = pytest.mark.parametrize("function", [*cases, kernel])
        cases = [pytest.param(form, "float32", id=key) for key, form in forms.items()]
        cases += [
            pytest.param(self.pallas, dtype, marks=pytest.mark.gpu, id=f"gpu-{dtype}")
            for dtype in BOUNDS
        ]
        self.with_kernel_dtypes = pytest.mark.parametrize(("function", "dtype"), cases)
