"""Engines whose drafts are chosen from a hot vocabulary."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax import Engine, SamplingParams
from specjax.engine.args import EngineArgs
from specjax.engine.plan import plan_engine
from specjax.testing import Files, check_tokens
from specjax.testing.files import CONFIG, letter_tokenizer

from ..support.compilation import counted_compilations
from ..support.model_files import write_eagle_head, write_model

pytestmark = pytest.mark.slow
IDS = np.arange(1, CONFIG.vocab_size, 2)
PROMPTS = [[5, 17, 3, 8, 40, 2], [61], list(range(20, 60, 3))]
JUMPY = {
    "policy": "ema",
    "candidate_steps": [0, 1, 3],
    "ema_alpha": 1.0,
    "warmup_batches": 0,
    "update_interval": 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"speculative_eagle_topk": 3},
    "adaptive": {"speculative_adaptive": True, "speculative_adaptive_config": JUMPY},
}


@pytest.fixture(scope="module")
def hot(files: Files, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of engines with half of the vocabulary."""
    folder = tmp_path_factory.mktemp("hot")
    (folder / "hot.json").write_text(json.dumps(IDS.tolist()))
    return {
        "draft": write_eagle_head(folder / "head", files.target),
        "speculative_algorithm": "EAGLE",
        "speculative_token_map": folder / "hot.json",
    }


@pytest.fixture(scope="module")
def chain(files: Files, base_engine: Engine, hot: dict[str, Any]) -> Iterator[Engine]:
    with files.engine(**hot, share_weights_with=base_engine) as made:
        yield made


def weight(engine: Engine, name: str) -> np.ndarray:
    nets = engine.runner.networks
    return np.asarray(engine.runner.weights[1][nets.draft.names.index(name)])


@pytest.mark.parametrize("shape", SHAPES)
def test_texts_are_those_of_plain_decoding(files, base_engine, hot, shape) -> None:
    """Greedy and seeded; every draft is in the vocabulary, and some are accepted."""
    seen = set[int]()

    def watch(slots: Any, drafts: Any, verified: Any) -> None:
        tokens, counts = np.asarray(drafts.draft_tokens), np.asarray(drafts.num_proposed)
        is_real = (np.arange(tokens.shape[1]) <= counts[:, None]) & (np.asarray(slots) > 0)[:, None]
        seen.update(tokens[:, 1:][is_real[:, 1:]].tolist())

    with files.engine(**hot | SHAPES[shape], share_weights_with=base_engine) as engine:
        assert check_tokens(engine, PROMPTS) > 10
        engine.watch_rounds(watch)
        assert check_tokens(engine, PROMPTS[:1]) > 0
    assert len(seen) > 5
    assert seen <= {*IDS.tolist()}


def test_new_weights_of_the_target_reach_the_draft(chain, files) -> None:
    """This compiles nothing. The vocabulary itself belongs to the option."""
    old = load_file(files.target / "model.safetensors")["lm_head.weight"]
    np.testing.assert_array_equal(weight(chain, "hot_head.kernel"), old[IDS].T)
    new = np.random.default_rng(2).normal(size=old.shape).astype(np.float32)
    with counted_compilations() as events:
        chain.update_weights_from_tensor({"lm_head.weight": new})
    assert events == []
    np.testing.assert_array_equal(weight(chain, "hot_head.kernel"), new[IDS].T)
    assert check_tokens(chain, PROMPTS[:1]) >= 0
    for name, value in (
        ("hot_head.kernel", new[IDS].T),
        ("hot_head.offsets", IDS),
        ("token_map", IDS),
    ):
        with pytest.raises(ValueError, match=rf"\['{name}'\] are not weights of the model"):
            chain.update_weights_from_tensor({name: value}, draft=True)
    chain.update_weights_from_disk(files.target, chain.draft.path)
    np.testing.assert_array_equal(weight(chain, "hot_head.kernel"), old[IDS].T)


def test_a_vocabulary_of_other_ids_is_not_shared(chain, files, hot, tmp_path) -> None:
    (tmp_path / "hot.json").write_text(json.dumps((IDS - 1).tolist()))
    changes = {"speculative_token_map": tmp_path / "hot.json", "share_weights_with": chain}
    with files.engine(**hot | changes) as other:
        assert other.runner.weights[0][0] is chain.runner.weights[0][0]
        offsets = weight(other, "hot_head.offsets")
        np.testing.assert_array_equal(offsets + np.arange(len(IDS)), IDS - 1)
        (tmp_path / "hot.json").write_text(json.dumps(IDS.tolist()))
        other.update_weights_from_disk(draft_path=hot["draft"])
        assert np.array_equal(weight(other, "hot_head.kernel"), weight(chain, "hot_head.kernel"))
        (tmp_path / "hot.json").write_text("[3, 4]")
        with pytest.raises(ValueError, match=r"hot=HotVocabulary\(size=2, head=None\) instead of"):
            other.update_weights_from_disk(draft_path=hot["draft"])


@pytest.mark.parametrize("kind", [None, "int4"])
def test_tied_and_quantised_targets(files, hot, tmp_path, kind) -> None:
    """New embeddings of a tied target, or a new head of a quantised one, reach the draft too."""
    config = replace(CONFIG, tie_word_embeddings=kind is None)
    target = write_model(tmp_path / "target", config, tokenizer=letter_tokenizer())
    options: dict[str, Any] = {"target": target, "quantization": kind}
    with files.engine(**options, **hot) as engine:
        name = "model.embed_tokens.weight" if kind is None else "lm_head.weight"
        new = np.random.default_rng(3).normal(size=(CONFIG.vocab_size, CONFIG.hidden_size))
        engine.update_weights_from_tensor({name: new.astype(np.float32)})
        named = dict(
            zip(engine.runner.networks.target.names, engine.runner.weights[0], strict=True)
        )
        if kind is None:
            columns = {"hot_head.kernel": new.astype(np.float32)[IDS].T}
        else:
            leaves = "kernel.values", "kernel.scale"
            columns = {f"hot_head.{x}": np.asarray(named[f"lm_head.{x}"])[:, IDS] for x in leaves}
        for name, expected in columns.items():
            np.testing.assert_array_equal(weight(engine, name), expected)
        params = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
        ours = engine.generate(input_ids=PROMPTS, sampling_params=params)
        with files.engine(speculative=False, share_weights_with=engine, **options) as plain:
            theirs = plain.generate(input_ids=PROMPTS, sampling_params=params)
        assert [x["output_ids"] for x in ours] == [x["output_ids"] for x in theirs]


def test_the_plan_counts_the_columns(files, hot) -> None:
    options: dict[str, Any] = {"model": files.target, "speculative_num_steps": 3}
    plans = [
        plan_engine(EngineArgs(**options | hot | x)) for x in ({}, {"speculative_token_map": None})
    ]
    size = 4 * len(IDS) * (CONFIG.hidden_size + 1)
    assert plans[0].needs.weight_bytes - plans[1].needs.weight_bytes == size
    assert f"drafts among {len(IDS)} tokens" in "\n".join(plans[0].describe())
