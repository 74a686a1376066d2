"""The engine on a tiny checkpoint: inputs, results, streams, threads, refusals."""

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from prometheus_client import generate_latest
from safetensors.numpy import load_file, save_file
from specjax.kernels.draw_tokens import position_uniform

from specjax import Engine, SamplingParams
from specjax.checks import ParameterError
from specjax.config import RopeScaling
from specjax.engine.args import EngineArgs
from specjax.engine.plan import plan_engine
from specjax.runtime.runner import ModelRunner
from specjax.sampling.accept_draws import COUPLED, Acceptance
from specjax.speculative.algorithm import SpeculativeAlgorithm
from specjax.testing import STEPS, is_idle, letter_tokenizer, num_held
from specjax.testing.files import CONFIG, EOS_ID, HEAD, write_head, write_target

from ..support.compilation import counted_compilations

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.7, max_new_tokens=20, ignore_eos=True, sampling_seed=5)
TEXTS = ["hello", "The sky is blue", "a", "def f(x): return x", "0123456789" * 6]


def check_result(result: dict[str, Any], prompt_tokens: int) -> None:
    meta = result["meta_info"]
    assert meta["prompt_tokens"] == prompt_tokens
    assert meta["completion_tokens"] == len(result["output_ids"])
    assert result["text"] == letter_tokenizer().decode(result["output_ids"])
    histogram = meta["spec_correct_drafts_histogram"]
    assert len(histogram) == STEPS + 1
    assert sum(histogram) == meta["spec_verify_ct"]
    assert sum(i * n for i, n in enumerate(histogram)) == meta["spec_num_correct_drafts"]
    assert meta["spec_accept_length"] == meta["completion_tokens"] / meta["spec_verify_ct"]
    proposed = meta["spec_num_proposed_drafts"]
    assert meta["spec_accept_rate"] == meta["spec_num_correct_drafts"] / proposed
    assert meta["e2e_latency"] > 0


# results


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_speculation_gives_the_output_of_plain_decoding(engine, plain, params) -> None:
    for e in (engine, plain):
        e.generate(TEXTS[0], params)  # compiles the functions
    with counted_compilations() as events:
        ours, theirs = (e.generate(TEXTS, params) for e in (engine, plain))
    assert events == []
    assert [r["output_ids"] for r in ours] == [r["output_ids"] for r in theirs]
    assert [r["text"] for r in ours] == [r["text"] for r in theirs]
    for text, result in zip(TEXTS, ours, strict=True):
        check_result(result, len(text))
        assert result["meta_info"]["finish_reason"] == {"type": "length", "length": 20}
        assert not [name for name in theirs[0]["meta_info"] if name.startswith("spec_")]
    assert sum(r["meta_info"]["spec_num_correct_drafts"] for r in ours) > 20
    assert num_held(engine) == num_held(plain) == 0


def test_one_input_is_a_dict_and_a_list_is_a_list(engine) -> None:
    ids = letter_tokenizer().encode(TEXTS[0])
    conversation = [{"role": "user", "content": "hi"}]
    one = engine.generate(TEXTS[0], GREEDY)
    assert engine.generate([TEXTS[0]], GREEDY)[0]["output_ids"] == one["output_ids"]
    for inputs in (ids, np.array(ids), tuple(ids)):
        assert engine.generate(input_ids=inputs, sampling_params=GREEDY)["text"] == one["text"]
    for inputs in ([ids, ids[:2]], np.array([ids, ids])):
        many = engine.generate(input_ids=inputs, sampling_params=GREEDY)
        assert isinstance(many, list)
        assert many[0]["text"] == one["text"]
    chat = engine.generate(messages=conversation, sampling_params=GREEDY)
    many = engine.generate(messages=[conversation, conversation], sampling_params=GREEDY)
    assert [r["text"] for r in many] == [chat["text"]] * 2
    assert chat["output_ids"] == engine.generate("<user>hi<assistant>", GREEDY)["output_ids"]
    assert engine.generate([], GREEDY) == []
    ids_seen = {r["meta_info"]["id"] for r in [one, chat, *many]}
    assert len(ids_seen) == 4


