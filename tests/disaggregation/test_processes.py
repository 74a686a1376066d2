"""A prefill and a decode process: killed, restarted or with another configuration."""

import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax import Engine
from specjax.disaggregation.remote import RemotePeer
from specjax.testing import Files

from ..support.engine_process import Process
from ..support.waiting import wait_for
from .peers import SECRET
from .sides import SIZES, wait_until_empty

pytestmark = pytest.mark.slow

SECONDS = 60.0
CALLERS = 8
THERE = SIZES | {"page_size": 16, "disaggregation_mode": "prefill", "disaggregation_secret": SECRET}
HERE = SIZES | {"disaggregation_mode": "decode", "disaggregation_secret": SECRET}


class PrefillSide:
    """A prefill process that always uses the same port."""

    def __init__(self, files: Files) -> None:
        self._options = files.arguments(**THERE)
        self.address = "127.0.0.1:0"
        self.process = self._start()
        self.address = self.process.address

    def _start(self) -> Process:
        return Process(disaggregation_address=self.address, **self._options)

    def restart(self) -> None:
        self.process.close()
        self.process = self._start()
        assert self.process.address == self.address

    def state(self) -> dict[str, int]:
        state: dict[str, int] = self.process.ask("state")
        return state

    def kill_in_transit(self, decode: Engine) -> None:
        """SIGKILL while the decode side waits for it."""
        os.kill(self.process.running.pid, signal.SIGSTOP)
        wait_for(lambda: decode._loop.run(lambda: len(decode._side[1]._awaited)))
        self.process.kill()


def has_ended(state: dict[str, int]) -> bool:
    return not any(state[name] for name in ("running", "waiting", "calls", "pages_held"))


