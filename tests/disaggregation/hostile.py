"""Sides that know the secret and send what they should not: frames, jobs and answers."""

import hmac
import json
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import ml_dtypes
import numpy as np

from specjax import Engine
from specjax.disaggregation.channel import Channel, Deliver, Lost
from specjax.disaggregation.handshake import CONNECTING, receive_into, shake_hands
from specjax.disaggregation.listener import Listener
from specjax.disaggregation.messages import (
    Cancel,
    Hello,
    Job,
    Message,
    Piece,
    Prefilled,
    Refused,
    Weights,
)
from specjax.disaggregation.prefill import Asker
from specjax.disaggregation.reconnect import Reconnecting
from specjax.disaggregation.remote import RemotePeer
from specjax.disaggregation.wire import HEADER, MAC_BYTES, Reader, encode

SECRET = "between us"
SECONDS = 30.0


def hello_of(engine: Engine) -> Hello:
    prompts = engine._side[1]
    return Hello(facts=prompts.facts | {"weights": prompts.weights})


def frame_of(message: Message, sequence: int, key: bytes) -> bytes:
    return b"".join(encode(message, sequence, key))


# frames


def garbled(rng: random.Random, data: bytes) -> bytes:
    tokens = [b"{", b"}", b"[", b"]", b",", b":", b"null", b"-1", b'""', b"1e9", b"true", b"NaN"]
    wrong = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(wrong))
        wrong[at : at + rng.randrange(4)] = rng.choice([rng.choice(tokens), rng.randbytes(2)])
    return bytes(wrong)


def changed_value(rng: random.Random, frame: bytes, key: bytes) -> bytes:
    """An authentic frame, of which one field has another value, or none, or another name."""
    magic, schema, count, num_bytes, sequence = HEADER.unpack(frame[: HEADER.size])
    body = json.loads(frame[HEADER.size : HEADER.size + count])
    values: list[Any] = [None, -1, 2**64, 2**63, 1.5, "", [], {}, True, [[]], {"a": {}}, "x" * 999]
    name = rng.choice(sorted(body["fields"]))
    what = rng.randrange(4)
    if what == 0:
        del body["fields"][name]
    elif what == 1:
        body["fields"][name + "s"] = 1
    else:
        body["fields"][name] = rng.choice(values)
    text = json.dumps(body).encode()
    head = HEADER.pack(magic, schema, len(text), num_bytes, sequence) + text
    arrays = frame[HEADER.size + count + MAC_BYTES :]
    return head + hmac.digest(key, head, "sha256") + arrays


def wrong_bytes(rng: random.Random, message: Message, sequence: int, key: bytes) -> bytes:
    """A frame that is corrupted, truncated, replayed or foreign."""
    good = partial(frame_of, message, sequence, key)
    made: Sequence[Callable[[], bytes]] = (
        lambda: garbled(rng, good()),
        lambda: good()[: rng.randrange(1, len(good()))],
        lambda: good() + good(),  # the second one is a replay
        lambda: frame_of(message, sequence + rng.choice((-1, 1, 2**32)), key),
        lambda: frame_of(message, sequence, rng.randbytes(32)),  # of another connection
        lambda: changed_value(rng, good(), key),
        lambda: rng.randbytes(rng.randrange(1, 300)),
        lambda: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        lambda: frame_of(Hello(facts={}), sequence, key),
    )
    return rng.choice(made)()


