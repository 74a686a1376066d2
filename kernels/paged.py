"""Attention over a paged KV pool: inputs, sums over keys and packed segments of all its kernels.

Axes: B requests, N query heads, KV key/value heads, H head dim, P pages per request; G segments and
W rows of a packed prompt.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from specjax.kernels.backend import WORD, row_dot
from specjax.kernels.kv_format import head_dim_of

# finite, so that the difference of two of them is 0 and not NaN
NEGATIVE = -1e30
LOG2E = 1.4426950408889634


class PagedForm(NamedTuple):
    """Options of a kernel body that follow from its inputs."""

    page_size: int
    scale: float
    window: int | None
    softcap: float | None
    implementation: str
    sink_tokens: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedInputs:
    """The keys and values that queries attend to, and how a layer scores them.

    The pool has the keys and values of the new tokens already. The keys of a token are adjacent to
    its values, so one store writes both. Page 0 is the padding page.
    """

    # [L, slots, 2, KV, H] in the dtype of the queries, or words [L, slots, 2, KV, H / 2] of two
    # values in e4m3, which are converted where they are read
    pool: Array
    layer: int | Array  # index in the pool
    page_table: Array  # i32 [B, P]; entries after a request's pages are 0
    page_size: int = field(metadata={"static": True})  # tokens per page
    # number of positions that a row sees up to its own; ``None`` means all
    window: int | None = field(default=None, metadata={"static": True})
    # c in the scores c * tanh(scores / c)
    softcap: float | None = field(default=None, metadata={"static": True})
    # [N], a score per query head that takes attention weight but has no value
    sinks: Array | None = None
    # number of first tokens of a request that a row sees in addition to its window
    sink_tokens: int = field(default=0, metadata={"static": True})

    @property
    def layer_operand(self) -> Array:
        """The layer as an operand, so that all layers of a model share one compiled kernel."""
        return jnp.full((1,), self.layer, jnp.int32)

    def form(self, q: Array, implementation: str) -> PagedForm:
        scale = q.shape[-1] ** -0.5
        options = self.window, self.softcap, implementation, self.sink_tokens
        return PagedForm(self.page_size, scale, *options)

    def check(self, q: Array, ndim: int) -> None:
        """Reject queries ``[..., N, H]`` that do not fit the pool, and windows out of range."""
        pool = self.pool
        if q.ndim != ndim:
            raise ValueError(f"q {q.shape} must have {ndim} dimensions")
        heads, dim = q.shape[-2:]
        if pool.ndim != 5 or pool.shape[2] != 2 or head_dim_of(pool) != dim:
            size = dim // 2 if pool.dtype == WORD else dim
            raise ValueError(f"pool {pool.dtype}{pool.shape} must be [L, slots, 2, KV, {size}]")
        if heads % pool.shape[3]:
            raise ValueError(
                f"the number of query heads ({heads}) must be a multiple of the number of KV heads "
                f"({pool.shape[3]})"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1")
        if self.sink_tokens < 0 or (self.sink_tokens and self.window is None):
            raise ValueError(f"sink_tokens={self.sink_tokens} must be 0, or above with a window")


def block_after(num_read: Array, begins: tuple[Array, Array]) -> Array:
    """The block of keys to read after ``num_read`` others.

    ``begins`` is the number of blocks with the first tokens, and the first block of a window.
    """
    num_sinks, window = begins
    return num_read + jnp.where(num_read < num_sinks, 0, window - num_sinks)


def empty_sums(rows: int, *sizes: int) -> tuple[Array, ...]:
    """Highest score, sum of weights, and sums of weighted values of each row, over no keys."""
    lowest = jnp.full((rows,), NEGATIVE, jnp.float32)
    sums = (jnp.zeros((rows, size), jnp.float32) for size in sizes)
    return lowest, jnp.zeros((rows,), jnp.float32), *sums


def products(q: list[Array], keys: list[Array]) -> Array:
    """Products ``[rows, C]`` of queries and keys, which are lists of spans of the head dim."""
    start, *terms = [row_dot(x, y, transpose=True) for x, y in zip(q, keys, strict=True)]
    return sum(terms, start)


def base2_scores(sums: Array, scale: float, softcap: float | None) -> Array:
    """Scores from products of queries and keys, for weights that are powers of two."""
    if softcap is None:
        return sums * (scale * LOG2E)
    return jnp.tanh(sums * (scale / softcap)) * (softcap * LOG2E)


def add_keys(
    sums: tuple[Array, ...], scores: Array, values: list[Array], visible: Array | None
) -> tuple[Array, ...]:
    """Add keys with masked scores ``[rows, C]`` to the sums of rows.

    ``visible`` is needed if a row may see none of the keys so far: its best score is then that of a
    masked key, which has to have the weight 0.
    """
    best, weight, *mixed = sums
    new_best = jnp.maximum(best, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - new_best[:, None])
    if visible is not None:
        weights = jnp.where(visible, weights, 0.0)
    decay = jnp.exp2(best - new_best)
    mixed = [
        x * decay[:, None] + row_dot(weights.astype(v.dtype), v, transpose=False)
        for x, v in zip(mixed, values, strict=True)
    ]
    return new_best, weight * decay + jnp.sum(weights, axis=1), *mixed


def with_sinks(best: Array, weight: Array, mixed: Any, sinks: Array) -> tuple[Array, Any]:
    """Add attention sinks to rows' running sums; return total weights and rescaled value sums."""
    score = sinks.astype(jnp.float32) * LOG2E
    highest = jnp.maximum(best, score)
    decay = jnp.exp2(best - highest)
    return weight * decay + jnp.exp2(score - highest), [x * decay[:, None] for x in mixed]


