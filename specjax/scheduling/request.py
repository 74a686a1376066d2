"""Requests: their options, tokens, text and metrics, and the state of running requests."""

import heapq
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from specjax.checks import check_integer, check_number, refused
from specjax.kv.holding import PageHolding
from specjax.models.routes import Routes
from specjax.sampling.grammar_request import RequestGrammar
from specjax.sampling.params import SamplingParams
from specjax.text.completion import CompletionText
from specjax.text.tokenizer import IncrementalDecoder
from specjax.types import NO_DRAFTS, DraftShape, Logprobs

_secret, _numbers = os.urandom(32), itertools.count()


def new_id() -> str:
    """32 hexadecimal digits that nobody can guess, made without a system call.

    During ``os.urandom``, another thread would take the interpreter. That took 8 % of the event
    loop's time in bursts of 64 requests on two CPU cores.
    """
    number = next(_numbers).to_bytes(8)
    return blake2b(number, digest_size=16, key=_secret).hexdigest()


def _renew_secret() -> None:
    global _secret
    _secret = os.urandom(32)


os.register_at_fork(after_in_child=_renew_secret)


@dataclass
class SpecCounts:
    """Counts of a request's drafts, without bonus tokens and tokens after its end.

    In a request's last round, a chain's drafts beyond the last token that the request keeps do not
    count as proposed. In a tree, all nodes count, because they are not in the order of positions.
    """

    histogram: list[int]  # number of verify passes by number of accepted drafts
    simulate_accept_length: float | None = None  # mean accepted tokens per round, right or wrong
    simulate_acceptance: float | None = None  # acceptance probability of a draft, right or wrong
    num_plain_tokens: int = 0  # tokens from rounds without drafts, which are not verify passes
    num_switches: int = 0
    tier: DraftShape | None = None  # tier of the last round
    rounds_by_steps: dict[int, int] = field(default_factory=dict)
    ema_accept_len: float | None = None  # the engine's average, if drafting adapts
    num_accepted_drafts: int = 0
    num_proposed_drafts: int = 0
    num_verifies: int = 0
    # since the last take_new: proposed drafts; accepted drafts of each verify, in output and in all
    _new_proposed: int = 0
    _new_accepted: list[tuple[int, int]] = field(default_factory=list)

    def add(
        self, tier: DraftShape, num_proposed: int, num_accepted: int, num_kept: int, is_last: bool
    ) -> None:
        """Count one round with ``num_kept`` kept tokens; without proposed drafts, it is plain."""
        tier = tier if num_proposed else NO_DRAFTS
        self.num_switches += self.tier not in (None, tier)
        self.tier = tier
        self.rounds_by_steps[tier.steps] = self.rounds_by_steps.get(tier.steps, 0) + 1
        if tier.steps == 0:
            self.num_plain_tokens += num_kept
            return
        accepted = min(num_accepted, num_kept)
        self.num_accepted_drafts += accepted
        is_cut = is_last and tier.topk == 1
        proposed = min(num_proposed, num_kept) if is_cut else num_proposed
        self.num_proposed_drafts += proposed
        self.num_verifies += 1
        self.histogram[accepted] += 1
        self._new_proposed += proposed
        self._new_accepted.append((accepted, num_accepted))

    def take_new(self) -> tuple[int, list[tuple[int, int]]]:
        """Return proposed drafts, and accepted ones of each verify pass, since the last call."""
        counts = self._new_proposed, self._new_accepted
        self._new_proposed, self._new_accepted = 0, []
        return counts

    def meta_info(self, completion_tokens: int) -> dict[str, Any]:
        verifies, proposed = self.num_verifies, self.num_proposed_drafts
        speculated = completion_tokens - self.num_plain_tokens
        meta = {
            "spec_verify_ct": verifies,
            "spec_accept_length": speculated / verifies if verifies else 0.0,
            "spec_accept_rate": self.num_accepted_drafts / proposed if proposed else 0.0,
            "spec_num_correct_drafts": self.num_accepted_drafts,
            "spec_num_proposed_drafts": proposed,
            "spec_num_wasted_drafts": proposed - self.num_accepted_drafts,
            "spec_correct_drafts_histogram": list(self.histogram),
            "spec_num_steps": None if self.tier is None else self.tier.steps,
            "spec_num_switches": self.num_switches,
            "spec_rounds_by_steps": {str(k): n for k, n in sorted(self.rounds_by_steps.items())},
        }
        for name in ("ema_accept_len", "simulate_accept_length", "simulate_acceptance"):
            if (value := getattr(self, name)) is not None:
                meta[f"spec_{name}"] = value
        return meta


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One input of :meth:`Engine.generate` with its options, under the same names.

    Raises ValueError for an invalid value.
    """

    rid: str
    input_ids: list[int]  # the engine checks vocabulary and context length
    sampling_params: SamplingParams
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1
    return_hidden_states: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    timeout: float | None = None

    def __post_init__(self) -> None:
        for name in ("return_logprob", "return_hidden_states", "return_routed_experts"):
            if not isinstance(value := getattr(self, name), bool):
                raise refused(name, value, "must be a bool")
        check_integer("top_logprobs_num", self.top_logprobs_num, 0)
        check_integer("logprob_start_len", self.logprob_start_len, -1, len(self.input_ids) - 1)
        for name, default in (("top_logprobs_num", 0), ("logprob_start_len", -1)):
            if (value := getattr(self, name)) != default and not self.return_logprob:
                raise refused(name, value, "needs return_logprob=True")
        start = check_integer(
            "routed_experts_start_len", self.routed_experts_start_len, 0, len(self.input_ids)
        )
        if start and not self.return_routed_experts:
            raise refused("routed_experts_start_len", start, "needs return_routed_experts=True")
        if self.timeout is not None:
            check_number("timeout", self.timeout, above=0)


# (log-probability, token id, None); the log-probability of the first prompt token is None
TokenLogprob = tuple[float | None, int, None]


@dataclass(eq=False, repr=False)
class Request:
    """A request from its submission to its end."""

    arguments: GenerateRequest
    _: KW_ONLY
    seed: int  # seed of the noise
    max_new_tokens: int  # maximum number of completion tokens that also fits the context
    end_token_ids: frozenset[int]  # with ``ignore_eos``, without those of the model
    decoder: InitVar[IncrementalDecoder | None]  # ``None`` without a tokenizer
    spec_width: InitVar[int]  # maximum accepted drafts per round; 0 for plain decoding
    spec_simulated: InitVar[float | None] = None  # as SpecCounts.simulate_accept_length
    constraint: RequestGrammar | None = None  # the grammar of the completion
    routes: Routes | None = None  # set if they are reported; filled when the request ends
    is_deterministic: bool = False  # whether the result does not depend on other requests' rows
    clock: Callable[[], float] = time.perf_counter  # the scheduler's clock, in seconds

    output_ids: list[int] = field(default_factory=list, init=False)
    output_is_draft: list[bool] = field(default_factory=list, init=False)
    output_token_logprobs: list[TokenLogprob] = field(default_factory=list, init=False)
    output_top_logprobs: list[list[TokenLogprob]] = field(default_factory=list, init=False)
    output_hidden_states: list[np.ndarray] = field(default_factory=list, init=False)  # f32 [n, D]
    # for prompt tokens after ``logprob_start_len``, as far as they are computed
    input_token_logprobs: list[TokenLogprob] = field(default_factory=list, init=False)
    input_top_logprobs: list[list[TokenLogprob]] = field(default_factory=list, init=False)
    finish_reason: dict[str, Any] | None = field(default=None, init=False)
    cached_tokens: int = field(default=0, init=False)  # prompt tokens cached at first admission
    num_retractions: int = field(default=0, init=False)
    admitted_time: float | None = field(default=None, init=False)
    first_token_time: float | None = field(default=None, init=False)
    last_token_time: float | None = field(default=None, init=False)
    ended_time: float | None = field(default=None, init=False)

    def __post_init__(
        self, decoder: IncrementalDecoder | None, spec_width: int, spec_simulated: float | None
    ) -> None:
        arguments = self.arguments
        self.rid, self.input_ids = arguments.rid, arguments.input_ids
        self.params = arguments.sampling_params
        # Number of most likely tokens to report per token, and the first prompt token whose
        # log-probability is reported. ``None`` reports no log-probabilities.
        self.top_logprobs = arguments.top_logprobs_num if arguments.return_logprob else None
        start = arguments.logprob_start_len
        self.logprob_start_len = None if start < 0 else start
        is_speculative = spec_width > 0 and self.params.speculative
        simulated = spec_simulated, self.params.simulate_acceptance
        self.spec = SpecCounts([0] * (spec_width + 1), *simulated) if is_speculative else None
        keeps_stop = self.params.no_stop_trim
        self._text = CompletionText(decoder, self.params.stop_strings, keeps_stop=keeps_stop)
        self.arrive()

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def max_kv_tokens(self) -> int:
        """Maximum number of the request's tokens in the KV pool; the last token is not stored."""
        return len(self.input_ids) + max(1, self.max_new_tokens) - 1

    @property
    def max_reported(self) -> int:
        """Maximum number of log-probabilities to report, including those of most likely tokens."""
        if self.top_logprobs is None:
            return 0
        start = self.logprob_start_len
        num_scored = 0 if start is None else len(self.input_ids) - start
        return (num_scored + self.max_new_tokens) * (1 + self.top_logprobs)

    @property
    def max_experts(self) -> int:
        """Maximum number of experts to report."""
        if self.routes is None:
            return 0
        num_tokens = len(self.input_ids) + self.max_new_tokens
        return (num_tokens - self.arguments.routed_experts_start_len) * self.routes.per_token

    @property
    def known_ids(self) -> list[int]:
        return self.input_ids + self.output_ids

    @property
    def num_left(self) -> int:
        return self.max_new_tokens - len(self.output_ids)

    @property
    def latency(self) -> float:
        """Seconds from submission to the end of the request, or until now."""
        return (self.clock() if self.ended_time is None else self.ended_time) - self.created_time

    @property
    def text(self) -> str:
        return self._text.text

    def arrive(self) -> None:
        """Start timing now, at submission, which may be long after the request was created."""
        self.created_time = self.clock()

    @property
    def num_cacheable(self) -> int:
        """Maximum number of tokens whose KV may come from the prefix cache."""
        missing = self.missing_logprobs
        return len(self.known_ids) if missing is None else missing

    @property
    def missing_logprobs(self) -> int | None:
        """Index of the first prompt token to run for log-probabilities; ``None`` if all exist."""
        if self.logprob_start_len is None:
            return None
        position = self.logprob_start_len + len(self.input_token_logprobs)
        return position if position < len(self.input_ids) - 1 else None

    def forget_prompt_logprobs(self) -> None:
        """Drop prompt log-probabilities if no token exists yet, because weights may change."""
        if not self.output_ids:
            self.input_token_logprobs, self.input_top_logprobs = [], []

    def take_prompt_logprobs(self, start: int, logprobs: Logprobs) -> None:
        """Store log-probabilities ``[tokens]`` of the prompt tokens from ``start + 1`` on."""
        assert self.logprob_start_len is not None
        assert self.top_logprobs is not None
        # skip log-probabilities that are stored already, and those after the prompt
        position = self.logprob_start_len + len(self.input_token_logprobs)
        ids = self.input_ids[position + 1 : start + 1 + len(logprobs.chosen)]
        in_prompt = slice(position - start, position - start + len(ids))
        self.input_token_logprobs += _triples(logprobs.chosen[in_prompt].tolist(), ids)
        top_ids = logprobs.top_ids[in_prompt, : self.top_logprobs].tolist()
        top_values = logprobs.top_values[in_prompt, : self.top_logprobs].tolist()
        self.input_top_logprobs += map(_triples, top_values, top_ids)

    def append_first(
        self, token: int, logprobs: Logprobs | None = None, states: np.ndarray | None = None
    ) -> None:
        """Append the token that prefill sampled, with log-probabilities and hidden states ``[1]``.

        A request with ``max_new_tokens=0`` ends without it, because only its prompt is scored.
        """
        if not self.max_new_tokens:
            self.finish({"type": "length", "length": 0})
            return
        num_appended = self._append([token], 0)
        self._append_reports([token][:num_appended], logprobs, states)

    def append_round(
        self,
        tokens: Sequence[int],
        num_proposed: int,
        num_accepted: int,
        tier: DraftShape,
        logprobs: Logprobs | None = None,
        states: np.ndarray | None = None,
    ) -> int:
        """Append accepted drafts and the bonus token until the request ends.

        ``logprobs [A]`` and ``states`` f32 ``[A, D]`` are the tokens'. Returns the number kept.
        """
        num_appended = self._append(tokens, num_accepted)
        if self.spec is not None:
            self.spec.add(tier, num_proposed, num_accepted, num_appended, is_last=self.is_finished)
        self._append_reports(tokens[:num_appended], logprobs, states)
        return num_appended

    def finish(self, reason: dict[str, Any]) -> None:
        """End the request if it has not ended."""
        if not self.is_finished:
            self.finish_reason = reason
            self.ended_time = self.clock()
            self.close()

    def close(self) -> None:
        """End the process of the grammar, also if the request was refused."""
        if self.constraint is not None:
            self.constraint.close()

    def fail(self) -> None:
        """Stop decoding text after a decoding error; keep the text so far."""
        self._text.stop()

    def _append(self, tokens: Sequence[int], num_drafts: int) -> int:
        """Append tokens, drafts first, until the request ends; return the number kept."""
        max_tokens, ends = self.num_left, self.end_token_ids
        tokens = tokens[:max_tokens]
        if self.constraint is not None:
            tokens = tokens[: self.constraint.answer.num_accepted]
            if self.constraint.answer.is_free:
                self.constraint.close()
                self.constraint = None
        end = None  # index of the first end token
        if not ends.isdisjoint(tokens):
            end = next(i for i, token in enumerate(tokens) if token in ends)
            tokens = tokens[: end + 1]
        is_last = end is not None or len(tokens) == max_tokens
        visible = tokens if self.params.no_stop_trim else tokens[:end]
        count, matched = self._text.add(visible, flush=is_last)
        if matched is not None:
            tokens = tokens[:count]
        num_drafts = min(num_drafts, len(tokens))
        self.output_ids += tokens
        self.output_is_draft += [True] * num_drafts + [False] * (len(tokens) - num_drafts)
        if matched is not None:
            self.finish({"type": "stop", "matched": matched})
        elif end is not None:
            self.finish({"type": "stop", "matched": tokens[end]})
        elif is_last:
            self.finish({"type": "length", "length": len(self.output_ids)})
        elif self.constraint is not None:
            self.check_constraint()
        return len(tokens)

    @property
    def mask(self) -> np.ndarray | None:
        """Bits i32 ``[V / 32]`` of the tokens that the grammar allows next."""
        return None if self.constraint is None else self.constraint.mask

    def check_constraint(self) -> None:
        """End the request if its grammar is complete, or if it cannot be continued."""
        assert self.constraint is not None
        if self.constraint.error:
            self.finish({"type": "abort", "message": f"grammar: {self.constraint.error}"})
        elif self.constraint.answer.is_complete:
            self.finish({"type": "stop", "matched": None})

    def _append_reports(
        self, tokens: Sequence[int], logprobs: Logprobs | None, states: np.ndarray | None
    ) -> None:
        if states is not None and self.arguments.return_hidden_states:
            self.output_hidden_states.append(states[: len(tokens)])
        if logprobs is None or self.top_logprobs is None:
            return
        count, num_top = len(tokens), self.top_logprobs
        self.output_token_logprobs += _triples(logprobs.chosen[:count].tolist(), tokens)
        if num_top:
            ids = logprobs.top_ids[:count, :num_top].tolist()
            values = logprobs.top_values[:count, :num_top].tolist()
            self.output_top_logprobs += map(_triples, values, ids)

    def result(self) -> dict[str, Any]:
        """The cumulative result for the caller: text, completion ids and ``meta_info``.

        ``cached_tokens`` counts prompt tokens whose KV was in the prefix cache. Times are in
        seconds since submission, or ``None`` if the event has not happened.
        """
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.finish_reason,
            "prompt_tokens": len(self.input_ids),
            "completion_tokens": len(self.output_ids),
            "cached_tokens": self.cached_tokens,
            "num_retractions": self.num_retractions,
            "e2e_latency": self.latency,
            "queue_time": self._since_created(self.admitted_time),
            "time_to_first_token": self._since_created(self.first_token_time),
            "speculative": self.spec is not None,
            "deterministic": self.is_deterministic,
        }
        if self.spec is not None:
            meta |= self.spec.meta_info(len(self.output_ids))
        if self.top_logprobs is not None:
            meta["output_token_logprobs"] = list(self.output_token_logprobs)
            if self.top_logprobs:
                meta["output_top_logprobs"] = list(self.output_top_logprobs)
        if self.logprob_start_len is not None:
            first_entry = (None, self.input_ids[self.logprob_start_len], None)
            meta["input_token_logprobs"] = [first_entry, *self.input_token_logprobs]
            if self.top_logprobs:
                meta["input_top_logprobs"] = [None, *self.input_top_logprobs]
        if self.arguments.return_hidden_states:
            meta["hidden_states"] = np.concatenate(self.output_hidden_states or [np.empty((0, 0))])
        if self.routes is not None and self.is_finished:
            meta["routed_experts"] = self.routes  # whose array the caller's thread makes
        return {"text": self.text, "output_ids": list(self.output_ids), "meta_info": meta}

    def streamed_text(self) -> str:
        """The text that later tokens cannot change, without a possible start of a stop string."""
        return self.text if self.is_finished else self._text.streamed()

    def _since_created(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.created_time


@dataclass(eq=False, kw_only=True)
class RunningRequest(PageHolding):
    """A request from its admission to its end or preemption.

    After the first token is read, ``kv_len`` does not count the last token, whose KV is missing.
    """

    request: Request
    awaits_first: bool = False  # the token that prefill sampled is not read yet
    is_remote: bool = False  # the prompt is computed elsewhere and has not arrived completely
    is_released: bool = False  # slot and pages are freed; results in flight are ignored
    awaits_grammar: bool = False  # a result has been read, and its grammar has not answered

    @property
    def is_late(self) -> bool:
        """Whether the request takes part in no round, because an answer of its grammar is late."""
        constraint = self.request.constraint
        return self.awaits_grammar or (constraint is not None and constraint.is_busy)

    @property
    def is_prefilled(self) -> bool:
        """Whether the last chunk of ``prefill_ids`` has been dispatched."""
        return self.kv_len >= len(self.prefill_ids) and not self.is_remote

    def can_advance(self) -> bool:
        """Whether another round may be needed.

        Each unread round gives at least one token. If there are as many unread rounds as tokens
        left, the request will end with their results.
        """
        unread = self.unread_rounds + self.awaits_first
        return self.is_prefilled and self.request.num_left > unread and not self.is_late


def _triples(values: list[float], ids: Sequence[int]) -> list[TokenLogprob]:
    return [(value, token, None) for value, token in zip(values, ids, strict=True)]


class Deadlines:
    """Requests with a timeout, ordered by deadline."""

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, Request]] = []
        self._serial = itertools.count()
        self._limit = 0

    def watch(self, request: Request) -> None:
        timeout = request.arguments.timeout
        if timeout is None:
            return
        deadline = request.created_time + timeout
        heapq.heappush(self._queue, (deadline, next(self._serial), request))
        if len(self._queue) > self._limit:
            # remove ended requests whenever the queue has doubled, instead of at their deadlines
            self._queue = [entry for entry in self._queue if not entry[2].is_finished]
            heapq.heapify(self._queue)
            self._limit = 2 * len(self._queue) + 16

    @property
    def next(self) -> float | None:
        """The next deadline on the requests' clock, in seconds; ``None`` if there is none."""
        return self._queue[0][0] if self._queue else None

    def expired(self, now: float) -> list[Request]:
        """Remove and return the unfinished requests whose deadline has passed."""
        late = []
        while self._queue and self._queue[0][0] <= now:
            late.append(heapq.heappop(self._queue)[2])
        return [request for request in late if not request.is_finished]
