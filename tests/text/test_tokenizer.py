"""Tokenizers from directories and GGUF files, chat templates, incremental decoding."""

import copy
import json
import math
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from specjax.checkpoints import open_target
from specjax.checkpoints.gguf import GGUFFile
from specjax.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from specjax.testing.files import write_tokenizer
from specjax.text import chat_template
from specjax.text.completion import CompletionText, byte_alphabet
from specjax.text.tokenizer import LONG_TEXT, IncrementalDecoder, Tokenizer

from ..support.checkpoint_files import sentencepiece, write_gguf

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def smollm2() -> Tokenizer:
    return open_target("smollm2-135m").load_tokenizer()


def byte_fallback_tokenizer() -> Tokenizer:
    """A SentencePiece-like tokenizer: word marks, and bytes for unknown characters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "▁a", "▁b", "c"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(
        vocab=vocab,
        merges=[("▁", "a"), ("▁", "b")],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def save(path: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    write_tokenizer(path, tokenizer)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return path


def test_embedded_tokenizer() -> None:
    tokenizer = smollm2()
    # ids that transformers returns for the same file
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.encode("  12") == [216, 216, 33, 34]
    assert tokenizer.encode("<|im_start|>user") == [1, 4093]
    ids = [tokenizer.backend.token_to_id(token) for token in tokenizer.special_tokens.values()]
    assert dict(zip(tokenizer.special_tokens, ids, strict=True)) == {
        "bos_token": 1,
        "eos_token": 2,
        "unk_token": 0,
        "pad_token": 2,
    }
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.decode([1, 19556, 2]) == "Hello"
    assert (
        tokenizer.decode([1, 19556, 2], skip_special_tokens=False) == "<|im_start|>Hello<|im_end|>"
    )


def test_embedded_chat_template() -> None:
    tokenizer = smollm2()
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    assert tokenizer.apply_chat_template(turns, add_generation_prompt=False) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\nb<|im_end|>\n"
    )


@given(st.text(st.characters(max_codepoint=0x1FFFF, exclude_categories=["Cs", "Cc"])))
@settings(max_examples=80)
def test_byte_level_text_survives(text: str) -> None:
    """The vocabulary lacks six control characters and the lead bytes of unused planes."""
    tokenizer = smollm2()
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("adds_special", [True, False])
@pytest.mark.parametrize("length", [LONG_TEXT - 1, LONG_TEXT, 3 * LONG_TEXT])
def test_long_texts_have_the_same_ids(length: int, adds_special: bool) -> None:
    text = ("".join(map(chr, range(32, 500))) * (length // 400 + 1))[:length]
    expected = smollm2().backend.encode(text, add_special_tokens=adds_special).ids
    assert smollm2().encode(text, adds_special) == expected


def test_negative_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="token id -1"):
        smollm2().decode([5, -1])


def test_directory_round_trip(tmp_path: Path) -> None:
    original = smollm2()
    write_tokenizer(tmp_path, original)
    restored = Tokenizer.from_pretrained(tmp_path)
    for text in ("Hello  world 123", "<|im_end|> é 日本 \n\n x", ""):
        assert restored.encode(text) == original.encode(text)
    assert restored.special_tokens == original.special_tokens
    assert restored.eos_token_ids == original.eos_token_ids
    assert restored.chat_template == original.chat_template


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ["a"]),
        ({"add_bos_token": True}, ["<s>", "a"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>", "a", "</s>"]),
        ({"add_bos_token": False}, ["a"]),
    ],
)
def test_added_special_tokens(tmp_path: Path, config: dict[str, bool], expected: list[str]) -> None:
    tokenizer = Tokenizer.from_pretrained(save(tmp_path, byte_fallback_tokenizer(), **config))
    ids = tokenizer.encode("a")
    assert [str(tokenizer.backend.id_to_token(i)).removeprefix("▁") for i in ids] == expected
    without = tokenizer.encode("a", add_special_tokens=False)
    assert len(without) == 1


def test_special_tokens_as_objects_and_in_their_own_file(tmp_path: Path) -> None:
    save(tmp_path, byte_fallback_tokenizer(), eos_token={"content": "b", "lstrip": False})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "c"}))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_ids == (tokenizer.backend.token_to_id("b"),)
    assert tokenizer.special_tokens["pad_token"] == "c"


def test_tokens_that_only_the_configuration_has(tmp_path: Path) -> None:
    tokenizer = byte_fallback_tokenizer()
    size = tokenizer.vocab_size
    added = {str(size): {"content": "<tool>", "special": True, "normalized": False}}
    save(tmp_path, tokenizer, added_tokens_decoder=added, pad_token="<pad>")
    restored = Tokenizer.from_pretrained(tmp_path)
    assert restored.encode("<tool>") == [size]
    assert restored.backend.token_to_id(restored.special_tokens["pad_token"]) == size + 1
    assert restored.decode([size, *restored.encode("c")]) == "c"


@pytest.mark.parametrize("place", ["jinja", "json", "config", "named"])
def test_sources_of_the_chat_template(tmp_path: Path, place: str) -> None:
    tokenizer = byte_fallback_tokenizer()
    config: dict[str, Any] = {}
    if place == "config":
        config["chat_template"] = CHATML
    if place == "named":
        other = {"name": "tool_use", "template": "no"}
        config["chat_template"] = [other, {"name": "default", "template": CHATML}]
    save(tmp_path, tokenizer, **config)
    if place == "jinja":
        (tmp_path / "chat_template.jinja").write_text(CHATML)
    if place == "json":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    text = Tokenizer.from_pretrained(tmp_path).apply_chat_template(
        [{"role": "user", "content": "x"}]
    )
    assert text == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def render(template: str, **variables: Any) -> str:
    tokenizer = byte_fallback_tokenizer()
    tokenizer.chat_template = template
    return tokenizer.apply_chat_template([{"role": "user", "content": "x"}], **variables)


def test_template_features() -> None:
    assert render("{{ bos_token }}|{{ eos_token }}") == "<s>|</s>"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert render("{{ strftime_now('%Y') | length }}") == "4"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
    assert render("  {% if true %}\na\n{% endif %}\nb") == "a\nb"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "x"
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{{ tools is none }}") == "True"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"


def test_template_refusals() -> None:
    with pytest.raises(ValueError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="refused the conversation"):
        render("{{ messages.append(1) }}")
    with pytest.raises(ValueError, match="refused the conversation"):
        render("{{ ''.__class__.__mro__ }}{{ ().__class__.__bases__[0].__subclasses__() }}")
    with pytest.raises(ValueError, match="refused the conversation"):
        render("{% if %}")
    tokenizer = byte_fallback_tokenizer()
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    tokenizer.chat_template = CHATML
    for messages in (["hi"], [{"content": "x"}], [{"role": "user", "content": "x"}, 3]):
        with pytest.raises(ValueError, match=r"messages\[\d\]"):
            tokenizer.apply_chat_template(messages)
    with pytest.raises(ValueError, match=r"messages=.* is empty"):
        tokenizer.apply_chat_template([])
    tokenizer.chat_template = "{{ '<user>' + messages[0].content }}"
    for content in (None, 5, [{"type": "text", "text": "x"}]):
        with pytest.raises(ValueError, match=r"refused the conversation: .* str"):
            tokenizer.apply_chat_template([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // 0 }}",
        "{{ {}.get('a').b.c }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "{{ [].pop() }}",
        "{{ 'abc'.encode('no such codec') }}",
    ],
)
def test_failing_templates(template: str) -> None:
    with pytest.raises(ValueError, match="the chat template refused the conversation"):
        render(template)


LOOP = "{% for i in range(99999) %}"


@pytest.mark.parametrize(
    "template",
    [
        LOOP * 3 + "{% endfor %}" * 3,
        LOOP * 3 + "x" * 1000 + "{% endfor %}" * 3,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
        "{% for i in range(9999) recursive %}{{ loop(range(9999)) }}{% endfor %}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ 10 ** (10 ** 9) }}",
        "{{ [1] * 10 ** 9 }}",
        "{{ 'a'.ljust(10 ** 12) }}",
        "{{ 'a' | center(1000000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{% set x = 'a' %}" + "{% set x = x + x %}" * 40,
        "{% set x = 'a' %}" + "{% set x = x ~ x %}" * 40,
        "{% set x = 'a' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40,
        "{% set x = [1] %}" + "{% set x = [x, x] %}" * 40 + "{{ x }}",
        "{% set x = 7 %}" + "{% set x = namespace(a=x, b=x) %}" * 40 + "{{ x | length }}",
        "{% set x = 'ab' * 1000000 %}{{ x.replace('a', x) }}",
        "{% set x = 'ab' * 1000000 %}{{ range(9999) | map(attribute='no', default=x) | join }}",
        "{% set x = 9 %}" + "{% set x = x * x %}" * 60,
        "{{ range(99999) | map('center', 100000) | list | length }}",
        "{{ lipsum(n=10000000) }}",
    ],
)
def test_endless_templates(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also outside the main thread, and with limited memory."""
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.3)
    before = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(render, template)
        with pytest.raises(ValueError, match="the chat template refused the conversation"):
            future.result()
    assert time.monotonic() - before < 5


