"""Logits and features of loaded checkpoints against transformers, in float32."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from specjax.checkpoints import open_target  # noqa: E402

from .jax_side import build_target, relative_error, run_target  # noqa: E402
from .torch_side import FAMILIES, MIXTURES, REFUSED, make_model, run_model, save  # noqa: E402

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4


def random_tokens(vocab_size: int, shape: tuple[int, int], seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, shape)


def check_equal(path: Path, model: "transformers.PreTrainedModel", length: int = 100) -> None:
    """Load ``path`` and compare logits and the output of every layer with ``model``."""
    checkpoint = open_target(str(path), dtype="float32")
    config = checkpoint.config
    tokens = random_tokens(config.vocab_size, (2, length))
    theirs, layers = run_model(model, tokens)
    every = tuple(range(config.num_layers))
    ours, features = run_target(build_target(checkpoint), tokens, every)
    assert relative_error(ours, theirs) <= TOLERANCE
    assert relative_error(features, np.concatenate(layers, axis=-1)) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, tmp_path: Path) -> None:
    model = make_model(*FAMILIES[family])
    path = save(model, tmp_path / "model")
    if family in REFUSED:
        with pytest.raises(ValueError, match=r"needs LayerNorm layers, .* must be one of"):
            open_target(str(path))
    else:
        check_equal(path, model)


@pytest.mark.parametrize("family", MIXTURES)
def test_stacked_experts(family: str, tmp_path: Path) -> None:
    """In transformers' own layout, the experts of a layer are one tensor."""
    model = make_model(*FAMILIES[family])
    path = save(model, tmp_path / "model", save_original_format=False)
    check_equal(path, model, length=20)


@pytest.mark.parametrize("family", ["llama31", "qwen2_tied", "qwen3"])
def test_sharded_bfloat16(family: str, tmp_path: Path) -> None:
    model = make_model(*FAMILIES[family], seed=1).to(torch.bfloat16)
    path = save(model, tmp_path / "model", max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    check_equal(path, reference.eval())


@pytest.mark.parametrize("family", ["llama_bias", "qwen3_tied"])
def test_bfloat16_forward(family: str, tmp_path: Path) -> None:
    """The error in bfloat16 is at most twice that of transformers."""
    path = save(make_model(*FAMILIES[family], seed=2).to(torch.bfloat16), tmp_path / "model")
    checkpoint = open_target(str(path), dtype="auto")
    assert checkpoint.config.dtype == "bfloat16"
    tokens = random_tokens(checkpoint.config.vocab_size, (2, 24))
    ours, _ = run_target(build_target(checkpoint), tokens)
    exact, theirs = (
        run_model(
            transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation="eager"
            ).eval(),
            tokens,
        )[0]
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert relative_error(ours, exact) <= 2 * relative_error(theirs, exact)
