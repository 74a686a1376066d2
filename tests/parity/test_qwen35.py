"""Qwen3.5 against transformers with a long memory: chunks of prompts, files, and greedy texts."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402

from specjax import Engine  # noqa: E402
from specjax.checkpoints import open_target  # noqa: E402

from .jax_side import build_target, relative_error, run_target  # noqa: E402
from .torch_side import FAMILIES, make_model, run_model, save  # noqa: E402

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
LONG = {"max_position_embeddings": 256}


@cache
def long_model(family: str = "qwen3_5") -> "transformers.PreTrainedModel":
    """A model whose states halve in a dozen rows or more, where random biases forget in one."""
    name, changes = FAMILIES[family]
    model = make_model(name, {**changes, **LONG})
    with torch.no_grad():
        for parameter, weight in model.named_parameters():
            if parameter.endswith("dt_bias"):
                weight.sub_(3.0)
    return model


@pytest.mark.parametrize("chunks", [(), (64, 64, 22), (37, 37, 37, 37, 2), (130, *[1] * 20)])
def test_long_memory(chunks: tuple[int, ...], tmp_path: Path) -> None:
    path = save(long_model(), tmp_path / "model")
    tokens = np.random.default_rng(2).integers(0, 131, (2, 150))
    theirs, layers = run_model(long_model(), tokens)
    target = build_target(open_target(str(path), dtype="float32"))
    ours, features = run_target(target, tokens, tuple(range(len(layers))), chunks)
    assert relative_error(ours, theirs) <= TOLERANCE
    assert relative_error(features, np.concatenate(layers, axis=-1)) <= TOLERANCE


@pytest.mark.parametrize("is_tied", [False, True])
def test_text_of_a_multimodal_file(is_tied: bool, tmp_path: Path) -> None:
    """Its configuration is nested, and it has tensors of images and of a draft layer."""
    name, changes = FAMILIES["qwen3_5"]
    model = make_model(name, {**changes, "tie_word_embeddings": is_tied})
    path = save(model, tmp_path / "model")
    text = json.loads((path / "config.json").read_text())
    del text["tie_word_embeddings"]
    config = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
    config |= {"text_config": text, "tie_word_embeddings": is_tied, "dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config))
    stored = load_file(path / "model.safetensors")
    renamed = {x.replace("model.", "model.language_model.", 1): y for x, y in stored.items()}
    others = "model.visual.blocks.0.norm1.weight", "mtp.layers.0.input_layernorm.weight"
    renamed |= dict.fromkeys(others, np.zeros(4, np.float32))
    save_file(renamed, path / "model.safetensors")
    checkpoint = open_target(str(path), dtype="float32")
    assert checkpoint.config.tie_word_embeddings is is_tied
    tokens = np.random.default_rng(7).integers(0, 131, (1, 30))
    ours, _ = run_target(build_target(checkpoint), tokens)
    assert relative_error(ours, run_model(model, tokens)[0]) <= TOLERANCE


PROMPT, COUNT = 90, 150


@pytest.mark.slow
def test_greedy_texts(tmp_path: Path) -> None:
    """Texts of 150 tokens, after a prompt in chunks of 64, 37 and 1 tokens."""
    model, path = long_model(), save(long_model(), tmp_path / "model")
    prompt = np.random.default_rng(5).integers(3, 131, (1, PROMPT))
    length = {"max_new_tokens": COUNT, "min_new_tokens": COUNT}
    theirs = model.generate(torch.from_numpy(prompt), do_sample=False, **length)
    # a minimum length bans the end of a text
    params = {"temperature": 0.0, "ignore_eos": True, "logit_bias": {2: -100.0}, **length}
    for size in (64, 37, 1):
        with Engine(
            str(path),
            dtype="float32",
            speculative_algorithm="NGRAM",
            speculative_num_draft_tokens=6,
            skip_tokenizer_init=True,
            max_running_requests=1,
            batch_buckets=(1,),
            chunked_prefill_size=size,
            compile_on_use=True,
        ) as engine:
            output = engine.generate(input_ids=prompt[0].tolist(), sampling_params=params)
        assert output["output_ids"] == theirs[0, PROMPT:].tolist()
