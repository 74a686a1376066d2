"""Prompts from files and from the target itself."""

import json
from functools import partial

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from specjax.config import ModelConfig
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel
from specjax.text.tokenizer import Tokenizer
from specjax.training.collect import (
    CollectConfig,
    chat_frame,
    collect,
    cut_at_sentence,
    file_prompts,
    read_prompts,
    sample_prompts,
)
from specjax.training.generate import GeneratorConfig, Sampler
from specjax.training.openings import OPENINGS, TEXT_OPENINGS, fill, text_openings, user_openings

TEMPLATE = "<s>{% for m in messages %}{{ m.role }}: {{ m.content }}<e>{% endfor %}bot:"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<e>"])
    return Tokenizer(backend, special_tokens={"eos_token": "<e>"}, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def sampler(tokenizer) -> Sampler:
    model = ModelConfig(
        model_type="llama",
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
    )
    build = partial(CausalLM, model)
    flat = FlatModel.of(build)
    config = GeneratorConfig(num_rows=8, prefill_rows=8, max_prompt_len=256, max_new_tokens=8)
    return Sampler(flat, flat.init(build, 0), model, config, tokenizer.eos_token_ids)


def test_sampled_prompts_are_chat_prompts_that_begin_with_their_openings(sampler, tokenizer):
    config = CollectConfig(self_sample=24, text_fraction=0.25, max_user_tokens=6)
    prompts = sample_prompts(sampler, tokenizer, config)
    before, after = chat_frame(tokenizer)
    assert (before, after) == ("<s>user: ", "<e>bot:")
    openings = {(topic, opening.rstrip(" ")) for topic, opening in user_openings(18, 0)}
    texts = [(p.source, tokenizer.decode(p.ids, skip_special_tokens=False)) for p in prompts]
    chats = [(source, text) for source, text in texts if source != "text"]
    assert len(texts) - len(chats) == 6
    assert {source for source, _ in chats} == set(OPENINGS)
    for source, text in chats:
        assert text.startswith(before)
        assert text.endswith(after)
        inner = text[len(before) : -len(after)]
        assert any(s == source and inner.startswith(o) for s, o in openings)
    again = sample_prompts(sampler, tokenizer, config)
    assert again == prompts


def test_collect_answers_files_greedily_and_sampled(sampler, tokenizer):
    config = CollectConfig(file_samples=2, max_answer_tokens=5)
    corpus = collect(sampler, tokenizer, config, [("math", "1+1?"), ("code", "x")])
    assert len(corpus) == 6
    assert corpus.source_names == ("code", "math")
    texts = {tokenizer.decode(corpus.sequence(i)[: corpus.prompt_lens[i]]) for i in range(6)}
    assert texts == {"user: 1+1?bot:", "user: xbot:"}
    assert len({corpus.sequence(i).tobytes() for i in range(6)}) > 4


def test_a_target_without_a_chat_template_continues_plain_text(sampler, tokenizer):
    plain = Tokenizer(tokenizer.backend, special_tokens={"eos_token": "<e>"})
    prompts = sample_prompts(sampler, plain, CollectConfig(self_sample=6))
    assert {p.source for p in prompts} == {"text"}
    assert plain.decode(file_prompts(plain, [("a", "hello")])[0].ids) == "hello"


def test_nothing_to_train_on_is_an_error(sampler, tokenizer):
    with pytest.raises(ValueError, match="--self-sample"):
        collect(sampler, tokenizer, CollectConfig())


def test_prompt_files(tmp_path):
    path = tmp_path / "some.jsonl"
    lines = [{"category": "math", "turns": ["a", "b"]}, {"turns": ["c"]}]
    path.write_text("\n\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    assert read_prompts(path) == [("math", "a"), ("some", "c")]
    for bad in ('{"turns": []}', '{"turn": ["a"]}', "[1]", "{", '{"turns": [1]}'):
        path.write_text('{"turns": ["fine"]}\n' + bad, encoding="utf-8")
        with pytest.raises(ValueError, match=r"some\.jsonl:2"):
            read_prompts(path)


def test_unfinished_turns_are_cut_at_a_sentence():
    assert cut_at_sentence(" is blue. Why do") == " is blue."
    assert cut_at_sentence("one\ntwo. three? fo") == "one\ntwo. three?"
    assert cut_at_sentence(" no end here ") == " no end here"


def test_openings_have_no_empty_slots():
    rng = np.random.default_rng(0)
    for template in (*TEXT_OPENINGS, *(t for group in OPENINGS.values() for t in group)):
        text = fill(template, rng)
        assert "{" not in text
        assert "  " not in text.strip()
    assert [topic for topic, _ in user_openings(16, 0)] == [*OPENINGS, *OPENINGS]
    assert len(set(text_openings(50, 0))) > 30


@pytest.mark.parametrize(
    "change", [{"text_fraction": 1.5}, {"sampled_fraction": -0.1}, {"answer_temperature": -1.0}]
)
def test_bad_settings_name_the_knob(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        CollectConfig(**change)
