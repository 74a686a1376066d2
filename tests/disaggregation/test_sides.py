"""A decode side and its prefill side: transferred data, and failures."""

import gc
import random
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from specjax import DisaggregatedEngine, Engine
from specjax.disaggregation import decode
from specjax.disaggregation.decode import MOST_PIECES, LocalPeer, PrefillPeer
from specjax.disaggregation.messages import Message, Piece, Prefilled
from specjax.disaggregation.prefill import DecodeClient
from specjax.disaggregation.remote import PrefillServer, RemotePeer
from specjax.disaggregation.rows import MOST_TOKENS
from specjax.server import make_app
from specjax.testing import Client, running
from specjax.testing.files import EOS_ID

from ..support.compilation import counted_compilations
from ..support.waiting import wait_for
from .hostile import job_of
from .sides import REPORTS, SIZES, assert_same, held, wait_until_empty, without_rows

pytestmark = pytest.mark.slow
LENGTHS = (1, 2, 3, 17, 40, 64, 70, 90)
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(90, size=length).tolist() for length in LENGTHS]
PARAMS = {"max_new_tokens": 16, "ignore_eos": True, "sampling_seed": 3}
GREEDY, DRAWN = PARAMS | {"temperature": 0.0}, PARAMS | {"temperature": 0.9, "top_p": 0.95}


@pytest.fixture(scope="module")
def alone(files) -> Iterator[Engine]:
    with files.engine(**SIZES) as engine:
        yield engine


@pytest.fixture(scope="module")
def pair(files, alone) -> Iterator[DisaggregatedEngine]:
    """Page sizes differ: 4 tokens on one side, 16 on the other."""
    with files.engine(
        kind=DisaggregatedEngine,
        share_weights_with=alone,
        prefill={"page_size": 16, "max_running_requests": 3},
        **SIZES,
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def texts(alone) -> list[dict[str, Any]]:
    return alone.generate(input_ids=PROMPTS, sampling_params=GREEDY)


def ask(engine: Engine, prompts: Any = PROMPTS, params: Any = GREEDY, **options: Any) -> Any:
    return engine.generate(input_ids=prompts, sampling_params=params, **options)


@pytest.mark.long_after(1)
@pytest.mark.parametrize("params", [GREEDY, DRAWN, DRAWN | {"n": 2, "speculative": False}])
def test_results_are_those_of_one_engine(alone, pair, params):
    before = pair.prefill.get_server_info()["internal_states"][0]
    assert_same(ask(pair, params=params, **REPORTS), ask(alone, params=params, **REPORTS))
    wait_until_empty(pair)
    after = pair.prefill.get_server_info()["internal_states"][0]
    computed = after["prompt_tokens"] - before["prompt_tokens"]
    assert computed == sum(LENGTHS) * params.get("n", 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_new_tokens": 1},
        {"max_new_tokens": 2, "min_new_tokens": 2, "ignore_eos": False},
        {"logit_bias": {EOS_ID: 100.0}, "ignore_eos": False},
        {"stop_token_ids": list(range(0, 90, 2))},
        {"stop": ["a", "B", "c", "0", "("], "temperature": 0.9},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "temperature": 0.7},
    ],
)
def test_requests_that_end_early_and_those_with_penalties(alone, pair, changes):
    params = GREEDY | changes
    assert_same(ask(pair, params=params, **REPORTS), ask(alone, params=params, **REPORTS))


def test_no_requests(alone, pair):
    assert pair.generate([]) == alone.generate([]) == []


def test_streams_and_counts(alone, pair, texts):
    """The decode side counts each request once, the prefill side each prompt token once."""
    before = [side.metrics.snapshot() for side in (pair, pair.prefill)]
    *_, last = pair.generate(input_ids=PROMPTS[4], sampling_params=GREEDY, stream=True)
    assert last["output_ids"] == texts[4]["output_ids"]
    wait_until_empty(pair)
    after = [side.metrics.snapshot() for side in (pair, pair.prefill)]
    new = [
        [getattr(b, name) - getattr(a, name) for name in ("num_finished", "prefilled_tokens")]
        for a, b in zip(before, after, strict=True)
    ]
    assert new == [[1, 0], [1, LENGTHS[4]]]
    assert after[0].generated_tokens - before[0].generated_tokens == 16
    assert after[0].time_to_first_token.total > before[0].time_to_first_token.total


