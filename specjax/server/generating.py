"""From the body of a request to the engine and back to its client."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specjax.scheduling.call import Call
from specjax.server.body import Body, parse_object
from specjax.server.exchange import Exchange
from specjax.server.service import Service

# A request of so many bytes, or one that goes through a chat template, is read and tokenised in
# another thread. To go there and back takes longer than to do a short one here.
INLINE_BYTES = 16_384
# results of so many tokens with log-probabilities are put into shape in another thread
INLINE_LOGPROBS = 256


class Format(Protocol):
    """How the answer to a request is written."""

    @property
    def wants_logprobs(self) -> bool: ...

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
    service: Service, exchange: Exchange, read: Read, *, is_slow: bool = False
) -> None:
    """Answer a request for text; ``read`` makes it a job, ``is_slow`` whatever its size."""
    data = await exchange.read(service.max_body_bytes)

    def make() -> Job:
        return read(service, Body(parse_object(data)))

    is_here = len(data) < INLINE_BYTES and not is_slow
    job = make() if is_here else await asyncio.to_thread(make)
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
    outputs = await service.engine.async_run(job.call)
    try:
        with service.refusals():
            output = await anext(outputs, None)
        # only now: what the queue refuses still gets a status of its own
        await exchange.start_events()
        chunk = job.answer.chunk
        while output is not None:
            if events := chunk(output):
                await exchange.push(events)
            output = await anext(outputs, None)
        await exchange.end_events(job.answer.closing())
    finally:
        await outputs.aclose()
