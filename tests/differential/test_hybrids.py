"""Engines for models with recurrent layers produce the tokens of plain decoding."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specjax import DisaggregatedEngine, SamplingParams
from specjax.testing import Files, check_tokens
from specjax.testing.dense import Job, dense_decode
from specjax.testing.files import CONFIG

from ..support.model_files import write_hybrid
from .rows import BATCHES, SEEN, Row, drafting, serving
from .trial import Reference, Trial

ROWS: list[Row] = [
    ("EAGLE3", "tree", "ahead", 4, "here", "fixed", 1),
    ("NGRAM", "tree", "in turn", 16, "here", "adaptive", 3),
    ("NEXTN", "chain", "ahead", 4, "here", "fixed", 3),
    ("NEXTN", "tree", "in turn", 1, "here", "adaptive", 1),
    ("DSPARK", "chain", "ahead", 1, "here", "adaptive", 1),
    ("STANDALONE", "tree", "ahead", 4, "here", "fixed", 3),
    ("DFLASH", "chain", "in turn", 4, "here", "fixed", 1),
    ("EAGLE", "cut chain", "ahead", 1, "here", "adaptive", 3),
    ("P-EAGLE", "chain", "in turn", 4, "here", "fixed", 1),
]


@pytest.fixture(scope="module")
def hybrid(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("hybrids")
    return replace(files, target=write_hybrid(folder / "hybrid", files.target))


@pytest.fixture(scope="module")
def plain(hybrid: Files) -> Iterator[Reference]:
    reference = Reference.of(hybrid)
    yield reference
    reference.close()


TREE: dict[str, Any] = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 12}
OWN_LAYER: dict[str, Any] = {"speculative_algorithm": "NEXTN", "draft": None}


@pytest.mark.slow
@pytest.mark.parametrize("options", [TREE, TREE | OWN_LAYER], ids=["EAGLE3", "NEXTN"])
def test_tokens_of_a_tree_are_those_of_dense_decoding(hybrid: Files, options: Any) -> None:
    """Plain decoding by full passes without a cache or kept states is independent of the engine."""
    prompts = np.random.default_rng(0).integers(60, size=(2, 30)).tolist()
    with hybrid.engine(dtype="float32", **options) as engine:
        accepted = check_tokens(engine, prompts, count=40)
        assert accepted > 20
        if options.get("draft", engine) is None:  # another draft from the same files
            noise = {"mtp.fc.weight": np.random.default_rng(0).normal(size=(32, 64))}
            engine.update_weights_from_tensor(noise, draft=True)
            assert check_tokens(engine, prompts, count=40) < accepted
            engine.update_weights_from_disk(draft_path=hybrid.target)
            assert check_tokens(engine, prompts, count=40) == accepted


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, TREE], ids=["chain", "tree"])
def test_the_own_layer_drafts_from_a_hot_vocabulary(hybrid: Files, tmp_path, options: Any) -> None:
    """Its columns follow the target's weights."""
    ids, path = np.arange(0, CONFIG.vocab_size, 2), tmp_path / "hot.json"
    path.write_text(json.dumps(ids.tolist()))
    prompts = np.random.default_rng(0).integers(60, size=(2, 30)).tolist()
    options = options | OWN_LAYER | {"speculative_token_map": path}
    with hybrid.engine(dtype="float32", **options) as engine:
        assert check_tokens(engine, prompts, count=40) > 10
        new = np.random.default_rng(1).normal(size=(CONFIG.vocab_size, CONFIG.hidden_size))
        engine.update_weights_from_tensor({"lm_head.weight": new})
        at = engine.runner.networks.draft.names.index("hot_head.kernel")
        expected = new[ids].T.astype(np.float32)
        np.testing.assert_array_equal(engine.runner.weights[1][at], expected)
        assert check_tokens(engine, prompts, count=40) >= 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"speculative": False}, OWN_LAYER], ids=["plain", "NEXTN"])