@contextmanager
def intruding(address: str, hello: Hello) -> Iterator[tuple[socket.socket, bytes]]:
    """A decode side in the raw, behind its hello, and the key of what it sends."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + SECONDS
    with socket.create_connection((host, int(port)), SECONDS) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keys = shake_hands(sock, CONNECTING, SECRET.encode(), deadline)
        sock.sendall(frame_of(hello, 0, keys.sending))
        read_into = partial(receive_into, sock, deadline=deadline)
        assert isinstance(Reader(read_into, key=keys.receiving, max_bytes=0).read(), Hello)
        yield sock, keys.sending


def send_wrong_bytes(rng: random.Random, address: str, hello: Hello, job: Job) -> None:
    """A good job, sometimes, then wrong bytes; then the end, sometimes heard of."""
    with intruding(address, hello) as (sock, key), suppress(OSError):
        sequence = 1
        if rng.random() < 0.3:
            sock.sendall(frame_of(job, sequence, key))
            sequence += 1
        sock.sendall(wrong_bytes(rng, job, sequence, key))
        if rng.random() < 0.3:
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass


# jobs

LONG = np.arange(10_000, dtype=np.int32) % 90
WRONG_JOBS: dict[str, list[Any]] = {
    "input_ids": [
        np.array([1.0, 2.0]),
        np.array([1.0, np.nan], np.float32),
        np.array([True, False]),
        np.array([1, 2], ml_dtypes.bfloat16),
        np.array([[1, 2]], np.int32),
        np.array(3, np.int32),
        np.zeros(0, np.int32),
        np.array([5, 99_999], np.int32),
        np.array([-1, 5], np.int64),
        np.array([2**63 - 1], np.int64),
        np.array([2**64 - 1], np.uint64),
        LONG,
        LONG[:128],
        LONG[:1],
    ],
    "start": [1, 7, 20, 21, 2**31, 2**64 - 1],
    "params": [
        {"nonsense": 1},
        {"regex": "a"},
        {"temperature": -1},
        {"temperature": None},
        {"temperature": 1e38, "top_k": 2**62},
        {"temperature": 1e-30, "top_p": 1e-30},
        {"stop": {"a": 1}},
        {"stop": [1]},
        {"stop": ["a"] * 1000},
        {"stop_token_ids": [-1, 2**60]},
        {"n": 0},
        {"max_new_tokens": "a"},
        {"max_new_tokens": 2**60},
        {"max_new_tokens": 2, "min_new_tokens": 5},
        {"min_new_tokens": 1},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"9" * 5000: 1}},
        {"logit_bias": {"999999": 1}},
        {"logit_bias": {str(i): 1.0 for i in range(90)}},
        {"repetition_penalty": 0.5},
        {"repetition_penalty": []},
        {"speculative": 3},
        {"sampling_seed": -1},
    ],
    "seed": [0, 2**64 - 1],
    "end_token_ids": [[], [2**64 - 1], list(range(1000))],
    "top_logprobs": [-(2**40), -1, 0, 2, 21, 2**40],
    "logprob_start_len": [-(2**40), -1, 0, 5, 19, 20, 2**40],
    "return_hidden_states": [True],
    "timeout": [-1.0, 0.0, 1e-9, 1e-3, 1e300],
    "rid": ["", "\ud800", "\n" * 100, "x" * 100_000],
}


def job_of(rng: random.Random, number: int, length: int = 20) -> Job:
    return Job(
        id=number,
        rid=f"job {number}",
        input_ids=np.array([rng.randrange(90) for _ in range(length)], np.int32),
        start=0,
        params={"temperature": 0.0, "max_new_tokens": 4},
        seed=number,
        end_token_ids=[],
        top_logprobs=None,
        logprob_start_len=None,
        return_hidden_states=False,
        timeout=None,
    )


def wrong_job(rng: random.Random, number: int) -> Job:
    """A job with one to three odd values, which may also be good ones."""
    names = rng.sample(sorted(WRONG_JOBS), rng.randint(1, 3))
    return replace(job_of(rng, number), **{name: rng.choice(WRONG_JOBS[name]) for name in names})


# answers


def random_like(rng: random.Random, array: Any) -> Any:
    """Other values, not finite ones among them, or another shape or dtype."""
    array = np.asarray(array)
    whole = np.issubdtype(array.dtype, np.integer)
    big = np.iinfo(array.dtype).max if whole else np.inf
    least = np.iinfo(array.dtype).min if whole else np.nan
    made = (
        lambda: np.full_like(array, big),
        lambda: np.full_like(array, least),
        lambda: np.zeros_like(array),
        lambda: array[..., :1],
        lambda: array[:0],
        lambda: array.reshape(-1),
        lambda: array[None],
        lambda: np.array(1, array.dtype),
        lambda: array.astype(np.float64),
        lambda: array.astype(np.int8),
        lambda: array.astype(ml_dtypes.bfloat16),
        lambda: np.concatenate([array, array], axis=-1) if array.ndim else array,
    )
    with np.errstate(invalid="ignore"):
        return rng.choice(made)()


def wrong_arrays(rng: random.Random, arrays: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    if not arrays:
        return rng.choice([(), None, (np.zeros(3, np.float32),)])
    at = rng.randrange(len(arrays))
    one = (*arrays[:at], random_like(rng, arrays[at]), *arrays[at + 1 :])
    return rng.choice([None, (), arrays[:1], (*arrays, *arrays), one, one, one, one])


def wrong_answers(rng: random.Random, message: Any, honest: Weights) -> list[Message]:
    """What a prefill side sends instead; never nothing that leaves somebody waiting."""
    big = rng.choice([2**31, 2**63, 2**64 - 1])
    if isinstance(message, Piece):
        return rng.choice(
            [
                lambda: [],
                lambda: [message, message],
                lambda: [replace(message, id=big)],
                lambda: [replace(message, start=rng.choice([0, 1, message.count, big]))],
                lambda: [replace(message, count=rng.choice([0, 1, message.count + 1, 512, big]))],
                lambda: [replace(message, kv=wrong_arrays(rng, message.kv) or ())],
                lambda: [replace(message, kv=wrong_arrays(rng, message.kv) or ())],
                lambda: [replace(message, kv=tuple(np.full_like(x, np.nan) for x in message.kv))],
                lambda: [Refused(id=message.id, reason="no " * 10_000), message],
                lambda: [Weights(weights="\n" * 5000), message, honest],
            ]
        )()
    if isinstance(message, Prefilled):
        changes: dict[str, Any] = {
            "weights": rng.choice(["", "x" * 10_000]),
            "token": rng.choice([99_999, big]),
            "cached_tokens": big,
            "seconds": rng.choice([-1.0, 1e300]),
            "logprobs": wrong_arrays(rng, message.logprobs),
            "prompt_logprobs": wrong_arrays(rng, message.prompt_logprobs),
            "hidden": rng.choice([None, np.zeros((1, 3), np.float32), np.array(1.0)]),
            "rows": wrong_arrays(rng, message.rows),
        }
        names = rng.sample(sorted(changes), rng.randint(1, 2))
        wrong = replace(message, **{name: changes[name] for name in names})
        again = replace(message, token=message.token ^ 1)
        return rng.choice(
            [[wrong], [wrong, message], [wrong], [replace(message, rows=None), again]]
        )
    return [message]


class Impostor:
    """A prefill side that changes what the one behind it sends.

    Attributes:
        num_sent: messages that were changed, or bytes sent in the place of one.
    """

    def __init__(self, prefill: Any, rng: random.Random, share: float) -> None:
        self._prefill, self._rng, self._share = prefill, rng, share
        self._weights = prefill._side[1].weights
        self.sends_bytes = False
        self.num_sent = 0
        self._listener = Listener(
            "127.0.0.1:0",
            hello=lambda: hello_of(prefill),
            secret=SECRET,
            max_bytes=2**24,
            accept=self._accept,
        )
        self.address = self._listener.address
        self._channels: list[Channel] = []

    def close(self) -> None:
        self._listener.close()
        for channel in self._channels:
            channel.close()

    def _accept(self, channel: Channel) -> tuple[Deliver, Lost]:
        self._channels = [one for one in self._channels if one.is_open] + [channel]
        asker = Asker(*self._prefill._side, partial(self._reply, channel))
        return asker.take, lambda error: asker.lost()

    def _reply(self, channel: Channel, message: Message) -> None:
        if isinstance(message, Weights) or self._rng.random() >= self._share:
            answers = [message]
        elif self.sends_bytes:
            self.num_sent += 1
            with channel._writing, suppress(OSError):
                data = wrong_bytes(self._rng, message, channel._sequence, channel._key)
                channel._sock.sendall(data)
                channel._sock.shutdown(socket.SHUT_WR)
            return
        else:
            answers = wrong_answers(self._rng, message, Weights(weights=self._weights))
            if self._rng.random() < 0.02:  # after which the decode side hangs up
                answers.append(self._rng.choice([Cancel(id=1), hello_of(self._prefill)]))
            self.num_sent += 1
        with suppress(ConnectionError):
            for answer in answers:
                channel.send(answer)


class QuickPeer(RemotePeer):
    """Connects again without a wait."""

    def __init__(self, address: str, side: Any) -> None:
        self._side, self.address, self._is_closed = side, address, False
        self._connecting = Reconnecting(
            address,
            hello=lambda: Hello(facts=side[1].facts | {"weights": side[1].weights}),
            secret=SECRET,
            max_bytes=side[1].most_bytes,
            check_hello=self._check,
            opened=self._opened,
            first_wait=0.001,
            max_wait=0.01,
        )


class Answers:
    """What a hostile decode side hears, by its jobs; ``on_message`` may hold it up."""

    def __init__(self) -> None:
        self.on_message: Callable[[], Any] = lambda: None
        self.last: SimpleQueue[Prefilled | Refused] = SimpleQueue()
        self.ends: SimpleQueue[Exception] = SimpleQueue()

    def deliver(self, message: Message) -> None:
        self.on_message()
        if isinstance(message, Prefilled | Refused):
            self.last.put(message)
