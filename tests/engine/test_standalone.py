"""Engines whose draft is another model: texts, weights, plan, and models that do not fit."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from specjax import Engine
from specjax.checkpoints import open_target
from specjax.engine.args import EngineArgs
from specjax.engine.plan import plan_engine
from specjax.testing import letter_tokenizer
from specjax.testing.files import CONFIG
from specjax.text.tokenizer import Tokenizer

from ..support.model_files import write_model

pytestmark = pytest.mark.slow
ALGORITHM = "STANDALONE"
TEXTS = ["hello", "The sky is blue", "a", "def f(x): return x"]
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
SEEDED = GREEDY | {"temperature": 0.8, "sampling_seed": 4}
# another family than the target's
SMALL = replace(
    CONFIG,
    model_type="qwen2",
    qkv_bias=True,
    tie_word_embeddings=True,
    num_layers=1,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
)
# down to no drafts at every round, and up again
JUMPY = {
    "policy": "ema",
    "candidate_steps": [0, 3],
    "ema_alpha": 1.0,
    "warmup_batches": 0,
    "update_interval": 1,
}


def write_draft(
    path: Path, seed: int = 5, tokenizer: Any = None, settings: Any = None, **changes: Any
) -> Path:
    config = replace(SMALL, **changes)
    tokenizer = tokenizer or letter_tokenizer()
    return write_model(path, config, seed=seed, tokenizer=tokenizer, **(settings or {}))


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> Path:
    return write_draft(tmp_path_factory.mktemp("draft") / "model")


@pytest.fixture(scope="module")
def standalone(files, base_engine, draft) -> Iterator[Engine]:
    with files.engine(
        draft=draft,
        speculative_algorithm=ALGORITHM,
        speculative_adaptive=True,
        speculative_adaptive_config=JUMPY,
        share_weights_with=base_engine,
    ) as made:
        yield made


def answers(engine: Engine, params: Any = GREEDY) -> list[list[int]]:
    return [out["output_ids"] for out in engine.generate(TEXTS, params)]


def test_texts_are_those_of_plain_decoding(standalone, plain) -> None:
    assert "qwen2 model" in standalone.draft.describe()
    for params in (GREEDY, SEEDED):
        assert answers(standalone, params) == answers(plain, params)
    figures = standalone.get_server_info()["internal_states"][0]["adaptive"]["tiers"]
    assert set(figures) == {"0", "3"}


def test_other_weights_of_the_draft(standalone, plain, draft, tmp_path) -> None:
    """From a directory and by published names; drafts change, texts do not."""
    expected = answers(plain)
    names = standalone.runner.networks.draft.names

    def table() -> np.ndarray:
        return np.asarray(standalone.runner.weights[1][names.index("embedding.table")])

    before = table()
    standalone.update_weights_from_disk(draft_path=write_draft(tmp_path / "other", seed=6))
    assert np.abs(table() - before).max() > 0.1
    assert answers(standalone) == expected
    standalone.update_weights_from_tensor({"model.embed_tokens.weight": before}, draft=True)
    np.testing.assert_array_equal(table(), before)
    with pytest.raises(ValueError, match=r"hidden_size=32 instead of 16"):
        standalone.update_weights_from_disk(
            draft_path=write_draft(tmp_path / "wide", hidden_size=32)
        )
    standalone.update_weights_from_disk(draft_path=draft)
    assert answers(standalone) == expected


def plan(files: Any, draft: Any, **changes: Any) -> Any:
    options = {"speculative_algorithm": ALGORITHM, "speculative_num_steps": 3}
    return plan_engine(EngineArgs(model=files.target, draft=draft, **(options | changes)))


def test_the_plan_counts_both_models(files, draft) -> None:
    found = plan(files, draft)
    alone = plan(files, None, speculative_algorithm=None, speculative_num_steps=None)
    token = 2 * SMALL.num_layers * SMALL.num_kv_heads * SMALL.head_dim * 4
    assert found.needs.token_bytes - alone.needs.token_bytes == token
    assert found.needs.weight_bytes - alone.needs.weight_bytes == sum(
        leaf.size * leaf.dtype.itemsize for leaf in found.networks.draft.abstract
    )
    assert found.networks.draft_config.dtype == found.networks.target_config.dtype == "float32"


def other_letters() -> Tokenizer:
    """A tokenizer with two letters swapped."""
    given = json.loads(letter_tokenizer().backend.to_str())
    vocab = given["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    return Tokenizer(
        tokenizers.Tokenizer.from_str(json.dumps(given)), special_tokens={"eos_token": "</s>"}
    )


def test_models_that_cannot_draft_are_refused(files, draft, tmp_path) -> None:
    size = CONFIG.vocab_size
    wide = write_draft(tmp_path / "wide", vocab_size=size + 1)
    with pytest.raises(
        ValueError, match=rf"vocab_size={size + 1}, but model=.* has vocab_size={size}"
    ):
        plan(files, wide)
    short = write_draft(tmp_path / "short", max_position_embeddings=64)
    with pytest.raises(ValueError, match=r"reads at most 64 tokens, .* set context_length=64"):
        plan(files, short)
    assert plan(files, short, context_length=64).context_length == 64
    other = write_draft(tmp_path / "other", tokenizer=other_letters())
    with pytest.raises(ValueError, match=r"tokenizers of draft=.* differ in 2 ids: id 0 is 'b'"):
        plan(files, other)
    plan(files, other, skip_tokenizer_init=True)
    bare = tmp_path / "bare"
    shutil.copytree(draft, bare)
    (bare / "tokenizer.json").unlink()
    assert plan(files, bare).drafts[0].config == open_target(draft).config
    with pytest.raises(ValueError, match="speculative_eagle_topk=99 exceeds the draft vocabulary"):
        plan(files, draft, speculative_num_steps=1, speculative_eagle_topk=99)
    with pytest.raises(ValueError, match=r"draft='.*' is neither a known name"):
        plan(files, tmp_path / "none")
    with pytest.raises(ValueError, match=r"draft=None, but speculative_algorithm=STANDALONE"):
        plan(files, None)
