"""Tables of pages and sampling parameters by request slot, on the host and packed for the device.

A change in any slot uploads the whole table, as one array, because separate arrays for the columns
would need 15 times as many calls.
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import get_type_hints

import jax
import numpy as np
from jax import Array

from specjax.checks import ParameterError
from specjax.sampling.logit_processor import mask_words, used_by
from specjax.sampling.params import SamplingParams
from specjax.types import MAX_END_TOKENS, MAX_LOGIT_BIAS, SamplingTable

# a slot on the host, with the fields of SamplingTable in 32-bit words
SLOT = np.dtype(
    [
        (name, *hint.__metadata__)
        for name, hint in get_type_hints(SamplingTable, include_extras=True).items()
    ]
)


def check_slot_limits(
    params: SamplingParams, end_token_ids: Collection[int], vocab_size: int
) -> None:
    """Raise ValueError for parameters that the tables cannot hold."""
    outside = [token for token, _ in params.biases if token >= vocab_size]
    if outside:
        message = f"logit_bias token ids {outside} must be at most {vocab_size - 1} (vocabulary)"
        raise ParameterError(message, param="logit_bias", limit=vocab_size - 1)
    if len(params.biases) > MAX_LOGIT_BIAS:
        message = f"logit_bias has {len(params.biases)} tokens; the limit is {MAX_LOGIT_BIAS}"
        raise ParameterError(message, param="logit_bias", limit=MAX_LOGIT_BIAS)
    num_ends = len(_known_ends(end_token_ids, vocab_size))
    if params.min_new_tokens and num_ends > MAX_END_TOKENS:
        raise ParameterError(
            f"min_new_tokens={params.min_new_tokens} works with at most {MAX_END_TOKENS} end "
            f"tokens, but the request has {num_ends}; give fewer stop_token_ids or set ignore_eos",
            param="min_new_tokens",
            limit=MAX_END_TOKENS,
        )


def _known_ends(end_token_ids: Collection[int], vocab_size: int) -> set[int]:
    """The end tokens in the model's vocabulary; a checkpoint may list ids outside of it."""
    return {i for i in end_token_ids if 0 <= i < vocab_size}


def neutral_sampling(num_slots: int, vocab_size: int) -> np.ndarray:
    """An array ``[num_slots]`` of greedy slots with the fields of :class:`SamplingTable`."""
    table = np.zeros(num_slots, SLOT)
    table["top_ps"] = table["repetition_penalties"] = 1
    table["end_token_ids"] = table["bias_ids"] = -1
    table["top_ks"] = vocab_size
    table["speculates"] = 1
    return table


def pack_sampling(table: np.ndarray) -> np.ndarray:
    """Copy the table's records ``[R]`` bitwise to i32 ``[R, K]``."""
    return np.array(table).view(np.int32).reshape(len(table), -1)


def unpack_sampling(packed: Array, slots: Array) -> SamplingTable:
    """Unpack slots i32 ``[B]`` of a table from :func:`pack_sampling`, in a traced function."""
    rows = packed[slots]

    def column(name: str) -> Array:
        dtype, start = SLOT.fields[name][:2]  # type: ignore[index]
        words = rows[:, start // 4 : (start + dtype.itemsize) // 4]
        words = words.reshape(len(rows), *dtype.shape)
        return jax.lax.bitcast_convert_type(words, dtype.base)

    return SamplingTable(**{name: column(name) for name in SLOT.names or ()})


class HostTables:
    """The host's copies of the tables; at first, slots are greedy and have no pages.

    A change is uploaded before the next dispatch that uses the slot. An upload takes as long as a
    dispatch, and changes the round's CUDA graph.
    """

    def __init__(
        self,
        num_slots: int,
        pages_per_request: int,
        vocab_size: int,
        *,
        has_masks: bool = False,
        num_pools: int = 1,
    ) -> None:
        self.page_tables = np.zeros((num_pools, num_slots, pages_per_request), np.int32)
        self.sampling = neutral_sampling(num_slots, vocab_size)
        self._neutral = self.sampling[0].copy()
        # [R], whether a slot needs only the most likely token
        self.is_greedy = np.ones(num_slots, np.bool_)
        self.wants_hidden_states = np.zeros(num_slots, np.bool_)
        self.vocab_size = vocab_size
        # i32 [R, V / 32], bits of the tokens that may follow a prompt
        num_words = mask_words(vocab_size) if has_masks else 0
        self.masks = np.full((num_slots, num_words), -1, np.int32)
        # by input, the slots whose copy on the device is out of date; at first, all of them
        self.stale: defaultdict[str, set[int]] = defaultdict(lambda: set(range(num_slots)))

    def set_pages(self, slot: int, pages: Sequence[int], first: int, pool: int = 0) -> None:
        """Write a slot's pages in a pool; those of the first pool have none in the others yet."""
        self.page_tables[pool : None if pool == 0 else pool + 1, slot, first:] = 0
        self.page_tables[pool, slot, first : first + len(pages)] = pages
        self.stale["pages"].add(slot)

    def clear(self, slot: int) -> None:
        """Make a slot equal to padding slot 0.

        Nothing is uploaded, because the slot is set again before any dispatch uses it.
        """
        self.page_tables[:, slot] = 0
        self.sampling[slot] = self._neutral
        self.is_greedy[slot] = True
        self.wants_hidden_states[slot] = False

    def set_sampling(
        self,
        slot: int,
        params: SamplingParams,
        *,
        seed: int,
        end_token_ids: Collection[int] = (),
        prompt_len: int = 0,
        top_logprobs: int | None = None,
        hidden_states: bool = False,
        mask: np.ndarray | None = None,
    ) -> None:
        """Write the parameters of a slot, which have passed :func:`check_slot_limits`.

        Tokens prefilled after the first ``prompt_len`` count as produced. ``top_logprobs`` is the
        number of most likely tokens to report per position; ``None``: no log-probabilities.
        ``hidden_states`` reports the hidden state from which each token was drawn. ``mask`` i32
        ``[V / 32]`` has the bits of the tokens that may follow the text to prefill.
        """
        if self.masks.size and (mask is not None or (self.masks[slot] != -1).any()):
            self.masks[slot] = -1 if mask is None else mask
            self.stale["masks"].add(slot)
        self.sampling[slot] = self._neutral
        row = self.sampling[slot]
        if not params.is_greedy:
            row["temperatures"] = params.temperature
            if params.top_k > 0:
                row["top_ks"] = min(params.top_k, self.vocab_size)
            row["top_ps"] = params.top_p
            row["min_ps"] = params.min_p
        row["seeds"] = seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF
        ends = heapq.nsmallest(MAX_END_TOKENS, _known_ends(end_token_ids, self.vocab_size))
        row["end_token_ids"][: len(ends)] = ends
        row["wants_logprobs"] = top_logprobs is not None
        row["top_logprobs"] = top_logprobs or 0
        row["prompt_lens"] = prompt_len
        row["speculates"] = params.speculative
        row["acceptances"] = params.simulate_acceptance or 0.0
        for processor in (processors := used_by(params)):
            processor.fill(row, params)
        row["is_adjusted"] = bool(processors)
        is_quiet = top_logprobs is None and not hidden_states
        self.is_greedy[slot] = params.is_greedy and not processors and is_quiet
        self.wants_hidden_states[slot] = hidden_states
        self.stale["sampling"].add(slot)

    def wants_logprobs(self, slots: Sequence[int]) -> bool:
        return bool(self.sampling["wants_logprobs"][list(slots)].any())
