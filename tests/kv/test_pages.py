"""Pages: the allocator as a state machine, and the stored tokens of a page view."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specjax.kv.pages import PageAllocator, PageView, Segments
from specjax.models.flat import FlatModel
from specjax.models.layers import Attention, LayerKind
from specjax.models.rope import RopeTables, rope_tables
from specjax.testing import TARGET


class Allocating(RuleBasedStateMachine):
    """Pages are allocated in groups and freed in any other grouping and order."""

    NUM_PAGES = 12

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(self.NUM_PAGES, 4)
        self.free_pages = set(range(1, self.NUM_PAGES))
        self.held: list[int] = []

    @rule(count=st.integers(0, NUM_PAGES + 1))
    def allocate(self, count: int) -> None:
        pages = self.allocator.allocate(count)
        if count > len(self.free_pages):
            assert pages is None
            return
        assert pages is not None
        assert len(pages) == len(set(pages)) == count
        assert self.free_pages.issuperset(pages)
        self.free_pages -= set(pages)
        self.held += pages

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(self.held))
        count = data.draw(st.integers(0, len(order)))
        pages, self.held = order[:count], order[count:]
        self.allocator.free(pages)
        self.free_pages.update(pages)

    @precondition(lambda self: self.free_pages)
    @rule(data=st.data())
    def free_again(self, data: st.DataObject) -> None:
        """A free page among allocated pages: none of them is freed."""
        page = data.draw(st.sampled_from(sorted(self.free_pages)))
        with pytest.raises(ValueError, match=rf"\[{page}\] are not allocated"):
            self.allocator.free([*self.held, page])

    @rule(page=st.sampled_from([-1, 0, NUM_PAGES, 10**9]))
    def free_unknown(self, page: int) -> None:
        """Page 0 is the padding page: it is never allocated, so it cannot be freed."""
        with pytest.raises(ValueError, match=rf"\[{page}\] are not allocated"):
            self.allocator.free([page, *self.held])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_twice_at_once(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.held))
        with pytest.raises(ValueError, match="must not repeat a page"):
            self.allocator.free([*self.held, page])

    @invariant()
    def the_count_is_exact(self) -> None:
        assert self.allocator.num_free == len(self.free_pages)
        assert len(self.free_pages) + len(self.held) == self.NUM_PAGES - 1

    def teardown(self) -> None:
        """All pages that count as free can be allocated."""
        assert self.allocator.allocate(len(self.free_pages) + 1) is None
        rest = self.allocator.allocate(len(self.free_pages))
        assert rest is not None
        assert set(rest) == self.free_pages


TestAllocating = Allocating.TestCase
TestAllocating.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_pages_for_rounds_up() -> None:
    allocator = PageAllocator(4, 16)
    assert [allocator.pages_for(n) for n in (0, 1, 16, 17, 48)] == [0, 1, 1, 2, 3]


def test_a_pool_needs_more_than_the_padding_page() -> None:
    with pytest.raises(ValueError, match="num_pages=1"):
        PageAllocator(1, 4)


def view_of(*tables: list[int], page_size: int = 4) -> PageView:
    return PageView((jnp.array(tables, jnp.int32),), page_size, "xla")


def test_kv_indices_follow_the_page_table() -> None:
    view = view_of([3, 1, 0], [2, 0, 0])
    positions = jnp.array([[0, 3, 4, 7, 8, 11], [0, 1, 3, 4, 8, 9]], jnp.int32)
    # a table entry of 0 is the padding page, whose indices are 0 .. page_size - 1
    assert view.kv_indices(positions).tolist() == [[12, 15, 4, 7, 0, 3], [8, 9, 11, 0, 0, 1]]


def test_kv_indices_past_the_table_lie_in_the_padding_page() -> None:
    positions = jnp.arange(8, 40, dtype=jnp.int32)[None]
    indices = view_of([3, 1]).kv_indices(positions)
    assert indices.min() >= 0
    assert indices.max() < 4


def check_stored(view: PageView, attend, shape, expected) -> None:
    """Check the keys and values of layer 1: ``expected`` in slots, any in the padding page."""
    kv_heads, dim = 2, 4
    pool = jnp.zeros((2, 6 * 4, 2, kv_heads, dim), jnp.float32)
    k = 1 + jax.random.uniform(jax.random.key(0), (*shape, kv_heads, dim))
    rope = RopeTables(jnp.ones((*shape, 1, dim // 2)), jnp.zeros((*shape, 1, dim // 2)))
    alone = jax.jit(lambda pool: attend.store(pool, 1, k, -k, rope))(pool)
    pool, out = jax.jit(lambda pool: attend(pool, 1, k, k, -k, rope))(pool)
    assert out.shape == k.shape
    np.testing.assert_array_equal(alone[:, 4:], pool[:, 4:])  # the padding page may hold any token
    assert not np.asarray(pool[0]).any()
    written = {int(i) for i in np.flatnonzero(np.asarray(pool[1]).any(axis=(1, 2, 3)))}
    assert {slot for slot in written if slot >= 4} == set(expected)
    for slot, place in expected.items():
        np.testing.assert_array_equal(pool[1, slot, 0], k[place])
        np.testing.assert_array_equal(pool[1, slot, 1], -k[place])


def test_attend_stores_after_the_sequences() -> None:
    view, rows = view_of([3, 1, 5], [2, 4, 0]), 5
    attend = view.attend(jnp.array([2, 7], jnp.int32), rows)
    expected = {}
    for b, (table, start) in enumerate((([3, 1, 5], 2), ([2, 4], 7))):
        for t in range(rows):
            page = (start + t) // 4
            if page < len(table):
                expected[table[page] * 4 + (start + t) % 4] = b, t
    check_stored(view, attend, (2, rows), expected)


def test_an_accepted_path_is_kept_in_each_pool() -> None:
    """The first pool has no layers."""
    tables, path = ([5, 0], [3, 1], [2, 4]), jnp.array([[0, 2, 3, -1]], jnp.int32)
    view = PageView(tuple(jnp.array([table], jnp.int32) for table in tables), 4, "xla")
    lens = jnp.array([2], jnp.int32)
    rng = np.random.default_rng(0)
    pools = (None, *(np.float32(rng.normal(size=(2, 24, 2, 2, 4))) for _ in range(2)))
    committed = jax.jit(partial(view.commit, is_chain=False))(pools, lens, path)
    assert committed[0] is None
    for table, before, after in zip(tables[1:], pools[1:], committed[1:], strict=True):
        expected, at = before.copy(), [table[i // 4] * 4 + i % 4 for i in range(8)]
        expected[:, [at[3], at[4]]] = before[:, [at[4], at[5]]]
        np.testing.assert_array_equal(after, expected)
    assert view.commit(pools, lens, path, is_chain=True) is pools


def test_an_extra_pool_has_the_pages_of_the_first() -> None:
    """Values go where keys go, padding nowhere, and a path is kept."""
    tables, path = ([3, 1], [2, 4], [0, 0]), jnp.array([[0, 2, 3], [0, 1, -1], [0, 2, -1]])
    view = replace(view_of(*tables), num_extra=1)
    lens = jnp.array([2, 4, 0], jnp.int32)
    pool = np.full((1, 24, 2, 3), 99, np.uint8)
    values = np.random.default_rng(0).integers(90, size=(12, 2, 3)).astype(np.int32)
    own, extra = view.pools
    assert own == extra == replace(view, num_extra=0)
    kept = np.array(jax.jit(extra.attend(lens, 4).keep)(pool, values))
    expected = pool.copy()
    expected[0, [14, 15, 4, 5]], expected[0, [16, 17, 18, 19]] = values[:4], values[4:8]
    np.testing.assert_array_equal(kept, expected)
    committed = view.commit((None, jnp.asarray(kept)), lens, path, is_chain=False)
    expected[0, [15, 4]] = values[[2, 3]]
    assert committed[0] is None
    np.testing.assert_array_equal(committed[1][:, 4:], expected[:, 4:])
    segments = Segments.of(jnp.array([2, 0, 1]), jnp.array([3, 1, 0]), 6)
    packed = np.array(extra.attend_packed(segments).keep(jnp.asarray(pool), values[:6]))
    expected = pool.copy()
    expected[0, [14, 15, 4, 8]] = values[:4]
    np.testing.assert_array_equal(packed, expected)


@pytest.mark.slow
def test_packed_segments_are_stored_and_padding_is_not() -> None:
    view = view_of([3, 1, 5], [0, 0, 0], [2, 4, 0])
    starts, counts = jnp.array([2, 0, 3], jnp.int32), jnp.array([4, 0, 3], jnp.int32)
    segments = Segments.of(starts, counts, 10)
    assert segments.positions.tolist() == [2, 3, 4, 5, 3, 4, 5, 0, 0, 0]
    assert segments.last.tolist()[::2] == [3, 6]
    slots = [14, 15, 4, 5, 11, 16, 17]
    expected = {slot: (0, i) for i, slot in enumerate(slots)}
    check_stored(view, view.attend_packed(segments), (1, 10), expected)


@pytest.mark.slow
@pytest.mark.parametrize("qk_norm", [False, True])
def test_stores_with_and_without_attention_are_equal(qk_norm: bool) -> None:
    """In bfloat16, where products are partial sums unless heads are normed."""
    config = replace(TARGET, dtype="bfloat16", hidden_size=128, head_dim=16)
    options = {"qk_norm": qk_norm, "qkv_bias": qk_norm, "implementation": "interpret"}
    flat = FlatModel.of(partial(Attention, config, LayerKind.of(config, **options), ""))
    attention, rows = flat.rebuild(flat.random(0)), 3
    view = replace(view_of([3, 1, 5], [2, 4, 0]), implementation="interpret")
    lens = jnp.array([2, 7], jnp.int32)
    x = jax.random.normal(jax.random.key(1), (2, rows, 128), jnp.bfloat16)
    rope = rope_tables(config.rope, lens[:, None] + jnp.arange(rows, dtype=jnp.int32))
    pool = jnp.zeros((2, 6 * 4, 2, 2, 16), jnp.bfloat16)
    store = view.store(lens, rows)

    def only_store(kv, layer, q, k, v, rope):
        return store(kv, layer, k, v, rope), q.reshape(-1, *q.shape[-4:])[0]

    _, stored = attention(x, rope, pool, 1, only_store)
    _, attended = attention(x, rope, pool, 1, view.attend(lens, rows))
    assert np.asarray(stored[1]).any()
    np.testing.assert_array_equal(stored[:, 4:], attended[:, 4:])


@pytest.mark.slow
@pytest.mark.parametrize(("window", "sees"), [(None, True), (7, True), (6, False)])
def test_a_layer_with_a_window_sees_only_its_last_keys(window: int | None, sees: bool) -> None:
    """Two rows that see each other, from position 7 on; the key at position 1 changes."""
    kind = LayerKind.of(TARGET, window=window)
    flat = FlatModel.of(partial(Attention, TARGET, kind, ""))
    attention, lens = flat.rebuild(flat.random(0)), jnp.array([7], jnp.int32)
    view = view_of([3, 1, 5])
    x = jax.random.normal(jax.random.key(1), (1, 2, TARGET.hidden_size))
    rope = rope_tables(TARGET.rope, lens[:, None] + jnp.arange(2, dtype=jnp.int32))
    attend = view.attend(lens, 2, tree_mask=jnp.ones((1, 2, 2), bool))
    pool = jax.random.normal(jax.random.key(2), (2, 24, 2, TARGET.num_kv_heads, TARGET.head_dim))
    out = [attention(x, rope, p, 1, attend)[0] for p in (pool, pool.at[1, 3 * 4 + 1].add(1.0))]
    assert bool((out[0] != out[1]).any()) == sees


@pytest.mark.parametrize("window", [None, 3, 6])
def test_queries_alone_see_the_tokens_before_them(window: int | None) -> None:
    """Two rows per request, after its last token; a request without tokens is padding."""
    rng, lens, rows = np.random.default_rng(0), np.array([7, 1, 0], np.int32), 2
    view, dim = view_of([3, 1], [2, 0], [0, 0]), 8
    kv = rng.normal(size=(2, 16, 2, 1, dim)).astype(np.float32)
    q = rng.normal(size=(3, rows, 2, dim)).astype(np.float32)
    places = jnp.broadcast_to(jnp.array(lens)[:, None], (3, rows))
    out = view.read(jnp.array(kv), 1, jnp.array(q), jnp.array(lens), places, window=window)
    for b, n in enumerate(lens[:2]):
        seen = np.arange(0 if window is None else max(0, n - window + 1), n)
        index = np.asarray(view.kv_indices(jnp.array(np.tile(seen, (3, 1)), jnp.int32)))[b]
        k, v = kv[1, index, 0, 0], kv[1, index, 1, 0]
        weights = np.exp(q[b] @ k.T / dim**0.5)
        expected = weights / weights.sum(axis=-1, keepdims=True) @ v
        np.testing.assert_allclose(out[b], expected, atol=1e-5)
    assert np.isfinite(out).all()
