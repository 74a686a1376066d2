"""From the body of a request to the engine and back to its client."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from specjax.scheduling.loop import Call
from specjax.server.answers import Answer
from specjax.server.exchange import Exchange
from specjax.server.fields import ApiError, Body, parse_object
from specjax.server.native import NativeAnswer
from specjax.server.service import Service

T = TypeVar("T")
# A longer request is read and tokenised in another thread. To go there and back takes longer than
# to do a short one here: with 64 clients 10 ms and more, as threads wait for the interpreter.
INLINE_BYTES = 4096
# results of so many tokens with log-probabilities are put into shape in another thread
INLINE_LOGPROBS = 256
# Log-probabilities of one request, of prompt and completion tokens with the best others: 25 MB.
MAX_REPORTED = 2**19
ENTRY_BYTES = 130  # of one while its request is in hand

Format = Answer | NativeAnswer  # how the answer to a request is written
Read = Callable[[Service, Body], tuple[Call, Format]]


async def generate(
    service: Service, exchange: Exchange, read: Read, *, renders: bool = False
) -> None:
    """Answer a request for text, which ``read`` checks and tokenises."""
    service.check_open()
    call, answer = await read_body(service, exchange, read, renders=renders)
    num_reported = max_reported(call)
    if num_reported > MAX_REPORTED:
        raise ApiError(
            400,
            f"up to {num_reported} log-probabilities in one request; at most {MAX_REPORTED} "
            "are reported; lower max_tokens (max_new_tokens), n or the number of best tokens",
        )
    with service.admitted(len(call.requests)):
        work = (_stream if call.is_stream else _reply)(service, exchange, call, answer)
        del call, answer  # a client that reads slowly must not keep what was reported
        await exchange.while_connected(work)


async def read_body(
    service: Service,
    exchange: Exchange,
    read: Callable[[Service, Body], T],
    *,
    renders: bool,
    max_bytes: int | None = None,
) -> T:
    """What ``read`` makes of the body, in another thread if it is long or renders a template."""
    # in a function of its own, since its frame holds the body
    limit = min(max_bytes or service.max_body_bytes, service.max_body_bytes)
    async with exchange.body(limit, service.large_bodies) as data:
        if len(data) <= INLINE_BYTES and not renders:
            return read(service, Body(parse_object(data)))
        # templates have threads of their own, since one may take seconds
        threads = service.renderers if renders else None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, lambda: read(service, Body(parse_object(data))))


def max_reported(call: Call) -> int:
    return sum(request.max_reported for request in call.requests)


async def _reply(service: Service, exchange: Exchange, call: Call, answer: Format) -> None:
    body = await _whole(service, call, answer)
    del call, answer
    with service.unread.holding(exchange, len(body)):
        await exchange.reply(body)


async def _whole(service: Service, call: Call, answer: Format) -> bytes:
    with service.refusals():
        results = await service.engine.async_run(call)
    results = results if call.is_batch else [results]
    counts = (result["meta_info"] for result in results)
    size = sum(meta["prompt_tokens"] + meta["completion_tokens"] for meta in counts)
    if answer.wants_logprobs and size > INLINE_LOGPROBS:
        return await asyncio.to_thread(answer.whole, results)
    return answer.whole(results)


async def _stream(service: Service, exchange: Exchange, call: Call, answer: Format) -> None:
    call.text_only, chunk = answer.text_only, answer.chunk
    kept = ENTRY_BYTES * max_reported(call)
    outputs = await service.engine.async_run(call)
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
        await exchange.end_events(answer.closing())
    finally:
        await outputs.aclose()
