"""From the body of a request to the engine and back to its client."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specjax.scheduling.call import Call
from specjax.server.body import Body, parse_object
from specjax.server.exchange import Exchange
from specjax.server.messages import TooSlowError
from specjax.server.service import Service

# A longer request is read and tokenised in another thread. To go there and back takes longer than
# to do a short one here: with 64 clients 10 ms and more, as threads wait for the interpreter.
INLINE_BYTES = 4096
# results of so many tokens with log-probabilities are put into shape in another thread
INLINE_LOGPROBS = 256


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


Read = Callable[[Service, Body], Job]


async def generate(
    service: Service, exchange: Exchange, read: Read, *, otherwise: Read | None = None
) -> None:
    """Answer a request for text, which ``read`` makes a job.

    Long requests, and those for which ``read`` raises TooSlowError, are read in another thread, by
    ``otherwise`` where that is another function.
    """
    service.check_open()
    data = await exchange.read(service.max_body_bytes)
    patient = otherwise or read
    if len(data) > INLINE_BYTES:
        job = await asyncio.to_thread(lambda: patient(service, Body(parse_object(data))))
    else:
        values = parse_object(data)
        try:
            job = read(service, Body(values))
        except TooSlowError:
            job = await asyncio.to_thread(patient, service, Body(values))
    with service.admitted(len(job.call.requests)):
        work = _stream if job.call.is_stream else _reply
        await exchange.while_connected(work(service, exchange, job))


async def _reply(service: Service, exchange: Exchange, job: Job) -> None:
    with service.refusals():
        results = await service.engine.async_run(job.call)
    results = results if job.call.is_batch else [results]
    counts = (result["meta_info"] for result in results)
    size = sum(meta["prompt_tokens"] + meta["completion_tokens"] for meta in counts)
    if job.answer.wants_logprobs and size > INLINE_LOGPROBS:
        body = await asyncio.to_thread(job.answer.whole, results)
    else:
        body = job.answer.whole(results)
    await exchange.reply(body)


async def _stream(service: Service, exchange: Exchange, job: Job) -> None:
    job.call.is_brief = job.answer.is_brief
    outputs, chunk = await service.engine.async_run(job.call), job.answer.chunk
    try:
        with service.refusals():
            first = await anext(outputs)
        # only now: what the queue refuses still gets a status of its own
        await exchange.start_events()
        if events := chunk(first):
            await exchange.push(events)
        async for output in outputs:
            if events := chunk(output):
                await exchange.push(events)
        await exchange.end_events(job.answer.closing())
    finally:
        await outputs.aclose()
