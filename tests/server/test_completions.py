"""``/v1/completions`` compared with the engine."""

from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any

import pytest

from specjax.testing import is_idle
from specjax.text.completion import AcceptPieces
from specjax.text.tokenizer import IncrementalDecoder

from .bodies import ENGINE_GREEDY, GREEDY, choices_of

ROUTE = "/v1/completions"


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(choice["text"] for choice in choices_of(chunks, index))


@pytest.mark.parametrize("prompt", ["hello", [4, 5, 6], ["hello", "The sky"], [[4, 5], [6, 7, 8]]])
def test_texts_are_the_engines(engine, client, prompt) -> None:
    is_text = isinstance(prompt, str) or isinstance(prompt[0], str)
    given = {"prompt" if is_text else "input_ids": prompt}
    expected = engine.generate(sampling_params=ENGINE_GREEDY, **given)
    expected = expected if isinstance(expected, list) else [expected]
    body = client.post(ROUTE, {"prompt": prompt} | GREEDY).json()
    assert body["object"] == "text_completion"
    assert [choice["text"] for choice in body["choices"]] == [one["text"] for one in expected]
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    used = body["usage"]
    assert used["completion_tokens"] == 20 * len(expected)
    assert used["prompt_tokens"] == sum(one["meta_info"]["prompt_tokens"] for one in expected)
    assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
    streamed = client.stream(ROUTE, {"prompt": prompt} | GREEDY)
    for i, one in enumerate(expected):
        assert text_of(streamed, i) == one["text"]


