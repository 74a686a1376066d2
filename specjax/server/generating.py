"""Runs a request: reads the body, calls the engine and sends the response."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from specjax.engine.requests import has_grammar
from specjax.sampling.grammar_check import while_waiting
from specjax.scheduling.loop import Call
from specjax.server.answers import Answer
from specjax.server.exchange import Exchange
from specjax.server.fields import GRAMMAR_FIELDS, ApiError, Body, parse_object
from specjax.server.service import MAX_EXPERTS, MAX_REPORTED, Service

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Longer requests are read and tokenised in another thread. For short ones the thread switch costs
# more than the work: 10 ms or more with 64 clients, because threads wait for the interpreter.
INLINE_BYTES = 4096
# The log-probabilities or experts of more tokens than this are formatted in another thread.
INLINE_LOGPROBS = 256
ENTRY_BYTES = 130  # memory of each log-probability while the request is in progress

NULL = Raw(b"null")
Read = Callable[[Service, Body], tuple[Call, Answer]]


async def generate(
    service: Service,
    exchange: Exchange,
    read: Read,
    *,
    renders: bool = False,
    grammars: Collection[str] = (),
) -> None:
    """Answer a generation request; ``read`` checks and tokenises it.

    ``grammars`` are fields of this route that may have a grammar, besides those of all routes.
    """
    service.check_open()
    call, answer = await read_body(service, exchange, read, renders=renders, grammars=grammars)
    exchange.rid = call.groups[0]
    call.caller = exchange.caller
    logger.debug("request %s started with %d completions", exchange.rid, len(call.requests))
    num_reported = max_reported(call)
    if num_reported > MAX_REPORTED:
        raise ApiError(
            400,
            f"up to {num_reported} log-probabilities requested; the limit is {MAX_REPORTED}; "
            "lower max_tokens (max_new_tokens), n or the number of top log-probabilities",
        )
    num_experts = sum(request.max_experts for request in call.requests)
    if num_experts > MAX_EXPERTS:
        raise ApiError(
            400,
            f"up to {num_experts} experts of tokens requested; the limit is {MAX_EXPERTS}; lower "
            "max_tokens (max_new_tokens) or n, or raise routed_experts_start_len",
        )
    with service.admitted(len(call.requests)):
        work = (_stream if call.is_stream else _reply)(service, exchange, call, answer)
        del call, answer  # a slow client must not keep the results in memory
        await exchange.while_connected(work)


async def read_body(
    service: Service,
    exchange: Exchange,
    read: Callable[[Service, Body], T],
    *,
    renders: bool,
    max_bytes: int | None = None,
    grammars: Collection[str] = (),
) -> T:
    """Apply ``read`` to the body; use another thread for a long body or a template."""
    # a separate function, because its frame holds the body
    await service.take_turn()
    limit = min(max_bytes or service.max_body_bytes, service.max_body_bytes)
    async with exchange.body(limit, service.large_bodies) as data:
        is_short = len(data) <= INLINE_BYTES
        fields = parse_object(data) if is_short else await asyncio.to_thread(parse_object, data)
        # templates and grammars have their own threads because one can take seconds
        threads = service.renderers if renders else None
        if _has_grammar(fields, grammars):
            threads = service.compilers
        elif is_short and not renders:
            return read(service, Body(fields))
        loop = asyncio.get_running_loop()
        with while_waiting():
            run = partial(copy_context().run, lambda: read(service, Body(fields)))
            return await exchange.while_connected(loop.run_in_executor(threads, run))


def _has_grammar(fields: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a body has a grammar, or sampling parameters that may have one."""
    if any(fields.get(name, NULL) != NULL for name in (*GRAMMAR_FIELDS, *names)):
        return True
    params = fields.get("sampling_params", NULL)
    try:
        return len(params) > INLINE_BYTES or has_grammar(msgspec.json.decode(params))
    except (RecursionError, ValueError):  # refused later
        return False


def max_reported(call: Call) -> int:
    return sum(request.max_reported for request in call.requests)


async def _reply(service: Service, exchange: Exchange, call: Call, answer: Answer) -> None:
    body = await _answer_body(service, call, answer)
    del call, answer
    with service.unread.holding(exchange, len(body)):
        await exchange.reply(body)


async def _answer_body(service: Service, call: Call, answer: Answer) -> bytes:
    with service.refusals():
        results = await service.engine.async_run(call)
    results = results if call.is_batch else [results]
    metas = [result["meta_info"] for result in results]
    size = sum(meta["prompt_tokens"] + meta["completion_tokens"] for meta in metas)
    is_long = answer.wants_logprobs or any("routed_experts" in meta for meta in metas)
    if is_long and size > INLINE_LOGPROBS:
        return await asyncio.to_thread(answer.body, results)
    return answer.body(results)


async def _stream(service: Service, exchange: Exchange, call: Call, answer: Answer) -> None:
    call.text_only, chunk = answer.text_only, answer.chunk
    report_bytes = ENTRY_BYTES * max_reported(call)
    outputs = await service.engine.async_run(call)
    try:
        with service.refusals():
            output = await anext(outputs)
        # start only now: a request that the queue refuses needs another status
        await exchange.start_events(answer.failed)
        while output is not None:
            is_long = "routed_experts" in output.get("meta_info", {})
            if events := await asyncio.to_thread(chunk, output) if is_long else chunk(output):
                with service.unread.holding(exchange, report_bytes + len(events)):
                    await exchange.push(events)
            output = await anext(outputs, None)
        await exchange.end_events(answer.closing())
    finally:
        await outputs.aclose()
