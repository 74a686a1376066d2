"""One request: its tokens, its text, when it ends, and its figures."""

import time
from dataclasses import dataclass, field
from typing import Any

from specjax.sampling_params import SamplingParams
from specjax.tokenizer import IncrementalDecoder


@dataclass
class SpecCounts:
    """Speculative figures of a request; every accepted-draft count is without the bonus token.

    Drafts behind a stop do not count, accepted or not: in the round that ends the request, only
    drafts for the positions of kept tokens are proposals.
    """

    width: int  # drafted tokens a round, at most
    num_correct_drafts: int = 0
    num_proposed_drafts: int = 0
    histogram: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.histogram = [0] * (self.width + 1)

    def add(self, num_steps: int, num_accepted_drafts: int, num_kept: int, is_last: bool) -> int:
        """Count one verify of which ``num_kept`` tokens stay; returns the drafts among them."""
        correct = min(num_accepted_drafts, num_kept)
        self.num_correct_drafts += correct
        self.num_proposed_drafts += min(num_steps, num_kept) if is_last else num_steps
        self.histogram[correct] += 1
        return correct

    def meta_info(self, completion_tokens: int) -> dict[str, Any]:
        """The figures under SGLang's names."""
        verifies = sum(self.histogram)
        proposed = self.num_proposed_drafts
        return {
            "spec_verify_ct": verifies,
            "spec_accept_length": completion_tokens / verifies if verifies else 0.0,
            "spec_accept_rate": self.num_correct_drafts / proposed if proposed else 0.0,
            "spec_num_correct_drafts": self.num_correct_drafts,
            "spec_num_proposed_drafts": proposed,
            "spec_correct_drafts_histogram": list(self.histogram),
        }


class Request:
    """A request from admission to its end.

    Args:
        rid: identity, unique in the engine.
        input_ids: prompt tokens.
        params: sampling parameters.
        seed: the seed that its noise is keyed by.
        max_new_tokens: completion tokens at most, context limit included.
        end_token_ids: tokens that end it (none of the model's own with ``ignore_eos``).
        decoder: text of the completion, or ``None`` without a tokenizer.
        spec_width: drafted tokens a round; 0 for plain decoding.
    """

    def __init__(
        self,
        rid: str,
        input_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        max_new_tokens: int,
        end_token_ids: frozenset[int],
        decoder: IncrementalDecoder | None,
        spec_width: int,
    ) -> None:
        self.rid = rid
        self.input_ids = input_ids
        self.params = params
        self.seed = seed
        self.max_new_tokens = max_new_tokens
        self.slot = 0
        self.pages: list[int] = []
        self.output_ids: list[int] = []
        self.output_is_draft: list[bool] = []
        self.text = ""
        self.finish_reason: dict[str, Any] | None = None
        self.end_token_ids = end_token_ids
        self._decoder = decoder
        self._spec = SpecCounts(spec_width) if spec_width else None
        self._created = time.perf_counter()
        self._ended = 0.0

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be appended."""
        return self.finish_reason is not None

    @property
    def max_kv_tokens(self) -> int:
        """Tokens that ever need a place in the KV pool: the last one is never read back."""
        return len(self.input_ids) + self.max_new_tokens - 1

    def append_first(self, token: int) -> None:
        """Take the token that prefill sampled."""
        self._append(token, is_draft=False)

    def append_round(self, tokens: list[int], num_accepted_drafts: int, num_steps: int) -> None:
        """Take the tokens of one verify, up to where the request ends."""
        kept = 0
        for i, token in enumerate(tokens):
            self._append(token, is_draft=i < num_accepted_drafts)
            kept += 1
            if self.is_finished:
                break
        if self._spec is not None:
            self._spec.add(num_steps, num_accepted_drafts, kept, is_last=self.is_finished)

    def finish(self, reason: dict[str, Any]) -> None:
        """End the request."""
        if self.is_finished:
            return
        self.finish_reason = reason
        self._ended = time.perf_counter()

    def _append(self, token: int, *, is_draft: bool) -> None:
        self.output_ids.append(token)
        self.output_is_draft.append(is_draft)
        is_end = token in self.end_token_ids
        is_last = is_end or len(self.output_ids) >= self.max_new_tokens
        matched = self._add_text(None if is_end else token, flush=is_last)
        if matched is not None:
            self.finish({"type": "stop", "matched": matched})
        elif is_end:
            self.finish({"type": "stop", "matched": token})
        elif is_last:
            self.finish({"type": "length", "length": len(self.output_ids)})

    def _add_text(self, token: int | None, *, flush: bool) -> str | None:
        """Add a token's text; the stop string that it completes, if any, is cut off.

        With ``flush`` the text that was held back as half a character comes too.
        """
        if self._decoder is None:
            return None
        stops = self.params.stop_strings
        # a new match ends in the new text, so it starts no earlier than this
        search_from = max(0, len(self.text) - max(map(len, stops), default=0) + 1)
        if token is not None:
            self.text += self._decoder.push([token])
        if flush:
            self.text += self._decoder.flush()
        found = [(self.text.find(stop, search_from), stop) for stop in stops]
        hits = [(at, stop) for at, stop in found if at >= 0]
        if not hits:
            return None
        at, stop = min(hits)
        self.text = self.text[:at]
        return stop

    def result(self) -> dict[str, Any]:
        """What the caller gets: text, completion ids and ``meta_info``, cumulative."""
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.finish_reason,
            "prompt_tokens": len(self.input_ids),
            "completion_tokens": len(self.output_ids),
            "e2e_latency": (self._ended or time.perf_counter()) - self._created,
        }
        if self._spec is not None:
            meta |= self._spec.meta_info(len(self.output_ids))
        return {"text": self.text, "output_ids": list(self.output_ids), "meta_info": meta}

    def streamed_text(self) -> str:
        """Text that no later token can take back: the start of a stop string is held."""
        if self.is_finished:
            return self.text
        held = 0
        for stop in self.params.stop_strings:
            for size in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:size]):
                    held = size
                    break
        return self.text[: len(self.text) - held]
