"""The embedded model with its shipped head: identity, acceptance and metrics on real text."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from specjax import Engine

PROMPTS = Path(__file__).parents[2] / "scripts" / "data" / "prompts.jsonl"
NUM_STEPS = 5
GREEDY = {"temperature": 0.0, "max_new_tokens": 24}
SEEDED = {"temperature": 0.8, "sampling_seed": 7, "max_new_tokens": 24}


# one function of each kind: compiling takes most of the time
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "context_length": 256,
    "max_running_requests": 4,
    "batch_buckets": (4,),
    "chunked_prefill_size": 32,
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
    """First turns of four categories, greedy and seeded, in one batch and one by one."""
    prompts = [json.loads(line) for line in PROMPTS.read_text("utf-8").split("\n") if line]
    first = {prompt["category"]: prompt["turns"][0] for prompt in reversed(prompts)}
    assert len(first) == 8
    messages = [[{"role": "user", "content": turn}] for turn in list(first.values())[::2]]
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
