"""Prompts from files and prompts sampled from the target."""

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from specjax.config import ModelConfig
from specjax.text.tokenizer import Tokenizer
from specjax.training import collect as collecting
from specjax.training.collect import (
    CollectConfig,
    chat_frame,
    collect,
    cut_at_sentence,
    file_prompts,
    fill_slots,
    opening_tables,
    openings,
    read_prompts,
    sample_prompts,
)
from specjax.training.generate import Sampler

from ..support.model_files import write_model

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
def sampler(tokenizer, tmp_path_factory) -> Iterator[Sampler]:
    path = tmp_path_factory.mktemp("target")
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
    write_model(path, model)
    sizes = {"num_rows": 8, "prefill_rows": 8, "max_prompt_len": 256, "max_new_tokens": 8}
    sampler = Sampler.open(str(path), "float32", stop_ids=tokenizer.eos_token_ids, **sizes)
    with sampler.engine:
        yield sampler


@pytest.mark.slow
def test_sampled_prompts_are_chat_prompts_that_begin_with_their_openings(
    sampler, tokenizer, monkeypatch
):
    monkeypatch.setattr(collecting, "TEXT_FRACTION", 0.25)
    config = CollectConfig(self_sample=24, max_user_tokens=6)
    prompts = sample_prompts(sampler, tokenizer, config)
    before, after = chat_frame(tokenizer)
    assert (before, after) == ("<s>user: ", "<e>bot:")
    begun = set(openings(opening_tables()["topics"], 18, 0))
    texts = [(p.source, tokenizer.decode(p.ids, skip_special_tokens=False)) for p in prompts]
    chats = [(source, text) for source, text in texts if source != "text"]
    assert len(texts) - len(chats) == 6
    assert {source for source, _ in chats} == set(opening_tables()["topics"])
    for source, text in chats:
        assert text.startswith(before)
        assert text.endswith(after)
        inner = text[len(before) : -len(after)]
        assert any(s == source and inner.startswith(o) for s, o in begun)
    again = sample_prompts(sampler, tokenizer, config)
    assert again == prompts


@pytest.mark.slow
def test_openings_that_are_too_long_are_skipped(sampler, tokenizer):
    config, short = (
        CollectConfig(self_sample=24, max_user_tokens=2),
        replace(sampler, max_prompt_len=60),
    )
    lengths = [len(prompt.ids) for prompt in sample_prompts(short, tokenizer, config)]
    assert lengths
    assert max(lengths) <= 60
    assert sample_prompts(replace(sampler, max_prompt_len=1), tokenizer, config) == []


@pytest.mark.slow
def test_collect_answers_files_greedily_and_sampled(sampler, tokenizer):
    config = CollectConfig(file_samples=2, max_answer_tokens=5)
    corpus = collect(sampler, tokenizer, config, [("math", "1+1?"), ("code", "x")])
    assert len(corpus) == 6
    assert {example.source for example in corpus} == {"code", "math"}
    texts = {tokenizer.decode(x.tokens[: x.prompt_len]) for x in corpus}
    assert texts == {"user: 1+1?bot:", "user: xbot:"}
    assert len({example.tokens.tobytes() for example in corpus}) > 4


def test_a_target_without_a_chat_template_continues_plain_text(sampler, tokenizer):
    plain = Tokenizer(tokenizer.backend, special_tokens={"eos_token": "<e>"})
    prompts = sample_prompts(sampler, plain, CollectConfig(self_sample=6))
    assert {p.source for p in prompts} == {"text"}
    entries = [("a", "hello"), ("b", "too long")]
    (prompt,) = file_prompts(plain, entries, 5)
    assert plain.decode(prompt.ids) == "hello"


def test_prompt_files(tmp_path):
    path = tmp_path / "some.jsonl"
    lines = [{"category": "math", "turns": ["a", "b"]}, {"turns": ["c"]}]
    path.write_text("\n\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    assert read_prompts(path) == [("math", "a"), ("some", "c")]
    separators = "a\u2028b\u2029c\u0085d"
    path.write_bytes(f'{{"turns": ["{separators}"]}}\r\n{{"turns": ["e"]}}\n'.encode())
    assert read_prompts(path) == [("some", separators), ("some", "e")]
    for bad in ('{"turns": []}', '{"turn": ["a"]}', "[1]", "{", '{"turns": [1]}', "[" * 200_000):
        path.write_text('{"turns": ["fine"]}\n' + bad, encoding="utf-8")
        with pytest.raises(ValueError, match=r"some\.jsonl, line 2: "):
            read_prompts(path)


def test_unfinished_turns_are_cut_at_a_sentence():
    assert cut_at_sentence(" is blue. Why do") == " is blue."
    assert cut_at_sentence("one\ntwo. three? fo") == "one\ntwo. three?"
    assert cut_at_sentence(" no end here ") == " no end here"


def test_openings_have_no_empty_slots():
    rng = np.random.default_rng(0)
    topics = opening_tables()["topics"]
    for template in (*opening_tables()["text"], *(t for group in topics.values() for t in group)):
        text = fill_slots(template, rng)
        assert "{" not in text
        assert "  " not in text.strip()
    assert [topic for topic, _ in openings(topics, 16, 0)] == [*topics, *topics]
    assert len(set(openings({"text": opening_tables()["text"]}, 50, 0))) > 30
