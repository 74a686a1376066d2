"""Tiny models, their files, engines over them, and a server: for tests of specjax and of plugins.

Nothing here needs pytest. Models have 61 or 98 tokens and two layers, so that an engine compiles in
seconds. Their weights are constructed so that drafts are often accepted and often rejected.
"""

from specjax.testing.copying import (
    PERTURBATION,
    copied_runner,
    copied_weights,
    copying_head,
    copying_target,
    plain_output,
    plain_outputs,
)
from specjax.testing.engines import STEPS, Files, engine_files, is_idle, num_held
from specjax.testing.files import (
    CONFIG,
    EOS,
    EOS_ID,
    HEAD,
    LETTERS,
    TEMPLATE,
    letter_tokenizer,
    write_draft_model,
    write_eagle_head,
    write_head,
    write_modules,
    write_target,
)
from specjax.testing.server import Answer, Client, running
from specjax.testing.tiny import (
    EAGLE,
    EAGLE3,
    TARGET,
    algorithm_of,
    chains,
    dense_greedy,
    head_weights,
    make_request,
    make_runner,
    random_weights,
    run_requests,
    target_model,
)

__all__ = [
    "CONFIG",
    "EAGLE",
    "EAGLE3",
    "EOS",
    "EOS_ID",
    "HEAD",
    "LETTERS",
    "PERTURBATION",
    "STEPS",
    "TARGET",
    "TEMPLATE",
    "Answer",
    "Client",
    "Files",
    "algorithm_of",
    "chains",
    "copied_runner",
    "copied_weights",
    "copying_head",
    "copying_target",
    "dense_greedy",
    "engine_files",
    "head_weights",
    "is_idle",
    "letter_tokenizer",
    "make_request",
    "make_runner",
    "num_held",
    "plain_output",
    "plain_outputs",
    "random_weights",
    "run_requests",
    "running",
    "target_model",
    "write_draft_model",
    "write_eagle_head",
    "write_head",
    "write_modules",
    "write_target",
]