def questions(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Greedy and seeded requests of different lengths; a third with stop strings or biases."""
    rng = np.random.default_rng(seed)
    more: list[dict[str, Any]] = [{}, {"stop": ["zz", "q!"]}, {"logit_bias": {7: 2.5}}]
    return [
        {
            "input_ids": rng.integers(90, size=int(rng.integers(1, 91))).tolist(),
            "sampling_params": {
                "max_new_tokens": int(rng.integers(1, 25)),
                "temperature": 0.9 if i % 2 else 0.0,
                "sampling_seed": i,
                "ignore_eos": bool(i % 3),
            }
            | more[i % 5 if i % 5 < 3 else 0],
        }
        for i in range(count)
    ]


def answer(engine: Engine, question: dict[str, Any]) -> list[int]:
    ids: list[int] = engine.generate(**question)["output_ids"]
    return ids


def computed_here(engine: Engine) -> int:
    return engine.metrics.snapshot().prefilled_tokens


@pytest.fixture(scope="module")
def alone(files: Files) -> Iterator[Engine]:
    with files.engine(**SIZES) as engine:
        yield engine


@pytest.fixture(scope="module")
def side(files: Files) -> Iterator[PrefillSide]:
    side = PrefillSide(files)
    yield side
    side.process.close()


@pytest.fixture(scope="module")
def shared_decode(files: Files, alone: Engine, side: PrefillSide) -> Iterator[Engine]:
    address = side.address
    with files.engine(share_weights_with=alone, disaggregation_address=address, **HERE) as engine:
        yield engine


@pytest.fixture
def decode(shared_decode: Engine, side: PrefillSide) -> Iterator[Engine]:
    """Connect to the prefill process; afterwards both are empty."""
    if side.process.running.poll() is not None:
        side.restart()
    assert shared_decode.wait_for_peer(SECONDS)
    yield shared_decode
    wait_until_empty(shared_decode)
    if side.process.running.poll() is None:
        wait_for(lambda: has_ended(side.state()))


def count_wrong(
    alone: Engine,
    decode: Engine,
    asked: Sequence[dict[str, Any]],
    *,
    after: int | None = None,
    do: Callable[[], None] = lambda: None,
) -> int:
    """Count wrong answers to many callers; call ``do`` once after this many answers."""
    expected = [answer(alone, question) for question in asked]
    with ThreadPoolExecutor(CALLERS) as callers:
        coming: dict[Future[list[int]], int] = {
            callers.submit(answer, decode, question): i for i, question in enumerate(asked)
        }
        wrong = 0
        for number, done in enumerate(as_completed(coming, timeout=SECONDS)):
            wrong += done.result() != expected[coming[done]]
            if number + 1 == after:
                do()
    return wrong


def test_the_prefill_process_is_killed_and_comes_again(alone, decode, side):
    asked = questions(24)
    here = computed_here(decode)
    there = side.state()["prefilled_tokens"]
    assert count_wrong(alone, decode, asked[:4]) == 0
    assert computed_here(decode) == here
    prompts = sum(len(question["input_ids"]) for question in asked[:4])
    assert side.state()["prefilled_tokens"] == there + prompts

    kill = partial(side.kill_in_transit, decode)
    assert count_wrong(alone, decode, asked[4:16], after=2, do=kill) == 0
    here_after = computed_here(decode)
    assert here_after > here
    wait_until_empty(decode)

    side.restart()
    assert decode.wait_for_peer(SECONDS)
    assert count_wrong(alone, decode, asked[16:]) == 0
    assert computed_here(decode) == here_after
    prompts = sum(len(question["input_ids"]) for question in asked[16:])
    assert side.state()["prefilled_tokens"] == prompts


@pytest.mark.long
def test_200_requests_and_two_kills(alone, decode, side, capsys):
    asked = questions(200, seed=1)
    began, before = time.monotonic(), computed_here(decode)
    kill = partial(side.kill_in_transit, decode)
    wrong = count_wrong(alone, decode, asked[:70], after=30, do=kill)
    for part, is_last in ((asked[70:140], False), (asked[140:], True)):
        side.restart()
        assert decode.wait_for_peer(SECONDS)
        wrong += count_wrong(alone, decode, part, after=None if is_last else 30, do=kill)
    seconds = time.monotonic() - began
    here = computed_here(decode) - before
    total = sum(len(question["input_ids"]) for question in asked)
    with capsys.disabled():
        print(
            f"\n{len(asked)} requests, 2 kills: {wrong} wrong; of {total} prompt tokens "
            f"{total - here} taken from there, {here} computed here; {seconds:.1f} s"
        )
    assert wrong == 0
    assert 0 < here < total
    assert side.state()["prefilled_tokens"] == sum(len(q["input_ids"]) for q in asked[140:])


def test_the_decode_process_is_killed(files, alone, decode, side):
    other = Process(disaggregation_address=side.address, **files.arguments(**HERE))
    try:
        [question] = questions(1, seed=2)
        before = side.state()["prefilled_tokens"]
        assert other.address == side.address

        def was_asked() -> bool:  # after the other process has connected
            assert other.ask("generate", **question)["output_ids"] == answer(alone, question)
            return side.state()["prefilled_tokens"] > before

        wait_for(was_asked)
        prompts = [question["input_ids"] for question in questions(40, seed=3)]
        before = side.state()["prefilled_tokens"]
        other.tell("generate", input_ids=prompts, sampling_params={"max_new_tokens": 30})
        wait_for(lambda: side.state()["prefilled_tokens"] > before)
        other.kill()
    finally:
        other.close()
    wait_for(lambda: has_ended(side.state()))
    asked = questions(6, seed=4)
    before = side.state()["prefilled_tokens"]
    assert count_wrong(alone, decode, asked) == 0
    prompts = sum(len(one["input_ids"]) for one in asked)
    assert side.state()["prefilled_tokens"] == before + prompts


def test_a_prefill_side_answers_no_callers(decode, side):
    said = side.process.ask("generate", input_ids=[1, 2])
    assert "disaggregation_mode='prefill' serves decode engines only" in said["error"]


@pytest.fixture
def parted(decode: Engine) -> Iterator[Engine]:
    """A decode side with the test's peer; afterwards it gets its own peer back."""
    ours = decode._peer
    assert isinstance(ours, RemotePeer)
    ours.close()
    wait_for(lambda: not decode.peer_connected)
    address = ours.address
    yield decode
    decode._peer = RemotePeer(address, SECRET, decode._side)
    assert decode.wait_for_peer(SECONDS)


def check_computed_here(alone: Engine, decode: Engine) -> None:
    asked = questions(4, seed=5)
    before = computed_here(decode)
    assert count_wrong(alone, decode, asked) == 0
    total = sum(len(question["input_ids"]) for question in asked)
    assert computed_here(decode) == before + total


def copied(files: Files, folder: Path) -> Path:
    return Path(shutil.copytree(files.target, folder / "target"))


def test_another_configuration(files, alone, parted, tmp_path, caplog):
    """The log names the differences, and no job is sent."""
    target = copied(files, tmp_path)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
    options = THERE | {"disaggregation_address": "127.0.0.1:0", "target": target}
    with files.engine(**options) as prefill:
        peer = RemotePeer(str(prefill.disaggregation_address), SECRET, parted._side)
        try:
            differing = f"target.rope_theta: {config['rope_theta']} here, 5000.0 there"
            wait_for(lambda: differing in caplog.text)
            assert "target.num_layers" not in caplog.text
            check_computed_here(alone, parted)
        finally:
            peer.close()
        assert prefill.metrics.snapshot().prefilled_tokens == 0


def test_other_weights_of_the_same_model(files, alone, parted, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    target = copied(files, tmp_path)
    tensors = load_file(target / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name] * np.array(1.5, tensors[name].dtype)
    save_file(tensors, target / "model.safetensors")
    options = THERE | {"disaggregation_address": "127.0.0.1:0", "target": target}
    with files.engine(**options) as prefill:
        peer = RemotePeer(str(prefill.disaggregation_address), SECRET, parted._side)
        try:
            assert parted.wait_for_peer(SECONDS)
            wait_for(
                lambda: "prefilling locally until both sides have the same weights" in caplog.text
            )
            check_computed_here(alone, parted)
        finally:
            peer.close()
        assert prefill.metrics.snapshot().prefilled_tokens == 0
