"""One request: its tokens, its text, when it ends, and its figures."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from specjax.runtime.dispatched import HostLogprobs
from specjax.sampling.params import SamplingParams
from specjax.scheduling.spec_counts import SpecCounts
from specjax.text.completion import CompletionText
from specjax.text.tokenizer import IncrementalDecoder

TokenLogprob = tuple[float, int, None]


class Request:
    """A request from the caller to its end.

    Args:
        rid: identity, unique in the engine.
        input_ids: prompt tokens.
        params: sampling parameters.
        seed: the seed that its noise is keyed by.
        max_new_tokens: completion tokens at most, context limit included.
        end_token_ids: tokens that end it (none of the model's own with ``ignore_eos``).
        decoder: text of the completion, or ``None`` without a tokenizer.
        spec_width: drafted tokens a round; 0 for plain decoding.
        return_logprob: keep the log probability of every completion token.
        top_logprobs_num: with ``return_logprob``, keep those of this many best tokens too.
        timeout: seconds from now after which it ends with finish reason ``abort``.
        clock: seconds; the scheduler's.
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
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
        timeout: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.rid = rid
        self.input_ids = input_ids
        self.params = params
        self.seed = seed
        self.max_new_tokens = max_new_tokens
        self.end_token_ids = end_token_ids
        self.return_logprob = return_logprob
        self.top_logprobs_num = top_logprobs_num
        self.timeout = timeout
        self.output_ids: list[int] = []
        self.output_is_draft: list[bool] = []
        self.output_token_logprobs: list[TokenLogprob] = []
        self.output_top_logprobs: list[list[TokenLogprob]] = []
        self.finish_reason: dict[str, Any] | None = None
        self.cached_tokens = 0  # of the prompt, at its first admission
        self.num_retractions = 0
        self.admitted_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.spec = SpecCounts(spec_width) if spec_width else None
        self._text = CompletionText(decoder, params.stop_strings)
        self._clock = clock
        self.created_time = clock()
        self.ended_time: float | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be appended."""
        return self.finish_reason is not None

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities are kept beside the tokens."""
        return self.return_logprob

    @property
    def top_logprobs(self) -> int:
        """``top_logprobs_num``, or -1 where no log probabilities are kept at all."""
        return self.top_logprobs_num if self.return_logprob else -1

    @property
    def max_kv_tokens(self) -> int:
        """Tokens that ever need a place in the KV pool: the last one is never read back."""
        return len(self.input_ids) + self.max_new_tokens - 1

    @property
    def num_left(self) -> int:
        """Completion tokens that may still come."""
        return self.max_new_tokens - len(self.output_ids)

    @property
    def text(self) -> str:
        """Text of the completion so far."""
        return self._text.text

    def arrive(self) -> None:
        """Count times from now on: the request is handed in, which may be later than made."""
        self.created_time = self._clock()

    def append_first(self, token: int, logprobs: HostLogprobs | None = None) -> None:
        """Take the token that prefill sampled, with log probabilities ``[1]``."""
        self._append(token, is_draft=False)
        self._append_logprobs(self.output_ids[-1:], logprobs)

    def append_round(
        self,
        tokens: Sequence[int],
        num_accepted_drafts: int,
        num_steps: int,
        logprobs: HostLogprobs | None = None,
    ) -> int:
        """Take the tokens of one verify up to where the request ends, and return their number.

        Args:
            tokens: accepted drafts and the bonus token.
            num_accepted_drafts: of them.
            num_steps: drafted tokens; 0 where speculation was off, which is no verify.
            logprobs: beside the tokens, ``[A]``.
        """
        kept = 0
        for i, token in enumerate(tokens):
            self._append(token, is_draft=i < num_accepted_drafts)
            kept += 1
            if self.finish_reason is not None:
                break
        if self.spec is not None:
            self.spec.add(num_steps, num_accepted_drafts, kept, is_last=self.is_finished)
        self._append_logprobs(tokens[:kept], logprobs)
        return kept

    def finish(self, reason: dict[str, Any]) -> None:
        """End the request."""
        if self.is_finished:
            return
        self.finish_reason = reason
        self.ended_time = self._clock()

    def _append(self, token: int, *, is_draft: bool) -> None:
        self.output_ids.append(token)
        self.output_is_draft.append(is_draft)
        is_end = token in self.end_token_ids
        is_last = is_end or len(self.output_ids) >= self.max_new_tokens
        matched = self._text.add(None if is_end else token, flush=is_last)
        if matched is not None:
            self.finish({"type": "stop", "matched": matched})
        elif is_end:
            self.finish({"type": "stop", "matched": token})
        elif is_last:
            self.finish({"type": "length", "length": len(self.output_ids)})

    def _append_logprobs(self, kept: Sequence[int], logprobs: HostLogprobs | None) -> None:
        if logprobs is None or not self.return_logprob:
            return
        count, num_top = len(kept), self.top_logprobs_num
        for value, token in zip(logprobs.chosen[:count].tolist(), kept, strict=True):
            self.output_token_logprobs.append((value, token, None))
        if num_top:
            ids = logprobs.top_ids[:count, :num_top].tolist()
            values = logprobs.top_values[:count, :num_top].tolist()
            for best in zip(values, ids, strict=True):
                self.output_top_logprobs.append([(v, i, None) for v, i in zip(*best, strict=True)])

    def result(self) -> dict[str, Any]:
        """What the caller gets: text, completion ids and ``meta_info``, cumulative.

        ``cached_tokens`` counts prompt tokens whose KV was in the prefix cache. Times are in
        seconds from when the request was handed in; ``None`` for what has not happened.
        """
        now = self._clock() if self.ended_time is None else self.ended_time
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.finish_reason,
            "prompt_tokens": len(self.input_ids),
            "completion_tokens": len(self.output_ids),
            "cached_tokens": self.cached_tokens,
            "num_retractions": self.num_retractions,
            "e2e_latency": now - self.created_time,
            "queue_time": self._since_created(self.admitted_time),
            "time_to_first_token": self._since_created(self.first_token_time),
        }
        if self.spec is not None:
            meta |= self.spec.meta_info(len(self.output_ids))
        if self.return_logprob:
            meta["output_token_logprobs"] = list(self.output_token_logprobs)
            if self.top_logprobs_num:
                meta["output_top_logprobs"] = list(self.output_top_logprobs)
        return {"text": self.text, "output_ids": list(self.output_ids), "meta_info": meta}

    def streamed_text(self) -> str:
        """Text that no later token can take back: the start of a stop string is held."""
        return self.text if self.is_finished else self._text.streamed()

    def _since_created(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.created_time