def test_nothing_compiles_and_nothing_is_copied_unasked(pair):
    ask(pair)
    with counted_compilations() as compiled, jax.transfer_guard("disallow"):
        ask(pair, params=DRAWN, **REPORTS)
    assert not compiled


def test_while_the_decode_side_is_full_requests_wait_there(pair, texts):
    with held(pair) as peer, ThreadPoolExecutor(1) as executor:
        asked = executor.submit(ask, pair)
        messages = peer.wait(Prefilled, 3)  # 420 tokens do not fit a fourth one
        time.sleep(0.1)
        state = pair.debug_state()
        assert state["running"] + state["waiting"] == len(PROMPTS)
        assert 3 <= state["running"] <= 4
        peer.let_go(*messages)
        assert_same(asked.result(), texts)


def test_requests_without_rows_begin_without_drafts(pair, texts):
    """Other requests are not affected."""
    with held(pair) as peer, ThreadPoolExecutor(1) as executor:
        asked = executor.submit(ask, pair, PROMPTS[:4])
        messages = peer.wait(Prefilled, 4)
        odd = sorted({message.id for message in messages})[1::2]  # type: ignore[union-attr]
        peer.let_go(*(without_rows(one) if one.id in odd else one for one in messages))
        results = asked.result()
    assert_same(results[::2], texts[:4:2])
    for one, other in zip(results[1::2], texts[1:4:2], strict=True):
        assert one["output_ids"] == other["output_ids"]
        ours, theirs = (x["meta_info"]["spec_rounds_by_steps"] for x in (one, other))
        assert ours["0"] == 1
        assert ours["3"] > 0
        assert theirs.keys() == {"3"}


def test_an_abort_in_transit(pair, texts):
    with held(pair) as peer, ThreadPoolExecutor(1) as executor:
        asked = executor.submit(ask, pair, PROMPTS[:2], rid=["left", "kept"])
        messages = peer.wait(Prefilled, 2)
        pair.abort("left")
        peer.let_go(*messages)
        left, kept = asked.result()
    assert left["meta_info"]["finish_reason"]["type"] == "abort"
    assert left["output_ids"] == []
    assert kept["output_ids"] == texts[1]["output_ids"]


def test_a_timeout_in_transit(pair):
    with held(pair), ThreadPoolExecutor(1) as executor:
        asked = executor.submit(ask, pair, PROMPTS[4], timeout=0.2)
        reason = asked.result(timeout=10)["meta_info"]["finish_reason"]
    assert "timed out after 0.2 s" in reason["message"]


def test_jobs_of_a_silent_peer_are_prefilled_locally(pair, texts, caplog, monkeypatch):
    """Only the deadline wakes the engine, and late messages change nothing."""
    monkeypatch.setattr(decode, "MAX_SILENCE", 0.2)
    before = pair.metrics.snapshot().prefilled_tokens
    with held(pair) as peer:
        assert_same(ask(pair, timeout=20), texts)
        monkeypatch.undo()
        peer.let_go()
        assert_same(ask(pair), texts)
    assert "is prefilled locally: the prefill side did not answer" in caplog.text
    assert pair.metrics.snapshot().prefilled_tokens == before + sum(LENGTHS)


def test_a_peer_that_goes_on_is_waited_for(pair, texts, monkeypatch):
    """Also by later requests of the peer, and by each one as long as its messages arrive."""
    prompts, ahead, taken = pair._side[1], 0.0, 0
    take = prompts.take

    def counted(*inputs: Any) -> None:
        nonlocal taken
        take(*inputs)
        taken += 1

    monkeypatch.setattr(prompts, "_clock", lambda: time.perf_counter() + ahead)
    monkeypatch.setattr(prompts, "take", counted)
    before = pair.metrics.snapshot().prefilled_tokens
    with held(pair) as peer, ThreadPoolExecutor(1) as executor:
        asked = executor.submit(ask, pair, PROMPTS[4:7])
        messages = peer.wait(Prefilled, 3)
        for number, message in enumerate(messages, 1):
            ahead += 0.3 * decode.MAX_SILENCE
            LocalPeer._deliver(peer, message)
            wait_for(lambda least=number: taken >= least)
        assert_same(asked.result(), texts[4:7])
    assert pair.metrics.snapshot().prefilled_tokens == before


