"""Frames: round trips of every message, and nothing else that gets through."""

import hmac
import json
import math
import os
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from specjax.disaggregation.checksum import CHUNK
from specjax.disaggregation.fields import DTYPES, KINDS, MAX_RANK, Heartbeat
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
from specjax.disaggregation.values import MAX_DEPTH, WireError
from specjax.disaggregation.wire import (
    HEADER,
    MAC_BYTES,
    MAGIC,
    MAX_JSON_BYTES,
    SCHEMA,
    Reader,
    check,
    decode,
    encode,
)

KEY = b"k" * 32
MAX_BYTES = 2**20
NUM_FUZZED = int(os.environ.get("NUM_FUZZED", "300"))
PIECE = Piece(
    id=3, start=16, count=2, kv=(np.arange(6, dtype=np.int16).reshape(2, 3), np.array([True]))
)
JOB = Job(
    id=1,
    rid="a",
    input_ids=np.arange(5, dtype=np.int32),
    start=0,
    params={"temperature": 0.5, "stop": ["x"], "nested": {"a": None}},
    seed=2**64 - 1,
    end_token_ids=[2, 7],
    top_logprobs=None,
    logprob_start_len=-1,
    return_hidden_states=False,
    timeout=None,
)


def frame_of(message: Any, sequence: int = 0, key: bytes = KEY) -> bytes:
    return b"".join(encode(message, sequence, key))


def read(frame: bytes, sequence: int = 0, key: bytes = KEY) -> Any:
    return decode(frame, sequence, key, max_bytes=MAX_BYTES)


def forged(text: bytes | dict[str, Any], arrays: bytes = b"", /, **header: Any) -> bytes:
    """An authentic frame of whatever parts."""
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    facts = {"magic": MAGIC, "schema": SCHEMA, "text": len(text), "arrays": len(arrays), "at": 0}
    head = HEADER.pack(*(facts | header).values()) + text
    return head + hmac.digest(KEY, head, "sha256") + arrays


def assert_same(value: Any, other: Any) -> None:
    """Equal in value and type, arrays in dtype, shape and every bit."""
    if hasattr(value, "__array__"):
        value = np.asarray(value)
        assert isinstance(other, np.ndarray)
        assert (other.dtype, other.shape) == (value.dtype, value.shape)
        assert other.tobytes() == value.tobytes()
    elif isinstance(value, tuple):
        assert isinstance(other, tuple)
        assert len(other) == len(value)
        for a, b in zip(value, other, strict=True):
            assert_same(a, b)
    else:
        assert type(other) is type(value)
        assert other == value


def assert_round_trip(message: Any) -> None:
    other = read(frame_of(message))
    assert type(other) is type(message)
    for field in fields(message):
        assert_same(getattr(message, field.name), getattr(other, field.name))


shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype, shape = DTYPES[draw(st.sampled_from(sorted(DTYPES)))], draw(shapes)
    size = math.prod(shape)
    if dtype == np.bool_:
        return np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size))).reshape(shape)
    data = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
    return np.frombuffer(data, dtype).reshape(shape)


naturals = st.integers(0, 2**64 - 1)
tuples = st.lists(arrays(), max_size=4).map(tuple)
floats = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | floats | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)
objects = st.dictionaries(texts, json_values, max_size=4)
messages = st.one_of(
    st.builds(Hello, facts=objects),
    st.builds(
        Job,
        id=naturals,
        rid=texts,
        input_ids=hnp.arrays(np.int32, st.integers(0, 50)),
        start=naturals,
        params=objects,
        seed=naturals,
        end_token_ids=st.lists(naturals, max_size=4),
        top_logprobs=st.none() | st.integers(-1, 20),
        logprob_start_len=st.none() | st.integers(-1, 2**31),
        return_hidden_states=st.booleans(),
        timeout=st.none() | floats,
    ),
    st.builds(Cancel, id=naturals),
    st.builds(Piece, id=naturals, start=naturals, count=naturals, kv=tuples),
    st.builds(
        Prefilled,
        id=naturals,
        weights=texts,
        token=naturals,
        logprobs=st.none() | tuples,
        hidden=st.none() | arrays(),
        rows=st.none() | tuples,
        prompt_logprobs=st.none() | tuples,
        cached_tokens=naturals,
        seconds=floats,
    ),
    st.builds(Refused, id=naturals, reason=texts),
    st.builds(Weights, weights=texts),
)


