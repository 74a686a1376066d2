"""The prefill side: computes prompts for decode sides and sends their KV rows."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from specjax.checks import check_integer
from specjax.disaggregation import messages as wire
from specjax.disaggregation.rows import KVTransfer
from specjax.runtime.runner import ModelRunner
from specjax.sampling.params import SamplingParams
from specjax.scheduling.loop import Call, EngineLoop
from specjax.scheduling.prompt_source import PromptSource
from specjax.scheduling.request import GenerateRequest, Request, RunningRequest, new_id

logger = logging.getLogger(__name__)

Reply = Callable[[wire.Message], None]  # sends to a decode side; called in the loop's thread


@dataclass(eq=False, repr=False, kw_only=True)
class PrefillRequest(Request):
    """The request that runs a job; it ends with its first token."""

    job: wire.Job
    reply: Reply
    rows: tuple[Any, ...] | None = field(default=None, init=False)  # inputs of the first round
    weights: str = field(default="", init=False)  # fingerprint at the end of prefill

    @property
    def mask(self) -> np.ndarray | None:
        return None if self.job.mask is None else np.asarray(self.job.mask)


class PrefillJobs(PromptSource):
    """Runs jobs from decode sides and sends the KV after each chunk.

    The KV of the last ``lookahead`` tokens may still change, so it is sent with the next chunk.
    ``weights`` is the fingerprint of this side's weights.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.transfer = KVTransfer(runner)
        self._lookahead = runner.config.algorithm.lookahead
        self.vocab_size = runner.networks.target_config.vocab_size
        self.num_words = runner.tables.masks.shape[1]
        # number of tokens whose KV was sent; a job that is restarted sends all KV again
        self._sent: dict[RunningRequest, int] = {}
        self._clients: set[DecodeClient] = set()
        self.weights = self.transfer.weights()

    @property
    def peer_connected(self) -> bool:
        return bool(self._clients)

    def hosted(self, message: wire.Message) -> wire.Message:
        """Start to copy the arrays of a message to the host; called in the loop's thread."""
        if isinstance(message, wire.Piece):
            return replace(message, kv=self.transfer.hosted(message.kv))
        if isinstance(message, wire.Prefilled):
            return replace(message, rows=self.transfer.hosted(message.rows))
        return message

    def join(self, client: "DecodeClient") -> None:
        self._clients.add(client)
        client.reply(wire.Weights(weights=self.weights))  # the hello may have named older weights

    def leave(self, client: "DecodeClient") -> None:
        self._clients.discard(client)

    def weights_replaced(self) -> None:
        self.weights = self.transfer.weights()
        for client in self._clients:
            client.reply(wire.Weights(weights=self.weights))

    def dispatched(self, rows: Sequence[RunningRequest]) -> None:
        for row in rows:
            if isinstance(row.request, PrefillRequest):  # other requests send no KV
                self._send(row, row.request)

    def _send(self, row: RunningRequest, request: PrefillRequest) -> None:
        job, total = request.job, len(row.prefill_ids)
        sent = self._sent.setdefault(row, job.start)
        end = total if row.is_prefilled else row.kv_len - self._lookahead
        for start, count, kv in self.transfer.take(row.pages, sent, end):
            request.reply(wire.Piece(id=job.id, start=start, count=count, kv=kv))
        self._sent[row] = max(sent, end)
        if row.is_prefilled:
            request.rows = self.transfer.take_first(row.slot)
            request.weights = self.weights

    def release(self, row: RunningRequest) -> None:
        self._sent.pop(row, None)


