"""Qwen3.5's own draft layer against numpy: states, and the tokens that engines accept."""

from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402

from specjax.checkpoints import open_target  # noqa: E402
from specjax.checkpoints.draft import open_mtp  # noqa: E402
from specjax.models.eagle import build_head  # noqa: E402

from .jax_side import (  # noqa: E402
    build,
    build_target,
    check_rounds,
    dense_attend,
    relative_error,
    run_target,
)
from .nextn_reference import DraftLayer, layer_tensors  # noqa: E402
from .torch_side import FAMILIES, make_model, run_model, save  # noqa: E402

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4


def write(path: Path, family: str, seed: int, **changes: Any) -> Any:
    """Write a random model with a draft layer; return both sides of it."""
    name, values = FAMILIES[family]
    model = make_model(name, {**values, **changes}, seed=seed)
    save(model, path)
    stored = load_file(path / "model.safetensors")
    at = "model.layers.1."  # with attention
    shapes = {x.removeprefix(at): y.shape for x, y in stored.items() if x.startswith(at)}
    tensors = layer_tensors(shapes, model.config.hidden_size, seed)
    save_file(stored | tensors, path / "model.safetensors")
    table, head = stored["model.embed_tokens.weight"], stored["lm_head.weight"]
    both = (x.astype(np.float64) for x in (table, head))
    return model, DraftLayer(model.config, tensors, *both)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_states_and_logits(family: str, tmp_path: Path) -> None:
    """A pass over target states, then steps that read the layer's own."""
    _, layer = write(tmp_path, family, seed=0)
    checkpoint = open_target(str(tmp_path), dtype="float32")
    opened = open_mtp(None, checkpoint, num_modules=1)
    opened.check_weights()
    target = build_target(checkpoint)
    head = build(partial(build_head, opened.config), opened.load_weights())
    text = np.random.default_rng(0).integers(3, 131, 24)
    length, steps = 20, 3
    hidden = run_target(target, text[None, :length])[1]
    shape = (1, length + steps, opened.config.num_kv_heads, opened.config.head_dim)
    cache, fed = {0: (jnp.full(shape, jnp.nan),) * 2}, np.asarray(hidden[0], np.float64)
    inputs, positions = hidden, np.arange(length)[None]
    for step in range(steps + 1):
        tokens = text[None, positions[0] + 1]
        embeds = head.embed(jnp.asarray(tokens), target)
        ours, cache = head(
            embeds, head.fuse(inputs), jnp.asarray(positions), cache, dense_attend(positions)
        )
        theirs = layer.states(text[1 : length + step + 1].tolist(), fed)
        expected = theirs[positions[0]]
        assert relative_error(ours[0], expected) <= (1 + step) * TOLERANCE
        logits = head.logits(ours[0], target)
        assert relative_error(logits, expected @ layer.head.T) <= (1 + step) * TOLERANCE
        inputs, positions = ours[:, -1:], positions[:, -1:] + 1
        fed = np.concatenate([fed, theirs[-1:]])


# a vocabulary so small that a random layer is often right
VOCAB, STEPS = 3, 3


def simulated(
    model: Any, layer: DraftLayer, prompt: list[int], count: int
) -> tuple[list[int], list[int]]:
    """Return a completion of ``count`` tokens and the histogram of correct drafts, all dense."""

    def states(text: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model.model(torch.tensor([text])).last_hidden_state[0].double().numpy()

    histogram = [0] * (STEPS + 1)
    best = run_model(model, np.array([prompt]))[0][0].argmax(-1).tolist()
    output = [best[-1]]
    while len(output) < count:
        text = prompt + output
        drafts = layer.drafts(text, states(text[:-1]), STEPS)
        logits, _ = run_model(model, np.array([text + drafts]))
        verified = logits[0].argmax(-1).tolist()[len(text) - 1 :]
        accepted = 0
        while accepted < STEPS and drafts[accepted] == verified[accepted]:
            accepted += 1
        kept = min(accepted + 1, count - len(output))
        output += verified[:kept]
        histogram[min(accepted, kept)] += 1
    return output, histogram


@pytest.mark.slow
def test_rounds(tmp_path: Path) -> None:
    """Completions and acceptance of a batch equal the simulation; no draft is named."""
    model, layer = write(tmp_path, "qwen3_5", seed=6, vocab_size=VOCAB)
    how = {"speculative_algorithm": "NEXTN", "speculative_num_steps": STEPS}
    check_rounds(tmp_path, layer.tensors, partial(simulated, model, layer), VOCAB, **how)
