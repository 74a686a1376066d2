"""The stages of a chain round as pure functions: draft, verify, extend.

Positions and alignment follow EAGLE: the draft's KV slot ``i`` holds the pair (target feature of
token ``i``, token ``i + 1``), so the first recurrent draft pass sits at position ``seq_len``. See
``docs/how_it_works.md`` for a worked example.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from specjax.kernels.compact_tree import compact_tree
from specjax.kv.pages import PageView
from specjax.models.decoder import CausalLM
from specjax.models.eagle import Eagle3Head, EagleHead
from specjax.sampling.draw import target_tokens
from specjax.speculative.tree import accept, chain_input
from specjax.types import DraftInput, SamplingTable, VerifyInput, VerifyOutput

Head = Eagle3Head | EagleHead


def propose(head: Head, target: CausalLM, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The head's best next token, ``topk_probs`` f32 and ``topk_ids`` i32, both ``[B, 1]``.

    With one candidate a softmax over the vocabulary would change nothing, so the probability is 1.
    """
    best = jnp.argmax(head.logits(hidden, target), axis=-1, keepdims=True).astype(jnp.int32)
    return jnp.ones(best.shape, jnp.float32), head.target_ids(best)


def draft(
    target: CausalLM,
    head: Head | None,
    kv: jax.Array | None,
    inputs: DraftInput,
    view: PageView,
    num_steps: int,
) -> tuple[VerifyInput, jax.Array | None]:
    """Draft a chain of ``num_steps`` tokens.

    The first comes with the inputs; the other ``num_steps - 1`` take one pass of the head each.

    Returns:
        The chain with its root, T = ``num_steps`` + 1 rows, and the draft's KV pool.
    """
    tokens = [inputs.bonus_tokens]
    hidden, ids = inputs.hidden[:, None], inputs.topk_ids[:, 0]
    for step in range(num_steps):
        assert head is not None
        tokens.append(ids)
        if step == num_steps - 1:
            break
        lens = inputs.seq_lens + step
        embeds = head.embed(ids[:, None], target)
        hidden, kv = head(embeds, hidden, lens[:, None], kv, view.attend(lens, 1))
        ids = propose(head, target, hidden[:, 0])[1][:, 0]
    return chain_input(jnp.stack(tokens, axis=1), inputs.seq_lens), kv


def verify(
    target: CausalLM,
    kv: jax.Array,
    tree: VerifyInput,
    seq_lens: jax.Array,
    view: PageView,
    sampling: SamplingTable,
    history: jax.Array,
    slots: jax.Array,
    *,
    num_steps: int,
    feature_layers: tuple[int, ...],
    num_top_logprobs: int = 0,
    greedy: bool = False,
    simulate_accept_length: float | None = None,
) -> tuple[VerifyOutput, jax.Array]:
    """One target pass over a drafted chain: draw the target's token at every row and accept.

    Args:
        target: the target model.
        kv: its KV pool.
        tree: a chain (its mask is causal, so the attention needs no mask).
        seq_lens: i32 ``[B]``, tokens in the pool.
        view: pages of the batch.
        sampling: parameters of the B rows.
        history: i32 ``[R, C]``, tokens by request slot, up to the root of the chain.
        slots: i32 ``[B]``, request slots, 0 for padding rows.
        num_steps: S.
        feature_layers: of the draft head.
        num_top_logprobs: most likely tokens that a row may ask for.
        greedy: rows ask for nothing but the best token, see :func:`target_tokens`.
        simulate_accept_length: for measurements of speed, see :func:`accept`.
    """
    rows = tree.draft_tokens.shape[1]
    hidden, features, kv = target(
        tree.draft_tokens, tree.positions, kv, view.attend(seq_lens, rows), feature_layers
    )
    tokens, logprobs = target_tokens(
        target.logits(hidden),
        tree,
        sampling,
        history,
        slots,
        num_top=num_top_logprobs,
        greedy=greedy,
    )
    verified = accept(tree, tokens, features, slots > 0, num_steps, simulate_accept_length)
    compacted = jax.tree.map(lambda v: compact_tree(v, verified.accept_index), logprobs)
    return replace(verified, logprobs=compacted), kv


def extend(
    target: CausalLM,
    head: Head,
    kv: jax.Array,
    verified: VerifyOutput,
    seq_lens: jax.Array,
    view: PageView,
) -> tuple[DraftInput, jax.Array]:
    """One pass of the head over the accepted tokens with their true target features.

    It replaces what the recurrent passes left in the draft's KV pool; rows behind the accepted ones
    leave values that the next round overwrites.

    Args:
        target: the target model (embeddings, and the output head of EAGLE-1/2).
        head: the draft head.
        kv: the draft's KV pool.
        verified: what the target accepted.
        seq_lens: i32 ``[B]``, tokens in the target's pool before this round.
        view: pages of the batch.

    Returns:
        What the next round starts from, and the draft's KV pool.
    """
    width = verified.accept_tokens.shape[1]
    positions = seq_lens[:, None] + jnp.arange(width, dtype=jnp.int32)
    hidden, kv = head(
        head.embed(verified.accept_tokens, target),
        head.fuse(verified.features),
        positions,
        kv,
        view.attend(seq_lens, width),
        row=jnp.maximum(verified.num_accepted_tokens - 1, 0),
    )
    recurrent = hidden[:, 0]
    topk_probs, topk_ids = propose(head, target, recurrent)
    return (
        DraftInput(
            topk_probs=topk_probs,
            topk_ids=topk_ids,
            hidden=recurrent,
            bonus_tokens=verified.bonus_tokens,
            seq_lens=seq_lens + verified.num_accepted_tokens,
        ),
        kv,
    )