def test_sampling_params_in_every_form(engine) -> None:
    mapping = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True}
    assert engine.generate("hi", mapping) | {"meta_info": None} == engine.generate(
        "hi", SamplingParams(**mapping)
    ) | {"meta_info": None}
    short, long = engine.generate(["hi", "hi"], [mapping, GREEDY])
    assert short["output_ids"] == long["output_ids"][:3]
    assert len(long["output_ids"]) == 20
    defaults = engine.generate("hi", {"ignore_eos": True})["meta_info"]
    # 128 tokens by default, and at most 126 after the prompt
    assert defaults["completion_tokens"] == 126
    assert defaults["finish_reason"] == {"type": "length", "length": 126}


def test_end_token_ends_unless_ignored(engine) -> None:
    params = {"temperature": 1.5, "max_new_tokens": 100, "ignore_eos": True}
    seeds = range(20)
    free = engine.generate(["a"] * 20, [params | {"sampling_seed": seed} for seed in seeds])
    seed, whole = next(
        (s, r["output_ids"])
        for s, r in zip(seeds, free, strict=True)
        if EOS_ID in r["output_ids"][2:] and r["output_ids"][0] != EOS_ID
    )
    result = engine.generate("a", params | {"sampling_seed": seed, "ignore_eos": False})
    assert result["output_ids"] == whole[: whole.index(EOS_ID) + 1]
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS_ID}
    assert "</s>" not in result["text"]
    stop = whole[1]
    result = engine.generate("a", params | {"sampling_seed": seed, "stop_token_ids": [stop]})
    assert result["output_ids"] == whole[: whole.index(stop) + 1]
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_stop_strings_are_cut_off(engine) -> None:
    whole = engine.generate("hello", GREEDY)
    text, ids = whole["text"], whole["output_ids"]
    stop = text[3:6]
    result = engine.generate("hello", {"temperature": 0.0, "stop": ["never", stop]})
    assert result["text"] == text[: text.index(stop)]
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    count = next(n for n in range(len(ids)) if stop in engine.tokenizer.decode(ids[:n]))
    assert result["meta_info"]["completion_tokens"] == count


def test_context_limit_ends_a_request(files, engine) -> None:
    prompt = letter_tokenizer().encode("The sky is blue, be")
    long = engine.generate(input_ids=prompt, sampling_params=GREEDY)
    with files.small(speculative=False, context_length=24) as small:
        assert small.context_length == 24
        result = small.generate(
            input_ids=prompt, sampling_params={"temperature": 0.0, "ignore_eos": True}
        )
        assert result["output_ids"] == long["output_ids"][: 24 - len(prompt)]
        assert result["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
        full = [*prompt, *result["output_ids"]][:23]
        assert len(small.generate(input_ids=full, sampling_params=GREEDY)["output_ids"]) == 1
        with pytest.raises(ParameterError, match="24 tokens must be shorter") as caught:
            small.generate(input_ids=[*full, 1])
        assert (caught.value.limit, caught.value.code) == (24, "context_length_exceeded")


def test_every_kind_of_request_next_to_every_other(engine, plain) -> None:
    """Greedy, sampled, filtered, penalised and plain requests in one batch, as if alone."""
    kinds = [
        GREEDY,
        SEEDED,
        replace(SEEDED, top_k=7, top_p=0.9),
        replace(SEEDED, min_p=0.05),
        replace(GREEDY, repetition_penalty=1.3),
        replace(SEEDED, frequency_penalty=0.4, logit_bias={9: 1.5}),
    ]
    kinds += kinds[::-1]
    mixed = [replace(one, speculative=i % 2 == 0) for i, one in enumerate(kinds)]
    prompts = [[6 + (5 * i + j) % 50 for i in range(3 + j)] for j in range(len(mixed))]
    outputs = engine.generate(input_ids=prompts, sampling_params=mixed)
    alone = [
        plain.generate(input_ids=prompt, sampling_params=params)
        for prompt, params in zip(prompts, kinds, strict=True)
    ]
    assert [out["output_ids"] for out in outputs] == [out["output_ids"] for out in alone]
    for out, params in zip(outputs, mixed, strict=True):
        assert ("spec_verify_ct" in out["meta_info"]) == params.speculative


@pytest.mark.slow
def test_unseeded_requests_follow_the_engines_seed(files, engine, plain) -> None:
    params = SamplingParams(temperature=1.0, max_new_tokens=20, ignore_eos=True)
    outputs = []
    for seed in (3, 3):
        with files.small(seed=seed, share_weights_with=engine) as made:
            outputs.append([r["output_ids"] for r in made.generate(["hello"] * 2, params)])
    assert outputs[0] == outputs[1]
    assert outputs[0] != [r["output_ids"] for r in plain.generate(["hello"] * 2, params)]
    assert outputs[0][0] != outputs[0][1]


# streams


def test_a_stream_grows_to_the_result(engine) -> None:
    whole = engine.generate(TEXTS[1], GREEDY)
    outs = list(engine.generate(TEXTS[1], GREEDY, stream=True))
    assert 1 < len(outs) < 20  # several tokens at a time
    for before, after in pairwise(outs):
        assert before["meta_info"]["finish_reason"] is None
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert len(after["output_ids"]) > len(before["output_ids"])
    last = outs[-1]
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 20}
    same = "spec_correct_drafts_histogram"
    assert last["meta_info"][same] == whole["meta_info"][same]
    assert (
        sum(last["meta_info"]["output_is_draft"]) == whole["meta_info"]["spec_num_correct_drafts"]
    )
    assert "index" not in last