@pytest.mark.parametrize("size", [1, 2**20])
def test_a_stopped_process_is_replaced(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it stops before it has read the conversation or before it has answered."""
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(chat_template, "GRACE_SECONDS", 0.1)
    os.kill(chat_template.start_renderer().pid, signal.SIGSTOP)
    tokenizer = Tokenizer(
        byte_fallback_tokenizer().backend, chat_template="{{ messages[0].content }}"
    )
    messages = [{"role": "user", "content": "x" * size}]
    before = time.monotonic()
    with pytest.raises(ValueError, match="rendering takes more than"):
        tokenizer.apply_chat_template(messages)
    assert time.monotonic() - before < 5
    monkeypatch.undo()
    assert tokenizer.apply_chat_template(messages) == "x" * size


@pytest.mark.slow
def test_one_conversation_of_a_stopped_process_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting conversations are rendered by the next process."""
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 2.0)
    os.kill(chat_template.start_renderer().pid, signal.SIGSTOP)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(render, "text") for _ in range(4)]
        errors = [answer.exception() for answer in answers]
    assert [answer.result() for answer in answers if answer.exception() is None] == ["text"] * 3
    assert sum(isinstance(error, ValueError) for error in errors) == 1


def test_long_conversations_render() -> None:
    messages = [{"role": "user", "content": "word " * 1000}] * 200
    tokenizer = byte_fallback_tokenizer()
    for template in (
        CHATML,
        "{% set ns = namespace(text='') %}{% for m in messages %}{% if not loop.last %}"
        "{% set ns.text = ns.text + m.content | trim %}{% endif %}{% endfor %}{{ ns.text }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') "
        "| join('\n') }}{{ messages | tojson(indent=2) }}",
        "{% for m in messages[::-1] %}{{ loop.index0 }}/{{ loop.length }}"
        "{{ m.content.replace('w', 'ww').split(' ') | last }}{% endfor %}",
    ):
        tokenizer.chat_template = template
        assert len(tokenizer.apply_chat_template(messages)) > 1000


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="surrogates not allowed"):
        byte_fallback_tokenizer().encode("a\udcff")


