"""The specjax side of the parity tests: models over a dense key/value cache."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from specjax.kernels.delta_inputs import RequestRows
from specjax.kernels.delta_rule import DeltaPool
from specjax.kernels.rope_store import normed, rotate

from specjax import Engine
from specjax.config import TransformerConfig
from specjax.kv.recurrent import recur_in_order
from specjax.models.declare import pool_layers, request_shapes
from specjax.models.decoder import CausalLM
from specjax.models.eagle import build_head
from specjax.models.flat import FlatModel
from specjax.models.layers import Attend, Store, rotated
from specjax.models.rope import RopeTables
from specjax.models.short_conv import DenseAttend

Cache = dict[int, tuple[jax.Array, jax.Array]]


def build(make: Callable[[], Any], named: dict[str, np.ndarray]) -> Any:
    """Build a module from loaded weights after checking every shape and dtype."""
    flat = FlatModel.of(make)
    weights = flat.order(named)
    for name, spec, value in zip(flat.names, flat.abstract, weights, strict=True):
        assert value.shape == spec.shape, name
        assert value.dtype == spec.dtype, name
    return flat.rebuild(tuple(jnp.asarray(value) for value in weights))


def build_target(checkpoint: Any) -> CausalLM:
    return build(partial(CausalLM, checkpoint.config), checkpoint.load_weights())


def build_draft(checkpoint: Any) -> Any:
    return build(partial(build_head, checkpoint.config), checkpoint.load_weights())


def empty_cache(
    config: TransformerConfig, batch: int, slots: int, tokens: Sequence[Any] = ()
) -> Cache:
    """Cache with one slot per position. Unwritten slots are NaN, so that reading one shows.

    ``tokens`` are the shapes of a token in each layer, by default as the configuration says.
    """
    shape, dtype = (2, config.num_kv_heads, config.head_dim), config.dtypes.kv
    shapes = [x.shape for x in tokens] or [shape] * config.num_layers
    empty = [(jnp.full((batch, slots, *x[1:]), jnp.nan, dtype),) * 2 for x in shapes]
    return dict(enumerate(empty))


def dense_store(positions: np.ndarray) -> Store:
    """Write keys and values to a dense cache with one slot per position."""
    rows = np.arange(positions.shape[0])[:, None]

    def store(cache: Cache, layer: int, k: jax.Array, v: jax.Array, rope: RopeTables) -> Cache:
        new = rotate(normed(k, k, rope.norms)[1], rope.cos, rope.sin), v
        pair = [old.at[rows, positions].set(x) for old, x in zip(cache[layer], new, strict=True)]
        return {**cache, layer: (pair[0], pair[1])}

    return store


def dense_attend(positions: np.ndarray, *, is_causal: bool = True) -> Attend:
    """Attention over a dense cache with one slot per position.

    Rows see slots up to their own, or, without ``is_causal``, up to that of the last row.
    """
    rows = np.arange(positions.shape[0])[:, None]

    @rotated
    def attend(
        cache: Cache,
        layer: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        window: int | None = None,
        softcap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> tuple[Cache, jax.Array]:
        keys, values = (
            old.at[rows, positions].set(new) for old, new in zip(cache[layer], (k, v), strict=True)
        )
        slots = np.arange(keys.shape[1])
        last = positions if is_causal else np.repeat(positions[:, -1:], positions.shape[1], 1)
        visible = slots <= last[..., None]
        if window is not None:
            visible &= slots > positions[..., None] - window
        groups, dtype = q.shape[2] // keys.shape[2], q.dtype
        q = q.astype(jnp.float32)
        seen = visible.any(axis=1)[:, :, None, None]
        wide_keys, wide_values = (
            jnp.repeat(jnp.where(seen, x, 0.0).astype(jnp.float32), groups, axis=2)
            for x in (keys, values)
        )
        scores = jnp.einsum("btnh,bsnh->bnts", q, wide_keys, precision="highest")
        scores = scores * q.shape[-1] ** -0.5
        scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(visible[:, None], scores, -jnp.inf)
        most = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - most)
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:  # a key of value 0, whose score is that of its head
            total += jnp.exp(sinks[:, None, None] - most)
        weights /= total
        out = jnp.einsum("bnts,bsnh->btnh", weights, wide_values, precision="highest")
        return {**cache, layer: (keys, values)}, out.astype(dtype)

    return attend


def run_target(
    model: CausalLM,
    tokens: np.ndarray,
    feature_layers: tuple[int, ...] = (),
    chunks: Sequence[int] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Logits and features of sequences ``[B, T]``, in chunks of these sizes, or in one pass."""
    batch, length = tokens.shape
    places = [i for layers in pool_layers(model.caches, 1) for i in layers]
    stored = [model.caches[i].per_token for i in places]
    cache: Any = empty_cache(model.config, batch, length, stored)
    shapes, num_taps = request_shapes(model.caches, batch + 1), 0
    if shapes:
        pool = DeltaPool(*(jnp.full(x.shape, 7.0, x.dtype) for x in shapes))
        cache, num_taps = (cache, pool), pool.num_taps
    results, start = [], 0
    for size in chunks or (length,):
        positions = np.broadcast_to(np.arange(start, start + size), (batch, size))
        attend: Any = DenseAttend(dense_attend(positions))
        if shapes:
            slots = np.arange(1, batch + 1)
            fields = slots, slots if start else slots * 0 - 1, (slots - 1) * size, slots * 0 + size
            rows = RequestRows(*(jnp.asarray(x, jnp.int32) for x in fields))
            recur = recur_in_order(rows, batch * size, num_taps, implementation="xla")
            attend = (attend, recur)
        chunk = jnp.asarray(tokens[:, start : start + size])
        hidden, features, cache = model(
            chunk, jnp.asarray(positions), cache, attend, feature_layers
        )
        results.append((model.logits(hidden), features))
        start += size
    logits, every = (np.concatenate(x, axis=1) for x in zip(*results, strict=True))
    return logits, every