@pytest.mark.parametrize("side", ["decode", "prefill", "both"])
def test_a_flush_in_transit(pair, texts, side):
    with held(pair) as peer, ThreadPoolExecutor(1) as executor:
        asked = executor.submit(ask, pair, PROMPTS[:4])
        messages = peer.wait(Piece, 3)
        if side != "decode":
            pair.prefill.flush_cache()
        if side != "prefill":
            Engine.flush_cache(pair)
        peer.let_go(*messages)
        assert_same(asked.result(), texts[:4], "num_retractions")


def test_the_peer_goes_in_transit(pair, texts):
    with held(pair) as peer, ThreadPoolExecutor(1) as executor:
        asked = executor.submit(ask, pair)
        messages = peer.wait(Piece, 3)
        peer.let_go(*messages[:2])
        peer.close()
        assert_same(asked.result(), texts)


# messages of a kind with values that do not fit
WRONG: dict[str, tuple[type, Callable[[Any], dict[str, Any]]]] = {
    "short": (Piece, lambda piece: {"count": piece.count - 1}),
    "moved": (Piece, lambda piece: {"start": piece.start + 1}),
    "narrow": (Piece, lambda piece: {"kv": tuple(rows[:1] for rows in piece.kv)}),
    "stale": (Prefilled, lambda _: {"weights": "0" * 16}),
    "no token": (Prefilled, lambda _: {"token": 99_999}),
}


@pytest.mark.parametrize("name", WRONG)
def test_misfits_are_prefilled_locally(pair, texts, name, caplog):
    kind, values = WRONG[name]

    def change(message: Any) -> Message:
        return replace(message, **values(message)) if isinstance(message, kind) else message

    with held(pair, change) as peer:
        peer.let_go()
        assert_same(ask(pair), texts)
    assert "is prefilled locally" in caplog.text


def test_the_transfer_fails(pair, texts, caplog, monkeypatch):
    def failing(message: Message) -> Message:
        raise RuntimeError("no memory")

    with held(pair) as peer:
        monkeypatch.setattr(pair._side[1], "placed", failing)
        peer.let_go()
        assert_same(ask(pair), texts)
    assert "no memory" in caplog.text


def test_a_pair_without_references_is_freed(files, alone):
    engine = files.engine(kind=DisaggregatedEngine, share_weights_with=alone, **SIZES)
    gone = [weakref.ref(side._scheduler) for side in (engine, engine.prefill)]
    del engine
    wait_for(lambda: gc.collect() >= 0 and all(reference() is None for reference in gone))


@pytest.mark.parametrize("name", ["disaggregation_address", "disaggregation_secret"])
def test_a_pair_of_one_process_has_no_address_and_no_secret(files, name):
    with pytest.raises(
        ValueError, match=f"{name} applies only to separate processes; leave it out"
    ):
        files.engine(kind=DisaggregatedEngine, **{name: "127.0.0.1:0"})


def test_messages_of_nobody_are_ignored(pair, texts):
    def foreign(message: Any) -> Message:
        return replace(message, id=message.id + 1000)

    with held(pair, foreign) as peer, ThreadPoolExecutor(1) as executor:
        asked = executor.submit(ask, pair, PROMPTS[:2])
        messages = peer.wait(Prefilled, 2)
        for message in messages:
            pair._side[1].take(foreign(message))
        peer.change = lambda message: message
        peer.let_go(*messages)
        assert_same(asked.result(), texts[:2])


def test_other_weights_on_one_side_only(pair, texts):
    """KV of other weights is dropped, and no job is sent until the weights are equal."""
    names, weights = pair.runner.networks.target.names, pair.runner.weights[0]
    named = dict(zip(names, map(np.asarray, weights), strict=True))
    other = {"lm_head.kernel": np.roll(named["lm_head.kernel"], 1, axis=1)}
    prefill = pair.prefill
    with held(pair) as peer, ThreadPoolExecutor(1) as executor:
        asked = executor.submit(ask, pair, PROMPTS[:3])
        messages = peer.wait(Piece, 2)
        prefill.update_weights_from_tensor(other)
        peer.let_go(*messages)
        assert_same(asked.result(), texts[:3])
        before = prefill.metrics.snapshot().prefilled_tokens
        assert_same(ask(pair), texts)
        assert prefill.metrics.snapshot().prefilled_tokens == before
        prefill.update_weights_from_tensor(named)
        assert_same(ask(pair), texts)
        assert prefill.metrics.snapshot().prefilled_tokens == before + sum(LENGTHS)


