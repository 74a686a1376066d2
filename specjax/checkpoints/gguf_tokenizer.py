"""Tokenizers built from the metadata of a GGUF file (byte-level BPE)."""

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from specjax.checkpoints.gguf_reader import GGUFFile
from specjax.text.tokenizer import Tokenizer, set_template

_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# `tokenizer.ggml.pre` to the regular expression that splits text before merging; None is GPT-2's,
# which `tokenizers` has built in. transformers reads `smollm` files with GPT-2's split too.
SPLITS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "dbrx": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "tekken": _TEKKEN,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def _byte_alphabet() -> dict[int, str]:
    """Spelling of each byte in a byte-level vocabulary: printable as itself, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelling = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in spelling)
    return spelling | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """The tokenizer that a GGUF file describes.

    Encodes as transformers does when it loads the same file (``gguf_file=``): control tokens are
    special, user-defined ones are matched whole, and ``tokenizer.ggml.pre`` picks the split.

    Raises:
        ValueError: if the file has no tokenizer or one of another kind than byte-level BPE.
    """
    data = file.metadata
    kind = data.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model={kind!r} is not supported; supported: 'gpt2' "
            "(byte-level BPE). Use the Hugging Face directory of the model, or pass "
            "skip_tokenizer_init=True and give input_ids"
        )
    pre = data.get("tokenizer.ggml.pre", "default")
    if pre not in SPLITS:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre={pre!r} is not supported; supported: "
            f"{sorted(SPLITS)}. Use the Hugging Face directory of the model, or pass "
            "skip_tokenizer_init=True and give input_ids"
        )
    tokens: list[str] = _required(file, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in _required(file, "tokenizer.ggml.merges")]
    alphabet = _byte_alphabet()
    letters = set(alphabet.values())
    vocab = {
        # some converters store added tokens as plain text; merges only know the byte spelling
        token if set(token) <= letters else "".join(alphabet[b] for b in token.encode()): i
        for i, token in enumerate(tokens)
    }
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{file.path}: broken BPE vocabulary: {error}") from error
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = _pre_tokenizer(SPLITS[pre])
    _add_marked_tokens(backend, tokens, data.get("tokenizer.ggml.token_type", ()), letters)
    special = _special_tokens(file, tokens)
    backend.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token in dict.fromkeys(special.values())
        ]
    )
    set_template(
        backend,
        bos=special.get("bos_token") if data.get("tokenizer.ggml.add_bos_token") else None,
        eos=special.get("eos_token") if data.get("tokenizer.ggml.add_eos_token") else None,
    )
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_template=data.get("tokenizer.chat_template"),
        extra_eos_token_ids=extra_eos_token_ids(file),
    )


def extra_eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """End-of-turn and end-of-message ids, which end a text beside ``eos_token``."""
    keys = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return tuple(file.metadata[key] for key in keys if key in file.metadata)


def _required(file: GGUFFile, key: str) -> Any:
    if key not in file.metadata:
        raise ValueError(f"{file.path} has no {key}, which its tokenizer needs")
    return file.metadata[key]


def _pre_tokenizer(split: str | None) -> pre_tokenizers.PreTokenizer:
    if split is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _add_marked_tokens(
    backend: tokenizers.Tokenizer, tokens: list[str], kinds: list[int], letters: set[str]
) -> None:
    """Control tokens as special tokens, user-defined tokens as tokens that are matched whole.

    An entry outside the byte alphabet is stored under its byte spelling, so adding its text would
    allot a new id beyond the model's vocabulary: it stays a plain vocabulary entry.
    """
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for token, kind in zip(tokens, kinds, strict=False):
        if kind in (_CONTROL, _USER_DEFINED) and set(token) <= letters:
            is_special = kind == _CONTROL
            added = AddedToken(token, normalized=False, special=is_special)
            (special if is_special else plain).append(added)
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _special_tokens(file: GGUFFile, tokens: list[str]) -> dict[str, str]:
    keys = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    special = {}
    for name, key in keys.items():
        token_id = file.metadata.get(f"tokenizer.ggml.{key}")
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise ValueError(
                f"{file.path}: tokenizer.ggml.{key}={token_id} is outside the vocabulary of "
                f"{len(tokens)} tokens"
            )
        special[name] = tokens[token_id]
    return special
