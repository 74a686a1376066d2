"""Engines for mixtures of experts produce the tokens of plain decoding."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specjax.testing import Files, check_tokens

from ..support.mixture_files import write_glm, write_mixture
from .rows import BATCHES, OF_MIXTURES, SEEN, drafting, serving
from .trial import Reference, Trial


@pytest.fixture(scope="module")
def mixture(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("mixtures")
    return replace(files, target=write_mixture(folder / "mixture", files.target))


@pytest.fixture(scope="module")
def plain(mixture: Files) -> Iterator[Reference]:
    reference = Reference.of(mixture)
    yield reference
    reference.close()


@pytest.mark.slow
def test_tokens_of_a_tree_are_those_of_dense_decoding(mixture: Files) -> None:
    """Plain decoding by full passes without a KV cache is independent of the engine."""
    shape = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 12}
    prompts = np.random.default_rng(0).integers(60, size=(2, 30)).tolist()
    with mixture.engine(dtype="float32", **shape) as engine:
        assert check_tokens(engine, prompts, count=40) > 20


@pytest.mark.slow
def test_an_engine_counts_the_experts_of_its_rounds(plain: Reference) -> None:
    """One request reads 2 in every layer, whatever its batch is padded to."""
    engine = plain.engines[0]
    before = engine.metrics.snapshot()
    params = {"temperature": 0.0, "max_new_tokens": 9, "ignore_eos": True}
    engine.generate(input_ids=[7, 8, 9], sampling_params=params)
    after = engine.metrics.snapshot()
    assert after.expert_rounds - before.expert_rounds == 8
    assert after.num_experts_read - before.num_experts_read == 8 * 2.0
    state = engine.get_server_info()["internal_states"][0]
    assert state["expert_rounds"] == after.expert_rounds
    assert state["experts_read"] == after.num_experts_read
    assert state["experts_read_per_layer"] == after.num_experts_read / after.expert_rounds


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "index", [0, 1, *(pytest.param(i, marks=pytest.mark.long) for i in range(2, len(OF_MIXTURES)))]
)
def test_engines_equal_plain_decoding(mixture, drafts, plain, index, device) -> None:
    row = OF_MIXTURES[index]
    options = drafting(row, drafts) | serving(row)
    trial = Trial(mixture, plain, np.random.default_rng(index), options)
    counts = trial.run(BATCHES)
    print(row, dict(counts))
    for seen in SEEN:
        assert counts[seen] > 0, seen


@pytest.fixture(scope="module")
def glm(mixture: Files, tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("glm")
    return replace(mixture, target=write_glm(folder / "glm", mixture.target))


# GLM-4.5 drafts with the mixture in its own checkpoint
OWN_MODULE: dict[str, Any] = {
    "speculative_algorithm": "MULTI_LAYER_EAGLE",
    "speculative_num_steps": 1,
    "draft": None,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [OWN_MODULE, OWN_MODULE | {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3}],
    ids=["MULTI_LAYER_EAGLE", "NEXTN"],
)
def test_tokens_of_a_targets_own_module_are_those_of_dense_decoding(
    glm: Files, options: dict[str, Any]
) -> None:
    """NEXTN drafts all tokens with it."""
    prompts = np.random.default_rng(0).integers(60, size=(4, 30)).tolist()
    with glm.engine(dtype="float32", **options) as engine:
        assert check_tokens(engine, prompts, count=40) > 20


@pytest.mark.slow
@pytest.mark.long
def test_an_engine_with_its_own_module_equals_plain_decoding(glm: Files) -> None:
    row = ("MULTI_LAYER_EAGLE", "chain", "ahead", 4, "here", "fixed", 1)
    reference = Reference.of(glm)
    try:
        trial = Trial(glm, reference, np.random.default_rng(1), OWN_MODULE | serving(row))
        counts = trial.run(BATCHES)
    finally:
        reference.close()
    for seen in SEEN:
        assert counts[seen] > 0, seen
