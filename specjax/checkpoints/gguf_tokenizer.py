"""Tokenizers built from the metadata of a GGUF file (byte-level BPE)."""

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from specjax.checkpoints.gguf import GGUFFile
from specjax.text.tokenizer import Tokenizer, set_template, unique_ids

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
_SPLITS: dict[str, str | None] = {
    **dict.fromkeys(("default", "gpt-2", "smollm"), None),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
}


def _byte_alphabet() -> dict[int, str]:
    """Spelling of each byte in a byte-level vocabulary: printable as itself, others from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """The tokenizer that a GGUF file describes.

    Encodes as transformers does when it loads the same file (``gguf_file=``): control tokens are
    special, user-defined ones are matched whole, and ``tokenizer.ggml.pre`` picks the split.
    """
    data = file.metadata
    for key, default, known in (("model", None, ["gpt2"]), ("pre", "default", sorted(_SPLITS))):
        if data.text(f"tokenizer.ggml.{key}", default) not in known:
            raise data.wrong(
                f"tokenizer.ggml.{key}",
                f"is not supported; supported: {known} (byte-level BPE). Use the Hugging Face "
                "directory of the model, or pass skip_tokenizer_init=True and give input_ids",
            )
    tokens: list[str] = data.items("tokenizer.ggml.tokens", str)
    kinds: list[int] = data.items("tokenizer.ggml.token_type", int, [])
    merges = [tuple(merge.split(" ", 1)) for merge in data.items("tokenizer.ggml.merges", str)]
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
    backend.pre_tokenizer = _pre_tokenizer(_SPLITS[data.text("tokenizer.ggml.pre", "default")])
    _add_marked_tokens(backend, tokens, kinds, letters)
    special = _special_tokens(file, tokens)
    named = dict.fromkeys(special.values())
    backend.add_special_tokens([AddedToken(x, normalized=False, special=True) for x in named])
    set_template(backend, special, data, "tokenizer.ggml.")
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_template=data.text("tokenizer.chat_template", None),
        extra_eos_token_ids=eos_token_ids(file),
    )


def eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Ids that end a text: those of the end of a text, of a turn and of a message."""
    keys = (f"tokenizer.ggml.{x}_token_id" for x in ("eos", "eot", "eom"))
    return unique_ids(file.metadata.integer(key, None) for key in keys)


def _pre_tokenizer(split: str | None) -> pre_tokenizers.PreTokenizer:
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is None:
        return letters
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), letters])


def _add_marked_tokens(
    backend: tokenizers.Tokenizer, tokens: list[str], kinds: list[int], letters: set[str]
) -> None:
    """Control tokens as special tokens, user-defined tokens as tokens that are matched whole.

    An entry outside the byte alphabet is stored under its byte spelling, so adding its text would
    allot a new id beyond the model's vocabulary: it stays a plain vocabulary entry.
    """
    marked = {
        wanted: [
            AddedToken(token, normalized=False, special=wanted == _CONTROL)
            for token, kind in zip(tokens, kinds, strict=False)
            if kind == wanted and set(token) <= letters
        ]
        for wanted in (_CONTROL, _USER_DEFINED)
    }
    backend.add_special_tokens(marked[_CONTROL])
    backend.add_tokens(marked[_USER_DEFINED])


def _special_tokens(file: GGUFFile, tokens: list[str]) -> dict[str, str]:
    special = {}
    for name, stored in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        key = f"tokenizer.ggml.{stored}_token_id"
        if key in file.metadata:
            if (token_id := file.metadata.integer(key)) >= len(tokens):
                demand = f"is outside the vocabulary of {len(tokens)} tokens"
                raise file.metadata.wrong(key, demand)
            special[f"{name}_token"] = tokens[token_id]
    return special
