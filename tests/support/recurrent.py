"""A model with recurrent layers, and runners that serve it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import registry
from specjax.models.decoder import CausalLM
from specjax.models.family import alike
from specjax.models.flat import FlatModel
from specjax.models.gated_delta import DeltaConfig, GatedDelta
from specjax.sampling.params import SamplingParams
from specjax.speculative.algorithm import SpeculativeAlgorithm
from specjax.speculative.ngram import CorpusConfig, sort_corpus
from specjax.testing.dense import Job, dense_decode
from specjax.testing.models import SIZES, random_weights
from specjax.types import DraftShape

from .runners import new_runner, runner_config

NGRAM = replace(SpeculativeAlgorithm.from_string("NGRAM"), has_corpus=True)
PLAIN = SpeculativeAlgorithm.from_string(None)
CONFIG = DeltaConfig(
    model_type="recurrent-test",
    num_layers=4,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    **SIZES,
)
COUNT, WIDTH = 24, 256
RNG = np.random.default_rng(6)
PROMPTS = [RNG.integers(6, 61, size=n).tolist() for n in (3, 37, 16, 1, 21, 50)]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=COUNT, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.8, top_p=0.95)
CHAIN, TREE = DraftShape.chain(4), DraftShape(5, 10, 8, stores_drafts=False)
PACKED = CHAIN._replace(packed=3)  # rows of a request on average
# texts with a common beginning of 100 tokens
COMMON = RNG.integers(6, 61, size=100).tolist()
TEXTS = [[*COMMON, *RNG.integers(6, 61, size=n).tolist()] for n in (120, 40, 90, 60)]
POOL: Any = {"pages_per_request": WIDTH // 4, "num_snapshots": 8}


def _layers(config: Any, **differences: Any) -> Any:
    """Attention in the third of four layers."""
    kinds = alike(config, **differences)
    return tuple(
        kind if i == 2 else replace(kind, mixer=GatedDelta) for i, kind in enumerate(kinds)
    )


@pytest.fixture(autouse=True, scope="module")
def family() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        made = replace(registry.FAMILIES["llama"], layers=_layers)
        patch.setitem(registry.FAMILIES, CONFIG.model_type, made)
        yield


@cache
def target() -> tuple[FlatModel[CausalLM], Any]:
    """Weights with memory of a few rows in some heads, and of hundreds in others."""
    flat = FlatModel.of(partial(CausalLM, CONFIG, "xla"))
    named = dict(zip(flat.names, random_weights(flat, 0), strict=True))
    for name in named:
        if name.endswith("attention.biases"):
            named[name] = jnp.array([-6.0, -1.0])
    named["lm_head.kernel"] *= 4
    return flat, flat.order(named)


@cache
def dense_text(prompt: tuple[int, ...]) -> list[int]:
    """A greedy text, with one pass over all tokens for each token."""
    return dense_decode(target()[1], Job(prompt=prompt, params=GREEDY), CONFIG).tokens


@cache
def runner_of(shape: DraftShape | None, rounds: int = 1, **sizes: Any) -> Any:
    """A runner that drafts from a corpus of all greedy texts, or not at all."""
    shapes, algorithm = (shape or DraftShape.chain(0),), NGRAM if shape else PLAIN
    if shape and shape.topk == 1:
        algorithm = replace(NGRAM, breadth=1)
    is_packed = bool(shape and shape.packed)
    options = {"algorithm": algorithm, "shapes": shapes, "reads_confidence": is_packed}
    config = runner_config(rounds_per_dispatch=rounds, **options, **sizes)
    head: Any = None
    if shape:
        texts = [prompt + dense_text(tuple(prompt)) for prompt in PROMPTS]
        tokens, order = sort_corpus(texts, NGRAM.window[1])
        head = CorpusConfig(len(tokens), len(order), NGRAM.window[1])
    networks = algorithm.networks(CONFIG, head, implementation="xla")
    draft = networks.draft.order({"tokens": tokens, "order": order}) if shape else ()
    return new_runner(networks, config, target()[1], draft)


def accepted(requests: Any) -> int:
    histograms = (r.result()["meta_info"]["spec_correct_drafts_histogram"] for r in requests)
    return sum(i * n for histogram in histograms for i, n in enumerate(histogram))
