"""The embedded model with its shipped head: identity, acceptance and metrics on real text."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax import Engine
from specjax.checkpoints import open_target
from specjax.checkpoints.export import published_target
from specjax.checkpoints.target import embedded_head
from specjax.testing.files import write_folder

PROMPTS = Path(__file__).parents[2] / "scripts" / "data" / "prompts.jsonl"
NUM_STEPS = 5
GREEDY = {"temperature": 0.0, "max_new_tokens": 24}
SEEDED = {"temperature": 0.8, "sampling_seed": 7, "max_new_tokens": 24}


def turns() -> list[list[dict[str, str]]]:
    """First turns of four categories."""
    prompts = [json.loads(line) for line in PROMPTS.read_text("utf-8").split("\n") if line]
    first = {prompt["category"]: prompt["turns"][0] for prompt in reversed(prompts)}
    assert len(first) == 8
    return [[{"role": "user", "content": turn}] for turn in list(first.values())[::2]]


# one function of each kind, if it is used: compiling takes most of the time
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "context_length": 256,
    "max_running_requests": 4,
    "batch_buckets": (4,),
    "chunked_prefill_size": 32,
    "compile_on_use": True,
}


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with Engine("smollm2-135m", **SIZES) as engine:
        yield engine


@pytest.mark.slow
def test_the_embedded_model_answers(plain):
    """With its chat template, up to its end token; a stream shows whole characters only."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = plain.generate(messages=question, sampling_params=GREEDY | {"max_new_tokens": 48})
    assert "Paris" in answer["text"]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    story = [{"role": "user", "content": "Write one sentence about 日本 with an emoji."}]
    shown = plain.generate(messages=story, sampling_params=GREEDY, stream=True)
    texts = [out["text"] for out in shown]
    for before, after in pairwise(texts):
        assert after.startswith(before)
        assert "\ufffd" not in before


@pytest.mark.slow
def test_shipped_head_is_lossless_and_useful(plain):
    """Greedy and seeded, in one batch and one by one."""
    messages = turns()
    with Engine(
        "smollm2-135m",
        speculative_algorithm="EAGLE3",
        speculative_num_steps=NUM_STEPS,
        share_weights_with=plain,
        **SIZES,
    ) as engine:
        lengths = []
        for params in (GREEDY, SEEDED):
            expected = plain.generate(messages=messages, sampling_params=params)
            outputs = engine.generate(messages=messages, sampling_params=params)
            assert [out["output_ids"] for out in outputs] == [out["output_ids"] for out in expected]
            alone = engine.generate(messages=messages[0], sampling_params=params)
            assert alone["output_ids"] == outputs[0]["output_ids"]
            tokens = sum(out["meta_info"]["completion_tokens"] for out in outputs)
            verifies = sum(out["meta_info"]["spec_verify_ct"] for out in outputs)
            lengths.append(tokens / verifies)
    # 2.87 on all of these prompts with 128 tokens; a wrong alignment falls below 1.3
    assert lengths[0] > 2.0
    assert lengths[1] > 1.4


def write_copies(path: Path, count: int) -> Path:
    """Write the embedded model as a mixture whose experts are copies of its feed-forward.

    Routers are random, so that tokens choose different copies.
    """
    target = open_target("smollm2-135m", dtype="float32")
    source, rng = target.source(), np.random.default_rng(0)
    config, tensors = target.config, {x: source.read(x) for x in source.infos if ".mlp." not in x}
    for i in range(config.num_layers):
        at, module = f"model.layers.{i}.mlp.", f"model.layers.{i}.mlp.experts."
        gate, up, down = (source.read(f"{at}{x}_proj.weight") for x in ("gate", "up", "down"))
        router = rng.normal(size=(count, config.hidden_size))
        tensors[f"model.layers.{i}.block_sparse_moe.gate.weight"] = np.float32(router)
        tensors[f"{module}gate_up_proj"] = np.stack([np.concatenate([gate, up])] * count)
        tensors[f"{module}down_proj"] = np.stack([down] * count)
    sizes = {"model_type": "mixtral", "num_local_experts": count, "num_experts_per_tok": 2}
    published = published_target(config) | {"bos_token_id": config.bos_token_id}
    return write_folder(path, published | sizes, tensors, target.load_tokenizer())


@pytest.mark.slow
@pytest.mark.long
def test_experts_that_are_copies_change_no_text(plain, tmp_path: Path) -> None:
    """With the head that was trained for the model, whose drafts stay as useful."""
    with Engine(
        str(write_copies(tmp_path / "copies", 3)),
        draft=embedded_head("smollm2-135m"),
        speculative_algorithm="EAGLE3",
        speculative_num_steps=3,
        **SIZES,
    ) as engine:
        for params in (GREEDY, SEEDED):
            expected = plain.generate(messages=turns(), sampling_params=params)
            outputs = engine.generate(messages=turns(), sampling_params=params)
            assert [out["output_ids"] for out in outputs] == [out["output_ids"] for out in expected]
            assert sum(out["meta_info"]["spec_num_correct_drafts"] for out in outputs) > 30
