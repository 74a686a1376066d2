"""Tokenizer of a checkpoint: encoding, decoding, chat templates and incremental decoding."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders
from tokenizers.processors import TemplateProcessing

from specjax.checks import CONTEXT_EXCEEDED, ParameterError
from specjax.json_file import Fields, Flag, Size, read_text
from specjax.text.chat_template import render_chat_template

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# Longer texts are encoded as a batch, which releases the interpreter lock. Encoding a single text
# holds it for 0.9 s per million characters (tokenizers 0.23).
LONG_TEXT = 4096
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """A ``tokenizers`` tokenizer with the special tokens and chat template of its checkpoint.

    ``special_tokens`` must be in the vocabulary; otherwise a ValueError is raised.
    ``eos_token_ids`` are all ids that end a text, the main one first.
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
        ids = {name: backend.token_to_id(token) for name, token in self.special_tokens.items()}
        for name, token_id in ids.items():
            if token_id is None:
                token = self.special_tokens[name]
                raise ValueError(f"{name}={token!r} is not in the tokenizer's vocabulary")
        self.eos_token_ids = unique_ids([ids.get("eos_token"), *extra_eos_token_ids])

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Load the tokenizer of a Hugging Face directory.

        Reads ``tokenizer.json``, ``tokenizer_config.json``, ``special_tokens_map.json`` and the
        chat template in ``chat_template.jinja``, ``chat_template.json`` or the configuration.
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
            backend = _call(tokenizers.Tokenizer.from_file, str(file))
            _check_panics(backend)
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"the tokenizers library cannot read {file}: {error}") from error
        names = "special_tokens_map.json", "tokenizer_config.json"
        older, config = (Fields.read_if_there(directory / name) for name in names)
        config = Fields({**older.values, **config.values}, config.where)
        _add_tokens(backend, config)
        special = _special_tokens(config)
        # like transformers, add tokens that the checkpoint names but tokenizer.json does not have
        absent = [token for token in special.values() if backend.token_to_id(token) is None]
        backend.add_special_tokens(list(dict.fromkeys(absent)))
        if "add_bos_token" in config or "add_eos_token" in config:
            set_template(backend, special, config)
        template = _find_template(directory, config)
        try:
            return cls(backend, special_tokens=special, chat_template=template)
        except ValueError as error:
            raise ValueError(f"{config.where}: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of ids including added tokens; a model's padded vocabulary may be larger."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def max_token_chars(self) -> int:
        """Maximum number of characters per token."""
        return max(map(len, self.backend.get_vocab()), default=1)

    def check_length(self, num_chars: int, context_length: float) -> None:
        """Refuse a text before encoding if its length shows that it cannot fit the context."""
        if num_chars > context_length * self.max_token_chars:
            raise ParameterError(
                f"a prompt of {num_chars} characters cannot fit context_length={context_length}: "
                f"a token has at most {self.max_token_chars} characters; "
                "shorten it or raise context_length",
                limit=context_length,
                code=CONTEXT_EXCEEDED,
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode ``text``. Raises ValueError for a lone surrogate, as from undecodable bytes."""
        text.encode("utf-8")  # raises UnicodeEncodeError; the backend would raise a TypeError
        special: Any = {"add_special_tokens": add_special_tokens}
        if len(text) < LONG_TEXT:
            return _call(self.backend.encode, text, **special).ids
        [encoding] = _call(self.backend.encode_batch_fast, [text], **special)
        return encoding.ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Decode ids; incomplete characters become U+FFFD. Raises ValueError for a negative id."""
        plain = [int(i) for i in ids]
        if plain and min(plain) < 0:
            raise ValueError(f"token id {min(plain)} is negative")
        return self.decode_generated(plain, skip_special_tokens)

    def decode_generated(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Decode ids without a check. Bytes that belong to no character become U+FFFD."""
        decode = partial(_call, self.backend.decode, skip_special_tokens=skip_special_tokens)
        text = str(decode(ids))
        if _REPLACEMENT not in text or not self._byte_tokens:
            return text
        # the library also replaces the valid characters of a run of tokens for single bytes
        skipped, valid = self.special_ids.values() if skip_special_tokens else (), list[int]()
        visible_ids = (i for i in ids if i not in skipped)
        for is_byte, run in groupby(visible_ids, self._byte_tokens.__contains__):
            if is_byte:
                letters = bytes(map(self._byte_tokens.index, run)).decode(errors="replace")
                valid += [self._byte_tokens[byte] for byte in letters.encode()]
            else:
                valid += run
        return str(decode(valid))

    @cached_property
    def _byte_tokens(self) -> list[int]:
        """Ids of the tokens for the 256 bytes, if the decoder joins them to characters."""
        decoder = self.backend.decoder
        if decoder is None or b"ByteFallback" not in decoder.__getstate__():
            return []
        ids: list[Any] = [self.backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        return [] if None in ids else ids

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Special tokens, which texts may leave out, with their ids."""
        added = self.backend.get_added_tokens_decoder().items()
        return {token.content: token_id for token_id, token in added if token.special}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render messages with ``variables``; encode the text with ``add_special_tokens=False``."""
        if self.chat_template is None:
            raise ValueError("the checkpoint has no chat template; pass prompt instead of messages")
        scope = {"tools": None, "documents": None} | self.special_tokens | variables
        scope["add_generation_prompt"] = add_generation_prompt
        return render_chat_template(self.chat_template, messages, scope)


def _call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call the tokenizers library; a panic of it, which is not an Exception, is a ValueError."""
    try:
        return function(*args, **options)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"tokenizer.json: {function.__name__} fails: {error}") from error


def _check_panics(backend: tokenizers.Tokenizer) -> None:
    """Encode and decode long runs of characters; raise ValueError if the library panics.

    It panics for a regular expression that backtracks too often, after 0.2 s.
    """
    text = "".join(64 * letter + "!" for letter in "aA0 .-_\n\u00e9\u4e00")
    try:
        ids = _call(backend.encode, text).ids
        for sample in ids, ids[:1], ids[-1:]:
            _call(backend.decode, sample)
    except Exception as error:
        if isinstance(error, ValueError):  # others: the vocabulary may lack a character
            raise


def unique_ids(ids: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _special_tokens(config: Fields) -> dict[str, str]:
    """Read special tokens, which are strings or added-token objects, from a configuration."""
    return {
        name: config.fields(name).get("content", str)
        if isinstance(config.get(name, Any), Mapping)
        else config.get(name, str)
        for name in _SPECIAL_TOKENS
        if name in config
    }


def find_eos_token_id(directory: Path) -> int | None:
    """Find the id of a Hugging Face directory's ``eos_token`` without building its tokenizer."""
    config = Fields.read_if_there(directory / "tokenizer_config.json")
    eos = _special_tokens(config).get("eos_token")
    if eos is None:
        return None
    for token_id, entry in _added_tokens(config):
        if entry.get("content", str) == eos:
            return token_id
    tokenizer = Fields.read_if_there(directory / "tokenizer.json")
    for values in tokenizer.get("added_tokens", list[dict], []):
        entry = Fields(values, f"{tokenizer.where}: added_tokens")
        if entry.get("content", str) == eos:
            return entry.get("id", Size)
    model = tokenizer.fields("model")
    # some tokenizer models have a list as vocabulary
    is_mapping = isinstance(model.get("vocab", Any, None), Mapping)
    return model.fields("vocab").get(eos, Size, None) if is_mapping else None


def _added_tokens(config: Fields) -> list[tuple[int, Fields]]:
    """Read the added tokens in ``tokenizer_config.json``, in id order."""
    decoder = config.fields("added_tokens_decoder")
    for key in decoder.values:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise decoder.wrong(key, "needs a token id as its key")
    return [(int(key), decoder.fields(key)) for key in sorted(decoder.values, key=int)]


def set_template(
    backend: tokenizers.Tokenizer, special: Mapping[str, str], config: Fields, prefix: str = ""
) -> None:
    """Make the encoder add BOS and EOS according to ``add_bos_token`` and ``add_eos_token``.

    Where a flag is absent, the encoder still adds what its own post-processor adds.
    """
    if (text := next(filter(None, special.values()), None)) is None:
        return
    encoded = _call(backend.encode, text)
    indices = [i for i, number in enumerate(encoded.sequence_ids) if number is not None]
    begin, end = (indices[0], indices[-1] + 1) if indices else (0, 0)
    sides = []
    for name, ids in ("bos_token", encoded.ids[:begin]), ("eos_token", encoded.ids[end:]):
        if (is_added := config.get(f"{prefix}add_{name}", Flag, None)) is not None:
            token = special.get(name)
            ids = [backend.token_to_id(token)] if is_added and token else []
        sides.append([f"t{i}" for i in ids])
    # names of their own: the template would read a token such as "x:1" as a token and its type
    tokens = [{"id": t, "ids": [int(t[1:])], "tokens": [t]} for t in {*sides[0], *sides[1]}]
    single = [*sides[0], "$A", *sides[1]]
    backend.post_processor = TemplateProcessing(single=single, pair=None, special_tokens=tokens)


def _add_tokens(backend: tokenizers.Tokenizer, config: Fields) -> None:
    """Add the tokens that only ``tokenizer_config.json`` lists."""
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    existing = backend.get_added_tokens_decoder()
    for token_id, entry in _added_tokens(config):
        if token_id not in existing:
            flag_values = {flag: entry.get(flag, Flag, False) for flag in flags if flag in entry}
            backend.add_tokens([tokenizers.AddedToken(entry.get("content", str), **flag_values)])


def _find_template(directory: Path, config: Fields) -> str | None:
    if os.path.lexists(file := directory / "chat_template.jinja"):
        return read_text(file)
    if "chat_template" in (other := Fields.read_if_there(directory / "chat_template.json")):
        config = other
    template = config.get("chat_template", Any, None)
    if isinstance(template, list):  # named templates: [{"name": ..., "template": ...}]
        named = [Fields(x, config.where) for x in config.get("chat_template", list[dict])]
        return {x.get("name", str): x.get("template", str) for x in named}.get("default")
    if isinstance(template, Mapping):
        return config.fields("chat_template").get("default", str, None)
    return config.get("chat_template", str, None)


class IncrementalDecoder:
    """Decodes a growing token sequence for streaming.

    A token can end inside a multi-byte character, and decoders drop a leading space at the start of
    a text. Each step therefore decodes the new tokens together with those of the last emitted
    piece, which ends with a whole character. It emits text up to the last whole character. The
    pieces add up to ``tokenizer.decode`` of all tokens. Byte-level decoders need no context.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        # generated ids need no check
        self._decode = partial(tokenizer.decode_generated, skip_special_tokens=skip_special_tokens)
        self.skipped = tokenizer.special_ids if skip_special_tokens else {}
        self._is_bytewise = isinstance(tokenizer.backend.decoder, decoders.ByteLevel)
        self._context: list[int] = []
        self._pending: list[int] = []
        self._held = ""  # text of pending tokens, with U+FFFD at its end
        self._settled = ""  # text before them that is not emitted, although it cannot change

    def push(self, ids: Iterable[int]) -> str:
        """Append tokens and return the text that later tokens cannot change."""
        new_ids = [int(i) for i in ids]
        text = self._new_text(new_ids)
        if text.endswith(_REPLACEMENT):
            return "".join(map(self._push_one, new_ids))
        return self._release(new_ids, text)

    def flush(self) -> str:
        """Return the text that is still held back; incomplete characters become U+FFFD."""
        return self._release([], self._held)

    def _push_one(self, token: int) -> str:
        text, held = self._new_text([token]), self._held
        if not text.endswith(_REPLACEMENT):
            return self._release([token], text)
        alone = self._decode([token])
        if held and alone and held + alone == text:
            # The token begins a character, so the text before it cannot change. Without this test,
            # the time for a long run of invalid bytes would be quadratic.
            self._settled, text = self._release([], held), alone
        self._pending, self._held = [*self._pending, token], text
        return ""

    def _new_text(self, new_ids: list[int]) -> str:
        before = self._decode(self._context) if self._context else ""
        return self._decode(self._context + self._pending + new_ids)[len(before) :]

    def _release(self, new_ids: list[int], text: str) -> str:
        # tokens without text (skipped, or a leading space that the decoder drops) give context
        # only together with the tokens before them
        tokens = self._pending + new_ids
        if not self._is_bytewise:
            self._context = tokens if text else self._context + tokens
        text = self._settled + text
        self._pending, self._settled, self._held = [], "", ""
        return text