def test_messages_are_not_changed() -> None:
    tokenizer = byte_fallback_tokenizer()
    tokenizer.chat_template = "{{ messages[0].update({'content': 'y'}) }}"
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match="refused"):
        tokenizer.apply_chat_template(messages)
    assert messages == [{"role": "user", "content": "x"}]


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing.*skip_tokenizer_init"):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"library cannot read .*tokenizer\.json"):
        Tokenizer.from_pretrained(tmp_path)


def test_unknown_special_token() -> None:
    with pytest.raises(ValueError, match="eos_token='<none>'"):
        Tokenizer(byte_fallback_tokenizer().backend, special_tokens={"eos_token": "<none>"})


def write_vocabulary(path: Path, **changes: Any) -> GGUFFile:
    """A GGUF file with a byte-level vocabulary of single bytes, a merge and four marked tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "ab", "<|end|>", "<think>", "日", "<|turn|>"]
    kinds = [1] * (len(letters) + 1) + [3, 4, 3, 3]
    metadata: dict[str, Any] = {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": tokens,
        "ggml.token_type": kinds,
        "ggml.merges": ["a b"],
        "ggml.eos_token_id": tokens.index("<|end|>"),
        "ggml.eot_token_id": tokens.index("<|turn|>"),
        "ggml.bos_token_id": tokens.index("<|turn|>"),
        "ggml.add_bos_token": False,
    } | changes
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        name = f"tokenizer.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def test_gguf_vocabulary(tmp_path: Path) -> None:
    file = write_vocabulary(tmp_path / "t.gguf")
    tokens = file.metadata.get("tokenizer.ggml.tokens", list[str])
    tokenizer = tokenizer_from_gguf(file)
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.encode("ab<|end|>") == [tokens.index("ab"), tokens.index("<|end|>")]
    think = tokens.index("<think>")
    assert tokenizer.encode("<think>") == [think]
    # user-defined tokens are text, control tokens are not
    assert tokenizer.decode([think, tokens.index("<|end|>")]) == "<think>"
    # a control token outside the byte alphabet is stored by its bytes and gets no second id
    assert tokenizer.decode([tokens.index("日")]) == "日"
    assert tokenizer.eos_token_ids == (tokens.index("<|end|>"), tokens.index("<|turn|>"))


@pytest.mark.parametrize(
    ("pre", "begins"),
    [
        *dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "pixtral", "tekken"), True).items(),
        *dict.fromkeys(("gpt-2", "qwen2", "smollm", "dbrx", "glm4"), False).items(),
    ],
)
def test_gguf_adds_bos_if_configured(tmp_path: Path, pre: str, begins: bool) -> None:
    """Without the flag, the models whose split is named decide."""
    for flag, is_added in {True: True, False: False, None: begins}.items():
        changes = {"ggml.pre": pre, "ggml.add_bos_token": flag}
        file = write_vocabulary(tmp_path / "t.gguf", **changes)
        tokenizer = tokenizer_from_gguf(file)
        bos = tokenizer.backend.token_to_id(tokenizer.special_tokens["bos_token"])
        ids = tokenizer.encode("a", add_special_tokens=False)
        assert tokenizer.encode("a") == [bos] * is_added + ids


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's 1234!", ["it", "'s", " 1234", "!"]),
        ("smollm", "it's 1234!", ["it", "'s", " 1234", "!"]),
        ("llama-bpe", "IT'S 1234!\n", ["IT", "'S", " ", "123", "4", "!\n"]),
        ("qwen2", "IT'S 12!\n", ["IT", "'S", " ", "1", "2", "!\n"]),
        ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
        ("gpt-4o", "helloWorld'S 1234", ["hello", "World'S", " ", "123", "4"]),
        ("refact", "it's a 12!", ["it", "'s", " a", " ", "1", "2", "!"]),
        ("glm4", "IT'S 1234!\n", ["IT", "'S", " ", "123", "4", "!\n"]),
    ],
)
def test_gguf_splits(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    tokenizer = tokenizer_from_gguf(write_vocabulary(tmp_path / "t.gguf", **{"ggml.pre": pre}))
    found = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in found] == pieces


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml.model": "t5"}, r"tokenizer\.ggml\.model='t5'.*'gpt2'.*skip_tokenizer_init"),
        ({"ggml.model": "llama"}, r"tokenizer\.ggml\.pre='gpt-2'.*'default'"),
        ({"ggml.model": None}, r"tokenizer\.ggml\.model=None"),
        ({"ggml.pre": "new"}, r"tokenizer\.ggml\.pre='new'.*'llama-bpe'"),
        ({"ggml.merges": None}, r"has no tokenizer\.ggml\.merges"),
        ({"ggml.merges": ["a ÿÿ"]}, "invalid BPE vocabulary"),
        ({"ggml.eos_token_id": 100_000}, r"eos_token_id=100000 is outside"),
        ({"ggml.eot_token_id": 261}, r"eot_token_id=261 is outside the vocabulary of 261 tokens"),
        ({"ggml.token_type": [1, 3]}, r"token_type=\[1, 3\] must have 261 values"),
        ({"ggml.token_type": [1] * 260 + [7]}, r"token_type\[260\]=7 must be 1 to 6"),
        ({"ggml.tokens": ["a", "b", "ab", "a"]}, r"tokens\[3\]='a' repeats tokens\[0\]"),
    ],
)
def test_gguf_refusals(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = write_vocabulary(tmp_path / "t.gguf", **changes)
    with pytest.raises(ValueError, match=message):
        tokenizer_from_gguf(file)


def merged(text: str, keys: dict[str, Any]) -> list[int]:
    """Ids of a text without special tokens: the neighbours of the best piece are joined first."""
    triples = zip(keys["ggml.tokens"], keys["ggml.scores"], keys["ggml.token_type"], strict=True)
    scores = {token: score for token, score, kind in triples if kind == 1}
    symbols = list(text.replace(" ", "\u2581"))
    while True:
        pairs = [a + b for a, b in pairwise(symbols)]
        if not (known := [pair for pair in pairs if pair in scores]):
            break
        i = pairs.index(max(known, key=scores.__getitem__))
        symbols[i : i + 2] = [pairs[i]]
    ids = keys["ggml.tokens"].index
    spelled = [[x] if x in scores else [f"<0x{byte:02X}>" for byte in x.encode()] for x in symbols]
    return [ids(piece) for pieces in spelled for piece in pieces]


def open_pieces(path: Path, arch: str = "llama", **changes: Any) -> Tokenizer:
    keys = {k: v for k, v in (sentencepiece() | changes).items() if v is not None}
    return tokenizer_from_gguf(GGUFFile(write_gguf(path, {}, arch=arch, tokenizer=keys)))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("pieces") / "t.gguf"
    return open_pieces(path, **{"ggml.add_space_prefix": False})


@settings(max_examples=80, deadline=None)
@given(text=st.text("theinragd1\u00e9\u65e5 ", max_size=30).filter(lambda x: "  " not in x))
def test_sentencepiece_merges_the_best_pieces_first(pieces: Tokenizer, text: str) -> None:
    assert pieces.encode(text, add_special_tokens=False) == merged(text, sentencepiece())
    assert pieces.decode(pieces.encode(text)) == text


def test_sentencepiece_tokens(tmp_path: Path, pieces: Tokenizer) -> None:
    keys = sentencepiece()

    def tokens(text: str, tokenizer: Tokenizer = pieces) -> list[str]:
        return [keys["ggml.tokens"][i] for i in tokenizer.encode(text)]

    # files without the rules begin texts with BOS and a space
    spaced = open_pieces(tmp_path / "t.gguf")
    assert tokens("the<b>the", spaced) == ["<s>", "\u2581the", "<b>", "the"]
    assert tokens(" the", spaced) == ["<s>", "\u2581the"]
    assert spaced.decode(spaced.encode("the<b> the")) == "the<b> the"
    assert tokens("the</s>") == ["<s>", "the", "</s>"]
    # user-defined spaces are merged first, and other user-defined tokens are matched whole
    assert tokens("e   the\n\n\n") == ["<s>", "e", "   ", "the", "\n\n", "<0x0A>"]
    rules = {"ggml.add_bos_token": False, "ggml.add_eos_token": True}
    assert tokens("an", open_pieces(tmp_path / "t.gguf", **rules)) == ["\u2581a", "n", "</s>"]
    # Phi-3 has a space before every part, and removes lines after its own tokens
    phi = open_pieces(tmp_path / "t.gguf", "phi3")
    assert tokens("<|user|>\nan", phi) == ["<s>", "<|user|>", "\u2581a", "n"]
    assert tokens(" the", phi) == ["<s>", "  ", "the"]
    # early files spell user-defined spaces like pieces
    marks = [x.replace(" ", "\u2581") for x in keys["ggml.tokens"]]
    spelled = open_pieces(tmp_path / "t.gguf", **{"ggml.tokens": marks})
    assert tokens("e   the", spelled) == ["<s>", "\u2581", "e", "   ", "the"]
    # files may leave out the ids of special tokens
    absent = dict.fromkeys(f"ggml.{x}_token_id" for x in ("bos", "eos", "unknown"))
    named = open_pieces(tmp_path / "t.gguf", **absent)
    assert (named.special_tokens, named.eos_token_ids) == (spaced.special_tokens, (2,))
    assert tokens("the\u1234", named) == tokens("the\u1234", spaced)
    # tokens without scores have the order of the file
    same = {"ggml.scores": [-1000.0] * len(keys["ggml.tokens"]), "ggml.add_space_prefix": False}
    assert tokens("the there", open_pieces(tmp_path / "t.gguf", **same)) == tokens("the there")


def letters_only(lengths: Sequence[int]) -> dict[str, Any]:
    """Keys of a vocabulary of one letter, repeated."""
    count = len(lengths)
    keys = {
        "tokens": ["a" * n for n in lengths],
        "scores": [0.0] * count,
        "token_type": [1] * count,
    }
    return {f"ggml.{key}": value for key, value in keys.items()} | {"ggml.eos_token_id": 0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml.scores": None}, r"has no tokenizer\.ggml\.scores"),
        ({"ggml.scores": [0.0]}, r"tokenizer\.ggml\.scores=.* must have \d+ values"),
        ({"ggml.token_type": [1]}, r"tokenizer\.ggml\.token_type=.* must have \d+ values"),
        (letters_only([1, 2]) | {"ggml.scores": [0.0, math.nan]}, r"ggml\.scores\[1\]=nan must"),
        (letters_only([1, 2]) | {"ggml.scores": [-math.inf, 0.0]}, r"ggml\.scores\[0\]=-inf must"),
        (letters_only([1, 2]) | {"ggml.token_type": [0, 1]}, r"token_type\[0\]=0 must be 1 to 6"),
        (letters_only([1, 2, 1]), r"tokens\[2\]='a' repeats tokens\[0\]"),
        # 300 * 301 / 2 merges would have 9 million characters
        (
            letters_only(range(1, 301)),
            r"tokenizer\.ggml\.tokens: 8\d{6} characters of merges .* 8388608",
        ),
        (letters_only([1, 2, 2**14 + 1]), r"tokens: squared lengths 268468230 .* 268435456"),
    ],
)
def test_sentencepiece_refusals(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_pieces(tmp_path / "t.gguf", **changes)


def check_stream(tokenizer: Tokenizer, ids: list[int], *, skip: bool) -> None:
    """Pieces join to the whole text, and no piece ends inside a character."""
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    pieces = [decoder.push([i]) for i in ids]
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    assert "".join(pieces) + decoder.flush() == tokenizer.decode(ids, skip_special_tokens=skip)
    grouped = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    halves = grouped.push(ids[: len(ids) // 2]) + grouped.push(ids[len(ids) // 2 :])
    assert halves == "".join(pieces)


@given(st.text(), st.booleans())
@settings(max_examples=80)
def test_stream_of_text(text: str, skip: bool) -> None:
    check_stream(smollm2(), smollm2().encode(text), skip=skip)


@given(st.lists(st.integers(0, 49151), max_size=40), st.booleans())
@settings(max_examples=80)
def test_stream_of_any_tokens(ids: list[int], skip: bool) -> None:
    """Also if tokens are not valid UTF-8."""
    check_stream(smollm2(), ids, skip=skip)


@given(st.text(alphabet="ab c日é🎉\n"), st.booleans())
@settings(max_examples=80)
def test_stream_with_byte_fallback(text: str, skip: bool) -> None:
    tokenizer = byte_fallback_tokenizer()
    check_stream(tokenizer, tokenizer.encode(text), skip=skip)


def test_stream_holds_back_half_a_character() -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = tokenizer.encode("a日b", add_special_tokens=False)
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push([i]) for i in ids]
    assert "".join(pieces) == "a日b"
    assert pieces.count("") == 2
    decoder = IncrementalDecoder(tokenizer)
    assert decoder.push(ids[:2]) == "a"
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_stream_keeps_spaces_after_skipped_tokens() -> None:
    tokenizer = byte_fallback_tokenizer()
    one, two = tokenizer.encode("a b", add_special_tokens=False)
    eos = tokenizer.eos_token_ids[0]
    assert eos is not None
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push([i]) for i in (eos, one, eos, two)] == ["", "a", "", " b"]


FLAGS = [None, False, True]


@pytest.mark.parametrize("own", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("bos", FLAGS)
@pytest.mark.parametrize("eos", FLAGS)
def test_absent_flags_leave_the_post_processor(
    tmp_path: Path, own: str, bos: bool | None, eos: bool | None
) -> None:
    """transformers writes only flags that differ from the defaults of the tokenizer's class."""
    original = byte_fallback_tokenizer()
    ids = [(token, original.backend.token_to_id(token)) for token in ("<s>", "</s>")]
    template = TemplateProcessing(single=own, pair=None, special_tokens=ids)
    original.backend.post_processor = template
    flags = {"add_bos_token": bos, "add_eos_token": eos}
    stated = {name: flag for name, flag in flags.items() if flag is not None}
    tokenizer = Tokenizer.from_pretrained(save(tmp_path, original, **stated))
    first = own.startswith("<s>") if bos is None else bos
    last = own.endswith("</s>") if eos is None else eos
    middle = tokenizer.encode("ab", add_special_tokens=False)
    assert len(middle) == 2
    assert tokenizer.encode("ab") == [1] * first + middle + [2] * last


