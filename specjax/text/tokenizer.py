"""Tokenizer of a checkpoint: text to ids and back, chat templates, and streaming decoding."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from specjax.json_file import read_json
from specjax.text.chat_template import render_chat_template

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """A ``tokenizers`` tokenizer with the special tokens and chat template of its checkpoint.

    Attributes:
        special_tokens: ``bos_token``, ``eos_token``, ``unk_token`` and ``pad_token``, as far as
            the checkpoint names them.
        chat_template: Jinja source, or None.

    Args:
        backend: the ``tokenizers`` object; its added tokens and post-processor are kept.
        special_tokens: text of each named special token, by its transformers name.
        chat_template: Jinja source.
        extra_eos_token_ids: end tokens beyond ``eos_token``.

    Raises:
        ValueError: if a named special token is not in the vocabulary.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        extra_eos_token_ids: Sequence[int] = (),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self._ids: dict[str, int] = {}
        for name, token in self.special_tokens.items():
            token_id = backend.token_to_id(token)
            if token_id is None:
                raise ValueError(f"{name}={token!r} is not in the tokenizer's vocabulary")
            self._ids[name] = token_id
        eos = [self._ids["eos_token"]] if "eos_token" in self._ids else []
        self._eos_token_ids = tuple(dict.fromkeys([*eos, *extra_eos_token_ids]))

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """The tokenizer of a Hugging Face directory.

        Reads ``tokenizer.json``, ``tokenizer_config.json``, ``special_tokens_map.json`` and the
        chat template in ``chat_template.jinja``, ``chat_template.json`` or the configuration.

        Raises:
            ValueError: if ``tokenizer.json`` is missing or broken.
        """
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"{file} is missing. Only fast tokenizers are supported; convert with transformers:"
                " AutoTokenizer.from_pretrained(directory).save_pretrained(directory); or pass "
                "skip_tokenizer_init=True and give input_ids"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"{file} is not a tokenizer of `tokenizers`: {error}") from error
        config: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (directory / name).is_file():
                config |= read_json(directory / name)
        _add_tokens(backend, config.get("added_tokens_decoder") or {})
        special = special_token_texts(config)
        # a checkpoint may name tokens that its tokenizer.json does not have: transformers adds them
        absent = [token for token in special.values() if backend.token_to_id(token) is None]
        backend.add_special_tokens(list(dict.fromkeys(absent)))
        if "add_bos_token" in config or "add_eos_token" in config:
            set_template(
                backend,
                bos=special.get("bos_token") if config.get("add_bos_token") else None,
                eos=special.get("eos_token") if config.get("add_eos_token") else None,
            )
        return cls(backend, special_tokens=special, chat_template=_find_template(directory, config))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the files that :meth:`from_pretrained` reads."""
        directory = Path(path)
        directory.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(directory / "tokenizer.json"))
        config = json.dumps(self.special_tokens, ensure_ascii=False, indent=2)
        (directory / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
        if self.chat_template is not None:
            (directory / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; a model's own vocabulary may be padded beyond."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, the main one first."""
        return self._eos_token_ids

    @property
    def eos_token_id(self) -> int | None:
        """Id of ``eos_token``."""
        return self._ids.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Id of ``bos_token``."""
        return self._ids.get("bos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id of ``pad_token``."""
        return self._ids.get("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        """Id of ``unk_token``."""
        return self._ids.get("unk_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; ``add_special_tokens`` adds what the checkpoint asks for.

        Raises:
            ValueError: if the text holds half a surrogate pair, as undecodable bytes of a command
                line do.
        """
        text.encode("utf-8")  # raises UnicodeEncodeError; the backend would raise a TypeError
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that form no complete character appear as U+FFFD.

        Raises:
            ValueError: if an id is negative.
        """
        plain = [int(i) for i in ids]
        if plain and min(plain) < 0:
            raise ValueError(f"token id {min(plain)} is negative")
        return self.backend.decode(plain, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of an id, None for an id it does not have."""
        return self.backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """Id of a vocabulary entry, None if there is none."""
        return self.backend.token_to_id(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Text of a conversation, to be encoded with ``add_special_tokens=False``.

        Args:
            messages: turns with ``role`` and ``content``.
            add_generation_prompt: end with the header of the assistant's next turn.
            **variables: further template variables, for example ``tools`` or
                ``enable_thinking``.

        Raises:
            ValueError: if the checkpoint has no chat template or the template refuses.
        """
        if self.chat_template is None:
            raise ValueError(
                "the checkpoint has no chat template; pass a raw prompt instead of messages"
            )
        scope = {"tools": None, "documents": None} | self.special_tokens | variables
        scope["add_generation_prompt"] = add_generation_prompt
        return render_chat_template(self.chat_template, messages, scope)


def special_token_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens of a tokenizer configuration: plain strings or added-token objects."""
    texts = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            texts[name] = value
    return texts


def find_eos_token_id(directory: Path) -> int | None:
    """Id of a Hugging Face directory's ``eos_token``, without building its tokenizer."""
    path = directory / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    eos = special_token_texts(config).get("eos_token")
    if eos is None:
        return None
    for key, entry in (config.get("added_tokens_decoder") or {}).items():
        if entry["content"] == eos:
            return int(key)
    if not (directory / "tokenizer.json").is_file():
        return None
    tokenizer = read_json(directory / "tokenizer.json")
    for entry in tokenizer.get("added_tokens") or []:
        if entry["content"] == eos:
            return int(entry["id"])
    vocab = (tokenizer.get("model") or {}).get("vocab")
    return vocab.get(eos) if isinstance(vocab, Mapping) else None


def set_template(backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Make encoding with special tokens put ``bos`` before and ``eos`` after the text."""
    named = [token for token in (bos, eos) if token is not None]
    backend.post_processor = TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        pair=None,
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(named)],
    )


def _add_tokens(backend: tokenizers.Tokenizer, decoder: Mapping[str, Mapping[str, Any]]) -> None:
    """Tokens that only ``tokenizer_config.json`` lists, in id order."""
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    known = backend.get_added_tokens_decoder()
    for key in sorted(decoder, key=int):
        entry = decoder[key]
        if int(key) not in known:
            token = tokenizers.AddedToken(
                entry["content"], **{flag: entry[flag] for flag in flags if flag in entry}
            )
            backend.add_tokens([token])


def _find_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if (directory / "chat_template.json").is_file():
        template = read_json(directory / "chat_template.json").get("chat_template", template)
    if isinstance(template, list):  # named templates: [{"name": ..., "template": ...}]
        template = {entry["name"]: entry["template"] for entry in template}
    return template.get("default") if isinstance(template, Mapping) else template


class IncrementalDecoder:
    """Text of a growing token sequence, for streaming.

    A token can end inside a multi-byte character, and decoders treat the start of a text specially
    (a leading space is dropped). So each step decodes the tokens of the last emitted piece, which
    ends with a whole character, together with the new ones, and emits nothing while the text ends
    in an incomplete character. The pieces add up to ``tokenizer.decode`` of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """Append tokens and return the text that became certain."""
        out = []
        for token in ids:
            self._pending.append(int(token))
            text = self._new_text()
            if not text.endswith(_REPLACEMENT):
                out.append(self._release(text))
        return "".join(out)

    def flush(self) -> str:
        """The text still held back, incomplete characters as U+FFFD."""
        return self._release(self._new_text())

    def _new_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]

    def _release(self, text: str) -> str:
        # tokens without text (skipped, or a space that a decoder drops at the start of a text) are
        # context only together with what came before them
        self._context = self._pending if text else self._context + self._pending
        self._pending = []
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
