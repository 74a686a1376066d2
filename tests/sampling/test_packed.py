"""The packed table holds what the host table says, bit by bit."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.sampling.packed import pack_sampling, unpack_sampling
from specjax.sampling.table import neutral_sampling

ROWS = 3


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_packed_table_comes_back_bit_by_bit(rng):
    table = neutral_sampling(ROWS, 17)
    for leaf in jax.tree.leaves(table):
        words = np.frombuffer(rng.randbytes(4 * leaf.size), np.uint32).reshape(leaf.shape)
        leaf[...] = words % 2 == 0 if leaf.dtype == np.bool_ else words.view(leaf.dtype)
    packed = pack_sampling(table)
    assert packed.dtype == np.int32
    found = jax.jit(lambda packed: unpack_sampling(packed, neutral_sampling(1, 1)))(packed)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(table), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert np.asarray(got).tobytes() == want.tobytes()
