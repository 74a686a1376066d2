"""Sampling parameters of all slots in one array.

A change of any slot uploads the table; as one array that takes a fifteenth of the calls.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import SamplingTable


def pack_sampling(table: SamplingTable) -> np.ndarray:
    """A table of numpy arrays ``[R, ...]`` as i32 ``[R, K]``, bit by bit."""
    leaves = [leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(table)]
    return np.concatenate([_as_words(leaf) for leaf in leaves], axis=1)


def unpack_sampling(packed: jax.Array, like: SamplingTable) -> SamplingTable:
    """The inverse of :func:`pack_sampling`, inside a traced function.

    Args:
        packed: i32 ``[R, K]``.
        like: a table of any number of rows, for the dtypes and the shape of a row.
    """
    leaves, structure = jax.tree.flatten(like)
    found, start = [], 0
    for leaf in leaves:
        stop = start + leaf[0].size
        words = packed[:, start:stop].reshape(len(packed), *leaf.shape[1:])
        found.append(_from_words(words, leaf.dtype))
        start = stop
    table: SamplingTable = jax.tree.unflatten(structure, found)
    return table


def _as_words(leaf: np.ndarray) -> np.ndarray:
    if leaf.dtype == np.bool_:
        return leaf.astype(np.int32)
    assert leaf.dtype.itemsize == 4, leaf.dtype
    return leaf.view(np.int32)


def _from_words(words: jax.Array, dtype: Any) -> jax.Array:
    if dtype == np.bool_:
        return words != 0
    return jax.lax.bitcast_convert_type(words, jnp.dtype(dtype))
