"""lm-eval with ``local-completions`` gets the engine's log-likelihoods."""

import json
from pathlib import Path
from typing import Any

import pytest

from specjax import Engine


@pytest.fixture(scope="module")
def found(run_program, given, engine, tmp_path_factory) -> Any:
    folder = write_tokenizer(engine, tmp_path_factory.mktemp("tokenizer"))
    return run_program("lm_eval_calls", tokenizer=str(folder), **given)


def write_tokenizer(engine: Engine, folder: Path) -> Path:
    """Write the engine's tokenizer as a Hugging Face directory."""
    tokenizer = engine.tokenizer
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def log_likelihood(engine: Engine, context: str, continuation: str) -> tuple[float, bool]:
    """Log-likelihood of a continuation, and whether it is the most likely one."""
    ids = engine.tokenizer.encode(context + continuation)
    begin = len(engine.tokenizer.encode(context))
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    meta = engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 1}, **asked)
    meta = meta["meta_info"]
    scored, best = meta["input_token_logprobs"][begin:], meta["input_top_logprobs"][begin:]
    is_greedy = all(one[0] == top[0][0] for one, top in zip(scored, best, strict=True))
    return sum(value for value, *_ in scored), is_greedy


@pytest.mark.parametrize("form", ["ids", "texts"])
def test_log_likelihoods_equal_the_engine(engine, found, form) -> None:
    samples = found[form]["choices"]
    assert [len(sample) for sample in samples] == [3] * 6
    for sample in samples:
        for context, continuation, value, is_greedy in sample:
            expected = log_likelihood(engine, context, continuation)
            assert (value, is_greedy) == (pytest.approx(expected[0], abs=1e-4), expected[1])
    assert found[form]["accuracy"] > 0.5


@pytest.mark.parametrize("form", ["ids", "texts"])
def test_generations_equal_the_engine(engine, found, form) -> None:
    params = {"temperature": 0, "max_new_tokens": 8, "stop": ["\n"]}
    for context, text in found[form]["texts"]:
        assert text == engine.generate(context, params)["text"]