@pytest.mark.parametrize("bos", ["x:1", "$A", ":", "a b", "$"])
def test_any_text_may_be_a_special_token(tmp_path: Path, bos: str) -> None:
    path = save(tmp_path, byte_fallback_tokenizer(), bos_token=bos, add_bos_token=True)
    tokenizer = Tokenizer.from_pretrained(path)
    middle = tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.encode("ab") == [tokenizer.backend.token_to_id(bos), *middle]


def test_an_empty_special_token_is_refused(tmp_path: Path) -> None:
    save(tmp_path, byte_fallback_tokenizer(), bos_token="", add_bos_token=True)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: bos_token=''"):
        Tokenizer.from_pretrained(tmp_path)


SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
PANICS: dict[str, dict[str, Any]] = {
    "charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "charsmap that is read": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}
    },
    "length 0": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "strip": {"decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 10**9}},
    "regex": {"pre_tokenizer": SPLIT | {"pattern": {"Regex": "(a+)+$"}}},
    "regex of digits": {"pre_tokenizer": SPLIT | {"pattern": {"Regex": r"(\d|[0-9]x?)*$"}}},
}


def panicking(path: Path, name: str) -> Path:
    save(path, byte_fallback_tokenizer())
    body = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps(body | PANICS[name]))
    return path


