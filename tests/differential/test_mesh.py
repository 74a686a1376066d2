"""Engines over two devices produce the tokens of dense decoding, with every algorithm and family.

Dense decoding runs on one device with weights from the files, and without a KV cache.
"""

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

from specjax import SamplingParams
from specjax.checkpoints import open_target
from specjax.models import registry
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel
from specjax.models.mesh import INT4_VERSION
from specjax.runtime.runner_config import RunnerConfig
from specjax.testing import Files, Job, dense_decode, letter_tokenizer
from specjax.testing.files import CONFIG, write_head

from ..support import mxfp4_files
from ..support.meshes import (
    PROMPTS,
    check_bytes,
    check_dense,
    check_exchanges,
    collectives,
    dense_weights,
    replicas_that_differ,
)
from ..support.mixture_files import write_glm, write_hybrid_mixture, write_mixture
from ..support.model_files import write_hybrid, write_model
from ..support.mxfp4_files import write_wide_head
from ..support.quantized_files import FORMATS, compressed, make, packed
from .draws import Drafts, Options
from .rows import drafting

pytestmark = pytest.mark.slow
ROWS = [
    ("EAGLE3", "tree", "fixed"),
    ("EAGLE", "cut chain", "adaptive"),
    ("P-EAGLE", "chain", "fixed"),
    ("NGRAM", "tree", "fixed"),
    ("STANDALONE", "tree", "fixed"),
    ("MULTI_LAYER_EAGLE", "chain", "fixed"),
    ("DFLASH", "chain", "fixed"),
    ("DSPARK", "chain", "adaptive"),
    ("markov", "chain", "fixed"),
    ("NONE", "", ""),
]
OLD = jax.__version_info__ < INT4_VERSION
WITHOUT_SPLIT = ("NGRAM", "markov", "NONE")  # no network, or one that is always whole
ODD = CONFIG.vocab_size - 1  # two devices have different numbers of tokens
# settings of models that split other weights than the plain target's
FAMILIES: dict[str, dict[str, Any]] = {
    "tied embeddings, biases": {
        "model_type": "qwen2",
        "qkv_bias": True,
        "tie_word_embeddings": True,
        "vocab_size": ODD,
    },
    "norms of heads": {"model_type": "qwen3", "qk_norm": True, "vocab_size": ODD},
    "all biases": {
        "model_type": "llama",
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
    },
    "joined projections": {"model_type": "phi3"},
    "norms of all heads": {"model_type": "olmo2"},
    "norms of all heads, one KV head": {"model_type": "olmo2", "num_kv_heads": 1},
    "a repeated KV head, biases": {"model_type": "qwen2", "num_kv_heads": 1, "qkv_bias": True},
    "norms after rotation": {"model_type": "hunyuan_v1_dense", "qk_norm": True},
    "output gates": {
        "model_type": "muse_glimmer_text",
        "qk_scale_factor": 3.87,
        "post_norm_eps": 1e-8,
        "windows": (8, 0),
        "layer_ropes": (None, None),
        "logit_softcap": 20.0,
    },
    "windows, norms of outputs, soft caps": {
        "model_type": "gemma2",
        "tie_word_embeddings": True,
        "windows": (8, 0),
        "attention_softcap": 0.7,
        "logit_softcap": 5.0,
        "embedding_scale": CONFIG.hidden_size**0.5,
    },
}


