"""Every algorithm in every way to serve it: what plain decoding writes.

Each engine has a pool that is too small for the requests that run at once; their callers abort,
flush and update weights as in the tests of random engines.
"""

import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from .draws import Drafts, Options, Wish
from .trial import Reference, Trial

PLUGIN = Path(__file__).parents[2] / "examples" / "specjax-markov"
BATCHES = 2
SERVED = list(product((False, True), (1, 16), ("greedy", "seeded")))


def algorithms(drafts: Drafts) -> dict[str, Options]:
    """Options by algorithm, and by shape where it has chains and trees."""
    chain: Options = {"speculative_num_steps": 3}
    tree = chain | {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 9}
    heads = {"EAGLE3": drafts.eagle3, "EAGLE": drafts.eagle, "STANDALONE": drafts.model}
    shapes = {"chain": chain, "tree": tree}
    found = {
        f"{name} {kind}": {"speculative_algorithm": name, "draft": draft} | shape
        for name, draft in heads.items()
        for kind, shape in shapes.items()
    }
    for kind, breadth in (("chain", 1), ("tree", 4)):
        found[f"NGRAM {kind}"] = {
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": 9,
            "speculative_ngram_max_bfs_breadth": breadth,
        }
    modules = {"speculative_algorithm": "MULTI_LAYER_EAGLE", "draft": drafts.modules}
    found["MULTI_LAYER_EAGLE chain"] = modules | chain
    found["MARKOV chain"] = {"speculative_algorithm": "markov"} | chain
    return found


class AtTemperature(Trial):
    """Requests that are all greedy, or all drawn."""

    how = "greedy"

    def draw_batch(self, event: str, room: int) -> list[Wish]:
        return [self.at_temperature(wish) for wish in super().draw_batch(event, room)]

    def at_temperature(self, wish: Wish) -> Wish:
        temperature = (wish.params.temperature or 0.8) if self.how == "seeded" else 0.0
        return replace(wish, params=replace(wish.params, temperature=temperature))


@pytest.mark.slow
@pytest.mark.long
def test_every_algorithm_in_every_way_to_serve_it(files, drafts, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))
    import specjax_markov

    assert Path(sys.modules[specjax_markov.__name__].__file__ or "").is_relative_to(PLUGIN)
    plain = Reference.of(files)
    try:
        for index, (name, options) in enumerate(algorithms(drafts).items()):
            counts: Counter[str] = Counter()
            for number, (overlap, page_size, how) in enumerate(SERVED):
                served = {"overlap": overlap, "page_size": page_size, "batch_buckets": (4,)}
                served |= {"max_running_requests": 4, "max_total_tokens": 272}
                rng = np.random.default_rng((index, number))
                trial = AtTemperature(files, plain, rng, options | served)
                trial.how = how
                try:
                    counts += trial.run(BATCHES)
                except BaseException as error:
                    error.add_note(f"{name}, overlap {overlap}, pages of {page_size}, {how}")
                    raise
            print(name, len(SERVED), "engines", dict(counts), flush=True)
            for kind in ("retractions", "aborts", "cached tokens", "accepted drafts"):
                assert counts[kind] > 0, kind
    finally:
        plain.close()
