"""Engines whose peer knows the secret and sends nonsense still serve everyone else."""

import logging
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from specjax import Engine
from specjax.disaggregation import decode as decoding
from specjax.disaggregation import listener, remote
from specjax.disaggregation.messages import (
    Assembler,
    Cancel,
    Job,
    Message,
    Piece,
    Prefilled,
    Refused,
    Taken,
    Weights,
    encode,
)
from specjax.disaggregation.remote import RemotePeer

from ..support.waiting import wait_for
from .hostile import Answers, Impostor, QuickPeer, hello_of, job_of, send_wrong_frames, wrong_job
from .peers import SECRET, dialing, raw_lanes
from .sides import REPORTS, SIZES, wait_until_empty

pytestmark = pytest.mark.slow

SECONDS = 30.0
APART = SIZES | {"disaggregation_secret": SECRET}
GREEDY = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0.0}
RNG = random.Random(0)
PROMPTS = [[RNG.randrange(90) for _ in range(length)] for length in (1, 5, 30, 70)]
FEW, MANY = 200, 5000
COUNTS = [FEW, pytest.param(MANY, marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def prefill(files) -> Iterator[Engine]:
    address = "127.0.0.1:0"
    with files.engine(
        disaggregation_mode="prefill", disaggregation_address=address, page_size=16, **APART
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def decode(files, prefill) -> Iterator[Engine]:
    address = prefill.disaggregation_address
    with files.engine(
        share_weights_with=prefill,
        disaggregation_mode="decode",
        disaggregation_address=address,
        **APART,
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def texts(files, prefill) -> list[list[int]]:
    with files.engine(share_weights_with=prefill, **SIZES) as alone:
        return outputs(alone)


@pytest.fixture(autouse=True)
def _served_afterwards(prefill, decode, texts, caplog) -> Iterator[None]:
    """Afterwards both sides are empty and generate the right texts together."""
    caplog.set_level(logging.CRITICAL)
    yield
    wait_until_empty(decode, prefill)
    assert decode.wait_for_peer(SECONDS)
    before = [side.metrics.snapshot().prefilled_tokens for side in (decode, prefill)]
    for _ in range(3):  # uses all pages of both pools again
        assert outputs(decode) == texts
    after = [side.metrics.snapshot().prefilled_tokens for side in (decode, prefill)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 3 * sum(map(len, PROMPTS))]
    wait_until_empty(decode, prefill)


def outputs(engine: Engine, **options: Any) -> list[list[int]]:
    outs = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY, **options)
    return [out["output_ids"] for out in outs]


@pytest.mark.parametrize("count", COUNTS)
def test_wrong_frames_to_a_prefill_side(prefill, decode, texts, count):
    """While the engine serves another decode side."""
    rng, hello, address = random.Random(1), hello_of(decode), prefill.disaggregation_address
    for i in range(count):
        send_wrong_frames(rng, address, hello, job_of(rng, i))
        if i % 500 == 0:
            assert outputs(decode) == texts


@pytest.fixture
def stranger(prefill, decode) -> Iterator[Answers]:
    """Another decode side, and the answers that it receives."""
    answers = Answers()
    options: Any = {"first_wait": SECONDS, "max_wait": SECONDS, "hello": lambda: hello_of(decode)}
    with dialing(answers, prefill.disaggregation_address, **options):
        answers.wait()
        yield answers


@pytest.mark.parametrize("count", COUNTS)
def test_jobs_that_make_no_sense(decode, texts, stranger, count):
    """Every job is completed or refused."""
    rng = random.Random(2)
    num_refused, ids = 0, set()
    for i in range(0, count, 20):
        for number in range(i, i + 20):
            stranger.channel.send(wrong_job(rng, number))
            if rng.random() < 0.1:
                stranger.channel.send(Cancel(id=rng.choice([number, number + 1, 2**64 - 1])))
        for _ in range(20):
            last = stranger.last.get(timeout=SECONDS)
            ids.add(last.id)
            num_refused += isinstance(last, Refused)
        if i % 500 == 0:
            assert outputs(decode) == texts
    assert ids == set(range(count))
    assert count // 4 < num_refused < count
    assert stranger.channel.is_open


def test_a_job_that_comes_twice_ends_its_own_connection(prefill, decode, texts, stranger):
    job = job_of(random.Random(3), 7)
    held = ThreadPoolExecutor(1).submit(prefill._loop.run, lambda: time.sleep(0.2))
    stranger.channel.send(job)
    stranger.channel.send(job)
    stranger.ends.get(timeout=SECONDS)
    held.result()
    assert outputs(decode) == texts


@pytest.mark.parametrize(
    "message",
    [
        Piece(id=1, start=0, count=1, kv=()),
        Refused(id=1, reason=""),
        Weights(weights="x"),
        Prefilled(
            id=1,
            weights="",
            token=1,
            logprobs=None,
            hidden=None,
            rows=None,
            prompt_logprobs=None,
            cached_tokens=0,
            seconds=0.0,
        ),
    ],
    ids=lambda message: type(message).__name__,
)
def test_unexpected_messages_of_a_decode_side(stranger, message: Message):
    stranger.channel.send(message)
    stranger.ends.get(timeout=SECONDS)


@pytest.fixture
def sluggard(prefill, decode) -> Iterator[list[Any]]:
    """The lanes of a decode side that sends jobs and heartbeats but takes no frames."""
    with raw_lanes(prefill.disaggregation_address, hello_of(decode)) as lanes:
        wait_for(lambda: len(prefill._side[1]._clients) == 2)
        yield lanes
    wait_for(lambda: len(prefill._side[1]._clients) == 1)


def ask_for(lanes: list[Any], *jobs: Job) -> None:
    for job in jobs:
        for frame in encode(job):
            lanes[0].send(frame)


def wait_until_idle(prefill: Engine) -> None:
    done, before = prefill.metrics.snapshot().prefilled_tokens, -1
    while done != before:
        time.sleep(0.5)
        done, before = prefill.metrics.snapshot().prefilled_tokens, done


def test_a_decode_side_that_takes_nothing_is_disconnected(
    prefill, decode, texts, sluggard, monkeypatch
):
    """Its jobs end, and the engine keeps nothing of them."""
    monkeypatch.setattr(listener, "MAX_STALL", 2)
    rng = random.Random(4)
    ask_for(sluggard, *(job_of(rng, number) for number in range(1000)))
    wait_for(lambda: len(prefill._side[1]._clients) == 1)
    assert outputs(decode) == texts


@pytest.mark.parametrize("takes", [0, 1], ids=["nothing", "little"])
def test_requests_next_to_a_slow_decode_side_are_answered_by_the_prefill_side(
    prefill, decode, texts, sluggard, monkeypatch, takes
):
    """Faster than the timeout for a local prefill."""
    monkeypatch.setattr(decoding, "MAX_SILENCE", 2.0)
    monkeypatch.setattr(remote, "MAX_QUEUED", 2**12)
    monkeypatch.setattr(listener, "MAX_STALL", 10 * SECONDS)  # number of heartbeats
    rng = random.Random(6)
    before = [side.metrics.snapshot().prefilled_tokens for side in (decode, prefill)]
    ask_for(sluggard, *(job_of(rng, number) for number in range(1000)))
    wait_until_idle(prefill)
    for _ in range(5):
        for _ in range(takes):
            sluggard[0].send(encode(Taken(count=1))[0])
        assert outputs(decode) == texts
    after = [side.metrics.snapshot().prefilled_tokens for side in (decode, prefill)]
    assert after[0] == before[0]
    assert 0 < after[1] - before[1] - 5 * sum(map(len, PROMPTS)) < 20 * 100  # its own jobs


def test_a_long_prompt_that_is_taken_too_slowly_is_given_up(
    prefill, decode, texts, sluggard, monkeypatch
):
    """Other jobs wait briefly; this one is refused, and the next ones are completed."""
    monkeypatch.setattr(remote, "MAX_QUEUED", 2**9)  # below the KV size of any prompt
    monkeypatch.setattr(remote, "MAX_WAIT", 0.05)
    rng = random.Random(7)
    ask_for(sluggard, *(job_of(rng, number, 100) for number in range(20)))
    wait_until_idle(prefill)
    assert outputs(decode) == texts
    assembler, ends = Assembler(2**24), []
    while len(ends) < 20:
        for lane in sluggard[1:] + sluggard[:1]:  # the hello came through the first lane
            frame = lane.recv()
            sluggard[0].send(encode(Taken(count=1))[0])
            message = assembler.feed(memoryview(frame)) if frame else None
            if isinstance(message, Prefilled | Refused):
                ends.append(message)
    assert [end.id for end in ends] == list(range(20))
    assert {type(end) for end in ends} == {Prefilled, Refused}


def test_prompts_of_one_decode_side_wait_in_bounded_memory(decode, texts, stranger, monkeypatch):
    monkeypatch.setattr(remote, "MAX_QUEUED", 0)
    monkeypatch.setattr(remote, "MAX_WAITING", 2**13)
    rng = random.Random(8)
    for number in range(100):
        stranger.channel.send(job_of(rng, number))
    ends = [stranger.last.get(timeout=SECONDS) for _ in range(100)]
    assert {end.id for end in ends} == set(range(100))
    refused = [end for end in ends if isinstance(end, Refused)]
    assert 0 < len(refused) <= 92
    assert "too many prompts" in refused[0].reason
    stranger.channel.send(job_of(rng, 100))
    stranger.channel.send(job_of(rng, 101))
    stranger.channel.send(Cancel(id=101))
    ends = [stranger.last.get(timeout=SECONDS) for _ in range(2)]
    assert {end.id for end in ends} == {100, 101}


@pytest.mark.parametrize("sends_bytes", [False, True], ids=["nonsense", "bytes"])
@pytest.mark.parametrize("count", COUNTS)
def test_answers_that_make_no_sense(prefill, decode, texts, count, sends_bytes):
    """Every request ends, and malformed data never reaches another request."""
    ours = decode._peer
    ours.close()
    if sends_bytes:
        count //= 4
    rng = random.Random(5)
    impostor = Impostor(prefill, rng, share=0.5)
    impostor.sends_bytes = sends_bytes
    peer = QuickPeer(impostor.address, decode._side)
    try:
        assert decode.wait_for_peer(SECONDS)
        while impostor.num_sent < count:
            options = REPORTS if rng.random() < 0.5 else {}
            given = outputs(decode, timeout=SECONDS, **options)
            assert [len(one) for one in given] == [6] * len(PROMPTS)
            if sends_bytes:  # none of these is ever stored
                assert given == texts
                if rng.random() < 0.5:
                    assert decode.wait_for_peer(SECONDS)
    finally:
        peer.close()
        impostor.close()
        wait_for(lambda: not decode.peer_connected)  # the loop gets the disconnect a little later
        decode._peer = RemotePeer(ours.address, SECRET, decode._side)


@pytest.mark.parametrize(
    ("params", "options"),
    [
        ({}, {"timeout": 1e12}),
        ({}, {"rid": "x" * 20_000_000}),
        ({}, {"rid": "\ud800"}),
        ({"temperature": 10**30}, {}),
        ({"top_k": 10**30, "temperature": 0.5}, {}),
        ({"max_new_tokens": 10**30, "stop_token_ids": list(range(90))}, {}),
        ({"stop": ("zzz", "!!!"), "logit_bias": {5: 1}}, {}),
    ],
)
def test_odd_values_of_a_caller(prefill, decode, params, options):
    """Whether or not the answers can be sent."""
    out = decode.generate(input_ids=PROMPTS[2], sampling_params=GREEDY | params, **options)
    assert out["meta_info"]["finish_reason"]["type"] in ("length", "stop")
    assert decode.peer_connected
