"""The largest trees on a pool that is far too small: retraction, aborts, timeouts, no lost page."""

from dataclasses import replace

import numpy as np
import pytest
from specjax.kernels.tree_attention import MAX_MASKED

from specjax.kv import budget
from specjax.sampling.params import SamplingParams
from specjax.types import DraftShape

from ..runners import copied_runner, make_request, plain_output
from .serving import Serving
from .test_limits import Clock

# nodes and the rows that drafting attends over are at their limits
TREE = DraftShape(steps=9, topk=16, nodes=64)
PAGE_SIZE = 4
NEW_TOKENS = 60
# two short prompts and a round of each fit, but not their whole texts
NUM_PAGES = 1 + 2 * TREE.rows // PAGE_SIZE + 12
RNG = np.random.default_rng(33)
PROMPTS = [RNG.integers(6, 61, size=n).tolist() for n in (9, 1, 17, 20, 5, 16, 12, 3)]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.95)
KINDS = (GREEDY, SEEDED, replace(GREEDY, ignore_eos=False), replace(SEEDED, max_new_tokens=25))


@pytest.mark.slow
@pytest.mark.parametrize(("is_cached", "run_ahead"), [(True, 1), (False, 0)])
def test_the_largest_trees_change_no_token(is_cached, run_ahead, monkeypatch):
    """Greedy and seeded requests side by side, of which one is aborted and one is late.

    Prompts are computed four tokens at a time.
    """
    assert TREE.draft_rows == MAX_MASKED
    # every request is admitted that fits for now
    for name in ("RESERVE_START", "MIN_RESERVE", "RESERVE_RAISE"):
        monkeypatch.setattr(budget, name, 0.0)
    pages = -(-(128 + TREE.tail) // PAGE_SIZE)
    runner = copied_runner(
        TREE.steps,
        shapes=(TREE,),
        page_size=PAGE_SIZE,
        pages_per_request=pages,
        prefill_buckets=(4,),
    )
    clock = Clock()
    serving = Serving(
        runner=runner, run_ahead=run_ahead, is_cached=is_cached, num_pages=NUM_PAGES, clock=clock
    )
    requests = [
        make_request(
            prompt,
            KINDS[(i + i // len(PROMPTS)) % len(KINDS)],
            seed=i,
            width=TREE.steps,
            rid=f"r{i}",
            timeout=9.0 if i == 2 else None,
            clock=clock,
        )
        for i, prompt in enumerate(PROMPTS * 2)
    ]
    serving.add_all(requests)
    late, unwanted = requests[2], requests[3]
    while not late.output_ids:
        serving.step()
    clock.now += 10.0
    while not unwanted.output_ids:
        serving.step()
    serving.scheduler.abort(unwanted)
    serving.check_pages()
    serving.finish()
    for request in requests:
        whole = plain_output(tuple(request.input_ids), request.params, request.seed)
        if request in (late, unwanted):
            assert request.finish_reason["type"] == "abort"
            assert request.output_ids == whole[: len(request.output_ids)]
            assert len(request.output_ids) < len(whole)
        else:
            assert request.output_ids == whole
    accepted = sum(request.spec.num_accepted_drafts for request in requests)
    retractions = sum(request.num_retractions for request in requests)
    print(f"{accepted} drafts accepted, {retractions} retractions")
    assert retractions > 3
    assert accepted > len(requests)
