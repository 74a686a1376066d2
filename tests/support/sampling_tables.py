"""Sampling tables for tests of device code."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.sampling.params import SamplingParams
from specjax.sampling.table import HostTables, pack_sampling, unpack_sampling
from specjax.types import SamplingTable


def sampling_rows(rows: Iterable[SamplingParams], vocab_size: int, **slot: Any) -> SamplingTable:
    """The device's parameters for the given rows; row ``i`` has the seed ``i``."""
    rows = list(rows)
    tables = HostTables(len(rows), 1, vocab_size)
    for i, params in enumerate(rows):
        defaults = {"seed": i, "end_token_ids": (), "prompt_len": 0, "top_logprobs": None}
        tables.set_sampling(i, params, **(defaults | slot))
    packed = jax.device_put(pack_sampling(tables.sampling))
    return unpack_sampling(packed, np.arange(len(rows)))


def equal_rows(count: int, params: SamplingParams, vocab_size: int) -> SamplingTable:
    """``count`` rows with the same parameters and the seeds 0, 1, 2, ..."""
    one = sampling_rows([params], vocab_size)
    many = jax.tree.map(lambda leaf: jnp.repeat(leaf, count, axis=0), one)
    seeds = np.stack([np.zeros(count), np.arange(count)], axis=1)
    return replace(many, seeds=jnp.asarray(seeds, jnp.uint32))