@settings(max_examples=100)
@given(messages)
def test_round_trip(message: Message) -> None:
    assert_round_trip(message)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype(dtype: str) -> None:
    data = np.arange(24).reshape(2, 3, 4) % 2
    kv = (data.astype(DTYPES[dtype]), np.zeros((), DTYPES[dtype]), np.ones((0, 3), DTYPES[dtype]))
    assert_round_trip(Piece(id=0, start=0, count=2, kv=kv))


def test_every_message_is_of_the_wire() -> None:
    assert set(KINDS.values()) == {*get_args(Message), Heartbeat}
    assert_round_trip(Heartbeat())


def test_arrays_of_other_layouts_and_makers() -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    for array in (base.T, base[::2, ::-3], base.astype(">f4"), jnp.asarray(base, jnp.bfloat16)):
        (other,) = read(frame_of(Piece(id=0, start=0, count=1, kv=(array,)))).kv
        np.testing.assert_array_equal(np.asarray(array, np.float32), np.asarray(other, np.float32))
        assert other.dtype.name == array.dtype.name


def test_contiguous_arrays_are_not_copied() -> None:
    array = np.zeros(1000, np.float16)
    _, view = encode(Piece(id=0, start=0, count=1, kv=(array,)), 0, KEY)
    array[7] = 3
    assert bytes(view) == array.tobytes()


def test_a_frame_of_schema_2() -> None:
    """A change of these bytes, or of the messages, needs another schema."""
    assert (SCHEMA, CHUNK) == (2, 4 * 2**20)
    text = b'{"kind":"Piece","fields":{"id":3,"start":16,"count":2,"kv":'
    text += b'[["int16",[2,3],2722042102],["bool",[1],4215463597]]}}'
    assert frame_of(PIECE) == forged(text, b"".join(array.tobytes() for array in PIECE.kv))
    assert {kind.__name__: [f.name for f in fields(kind)] for kind in get_args(Message)} == {
        "Hello": ["facts"],
        "Job": [
            *("id", "rid", "input_ids", "start", "params", "seed", "end_token_ids"),
            *("top_logprobs", "logprob_start_len", "return_hidden_states", "timeout"),
        ],
        "Cancel": ["id"],
        "Piece": ["id", "start", "count", "kv"],
        "Prefilled": [
            *("id", "weights", "token", "logprobs", "hidden", "rows", "prompt_logprobs"),
            *("cached_tokens", "seconds"),
        ],
        "Refused": ["id", "reason"],
        "Weights": ["weights"],
    }


# What is refused.


@pytest.mark.parametrize("message", [PIECE, JOB, Cancel(id=7)], ids=lambda m: type(m).__name__)
def test_every_flipped_bit_and_every_length(message: Message) -> None:
    frame = frame_of(message)
    for i in range(len(frame)):
        with pytest.raises(WireError):
            read(frame[:i])
        for flip in (1, 0x80, 0xFF):
            wrong = bytearray(frame)
            wrong[i] ^= flip
            with pytest.raises(WireError):
                read(bytes(wrong))
    with pytest.raises(WireError, match="1 bytes lie behind"):
        read(frame + b"x")


