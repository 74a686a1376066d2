"""Windows and first tokens of drafts: texts stay those of dense decoding with any algorithm."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specjax.config import DraftWindow
from specjax.engine.args import EngineArgs
from specjax.engine.plan import plan_engine
from specjax.models.family import draft_kinds
from specjax.models.registry import layer_kinds
from specjax.sampling.params import SamplingParams
from specjax.speculative.eagle import masked_shapes
from specjax.speculative.multi_layer_eagle import MULTI_LAYER_EAGLE
from specjax.testing import EAGLE3, TARGET, Files, check_tokens, random_weights
from specjax.testing.files import write_head
from specjax.types import DraftShape

from ..support.model_files import BLOCK
from ..support.runners import (
    EAGLE,
    chains,
    copied_runner,
    copied_weights,
    make_runner,
    new_runner,
    runner_config,
    target_model,
)
from .blocks import ALGORITHMS, CONFIGS
from .identity import JOBS, check, expected
from .mtp import MODULES, module_weights

WINDOW = DraftWindow(4, 2)
PEAGLE = replace(EAGLE3, mask_token_id=7, num_layers=2)
OPTIONS = {"speculative_draft_window_size": 6, "speculative_draft_sink_size": 2}


def test_the_smaller_window_holds() -> None:
    """A layer that keeps the window of its file was trained without first tokens."""
    windows = (0, 3, 9)
    config = replace(BLOCK, num_layers=3, windows=windows, causal=(), draft_window=WINDOW)
    kinds = draft_kinds(config)
    assert [(kind.window, kind.sink_tokens) for kind in kinds] == [(4, 2), (3, 0), (4, 2)]
    plain = draft_kinds(replace(config, draft_window=None))
    assert [(kind.window, kind.sink_tokens) for kind in plain] == [(None, 0), (3, 0), (9, 0)]
    modules = layer_kinds(replace(TARGET, draft_window=WINDOW))
    assert {(kind.window, kind.sink_tokens) for kind in modules} == {(4, 2)}
    assert modules[0].attention_options == {"window": 4, "sink_tokens": 2}


def test_a_window_that_holds_every_text_is_dropped() -> None:
    for config in (EAGLE3, TARGET):
        limited = replace(config, draft_window=WINDOW)
        assert limited.within(7).draft_window == WINDOW
        assert limited.within(6).draft_window is None
        # first tokens that no 32-bit position could name
        assert replace(config, draft_window=DraftWindow(4, 2**31)).within(7).draft_window is None


def test_plans_have_the_window(files: Files) -> None:
    plan = plan_engine(EngineArgs(**files.arguments(**OPTIONS)))
    assert plan.networks.draft_config.draft_window == DraftWindow(6, 2)
    assert plan.networks.target_config.draft_window is None
    assert "drafts from the last 6 tokens and the first 2" in " ".join(plan.describe())
    plain = plan_engine(EngineArgs(**files.arguments()))
    assert plan.cache_facts != plain.cache_facts


def runner_of(name: str):
    """A runner whose draft has the window, and whether the target is the copying one."""
    if name in ALGORITHMS:
        algorithm, config = ALGORITHMS[name], replace(CONFIGS[name], draft_window=WINDOW)
        networks = algorithm.networks(TARGET, config)
        sizes = runner_config(algorithm=algorithm, shapes=(DraftShape(4, 1, 5, config.block),))
        return new_runner(
            networks, sizes, target_model()[1], random_weights(networks.draft, 6)
        ), False
    if name == "modules":
        algorithm = replace(MULTI_LAYER_EAGLE, num_modules=MODULES.num_layers)
        sizes = runner_config(algorithm=algorithm, shapes=chains(3))
        networks = algorithm.networks(TARGET, replace(MODULES, draft_window=WINDOW))
        return new_runner(networks, sizes, copied_weights()[0], module_weights()), True
    if name == "eagle-1":
        return make_runner(replace(EAGLE, draft_window=WINDOW), 3), False
    shapes = {"tree": (DraftShape(3, 3, 8),), "p-eagle": masked_shapes(chains(3), PEAGLE)}
    head = replace(PEAGLE if name == "p-eagle" else EAGLE3, draft_window=WINDOW)
    return copied_runner(3, draft=head, shapes=shapes.get(name, chains(3))), True


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["chain", "tree", "eagle-1", "p-eagle", "modules", "DFLASH", "DSPARK"]
)
def test_tokens_equal_dense_decoding(name) -> None:
    runner, is_copied = runner_of(name)
    check(runner, JOBS, expected(is_copied))


@pytest.mark.slow
@pytest.mark.parametrize("topk", [1, 2])
def test_an_engine_with_a_window(files: Files, topk: int) -> None:
    """Prompts are longer than the window; drafts of the copying head need only the last token."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, 90, (3, 30)).tolist()
    shape = {"speculative_eagle_topk": topk, "dtype": "float32"}
    with files.engine(**OPTIONS, **shape) as engine:
        assert check_tokens(engine, prompts) > 20


@pytest.mark.slow
def test_draft_kv_of_rounds_equals_that_of_prefill(files: Files, tmp_path: Path) -> None:
    """In a head of two layers, keys depend on what earlier rows saw."""
    draft = write_head(tmp_path / "head", mask_token_id=11, num_layers=2)
    prompt = np.random.default_rng(1).integers(0, 90, 21).tolist()
    params = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
    with files.engine(draft=draft, dtype="float32", max_total_tokens=200, **OPTIONS) as engine:
        text = prompt + engine.generate(input_ids=prompt, sampling_params=params)["output_ids"]
        metas = []
        for _ in range(2):
            metas.append(engine.generate(input_ids=text, sampling_params=params)["meta_info"])
            engine.flush_cache()
    assert [meta["cached_tokens"] > 36 for meta in metas] == [True, False]
    assert len({meta["spec_num_correct_drafts"] for meta in metas}) == 1