class ReadOnce:
    """An array that can be read only once."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = [values]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._values.pop()


def test_both_sides_get_the_same_weights(pair, texts):
    """Weights that one side has read are not read, and possibly refused, again for the other."""
    name = "lm_head.kernel"
    old = np.asarray(pair.runner.weights[0][pair.runner.networks.target.names.index(name)])
    before = pair._side[1].weights
    pair.update_weights_from_tensor({name: ReadOnce(np.roll(old, 1, axis=1))})
    assert before != pair._side[1].weights == pair.prefill._side[1].weights
    pair.update_weights_from_tensor({name: ReadOnce(old)})
    assert before == pair._side[1].weights == pair.prefill._side[1].weights
    assert_same(ask(pair), texts)


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_a_side_that_cannot_have_them_leaves_the_weights_of_both(
    pair, files, tmp_path, monkeypatch, side
):
    target = shutil.copytree(files.target, tmp_path / "target")
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        tensors[name] = np.roll(tensor, 1, axis=-1)
    save_file(tensors, target / "model.safetensors")
    before = [one._side[1].weights for one in (pair, pair.prefill)]
    with monkeypatch.context() as patch:
        patch.setattr(pair if side == "decode" else pair.prefill, "_is_closed", True)
        with pytest.raises(ValueError, match="the engine is closed"):
            pair.update_weights_from_tensor(tensors)
        with pytest.raises(ValueError, match="the engine is closed"):
            pair.update_weights_from_disk(target)
    assert [one._side[1].weights for one in (pair, pair.prefill)] == before
    assert pair.prefill.target.path == files.target


def test_an_unread_result_keeps_the_weights_that_it_is_of(files, alone):
    """If weights are replaced between dispatch and read-back."""
    sent: list[Message] = []
    there = {"disaggregation_mode": "prefill", "disaggregation_address": "127.0.0.1:0"}
    options = SIZES | there | {"overlap": True}
    with files.engine(share_weights_with=alone, **options) as prefill:
        (loop, jobs), scheduler = prefill._side, prefill._scheduler
        old, client = jobs.weights, DecodeClient(loop, jobs, sent.append)

        def replace_while_unread() -> None:
            client.take(job_of(random.Random(0), 1, 3))
            loop._drain()
            scheduler.step()
            assert len(scheduler._in_flight) == 1
            scheduler.flush_cache()
            jobs.weights = "0" * 16

        loop.run(replace_while_unread)
        wait_until_empty(prefill)
        [done] = [message for message in sent if isinstance(message, Prefilled)]
        assert done.weights == old


def test_sockets_between_the_sides(pair, texts):
    """Also if the prefill side disconnects in the middle and reconnects."""
    assert pair._peer is not None
    pair._peer.close()
    prefill = pair.prefill
    # each side learns it in its own thread, and must not take the old peer for the new one
    wait_for(lambda: not pair.peer_connected and not prefill.peer_connected)
    server = PrefillServer("127.0.0.1:0", "", prefill._side)
    peer = RemotePeer(server.address, "", pair._side)
    try:
        assert pair.wait_for_peer(20)
        assert prefill.wait_for_peer(20)
        before = prefill.metrics.snapshot().prefilled_tokens
        assert_same(ask(pair), texts)
        assert prefill.metrics.snapshot().prefilled_tokens == before + sum(LENGTHS)
        with ThreadPoolExecutor(1) as executor:
            asked = executor.submit(ask, pair, PROMPTS * 4)
            time.sleep(0.05)
            server.close()
            assert_same(asked.result(), texts * 4)
            wait_for(lambda: not pair.peer_connected and not prefill.peer_connected)
            assert not pair.wait_for_peer(0.1)
            waited = executor.submit(pair.wait_for_peer, 20)
            server = PrefillServer(server.address, "", prefill._side)
            assert waited.result()
        before = prefill.metrics.snapshot().prefilled_tokens
        assert_same(ask(pair, params=GREEDY), texts)
        assert prefill.metrics.snapshot().prefilled_tokens > before
    finally:
        peer.close()
        server.close()
        wait_until_empty(pair)


def test_an_engine_without_another_side_has_no_peer(alone):
    assert alone.peer_connected is None
    with pytest.raises(ValueError, match="needs disaggregation_mode"):
        alone.wait_for_peer(1)
    with pytest.raises(ValueError, match="timeout=-1"):
        alone.wait_for_peer(-1)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_side_without_an_address_is_refused(files, mode):
    with pytest.raises(ValueError, match=f"'{mode}' needs disaggregation_address; for two devices"):
        files.engine(disaggregation_mode=mode)


def test_a_prefill_side_is_healthy_where_it_computes(pair):
    wait_until_empty(pair)
    before = pair.prefill.metrics.snapshot()
    with running(make_app(pair.prefill)) as port:
        assert Client(port).get("/health_generate").status == 200
    after = pair.prefill.metrics.snapshot()
    assert after.prefilled_tokens == before.prefilled_tokens + 1
    assert after.generated_tokens == before.generated_tokens + 1
    wait_until_empty(pair)


def piece_of_nobody(number: int, *kv: Any) -> Piece:
    return Piece(id=10**9 + number, start=0, count=1, kv=kv)


class Hearer(PrefillPeer):
    """A peer that forwards the messages of the test."""

    weights = ""

    def send(self, message: Message) -> None:
        raise ConnectionError

    def hang_up(self) -> None:
        self.close()


@pytest.mark.parametrize("ends", [False, True], ids=["taken", "closed"])
def test_few_pieces_are_on_the_device_before_they_are_taken(pair, monkeypatch, ends):
    num_placed, place = 0, pair._side[1].placed

    def counted(message: Any) -> Any:
        nonlocal num_placed
        num_placed += 1
        return place(message)

    monkeypatch.setattr(pair._side[1], "placed", counted)
    busy = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(pair._loop.run, partial(busy.wait, 20))
        peer = Hearer(pair._side)
        for number in range(3 * MOST_PIECES):
            peer.put(piece_of_nobody(number, np.zeros(1)))
        wait_for(lambda: num_placed == MOST_PIECES)
        time.sleep(0.1)
        assert num_placed == MOST_PIECES
        if not ends:
            busy.set()
            wait_for(lambda: num_placed == 3 * MOST_PIECES)
        peer.close()
        peer._thread.join(20)
        busy.set()
    assert not peer._thread.is_alive()
    assert num_placed == (1 if ends else 3) * MOST_PIECES


def test_kv_in_transit_is_in_the_memory_plan(pair, alone):
    ours, theirs = pair._plan.fitted(0).needs, alone._plan.fitted(0).needs
    transit_bytes = MOST_PIECES * MOST_TOKENS * ours.token_bytes
    assert ours.temporary_bytes == theirs.temporary_bytes + transit_bytes


def test_the_first_failure_of_the_transfer_is_its_last(pair, monkeypatch):
    """And it keeps nothing of the message."""
    logged: list[str] = []
    # pytest's log keeps errors, with frames that hold the array
    monkeypatch.setattr(decode.logger, "warning", lambda text, exc_info: logged.append(text))
    peer, array = Hearer(pair._side), np.zeros(1)
    kept = weakref.ref(array)
    for number in range(6):
        peer.put(piece_of_nobody(number, array, object()))
    del array
    peer._thread.join(20)
    assert logged == ["disconnecting the prefill side after an error"]
    peer.put(piece_of_nobody(7))
    assert peer._messages.empty()
    gc.collect()
    assert kept() is None


def test_sides_that_cannot_be_joined_leave_no_thread(pair, monkeypatch):
    def run(function: Any) -> None:
        raise ValueError("the engine is closed")

    monkeypatch.setattr(pair._loop, "run", run)
    count = threading.active_count()
    with pytest.raises(ValueError, match="closed"):
        LocalPeer(pair.prefill._side, pair._side)
    wait_for(lambda: threading.active_count() == count)
