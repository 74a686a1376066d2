"""Shared types, mostly arrays that the stages of a round pass on.

Axes: B batch rows (padded to a bucket), T rows per verify (``num_draft_tokens``), S ``num_steps``,
K ``topk``, A accept width, R request slots (row 0 is padding), D hidden size, F feature width, E
end tokens, M biases.

``num_accepted_drafts`` counts drafted tokens that passed verification. ``num_accepted_tokens`` also
counts the bonus token. They are separate arrays everywhere (SGLang change #23962).
"""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

# E, maximum number of end tokens per request on the device; models have one to four
MAX_END_TOKENS = 8
MAX_LOGIT_BIAS = 64  # M
F32 = Annotated[Array, np.float32]
I32 = Annotated[Array, np.int32]


class DraftShape(NamedTuple):
    """A tier: the static shape of the tree that a round drafts and verifies."""

    steps: int  # S, number of drafted levels; 0 drafts nothing
    topk: int  # K, branches per level; 1 is a chain
    nodes: int  # T, rows per verify, including the root; a chain may draft more
    block: int = 0  # rows of the draft pass if one pass drafts all tokens, otherwise 0
    # mean number of rows that are verified per request, below ``nodes``; 0 verifies all rows
    packed: int = 0
    stores_drafts: bool = True  # whether drafting writes the KV of its nodes

    @classmethod
    def chain(cls, steps: int, nodes: int | None = None) -> "DraftShape":
        """A chain of the root and ``steps`` drafts; at most ``nodes`` rows are verified."""
        return cls(steps, 1, steps + 1 if nodes is None else min(nodes, steps + 1))

    def __str__(self) -> str:
        """Write ``steps`` for a chain of all rows, else ``steps-branches-rows``; then ``p4`` if 4
        of the rows are verified on average."""
        tree, packed = self[:3], f"p{self.packed}" * (self.packed > 0)
        is_chain = tree == self.chain(self.steps)[:3]
        return (str(self.steps) if is_chain else "-".join(map(str, tree))) + packed

    @property
    def depth(self) -> int:
        """Maximum number of drafts that a round can accept."""
        return min(self.steps, self.nodes - 1)

    @property
    def accept_width(self) -> int:
        """A, the maximum number of tokens per round, including the bonus token."""
        return self.depth + 1

    @property
    def verified(self) -> int:
        """Mean number of rows that are verified per request."""
        return self.packed or self.nodes

    @property
    def num_candidates(self) -> int:
        """Number of drafts from which a tree's nodes are chosen: K, then K * K per level."""
        return self.topk + (self.steps - 1) * self.topk**2 if self.steps else 0

    @property
    def draft_rows(self) -> int:
        """Number of KV indices that drafting writes after the root's; none for the last level."""
        if self.block:
            return self.block - 1
        return max(0, self.steps - 1) * self.topk * self.stores_drafts

    @property
    def rows(self) -> int:
        """Number of KV indices that a round writes after a text."""
        return max(self.nodes, self.draft_rows + 1)

    @property
    def tail(self) -> int:
        """Number of KV indices that a round needs after the last token of a request.

        A chain needs none, because it accepts no row after that token. A tree needs them because
        its last row may hold the first draft, and a block because its rows see each other.
        """
        return 0 if self.topk == 1 and not self.block else self.rows - 1


