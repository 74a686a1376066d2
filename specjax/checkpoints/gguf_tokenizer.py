"""Tokenizers of GGUF files: byte-level BPE, and SentencePiece with scores."""

import math
from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from specjax.checkpoints.gguf import GGUFFile
from specjax.checks import short
from specjax.json_file import Fields, Flag, Size
from specjax.text.tokenizer import Tokenizer, set_template, unique_ids

# values of `tokenizer.ggml.token_type`, of which 6 is the last
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "\u2581"  # the space in pieces of SentencePiece
# The squared lengths of pieces bound the time to find merges, and the characters of merges bound
# their memory. Gemma 3 has 262,144 pieces and about 515,000 merges.
_MAX_SQUARES, _MAX_MERGED = 2**28, 2**23
_PREFIX = "tokenizer.ggml."
_MODELS = ["gpt2", "llama"]  # values of `tokenizer.ggml.model`
# control tokens of Phi-3 that keep the spaces and lines after them; the others remove them
_UNTRIMMED = ("<unk>", "<s>", "<|endoftext|>")

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
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"  # English endings
_O200K = _TEKKEN.replace(r"]+|", rf"]+{_SHORT}|", 1).replace(
    r"]*|\p{N}|", rf"]*{_SHORT}|\p{{N}}{{1,3}}|", 1
)
_DIGIT = r"\p{N}"  # then GPT-2's

# `tokenizer.ggml.pre` -> regular expression that splits text before merging. None is GPT-2's split,
# which is built into `tokenizers`. transformers also uses GPT-2's split for `smollm` files.
_SPLITS: dict[str, str | None] = {
    **dict.fromkeys(("default", "gpt-2", "smollm"), None),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("pixtral", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("refact", "starcoder"), _DIGIT),
    "gpt-4o": _O200K,
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
}
# values of `tokenizer.ggml.pre` whose models begin texts with BOS
_BEGINS = ("llama3", "llama-v3", "llama-bpe", "pixtral", "tekken")


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """Build the tokenizer of a GGUF file.

    It encodes as transformers does with the same file (``gguf_file=``): control tokens are special,
    user-defined tokens are matched whole, and ``tokenizer.ggml.pre`` selects the split. One rule is
    that of llama.cpp, because the models need it: without ``tokenizer.ggml.add_bos_token``, texts
    begin with BOS if the vocabulary is of SentencePiece or its split is of Llama 3 or Mistral.
    """
    data = file.metadata
    model = data.get("tokenizer.ggml.model", str, None)
    pre = data.get("tokenizer.ggml.pre", str, "default")
    supported = sorted(_SPLITS) if model == "gpt2" else ["default"]
    if model not in _MODELS or pre not in supported:
        key, choices = ("pre", supported) if model in _MODELS else ("model", _MODELS)
        raise data.wrong(
            f"tokenizer.ggml.{key}",
            f"is not supported; supported: {choices}. Use the Hugging Face directory of the model, "
            "or set skip_tokenizer_init=True and pass input_ids",
        )
    tokens: list[str] = data.get("tokenizer.ggml.tokens", list[str])
    data = with_default_ids(data)
    places: dict[str, int] = {}
    for i, token in enumerate(tokens):
        # llama.cpp refuses them too, and renames empty tokens
        if token and places.setdefault(token, i) != i:
            place = f"{data.where}: tokenizer.ggml.tokens[{i}]={short(token)}"
            raise ValueError(f"{place} repeats tokens[{places[token]}]")
    kinds = [_NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in data:
        is_kind = range(1, 7).__contains__
        kinds = _values(data, "token_type", len(tokens), int, is_kind, "must be 1 to 6")
    special = _special_tokens(data, tokens)
    try:
        if model == "gpt2":
            backend = _byte_level(data, tokens)
        else:
            backend = _sentencepiece(data, tokens, kinds, special["unk_token"])
    except ValueError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{file.path}: invalid BPE vocabulary: {error}") from error
    trims = model == "llama" and data.get("general.architecture", str, None) == "phi3"
    added: dict[int, list[AddedToken]] = {_CONTROL: [], _USER_DEFINED: []}
    for token, kind in zip(tokens, kinds, strict=False):
        # skip entries that the vocabulary spells otherwise
        if kind in added and backend.token_to_id(token) is not None:
            is_special = kind == _CONTROL
            rstrip = trims and is_special and token not in _UNTRIMMED
            entry = AddedToken(token, normalized=False, special=is_special, rstrip=rstrip)
            added[kind].append(entry)
    backend.add_special_tokens(added[_CONTROL])
    backend.add_tokens(added[_USER_DEFINED])  # matched whole
    named = dict.fromkeys(special.values())
    backend.add_special_tokens([AddedToken(x, normalized=False, special=True) for x in named])
    default = {"tokenizer.ggml.add_bos_token": model == "llama" or pre in _BEGINS}
    set_template(backend, special, Fields({**default, **data.values}, data.where), _PREFIX)
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_template=data.get("tokenizer.chat_template", str, None),
        extra_eos_token_ids=eos_token_ids(data, len(tokens)),
    )