def running_sums(counts: Array) -> Array:
    """Sums i32 ``[G]`` of the first 1 to G counts, without the loop of ``cumsum`` in jax 0.12."""
    index = jnp.arange(counts.shape[0])
    return jnp.where(index <= index[:, None], counts, 0).sum(axis=1, dtype=jnp.int32)


def segment_bounds(counts: Array, rows: int) -> tuple[Array, Array]:
    """First rows and ends of the segments, i32 ``[G]`` each; at most ``rows``."""
    ends = jnp.minimum(running_sums(counts), rows)
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends


@partial(jax.jit, static_argnums=(2, 3))
def tile_map(starts: Array, counts: Array, rows: int, tile_tokens: int) -> Array:
    """Work of each program, i32 ``[tiles, 4]``: segment, first row, number of tokens and of keys.

    The last token sees all the keys. The segment is -1 for unused programs. Padding rows are tiles
    of segment 0 without keys. Later tiles of a segment have more keys and come first, so that the
    last programs to start are short. As a jitted function, it is traced once for all layers.
    """
    firsts, ends = segment_bounds(counts, rows)
    segments = counts.shape[0]
    # padding is one more segment
    firsts = jnp.concatenate([firsts, ends[-1:]])
    ends = jnp.concatenate([ends, jnp.full((1,), rows, jnp.int32)])
    tile_ends = running_sums((ends - firsts + tile_tokens - 1) // tile_tokens)
    tile_firsts = jnp.concatenate([jnp.zeros((1,), jnp.int32), tile_ends[:-1]])
    # each segment, and the padding, has at most one partial tile
    tiles = min(rows, rows // tile_tokens + segments + 1)
    tile = jnp.arange(tiles - 1, -1, -1, dtype=jnp.int32)
    segment = jnp.sum(tile[:, None] >= tile_ends, axis=1, dtype=jnp.int32)
    owner = jnp.minimum(segment, segments)
    token = (tile - tile_firsts[owner]) * tile_tokens
    row = firsts[owner] + token
    tokens = jnp.minimum(ends[owner] - row, tile_tokens)
    is_padding = segment >= segments
    keys = jnp.where(is_padding, 0, starts[jnp.minimum(segment, segments - 1)] + token + tokens)
    segment = jnp.where(is_padding, jnp.where(segment > segments, -1, 0), segment)
    return jnp.stack([segment, row, tokens, keys], axis=1)
