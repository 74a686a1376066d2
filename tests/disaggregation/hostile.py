"""Sides that know the secret and send malformed frames, jobs and answers."""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import zmq
from msgspec.structs import replace

from specjax import Engine
from specjax.disaggregation.channel import Channel, Deliver, Lost
from specjax.disaggregation.dialer import Dialer
from specjax.disaggregation.listener import Listener
from specjax.disaggregation.messages import (
    Cancel,
    Hello,
    Job,
    Message,
    Open,
    Piece,
    Prefilled,
    Refused,
    Taken,
    Weights,
    encode,
)
from specjax.disaggregation.prefill import DecodeClient
from specjax.disaggregation.remote import RemotePeer

from .peers import End, raw_lanes, terms


def hello_of(engine: Engine) -> Hello:
    prompts = engine._side[1]
    return Hello(facts=prompts.transfer.facts | {"weights": prompts.weights})


# frames


def garbled(rng: random.Random, data: bytes) -> bytes:
    wrong = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(wrong))
        wrong[at : at + rng.randrange(4)] = rng.randbytes(rng.randrange(3))
    return bytes(wrong)


def changed_value(rng: random.Random, head: bytes) -> bytes:
    """A first frame with one field changed, removed or renamed."""
    body = msgspec.msgpack.decode(head)
    values: list[Any] = [None, -1, 2**63, 1.5, "", [], {}, True, [[]], {"a": {}}, "x" * 999]
    name = rng.choice(sorted(body))
    what = rng.randrange(4)
    if what == 0:
        del body[name]
    elif what == 1:
        body[name + "s"] = 1
    else:
        body[name] = rng.choice(values)
    return msgspec.msgpack.encode(body)


def wrong_frames(rng: random.Random, message: Message) -> list[bytes]:
    """Frames that are corrupted, cut, duplicated or foreign."""
    head, *rest = (bytes(frame) for frame in encode(message))
    made: Sequence[Callable[[], list[bytes]]] = (
        lambda: [garbled(rng, head), *rest],
        lambda: [head[: rng.randrange(len(head))], *rest],
        lambda: [head, *(frame[:-1] for frame in rest), head],
        lambda: [head, *rest, *rest, b"x"],
        lambda: [head, *rest, head, *rest],  # the second frame is a replay
        lambda: [changed_value(rng, head), *rest],
        lambda: [rng.randbytes(rng.randrange(1, 300))],
        lambda: [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"],
        lambda: [bytes(frame) for frame in encode(Hello(facts={}))],
        lambda: [bytes(frame) for frame in encode(Taken(count=2**40))],
        lambda: [bytes(frame) for frame in encode(Open(token=bytes(16), lane=0, facts={}))],
    )
    return rng.choice(made)()


def send_wrong_frames(rng: random.Random, address: str, hello: Hello, job: Job) -> None:
    """Sometimes a good job, then wrong frames; then close, sometimes after reading the answer."""
    with raw_lanes(address, hello) as lanes:
        if rng.random() < 0.3:
            for frame in encode(job):
                lanes[0].send(frame)
        for frame in wrong_frames(rng, job):
            lanes[0].send(frame)
        if rng.random() < 0.3:
            lanes[1].rcvtimeo = 100
            with suppress(zmq.Again):
                while lanes[1].recv():
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
    "rid": ["", "\n" * 100, "x" * 100_000],
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
    """A job with one to three odd values, some of which are valid."""
    names = rng.sample(sorted(WRONG_JOBS), rng.randint(1, 3))
    return replace(job_of(rng, number), **{name: rng.choice(WRONG_JOBS[name]) for name in names})


# answers


def random_like(rng: random.Random, array: Any) -> Any:
    """An array with other values, also not finite ones, or with another shape or dtype."""
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
    """Malformed answers of a prefill side; at least one, so that nobody waits forever."""
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
    """A prefill side that forwards jobs to a real one and corrupts its answers.

    Attributes:
        num_sent: messages that were changed or replaced by wrong frames.
    """

    def __init__(self, prefill: Any, rng: random.Random, share: float) -> None:
        self._prefill, self._rng, self._share = prefill, rng, share
        self._weights = prefill._side[1].weights
        self.sends_bytes = False
        self.num_sent = 0
        options: Any = {"hello": lambda: hello_of(prefill), "opened": self._opened}
        self._listener = Listener("127.0.0.1:0", terms(End(), **options))
        self.address = self._listener.address

    def close(self) -> None:
        self._listener.close()

    def _opened(self, channel: Channel) -> tuple[Deliver, Lost]:
        client = DecodeClient(*self._prefill._side, partial(self._reply, channel))
        return client.take, lambda error: client.lost()

    def _reply(self, channel: Any, message: Message) -> None:
        if isinstance(message, Weights) or self._rng.random() >= self._share:
            answers = [message]
        elif self.sends_bytes:
            self.num_sent += 1
            channel.frames.extend([*wrong_frames(self._rng, message), channel.close])
            channel._bell.ring()
            return
        else:
            answers = wrong_answers(self._rng, message, Weights(weights=self._weights))
            if self._rng.random() < 0.02:  # after this the decode side disconnects
                answers.append(self._rng.choice([Cancel(id=1), hello_of(self._prefill)]))
            self.num_sent += 1
        with suppress(ConnectionError):
            for answer in answers:
                channel.send(answer)


class QuickPeer(RemotePeer):
    """Reconnect without a wait."""

    def __init__(self, address: str, side: Any) -> None:
        self._side = side
        hello = Hello(facts=side[1].transfer.facts | {"weights": side[1].weights})
        options: Any = {"hello": lambda: hello, "opened": self._opened}
        options["max_bytes"] = side[1].transfer.most_bytes
        waits = {"first_wait": 0.001, "max_wait": 0.01}
        Dialer.__init__(self, address, terms(End(), **options), **waits)


class Answers(End):
    """Answers that a hostile decode side receives, by job."""

    def __init__(self) -> None:
        super().__init__()
        self.last: SimpleQueue[Prefilled | Refused] = SimpleQueue()

    def deliver(self, message: Message) -> None:
        if isinstance(message, Prefilled | Refused):
            self.last.put(message)