def _byte_level(data: Fields, tokens: list[str]) -> tokenizers.Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in data.get("tokenizer.ggml.merges", list[str])]
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {
        # some converters store added tokens as plain text, but merges use the byte spelling
        token if set(token) <= letters else spell.pre_tokenize_str(token)[0][0]: i
        for i, token in enumerate(tokens)
    }
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.decoder = decoders.ByteLevel()
    split = _SPLITS[data.get("tokenizer.ggml.pre", str, "default")]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in (None, _DIGIT))
    splits = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    return backend


def _sentencepiece(
    data: Fields, tokens: list[str], kinds: list[int], unknown: str
) -> tokenizers.Tokenizer:
    """A BPE model that merges to the piece with the best score first.

    The space before a text is added as transformers adds it: Phi-3 adds it before every part
    between special tokens, others only at the start, and only if no space is there.
    """
    scores = _values(data, "scores", len(tokens), float, math.isfinite, "must be finite")
    pieces, first = list[tuple[float, str]](), -float("inf")
    vocab = dict[str, int]()
    for i, (token, kind, score) in enumerate(zip(tokens, kinds, scores, strict=True)):
        # user-defined spaces are merged before other pieces; Gemma has up to 31 of them, and early
        # files spell them like pieces
        is_spaces = kind == _USER_DEFINED and set(token) <= {" ", _SPACE}
        piece = token.replace(" ", _SPACE) if is_spaces else token
        vocab[piece] = i
        if is_spaces or kind == _NORMAL:
            pieces.append((first if is_spaces else -score, piece))
    pieces.sort(key=lambda pair: pair[0])
    merges = _merges([piece for _, piece in pieces], f"{data.where}: tokenizer.ggml.tokens")
    options: dict[str, Any] = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    adds_space = data.get("tokenizer.ggml.add_space_prefix", Flag, True)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] * adds_space)])
    if adds_space and data.get("general.architecture", str, None) != "phi3":
        first_only = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
        backend.pre_tokenizer = first_only
    else:
        prefix = [normalizers.Prepend(_SPACE)] * adds_space
        backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    return backend


def _merges(pieces: list[str], where: str) -> list[tuple[str, str]]:
    """All pairs that make one of the pieces: in their order, the longest left half first."""
    if (squares := sum(len(piece) ** 2 for piece in pieces)) > _MAX_SQUARES:
        raise ValueError(f"{where}: squared lengths {squares} exceed the limit {_MAX_SQUARES}")
    known, merges, size = {piece: piece for piece in pieces}, list[tuple[str, str]](), 0
    for piece in pieces:
        for i in range(len(piece) - 1, 0, -1):
            if (left := known.get(piece[:i])) and (right := known.get(piece[i:])):
                merges.append((left, right))
                size += len(piece)
        if size > _MAX_MERGED:
            raise ValueError(f"{where}: {size} characters of merges exceed the limit {_MAX_MERGED}")
    return merges


def _values(
    data: Fields, name: str, count: int, kind: type, is_valid: Callable[[Any], bool], demand: str
) -> list[Any]:
    """Read ``count`` values, one for each token; errors have the index of a wrong value."""
    key = f"{_PREFIX}{name}"
    values: list[Any] = data.get(key, list[kind])  # type: ignore[valid-type]
    if len(values) != count:
        raise data.wrong(key, f"must have {count} values")
    for i, value in enumerate(values):
        if not is_valid(value):
            raise ValueError(f"{data.where}: {key}[{i}]={value} {demand}")
    return values


def with_default_ids(data: Fields) -> Fields:
    """Add the ids of special tokens that SentencePiece files may leave out, as in llama.cpp."""
    names = ("unknown", "bos", "eos") if data.values.get(f"{_PREFIX}model") == "llama" else ()
    ids = {f"{_PREFIX}{name}_token_id": i for i, name in enumerate(names)}
    return Fields({**ids, **data.values}, data.where)


def token_id(data: Fields, name: str, vocab_size: int) -> int | None:
    """Return the id of a special token, which must be in the vocabulary."""
    value: int | None = data.get(key := f"{_PREFIX}{name}_token_id", Size, None)
    if value is not None and value >= vocab_size:
        raise data.wrong(key, f"is outside the vocabulary of {vocab_size} tokens")
    return value


def eos_token_ids(data: Fields, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of the tokens that end a text, a turn or a message."""
    return unique_ids(token_id(data, name, vocab_size) for name in ("eos", "eot", "eom"))


def _special_tokens(data: Fields, tokens: list[str]) -> dict[str, str]:
    stored = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: token_id(data, key, len(tokens)) for name, key in stored.items()}
    return {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