def test_an_unread_stream_holds_nothing(engine) -> None:
    stream = engine.generate("hello", GREEDY, stream=True)
    engine.generate("x", GREEDY)
    assert is_idle(engine)
    assert list(stream)[-1]["text"] == engine.generate("hello", GREEDY)["text"]


# other engines


@pytest.mark.slow
def test_engine_without_tokenizer_takes_ids_only(files, engine, tmp_path) -> None:
    (files.target / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    try:
        with pytest.raises(ValueError, match=r"tokenizer\.json is missing.*skip_tokenizer_init"):
            files.small()
        made = files.small(skip_tokenizer_init=True)
    finally:
        (tmp_path / "tokenizer.json").rename(files.target / "tokenizer.json")
    with made:
        ids = letter_tokenizer().encode("hello")
        result = made.generate(input_ids=ids, sampling_params=GREEDY)
        assert result["output_ids"] == engine.generate("hello", GREEDY)["output_ids"]
        assert result["text"] == ""
        for refused in ({"prompt": "hello"}, {"messages": [{"role": "user", "content": "x"}]}):
            with pytest.raises(ValueError, match="skip_tokenizer_init"):
                made.generate(**refused)
        with pytest.raises(ValueError, match="stop needs a tokenizer"):
            made.generate(input_ids=ids, sampling_params={"stop": "x"})


def test_weights_are_shared_without_reading_them_again(files, engine, monkeypatch) -> None:
    from specjax.checkpoints import DraftCheckpoint
    from specjax.engine import weights

    def refuse(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(weights, "stream_weights", refuse)
    monkeypatch.setattr(DraftCheckpoint, "load_weights", refuse)
    with files.small(share_weights_with=engine) as other:
        for ours, theirs in zip(other.runner.weights, engine.runner.weights, strict=True):
            assert all(a is b for a, b in zip(ours, theirs, strict=True))
        text = other.generate("hello", GREEDY)["text"]
    # closing the borrower keeps the lender's weights
    assert engine.generate("hello", GREEDY)["text"] == text


def test_another_head_of_the_same_shape_is_not_shared(files, engine, tmp_path) -> None:
    other_head = write_head(tmp_path / "head")
    with files.small(draft=other_head, share_weights_with=engine) as other:
        assert other.runner.weights[0][0] is engine.runner.weights[0][0]
        assert other.runner.weights[1][0] is not engine.runner.weights[1][0]


def test_sharing_needs_the_same_model(files, engine, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"share_weights_with .* bfloat16 .*; got .* float32"):
        files.engine(dtype="bfloat16", share_weights_with=engine)
    write_target(tmp_path / "target")
    with pytest.raises(ValueError, match="share_weights_with must be an engine with"):
        Engine(tmp_path / "target", share_weights_with=engine, compile_cache_dir=None)


@pytest.mark.slow
def test_dummy_weights_in_bfloat16_and_simulated_acceptance(files, tmp_path) -> None:
    """No tensor is read, and texts mean nothing."""
    target = write_target(tmp_path / "target")
    (target / "model.safetensors").unlink()
    simulated = {"load_format": "dummy", "simulate_accept_length": 2.5, "rounds_per_dispatch": 2}
    with files.small(dtype="bfloat16", target=target, **simulated) as made:
        weights, head = made.runner.weights
        assert {w.dtype for w in weights} == {jnp.dtype(jnp.bfloat16)}
        assert {w.dtype for w in head} == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.int32)}
        assert made.runner.on_device.pools.target[0].dtype == jnp.bfloat16
        first, again = made.generate([TEXTS[1]] * 2, GREEDY)
        assert first["output_ids"] == again["output_ids"]
        check_result(first, len(TEXTS[1]))
        result = made.generate(
            "hello", {"temperature": 0.0, "max_new_tokens": 101, "ignore_eos": True}
        )
        check_result(result, 5)
        assert result["meta_info"]["spec_accept_length"] == pytest.approx(2.5, abs=0.2)
        # it says so with all of its metrics
        assert result["meta_info"]["spec_simulate_accept_length"] == 2.5
        assert made.get_server_info()["simulate_accept_length"] == 2.5
        assert (
            "specjax:spec_simulate_accept_length{"
            in generate_latest(made.metrics.registry).decode()
        )
        shared = {"share_weights_with": made}
        with files.small(dtype="bfloat16", target=target, **simulated, **shared) as other:
            pairs = zip(other.runner.weights, made.runner.weights, strict=True)
            assert all(a is b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
    with pytest.raises(ValueError, match=r"model\.safetensors|no weights|\.safetensors"):
        files.small(target=target)


def accepted_histogram(seed: int, chance: float, num_prompt: int, count: int, steps: int) -> list:
    """Number of rounds by accepted drafts, computed round by round from the noise at positions."""
    words = jnp.array([[seed >> 32, seed & 0xFFFFFFFF]], jnp.uint32)
    noise = position_uniform(words, jnp.arange(num_prompt + count + steps, dtype=jnp.int32)[None])
    hits = (np.asarray(noise[0]) < np.float32(chance)).tolist()
    histogram, root, end = [0] * (steps + 1), num_prompt, num_prompt + count
    while root + 1 < end:  # the last token is at position ``root``
        run = [*hits[root + 1 : root + 1 + steps], False].index(False)
        histogram[min(run, end - root - 1)] += 1
        root += run + 1
    return histogram


@pytest.mark.long_after(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"speculative_num_steps": 3, "rounds_per_dispatch": 2},
        {"speculative_num_steps": 7},
        {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 11},
    ],
    ids=["chain of 3", "chain of 7", "tree"],
)
def test_every_request_simulates_its_own_acceptance(files, shape) -> None:
    """Accepted drafts follow from seed and position, whatever the tier and the neighbours are."""
    own = [{"simulate_acceptance": 0.9}, {"simulate_acceptance": 0.3, "temperature": 0.8}, {}]
    own += [{"simulate_acceptance": 0.0}, {"speculative": False}, {"simulate_acceptance": 1}]
    params = [
        {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True, "sampling_seed": 2**40 + i}
        | each
        for i, each in enumerate(own)
    ]
    with files.engine(simulate_acceptance=0.6, **shape) as made:
        prompts = [[3] * (i + 4) for i in range(len(params))]
        results = made.generate(input_ids=prompts, sampling_params=params)
        with counted_compilations() as events:
            alone = made.generate(input_ids=prompts[0], sampling_params=params[0])
        assert events == []
        scraped = generate_latest(made.metrics.registry).decode()
        assert re.search(r"specjax:spec_simulate_acceptance\{.*\} 0\.6\n", scraped)
        assert "spec_simulate_accept_length" not in scraped
        with pytest.raises(ValueError, match=r"simulate_acceptance=2 must be .* at most 1"):
            made.generate("a", {"simulate_acceptance": 2})
    metas = [result["meta_info"] for result in results]
    assert "spec_verify_ct" not in metas.pop(4)
    del own[4], params[4], prompts[4]
    for meta, each, given, prompt in zip(metas, own, params, prompts, strict=True):
        chance = each.get("simulate_acceptance", 0.6)
        assert meta["spec_simulate_acceptance"] == chance
        steps = shape.get("speculative_num_steps", STEPS)
        expected = accepted_histogram(given["sampling_seed"], chance, len(prompt), 60, steps)
        assert meta["spec_correct_drafts_histogram"] == expected
    histogram = metas[0]["spec_correct_drafts_histogram"]
    assert alone["meta_info"]["spec_correct_drafts_histogram"] == histogram


