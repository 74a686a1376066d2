"""Cases of the gated delta rule, and its statement in numpy: one row of one request at a time."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from specjax.kernels.delta_inputs import DeltaGates, ReplayRows, RequestRows, Taps, delta_inputs
from specjax.kernels.delta_rule import DeltaPool, delta_replay, delta_verify
from specjax.kernels.delta_scan import delta_scan


class Sizes(NamedTuple):
    """Sizes of a pool and its layers."""

    layers: int = 2
    slots: int = 6
    key_heads: int = 2
    key_dim: int = 16
    value_heads: int = 4
    value_dim: int = 32
    taps: int = 4

    @property
    def heads(self) -> tuple[int, ...]:
        return self.key_heads, self.key_dim, self.value_heads, self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class Case(NamedTuple):
    """Inputs of all layers, with the axis L first."""

    mixed: Any  # [L, W, C]
    products: Any  # [L, W, 2 Hv]
    log_rates: Any  # [L, Hv]
    biases: Any  # [L, Hv]
    weights: Any  # [L, C, J]
    pool: DeltaPool
    rows: RequestRows

    @property
    def gates(self):
        arrays = self.products, self.log_rates, self.biases
        return [DeltaGates(*x) for x in zip(*arrays, strict=True)]


def draw(sizes: Sizes, rows: RequestRows, num_rows: int, seed=0, bias=-1.0, dtype="float32"):
    """A case of W = ``num_rows`` rows. ``bias`` is the mean one of decays: low is long memory."""
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0, mean=0.0, dtype="float32"):
        return np.asarray(jnp.asarray(mean + scale * rng.standard_normal(shape), dtype))

    layers, heads, channels = sizes.layers, sizes.value_heads, sizes.channels
    states = normal(layers, sizes.slots, heads, sizes.value_dim, sizes.key_dim)
    windows = normal(layers, sizes.slots, sizes.taps - 1, channels, dtype=dtype)
    return Case(
        normal(layers, num_rows, channels, dtype=dtype),
        normal(layers, num_rows, 2 * heads, scale=2),
        normal(layers, heads),
        normal(layers, heads, mean=bias),
        normal(layers, channels, sizes.taps, scale=0.6, dtype=dtype),
        DeltaPool(states, windows),
        RequestRows(*(np.asarray(x, np.int32) for x in rows)),
    )


def with_padding(case: Case, value: float = np.nan) -> Case:
    """The case with ``value`` in all rows without a request, which must not matter."""
    is_real = owned(case)
    changed = {}
    for name in ("mixed", "products"):
        changed[name] = np.where(is_real[:, None], getattr(case, name), value)
        changed[name] = changed[name].astype(getattr(case, name).dtype)
    return case._replace(**changed)


def owned(case: Case) -> np.ndarray:
    """Whether each row belongs to a request."""
    is_real = np.zeros(case.mixed.shape[1], bool)
    for slot, _, start, count in zip(*case.rows, strict=True):
        is_real[start : start + count * (slot > 0)] = True
    return is_real


@partial(jax.jit, static_argnames=("num_rows", "implementation", "width"))
def verify(case: Case, num_rows, parents=None, path=None, implementation="xla", width=None):
    """Outputs ``[L, W, Hv, V]`` of a verification, and the pool after the replay of a path."""
    how = {"implementation": implementation}
    layers, total = case.mixed.shape[:2]
    replay = ReplayRows.zeros((layers, total), _heads(case), case.mixed.dtype)
    taps = Taps.of(case.rows, total, case.weights.shape[2], parents)
    outs = []
    for i, gates in enumerate(case.gates):
        rest = case.weights[i], case.pool.windows, i, taps, _heads(case), replay
        inputs, replay = delta_inputs(case.mixed[i], gates, *rest, **how)
        rest = case.pool, i, case.rows, num_rows, parents
        out, replay = delta_verify(inputs, replay, *rest, width=width, **how)
        outs.append(out)
    if path is None:
        return jnp.stack(outs), case.pool
    return jnp.stack(outs), delta_replay(case.pool, replay, case.rows, path, **how)


@partial(jax.jit, static_argnames=("group", "implementation", "width"))
def scan(case: Case, group, implementation="xla", width=None, kept=None):
    """Outputs ``[L, W, Hv, V]`` of rows in order, and the pool after them."""
    how = {"implementation": implementation}
    total, pool, outs = case.mixed.shape[1], case.pool, []
    taps = Taps.of(case.rows, total, case.weights.shape[2])
    for i, gates in enumerate(case.gates):
        rest = case.weights[i], pool.windows, i, taps, _heads(case)
        inputs, replay = delta_inputs(case.mixed[i], gates, *rest, **how)
        form = {"group": group, "width": width}
        out, pool = delta_scan(inputs, replay, pool, i, case.rows, kept, **form, **how)
        outs.append(out)
    return jnp.stack(outs), pool


def _heads(case: Case) -> tuple[int, ...]:
    value_heads, value_dim, key_dim = case.pool.states.shape[2:]
    key_heads = (case.mixed.shape[2] - value_heads * value_dim) // (2 * key_dim)
    return key_heads, key_dim, value_heads, value_dim


def inputs_of(case: Case, layer: int, rows, gates: np.ndarray):
    """Query, key ``[Hk, K]`` and value of the last of J channel rows; its beta and decay."""
    key_heads, key_dim, value_heads, value_dim = _heads(case)
    weights = case.weights[layer].astype(np.float64)
    x = sum(row.astype(np.float64) * weights[:, j] for j, row in enumerate(rows))
    x = x / (1 + np.exp(-x))
    size = key_heads * key_dim
    query, key = (u.reshape(key_heads, key_dim) for u in (x[:size], x[size : 2 * size]))
    query, key = (u / np.sqrt((u**2).sum(1, keepdims=True) + 1e-6) for u in (query, key))
    of_beta, of_decay = np.split(gates.astype(np.float64), 2)
    softplus = np.logaddexp(0, of_decay + case.biases[layer])
    log_decay = -np.exp(case.log_rates[layer].astype(np.float64)) * softplus
    value = x[2 * size :].reshape(value_heads, value_dim)
    return query * key_dim**-0.5, key, value, 1 / (1 + np.exp(-of_beta)), log_decay


def walk(case: Case, layer: int, request: int, path):
    """Outputs ``[len(path), Hv, V]`` of rows of a request, and the state and window after them."""
    source, start = case.rows.sources[request], case.rows.starts[request]
    states, windows = (x[layer] for x in case.pool)
    state = np.zeros(states.shape[1:]) if source < 0 else states[source].astype(np.float64)
    text = list(np.zeros_like(windows[0]) if source < 0 else windows[source])
    outs = []
    for row in start + np.asarray(path, int):
        text.append(case.mixed[layer, row])
        of_row = inputs_of(case, layer, text[-len(windows[0]) - 1 :], case.products[layer, row])
        query, key, value, beta, log_decay = of_row
        out = np.zeros(state.shape[:2])
        for head in range(len(state)):
            k, q = (x[head // (len(state) // len(key))] for x in (key, query))
            state[head] *= np.exp(log_decay[head])
            delta = beta[head] * (value[head] - state[head] @ k)
            state[head] += np.outer(delta, k)
            out[head] = state[head] @ q
        outs.append(out)
    return np.array(outs).reshape(-1, *state.shape[:2]), state, np.array(text[-len(windows[0]) :])


def check_pool(case: Case, pool: DeltaPool, paths, tolerance=2e-5) -> None:
    """Compare the slots of requests with walks along ``paths``, and all others with the case's."""
    for layer in range(len(case.mixed)):
        untouched = set(range(case.pool.states.shape[1]))
        for request, path in enumerate(paths):
            slot = int(case.rows.slots[request])
            if slot > 0 and len(path):
                untouched -= {slot}
                _, state, window = walk(case, layer, request, path)
                close(pool.states[layer, slot], state, tolerance)
                np.testing.assert_array_equal(pool.windows[layer, slot], window)
        rest = sorted(untouched)
        for now, before in zip(pool, case.pool, strict=True):
            np.testing.assert_array_equal(np.asarray(now)[layer, rest], before[layer, rest])


def close(values, expected, tolerance=2e-5) -> None:
    scale = max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(np.asarray(values), expected, rtol=0, atol=tolerance * scale)