@pytest.mark.parametrize("name", PANICS)
def test_panics_of_the_library_are_refused_with_the_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.from_pretrained(panicking(tmp_path, name))


def test_a_panic_ends_one_call(tmp_path: Path) -> None:
    """A text that the check at load does not have."""
    body = SPLIT | {"pattern": {"Regex": "(q+)+$"}}
    save(tmp_path, byte_fallback_tokenizer())
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pre_tokenizer": body}))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    for text in "q" * 40 + "!", "q" * LONG_TEXT + "!":
        with pytest.raises(ValueError, match=r"encode.* fails: .*retry-limit"):
            tokenizer.encode(text)
    assert len(tokenizer.encode("ab")) == 2
    tokenizer.backend.decoder = decoders.Strip("b", 0, 10**9)
    ids = [tokenizer.backend.token_to_id("b")]
    with pytest.raises(ValueError, match="decode fails: index out of bounds"):
        tokenizer.decode(ids)
    with pytest.raises(ValueError, match="decode fails"):
        IncrementalDecoder(tokenizer).push(ids)


ALPHABET = byte_alphabet()


def byte_level_tokenizer() -> Tokenizer:
    """One token per byte, and one for each pair of a few bytes."""
    letters = {byte: letter for letter, byte in ALPHABET.items()}
    pairs = [letters[a] + letters[b] for a in (0x41, 0xE4, 0xB8) for b in (0x41, 0xB8, 0xE4, 0xAD)]
    pieces = [letters[byte] for byte in range(256)] + pairs + ["<|x|>"]
    model = models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[])
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|x|>"])
    return Tokenizer(backend)