def test_acceptance_is_simulated_only_by_engines_started_for_it(engine, plain) -> None:
    for made in (engine, plain):
        with pytest.raises(ParameterError, match=r"simulate_acceptance=0.5 needs .* is None"):
            made.generate("hello", {"simulate_acceptance": 0.5})
        assert "spec_simulate_acceptance" not in made.generate("a", GREEDY)["meta_info"]


@pytest.mark.slow
def test_an_engine_lives_on_the_second_device(files, engine) -> None:
    """Weights, pools, rows and tables are only on that device; texts stay the same."""
    expected = [engine.generate(TEXTS[0], params)["output_ids"] for params in (GREEDY, SEEDED)]
    first, second, *_ = devices = jax.devices()
    with files.small(base_gpu_id=1) as made:
        before = {id(array) for array in jax.live_arrays()}
        texts = [made.generate(TEXTS[0], params)["output_ids"] for params in (GREEDY, SEEDED)]
        new = [array for array in jax.live_arrays() if id(array) not in before]
        runner = made.runner
        held = jax.tree.leaves((runner.weights, runner.on_device, runner._inputs(()), new))
        assert len(held) > 30
        assert {device for array in held for device in array.devices()} == {second}
    assert texts == expected
    with files.small(base_gpu_id=1, share_weights_with=engine) as borrower:
        assert borrower.generate(TEXTS[0], GREEDY)["output_ids"] == expected[0]
    with pytest.raises(ValueError, match=f"base_gpu_id={len(devices)}"):
        files.small(base_gpu_id=len(devices))
    assert engine.runner.networks.placement.device == first


