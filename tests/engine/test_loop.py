"""Several callers of one engine, and all ways in which a call can end early."""

import asyncio
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from specjax import Engine, SamplingParams
from specjax.scheduling.loop import EngineFault
from specjax.testing import is_idle, letter_tokenizer, num_held
from specjax.text.completion import CompletionText

SECONDS = 30.0  # nothing here takes longer unless it hangs
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_new_tokens=110, ignore_eos=True)


class Hold:
    """Makes rounds from the ``at``-th on wait in the engine's thread until ``go`` is set."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, at: int = 3) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self.count = 0
        whole = engine.runner.round

        def held(*args: Any) -> Any:
            self.count += 1
            if self.count >= at:
                self.reached.set()
                assert self.go.wait(SECONDS)
            return whole(*args)

        monkeypatch.setattr(engine.runner, "round", held)

    def wait(self) -> None:
        assert self.reached.wait(SECONDS)


@contextmanager
def in_thread(function: Callable[[], Any]) -> Iterator[Any]:
    """Run a function in parallel with the block; yields its result as a future."""
    with ThreadPoolExecutor(1) as executor:
        yield executor.submit(function)


def random_jobs(count: int) -> list[tuple[list[int], SamplingParams]]:
    rng = np.random.default_rng(11)
    return [
        (
            rng.integers(0, 90, rng.integers(1, 40)).tolist(),
            SamplingParams(
                temperature=float(rng.choice([0.0, 0.8])),
                max_new_tokens=int(rng.integers(1, 30)),
                ignore_eos=bool(rng.integers(2)),
                sampling_seed=int(rng.integers(2**63)),
            ),
        )
        for _ in range(count)
    ]


@pytest.mark.slow
def test_eight_threads_get_the_results_of_one(engine) -> None:
    jobs = random_jobs(64)
    expected = [engine.generate(input_ids=i, sampling_params=p) for i, p in jobs]
    together = threading.Barrier(8)

    def run(part: int) -> list[dict[str, Any]]:
        together.wait(SECONDS)
        outputs = []
        for k, (ids, params) in enumerate(jobs[part::8]):
            if k % 3 == 2:  # sometimes leaves a stream open
                next(engine.generate(input_ids=ids, sampling_params=LONG, stream=True))
            if (part + k) % 2:
                *_, output = engine.generate(input_ids=ids, sampling_params=params, stream=True)
            else:
                output = engine.generate(input_ids=ids, sampling_params=params)
            outputs.append(output)
        return outputs

    with ThreadPoolExecutor(8) as executor:
        parts = list(executor.map(run, range(8)))
    for part in range(8):
        for ours, theirs in zip(parts[part], expected[part::8], strict=True):
            assert ours["output_ids"] == theirs["output_ids"]
            assert ours["text"] == theirs["text"]
            assert ours["meta_info"]["finish_reason"] == theirs["meta_info"]["finish_reason"]
    assert num_held(engine) == 0
    assert is_idle(engine)


def test_a_fault_ends_every_kind_of_call(files, engine, monkeypatch) -> None:
    made = files.engine(share_weights_with=engine)

    def failing(*args: Any) -> Any:
        raise OSError("the device fell off")

    monkeypatch.setattr(made.runner, "round", failing)

    async def streamed_in_asyncio() -> Any:
        return [out async for out in await made.async_generate("e", LONG, stream=True)]

    name, weight = made.runner.networks.target.names[0], made.runner.weights[0][0]
    for function in (
        lambda: made.generate(["a", "b"], LONG),
        lambda: list(made.generate("c", LONG, stream=True)),
        lambda: asyncio.run(made.async_generate("d", LONG)),
        lambda: asyncio.run(streamed_in_asyncio()),
        lambda: made.update_weights_from_tensor({name: weight}),
    ):
        with pytest.raises(EngineFault, match="the device fell off") as caught:
            function()
        assert isinstance(caught.value.__cause__, OSError)
    made.abort_request(abort_all=True)
    made.close()


def test_an_abort_names_a_request_or_all(engine) -> None:
    engine.abort("unknown")
    for arguments in ({}, {"rid": "a", "abort_all": True}, {"rid": 5}):
        with pytest.raises(ValueError, match="give either rid or abort_all"):
            engine.abort_request(**arguments)


@pytest.mark.parametrize("where", ["set_slot", "add", "streamed"])
def test_an_error_of_one_request_ends_that_one(engine, monkeypatch, caplog, where) -> None:
    """An exception at its admission, when it gets a token, and when its text is shown."""
    marked = SamplingParams(max_new_tokens=20, ignore_eos=True, sampling_seed=13, stop="never")
    expected = engine.generate(["a", "c"], GREEDY)
    patched = engine.runner if where == "set_slot" else CompletionText
    whole = getattr(patched, where)

    def failing(*args: Any, **options: Any) -> Any:
        is_marked = marked in args if where == "set_slot" else args[0]._stops == ["never"]
        if is_marked:
            raise OverflowError("too large")
        return whole(*args, **options)

    monkeypatch.setattr(patched, where, failing)
    last = {}
    for output in engine.generate(["a", "b", "c"], [GREEDY, marked, GREEDY], stream=True):
        last[output["index"]] = output
    reason = last[1]["meta_info"]["finish_reason"]
    assert (reason["type"], "OverflowError('too large')" in reason["message"]) == ("abort", True)
    assert "request" in caplog.text
    for result, index in zip(expected, (0, 2), strict=True):
        assert last[index]["output_ids"] == result["output_ids"]
        assert last[index]["text"] == result["text"]
    assert num_held(engine) == 0
    assert is_idle(engine)


def test_ctrl_c_ends_the_callers_requests_only(engine, monkeypatch) -> None:
    """A signal in the main thread, while the engine's thread is inside a step."""
    # a shell's background jobs ignore the signal
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    hold = Hold(engine, monkeypatch)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        hold.wait()
        time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGINT)

    expected = letter_tokenizer().encode("hello")
    with in_thread(lambda: engine.generate("hello", LONG)) as other, in_thread(interrupt):
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["x", "y"], LONG)
        signal.signal(signal.SIGINT, before)
        hold.go.set()
        result = other.result(SECONDS)
    assert result["meta_info"]["finish_reason"] == {"type": "length", "length": 110}
    assert result["meta_info"]["prompt_tokens"] == len(expected)
    assert num_held(engine) == 0
    assert is_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("is_inside", [False, True], ids=["between", "inside"])