class DecodeClient:
    """The prefill side's view of one decode side; thread-safe."""

    def __init__(self, loop: EngineLoop, jobs: PrefillJobs, reply: Reply) -> None:
        self._loop = loop
        self._jobs = jobs
        self._calls: dict[int, Call] = {}
        self.reply = reply
        loop.post(partial(jobs.join, self))

    def take(self, message: wire.Message) -> None:
        """Start or cancel a job."""
        if isinstance(message, wire.Cancel):
            call = self._calls.get(message.id)
            if call is not None:
                self._loop.abort(call)
        elif isinstance(message, wire.Job):
            self._begin(message)
        else:
            raise wire.WireError(f"unexpected {type(message).__name__} message from a decode side")

    def lost(self) -> None:
        """Abort all jobs after the decode side has disconnected."""
        self._loop.post(partial(self._jobs.leave, self))
        for call in list(self._calls.values()):
            self._loop.abort(call)

    def _begin(self, job: wire.Job) -> None:
        try:
            request = self._request(job)
            self._loop.check(request)
        except ValueError as error:
            self.reply(wire.Refused(id=job.id, reason=str(error)))
            return
        call = Call([request])
        call.deliver = partial(self._end, request)
        self._calls[job.id] = call
        self._loop.submit(call)

    def _request(self, job: wire.Job) -> PrefillRequest:
        ids = np.asarray(job.input_ids)
        size = self._jobs.vocab_size
        if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
            raise ValueError(f"input_ids {ids.dtype}{list(ids.shape)} must be a list of tokens")
        if ids.min() < 0 or ids.max() >= size:
            raise ValueError(f"input_ids must be in [0, {size}); got {ids.min()} to {ids.max()}")
        check_integer("start", job.start, 0, len(ids) - 1)
        if (mask := job.mask) is not None:
            mask, words = np.asarray(mask), self._jobs.num_words
            if mask.dtype != np.int32 or mask.shape != (words,) or not words:
                raise ValueError(f"mask {mask.dtype}{list(mask.shape)} must be int32[{words}]")
        start = job.logprob_start_len
        arguments = GenerateRequest(
            rid=new_id(),
            input_ids=ids.tolist(),
            sampling_params=SamplingParams.of(job.params),
            return_logprob=job.top_logprobs is not None,
            top_logprobs_num=0 if job.top_logprobs is None else job.top_logprobs,
            logprob_start_len=-1 if start is None else start,
            return_hidden_states=job.return_hidden_states,
            timeout=job.timeout,
        )
        return PrefillRequest(
            arguments,
            seed=job.seed,
            max_new_tokens=1,
            end_token_ids=frozenset(job.end_token_ids),
            decoder=None,
            spec_width=0,
            job=job,
            reply=self.reply,
        )

    def _end(self, request: PrefillRequest, error: Any) -> None:
        """Reply when a job has ended; ``error`` is set if it failed before it began."""
        job, reason = request.job, request.finish_reason or {}
        del self._calls[job.id]
        if error is not None or reason.get("type") == "abort":
            why = str(error) if error is not None else reason.get("message", "aborted")
            self.reply(wire.Refused(id=job.id, reason=why))
            return
        of_prompt = None
        if request.logprob_start_len is not None:
            of_prompt = _arrays(request.input_token_logprobs, request.input_top_logprobs)
        of_first = None
        if request.top_logprobs is not None:
            of_first = _arrays(request.output_token_logprobs, request.output_top_logprobs)
        states = request.output_hidden_states
        self.reply(
            wire.Prefilled(
                id=job.id,
                weights=request.weights,
                token=request.output_ids[0],
                logprobs=of_first,
                hidden=states[0] if states else None,
                rows=request.rows,
                prompt_logprobs=of_prompt,
                cached_tokens=request.cached_tokens,
                seconds=request.latency,
            )
        )


def _arrays(values: Sequence[Any], top: Sequence[Any]) -> tuple[np.ndarray, ...]:
    """Return values f32 ``[P]``, top tokens i32 ``[P, N]`` and their values f32 ``[P, N]``."""
    count, width = len(values), len(top[0]) if top else 0
    best = np.array([[entry[:2] for entry in tokens] for tokens in top], object)
    best = best.reshape(count, width, 2)
    chosen = np.array([value for value, _, _ in values], np.float32)
    return chosen, best[:, :, 1].astype(np.int32), best[:, :, 0].astype(np.float32)
