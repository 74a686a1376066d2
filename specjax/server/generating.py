"""From the body of a request to the engine and back to its client."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specjax.scheduling.call import Call
from specjax.server.body import Body, parse_object
from specjax.server.errors import ApiError
from specjax.server.exchange import Exchange
from specjax.server.service import Service

# A longer request is read and tokenised in another thread. To go there and back takes longer than
# to do a short one here: with 64 clients 10 ms and more, as threads wait for the interpreter.
INLINE_BYTES = 4096
# results of so many tokens with log-probabilities are put into shape in another thread
INLINE_LOGPROBS = 256
# Log-probabilities of one request, of prompt and completion tokens with the best others: 25 MB.
MAX_REPORTED = 2**19
ENTRY_BYTES = 130  # of one while its request is in hand


class Format(Protocol):
    """How the answer to a request is written."""

    @property
    def wants_logprobs(self) -> bool: ...

    @property
    def is_brief(self) -> bool:
        """Whether chunks before the last need nothing but the text."""

    def whole(self, results: Sequence[dict[str, Any]]) -> bytes: ...

    def chunk(self, result: dict[str, Any]) -> bytes: ...

    def closing(self) -> bytes: ...


@dataclass(frozen=True)
class Job:
    """A request that passed all checks."""

    call: Call
    answer: Format

    @property
    def max_reported(self) -> int:
        """Log-probabilities that it reports at most."""
        return sum(request.max_reported for request in self.call.requests)


Read = Callable[[Service, Body], Job]


async def generate(
    service: Service, exchange: Exchange, read: Read, *, renders: bool = False
) -> None:
    """Answer a request for text, which ``read`` makes a job.

    Long requests, and those whose chat template is rendered, are read in another thread.
    """
    service.check_open()
    job = await _job(service, exchange, read, renders)
    if job.max_reported > MAX_REPORTED:
        raise ApiError(
            400,
            f"up to {job.max_reported} log-probabilities in one request; at most {MAX_REPORTED} "
            "are reported; lower max_tokens (max_new_tokens), n or the number of best tokens",
        )
    with service.admitted(len(job.call.requests)):
        work = (_stream if job.call.is_stream else _reply)(service, exchange, job)
        del job  # a client that reads slowly must not keep what was reported
        await exchange.while_connected(work)


async def _job(service: Service, exchange: Exchange, read: Read, renders: bool) -> Job:
    # in a function of its own, since its frame holds the body
    async with exchange.body(service.max_body_bytes, service.large_bodies) as data:
        if not renders and len(data) <= INLINE_BYTES:
            return read(service, Body(parse_object(data)))
        # conversations have threads of their own, since a template may hold them up for seconds
        threads = service.renderers if renders else None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, lambda: read(service, Body(parse_object(data))))


async def _reply(service: Service, exchange: Exchange, job: Job) -> None:
    body = await _whole(service, job)
    del job
    with service.unread.holding(exchange, len(body)):
        await exchange.reply(body)


async def _whole(service: Service, job: Job) -> bytes:
    with service.refusals():
        results = await service.engine.async_run(job.call)
    results = results if job.call.is_batch else [results]
    counts = (result["meta_info"] for result in results)
    size = sum(meta["prompt_tokens"] + meta["completion_tokens"] for meta in counts)
    if job.answer.wants_logprobs and size > INLINE_LOGPROBS:
        return await asyncio.to_thread(job.answer.whole, results)
    return job.answer.whole(results)


async def _stream(service: Service, exchange: Exchange, job: Job) -> None:
    job.call.is_brief = job.answer.is_brief
    outputs, chunk = await service.engine.async_run(job.call), job.answer.chunk
    kept = ENTRY_BYTES * job.max_reported
    try:
        with service.refusals():
            output = await anext(outputs)
        # only now: what the queue refuses still gets a status of its own
        await exchange.start_events()
        while output is not None:
            if events := chunk(output):
                with service.unread.holding(exchange, kept + len(events)):
                    await exchange.push(events)
            output = await anext(outputs, None)
        await exchange.end_events(job.answer.closing())
    finally:
        await outputs.aclose()
