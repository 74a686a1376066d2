"""Pages: the KV indices of a request's tokens on the device, and the host's list of free pages."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.kernels.kv_rows import gather_rows, move_kv, scatter_rows
from specjax.kernels.paged import PagedInputs, running_sums
from specjax.kernels.prefill_attention import prefill_attention
from specjax.kernels.rope_store import rope_store
from specjax.kernels.tree_attention import tree_attention
from specjax.models.layers import Store
from specjax.models.rope import RopeTables
from specjax.types import Pools


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PageView:
    """The pages of a batch of requests in each pool. Page 0 is the padding page.

    Methods read and write with the pages of the first pool, which are those of drafts too.
    """

    tables: tuple[Array, ...]  # i32 [B, P] of each pool; unused entries are 0
    page_size: int = field(metadata={"static": True})
    # implementation of the kernels that attend and store
    implementation: str | None = field(default=None, metadata={"static": True})
    # number of pools after those of the tables, which have the pages of the first
    num_extra: int = field(default=0, metadata={"static": True})

    @property
    def page_table(self) -> Array:
        return self.tables[0]

    @property
    def pools(self) -> "tuple[PageView, ...]":
        """The pages in each pool alone."""
        tables = *self.tables, *self.tables[:1] * self.num_extra
        return tuple(replace(self, tables=(table,), num_extra=0) for table in tables)

    def kv_indices(self, positions: Array) -> Array:
        """KV indices i32 ``[B, T]`` of positions ``[B, T]``; after the table, in page 0."""
        width = self.page_table.shape[1]
        index = positions // self.page_size
        pages = jnp.take_along_axis(self.page_table, jnp.minimum(index, width - 1), axis=1)
        return jnp.where(index < width, pages, 0) * self.page_size + positions % self.page_size

    def store(self, seq_lens: Array, rows: int) -> Store:
        """Make a ``Store`` for ``rows`` new tokens after ``seq_lens`` i32 ``[B]``."""
        return self.attend(seq_lens, rows).store

    def attend(
        self,
        seq_lens: Array,
        rows: int,
        *,
        tree_mask: Array | None = None,
        positions: Array | None = None,
        first: int = 0,
    ) -> "PagedAttend":
        """Make an ``Attend`` that stores T = ``rows`` new tokens and attends over all tokens.

        ``tree_mask`` is bool ``[B, T, U]`` over the U tokens after ``seq_lens`` i32 ``[B]``, or
        ``None`` for causal attention. Earlier calls stored the first ``first`` of the U tokens.
        ``positions`` i32 ``[B, T]`` are those of the rows of a tree, whose mask selects ancestors.
        """
        slots = seq_lens[:, None] + jnp.arange(first, first + rows, dtype=jnp.int32)
        form = {"tree_mask": tree_mask, "positions": positions}
        attention = self._over_pages(tree_attention, seq_lens=seq_lens, **form)

        def before(distance: int) -> Array:
            places = _earlier(slots, seq_lens, tree_mask, distance)
            return jnp.where(places < 0, -1, self.kv_indices(jnp.maximum(places, 0)))

        indices = self.kv_indices(slots)
        return PagedAttend(indices, attention, self.implementation, self.page_size, before)

    def read(
        self,
        kv: Array,
        layer: int,
        q: Array,
        seq_lens: Array,
        positions: Array,
        **options: Any,
    ) -> Array:
        """Attend with rotated queries ``[B, T, N, H]`` to the tokens before ``seq_lens``.

        With the option ``window``, rows see those of them that rows at ``positions`` i32 ``[B, T]``
        would see.
        """
        # the last token is the only one that a mask selects
        last, mask = jnp.maximum(seq_lens - 1, 0), jnp.ones((*q.shape[:2], 1), bool)
        form = {"tree_mask": mask, "positions": positions}
        attention = self._over_pages(tree_attention, seq_lens=last, **form)
        return attention(q, kv, layer, **options)

    def commit(self, pools: Pools, seq_lens: Array, path: Array, *, is_chain: bool) -> Pools:
        """Keep, of the rows after ``seq_lens``, those of an accepted path, as for :meth:`move`."""
        if is_chain:  # its KV is in place
            return pools
        pairs = zip(self.pools, pools, strict=True)
        return tuple(kv if kv is None else view.move(kv, seq_lens, path) for view, kv in pairs)

    def move(self, kv: Array, seq_lens: Array, path: Array) -> Array:
        """Move the KV of rows ``path`` i32 ``[B, A]`` to rows 0 to A - 1; ``path[:, 0]`` is 0.

        Row 0 is at position ``seq_lens``. An entry of -1 moves nothing. ``kv`` is a complete pool.
        """
        offsets = jnp.arange(1, path.shape[1], dtype=jnp.int32)
        source = jnp.where(path >= 0, self.kv_indices(seq_lens[:, None] + path), -1)[:, 1:]
        destination = self.kv_indices(seq_lens[:, None] + offsets)
        return move_kv(kv, source, destination, implementation=self.implementation)

    def attend_packed(
        self,
        segments: "Segments",
        *,
        tree_mask: Array | None = None,
        positions: Array | None = None,
    ) -> "PagedAttend":
        """Make an ``Attend`` for one row ``[1, W]`` that holds a segment of each request.

        ``tree_mask`` is bool ``[B, T, T]`` over the first T tokens of each segment, which has no
        more of them and ``positions`` i32 ``[B, T]``, or ``None`` for causal attention.
        """

        def indices(places: Array) -> Array:
            index = segments.index, places // self.page_size
            pages = self.page_table.at[index].get(mode="fill", fill_value=0)
            kv_indices = pages * self.page_size + places % self.page_size
            return jnp.where(segments.is_real, kv_indices, 0)[None]

        def before(distance: int) -> Array:
            if tree_mask is None:
                places = segments.positions - distance
            else:
                places = _earlier(starts[:, None], starts, tree_mask, distance)
                places = segments.gather(places)[0]
            return jnp.where(places < 0, -1, indices(jnp.maximum(places, 0)))

        kv_indices, starts, counts = indices(segments.positions), segments.starts, segments.counts
        form = self.implementation, self.page_size, before
        if tree_mask is not None:
            # attention is a small part of a verify pass, so attend with all T rows of each request
            by_tree = self._over_pages(
                tree_attention, seq_lens=starts, tree_mask=tree_mask, positions=positions
            )

            def tree_rows(q: Array, kv: Array, layer: int, **options: Any) -> Array:
                spread = segments.scatter(q, tree_mask.shape[1])
                return segments.gather(by_tree(spread, kv, layer, **options))

            return PagedAttend(kv_indices, tree_rows, *form)
        attend = self._over_pages(prefill_attention, starts=starts, counts=counts)

        def attention(q: Array, kv: Array, layer: int, **options: Any) -> Array:
            return attend(q[0], kv, layer, **options)[None]

        return PagedAttend(kv_indices, attention, *form)

    def _over_pages(
        self, attention: Callable[..., Array], **segments: Array | None
    ) -> Callable[..., Array]:
        def attend(q: Array, kv: Array, layer: int, **options: Any) -> Array:
            inputs = PagedInputs(kv, layer, self.page_table, self.page_size, **options)
            return attention(q, inputs, implementation=self.implementation, **segments)

        return attend


def _earlier(slots: Array, begins: Array, tree_mask: Array | None, distance: int) -> Array:
    """Positions i32 ``[B, T]`` where rows ``slots`` have the token at a distance before them.

    Before a text, they are negative. A tree begins at ``begins`` i32 ``[B]``, and ``tree_mask``
    ``[B, T, U]`` selects a row and its ancestors, which precede it.
    """
    if tree_mask is None:
        return slots - distance
    # number of selected rows from each one on, so that a row has rank 1, and its parent 2
    ranks = jnp.cumsum(tree_mask[..., ::-1], axis=-1, dtype=jnp.int32)[..., ::-1]
    node = jnp.argmax(tree_mask & (ranks == distance + 1), axis=-1).astype(jnp.int32)
    depth = ranks[..., 0]
    return begins[:, None] + jnp.where(depth > distance, node, depth - 1 - distance)


@dataclass(frozen=True)
class PagedAttend:
    """An ``Attend`` over a KV pool; its ``store`` is a ``Store`` to the same KV indices."""

    kv_indices: Array  # i32 [B, T], where the new tokens are stored
    attention: Callable[..., Array]  # (q, kv, layer, **options)
    implementation: str | None  # implementation of the kernel that stores
    page_size: int
    # distance -> KV indices i32 [B, T] of the tokens at a distance before the new ones; -1: none
    before: Callable[[int], Array]

    def __call__(
        self, kv: Array, layer: int, q: Array, k: Array, v: Array, rope: RopeTables, **options: Any
    ) -> tuple[Array, Array]:
        q, kv = self._store(kv, layer, q, k, v, rope)
        return kv, self.attention(q, kv, layer, **options)

    def store(self, kv: Array, layer: int, k: Array, v: Array, rope: RopeTables) -> Array:
        # the kernel also rotates queries, so pass the keys as queries and ignore the result
        return self._store(kv, layer, k, k, v, rope)[1]

    def keep(self, pool: Array, values: Array) -> Array:
        """Store ``values [B * T, ...]`` of the new tokens in an extra pool ``[1, N, ...]``."""
        index = self.kv_indices.reshape(-1)
        # of page 0, several tokens may have the same index
        index = jnp.where(index < self.page_size, pool.shape[1], index)
        rows = values.astype(pool.dtype)[None]
        return scatter_rows(pool, index, rows, implementation=self.implementation)

    def recall(self, pool: Array, layer: int, rows: Array, count: int) -> tuple[Array, Array]:
        """Store ``rows [B, T, C]`` of the new tokens, and read those of tokens before them.

        A row fills the values of as many layers, from ``layer`` on, as it needs. Returns the pool
        and ``[B, T, count, C]``, the oldest first. Before a text, rows are zeros.
        """
        token, how = pool.shape[2:], {"implementation": self.implementation}
        num_places = -(-rows.shape[-1] // math.prod(token))
        begins = (layer + jnp.arange(num_places, dtype=jnp.int32)) * pool.shape[1]
        joined = pool.reshape(1, -1, *token)
        index = self.kv_indices.reshape(-1, 1)
        index = jnp.where(index < self.page_size, joined.shape[1], index + begins)  # as in keep
        padding = num_places * math.prod(token) - rows.shape[-1]
        wide = jnp.pad(rows.astype(pool.dtype), ((0, 0), (0, 0), (0, padding)))
        joined = scatter_rows(joined, index.reshape(-1), wide.reshape(1, -1, *token), **how)
        places = jnp.stack([self.before(n) for n in range(count, 0, -1)], axis=-1)[..., None]
        source = jnp.maximum(places, 0) + begins
        gathered = gather_rows(joined, source.reshape(-1), **how)
        gathered = gathered.reshape(*places.shape[:-1], -1)[..., : rows.shape[-1]]
        return joined.reshape(pool.shape), jnp.where(places < 0, 0, gathered).astype(rows.dtype)

    def _store(
        self, kv: Array, layer: int, q: Array, k: Array, v: Array, rope: RopeTables
    ) -> tuple[Array, Array]:
        target, norms = (kv, layer, self.kv_indices), rope.norms
        options = {"norms": norms, "implementation": self.implementation}
        return rope_store(q, k, v, rope.cos, rope.sin, *target, **options)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """New tokens of G requests, concatenated and padded to one row of W tokens."""

    starts: Array  # i32 [G], position of the first token of each segment
    counts: Array  # i32 [G], number of tokens of each segment
    last: Array  # i32 [G], index of the last token in W; arbitrary if a segment is empty
    index: Array  # i32 [W], the segment of each token; arbitrary for padding
    positions: Array  # i32 [W], 0 for padding
    is_real: Array  # bool [W]

    @classmethod
    def of(cls, starts: Array, counts: Array, width: int) -> "Segments":
        """Lay out segments of ``counts`` tokens from positions ``starts`` on, both i32 ``[G]``."""
        ends = running_sums(counts)
        offset = jnp.arange(width, dtype=jnp.int32)
        index = jnp.sum(ends <= offset[:, None], axis=1, dtype=jnp.int32)
        is_real = index < counts.shape[0]
        index = jnp.where(is_real, index, 0)
        positions = jnp.where(is_real, (starts + counts - ends)[index] + offset, 0)
        return cls(starts, counts, jnp.maximum(ends - 1, 0), index, positions, is_real)

    def gather(self, x: Array) -> Array:
        """Pack ``x [G, T, ...]``, which holds T tokens per segment, to ``[1, W, ...]``."""
        row = jnp.where(self.is_real, self.positions - self.starts[self.index], 0)
        return x[self.index, row][None]

    def scatter(self, x: Array, width: int) -> Array:
        """Undo :meth:`gather` for T = ``width``; tokens after a segment's are arbitrary."""
        begins = self.last - self.counts + 1
        token = begins[:, None] + jnp.arange(width, dtype=jnp.int32)
        return x[0, jnp.minimum(token, x.shape[1] - 1)]


class PageAllocator:
    """The list of free pages among ``1 .. num_pages - 1``; page 0 is never handed out."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages} must be at least 2 (one is the padding page)")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, 0, -1))
        self._held: set[int] = set()
        # called with the pages that are freed
        self.on_free: list[Callable[[Sequence[int]], None]] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` pages. If fewer are free, take none and return ``None``."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self._held.update(pages)
        return pages

    def free(self, pages: list[int]) -> None:
        """Free pages. If one is not allocated or repeated, free none and raise ValueError."""
        freed = set(pages)
        if len(freed) != len(pages):
            raise ValueError(f"pages {pages} must not repeat a page")
        if not freed <= self._held:
            raise ValueError(f"pages {sorted(freed - self._held)} are not allocated")
        for drop in self.on_free:
            drop(pages)
        self._held -= freed
        self._free.extend(reversed(pages))
