"""Per-slot tables on the host: pages and sampling parameters of the requests that run."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from specjax.sampling.params import SamplingParams
from specjax.types import AdjustmentTable, SamplingTable

# end tokens of a request that the device knows; models have one to four
MAX_END_TOKENS = 8
MAX_LOGIT_BIAS = 64


def check_slot_limits(
    params: SamplingParams, end_token_ids: Collection[int], vocab_size: int
) -> None:
    """Refuse parameters that the tables cannot hold.

    Raises:
        ValueError: with the value and the limit.
    """
    bias = params.biases
    outside = [i for i in bias if i >= vocab_size]
    if outside:
        raise ValueError(
            f"logit_bias names tokens {outside}, but the vocabulary ends at {vocab_size - 1}"
        )
    if len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(
            f"logit_bias has {len(bias)} tokens; {MAX_LOGIT_BIAS} a request are supported"
        )
    ends = _known_ends(end_token_ids, vocab_size)
    if params.min_new_tokens and len(ends) > MAX_END_TOKENS:
        raise ValueError(
            f"min_new_tokens={params.min_new_tokens} with {len(ends)} end tokens: at most "
            f"{MAX_END_TOKENS} can be held back; give fewer stop_token_ids or set ignore_eos"
        )


def _known_ends(end_token_ids: Collection[int], vocab_size: int) -> list[int]:
    """End tokens that the model can produce; a checkpoint may name some beyond its vocabulary."""
    return sorted({i for i in end_token_ids if 0 <= i < vocab_size})


def neutral_sampling(num_slots: int, vocab_size: int) -> Any:
    """A :class:`SamplingTable` of numpy arrays for greedy rows."""

    def full(value: float, dtype: Any, *tail: int) -> Any:
        return np.full((num_slots, *tail), value, dtype)

    return SamplingTable(
        temperatures=full(0, np.float32),
        top_ks=full(vocab_size, np.int32),
        top_ps=full(1, np.float32),
        min_ps=full(0, np.float32),
        seeds=full(0, np.uint32, 2),
        end_token_ids=full(-1, np.int32, MAX_END_TOKENS),
        top_logprobs=full(-1, np.int32),
        adjustments=AdjustmentTable(
            counts_tokens=full(False, np.bool_),
            repetition_penalties=full(1, np.float32),
            frequency_penalties=full(0, np.float32),
            presence_penalties=full(0, np.float32),
            min_new_tokens=full(0, np.int32),
            prompt_lens=full(0, np.int32),
            bias_ids=full(-1, np.int32, MAX_LOGIT_BIAS),
            bias_values=full(0, np.float32, MAX_LOGIT_BIAS),
        ),
    )


@dataclass
class HostTables:
    """Host copies of the per-slot tables; a change is uploaded before the next dispatch.

    ``sampling`` is a :class:`SamplingTable` of numpy arrays; ``is_plain`` marks slots that ask for
    nothing but the most likely token.
    """

    page_table: np.ndarray  # i32 [R, P]
    sampling: Any
    is_plain: np.ndarray  # bool [R]
    pages_dirty: bool = True
    sampling_dirty: bool = True

    @classmethod
    def empty(cls, num_slots: int, pages_per_request: int, vocab_size: int) -> "HostTables":
        """Tables of greedy rows without pages."""
        return cls(
            page_table=np.zeros((num_slots, pages_per_request), np.int32),
            sampling=neutral_sampling(num_slots, vocab_size),
            is_plain=np.ones(num_slots, np.bool_),
        )

    def set_pages(self, slot: int, pages: Sequence[int], first: int) -> None:
        """Write a slot's page table from entry ``first`` on; the entries behind become 0."""
        row = self.page_table[slot]
        row[first : first + len(pages)] = pages
        row[first + len(pages) :] = 0
        self.pages_dirty = True

    def clear(self, slot: int) -> None:
        """Make a slot like the padding slot 0.

        Nothing is uploaded: no dispatch names the slot before it is set again.
        """
        self.page_table[slot] = 0
        for leaf in jax.tree.leaves(self.sampling):
            leaf[slot] = leaf[0]
        self.is_plain[slot] = True

    def set_sampling(
        self,
        slot: int,
        params: SamplingParams,
        vocab_size: int,
        *,
        seed: int,
        end_token_ids: Collection[int],
        prompt_len: int,
        top_logprobs: int,
    ) -> None:
        """Write a slot's parameters; a greedy row has no filters, which change nothing there.

        Raises:
            ValueError: for what :func:`check_slot_limits` refuses.
        """
        check_slot_limits(params, end_token_ids, vocab_size)
        row = neutral_sampling(1, vocab_size)
        if not params.is_greedy:
            row.temperatures[0] = params.temperature
            row.top_ks[0] = vocab_size if params.top_k == -1 else min(params.top_k, vocab_size)
            row.top_ps[0] = params.top_p
            row.min_ps[0] = params.min_p
        row.seeds[0] = (seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF)
        ends = _known_ends(end_token_ids, vocab_size)[:MAX_END_TOKENS]
        row.end_token_ids[0, : len(ends)] = ends
        row.top_logprobs[0] = top_logprobs
        changes = row.adjustments
        changes.counts_tokens[0] = params.has_penalties
        changes.repetition_penalties[0] = params.repetition_penalty
        changes.frequency_penalties[0] = params.frequency_penalty
        changes.presence_penalties[0] = params.presence_penalty
        changes.min_new_tokens[0] = params.min_new_tokens
        changes.prompt_lens[0] = prompt_len
        bias = params.biases
        changes.bias_ids[0, : len(bias)] = list(bias)
        changes.bias_values[0, : len(bias)] = list(bias.values())
        for whole, one in zip(jax.tree.leaves(self.sampling), jax.tree.leaves(row), strict=True):
            whole[slot] = one[0]
        adjusts = params.has_penalties or bias or params.min_new_tokens
        self.is_plain[slot] = params.is_greedy and not adjusts and top_logprobs < 0
        self.sampling_dirty = True

    def wants_logprobs(self, slots: Sequence[int]) -> bool:
        """Whether any of the slots asks for log-probabilities."""
        return bool((self.sampling.top_logprobs[list(slots)] >= 0).any())
