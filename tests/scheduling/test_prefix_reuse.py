"""Requests with an equal start compute it once, and give the same text as alone."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from specjax.sampling.params import SamplingParams

from ..support.runners import make_request, plain_output, plain_outputs
from ..support.schedulers import STEPS, Letters, Serving

RNG = np.random.default_rng(8)
START = RNG.integers(6, 61, size=40).tolist()
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.8, top_p=0.95)
CHARGED = replace(SEEDED, repetition_penalty=1.4, presence_penalty=0.5)


def one(serving: Serving, prompt, params=GREEDY, seed=0):
    request = make_request(
        list(prompt), params, seed=seed, width=serving.runner.config.largest.steps
    )
    serving.add_all([request])
    serving.finish()
    return request


@pytest.mark.parametrize("num_steps", [0, STEPS])
@pytest.mark.parametrize(
    ("length", "params"),
    [
        (1, GREEDY),
        (4, SEEDED),
        (5, CHARGED),
        (8, GREEDY),
        (9, SEEDED),
        (38, CHARGED),
        (39, GREEDY),
        (40, SEEDED),
    ],
    ids=lambda value: value if isinstance(value, int) else "",
)
def test_an_equal_prompt_is_found_in_whole_pages(num_steps, length, params) -> None:
    serving = Serving(num_steps=num_steps, is_cached=True, run_ahead=1)
    prompt = START[:length]
    first, second = (one(serving, prompt, params, seed) for seed in (3, 4))
    assert first.cached_tokens == 0
    assert second.cached_tokens == (length - 1) // 4 * 4
    assert second.result()["meta_info"]["cached_tokens"] == second.cached_tokens
    assert first.output_ids == plain_output(tuple(prompt), params, 3)
    assert second.output_ids == plain_output(tuple(prompt), params, 4)


@pytest.mark.parametrize(
    ("num_steps", "run_ahead", "params"),
    [(0, 0, SEEDED), (0, 1, CHARGED), (STEPS, 0, GREEDY), (STEPS, 1, SEEDED), (STEPS, 1, CHARGED)],
    ids=["plain-seeded", "plain-charged", "chain-greedy", "chain-seeded", "chain-charged"],
)
def test_a_conversation_continues_after_its_cached_text(num_steps, run_ahead, params) -> None:
    serving = Serving(num_steps=num_steps, is_cached=True, run_ahead=run_ahead)
    text, known = START[:7], 1
    for turn in range(4):
        request = one(serving, text, params, turn)
        assert request.output_ids == plain_output(tuple(text), params, turn)
        # the last token of the previous turn has no KV
        assert request.cached_tokens == (known - 1) // 4 * 4
        known = len(text) + len(request.output_ids)
        text = text + request.output_ids + START[turn : turn + 5]


def test_a_stopped_request_caches_only_its_kept_text() -> None:
    """The device ran on after the stop; a later request finds only the kept text."""
    whole = plain_output(tuple(START), GREEDY, 0)
    serving = Serving(is_cached=True, run_ahead=1)
    stop = Letters().push(whole[5:6])
    request = make_request(START, replace(GREEDY, stop=stop), width=STEPS, decoder=Letters())
    serving.add_all([request])
    serving.finish()
    kept = whole[: whole.index(whole[5]) + 1]
    assert request.output_ids == kept
    text = START + whole
    again = one(serving, text)
    assert again.cached_tokens == (len(START) + len(kept) - 1) // 4 * 4
    assert again.output_ids == plain_output(tuple(text), GREEDY, 0)


@pytest.mark.parametrize(
    ("run_ahead", "params"),
    [(0, CHARGED), (1, GREEDY), (1, SEEDED)],
    ids=["charged", "greedy", "seeded"],
)
def test_requests_at_once_share_their_start(run_ahead, params) -> None:
    """They share all but its last page, whose draft KV reads the next token, which differs."""
    serving = Serving(is_cached=True, run_ahead=run_ahead)
    prompts = [[*START, 50 + n, *START[:n]] for n in (3, 1, 8, 5)]
    requests = serving.add(prompts, params)
    shared = 0
    while serving.scheduler.has_work:
        serving.step()
        shared = max(shared, sum(row.num_shared >= 9 for row in serving.rows))
    serving.check_clean()
    assert shared == 4
    assert [r.cached_tokens for r in requests] == [0, 36, 36, 36]
    assert [r.output_ids for r in requests] == plain_outputs(prompts, params, range(4))


@pytest.mark.parametrize(("num_pages", "run_ahead"), [(1 + 30, 1), (0, 0), (0, 1)])
def test_a_cached_page_is_never_written(num_pages, run_ahead, monkeypatch) -> None:
    """Its content stays bit-identical from when the page was cached."""
    serving = Serving(is_cached=True, run_ahead=run_ahead, num_pages=num_pages)
    assert serving.cache is not None
    free = serving.allocator.free

    def forget(pages) -> None:
        for page in pages:
            seen.pop(page, None)
        free(pages)

    monkeypatch.setattr(serving.allocator, "free", forget)
    prompts = [START[:n] + RNG.integers(6, 61, size=4).tolist() for n in (30, 9, 24, 1, 30, 17)]
    requests = [
        make_request(p, [GREEDY, SEEDED][i % 2], seed=i, width=STEPS)
        for i, p in enumerate(prompts * 2)
    ]
    serving.add_all(requests)
    seen: dict[int, bytes] = {}
    steps = 0
    while serving.scheduler.has_work:
        if steps in (5, 14):
            serving.scheduler.abort(serving.running[0])
        serving.step()
        steps += 1
        pools = [np.asarray(pool) for pool in jax.tree.leaves(serving.runner.on_device.pools)]
        held = serving.cache._held
        assert seen.keys() <= held
        for page in held:
            content = b"".join(pool[:, 4 * page : 4 * page + 4].tobytes() for pool in pools)
            # pages that a running request shares become final with the dispatches of its step
            assert seen.setdefault(page, content) == content
    serving.check_clean()
    assert seen
    for i, request in enumerate(requests):
        expected = plain_output(tuple(request.input_ids), request.params, i)
        assert request.output_ids == expected[: len(request.output_ids)]


def test_an_aborted_prefill_leaves_its_chunks() -> None:
    serving = Serving(is_cached=True, run_ahead=1)
    (request,) = serving.add([START], GREEDY)
    serving.step()  # 16 tokens per chunk
    serving.scheduler.abort(request)
    assert request.output_ids == []
    again = one(serving, START)
    assert again.cached_tokens == 16
    assert again.output_ids == plain_output(tuple(START), GREEDY, 0)


def test_a_resumed_request_finds_its_own_pages() -> None:
    """Preemption costs little if the cache still holds the pages."""
    params = replace(GREEDY, max_new_tokens=60)
    prompts = [START[:20], START[1:21]]

    def prefilled(is_cached: bool) -> int:
        # the two need 40 pages
        serving = Serving(num_pages=1 + 32, is_cached=is_cached)
        requests = serving.add(prompts, params)
        serving.finish()
        assert requests[1].num_retractions
        assert requests[1].cached_tokens == 0
        assert [r.output_ids for r in requests] == plain_outputs(prompts, params, range(2))
        return serving.watched.calls.count("prefill")

    assert prefilled(True) < prefilled(False)
