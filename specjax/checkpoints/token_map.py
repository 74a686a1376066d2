"""Hot vocabularies: tokens that drafts are chosen from, as ``speculative_token_map`` lists them."""

import os
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from specjax.checkpoints.checkpoint import Checkpoint
from specjax.checkpoints.target import TargetCheckpoint
from specjax.checkpoints.tensors import TensorSource, in_memory
from specjax.config import HotVocabulary
from specjax.json_file import read_text
from specjax.models.hot_head import TOKEN_MAP

_BLOCK = 2**20  # characters that are tokenised at once


def with_token_map(
    opened: Checkpoint[Any], token_map: str | os.PathLike[str], target: TargetCheckpoint
) -> Any:
    """The same draft with the hot vocabulary of a file, see :func:`read_token_map`.

    ``target`` is quantised as it will be used. Raises ValueError for a file that cannot be read,
    and for a draft with an output head of its own.
    """
    config, inner, model = opened.config, opened._open_source, target.config
    try:
        if any(getattr(config, name, False) for name in ("has_own_lm_head", "ties_lm_head")):
            raise ValueError(
                f"{opened.path} has an output head of its own, with {config.draft_vocab_size} "
                "tokens; leave the option out"
            )
        ids = read_token_map(token_map, target)
    except ValueError as error:
        raise ValueError(f"speculative_token_map={str(token_map)!r}: {error}") from error
    offsets = ids - np.arange(len(ids), dtype=np.int32)
    added = in_memory({TOKEN_MAP: offsets}, Path(token_map))

    def open_source() -> TensorSource:
        source = inner()
        infos = {**source.infos, **added.infos}
        read = {TOKEN_MAP: added.read}
        return TensorSource(source.path, infos, lambda name: read.get(name, source.read)(name))

    format = None if model.tie_word_embeddings else model.dtypes.without("lm_head").quantization
    hot = HotVocabulary(len(ids), format, sha256(ids.tobytes()).hexdigest())
    return replace(opened, config=replace(config, hot=hot), _open_source=open_source)


def read_token_map(token_map: str | os.PathLike[str], target: TargetCheckpoint) -> np.ndarray:
    """Read token ids i32 ``[W]``, which ascend: of the target's vocabulary, and each only once.

    A ``.json`` file has a list of them. ``TEXT:COUNT`` stands for the COUNT most frequent tokens of
    a UTF-8 text file, including the model's end tokens.
    """
    name, vocab_size = os.path.expanduser(os.fspath(token_map)), target.config.vocab_size
    path, _, count = name.rpartition(":")
    if count.isdecimal():
        return _most_frequent(Path(path), int(count), target)
    if not name.endswith(".json"):
        raise ValueError(
            "it must be a .json file with a list of token ids, or TEXT:COUNT; convert a .pt file: "
            "json.dump([int(i) for i in torch.load('FILE.pt')], open('FILE.json', 'w'))"
        )
    try:
        ids = msgspec.json.decode(read_text(Path(name)), type=list[int])
    except msgspec.DecodeError as error:
        raise ValueError(f"{name} must have a list of token ids: {error}") from error
    if not ids or not 0 <= min(ids) <= max(ids) < vocab_size:
        values = f"from {min(ids)} to {max(ids)}" if ids else "none"
        raise ValueError(f"token ids must be in [0, vocab_size={vocab_size}); got {values}")
    different, counts = np.unique(ids, return_counts=True)
    if len(different) < len(ids):
        raise ValueError(f"token id {different[counts.argmax()]} is in the list twice; remove one")
    return different.astype(np.int32)


def _most_frequent(path: Path, count: int, target: TargetCheckpoint) -> np.ndarray:
    text, tokenizer, config = read_text(path), target.load_tokenizer(), target.config
    counts = np.zeros(config.vocab_size, np.int64)
    for at in range(0, len(text), _BLOCK):
        ids = tokenizer.encode(text[at : at + _BLOCK], add_special_tokens=False)
        counts += np.bincount(ids, minlength=config.vocab_size)[: config.vocab_size]
    counts[[i for i in config.eos_token_ids if i < config.vocab_size]] = counts.max() + 1
    most = np.count_nonzero(counts)
    if not 1 <= count <= most:
        raise ValueError(
            f"COUNT={count} must be from 1 to {most}, the different tokens in the text"
        )
    return np.sort(np.argsort(-counts, kind="stable")[:count]).astype(np.int32)
