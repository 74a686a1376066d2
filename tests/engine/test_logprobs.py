"""Log-probabilities against a dense pass over the same text."""

from typing import Any

import jax
import numpy as np
import pytest

from specjax import Engine
from specjax.testing import dense_logits, letter_tokenizer

TEXTS = ["hello", "The sky is blue, and so on and on"]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
SEEDED = {"temperature": 1.3, "top_k": 50, "max_new_tokens": 12, "sampling_seed": 5}
CHARGED = SEEDED | {"repetition_penalty": 1.5, "logit_bias": {"3": 4.0}, "ignore_eos": True}


def dense_logprobs(engine: Engine, prompt: list[int], output: list[int]) -> np.ndarray:
    """Log-softmax ``[len(output), V]`` of raw logits, from one pass without a cache."""
    rows = dense_logits(engine.runner.weights[0], prompt + output, engine.target.config)
    return np.asarray(jax.nn.log_softmax(rows[len(prompt) - 1 : -1], axis=-1))


def check(engine: Engine, text: str, result: dict[str, Any], num_top: int) -> None:
    ids, meta = result["output_ids"], result["meta_info"]
    expected = dense_logprobs(engine, letter_tokenizer().encode(text), ids)
    reported = meta["output_token_logprobs"]
    assert [(token, words) for _, token, words in reported] == [(i, None) for i in ids]
    np.testing.assert_allclose(
        [value for value, _, _ in reported], expected[np.arange(len(ids)), ids], atol=1e-4
    )
    if num_top == 0:
        assert "output_top_logprobs" not in meta
        return
    assert len(meta["output_top_logprobs"]) == len(ids)
    for row, best in zip(expected, meta["output_top_logprobs"], strict=True):
        assert len(best) == num_top
        values = [value for value, _, _ in best]
        np.testing.assert_allclose(values, np.sort(row)[::-1][:num_top], atol=1e-4)
        np.testing.assert_allclose(values, row[[token for _, token, _ in best]], atol=1e-4)
        assert len({token for _, token, _ in best}) == num_top


@pytest.mark.parametrize("params", [GREEDY, SEEDED, CHARGED], ids=["greedy", "seeded", "charged"])
@pytest.mark.parametrize("num_top", [0, 3])
def test_they_are_those_of_the_raw_logits(engine, plain, params, num_top) -> None:
    for one in (engine, plain):
        results = one.generate(TEXTS, params, return_logprob=True, top_logprobs_num=num_top)
        without = one.generate(TEXTS, params)
        for text, result, other in zip(TEXTS, results, without, strict=True):
            check(one, text, result, num_top)
            assert result["output_ids"] == other["output_ids"]
            assert not [name for name in other["meta_info"] if "logprobs" in name]


def test_each_input_gets_the_requested_reports(engine) -> None:
    results = engine.generate(
        [*TEXTS, "x"],
        [GREEDY, SEEDED, GREEDY],
        return_logprob=[True, False, True],
        top_logprobs_num=[2, 0, 0],
    )
    check(engine, TEXTS[0], results[0], 2)
    check(engine, "x", results[2], 0)
    assert not [name for name in results[1]["meta_info"] if "logprobs" in name]


def test_a_stream_has_as_many_as_tokens(engine) -> None:
    outputs = list(
        engine.generate(TEXTS[0], GREEDY, return_logprob=True, top_logprobs_num=1, stream=True)
    )
    for output in outputs:
        meta = output["meta_info"]
        assert len(meta["output_token_logprobs"]) == len(output["output_ids"])
        assert len(meta["output_top_logprobs"]) == len(output["output_ids"])
    check(engine, TEXTS[0], outputs[-1], 1)


def test_they_end_with_the_text(engine) -> None:
    text = engine.generate(TEXTS[0], GREEDY)["text"]
    result = engine.generate(TEXTS[0], {"temperature": 0.0, "stop": text[4:6]}, return_logprob=True)
    assert result["meta_info"]["finish_reason"]["type"] == "stop"
    check(engine, TEXTS[0], result, 0)


def test_too_many_are_refused(engine) -> None:
    most = engine.runner.max_top_logprobs
    check(
        engine,
        "x",
        engine.generate("x", GREEDY, return_logprob=True, top_logprobs_num=most),
        most,
    )
    with pytest.raises(ValueError, match=f"top_logprobs_num={most + 1} must be from 0 to {most}"):
        engine.generate("x", GREEDY, return_logprob=True, top_logprobs_num=most + 1)


