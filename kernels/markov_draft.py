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
from specjax.kernels.backend import load, power_of_two, resolve, triton_call
from specjax.kernels.tree_attention import row_dot

# requests and tokens per tile, and the maximum of programs per tile of requests: about one for
# each multiprocessor, as each of them reads all parts of the launch before
ROWS, BLOCK, MAX_PARTS = (16, 32), 512, 128
TILE_BYTES = 2**16  # of the output matrix, at most; shared memory holds it


def supports(rank: int) -> bool:
    """Whether the Pallas kernel supports a Markov head of this rank."""
    return rank % 16 == 0


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
    ranks: int,
) -> None:
    """Kernel body: a program finds the best tokens of some requests in some blocks of tokens."""
    ids_ref, (best_ref, tokens_ref) = refs[:-2], refs[-2:]
    requests = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    part, num_parts, vocab_size = pl.program_id(1), pl.num_programs(1), logits_ref.shape[2]
    nobody = jnp.int32(2**31 - 1)

    def first(values: Array, tokens: Array, best: Array) -> Array:
        # the lowest token of equal ones; NaN does not equal any value
        found = jnp.min(jnp.where(values == best[:, None], tokens, nobody), axis=1)
        return jnp.where(found == nobody, 0, found)

    parts = jnp.arange(power_of_two(before_ref.shape[1]), dtype=jnp.int32)
    at = requests[:, None], jnp.minimum(parts, before_ref.shape[1] - 1)[None]
    # the last part may be repeated, which does not change the best
    values = load(before_ref.at[at])
    previous = first(values, load(before_tokens_ref.at[at]), jnp.max(values, axis=1))
    read = jnp.minimum(requests, logits_ref.shape[0] - 1)[:, None]
    step = step_ref[0]

    def look(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        best, token = found
        columns = (part + i * num_parts) * block + jnp.arange(block, dtype=jnp.int32)
        inside = jnp.minimum(columns, vocab_size - 1)[None]

        def multiply(j: Array, total: Array) -> Array:
            own = j * ranks + jnp.arange(ranks, dtype=jnp.int32)
            left = load(embedding_ref.at[previous[:, None], own[None]])
            return total + row_dot(left, load(output_ref.at[own[:, None], inside]), transpose=False)

        values = load(logits_ref.at[read, step, inside])
        zeros = jnp.zeros((rows, block), jnp.float32)
        bias = jax.lax.fori_loop(0, embedding_ref.shape[1] // ranks, multiply, zeros)
        values = jnp.where(columns[None] < vocab_size, values + bias, -jnp.inf)
        ids = load(ids_ref[0].at[inside[0]]) if ids_ref else columns
        highest = jnp.max(values, axis=1)
        is_better = highest > best
        tokens = jnp.broadcast_to(ids[None], values.shape)
        token = jnp.where(is_better, first(values, tokens, highest), token)
        return jnp.where(is_better, highest, best), token

    lowest = jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows, jnp.int32)
    count = pl.cdiv(pl.cdiv(vocab_size, block) - part, num_parts)
    best, token = jax.lax.fori_loop(0, count, look, lowest)
    best_ref[requests, part], tokens_ref[requests, part] = best, token


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
    batch, count, vocab_size = logits.shape
    rows, block = ROWS[batch > ROWS[0]], min(BLOCK, max(16, power_of_two(vocab_size)))
    groups, num_parts = pl.cdiv(batch, rows), min(MAX_PARTS, pl.cdiv(vocab_size, block))
    shape = groups * rows, num_parts
    rank, most = embedding.shape[1], TILE_BYTES // (BLOCK * output.dtype.itemsize)
    call = triton_call(
        partial(
            specjax_markov_draft,
            rows=rows,
            block=block,
            ranks=next(n for n in (most, 32, 16) if rank % n == 0),
        ),
        grid=(groups, num_parts),
        out_shape=(
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.int32),
        ),
        num_warps=8 if rows > ROWS[0] else 4,
        implementation=implementation,
    )
    padded = jnp.pad(tokens, (0, shape[0] - batch))
    best = jnp.zeros(shape, jnp.float32), jnp.broadcast_to(padded[:, None], shape)
    found = []
    for i in range(count):
        step = jnp.full(1, i, jnp.int32)
        best = call(logits, embedding, output, step, *best, *(() if ids is None else (ids,)))
        found.append(best)
    values, names = (jnp.stack(parts, axis=1)[:batch] for parts in zip(*found, strict=True))
    # the lowest of equal tokens, although a part has blocks from the whole vocabulary
    highest = jnp.max(values, axis=-1, keepdims=True)
    drafts = jnp.min(jnp.where(values == highest, names, jnp.iinfo(jnp.int32).max), axis=-1)
    return jnp.where(drafts == jnp.iinfo(jnp.int32).max, 0, drafts)