@pytest.mark.parametrize("way", ["closed", "deleted", "collected"])
def test_abandoned_streams(engine, monkeypatch, way, is_inside) -> None:
    """Also during a step, and by a garbage collection in the loop's thread."""
    expected = engine.generate("hello", GREEDY)["output_ids"]
    stream: Any = engine.generate(["hello", "x"], LONG, stream=True)
    next(stream)
    hold = Hold(engine, monkeypatch, at=1) if is_inside else None
    if hold is not None:
        hold.wait()
    if way == "closed":
        stream.close()
    elif way == "deleted":
        del stream
    else:
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del stream, cycle
        gc.collect()
    if hold is not None:
        hold.go.set()
    assert num_held(engine) == 0
    assert is_idle(engine)
    assert engine.generate("hello", GREEDY)["output_ids"] == expected


def test_a_stream_collected_inside_a_step(engine, monkeypatch) -> None:
    gc.disable()  # only the step collects
    try:
        cycle: list[Any] = [engine.generate(["hello", "x"], LONG, stream=True)]
        cycle.append(cycle)
        next(cycle[0])
        del cycle
        whole = engine.runner.round
        threads = []

        def collecting(*args: Any) -> Any:
            if not threads and gc.collect():
                threads.append(threading.current_thread().name)
            return whole(*args)

        monkeypatch.setattr(engine.runner, "round", collecting)
        result = engine.generate("hello", GREEDY)
    finally:
        gc.enable()
    assert threads == ["specjax-engine"]
    assert result["meta_info"]["completion_tokens"] == 20
    assert num_held(engine) == 0
    assert is_idle(engine)


@pytest.mark.slow
def test_an_engine_without_references_goes(files, engine) -> None:
    made = files.small(share_weights_with=engine)
    made.generate("hello", GREEDY)
    gone, thread = weakref.ref(made), made._loop._thread
    parts = weakref.ref(made.runner), weakref.ref(made._loop)
    del made
    gc.collect()
    assert gone() is None
    thread.join(SECONDS)
    assert not thread.is_alive()
    gc.collect()
    assert [part() for part in parts] == [None, None]


@pytest.mark.slow
def test_a_stream_keeps_its_engine(files, engine) -> None:
    made = files.small(share_weights_with=engine)
    gone = weakref.ref(made)
    stream = made.generate("hello", GREEDY, stream=True)
    next(stream)
    del made
    gc.collect()
    assert list(stream)[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 20}
    del stream
    gc.collect()
    assert gone() is None
