"""Chats in the formats that families publish: markers, BOS, and tokens that end a turn."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from specjax.text.parts import TextParts, Tools
from specjax.text.tokenizer import Tokenizer
from specjax.text.tool_formats import FORMATS

USER = {"role": "user", "content": " Hi "}
CHAT = [USER, {"role": "assistant", "content": "Yo"}, {"role": "user", "content": "Go"}]
SYSTEM = {"role": "system", "content": "Be brief"}


class Published(NamedTuple):
    """A published format, and a template of our own that gives the same text."""

    template: str
    markers: tuple[str, ...]  # special tokens in addition to those of the configuration
    config: dict[str, Any]  # of tokenizer_config.json
    chat: tuple[str, ...]  # the tokens of CHAT; other texts are split further
    raw: tuple[str, ...]  # the tokens of the prompt "Hi" without a template
    adds_bos: bool = False  # the post-processor in tokenizer.json adds BOS
    drops_spaces: bool = False  # markers take the white space after them


FAMILIES = {
    # answers have the role "model", contents are stripped, and a system turn is refused
    "gemma2": Published(
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("<start_of_turn>", "<end_of_turn>"),
        {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True, "add_eos_token": False},
        (
            *("<bos>", "<start_of_turn>", "user\nHi", "<end_of_turn>", "\n"),
            *("<start_of_turn>", "model\nYo", "<end_of_turn>", "\n"),
            *("<start_of_turn>", "user\nGo", "<end_of_turn>", "\n", "<start_of_turn>", "model\n"),
        ),
        ("<bos>", "Hi"),
        adds_bos=True,
    ),
    # markers end with a line break that their tokens take
    "phi3": Published(
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + "
        "'<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
        "{% else %}{{ eos_token }}{% endif %}",
        ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
        {"bos_token": "<s>", "eos_token": "<|endoftext|>", "add_bos_token": False},
        (
            *("<|user|>", "Hi ", "<|end|>", "<|assistant|>", "Yo", "<|end|>"),
            *("<|user|>", "Go", "<|end|>", "<|assistant|>"),
        ),
        ("Hi",),
        drops_spaces=True,
    ),
    "llama3": Published(
        "{% for message in messages %}{% set text = '<|start_header_id|>' + message['role'] + "
        "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}"
        "{{ bos_token + text if loop.first else text }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        (
            *("<|begin_of_text|>", "<|start_header_id|>", "user", "<|end_header_id|>", "\n\nHi"),
            *("<|eot_id|>", "<|start_header_id|>", "assistant", "<|end_header_id|>", "\n\nYo"),
            *("<|eot_id|>", "<|start_header_id|>", "user", "<|end_header_id|>", "\n\nGo"),
            *("<|eot_id|>", "<|start_header_id|>", "assistant", "<|end_header_id|>", "\n\n"),
        ),
        ("<|begin_of_text|>", "Hi"),
        adds_bos=True,
    ),
    # the end of an answer is EOS, also in the history
    "mistral": Published(
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + message['content'] + '[/INST]' }}{% else %}"
        "{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}",
        ("[INST]", "[/INST]"),
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True},
        (
            *("<s>", "[INST]", "  Hi ", "[/INST]", " Yo", "</s>"),
            *("[INST]", " Go", "[/INST]"),
        ),
        ("<s>", "Hi"),
    ),
    # no BOS at all; an empty block of thoughts turns thinking off
    "qwen3": Published(
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + "
        "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% if enable_thinking is defined and enable_thinking is false %}"
        "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
        ("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
        {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False},
        (
            *("<|im_start|>", "user\n Hi ", "<|im_end|>", "\n"),
            *("<|im_start|>", "assistant\nYo", "<|im_end|>", "\n"),
            *("<|im_start|>", "user\nGo", "<|im_end|>", "\n", "<|im_start|>", "assistant\n"),
        ),
        ("Hi",),
    ),
    # thoughts are open unless they are turned off; calls are XML, and results turns of the user
    "qwen3.5": Published(
        "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}"
        "{{ tool | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
        "{% for message in messages %}{% if message.role == 'tool' %}{{ '<|im_start|>user\n"
        "<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}{% else %}"
        "{{ '<|im_start|>' + message.role + '\n' }}{% if message.reasoning_content %}"
        "{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}"
        "{{ message.content }}{% for call in message.tool_calls or [] %}"
        "{{ '\n\n<tool_call>\n<function=' + call.function.name + '>\n' }}"
        "{% for key, value in call.function.arguments | items %}{{ '<parameter=' + key + '>\n' }}"
        "{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}{% endfor %}"
        "{{ '</function>\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}"
        "{% if enable_thinking is false %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}",
        ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
        {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False},
        (
            *("<|im_start|>", "user\n Hi ", "<|im_end|>", "\n"),
            *("<|im_start|>", "assistant\nYo", "<|im_end|>", "\n"),
            *("<|im_start|>", "user\nGo", "<|im_end|>", "\n"),
            *("<|im_start|>", "assistant\n", "<think>", "\n"),
        ),
        ("Hi",),
    ),
}


def load(folder: Path, family: Published) -> Tokenizer:
    """Write a tokenizer of single bytes with the family's special tokens, and load it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({x: i for i, x in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    named = [x for key in ("bos_token", "eos_token") if (x := family.config[key])]
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(x, special=True, rstrip=family.drops_spaces, normalized=False)
            for x in dict.fromkeys((*named, *family.markers))
        ]
    )
    if family.adds_bos:
        bos = named[0]
        pair = bos, backend.token_to_id(bos)
        backend.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [pair])
    backend.save(str(folder / "tokenizer.json"))
    config = {"chat_template": family.template, **family.config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_pretrained(folder)


def ids_of(tokenizer: Tokenizer, parts: tuple[str, ...]) -> list[int]:
    special = tokenizer.backend.get_added_tokens_decoder().values()
    markers = {token.content for token in special}
    ids: list[int] = []
    for part in parts:
        if part in markers:
            ids.append(tokenizer.backend.token_to_id(part))
        else:
            ids += tokenizer.encode(part, add_special_tokens=False)
    return ids


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_of_chats_and_prompts(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    tokenizer = load(tmp_path, family)
    text = tokenizer.apply_chat_template(CHAT)
    found = tokenizer.encode(text, add_special_tokens=False)
    assert found == ids_of(tokenizer, family.chat)
    assert tokenizer.encode("Hi") == ids_of(tokenizer, family.raw)
    assert tokenizer.eos_token_ids == (tokenizer.backend.token_to_id(family.config["eos_token"]),)
    # what a client shows has no markers
    assert not any(marker in tokenizer.decode(found) for marker in family.markers)


def test_what_a_template_refuses_or_switches(tmp_path: Path) -> None:
    for name in ("gemma2", "qwen3"):
        (tmp_path / name).mkdir()
    gemma = load(tmp_path / "gemma2", FAMILIES["gemma2"])
    with pytest.raises(ValueError, match="System role not supported"):
        gemma.apply_chat_template([SYSTEM, USER])
    with pytest.raises(ValueError, match="roles must alternate"):
        gemma.apply_chat_template([USER, USER])
    qwen = load(tmp_path / "qwen3", FAMILIES["qwen3"])
    assert qwen.apply_chat_template(CHAT, enable_thinking=True).endswith("assistant\n")
    (tmp_path / "qwen3.5").mkdir()
    for tokenizer in (qwen, load(tmp_path / "qwen3.5", FAMILIES["qwen3.5"])):
        quiet = tokenizer.apply_chat_template(CHAT, enable_thinking=False)
        assert quiet.endswith("assistant\n<think>\n\n</think>\n\n")


def test_calls_in_the_history_are_what_the_parser_reads(tmp_path: Path) -> None:
    """The template reads arguments as an object, and the client sent text."""
    tokenizer = load(tmp_path, FAMILIES["qwen3.5"])
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}, "of": {"type": "array"}}
    function = {"name": "weather", "parameters": {"type": "object", "properties": properties}}
    tools = [{"type": "function", "function": function}]
    values = [{"city": "5", "days": 2, "of": ["</tool_call>", None]}, {"city": "\n\n"}]
    calls = [
        {"id": str(i), "function": {"name": "weather", "arguments": json.dumps(value)}}
        for i, value in enumerate(values)
    ]
    turn = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm"}
    results = [{"role": "tool", "content": f"sun {i}", "tool_call_id": str(i)} for i in range(2)]
    text = tokenizer.apply_chat_template(
        [USER, turn | {"tool_calls": calls}, *results], tools=tools
    )
    opening, _, turns = text.partition("<|im_start|>assistant\n")
    assert json.loads(opening.split("\n")[1]) == tools[0]
    answer, *others = turns.split("<|im_end|>\n")
    response = "<|im_start|>user\n<tool_response>\nsun {}\n</tool_response>"
    assert others == [*map(response.format, range(2)), "<|im_start|>assistant\n<think>\n"]
    declared = Tools(tools, ["weather"], format=FORMATS["qwen3_coder"])
    parts = TextParts(tools=declared, may_reason=True)
    parts.read(answer, is_final=True)
    assert (parts.reasoning, parts.content) == ("Hm", "I look.")
    assert [json.loads(call.arguments) for call in parts.calls] == values
