"""Draft a block greedily with a Markov head: one launch per draft.

A vanilla Markov head adds ``embedding[previous] @ output`` to the logits of a draft. Each launch
finds the previous draft among the best tokens of each part of the vocabulary, which the launch
before it wrote, and then finds its own. Separate operations take about five launches per draft.

Axes: B requests, S drafts, V draft vocabulary, R rank, P parts of the vocabulary.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from specjax.kernels.backend import load, power_of_two, resolve, row_dot, triton_call

# requests per tile, and tokens per tile at most
ROWS, MAX_BLOCK = (16, 32), 512
# programs per tile of requests: two for each multiprocessor of an H100 or H200. Each reads what all
# programs of the launch before it found
PARTS = 264
# of the output matrix, at most; shared memory holds three tiles. One draft of the Qwen3-8B shape,
# rank 256, takes 29 us for one request and 39 for 32 on an H200; reading the matrix takes 19
TILE_BYTES = 2**15


def supports(rank: int) -> bool:
    """Whether the Pallas kernel supports a Markov head of this rank."""
    return rank % 16 == 0 and rank <= 512


def _reference(
    logits: Array, tokens: Array, embedding: Array, output: Array, ids: Array | None
) -> Array:
    drafts = []
    for i in range(logits.shape[1]):
        bias = row_dot(embedding[tokens], output, transpose=False)
        best = jnp.argmax(logits[:, i] + bias, axis=-1).astype(jnp.int32)
        tokens = best if ids is None else ids[best]
        drafts.append(tokens)
    return jnp.stack(drafts, axis=1)


def specjax_markov_draft(
    logits_ref: Any,
    embedding_ref: Any,
    output_ref: Any,
    step_ref: Any,
    before_ref: Any,
    before_tokens_ref: Any,
    *refs: Any,
    rows: int,
    block: int,
    count: int,
) -> None:
    """Kernel body: a program finds the best tokens of some requests in ``count`` blocks of tokens.

    Addresses of adjacent tokens must be visibly adjacent: indices that were clipped to the
    vocabulary would be read one by one, so loads are masked instead.
    """
    ids_ref, (best_ref, tokens_ref) = refs[:-2], refs[-2:]
    requests = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    share, num_parts = pl.program_id(1), before_ref.shape[1]
    (_, _, vocab_size), rank = logits_ref.shape, embedding_ref.shape[1]
    nobody = jnp.int32(2**31 - 1)

    def first(values: Array, tokens: Array) -> tuple[Array, Array]:
        # the highest value, and the lowest token of equal ones; NaN does not equal any value
        best = jnp.max(values, axis=1)
        best_token = jnp.min(jnp.where(values == best[:, None], tokens, nobody), axis=1)
        return best, jnp.where(best_token == nobody, 0, best_token)

    shares = jnp.arange(power_of_two(num_parts), dtype=jnp.int32)
    at = requests[:, None], jnp.minimum(shares, num_parts - 1)[None]
    # the last part may be repeated, which does not change the best
    _, previous = first(load(before_ref.at[at]), load(before_tokens_ref.at[at]))
    dims = jnp.arange(power_of_two(rank), dtype=jnp.int32)
    lhs = load(
        embedding_ref.at[previous[:, None], dims[None]],
        mask=jnp.broadcast_to(dims[None] < rank, (rows, len(dims))),
        other=0,
    )
    read, step = jnp.minimum(requests, logits_ref.shape[0] - 1)[:, None], step_ref[0]

    def look(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        best, token = carry
        columns = (share * count + i) * block + jnp.arange(block, dtype=jnp.int32)
        inside = (columns < vocab_size)[None]
        is_weight = (dims < rank)[:, None] & inside
        rhs = load(output_ref.at[dims[:, None], columns[None]], mask=is_weight, other=0)
        is_logit = jnp.broadcast_to(inside, (rows, block))
        values = load(logits_ref.at[read, step, columns[None]], mask=is_logit, other=-jnp.inf)
        values += row_dot(lhs, rhs, transpose=False)
        is_better = values > best
        return jnp.where(is_better, values, best), jnp.where(is_better, columns[None], token)

    shape = rows, block
    lowest = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32)
    best, token = first(*jax.lax.fori_loop(0, count, look, lowest))
    for ref in ids_ref:
        token = load(ref.at[token])
    best_ref[requests, share], tokens_ref[requests, share] = best, token


def markov_draft(
    logits: Array,
    tokens: Array,
    embedding: Array,
    output: Array,
    ids: Array | None = None,
    *,
    implementation: str | None = None,
) -> Array:
    """Draft tokens i32 ``[B, S]`` greedily; of equal logits, the lowest column wins.

    Args:
        logits: f32 ``[B, S, V]``, without the bias of the Markov head.
        tokens: i32 ``[B]``, the tokens before the drafts.
        embedding: ``[W, R]`` for the W tokens of the target.
        output: ``[R, V]``, in the same dtype.
        ids: i32 ``[V]``, the ascending token ids of the columns; ``None`` if columns are token ids.
    """
    implementation = resolve(implementation)
    if implementation == "xla" or not supports(embedding.shape[1]):
        return _reference(logits, tokens, embedding, output, ids)
    batch, steps, vocab_size = logits.shape
    rows, rank = ROWS[batch > ROWS[0]], embedding.shape[1]
    most = TILE_BYTES // (power_of_two(rank) * output.dtype.itemsize)
    block = max(16, min(MAX_BLOCK, power_of_two(most + 1) // 2, power_of_two(vocab_size)))
    count = pl.cdiv(vocab_size, block * PARTS)
    groups, num_parts = pl.cdiv(batch, rows), pl.cdiv(vocab_size, block * count)
    shape = groups * rows, num_parts
    call = triton_call(
        partial(specjax_markov_draft, rows=rows, block=block, count=count),
        grid=(groups, num_parts),
        out_shape=(
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.int32),
        ),
        num_warps=4,
        num_stages=3,
        implementation=implementation,
    )
    padded = jnp.pad(tokens, (0, shape[0] - batch))
    best = jnp.zeros(shape, jnp.float32), jnp.broadcast_to(padded[:, None], shape)
    results = []
    for i in range(steps):
        step = jnp.full(1, i, jnp.int32)
        best = call(logits, embedding, output, step, *best, *(() if ids is None else (ids,)))
        results.append(best)
    values, names = (jnp.stack(arrays, axis=1)[:batch] for arrays in zip(*results, strict=True))
    highest = jnp.max(values, axis=-1, keepdims=True)
    drafts = jnp.min(jnp.where(values == highest, names, jnp.iinfo(jnp.int32).max), axis=-1)
    return jnp.where(drafts == jnp.iinfo(jnp.int32).max, 0, drafts)