def test_missing_tensors_are_named_before_anything_compiles(files, tmp_path, monkeypatch) -> None:
    target = write_target(tmp_path / "target")
    tensors = load_file(target / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, target / "model.safetensors")
    monkeypatch.setattr(ModelRunner, "compile", lambda *_, **__: pytest.fail("it compiled"))
    with pytest.raises(ValueError, match=r"lacks 1 tensor.*model\.norm\.weight"):
        files.small(target=target)


def test_running_ahead_needs_an_algorithm_that_can(files, monkeypatch) -> None:
    monkeypatch.setattr(SpeculativeAlgorithm, "supports_overlap", False)
    with pytest.raises(ValueError, match="overlap=True is not supported by EAGLE3"):
        files.small(overlap=True)


def test_closed_engines_refuse_work(files, engine) -> None:
    made = files.small(share_weights_with=engine)
    stream = made.generate("hello", GREEDY, stream=True)
    unread = made.generate("hello", GREEDY, stream=True)
    first = next(stream)
    made.close()
    last = list(stream)[-1]
    assert last["meta_info"]["finish_reason"] == {"type": "abort"}
    assert last["output_ids"][: len(first["output_ids"])] == first["output_ids"]
    made.close()
    assert not hasattr(made.runner, "weights")
    with pytest.raises(ValueError, match="closed"):
        next(unread)
    with pytest.raises(ValueError, match="closed"):
        made.generate("hello")
    with pytest.raises(ValueError, match="closed"):
        files.engine(share_weights_with=made)
    with made:  # leaving a closed engine is fine too
        pass