FALLBACK, BYTE_LEVEL = byte_fallback_tokenizer(), byte_level_tokenizer()
# bytes of which some begin, continue or end characters, more often than others
BYTES = st.one_of(
    st.integers(0, 255), st.sampled_from([*"a日🎉é\ufffd".encode(), 0xE4, 0xF0, 0x80])
)


def bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    piece = tokenizer.backend.id_to_token(token) or ""
    if tokenizer is BYTE_LEVEL:
        return b"" if piece == "<|x|>" else bytes(ALPHABET[letter] for letter in piece)
    if piece.startswith("<0x"):
        return bytes([int(piece[3:5], 16)])
    return b"" if piece in ("<s>", "</s>") else piece.replace("▁", " ").encode()


@st.composite
def cut_tokens(draw: st.DrawFn) -> tuple[Tokenizer, list[list[int]]]:
    tokenizer = draw(st.sampled_from([FALLBACK, BYTE_LEVEL]))
    others = st.integers(256 + 3 * (tokenizer is FALLBACK), tokenizer.vocab_size - 1)
    byte = BYTES.map(lambda byte: byte + 3 * (tokenizer is FALLBACK))
    special = st.just(1 if tokenizer is FALLBACK else tokenizer.vocab_size - 1)
    token = st.one_of(byte, byte, byte, others, special)
    return tokenizer, draw(st.lists(st.lists(token, max_size=5), max_size=12))