NO_DRAFTS = DraftShape.chain(0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class VerifyInput:
    """A drafted tree; column 0 is the root, the bonus token of the previous round.

    Nodes after the first ``num_proposed`` drafts are padding. Padding does not count as proposed or
    as a child, and is never accepted.
    """

    draft_tokens: Array  # i32 [B, T]
    num_proposed: Array  # i32 [B], 0 to T - 1
    parents: Array  # i32 [B, T]; -1 for the root; parents come before children
    positions: Array  # i32 [B, T] = seq_lens + depth
    tree_mask: Array  # bool [B, T, T]; a row sees itself and its ancestors
    # f32 [B, T - 1, V], the distribution from which each draft was drawn (chains, if sampling needs
    # it). A draft whose distribution is not finite, or gives it 0, does not count.
    draft_probs: Array | None = None
    # i32 [B, T], where drafting stored each node's KV, relative to seq_lens; -1 if nowhere (trees)
    draft_rows: Array | None = None
    # f32 [B, T - 1] above 0, the drafter's probability of each draft, given the node's parent; if
    # the sampling config reads confidences
    confidences: Array | None = None

    @property
    def is_node(self) -> Array:
        """Bool ``[B, T]``, whether a row is the root or a proposed draft, not padding."""
        index = jnp.arange(self.parents.shape[1], dtype=jnp.int32)
        return index <= self.num_proposed[:, None]

    @property
    def is_child(self) -> Array:
        """Bool ``[B, T, T]``, whether a node (last axis) is a proposed child of another one."""
        index = jnp.arange(self.parents.shape[1], dtype=jnp.int32)
        return (self.parents[:, None, :] == index[:, None]) & self.is_node[:, None, :]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the target's tokens, and the most likely tokens.

    The arrays are on the device, and after they are read, on the host.
    """

    chosen: Array | np.ndarray  # f32 [...]
    top_ids: Array | np.ndarray  # i32 [..., N], the N most likely tokens, descending
    top_values: Array | np.ndarray  # f32 [..., N]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NodeOutputs:
    """The target's outputs at every row of a tree; all arrays are ``[B, T, ...]``.

    Acceptance compacts them to ``[B, A, ...]``: the rows of the accepted path, then zeros.
    """

    tokens: Array  # i32 [B, T], the target's token after each row
    features: Array  # [B, T, F], target features that the algorithm reads
    logprobs: Logprobs | None = None  # [B, T], for the tokens; zeros if not requested
    hidden_states: Array | None = None  # [B, T, D], from which tokens were sampled
    draft_rows: Array | None = None  # i32 [B, T], as in VerifyInput


class RoundResults(NamedTuple):
    """Results of a round for each request, in the order of the packed columns."""

    tokens: Any  # i32 [..., A], the target's tokens after the accepted path's nodes, then 0
    # The float32 bits i32 [..., A - 1] of the confidence of the draft that was tried at each depth,
    # or [..., 0] if they are not read. The first num_accepted_drafts were accepted, the next one
    # was rejected, and 0 means that no draft was tried.
    confidence_bits: Any
    num_proposed_drafts: Any  # i32 [...], those that are verified: a request verifies 1 row more
    num_accepted_drafts: Any  # i32 [...]
    num_accepted_tokens: Any  # i32 [...], including the bonus token; 0 for padding

    @classmethod
    def unpack(cls, packed: Any, accept_width: int) -> "RoundResults":
        """Split an array ``[..., columns]``, of the host or of the device."""
        counts = (packed[..., column] for column in range(-3, 0))
        return cls(packed[..., :accept_width], packed[..., accept_width:-3], *counts)

    def lists(self) -> "RoundResults":
        """Make lists of host arrays, which are faster to index, except for confidences."""
        tokens, bits, *counts = self
        return RoundResults(tokens.tolist(), bits, *(count.tolist() for count in counts))

    def pack(self) -> Array:
        """Join device arrays to one i32 array ``[..., columns]``."""
        counts = (count[..., None] for count in self[2:])
        return jnp.concatenate([self.tokens, self.confidence_bits, *counts], axis=-1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class VerifyOutput:
    """The result of verification; counts and bonus token of padding requests are 0."""

    accept_index: Array  # i32 [B, A], tree rows on the accepted path, root first, then -1
    outputs: NodeOutputs  # [B, A, ...], for the accepted path
    packed: Array  # i32 [B, columns], see RoundResults
    bonus_tokens: Array  # i32 [B], the last accepted token

    @property
    def results(self) -> RoundResults:
        """The columns of ``packed``."""
        return RoundResults.unpack(self.packed, self.accept_index.shape[1])

    # i32 [B], as in RoundResults
    num_proposed_drafts = property(lambda self: self.results.num_proposed_drafts)
    num_accepted_drafts = property(lambda self: self.results.num_accepted_drafts)
    num_accepted_tokens = property(lambda self: self.results.num_accepted_tokens)

    @property
    def accept_tokens(self) -> Array:
        """The target's tokens i32 ``[B, A]`` after each row of the accepted path, then 0."""
        return self.outputs.tokens

    @property
    def features(self) -> Array:
        """Target features ``[B, A, F]`` of the accepted path, then zeros."""
        return self.outputs.features


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundOutput:
    """The outputs of a round that the host reads."""

    # i32 [B, columns], see RoundResults; [chunks] of prefill. In rounds of mixtures of experts, one
    # more row holds the float32 bits of TargetPass.distinct_experts in every column.
    packed: Array
    logprobs: Logprobs | None  # [B, A]
    hidden_states: Array | None  # [B, A, D], one per token
    prompt_logprobs: Logprobs | None = None  # [P], from prefill if requested


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingTable:
    """The sampling parameters of requests or request slots.

    End tokens stop a request on the device. The host checks all end conditions again, so end tokens
    beyond E only cost extra rounds. The annotations are the layout of the packed table: a 32-bit
    dtype, and the number of words per request if it is not 1.
    """

    temperatures: F32  # [R]; 0 is greedy
    top_ks: I32  # [R]; the vocabulary size turns top-k off
    top_ps: F32  # [R]; 1 turns top-p off
    min_ps: F32  # [R]; 0 turns min-p off
    seeds: Annotated[Array, np.uint32, 2]  # [R, 2], the request seed as two words
    # [R, E], tokens that end the request, then -1
    end_token_ids: Annotated[Array, np.int32, MAX_END_TOKENS]
    wants_logprobs: I32  # [R], 1 if log-probabilities are reported
    top_logprobs: I32  # [R], number of best tokens to report in addition to the chosen one
    is_adjusted: I32  # [R], 1 if a logit processor is used
    repetition_penalties: F32  # [R]; 1 has no effect
    frequency_penalties: F32  # [R]; 0 has no effect
    presence_penalties: F32  # [R]; 0 has no effect
    min_new_tokens: I32  # [R], minimum number of tokens before an end token
    prompt_lens: I32  # [R], number of prompt tokens
    speculates: I32  # [R], 0 if drafts are not proposed
    acceptances: F32  # [R], probability that a draft is accepted, if acceptance is simulated
    bias_ids: Annotated[Array, np.int32, MAX_LOGIT_BIAS]  # [R, M], padded with -1
    bias_values: Annotated[Array, np.float32, MAX_LOGIT_BIAS]  # [R, M]


class TokenInputs(NamedTuple):
    """Facts about the tokens ``[B, T]`` of a pass that the layers of a model may read."""

    is_real: Array  # bool [B, T]; the results of padding are not used
    request: Array  # i32 [B, T], the request of each token; arbitrary for padding
    sampling: SamplingTable  # parameters of the requests

    def parameter(self, name: str) -> Array:
        """A column of the sampling table, for each token ``[B, T, ...]``."""
        return getattr(self.sampling, name)[self.request]  # type: ignore[no-any-return]


# [L, KV indices, *values of a token] of layers with equal caches; None if there are none
Pools = tuple[Array | None, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPools:
    """The target's keys and values, the algorithm's state, and states of requests."""

    target: Pools
    draft: Any  # the algorithm's state: a pool over the same KV indices, tables, or nothing
    requests: Any = None  # the DeltaPool of the target's recurrent layers, if there are any
