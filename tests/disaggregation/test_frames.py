"""Frames: every message survives a round trip, and malformed frames are refused."""

import math
import os
import random
import tracemalloc
from typing import Any, get_args

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec.structs import asdict, replace

from specjax.disaggregation.decode import _json
from specjax.disaggregation.messages import (
    DTYPES,
    FRAME_BYTES,
    MAX_ARRAYS,
    MAX_RANK,
    SCHEMA,
    Assembler,
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
    WireError,
    encode,
)
from specjax.sampling.params import SamplingParams

from .hostile import garbled

MAX_BYTES = 2**22
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


def read(*frames: Any, max_bytes: int = MAX_BYTES) -> Any:
    """Return the message that the last frame completes; earlier frames must complete none."""
    assembler = Assembler(max_bytes)
    *early, last = [assembler.feed(memoryview(frame)) for frame in frames]
    assert not any(early)
    return last


def head_of(kind: str, **fields: Any) -> bytes:
    return msgspec.msgpack.encode({"type": kind} | fields)


def array_head(spec: Any) -> bytes:
    return head_of("Piece", id=1, start=0, count=1, kv=[spec])


def assert_same(value: Any, other: Any) -> None:
    """Equal values and types; arrays are equal in dtype, shape and every bit."""
    if hasattr(value, "__array__"):
        value = np.asarray(value)
        assert isinstance(other, np.ndarray)
        assert (other.dtype, other.shape) == (value.dtype, value.shape)
        assert other.tobytes() == value.tobytes()
    elif isinstance(value, tuple):
        assert isinstance(other, tuple)
        for a, b in zip(value, other, strict=True):
            assert_same(a, b)
    else:
        assert type(other) is type(value)
        assert other == value


def assert_round_trip(message: Any) -> None:
    other = read(*encode(message))
    assert type(other) is type(message)
    for name, value in asdict(message).items():
        assert_same(value, getattr(other, name))


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
    st.builds(Open, token=st.binary(min_size=16, max_size=16), lane=naturals, facts=objects),
    st.builds(Taken, count=naturals),
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


def test_arrays_of_other_layouts_and_makers() -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    for array in (base.T, base[::2, ::-3], base.astype(">f4"), jnp.asarray(base, jnp.bfloat16)):
        (other,) = read(*encode(Piece(id=0, start=0, count=1, kv=(array,)))).kv
        np.testing.assert_array_equal(np.asarray(array, np.float32), np.asarray(other, np.float32))
        assert other.dtype.name == array.dtype.name


def test_contiguous_arrays_are_cut_into_views() -> None:
    array = np.zeros(FRAME_BYTES + 1, np.int16)
    frames = encode(Piece(id=0, start=0, count=1, kv=(array,)))[1:]
    assert [len(frame) for frame in frames] == [FRAME_BYTES, FRAME_BYTES, 2]
    array[7] = array[-1] = 3
    assert b"".join(frames) == array.tobytes()


def test_frames_of_schema() -> None:
    """If these bytes or messages change, raise SCHEMA."""
    assert (SCHEMA, FRAME_BYTES) == (6, 2**20)
    kv = [["int16", [2, 3]], ["bool", [1]]]
    head = head_of("Piece", id=3, start=16, count=2, kv=kv)
    assert [bytes(f) for f in encode(PIECE)] == [head, *(array.tobytes() for array in PIECE.kv)]
    assert {
        kind.__name__: kind.__struct_fields__ for kind in (*get_args(Message), Open, Taken)
    } == {
        "Hello": ("facts",),
        "Job": (
            *("id", "rid", "input_ids", "start", "params", "seed", "end_token_ids"),
            *("top_logprobs", "logprob_start_len", "return_hidden_states", "timeout", "mask"),
        ),
        "Cancel": ("id",),
        "Piece": ("id", "start", "count", "kv"),
        "Prefilled": (
            *("id", "weights", "token", "logprobs", "hidden", "rows", "prompt_logprobs"),
            *("cached_tokens", "seconds"),
        ),
        "Refused": ("id", "reason"),
        "Weights": ("weights",),
        "Open": ("token", "lane", "facts"),
        "Taken": ("count",),
    }


# Refused frames.