def relative_error(ours: Any, theirs: Any) -> float:
    """``max|a - b| / max|b|``; infinite if shapes differ or a value is not finite."""
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if a.shape != b.shape or not np.isfinite(a).all():
        return float("inf")
    return float(np.abs(a - b).max() / np.abs(b).max())


def check_rounds(
    path: Path, tensors: dict[str, Any], simulated: Callable[..., Any], vocab_size: int, **how: Any
) -> None:
    """Compare a batch's completions and histograms with a simulation, also after an update.

    Args:
        path: the model.
        tensors: those of its draft, which replace themselves.
        simulated: maps a prompt and a number of tokens to the completion and its histogram.
        vocab_size: that of the model.
        **how: options of the engine.
    """
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, vocab_size, n).tolist() for n in (1, 2, 9, 21)]
    counts = [24, 20, 24, 17]
    expected = [simulated(*pair) for pair in zip(prompts, counts, strict=True)]
    total = np.sum([histogram for _, histogram in expected], axis=0)
    assert min(total[0], total[1], total[2:].sum()) > 5, "drafts are right too rarely"
    with Engine(
        str(path),
        dtype="float32",
        page_size=4,
        context_length=80,
        max_running_requests=2,
        max_total_tokens=200,
        batch_buckets=(2,),
        chunked_prefill_size=8,
        skip_tokenizer_init=True,
        compile_cache_dir=None,
        compile_on_use=True,
        **how,
    ) as engine:
        params = [
            {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": count} for count in counts
        ]
        results = engine.generate(input_ids=prompts, sampling_params=params)
        engine.update_weights_from_tensor(tensors, draft=True)
        again = engine.generate(input_ids=prompts, sampling_params=params)
    for result, (output, histogram) in zip(results + again, expected * 2, strict=True):
        assert result["output_ids"] == output
        assert result["meta_info"]["spec_correct_drafts_histogram"] == histogram