@given(cut_tokens(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_text_of_a_prefix_does_not_depend_on_cuts(
    case: tuple[Tokenizer, list[list[int]]], has_stop: bool
) -> None:
    """Valid bytes stay, and others become U+FFFD as in Python's decoder."""
    tokenizer, pieces = case
    done: list[int] = []
    decoder = IncrementalDecoder(tokenizer)
    completion = CompletionText(IncrementalDecoder(tokenizer), ["never"] * has_stop)
    streamed = ""
    for piece in pieces:
        done += piece
        data = b"".join(bytes_of(tokenizer, token) for token in done)
        expected = data.decode(errors="replace")
        if tokenizer is FALLBACK:
            expected = expected.removeprefix(" ")
        assert tokenizer.decode(done) == expected
        streamed += decoder.push(piece)
        assert streamed + copy.copy(decoder).flush() == expected
        assert completion.add(piece, flush=False) == (len(piece), None)
        if has_stop or len(piece) % 2:
            assert completion.text == streamed
    completion.add([], flush=True)
    assert completion.text == tokenizer.decode(done)


@pytest.mark.parametrize("tokenizer", [FALLBACK, BYTE_LEVEL], ids=["fallback", "byte-level"])
def test_valid_bytes_next_to_invalid_ones_stay(tokenizer: Tokenizer) -> None:
    first = tokenizer.backend.token_to_id("<0x00>") or 0
    ids = [byte + first for byte in b"\n\xe4z"]
    assert tokenizer.decode(ids) == "\n\ufffdz"
    assert tokenizer.decode([byte + first for byte in b"\xe4\xb8\n\x80\x80"]) == "\ufffd\n" + 2 * (
        "\ufffd"
    )


def test_time_for_invalid_bytes_is_linear() -> None:
    """The decoder sees few tokens at a time, and keeps the rest of the text."""
    decoder = IncrementalDecoder(FALLBACK)
    decode, longest = decoder._decode, 0

    def counted(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    decoder._decode = counted  # type: ignore[assignment]
    assert [decoder.push([3 + 0x80]) for _ in range(300)] == [""] * 300
    assert longest < 8
    assert decoder.push([3 + 0x41]) == "\ufffd" * 300 + "A"