@pytest.mark.parametrize(
    ("message", "name", "value"),
    [
        *((Cancel(id=1), "id", value) for value in (True, 1.0, -1, 2**64, None)),
        (JOB, "seed", 2**64),
        (JOB, "rid", 7),
        (JOB, "rid", "\ud800"),
        (JOB, "end_token_ids", [1, True]),
        (JOB, "end_token_ids", 3),
        (JOB, "top_logprobs", 1.5),
        (JOB, "return_hidden_states", 1),
        (JOB, "timeout", "1"),
        (JOB, "params", []),
        (JOB, "params", {"a": object()}),
        (JOB, "params", {"a": np.float32(1)}),
        (JOB, "input_ids", None),
        (JOB, "input_ids", [1, 2]),
        (PIECE, "kv", None),
        (PIECE, "kv", (np.array(["a"]),)),
        (PIECE, "kv", (np.array([None]),)),
        (PIECE, "kv", (np.zeros(2, np.complex64),)),
        (PIECE, "kv", (np.zeros((1,) * (MAX_RANK + 1)),)),
        (PIECE, "kv", (np.zeros(0),) * (MAX_ARRAYS + 1)),
        (Refused(id=1, reason=""), "reason", "x" * (FRAME_BYTES + 1)),
    ],
)
def test_values_that_are_not_sent(message: Any, name: str, value: Any) -> None:
    with pytest.raises(WireError):
        encode(replace(message, **{name: value}))
    with pytest.raises(WireError):
        encode(value)


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        (b"", "truncated"),
        (b"GET / HTTP/1.1\r\n", "`object`, got `int`"),
        (b"\x91" * 100_000, "`object`, got `array`"),
        (head_of("Hello", facts={"a": None})[:-1] + b"\x91" * 100_000, "recursion"),
        (head_of("Cancel"), "missing required field `id`"),
        (head_of("Cancel", id=1, x=2), "unknown field `x`"),
        (head_of("Cancel", id=1) + b"x", "trailing"),
        (head_of("Cancel", id=True), r"`int`, got `bool` - at `\$\.id`"),
        (head_of("Cancel", id=-1), ">= 0"),
        (head_of("Message"), "Invalid value 'Message'"),
        (msgspec.msgpack.encode({"id": 1}), "missing required field `type`"),
        (head_of("Open", token=b"short", lane=0, facts={}), "length >= 16"),
        (array_head(["int8", [MAX_BYTES + 1]]), f"bytes of arrays exceed {MAX_BYTES}"),
        (array_head(["int64", [2**61, 2**61]]), f"bytes of arrays exceed {MAX_BYTES}"),
        (head_of("Piece", id=1, start=0, count=1, kv=[["int8", [0]]] * 5000), "at most 4096"),
        (array_head(["int64", [0, 2**61, 2**61]]), "not a valid"),  # does not fit in memory
        *((array_head(spec), "not a valid") for spec in (None, {"dtype": "int8"}, ["int8"])),
        *((array_head([dtype, [1]]), "not a valid") for dtype in ("float128", "object", ["a"])),
        *(
            (array_head(["int8", shape]), "not a valid")
            for shape in ([-1], [True], [1.0], "1", 1, [1] * (MAX_RANK + 1), [2**62, 0], [2**63])
        ),
    ],
)
def test_wrong_first_frames(frame: bytes, match: str) -> None:
    with pytest.raises(WireError, match=match):
        read(frame)


@pytest.mark.parametrize("data", [b"", b"1", b"1" * 11, b"1" * 13])
def test_frames_of_arrays_have_their_size(data: bytes) -> None:
    with pytest.raises(WireError, match=f"{len(data)} bytes; expected 12"):
        read(encode(PIECE)[0], data)


def test_a_bool_of_two() -> None:
    with pytest.raises(WireError, match="a bool must be 0 or 1, not 2"):
        read(array_head(["bool", [1]]), b"\2")


def test_parameters_of_other_numbers_are_sent() -> None:
    class Text(str):
        pass

    given = SamplingParams(
        temperature=np.float64(0.5), logit_bias={3: np.float64(1)}, stop=[Text("x")]
    )
    message = read(*encode(replace(JOB, params=_json(given))))
    sent = SamplingParams.of(message.params)
    assert (sent.temperature, sent.stop_strings) == (given.temperature, given.stop_strings)
    assert {int(token): bias for token, bias in sent.logit_bias.items()} == given.logit_bias


def test_claims_allocate_nothing() -> None:
    tracemalloc.start()
    try:
        for count in (2**60, MAX_BYTES + 1):
            with pytest.raises(WireError):
                read(array_head(["int8", [count]]))
        assert tracemalloc.get_traced_memory()[1] < 2**19
    finally:
        tracemalloc.stop()


def test_fuzz() -> None:
    """Any input yields a message, a request for more frames, or a WireError."""
    rng = random.Random(0)
    good = [bytes(frame) for frame in encode(JOB)]
    for _ in range(NUM_FUZZED):
        frames = rng.choice([[garbled(rng, good[0]), good[1]], [rng.randbytes(rng.randrange(200))]])
        try:
            message = read(*frames)
        except (WireError, AssertionError):
            continue
        assert message is None or isinstance(message, get_args(Message))
