"""The engine in asyncio, and several samples of an input."""

import asyncio
import gc
import inspect
import os
import signal
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any

import pytest

from specjax import Engine, SamplingParams
from specjax.engine.requests import SEED_STRIDE, sample_seed
from specjax.scheduling.scheduler import QueueFullError
from specjax.testing import is_idle, num_held
from specjax.text import chat_template

from ..support.waiting import wait_for

SECONDS = 30.0  # nothing here takes longer unless it hangs
TEXTS = ["hello", "The sky is blue", "a"]
GREEDY = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True}
SEEDED = {"temperature": 0.9, "max_new_tokens": 20, "ignore_eos": True, "sampling_seed": 5}
LONG = GREEDY | {"max_new_tokens": 110}


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, SECONDS))


def text_of(result: dict[str, Any]) -> tuple[Any, ...]:
    return result["text"], result["output_ids"], result["meta_info"]["finish_reason"]


# asyncio


def test_coroutines_give_the_same_results_as_threads(engine) -> None:
    expected = [engine.generate(text, GREEDY) for text in TEXTS]

    async def main() -> None:
        single, batch, streamed = await asyncio.gather(
            engine.async_generate(TEXTS[0], GREEDY),
            engine.async_generate(TEXTS, GREEDY),
            collect(),
        )
        assert text_of(single) == text_of(expected[0])
        assert list(map(text_of, batch)) == list(map(text_of, expected))
        assert text_of(streamed[-1]) == text_of(expected[1])
        for before, after in pairwise(streamed):
            assert after["text"].startswith(before["text"])
            assert len(after["output_ids"]) > len(before["output_ids"])
        assert "index" not in streamed[0]

    async def collect() -> list[dict[str, Any]]:
        stream = await engine.async_generate(TEXTS[1], GREEDY, stream=True)
        return [output async for output in stream]

    run(main())
    assert is_idle(engine)


def test_the_event_loop_goes_on_meanwhile(engine) -> None:
    async def main() -> int:
        task = asyncio.create_task(engine.async_generate(TEXTS, LONG))
        turns = 0
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert run(main()) > 10


def test_inputs_are_checked_at_once(engine) -> None:
    async def main() -> None:
        for stream in (False, True):
            with pytest.raises(ValueError, match="no tokens"):
                await engine.async_generate("", GREEDY, stream=stream)

    run(main())


def test_a_cancelled_coroutine_aborts_its_requests(engine) -> None:
    async def main() -> None:
        other = asyncio.create_task(engine.async_generate("hello", GREEDY))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.async_generate(["x"] * 50, LONG), 0.05)
        assert (await other)["meta_info"]["completion_tokens"] == 20
        assert is_idle(engine)
        assert num_held(engine) == 0

    run(main())


@pytest.mark.parametrize("way", ["closed", "left", "deleted", "cancelled", "unread"])
def test_an_abandoned_stream_aborts_its_requests(engine, way) -> None:
    async def read_forever() -> None:
        async for _ in await engine.async_generate(["x"] * 20, LONG, stream=True):
            pass

    async def main() -> None:
        if way == "cancelled":
            task = asyncio.create_task(read_forever())
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return
        stream = await engine.async_generate(["x"] * 20, LONG, stream=True)
        if way == "unread":
            return
        if way == "left":
            async for _ in stream:
                break
            return  # asyncio closes the open stream
        await anext(stream)
        if way == "closed":
            await stream.aclose()
        else:
            del stream
            gc.collect()
            await asyncio.sleep(0.01)

    run(main())
    assert is_idle(engine)
    assert num_held(engine) == 0


def test_an_event_loop_that_closes_early_aborts_its_requests(engine) -> None:
    """Without asyncio.run nothing closes the stream; the engine notices when it delivers."""
    event_loop = asyncio.new_event_loop()
    stream = event_loop.run_until_complete(engine.async_generate(["x"] * 20, LONG, stream=True))
    event_loop.run_until_complete(anext(stream))
    event_loop.run_until_complete(asyncio.sleep(0))
    event_loop.close()
    result = engine.generate("hello", GREEDY)
    assert result["meta_info"]["completion_tokens"] == 20
    wait_for(lambda: is_idle(engine))  # those aborted may end after this request
    event_loop = asyncio.new_event_loop()
    event_loop.run_until_complete(stream.aclose())
    event_loop.close()