def check_prompt(engine: Engine, prompt: list[int], meta: dict[str, Any], first: int, num_top: int):
    """Compare prompt tokens after ``first`` with one dense pass."""
    rows = dense_logits(engine.runner.weights[0], prompt, engine.target.config)[first:-1]
    reported = meta["input_token_logprobs"]
    assert reported[0] == (None, prompt[first], None)
    assert [token for _, token, _ in reported] == prompt[first:]
    if num_top:
        assert meta["input_top_logprobs"][0] is None
        assert len(meta["input_top_logprobs"]) == len(reported)
    for i, row in enumerate(rows, 1):
        expected = np.asarray(jax.nn.log_softmax(row))
        np.testing.assert_allclose(reported[i][0], expected[prompt[first + i]], atol=1e-4)
        if num_top:
            values = [value for value, _, _ in meta["input_top_logprobs"][i]]
            np.testing.assert_allclose(values, np.sort(expected)[::-1][:num_top], atol=1e-4)


@pytest.mark.parametrize("num_top", [0, 2])
def test_prompt_logprobs(engine, plain, num_top) -> None:
    """Over several chunks, in a batch, from any token on, and after a prefix-cache hit."""
    prompts = [[6 + (7 * i + j) % 50 for i in range(n)] for j, n in enumerate((37, 5, 21, 1))]
    firsts = [0, 2, 16, 0]
    for one in (engine, plain):
        for _ in range(2):
            results = one.generate(
                input_ids=prompts,
                sampling_params=GREEDY,
                return_logprob=True,
                top_logprobs_num=num_top,
                logprob_start_len=firsts,
            )
            for prompt, first, result in zip(prompts, firsts, results, strict=True):
                meta = result["meta_info"]
                check_prompt(one, prompt, meta, first, num_top)
                assert meta["cached_tokens"] <= first
        without = one.generate(input_ids=prompts, sampling_params=GREEDY)
        assert [out["output_ids"] for out in without] == [out["output_ids"] for out in results]
        assert not any("input_token_logprobs" in out["meta_info"] for out in without)


def test_prompt_logprobs_of_chunks_that_run_ahead(files, engine) -> None:
    """A chunk is dispatched before earlier chunks are read."""
    prompt = [6 + i % 50 for i in range(60)]
    asked = {"sampling_params": GREEDY, "return_logprob": True, "logprob_start_len": 3}
    with files.engine(overlap=True, share_weights_with=engine) as one:
        result = one.generate(input_ids=prompt, **asked)
        check_prompt(one, prompt, result["meta_info"], 3, 0)


@pytest.mark.slow
def test_new_weights_report_logprobs_of_new_weights_alone(files) -> None:
    """After a flush in the middle of a prompt, as in a weight update, the prompt starts again."""
    prompt = [6 + i % 50 for i in range(60)]
    with files.engine(speculative=False) as engine:
        step, flushed = engine._scheduler.step, []

        def flushing() -> None:
            step()
            rows = engine._scheduler._running
            if rows and rows[0].request.input_token_logprobs and not flushed:
                assert not rows[0].is_prefilled
                engine._scheduler.flush_cache()
                flushed.append(rows)
                (waiting,) = engine._scheduler._waiting
                assert not waiting.input_token_logprobs

        engine._scheduler.step = flushing
        asked = {"sampling_params": GREEDY, "return_logprob": True, "logprob_start_len": 3}
        result = engine.generate(input_ids=prompt, **asked)
        assert flushed
        check_prompt(engine, prompt, result["meta_info"], 3, 0)


@pytest.mark.slow
def test_processed_logprobs_are_of_the_sampled_distribution(files, plain) -> None:
    params = SEEDED | {"top_k": 3, "temperature": 0.5, "max_new_tokens": 6}
    asked = {"input_ids": [7, 8, 9], "return_logprob": True, "top_logprobs_num": 5}
    with files.engine(speculative=False, logprobs_mode="processed") as engine:
        result = engine.generate(sampling_params=params, **asked)
    raw = plain.generate(sampling_params=params, **asked)
    assert result["output_ids"] == raw["output_ids"]
    for best, before in zip(
        result["meta_info"]["output_top_logprobs"],
        raw["meta_info"]["output_top_logprobs"],
        strict=True,
    ):
        scaled = np.array([value for value, _, _ in before[:3]]) / 0.5
        expected = scaled - np.log(np.sum(np.exp(scaled)))
        np.testing.assert_allclose([value for value, _, _ in best[:3]], expected, atol=1e-4)
        assert [token for _, token, _ in best[:3]] == [token for _, token, _ in before[:3]]
        assert [value for value, _, _ in best[3:]] == [-np.inf] * 2