def test_chats_continue_from_snapshots(hybrid: Files, options: Any) -> None:
    """The second turns of two chats, and another chat that begins as they did."""
    rng, params = np.random.default_rng(0), {"temperature": 0.0, "max_new_tokens": 12}
    params |= {"ignore_eos": True}
    common, *ends = (rng.integers(60, size=n).tolist() for n in (36, 30, 30))
    with hybrid.engine(dtype="float32", **options) as engine:
        weights, config = engine.runner.weights[0], engine.target.config

        def turn(prompts: list[list[int]], cached: list[int]) -> list[list[int]]:
            results = engine.generate(input_ids=prompts, sampling_params=params)
            assert [result["meta_info"]["cached_tokens"] for result in results] == cached
            for prompt, result in zip(prompts, results, strict=True):
                job = Job(prompt=tuple(prompt), params=SamplingParams(**params))
                assert result["output_ids"] == dense_decode(weights, job, config).tokens
                prompt += [*result["output_ids"], 7]
            return prompts

        turn(turn([[*common, *end] for end in ends], [0, 0]), [64, 64])
        turn([[*common, 9, 9]], [32])


@pytest.mark.slow
def test_two_sides_have_the_tokens_of_dense_decoding(hybrid: Files) -> None:
    """Prompts come with their states from another engine, with pages of another size."""
    prompts = np.random.default_rng(0).integers(60, size=(3, 40)).tolist()
    options = OWN_LAYER | {"kind": DisaggregatedEngine, "prefill": {"page_size": 8}}
    with hybrid.engine(dtype="float32", **options) as engine:
        assert check_tokens(engine, prompts, count=20) > 10
        infos = engine.get_server_info(), engine.prefill.get_server_info()
        tokens = [info["internal_states"][0]["prompt_tokens"] for info in infos]
        assert tokens[1] == 6 * 40, tokens


@pytest.mark.slow
def test_rejection_sampling_keeps_greedy_texts(hybrid: Files) -> None:
    """Seeded texts have the target's distribution, but other tokens."""
    options = OWN_LAYER | {"speculative_use_rejection_sampling": True}
    greedy = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
    prompts = np.random.default_rng(0).integers(60, size=(4, 30)).tolist()
    with hybrid.engine(dtype="float32", **options) as engine:
        results = engine.generate(input_ids=prompts, sampling_params=greedy)
        seeded = engine.generate(input_ids=prompts, sampling_params=greedy | {"temperature": 1.0})
        weights, config = engine.runner.weights[0], engine.target.config
    for prompt, result in zip(prompts, results, strict=True):
        job = Job(prompt=tuple(prompt), params=SamplingParams(**greedy))
        assert result["output_ids"] == dense_decode(weights, job, config).tokens
    for each in (results, seeded):
        assert sum(result["meta_info"]["spec_num_correct_drafts"] for result in each) > 40


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_quantised_engines_equal_plain_decoding(hybrid, drafts, quantization) -> None:
    row = ROWS[2]
    options = drafting(row, drafts) | serving(row) | {"quantization": quantization}
    plain = Reference.of(hybrid, quantization=quantization)
    try:
        counts = Trial(hybrid, plain, np.random.default_rng(0), options).run(BATCHES)
    finally:
        plain.close()
    for seen in SEEN:
        assert counts[seen] > 0, seen


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "index", [0, 2, *(pytest.param(i, marks=pytest.mark.long) for i in (1, *range(3, len(ROWS))))]
)
def test_engines_equal_plain_decoding(hybrid, drafts, plain, index, device) -> None:
    row = ROWS[index]
    # prompts begin with more tokens than the first state that is kept, in a pool that holds some of
    # them for the next batch: others continue from their states
    options = drafting(row, drafts) | serving(row) | {"max_total_tokens": 208}
    trial = Trial(hybrid, plain, np.random.default_rng(index), options)
    trial.phrases = 34, 40, 46
    counts = trial.run(BATCHES + 1)
    print(row, dict(counts))
    for seen in SEEN:
        assert counts[seen] > 0, seen
