"""Tiny models, their files, engines and a server for tests of specjax and of plugins.

Nothing here needs pytest. Models have a vocabulary of 61 or 98 tokens and two layers, so that an
engine compiles in seconds. With their weights, drafts are often accepted and often rejected.
"""

from specjax.testing.dense import (
    Job,
    Output,
    adjusted_logits,
    dense_decode,
    dense_logits,
    kept_by_sorting,
)
from specjax.testing.engines import STEPS, Files, check_tokens, is_idle, num_held, write_files
from specjax.testing.files import letter_tokenizer
from specjax.testing.models import EAGLE3, TARGET, random_weights
from specjax.testing.server import Answer, Client, running, serve

__all__ = [
    "EAGLE3",
    "STEPS",
    "TARGET",
    "Answer",
    "Client",
    "Files",
    "Job",
    "Output",
    "adjusted_logits",
    "check_tokens",
    "dense_decode",
    "dense_logits",
    "is_idle",
    "kept_by_sorting",
    "letter_tokenizer",
    "num_held",
    "random_weights",
    "running",
    "serve",
    "write_files",
]
