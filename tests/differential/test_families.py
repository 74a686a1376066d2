"""Engines for families with windows, soft caps and convolutions produce plain decoding's tokens."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax.engine import plan
from specjax.engine.args import EngineArgs
from specjax.engine.plan import plan_engine
from specjax.kv import window_pages
from specjax.testing import Files, check_tokens, letter_tokenizer
from specjax.testing.files import CONFIG, write_folder

from ..support.model_files import read_folder, write_lfm2
from .rows import BATCHES, SEEN, Row, drafting, serving
from .trial import Reference, Trial

WINDOW = 9  # less than the rows of a large tree, and much less than the context
ROWS: dict[str, list[Row]] = {
    "ministral": [
        ("EAGLE3", "tree", "ahead", 4, "here", "fixed", 1),
        ("NGRAM", "tree", "in turn", 16, "split", "fixed", 3),
        ("STANDALONE", "tree", "ahead", 1, "here", "adaptive", 3),
        ("DFLASH", "chain", "ahead", 4, "split", "fixed", 3),
    ],
    "gemma2": [
        ("EAGLE3", "tree", "in turn", 4, "split", "fixed", 1),
        ("NGRAM", "tree", "ahead", 16, "here", "adaptive", 1),
        ("DSPARK", "chain", "in turn", 1, "here", "adaptive", 1),
        ("EAGLE", "cut chain", "ahead", 1, "split", "adaptive", 3),
    ],
    "gemma4_text": [
        ("EAGLE3", "tree", "ahead", 4, "here", "fixed", 1),
        ("NGRAM", "tree", "in turn", 16, "split", "fixed", 3),
        ("EAGLE", "cut chain", "ahead", 1, "split", "adaptive", 3),
        ("DFLASH", "chain", "ahead", 4, "split", "fixed", 3),
    ],
    "lfm2": [
        ("EAGLE3", "tree", "ahead", 4, "here", "fixed", 1),
        ("NGRAM", "tree", "in turn", 16, "split", "fixed", 3),
        ("STANDALONE", "tree", "ahead", 1, "here", "adaptive", 3),
        ("DSPARK", "chain", "ahead", 4, "split", "adaptive", 1),
    ],
}


def gemma2(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The copying target with Gemma's norms, of which those of outputs keep them small."""
    named = {name: x for name, x in tensors.items() if "norm" not in name}
    named["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] / np.float32(
        CONFIG.hidden_size**0.5
    )
    zeros = np.zeros(CONFIG.hidden_size, np.float32)
    named["model.norm.weight"] = zeros
    for i in range(CONFIG.num_layers):
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            scale = 0.06 - 1.0 if norm.startswith("post") else 0.0
            named[f"model.layers.{i}.{norm}_layernorm.weight"] = zeros + np.float32(scale)
    return named


