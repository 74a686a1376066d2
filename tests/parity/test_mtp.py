"""Multi-token prediction modules against PyTorch: states, and the tokens that engines accept."""

from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from specjax.checkpoints import open_target  # noqa: E402
from specjax.checkpoints.draft import open_mtp  # noqa: E402
from specjax.models.eagle import MtpHead  # noqa: E402

from .jax_side import (  # noqa: E402
    build,
    build_target,
    check_rounds,
    dense_attend,
    empty_cache,
    relative_error,
    run_target,
)
from .mtp_reference import Modules, add_modules, module_tensors  # noqa: E402
from .torch_side import FAMILIES, make_model, rope, run_model, save  # noqa: E402

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
COUNT = 3
MIMO = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}


@pytest.mark.parametrize("family", ["qwen2", "llama31", "qwen3_bias"])
def test_states_and_logits(family: str, tmp_path: Path) -> None:
    """All states of a text, with each module over the previous one's; ``qwen2`` is MiMo."""
    model = make_model(*FAMILIES[family])
    path = save(model, tmp_path / "model")
    modules = Modules(model, module_tensors(model, COUNT, seed=1))
    add_modules(path, modules.tensors, **(MIMO if family == "qwen2" else {}))
    checkpoint = open_target(str(path), dtype="float32")
    opened = open_mtp(None, checkpoint, num_modules=COUNT)
    opened.check_weights()
    target = build_target(checkpoint)
    head = build(partial(MtpHead, opened.config), opened.load_weights())
    text = np.random.default_rng(0).integers(3, 131, (1, 24))
    length = text.shape[1] - COUNT
    positions = np.arange(length)[None]
    hidden = jnp.asarray(run_target(target, text)[1][:, :length])
    theirs = torch.from_numpy(np.asarray(hidden[0], np.float64))
    cache = empty_cache(opened.config, 1, length)
    for k in range(COUNT):
        tokens = text[:, k + 1 : k + 1 + length]
        embeds = head.embed(jnp.asarray(tokens), target)
        at = jnp.asarray(positions)
        attend = dense_attend(positions)
        hidden, cache = head.modules[k](embeds, hidden, at, cache, k, attend)
        theirs = modules.states(k, tokens[0].tolist(), theirs)
        assert relative_error(hidden[0], theirs) <= (1 + k) * TOLERANCE
        logits = head.logits(hidden[0], target)
        assert relative_error(logits, modules.logits(theirs)) <= (1 + k) * TOLERANCE


# a vocabulary so small that a random module is often right
VOCAB = 3


def simulated(modules: Modules, prompt: list[int], count: int) -> tuple[list[int], list[int]]:
    """Return a completion of ``count`` tokens and the histogram of correct drafts, all dense."""
    histogram = [0] * (COUNT + 1)
    best = run_model(modules.model, np.array([prompt]))[0][0].argmax(-1).tolist()
    output = [best[-1]]
    while len(output) < count:
        text = prompt + output
        drafts = modules.drafts(text, COUNT)
        logits, _ = run_model(modules.model, np.array([text + drafts]))
        verified = logits[0].argmax(-1).tolist()[len(text) - 1 :]
        accepted = 0
        while accepted < COUNT and drafts[accepted] == verified[accepted]:
            accepted += 1
        kept = min(accepted + 1, count - len(output))
        output += verified[:kept]
        histogram[min(accepted, kept)] += 1
    return output, histogram


@pytest.mark.slow
def test_rounds(tmp_path: Path) -> None:
    """Completions and acceptance histograms of a batch equal the PyTorch simulation."""
    changes = {"num_hidden_layers": 4, "vocab_size": VOCAB, **rope(1e4)}
    model = make_model("Qwen2Config", changes, seed=14)
    path = save(model, tmp_path / "model")
    modules = Modules(model, module_tensors(model, COUNT, seed=4))
    add_modules(path, modules.tensors, **MIMO)
    named = {name: tensor.numpy() for name, tensor in modules.tensors.items()}
    how = {"speculative_algorithm": "MULTI_LAYER_EAGLE", "speculative_num_steps": COUNT}
    check_rounds(path, named, partial(simulated, modules), VOCAB, **how)
