"""Prefill: one chunk of a prompt through target and draft, as a pure function."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.layers import pick_row
from specjax.sampling.draw import target_tokens
from specjax.sampling.table import unpack_sampling
from specjax.speculative.algorithm import PromptChunk
from specjax.speculative.future_map import DeviceState, consume, publish, record, resolve, stash
from specjax.speculative.round import Resident, RoundConfig, make_batch
from specjax.speculative.tree import chain_input
from specjax.types import KVPools, RoundOutput

# numbers before the tokens of a packed chunk
HEADER = 5


def pack_chunk(
    width: int, *, slot: int, start: int, tokens: Sequence[int], following: int | None, budget: int
) -> np.ndarray:
    """A chunk of a prompt as one array for the device, i32 ``[HEADER + width + 1]``.

    ``start`` tokens of the prompt are in the pool already; ``following`` is the prompt token behind
    the chunk, ``None`` where the prompt ends; ``budget`` is what the request may produce.
    """
    packed = np.zeros(HEADER + width + 1, np.int32)
    packed[:HEADER] = slot, start, len(tokens), following is None, budget
    packed[HEADER : HEADER + len(tokens)] = tokens
    packed[HEADER + len(tokens)] = 0 if following is None else following
    return packed


def prefill_chunk(
    resident: Resident, state: DeviceState, packed: jax.Array, *, config: RoundConfig
) -> tuple[DeviceState, RoundOutput]:
    """Run one chunk of a prompt, see :func:`pack_chunk`, through target and draft.

    What the host reads is ``packed`` i32 ``[1]``, the sampled token, and its log-probabilities
    ``[1]``, both of meaning only where the prompt ends.
    """
    pools, future = state.pools, state.future
    slot, start, num_tokens, is_final, budget = (packed[i : i + 1] for i in range(HEADER))
    tokens = packed[HEADER:]
    width = tokens.shape[0] - 1
    algorithm = config.algorithm
    batch = replace(make_batch(resident, future, slot), seq_lens=start)
    offsets = jnp.arange(width, dtype=jnp.int32)[None]
    positions = start[:, None] + offsets
    attend = batch.pages.attend(start, width, num_valid=num_tokens)
    hidden, features, kv = resident.target(
        tokens[None, :-1], positions, pools.target, attend, config.feature_layers
    )
    last = num_tokens - 1
    logits = resident.target.logits(pick_row(hidden, last))
    new_len = start + num_tokens
    future = record(future, slot, start, tokens[None, :-1], num_tokens)
    # slot 0 is greedy: no noise before the prompt's end
    params = unpack_sampling(resident.sampling, jnp.where(is_final > 0, slot, 0))
    root = chain_input(jnp.take(tokens, last)[None], new_len - 1)
    num_top = config.max_top_logprobs
    drawn, logprobs = target_tokens(logits, root, params, future.tokens, slot, num_top=num_top)
    token = drawn[:, 0]
    future = publish(future, slot, new_len, token)
    future = record(future, slot, new_len, drawn, is_final)
    future = replace(future, remaining=future.remaining.at[slot].set(budget))
    future = consume(future, slot, token[:, None], is_final, params.end_token_ids)
    at_end = (offsets == last[:, None]) & (is_final > 0)[:, None]
    chunk = PromptChunk(
        tokens=tokens[None, :-1],
        next_tokens=jnp.where(at_end, token[:, None], tokens[None, 1:]),
        positions=positions,
        last=last,
        is_final=is_final > 0,
        attend=attend,
    )
    rows = resolve(future, slot)
    draft, rows = algorithm.prefill(batch, pools.draft, rows, chunk, features)
    out = RoundOutput(token, jax.tree.map(lambda leaf: leaf[:, 0], logprobs))
    return DeviceState(KVPools(target=kv, draft=draft), stash(future, slot, rows)), out