@pytest.fixture(autouse=True)
def _greedy_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy batches have functions of their own, as on a GPU."""
    monkeypatch.setattr(RunnerConfig, "has_greedy", True)


def options_of(row: tuple[str, str, str], drafts: Drafts) -> Options:
    if row[0] == "NONE":
        return {"speculative": False}
    algorithm, shape, steps = row
    return {"draft": None} | drafting((algorithm, shape, "", 0, "", steps, 1), drafts)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row))
def test_every_algorithm_drafts_for_a_split_target(
    row: tuple[str, str, str], files: Files, drafts: Drafts
) -> None:
    options = {"overlap": row[0] == "EAGLE3"} | options_of(row, drafts)
    accepted = set()
    for draft_tp_size in (None,) if row[0] in WITHOUT_SPLIT else (1, 2):
        with files.engine(tp_size=2, draft_tp_size=draft_tp_size, **options) as made:
            assert made.runner.networks.draft.shards == (draft_tp_size or 1)
            accepted.add(check_dense(made, dense_weights(made)))
            assert not replicas_that_differ(made)
            # only a Markov head, which adds to all logits, needs them
            assert ("all-gather" in collectives(made)["greedy_round"]) == (row[0] == "DSPARK")
    assert len(accepted) == 1
    assert (accepted != {0}) == (row[0] != "NONE")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: Any, files: Files, tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder: Path = tmp_path_factory.mktemp("family")
    values = {x.name: getattr(CONFIG, x.name) for x in fields(CONFIG)} | FAMILIES[request.param]
    config = registry.FAMILIES[values["model_type"]].config(**values)
    target = write_model(folder / "target", config, tokenizer=letter_tokenizer())
    return replace(files, target=target)


def test_every_family_is_split(family: Files) -> None:
    options: Options = {"speculative_algorithm": "NGRAM", "draft": None, "page_size": 1}
    with family.engine(tp_size=2, speculative=False, **options) as made:
        check_dense(made, dense_weights(made))
        assert not replicas_that_differ(made)
        config = made.target.config
        sums = (2 + (config.model_type == "olmo2")) * config.num_layers
        check_exchanges(made, sums + config.tie_word_embeddings)


@pytest.mark.parametrize(
    "format",
    [
        "fp8",
        "int8",
        "groups",
        pytest.param("int4", marks=pytest.mark.skipif(OLD, reason="needs jax 0.11")),
    ],
)
def test_quantised_matrices_are_split(
    format: str, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target and draft; groups are those of files of the target, with zero points."""
    options: Options = {"quantization": format}
    bits = {"groups": 8, "int4": 4}.get(format)
    if bits is not None:
        stored = compressed(bits, "int", "group", group_size=8, symmetric=False)
        form = stored, partial(packed, bits, True, 8)
        monkeypatch.setitem(FORMATS, format, form)
        options = {"target": make(files, tmp_path, format)[0]}
    with files.engine(tp_size=2, **options) as made:
        assert made.target.config.quantization is not None
        assert check_dense(made, dense_weights(made)) > 20
        assert not replicas_that_differ(made)
        check_exchanges(made, 2 * CONFIG.num_layers)


@pytest.fixture(scope="module")
def mixtures(files: Files, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    folder, patch = tmp_path_factory.mktemp("mixtures"), pytest.MonkeyPatch()
    wide = write_wide_head(folder / "head")
    mixture = write_mixture(folder / "mixture", files.target)
    paths = {"experts": mixture, "a shared expert": write_glm(folder / "glm", mixture)}
    made = {name: replace(files, target=path) for name, path in paths.items()}
    for name, is_packed in (("gpt-oss", False), ("gpt-oss in MXFP4", True)):
        if is_packed:  # devices have different numbers of groups
            patch.setattr(mxfp4_files, "INNER", 192)
        target = mxfp4_files.write_gpt_oss(folder / name, files.target, is_packed=is_packed)
        made[name] = replace(files, target=target, head=wide)
    patch.undo()
    return made


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("experts", {"enable_return_routed_experts": True}),
        ("experts", {"quantization": "fp8"}),
        ("a shared expert", {}),
        ("gpt-oss", {}),
        ("gpt-oss in MXFP4", {"speculative_eagle_topk": 2}),
    ],
)
def test_experts_are_split(name: str, options: Options, mixtures: dict[str, Files]) -> None:
    with mixtures[name].engine(tp_size=2, **options) as made:
        assert check_dense(made, dense_weights(made)) > 10
        assert not replicas_that_differ(made)
        check_exchanges(made, 2 * CONFIG.num_layers)
        check_bytes(made)


@pytest.fixture(scope="module")
def hybrids(files: Files, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    folder = tmp_path_factory.mktemp("hybrids")
    hybrid = write_hybrid(folder / "hybrid", files.target)
    paths = {"hybrid": hybrid, "mixture": write_hybrid_mixture(folder / "mixture", hybrid)}
    return {name: replace(files, target=path) for name, path in paths.items()}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hybrid", {"speculative": False}),
        ("hybrid", {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 12}),
        ("mixture", {"speculative_algorithm": "NEXTN", "draft": None, "quantization": "fp8"}),
    ],
)
def test_states_are_split_by_heads(name: str, options: Options, hybrids: dict[str, Files]) -> None:
    with hybrids[name].engine(tp_size=2, **options) as made:
        weights = dense_weights(made)
        accepted = check_dense(made, weights)
        assert (accepted > 10) == options.get("speculative", True)
        check_dense(made, weights)  # from snapshots
        assert not replicas_that_differ(made)
        sums = 2 * CONFIG.num_layers
        # greedy drafts that use the target's head find the best token of each step
        of_drafts = made.args.speculative_num_steps if "NEXTN" in options.values() else 0
        found = {name: x["all-reduce"] for name, x in collectives(made).items()}
        assert found.pop("greedy_round") == sums + 1 + of_drafts
        assert {*found.values()} == {sums}
        check_bytes(made)


def test_four_devices_share_two_kv_heads(files: Files, tmp_path: Path) -> None:
    config = replace(CONFIG, model_type="olmo2", vocab_size=100)
    path = write_model(tmp_path / "target", config, tokenizer=letter_tokenizer())
    options: Options = {"speculative_algorithm": "NGRAM", "draft": None, "page_size": 1}
    with replace(files, target=path).engine(tp_size=4, speculative=False, **options) as made:
        check_dense(made, dense_weights(made))
        assert not replicas_that_differ(made)