def test_a_stream_ends_with_its_reason_and_usage(client) -> None:
    asked = {"prompt": "hello", "stream_options": {"include_usage": True}} | GREEDY
    *parts, last = client.stream(ROUTE, asked)
    assert len(parts) > 3
    assert len({chunk["id"] for chunk in parts}) == 1
    assert all(chunk["usage"] is None for chunk in parts)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in parts]
    assert reasons == [None] * (len(parts) - 1) + ["length"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 20
    assert "usage" not in client.stream(ROUTE, {"prompt": "hello"} | GREEDY)[-1]


@pytest.mark.parametrize("stop", [None, "e"])
def test_a_stream_marks_the_accepted_drafts(engine, client, stop) -> None:
    sampling = ENGINE_GREEDY | {"stop": stop}
    native = client.stream("/generate", {"text": "hello", "sampling_params": sampling})[-1]
    asked = {"prompt": "hello", "stop": stop, "stream_options": {"include_drafts": True}} | GREEDY
    choices = choices_of(client.stream(ROUTE, asked))
    for choice in choices:
        assert choice["text"] == "".join(piece["text"] for piece in choice["pieces"])
    pieces = [piece for choice in choices for piece in choice["pieces"]]
    assert "".join(piece["text"] for piece in pieces) == native["text"]
    expected = AcceptPieces(IncrementalDecoder(engine.tokenizer).push)
    ids, flags = native["output_ids"], native["meta_info"]["output_is_draft"]
    marked = [(piece["text"], piece["is_draft"]) for piece in pieces]
    assert marked == expected.take(native["text"], ids, flags, final=True)


@pytest.mark.slow
def test_64_at_once_get_the_texts_of_their_seeds(engine, client) -> None:
    def body(i: int) -> dict[str, Any]:
        sampled = {"prompt": f"number {i}", "max_tokens": 12, "temperature": 0.9, "seed": i}
        return sampled | {"ignore_eos": True}

    params = {"temperature": 0.9, "max_new_tokens": 12, "ignore_eos": True}
    expected = engine.generate(
        [f"number {i}" for i in range(64)], [params | {"sampling_seed": i} for i in range(64)]
    )

    def ask(i: int) -> str:
        if i % 2:
            return text_of(client.stream(ROUTE, body(i)))
        return client.post(ROUTE, body(i)).json()["choices"][0]["text"]

    with ThreadPoolExecutor(64) as pool:
        texts = list(pool.map(ask, range(64)))
    assert texts == [one["text"] for one in expected]
    assert is_idle(engine)


def test_samples_follow_each_other(engine, client) -> None:
    params = {"temperature": 0.9, "max_new_tokens": 8, "sampling_seed": 3, "n": 3}
    expected = [one["text"] for one in engine.generate(["abc", "de"], params)]
    asked = {"prompt": ["abc", "de"], "temperature": 0.9, "max_tokens": 8, "seed": 3, "n": 3}
    body = client.post(ROUTE, asked | {"best_of": 3}).json()
    assert [choice["text"] for choice in body["choices"]] == expected
    assert body["usage"]["prompt_tokens"] == 5
    streamed = client.stream(ROUTE, asked)
    assert [text_of(streamed, i) for i in range(6)] == expected


def test_a_negative_seed_is_a_seed(client) -> None:
    asked = {"prompt": "abc", "seed": -7, "max_tokens": 8}
    texts = [client.post(ROUTE, asked).json()["choices"][0]["text"] for _ in range(2)]
    assert texts[0] == texts[1]


def test_stop_strings_are_cut(engine, client) -> None:
    text = engine.generate("hello", ENGINE_GREEDY)["text"]
    stop = text[4:6]
    asked = {"prompt": "hello", "stop": [stop, "nowhere"]} | GREEDY
    choice = client.post(ROUTE, asked).json()["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert choice["matched_stop"] == stop
    assert text_of(client.stream(ROUTE, asked)) == choice["text"]
    assert client.post(ROUTE, asked | {"stop": stop}).json()["choices"][0]["text"] == choice["text"]


def test_sampling_fields_reach_the_engine(engine, client) -> None:
    asked = {
        "prompt": "hello",
        "max_tokens": 10,
        "min_tokens": 2,
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.01,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": 5},
        "stop_token_ids": [9],
        "seed": 11,
        "speculative": False,
    }
    names = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
    names["seed"] = "sampling_seed"
    params = {names.get(name, name): value for name, value in asked.items() if name != "prompt"}
    body = client.post(ROUTE, asked).json()
    assert body["choices"][0]["text"] == engine.generate("hello", params)["text"]
    assert "metrics" not in body  # requests without speculation
    # default: 16 tokens; top_k=0 also turns it off
    assert client.post(ROUTE, {"prompt": "a"}).json()["usage"]["completion_tokens"] <= 16
    whole = client.post(ROUTE, asked | {"top_k": 0}).json()["choices"][0]["text"]
    assert whole == engine.generate("hello", params | {"top_k": -1})["text"]


def test_cached_tokens_are_reported(engine, client) -> None:
    engine.flush_cache()
    asked = {"prompt": "a long prompt that fills pages"} | GREEDY
    cached = [
        client.post(ROUTE, asked).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert cached[0] == 0
    assert cached[1] > 8


def test_salts_share_no_pages(engine, client) -> None:
    """Each finds its own pages, those of the answer included, and all texts are the same."""
    engine.flush_cache()
    asked = {"prompt": "a long prompt that fills pages"} | GREEDY
    bodies = [
        client.post(ROUTE, asked | salt).json()
        for salt in 2 * ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": None})
    ]
    cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in bodies]
    assert [count > 8 for count in cached] == [False] * 3 + [True] * 5
    assert len({body["choices"][0]["text"] for body in bodies}) == 1


def test_acceptance_is_reported_under_both_names(client) -> None:
    body = client.post(ROUTE, {"prompt": "hello"} | GREEDY).json()
    figures, meta = body["metrics"]["speculative_decoding"], body["choices"][0]["meta_info"]
    assert (
        figures["num_spec_steps"] == meta["spec_verify_ct"] == sum(figures["acceptance_histogram"])
    )
    assert figures["num_accepted_draft_tokens"] == meta["spec_num_correct_drafts"]
    assert figures["num_draft_tokens"] == meta["spec_num_proposed_drafts"]
    assert figures["num_spec_tokens"] == 3
    accepted = figures["num_accepted_draft_tokens"] / figures["num_spec_steps"]
    assert figures["mean_acceptance_length"] == pytest.approx(1 + accepted)


# log-probabilities in the form that evaluation harnesses read


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("prompt", [[[1, 2, 3], [4, 5, 6, 7]], "hello"])
def test_prompts_are_scored(engine, client, max_tokens, prompt) -> None:
    given = {"prompt" if isinstance(prompt, str) else "input_ids": prompt}
    params = {"temperature": 0.0, "max_new_tokens": max(max_tokens, 1)}
    options = {"return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 0}
    expected = engine.generate(sampling_params=params, **given, **options)
    expected = expected if isinstance(expected, list) else [expected]
    asked = {"prompt": prompt, "echo": True, "logprobs": 1, "temperature": 0}
    body = client.post(ROUTE, asked | {"max_tokens": max_tokens}).json()
    count = sum(one["meta_info"]["completion_tokens"] for one in expected) if max_tokens else 0
    assert body["usage"]["completion_tokens"] == count
    for choice, one in zip(body["choices"], expected, strict=True):
        meta, logprobs = one["meta_info"], choice["logprobs"]
        scored = meta["input_token_logprobs"]
        tops = meta["input_top_logprobs"]
        if max_tokens:
            scored = scored + meta["output_token_logprobs"]
            tops = tops + meta["output_top_logprobs"]
        assert logprobs["token_logprobs"] == [value for value, _, _ in scored]
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert logprobs["tokens"] == [engine.tokenizer.decode([token]) for _, token, _ in scored]
        assert choice["text"] == "".join(logprobs["tokens"])
        lengths = accumulate(map(len, logprobs["tokens"]), initial=0)
        assert logprobs["text_offset"] == list(lengths)[:-1]
        for own, best, ((top, _, _),) in zip(
            logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], tops[1:], strict=True
        ):
            assert own in best.values()
            assert max(best.values()) == top


def test_a_streamed_completion_has_the_same_log_probabilities(client) -> None:
    asked = {"prompt": "hello", "echo": True, "logprobs": 2} | GREEDY
    whole = client.post(ROUTE, asked).json()["choices"][0]
    parts = choices_of(client.stream(ROUTE, asked))
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name, values in whole["logprobs"].items():
        joined = [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
        assert joined == values
    assert all(a <= b for a, b in pairwise(whole["logprobs"]["text_offset"]))


def test_echo_alone_and_log_probabilities_alone(engine, client) -> None:
    text = engine.generate("hello", ENGINE_GREEDY)["text"]
    echoed = client.post(ROUTE, {"prompt": "hello", "echo": True} | GREEDY).json()["choices"][0]
    assert echoed["text"] == "hello" + text
    assert echoed["logprobs"] is None
    scored = client.post(ROUTE, {"prompt": "hello", "logprobs": 0} | GREEDY).json()["choices"][0]
    assert scored["text"] == text
    assert len(scored["logprobs"]["token_logprobs"]) == 20
    assert all(len(best) == 1 for best in scored["logprobs"]["top_logprobs"])
    zero = {"prompt": "hello", "echo": True, "max_tokens": 0}
    assert text_of(client.stream(ROUTE, zero)) == "hello"