def test_start_up_reports_sizes_and_the_resolved_head(files, engine, caplog, capsys) -> None:
    with caplog.at_level("INFO", logger="specjax"):
        files.small(share_weights_with=engine, show_progress=True).close()
    parts = (
        "weights 0.00 GB",
        "pages of 4 tokens",
        "eagle-3 head",
        "rope_theta",
        "80 of 98",
        "3 drafted tokens per round",
        "context length 128 tokens, up to 1 running requests",
        "on cpu",
    )
    for part in parts:
        assert part in caplog.text
    output = capsys.readouterr()
    assert "\r" not in output.err  # a bar is for terminals
    assert output.out == ""
    assert "eagle-3 head" not in output.err  # the log has it
    files.small(share_weights_with=engine, show_progress=True).close()
    shown = capsys.readouterr()
    for part in parts:
        assert part in shown.err
    assert shown.out == ""
    files.small(share_weights_with=engine, show_progress=False).close()
    assert capsys.readouterr().err == ""


# refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of prompt, input_ids and messages; got \\[\\]"),
        ({"prompt": "a", "input_ids": [1]}, "exactly one"),
        ({"prompt": "a", "messages": []}, "exactly one"),
        ({"prompt": ""}, "no tokens"),
        ({"input_ids": []}, "no tokens"),
        ({"input_ids": [[1], []]}, "no tokens"),
        ({"input_ids": [1, -1]}, r"must be in \[0, 98\); got \[-1\]"),
        ({"input_ids": [CONFIG.vocab_size]}, r"got \[98\]"),
        ({"input_ids": [1.5]}, "input_ids"),
        ({"input_ids": "abc"}, "input_ids"),
        ({"input_ids": 5}, "input_ids"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"input_ids": [1] * 128}, "128 tokens must be shorter than context_length=128"),
        ({"prompt": "a", "sampling_params": {"top_pp": 2}}, r"\['top_pp'\] are not supported"),
        ({"prompt": "a", "sampling_params": {"regex": "a"}}, "regex='a' needs the engine option"),
        ({"prompt": "a", "return_logprob": 1}, "return_logprob=1 must be a bool"),
        ({"prompt": "a", "return_hidden_states": 1}, "return_hidden_states=1 must be a bool"),
        ({"prompt": "a", "top_logprobs_num": 2}, "needs return_logprob=True"),
        ({"prompt": "a", "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num=-1"),
        ({"prompt": "a", "return_logprob": [True, True]}, "_logprob has 2 values for 1 inputs"),
        ({"prompt": "a", "logprob_start_len": 0}, "logprob_start_len=0 needs return_logprob"),
        ({"prompt": "abc", "return_logprob": True, "logprob_start_len": 3}, "logprob_start_len=3"),
        ({"prompt": "a", "return_routed_experts": 1}, "return_routed_experts=1 must be a bool"),
        ({"prompt": "a", "return_routed_experts": True}, "True needs the engine option enable_ret"),
        ({"prompt": "a", "routed_experts_start_len": 1}, "_start_len=1 needs return_routed_exp"),
        ({"prompt": "a", "routed_experts_start_len": 2}, "_start_len=2 must be .* from 0 to 1"),
        ({"prompt": "a", "rid": ["x"]}, r"rid=\['x'\] must be a non-empty"),
        ({"prompt": ["a"], "rid": ["x", "y"]}, "a list of 1 non-empty strings"),
        ({"prompt": ["a", "b"], "rid": "x"}, "a list of 2 non-empty strings"),
        ({"prompt": ["a", "b"], "rid": ["x", "x"]}, "must not repeat an id"),
        ({"prompt": "a", "rid": ""}, "a non-empty string"),
        ({"prompt": "a", "rid": 5}, "rid=5"),
        ({"prompt": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, r"got \[1, 2\]"),
        ({"prompt": "a", "sampling_params": {"n": 129}}, "n=129 must be an integer from 1 to 128"),
        ({"prompt": "a", "timeout": 0}, "timeout=0"),
        ({"prompt": "a", "timeout": float("nan")}, "timeout=nan"),
        ({"prompt": "a", "timeout": "1"}, "timeout='1'"),
        ({"prompt": "a", "sampling_params": {"temperature": -1}}, "temperature=-1"),
        (
            {"prompt": "a", "sampling_params": {"stop_token_ids": [2**40]}},
            r"stop_token_ids must be in \[0, 98\)",
        ),
        ({"prompt": "a", "sampling_params": {"stop_token_ids": [-1]}}, r"stop_token_ids .*\[-1\]"),
        ({"messages": []}, "messages=.* is empty"),
        ({"prompt": "a\udcff"}, "surrogates"),
        ({"prompt": "a", "sampling_params": "greedy"}, "sampling_params='greedy'"),
        ({"prompt": "a", "sampling_params": [{}, {}]}, "sampling_params has 2 values for 1 inputs"),
        ({"prompt": ["a", "b"], "sampling_params": [{}]}, "_params has 1 values for 2 inputs"),
    ],
)
def test_bad_requests(engine, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate(**arguments)
    assert is_idle(engine)


def test_a_prompt_has_to_fit_the_pool_and_its_completion_is_cut(plain) -> None:
    with pytest.raises(ValueError, match=r"pool holds 96; shorten it or .*max_total_tok"):
        plain.generate(["a", "a" * 97], GREEDY)
    assert is_idle(plain)
    for asked in (96, 97, 10**6):
        result = plain.generate("a", {"max_new_tokens": asked, "ignore_eos": True})
        assert result["meta_info"]["completion_tokens"] == 96
        assert result["meta_info"]["finish_reason"]["type"] == "length"
    assert len(plain.generate("a" * 96, GREEDY)["output_ids"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"speculative_eagle_topk": 128, "speculative_num_steps": 2},
            "speculative_eagle_topk=128 exceeds the draft vocabulary",
        ),
        (
            {"speculative_algorithm": "EAGLE"},
            "is an eagle-3 head, but .* drafts with eagle-1 heads; set",
        ),
        ({"speculative_algorithm": None, "speculative_num_steps": None}, r"\['draft'\] have no"),
        ({"draft": None}, "draft=None"),
        ({"context_length": 129}, "129 exceeds the model's limit of 128"),
        ({"mem_fraction_static": 1e-9}, "raise mem_fraction_static"),
    ],
)
def test_bad_engines(files, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        files.engine(**arguments)


def test_the_rope_of_a_head_follows_the_context_length(files, tmp_path) -> None:
    size = HEAD.head_dim
    growing = {"rope_type": "dynamic", "original_max_position_embeddings": 64}
    factors = {"short_factor": (1.0,) * (size // 2), "long_factor": (2.0,) * (size // 2)}
    scalings = {
        "dynamic": RopeScaling(**growing, factor=2.0),
        "longrope": RopeScaling(**growing | factors | {"rope_type": "longrope"}),
    }
    for name, scaling in scalings.items():
        short = {"rope_scaling": scaling, "max_position_embeddings": 64}
        path = write_head(tmp_path / name, **short)
        for length in (64, 128):
            options = files.arguments(draft=path, context_length=length)
            config = plan_engine(EngineArgs(**options)).networks.draft_config
            if name == "dynamic":
                growth = 1 if length == 64 else 3.0 ** (size / (size - 2))
                expected: Any = (pytest.approx(10000.0 * growth), None)
            else:
                chosen = factors["short_factor" if length == 64 else "long_factor"]
                fixed = replace(scaling, short_factor=chosen, long_factor=chosen)
                expected = (10000.0, fixed)
            assert (config.rope_theta, config.rope_scaling) == expected


def test_acceptance_options_apply_to_rounds(files) -> None:
    arguments = {"draft": files.head, "speculative_algorithm": "EAGLE3"}
    for options, expected in (
        ({}, COUPLED),
        ({"speculative_use_rejection_sampling": True}, Acceptance(uses_rejection=True)),
        ({"speculative_accept_threshold_acc": 0.5}, Acceptance(threshold_acc=0.5)),
        ({"speculative_accept_threshold_single": 0.5}, Acceptance(threshold_single=0.5)),
    ):
        plan = plan_engine(EngineArgs(model=files.target, **arguments, **options))
        assert plan.config.acceptance == expected
