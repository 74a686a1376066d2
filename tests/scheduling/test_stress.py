"""Thousands of random requests on a pool that is far too small, beside aborts and flushes.

Every request ends, with what plain decoding of it alone gives; every page is accounted for after
each step; nothing compiles, and no dispatch or read moves data that nobody asked to move.
"""

import random
from collections import Counter
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from specjax.kernels.tree_attention import MAX_MASKED

from specjax.models.flat import next_logits
from specjax.sampling.params import SamplingParams
from specjax.scheduling.request import Request
from specjax.types import DraftShape

from ..runners import copied_runner, copied_weights, make_request, run_requests, target_model
from ..settings import counted_compilations
from .serving import Letters, Serving

NUM_PROMPTS = 60
NUM_PAGES = 1 + 19  # the largest request takes 16 and four may run
# nodes and the rows that drafting attends over are at their limits
LARGEST = DraftShape(steps=9, topk=16, nodes=64)
assert LARGEST.draft_rows == MAX_MASKED
TIE = 1e-5
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)
KINDS = (
    GREEDY,
    replace(GREEDY, ignore_eos=True),
    replace(GREEDY, temperature=0.9, top_p=0.9),
    replace(GREEDY, temperature=1.2, top_k=12, min_p=0.02, ignore_eos=True),
    replace(GREEDY, temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.3),
    replace(GREEDY, min_new_tokens=10, logit_bias={"7": 1.5}),
)


@dataclass(frozen=True)
class Wish:
    """A request as it can be made any number of times, and what it must give."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    output_ids: list[int]
    text: str

    def request(self, rid: str, width: int) -> Request:
        return make_request(
            self.prompt, self.params, seed=self.seed, width=width, rid=rid, decoder=Letters()
        )


def make_wishes(rng: random.Random) -> list[Wish]:
    """Prompts that often start alike, each with several parameters, with and without a stop."""
    starts = [[rng.randrange(6, 61) for _ in range(40)] for _ in range(5)]
    wishes = []
    for _ in range(NUM_PROMPTS):
        own = [rng.randrange(6, 61) for _ in range(rng.randint(1, 12))]
        prompt = rng.choice(starts)[: rng.choice((0, 5, 17, 28))] + own
        for kind in rng.sample(KINDS, 3):
            limit = rng.choice((1, 2, 9, 24))
            least = min(kind.min_new_tokens, limit)
            params = replace(kind, max_new_tokens=limit, min_new_tokens=least)
            plain = make_request(prompt, params, seed=rng.randrange(1000))
            run_requests(copied_runner(0), [plain])
            ids = plain.output_ids
            has_end = ids[-1] in plain.end_token_ids
            text = Letters().push(ids[:-1] if has_end else ids)
            wishes.append(Wish(prompt, params, plain.seed, ids, text))
            if len(text) < 2:
                continue
            # two letters, of which an accepted run may bring both; the tail behind them is cut
            at = rng.randrange(len(text) - 1)
            stop = text[at : at + 2]
            at = text.index(stop)
            wishes.append(
                Wish(prompt, replace(params, stop=stop), plain.seed, ids[: at + 2], text[:at])
            )
    return wishes


def is_tie(wish: Wish, ours: list[int], theirs: list[int]) -> bool:
    """Whether the two best logits where the outputs part are as good as equal."""
    same = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    flat, _ = target_model()
    logits = next_logits(flat, copied_weights()[0], [*wish.prompt, *theirs[:same]])
    second, first = np.sort(logits)[-2:]
    return bool(first - second < TIE * abs(first))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_requests", "shape", "rounds", "run_ahead", "is_cached"),
    [
        (2100, DraftShape.chain(4), 1, 1, True),
        (600, DraftShape.chain(2), 3, 2, True),
        (600, DraftShape.chain(0), 1, 1, False),
        (300, LARGEST, 1, 1, True),
    ],
    ids=str,
)
def test_every_request_ends_as_if_alone(num_requests, shape, rounds, run_ahead, is_cached) -> None:
    rng = random.Random(17)
    wishes = make_wishes(rng)
    num_steps, tail = shape.steps, -(-shape.tail // 4)
    # four tokens of a prompt at a time
    sizes = {"prefill_buckets": (4,), "pages_per_request": 32 + tail}
    runner = copied_runner(num_steps, rounds, shapes=(shape,), **sizes)
    # of a tree, two rounds and some text
    num_pages = NUM_PAGES + 2 * tail
    serving = Serving(runner=runner, run_ahead=run_ahead, is_cached=is_cached, num_pages=num_pages)
    scheduler = serving.scheduler
    served: list[tuple[Wish, Request]] = []
    aborted: set[str] = set()
    with counted_compilations() as compiled, jax.transfer_guard("disallow"):
        while len(served) < num_requests or scheduler.has_work:
            # bursts and lulls
            chance = 0.8 if len(served) % 400 < 300 else 0.05
            while len(served) < num_requests and rng.random() < chance:
                wish = rng.choice(wishes)
                request = wish.request(f"r{len(served)}", num_steps)
                served.append((wish, request))
                serving.add_all([request])
            if rng.random() < 0.03 and scheduler.has_work:
                live = [request for _, request in served[-40:] if not request.is_finished]
                if live:
                    request = rng.choice(live)
                    aborted.add(request.rid)
                    scheduler.abort(request)
            if rng.random() < 0.002:
                scheduler.flush_cache()
            serving.step()
    serving.check_clean()
    assert len(served) == num_requests
    ties = 0
    for wish, request in served:
        assert request.is_finished
        ids = wish.output_ids
        if request.finish_reason == {"type": "abort"}:
            assert request.rid in aborted
            assert request.output_ids == ids[: len(request.output_ids)]
            continue
        if request.output_ids != ids and is_tie(wish, request.output_ids, ids):
            ties += 1
            continue
        assert (request.rid, request.output_ids) == (request.rid, ids)
        assert request.text == wish.text
        if wish.params.stop is not None:
            assert request.finish_reason is not None
            assert request.finish_reason["type"] == "stop"
    reasons = Counter(request.finish_reason["type"] for _, request in served)
    retractions = sum(request.num_retractions for _, request in served)
    print(f"{reasons}, {retractions} retractions, {ties} ties, {len(compiled)} compilations")
    assert not compiled
    assert min(reasons.values()) > 10
    assert retractions >= num_requests // 150
    assert (sum(request.cached_tokens for _, request in served) > 0) == is_cached
    assert ties < 5
