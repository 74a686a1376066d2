"""Engines for mixtures of experts produce the tokens of plain decoding."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax.testing import Files, check_tokens, letter_tokenizer
from specjax.testing.files import CONFIG, write_folder
from specjax.testing.models import PERTURBATION

from ..support.model_files import read_folder
from .rows import BATCHES, SEEN, Row, drafting, serving
from .trial import Reference, Trial

NUM_EXPERTS, INNER = 6, 48
ROWS: list[Row] = [
    ("EAGLE3", "tree", "ahead", 4, "here", "fixed", 1),
    ("NGRAM", "tree", "in turn", 16, "split", "adaptive", 3),
    ("DSPARK", "chain", "ahead", 1, "here", "adaptive", 1),
    ("STANDALONE", "tree", "ahead", 4, "split", "fixed", 3),
    ("DFLASH", "chain", "in turn", 4, "here", "fixed", 1),
    ("EAGLE", "cut chain", "ahead", 1, "split", "adaptive", 3),
]


def write_mixture(path: Path, target: Path) -> Path:
    """Write the copying target with experts, of which the router chooses others for each token."""
    config, tensors = read_folder(target)
    config |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    config |= {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config |= {"moe_intermediate_size": INNER, "mlp_only_layers": []}
    tensors = {name: x for name, x in tensors.items() if ".mlp." not in name}
    rng, size = np.random.default_rng(3), CONFIG.hidden_size

    def random(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.normal(size=shape) * shape[-1] ** -0.5).astype(np.float32)

    for i in range(CONFIG.num_layers):
        layer = f"model.layers.{i}."
        for name in ("q_norm", "k_norm"):
            tensors[f"{layer}self_attn.{name}.weight"] = np.ones(CONFIG.head_dim, np.float32)
        tensors[f"{layer}mlp.gate.weight"] = random(NUM_EXPERTS, size, scale=3.0)
        for j in range(NUM_EXPERTS):
            expert = f"{layer}mlp.experts.{j}."
            down = random(size, INNER, scale=2 * PERTURBATION)
            tensors |= {f"{expert}{x}_proj.weight": random(INNER, size) for x in ("gate", "up")}
            tensors[f"{expert}down_proj.weight"] = down
    return write_folder(path, config, tensors, letter_tokenizer())


def write_glm(path: Path, mixture: Path) -> Path:
    """Write a mixture as a GLM-4.5 with a module, which applies layer 0 to the last token."""
    config, tensors = read_folder(mixture)
    del config["num_experts"], config["mlp_only_layers"]
    config |= {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"]}
    config |= {"n_routed_experts": NUM_EXPERTS, "n_shared_experts": 1, "use_qk_norm": True}
    config |= {"first_k_dense_replace": 0, "partial_rotary_factor": 1.0}
    config |= {"num_nextn_predict_layers": 1}
    rng, size, count = np.random.default_rng(4), CONFIG.hidden_size, CONFIG.num_layers
    for i in range(count):
        mlp = f"model.layers.{i}.mlp."
        bias = 0.3 * rng.normal(size=NUM_EXPERTS)
        tensors[f"{mlp}gate.e_score_correction_bias"] = bias.astype(np.float32)
        for name in ("gate_proj", "up_proj", "down_proj"):
            expert = tensors[f"{mlp}experts.0.{name}.weight"]
            tensors[f"{mlp}shared_experts.{name}.weight"] = rng.permuted(expert)
    first, module = "model.layers.0.", f"model.layers.{count}."
    copied = {name: x for name, x in tensors.items() if name.startswith(first)}
    tensors |= {name.replace(first, module): x for name, x in copied.items()}
    ones = np.ones(size, np.float32)
    tensors |= {f"{module}{name}.weight": ones for name in ("enorm", "hnorm")}
    tensors[f"{module}eh_proj.weight"] = np.eye(size, 2 * size, dtype=np.float32)
    tensors[f"{module}shared_head.norm.weight"] = tensors["model.norm.weight"]
    tensors[f"{module}shared_head.head.weight"] = tensors["lm_head.weight"]
    tensors[f"{module}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    return write_folder(path, config, tensors, letter_tokenizer())


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
    "index", [0, 1, *(pytest.param(i, marks=pytest.mark.long) for i in range(2, len(ROWS)))]
)
def test_engines_equal_plain_decoding(mixture, drafts, plain, index, device) -> None:
    row = ROWS[index]
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