@pytest.fixture(scope="module")
def wide(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A model with 8 KV heads."""
    config = replace(CONFIG, num_heads=8, num_kv_heads=8, vocab_size=104)
    folder = tmp_path_factory.mktemp("wide") / "target"
    return replace(files, target=write_model(folder, config, tokenizer=letter_tokenizer()))


def test_four_devices(wide: Files) -> None:
    options: Options = {"speculative_algorithm": "NGRAM", "draft": None}
    with wide.engine(tp_size=4, **options) as made:
        assert len(made.runner.on_device.pools.target[0].addressable_shards) == 4
        check_dense(made, dense_weights(made))
        assert not replicas_that_differ(made)


def test_eight_devices(wide: Files) -> None:
    """In a process of its own, because the others have four."""
    options = {"speculative_algorithm": "NGRAM", "dtype": "float32", "compile_cache_dir": None}
    options |= {"tp_size": 8, "max_running_requests": 4, "batch_buckets": [4]}
    params = {"max_new_tokens": 24, "temperature": 0.8, "sampling_seed": 3, "ignore_eos": True}
    code = (
        "import json, sys; from specjax import Engine\n"
        "if __name__ == '__main__':\n"
        "    path, options, prompts, params = json.loads(sys.argv[1])\n"
        "    with Engine(path, **options) as engine:\n"
        "        results = engine.generate(input_ids=prompts, sampling_params=params)\n"
        "    print(json.dumps([result['output_ids'] for result in results]))\n"
    )
    inputs = json.dumps([str(wide.target), options, PROMPTS, params])
    flags = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=8"
    env = {**os.environ, "XLA_FLAGS": flags, "PJRT_NPROC": "64", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code, inputs]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    target = open_target(wide.target, dtype="float32")
    weights = tuple(FlatModel.of(partial(CausalLM, target.config)).order(target.load_weights()))
    decode = SamplingParams.of(params)
    for prompt, output_ids in zip(PROMPTS, json.loads(done.stdout), strict=True):
        job = Job(prompt=tuple(prompt), params=decode, seed=3)
        assert output_ids == dense_decode(jax.device_put(weights), job, target.config).tokens


@pytest.mark.parametrize("draft_tp_size", [1, 2])
def test_drafts_with_tied_embeddings_of_an_odd_vocabulary(
    draft_tp_size: int, files: Files, tmp_path: Path
) -> None:
    config = replace(CONFIG, **FAMILIES["tied embeddings, biases"])
    tokenizer = letter_tokenizer()
    target, draft = (
        write_model(tmp_path / str(count), replace(config, num_layers=count), tokenizer=tokenizer)
        for count in (2, 1)
    )
    options: Options = {"draft": draft, "speculative_algorithm": "STANDALONE"}
    options |= {"tp_size": 2, "draft_tp_size": draft_tp_size, "speculative_eagle_topk": 2}
    with replace(files, target=target).engine(**options) as made:
        assert check_dense(made, dense_weights(made)) > 0
        assert not replicas_that_differ(made)
        assert set(collectives(made)["greedy_round"]) == {"all-reduce"}


@pytest.mark.parametrize(
    "way", ["rejection", "grammar", "several rounds", "fp8 KV", "states", "odd vocabulary"]
)
def test_other_ways_to_serve_a_split_target(
    way: str, files: Files, hybrids: dict[str, Files], tmp_path: Path
) -> None:
    options: dict[str, Options] = {
        "rejection": {"speculative_use_rejection_sampling": True},
        "grammar": {"grammar_backend": "llguidance"},
        "several rounds": {"rounds_per_dispatch": 3, "speculative_adaptive": True},
        "fp8 KV": {"kv_cache_dtype": "fp8_e4m3"},
        "states": {"grammar_backend": "llguidance"},
        "odd vocabulary": {"draft": write_head(tmp_path / "head", draft_vocab_size=79)},
    }
    texts = []
    requests: list[Options] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "sampling_seed": 5},
    ]
    if way in ("grammar", "states"):
        requests = [request | {"regex": "[a-f]{3,30}x"} for request in requests]
    for count in (1, 2):
        source, how = (hybrids["hybrid"] if way == "states" else files), dict(options[way])
        if way in ("rejection", "odd vocabulary"):
            how["draft_tp_size"] = count
        with source.engine(tp_size=count, **how) as made:
            params = [{"max_new_tokens": 24} | request for request in requests]
            outputs = [made.generate(input_ids=PROMPTS, sampling_params=p) for p in params]
            texts.append([[x["output_ids"] for x in output] for output in outputs])
            assert not replicas_that_differ(made)
    assert texts[0] == texts[1]