def test_order() -> None:
    frames = [frame_of(Cancel(id=i), i) for i in range(3)]
    read(frames[1], 1)
    for sequence, frame in ((1, frames[0]), (0, frames[1]), (1, frames[2])):
        with pytest.raises(WireError, match=r"frame \d came where \d was due"):
            read(frame, sequence)
    stream = memoryview(b"".join([*frames, frames[2]]))

    def read_into(view: memoryview) -> None:
        nonlocal stream
        view[:], stream = stream[: len(view)], stream[len(view) :]

    reader = Reader(read_into, key=KEY, max_bytes=0)
    assert [reader.read() for _ in frames] == [Cancel(id=i) for i in range(3)]
    with pytest.raises(WireError, match="frame 2 came where 3 was due"):
        reader.read()


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        (frame_of(PIECE, key=b"j" * 32), "MAC is wrong"),
        (forged(b"{}", magic=b"HTTP"), "starts with b'SJXF', and not with b'HTTP'"),
        (forged(b"{}", schema=SCHEMA + 1), f"of schema {SCHEMA + 1}, and this side of {SCHEMA}"),
        (forged(b"{}", text=2**32 - 1), f"{2**32 - 1} bytes of JSON are more than"),
        (forged(b"{}", arrays=2**60), f"{2**60} bytes of arrays are more than {MAX_BYTES}"),
        (forged(b"[" * 100_000), "JSON part is wrong"),
        (forged(b'{"kind":' * 10_000), "JSON part is wrong"),
        (forged(b"[]"), r"JSON part=\[\] must be an object of kind and fields"),
        (forged(b'{"kind":"Cancel","kind":"Cancel","fields":{"id":1}}'), "twice"),
        (forged(b'\xff\xfe{"kind"'), "ascii"),
        (forged({"kind": "Cancel"}), "must be an object of kind and fields"),
        (forged({"kind": "Message", "fields": {}}), "kind='Message' must be one of Hello, Job"),
        (forged({"kind": ["Cancel"], "fields": {}}), "kind=.* must be one of"),
        (forged({"kind": "Cancel", "fields": {}}), r"must be an object of exactly \['id'\]"),
        (forged({"kind": "Cancel", "fields": {"id": 1, "x": 2}}), "of exactly"),
        (forged({"kind": "Cancel", "fields": [1]}), "of exactly"),
        (forged({"kind": "Cancel", "fields": {"id": 1}}, b"x"), "0 bytes, and their part"),
        (forged(b'{"kind":"Hello","fields":{"facts":{"a":1e999}}}'), "1e999 is no finite"),
        (forged(b'{"kind":"Hello","fields":{"facts":{"a":NaN}}}'), "NaN is no finite"),
        (forged(b'{"kind":"Hello","fields":{"facts":{"a":%s}}}' % (b"9" * 5000)), "digits"),
        (forged(b'{"kind":"Hello","fields":{"facts":{"a":%s}}}' % (b"9" * 50)), "an integer from"),
    ],
)
def test_wrong_frames(frame: bytes, match: str) -> None:
    with pytest.raises(WireError, match=match):
        read(frame)


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


WRONG: list[tuple[Message, str, Any, str]] = [
    (Cancel(id=1), "id", True, "id=True must be an integer"),
    (Cancel(id=1), "id", 1.0, "id=1.0 must be an integer"),
    (Cancel(id=1), "id", -1, "id=-1 must be an integer from 0 to 18446744073709551615"),
    (Cancel(id=1), "id", 2**64, "must be an integer from 0 to"),
    (Cancel(id=1), "id", None, "id=None must be an integer"),
    (JOB, "seed", 2**64, "seed=18446744073709551616 must be"),
    (JOB, "rid", 7, "rid=7 must be a string"),
    (JOB, "end_token_ids", [1, True], "end_token_ids=True must be an integer"),
    (JOB, "end_token_ids", 3, "must be a list of integers"),
    (JOB, "top_logprobs", 1.5, "top_logprobs=1.5 must be an integer"),
    (JOB, "return_hidden_states", 1, "must be true or false"),
    (JOB, "timeout", "1", "timeout='1' must be a finite number"),
    (JOB, "params", [], "must be an object of JSON values"),
    (JOB, "params", nested(MAX_DEPTH), f"nested deeper than {MAX_DEPTH}"),
    (JOB, "input_ids", None, "input_ids=None must be"),
    (JOB, "input_ids", [1, 2], "input_ids=.* must be"),
    (PIECE, "kv", None, "kv=None must be"),
]


@pytest.mark.parametrize(("message", "name", "value", "match"), WRONG)
def test_wrong_values_are_neither_sent_nor_taken(
    message: Any, name: str, value: Any, match: str
) -> None:
    with pytest.raises(WireError, match=match):
        check(replace(message, **{name: value}))
    with pytest.raises(WireError, match=match):
        encode(replace(message, **{name: value}), 0, KEY)
    head = HEADER.unpack(frame_of(message)[: HEADER.size])
    frame = frame_of(message)[HEADER.size :]
    body = json.loads(frame[: head[2]])
    body["fields"][name] = value
    with pytest.raises(WireError, match=match):
        read(forged(body, frame[head[2] + MAC_BYTES :]))


@pytest.mark.parametrize("value", [math.nan, math.inf, {1: 2}, {"a": object()}, {"a": (1,)}])
def test_what_json_cannot_say(value: Any) -> None:
    with pytest.raises(WireError):
        check(replace(JOB, params={"a": value}))
    with pytest.raises(WireError):
        check(replace(JOB, timeout=value))


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.array(["a"]), "kv='str32' must be one of the dtypes bool"),
        (np.array([None]), "kv='object' must be"),
        (np.zeros(2, np.complex64), "kv='complex64' must be"),
        (np.zeros((1,) * (MAX_RANK + 1)), "must be a shape of at most 8 axes"),
    ],
)
def test_arrays_that_are_not_sent(array: np.ndarray, match: str) -> None:
    with pytest.raises(WireError, match=match):
        encode(replace(PIECE, kv=(array,)), 0, KEY)


