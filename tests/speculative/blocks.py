"""Block drafters for the random target."""

from dataclasses import replace
from typing import Any

from specjax.testing import TARGET

from ..support.model_files import BLOCK

SIZES = {"vocab_size": TARGET.vocab_size, "draft_vocab_size": TARGET.vocab_size}
SIZES |= {"mask_token_id": 60, "max_position_embeddings": TARGET.max_position_embeddings}
NO_MARKOV: dict[str, Any] = {"markov_head": None, "markov_rank": 0, "anchor_first": False}
CONFIGS = {
    "DSPARK": replace(BLOCK, **SIZES, num_drafts=4, markov_head="rnn"),
    "DFLASH": replace(
        BLOCK, **SIZES | NO_MARKOV, num_drafts=4, windows=(0, 6), causal=(False, True)
    ),
}
