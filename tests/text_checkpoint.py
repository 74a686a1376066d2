"""A tiny random target on disk, with tokenizer and chat template, and an EAGLE-3 head for it."""

import json
import string
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.checkpoints.files import (
    CONFIG,
    HEAD_CONFIG,
    VOCAB,
    head_tensors,
    target_tensors,
    write_directory,
)

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant "


def character_tokenizer() -> tokenizers.Tokenizer:
    """One token for each of 61 characters, among them ASCII letters and the space."""
    # byte-level BPE writes a space as U+0120
    letters = [*string.ascii_letters, "\u0120", *string.punctuation][:VOCAB]
    backend = tokenizers.Tokenizer(
        models.BPE({letter: i for i, letter in enumerate(letters)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def write_text_pair(folder: Path) -> tuple[str, str]:
    """Writes target and head below ``folder``; returns their paths."""
    target = write_directory(folder / "target", CONFIG, target_tensors(seed=5))
    character_tokenizer().save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    head = write_directory(folder / "head", HEAD_CONFIG, head_tensors())
    return str(target), str(head)