def gemma4(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The copying target with Gemma's norms, whose last layer has one wide KV head."""
    rng = np.random.default_rng(3)
    named = {name: x + 1 if "norm" in name else x for name, x in gemma2(tensors).items()}
    size, heads = CONFIG.hidden_size, CONFIG.num_heads
    for i, dim in enumerate((CONFIG.head_dim, 16)):
        at = f"model.layers.{i}."
        named |= {f"{at}self_attn.{x}_norm.weight": np.ones(dim, np.float32) for x in "qk"}
        named[f"{at}layer_scalar"] = np.array([0.9], np.float32)
    at = f"{at}self_attn."
    del named[f"{at}v_proj.weight"]
    shapes = {"q": (heads * 16, size), "k": (16, size), "o": (size, heads * 16)}
    for x, shape in shapes.items():
        named[f"{at}{x}_proj.weight"] = rng.normal(size=shape).astype(np.float32) / 6
    return named


def write_family(path: Path, target: Path, name: str) -> Path:
    """Write the copying target as a model with one layer with a window and one without."""
    if name == "lfm2":
        return write_lfm2(path, target)
    config, tensors = read_folder(target)
    config |= {"model_type": name, "architectures": [f"{name.title()}ForCausalLM"]}
    kinds = ["sliding_attention", "full_attention"]
    config |= {"sliding_window": WINDOW, "layer_types": kinds}
    if name == "gemma4_text":
        config["architectures"] = ["Gemma4ForCausalLM"]
        config |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
        config |= {"attention_k_eq_v": True, "final_logit_softcapping": 5.0}
        config |= {"tie_word_embeddings": False, "hidden_activation": "gelu_pytorch_tanh"}
        tensors = gemma4(tensors)
    if name == "gemma2":
        tensors = gemma2(tensors)
        config |= {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 5.0}
        config |= {"query_pre_attn_scalar": 3, "hidden_activation": "gelu_pytorch_tanh"}
    return write_folder(path, config, tensors, letter_tokenizer())


@pytest.fixture(scope="module", params=ROWS)
def family(request: Any, files: Files, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("families")
    name = request.param
    return name, replace(files, target=write_family(folder / name, files.target, name))


@pytest.fixture(scope="module")
def plain(family: Any) -> Iterator[Reference]:
    reference = Reference.of(family[1])
    yield reference
    reference.close()


@pytest.fixture
def few_window_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few window pages, which are often taken back, and still fewer than pages."""
    monkeypatch.setattr(window_pages, "AHEAD_DISPATCHES", 1)
    monkeypatch.setattr(window_pages, "SPARE", 0.0)
    # of a prefill on a GPU, as small as on a CPU
    for name in ("IDLE_CHUNK", "LEAST_IDLE_CHUNK"):
        monkeypatch.setattr(plan.sizing, name, 12)


@pytest.mark.slow
@pytest.mark.usefixtures("few_window_pages")
def test_tokens_of_a_tree_are_those_of_dense_decoding(family: Any) -> None:
    """Plain decoding by full passes without a KV cache is independent of the engine."""
    shape = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 12}
    prompts = np.random.default_rng(0).integers(60, size=(2, 30)).tolist()
    with family[1].engine(dtype="float32", **shape) as engine:
        assert engine.runner.config.window_pages
        assert check_tokens(engine, prompts, count=40) > 20


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lfm2"], indirect=True)
@pytest.mark.parametrize("topk", [1, 3])
def test_convolutions_draft(family: Any, topk: int) -> None:
    """A model that drafts for itself has almost all drafts accepted, 4 of 5 tokens."""
    options = {"speculative_algorithm": "STANDALONE", "draft": family[1].target, "dtype": "float32"}
    options |= {"speculative_eagle_topk": topk, "speculative_num_steps": 4}
    options |= {"speculative_num_draft_tokens": 5 if topk == 1 else 12}
    prompts = np.random.default_rng(0).integers(60, size=(2, 30)).tolist()
    with family[1].engine(**options) as engine:
        assert check_tokens(engine, prompts, count=40) >= 0.95 * 4 * 32


@pytest.mark.usefixtures("few_window_pages")
def test_layers_share_a_pool_where_two_do_not_fit(family: Any, monkeypatch: Any) -> None:
    args = EngineArgs(**family[1].arguments(speculative=False, dtype="float32"))
    needs = plan_engine(args).needs
    assert needs.window_bytes > 0
    room = 2 * (needs.weight_bytes + needs.window_bytes // 2)  # half of it is for weights and KV
    monkeypatch.setattr(plan, "MEMORY_GRANULE", 1)
    monkeypatch.setattr(plan.sizing, "device_memory", lambda _: room)
    small = plan_engine(args)
    assert (small.config.window_pages, small.needs.window_bytes) == ((), 0)


@pytest.mark.usefixtures("few_window_pages")
def test_free_memory_holds_more_windows(family: Any, monkeypatch: Any) -> None:
    """Once all requests have their pages, up to as many window pages as pages."""
    args = EngineArgs(**family[1].arguments(speculative=False, dtype="float32"))
    config = plan_engine(args).config
    fixed = plan_engine(replace(args, max_total_tokens=config.max_total_tokens))
    [(window, count)] = fixed.config.window_pages
    weight_bytes, token_bytes, _, window_bytes = fixed.needs
    size, most = window_bytes // count, config.num_pages
    pages = most * config.page_size * token_bytes
    monkeypatch.setattr(plan, "MEMORY_GRANULE", 1)
    for added, expected in ((0, count), (3, count + 3), (most, most)):
        room = 2 * (weight_bytes + window_bytes + pages + added * size)  # half of it is for KV
        monkeypatch.setattr(plan.sizing, "device_memory", lambda _, room=room: room)
        planned = plan_engine(args)
        assert planned.config.window_pages == ((window, expected),)
        assert (planned.config.num_pages, planned.needs.window_bytes) == (most, expected * size)
    monkeypatch.setattr(
        plan.sizing, "device_memory", lambda _: 2 * (weight_bytes + window_bytes + pages - 1)
    )
    less = plan_engine(args).config
    assert (less.num_pages, less.window_pages) == (most - 1, ((window, count),))


@pytest.mark.slow
@pytest.mark.usefixtures("few_window_pages")
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "index", [0, *(pytest.param(i, marks=pytest.mark.long) for i in (1, 2, 3))]
)
def test_engines_equal_plain_decoding(family, drafts, plain, index, device) -> None:
    name, files = family
    row = ROWS[name][index]
    rng = np.random.default_rng(index)
    options = drafting(row, drafts) | serving(row)
    is_split = row[4] == "here" and row[3] < 16
    if is_split:  # more pages than window pages
        options["max_total_tokens"] = {(1, 1): 200, (4, 1): 264, (1, 3): 320}[row[3], row[6]]
    trial = Trial(files, plain, rng, options)
    counts = trial.run(BATCHES)
    print(name, row, dict(counts))
    assert bool(trial.engine.runner.config.window_pages) == is_split
    for seen in SEEN:
        assert counts[seen] > 0, seen
