"""Block drafters for the random target."""

from dataclasses import replace
from typing import Any

from specjax.runtime.runner import ModelRunner
from specjax.speculative.block import DFLASH, DSPARK
from specjax.testing import TARGET, random_weights
from specjax.types import DraftShape

from ..support.model_files import BLOCK
from ..support.runners import new_runner, runner_config, target_model

SIZES = {"vocab_size": TARGET.vocab_size, "draft_vocab_size": TARGET.vocab_size}
SIZES |= {"mask_token_id": 60, "max_position_embeddings": TARGET.max_position_embeddings}
NO_MARKOV: dict[str, Any] = {"markov_head": None, "markov_rank": 0, "anchor_first": False}
CONFIGS = {
    "DSPARK": replace(BLOCK, **SIZES, num_drafts=4, markov_head="rnn"),
    "DFLASH": replace(
        BLOCK, **SIZES | NO_MARKOV, num_drafts=4, windows=(0, 6), causal=(False, True)
    ),
}
ALGORITHMS = {"DSPARK": DSPARK, "DFLASH": DFLASH}


def block_runner(name: str, shapes: tuple[DraftShape, ...], **changes: Any) -> ModelRunner:
    """A runner with random weights."""
    networks = ALGORITHMS[name].networks(TARGET, CONFIGS[name])
    config = runner_config(algorithm=ALGORITHMS[name], shapes=shapes, **changes)
    draft = random_weights(networks.draft, 6)
    return new_runner(networks, config, target_model()[1], draft)
