"""Request bodies: typed fields, limits of values, and memory cost of large bodies."""

import asyncio
import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from specjax.server import exchange as exchanges
from specjax.server import fields as bodies
from specjax.server.exchange import Exchange, LargeBodies
from specjax.server.fields import ApiError, Body, parse_object

LARGE = exchanges.LARGE_BYTES + 1


def body_of(**values: Any) -> Body:
    return Body(parse_object(json.dumps(values).encode()))


@contextmanager
def few_bytes(limit: int) -> Iterator[None]:
    """The block allocates at most ``limit`` bytes at any time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= limit
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "value", ["a", "", ["a", "b"], [1, 2], [[1], [2, 3]], [[]], [], [2**62], ["\u2028", "é"]]
)
def test_inputs_keep_their_value(value: Any) -> None:
    assert body_of(x=value).inputs("x", max_ids=2, max_rows=2) == value
    assert body_of(x=None).inputs("x", max_ids=2, max_rows=2) is None


@pytest.mark.parametrize(
    "value", [5, True, {}, [1.0], [True], ["a", 1], [[1], "a"], [["a"]], [None], [[[]]]]
)
def test_inputs_of_other_types_are_refused(value: Any) -> None:
    with pytest.raises(ApiError, match=r"^x=.* must be a string, a list of token ids") as found:
        body_of(x=value).inputs("x", max_ids=2, max_rows=2)
    assert (found.value.status, found.value.param) == (400, "x")


@pytest.mark.parametrize("item", [b"[]", b"{}", b"[[]]", b"1"])
def test_large_inputs_are_refused_before_they_are_decoded(item: bytes) -> None:
    data = bytearray(b'{"x": [' + b",".join([item] * (LARGE // len(item))) + b"]}")
    body = Body(parse_object(data))
    # only copies of the JSON text
    with few_bytes(3 * len(data)), pytest.raises((ApiError, ValueError)) as found:
        body.inputs("x", max_ids=1000, max_rows=1000)
    assert len(str(found.value)) < 300


def test_values_of_any_type_are_bounded() -> None:
    text = b'{"x": [' + b"[]," * bodies.MAX_PARTS + b"1]}"
    with pytest.raises(ApiError, match="x has more than 524288 values"):
        Body(parse_object(text)).take("x")
    deep: Any = 1
    for _ in range(bodies.MAX_DEPTH):
        deep = [deep]
    assert body_of(x=deep).take("x") == deep
    with pytest.raises(ApiError, match="x is nested deeper than 64 levels"):
        body_of(x={"a": deep}).take("x")
    long = {"text": "words " * bodies.LONG_VALUE}
    assert body_of(x=long).take("x") == long


def test_errors_quote_the_start_of_a_value() -> None:
    with pytest.raises(ApiError) as found:
        body_of(x=["y" * 1000]).flag("x")
    assert len(str(found.value)) < 150
    with pytest.raises(ApiError, match=r"x=7 must be an integer from 1 to 6"):
        body_of(x=7).integer("x", at_least=1, at_most=6)


def test_texts_too_long_for_the_context_are_not_encoded(engine, client, monkeypatch) -> None:
    longest = engine.context_length * engine.tokenizer.max_token_chars
    monkeypatch.setattr(engine.tokenizer, "encode", None)
    turn = [{"role": "user", "content": "a" * (longest + 1)}]
    for given in ({"prompt": "a" * (longest + 1)}, {"messages": turn}):
        with pytest.raises(ValueError, match="characters cannot fit context_length="):
            engine.generate(**given)
    for route, body in (
        ("/v1/completions", {"prompt": "a" * (longest + 1)}),
        ("/v1/chat/completions", {"messages": turn}),
        ("/tokenize", {"messages": turn}),
        ("/tokenize", {"prompt": "a" * (longest + 1)}),
    ):
        answer = client.post(route, body)
        assert answer.status == 400
        assert answer.error["code"] == "context_length_exceeded"


class Sender:
    """A client that sends a body in parts, on demand."""

    def __init__(self, *, length: int | None = None) -> None:
        self.parts: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        named = [] if length is None else [(b"content-length", str(length).encode())]
        self.exchange = Exchange({"headers": named}, self.receive, self.receive)

    async def receive(self, *_: Any) -> Any:
        part, has_more = await self.parts.get()
        return {"type": "http.request", "body": part, "more_body": has_more}

    def start(self, large: LargeBodies, go: asyncio.Event) -> tuple[Any, asyncio.Event]:
        """A task that reads a body and holds it until ``go``, and an event that it was read."""
        entered = asyncio.Event()

        async def read() -> int:
            async with self.exchange.body(2 * LARGE, large) as data:
                entered.set()
                await go.wait()
                return len(data)

        return asyncio.create_task(read()), entered


def test_large_bodies_share_a_budget() -> None:
    async def main() -> None:
        large, go = LargeBodies(3 * LARGE), asyncio.Event()
        senders = [Sender(length=LARGE), Sender(), Sender(length=LARGE), Sender(length=10)]
        tasks = [sender.start(large, go) for sender in senders]
        for sender in senders[:3]:
            sender.parts.put_nowait((b"x" * LARGE, True))
            await asyncio.sleep(0.01)
        # the second body has no length, so it counts as the longest possible one
        assert large.free_bytes == 0
        for sender in senders[:3]:
            sender.parts.put_nowait((b"", False))
        with pytest.raises(ApiError) as found:
            await tasks[2][0]
        assert (found.value.status, found.value.code) == (429, "too_many_bytes")
        senders[3].parts.put_nowait((b"x" * 10, False))
        go.set()
        assert [await task for task, _ in (*tasks[:2], tasks[3])] == [LARGE, LARGE, 10]
        assert large.free_bytes == 3 * LARGE

    asyncio.run(main())


def test_two_large_bodies_are_read_at_once() -> None:
    async def main() -> None:
        large, goes = LargeBodies(5 * LARGE), [asyncio.Event() for _ in range(3)]
        senders = [Sender(length=LARGE) for _ in goes]
        tasks = [one.start(large, go) for one, go in zip(senders, goes, strict=True)]
        for sender in senders:
            sender.parts.put_nowait((b"x" * LARGE, False))
        await asyncio.sleep(0.05)
        assert [entered.is_set() for _, entered in tasks] == [True, True, False]
        goes[0].set()
        await tasks[0][0]
        await asyncio.wait_for(tasks[2][1].wait(), 5)
        for go in goes:
            go.set()
        assert [await task for task, _ in tasks] == [LARGE] * 3

    asyncio.run(main())


def test_a_large_body_must_arrive_at_a_rate(monkeypatch) -> None:
    monkeypatch.setattr(exchanges, "RATE_GRACE_SECONDS", 0.05)

    async def main() -> None:
        large, go = LargeBodies(3 * LARGE), asyncio.Event()
        sender = Sender(length=LARGE + 1)
        task, _ = sender.start(large, go)
        sender.parts.put_nowait((b"x" * LARGE, True))
        with pytest.raises(ApiError, match="bytes per second") as found:
            await asyncio.wait_for(task, 5)
        assert found.value.status == 408
        assert large.free_bytes == 3 * LARGE

    asyncio.run(main())