# several samples of an input


def test_each_sample_follows_its_seed(engine) -> None:
    one, two = engine.generate(TEXTS[:2], SEEDED | {"n": 1})
    samples = engine.generate(TEXTS[:2], SEEDED | {"n": 3})
    assert len(samples) == 6
    assert [text_of(samples[i]) for i in (0, 3)] == [text_of(one), text_of(two)]
    for i in range(6):
        seed = (5 + i % 3 * 0x9E3779B97F4A7C15) % 2**64
        alone = engine.generate(TEXTS[i // 3], SEEDED | {"sampling_seed": seed})
        assert text_of(samples[i]) == text_of(alone)
    assert len({tuple(sample["output_ids"]) for sample in samples}) == 6


def test_samples_of_one_input_are_a_list(engine) -> None:
    samples = engine.generate("hello", SEEDED | {"n": 2}, rid="x")
    assert [sample["meta_info"]["id"] for sample in samples] == ["x_0", "x_1"]
    last = {}
    for output in engine.generate("hello", SEEDED | {"n": 2}, stream=True):
        last[output["index"]] = output
    assert [text_of(last[i]) for i in range(2)] == [text_of(sample) for sample in samples]
    free = engine.generate("hello", {"n": 2, "ignore_eos": True, "max_new_tokens": 20})
    assert free[0]["output_ids"] != free[1]["output_ids"]
    assert isinstance(engine.generate(["hello"], SEEDED | {"n": 1}), list)


def test_aborting_an_input_ends_all_its_samples(engine) -> None:
    stream = engine.generate(["x", "y"], LONG | {"n": 2}, rid=["one", "two"], stream=True)
    last = {}
    for output in stream:
        if not last:
            engine.abort("one")
            engine.abort("two_1")
        last[output["index"]] = output["meta_info"]
    assert [last[i]["id"] for i in range(4)] == ["one_0", "one_1", "two_0", "two_1"]
    reasons = [last[i]["finish_reason"]["type"] for i in range(4)]
    assert reasons == ["abort", "abort", "length", "abort"]


def test_seeds_of_samples_lie_apart() -> None:
    assert sample_seed(7, 0) == 7
    assert sample_seed(2**64 - 1, 1) == SEED_STRIDE - 1
    seeds = {sample_seed(seed, i) for seed in range(100) for i in range(100)}
    assert len(seeds) == 10_000


def test_a_stopped_template_process_does_not_stop_the_event_loop(engine, monkeypatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 1.0)
    os.kill(chat_template.start_renderer().pid, signal.SIGSTOP)
    messages = [{"role": "user", "content": "hello"}]

    async def main() -> float:
        asked = asyncio.ensure_future(engine.async_generate(messages=messages))
        longest, loop = 0.0, asyncio.get_running_loop()
        while not asked.done():
            before = loop.time()
            await asyncio.sleep(0.01)
            longest = max(longest, loop.time() - before)
        with pytest.raises(ValueError, match="rendering takes more than"):
            asked.result()
        return longest

    assert run(main()) < 0.5


def test_both_ways_have_one_signature() -> None:
    assert inspect.signature(Engine.async_generate) == inspect.signature(Engine.generate)
    assert "Coroutine" in (Engine.async_generate.__doc__ or "")


def test_the_queue_is_asked_before_samples_are_made(engine, monkeypatch) -> None:
    def full(num_new: int) -> None:
        raise QueueFullError(f"{num_new} more came")

    monkeypatch.setattr(engine._scheduler, "check_queue", full)
    monkeypatch.setattr(engine._factory, "_request", None)
    with pytest.raises(QueueFullError, match="6 more came"):
        engine.generate(["a", "b"], {"n": 3})


def test_callers_may_change_their_inputs_afterwards(engine) -> None:
    """A request reads nothing again that its caller may have changed since."""
    ids, bias, stop = [1, 2, 3], {4: 50.0}, [7]
    params = GREEDY | {"logit_bias": bias, "stop_token_ids": stop}
    expected = engine.generate(input_ids=list(ids), sampling_params=params)
    stream = engine.generate(input_ids=ids, sampling_params=SamplingParams(**params), stream=True)
    ids[:] = [99, 98]
    bias.clear()
    bias["x"] = None
    stop.append(4)
    assert text_of(list(stream)[-1]) == text_of(expected)