def test_no_message() -> None:
    for value in ("Cancel", None, object()):
        with pytest.raises(WireError, match="must be one of Hello, Job"):
            check(value)  # type: ignore[arg-type]


def test_too_much_json() -> None:
    with pytest.raises(WireError, match=f"more than {MAX_JSON_BYTES}"):
        encode(Refused(id=1, reason="x" * MAX_JSON_BYTES), 0, KEY)
    with pytest.raises(WireError, match="5000 arrays are more than"):
        check(replace(PIECE, kv=(np.zeros(0),) * 5000))


@pytest.mark.parametrize(
    "spec",
    [
        ["float128", [1], 0],
        ["object", [1], 0],
        [["bool"], [1], 0],
        ["int8", [-1], 0],
        ["int8", [True], 0],
        ["int8", [1.0], 0],
        ["int8", "1", 0],
        ["int8", 1, 0],
        ["int8", [1] * (MAX_RANK + 1), 0],
        ["int8", [2**60], 0],
        ["int64", [2**62, 2**62], 0],
        ["int64", [0, 2**62, 2**62], 0],
        ["int8", [1], -1],
        ["int8", [1], 2**32],
        ["int8", [1], None],
        ["int8", [1]],
        ["int8", [1], 0],  # another checksum
        ["int8", [2], 0],
        ["int8", [0], 0],
        {"dtype": "int8"},
        None,
    ],
)
def test_wrong_arrays(spec: Any) -> None:
    body = {"kind": "Piece", "fields": {"id": 1, "start": 0, "count": 1, "kv": [spec]}}
    with pytest.raises(WireError):
        read(forged(body, b"\1"))


def test_a_bool_of_two() -> None:
    body = {"kind": "Piece", "fields": {"id": 1, "start": 0, "count": 1}}
    body["fields"]["kv"] = [["bool", [1], 0xBCE2A47D]]  # type: ignore[index]
    with pytest.raises(WireError, match="2 is no value of a bool"):
        read(forged(body, b"\2"))


def test_claims_allocate_nothing() -> None:
    body = {"kind": "Piece", "fields": {"id": 1, "start": 0, "count": 1}}
    body["fields"]["kv"] = [["int8", [2**60], 0]]  # type: ignore[index]
    frames = [forged(body, arrays=2**60), forged(b"{}", text=2**32 - 1), forged(body, b"\1")]
    frames.append(forged(body, arrays=MAX_BYTES))
    tracemalloc.start()
    try:
        for frame in frames:
            with pytest.raises(WireError):
                read(frame)
        assert tracemalloc.get_traced_memory()[1] < 2**19
    finally:
        tracemalloc.stop()


def mutations(rng: random.Random) -> dict[str, Callable[[], bytes]]:
    good = frame_of(JOB)
    text = good[HEADER.size : good.index(b"}}") + 2]
    tokens = [b"{", b"}", b"[", b"]", b",", b":", b"null", b"-1", b'""', b"1e9", b"true", b"NaN"]

    def garbled(data: bytes) -> bytes:
        wrong = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            at = rng.randrange(len(wrong))
            wrong[at : at + rng.randrange(4)] = rng.choice([rng.choice(tokens), rng.randbytes(2)])
        return bytes(wrong)

    return {
        "noise": lambda: rng.randbytes(rng.randrange(200)),
        "noise behind a header": lambda: good[: HEADER.size] + rng.randbytes(300),
        "a garbled frame": lambda: garbled(good),
        "authentic noise": lambda: forged(rng.randbytes(rng.randrange(50))),
        "authentic garbled JSON": lambda: forged(garbled(text), rng.randbytes(20)),
    }


def test_fuzz() -> None:
    """Whatever comes: a message or a WireError."""
    rng = random.Random(0)
    kinds = list(mutations(rng).values())
    for i in range(NUM_FUZZED):
        frame = kinds[i % len(kinds)]()
        try:
            message = read(frame)
        except WireError:
            continue
        assert isinstance(message, get_args(Message))
