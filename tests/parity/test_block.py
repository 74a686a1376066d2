"""Block drafters against the PyTorch statement, for every spelling of their files.

Each test reads a prompt, drafts, and then twice stores verified rows and drafts again, for two
requests of different lengths in one batch. Verified rows that were not accepted are stored too;
the PyTorch side never sees them, and reads all of the text at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from specjax.checkpoints import open_target  # noqa: E402
from specjax.checkpoints.block import open_block  # noqa: E402
from specjax.checkpoints.target import TargetCheckpoint  # noqa: E402
from specjax.models.block import BlockDraft  # noqa: E402
from specjax.models.decoder import CausalLM  # noqa: E402

from ..support.block_files import (  # noqa: E402
    CASES,
    HIDDEN,
    TARGET_LAYERS,
    VOCAB,
    BlockCase,
    publish,
    random_tensors,
)
from .block_reference import Block, Target, read_block  # noqa: E402
from .jax_side import (  # noqa: E402
    build,
    build_target,
    dense_attend,
    dense_store,
    empty_cache,
    relative_error,
)
from .torch_side import make_model, rope, save  # noqa: E402

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
PROMPTS, ACCEPTED, VERIFIED, SLOTS = (7, 11), ((1, 3), (4, 2)), 5, 40


@dataclass(frozen=True)
class Pair:
    """A target on disk, opened, built, and as PyTorch sees it."""

    checkpoint: TargetCheckpoint
    model: CausalLM
    reference: Target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    changes = {
        "num_hidden_layers": TARGET_LAYERS,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        **rope(1e4),
    }
    path = save(make_model("LlamaConfig", changes), tmp_path_factory.mktemp("target"))
    checkpoint = open_target(str(path), dtype="float32")
    model = build_target(checkpoint)
    table = torch.from_numpy(np.array(model.embedding.table[...]))
    head = torch.from_numpy(np.array(model.lm_head.kernel[...]).T.copy())
    return Pair(checkpoint, model, Target(table, head, TARGET_LAYERS))


def write(case: BlockCase, target: Pair, path: Path, seed: int = 0) -> Path:
    copies = {
        "embed_tokens.weight": target.reference.embedding.numpy(),
        "lm_head.weight": target.reference.lm_head.numpy(),
    }
    return publish(case, random_tensors(case, copies, seed), path)


def run_rounds(
    width: int,
    store: Callable[[np.ndarray, np.ndarray], None],
    draft: Callable[[np.ndarray, np.ndarray], None],
) -> tuple[list[np.ndarray], list[list[int]], list[np.ndarray]]:
    """Call ``store(features, positions)`` and ``draft(anchors, lengths)`` as rounds do.

    Returns the accepted features of each request, its lengths and the anchors of each draft.
    """
    rng = np.random.default_rng(5)
    lengths, texts = np.array(PROMPTS), [np.zeros((0, width))] * 2
    all_lengths, anchors = [], []
    for step in range(1 + len(ACCEPTED)):
        if step:
            counts, rows, start = np.array(ACCEPTED[step - 1]), VERIFIED, lengths
            lengths = lengths + counts
        else:
            counts, rows, start = lengths, max(PROMPTS), np.zeros(2, int)
        features = rng.normal(size=(2, rows, width)).astype(np.float32)
        store(features, start[:, None] + np.arange(rows))
        texts = [
            np.concatenate([text, features[b, :n]])
            for b, (text, n) in enumerate(zip(texts, counts, strict=True))
        ]
        anchors.append(rng.integers(0, VOCAB, 2))
        all_lengths.append(lengths.tolist())
        draft(anchors[-1], lengths)
    return texts, all_lengths, anchors


def run_specjax(head: BlockDraft, target: CausalLM) -> tuple[list[Any], Any]:
    config = head.config
    cache = empty_cache(config, 2, SLOTS)
    results: list[Any] = []

    def store(features: np.ndarray, positions: np.ndarray) -> None:
        nonlocal cache
        at = jnp.asarray(positions)
        cache = head.store(jnp.asarray(features), at, cache, dense_store(positions))

    def draft(anchors: np.ndarray, lengths: np.ndarray) -> None:
        nonlocal cache
        tokens = np.full((2, config.block), config.mask_token_id)
        tokens[:, 0] = anchors
        positions = lengths[:, None] + np.arange(config.block)
        hidden, cache = head(
            jnp.asarray(tokens),
            jnp.asarray(positions),
            cache,
            dense_attend(positions, is_causal=False),
            dense_attend(positions),
            target,
        )
        results.append(draw(head, target, hidden, anchors))

    return results, run_rounds(config.feature_size, store, draft)


def draw(head: BlockDraft, target: CausalLM, hidden: Any, anchors: np.ndarray) -> tuple[Any, ...]:
    """Tokens ``[g, 2]``, logits and confidences (None without a head) of a block's states."""
    hidden = hidden if head.config.anchor_first else hidden[:, 1:]
    base, previous = head.logits(hidden, target), jnp.asarray(anchors)
    state = None if head.markov is None else head.markov.start(2)
    tokens, logits, confidences = [], [], []
    for j in range(head.config.num_drafts):
        inputs, row = [hidden[:, j]], base[:, j]
        if head.markov is not None:
            inputs.append(head.markov.embedding(previous))
            bias, state = head.markov(previous, hidden[:, j], state)
            row = row + bias
        if head.confidence_head is not None:
            both = head.config.confidence_with_markov
            given = jnp.concatenate(inputs, axis=-1) if both else inputs[0]
            logit = head.confidence_head(given, jnp.float32)[..., 0]
            confidences.append(jax.nn.sigmoid(logit))
        previous = head.target_ids(jnp.argmax(row, axis=-1))
        tokens.append(np.asarray(previous))
        logits.append(row)
    return np.stack(tokens), jnp.stack(logits), jnp.stack(confidences) if confidences else None


def check_rounds(head: BlockDraft, target: CausalLM, reference: Block) -> None:
    """Compare tokens, logits and confidences of all rounds."""
    results, (texts, lengths, anchors) = run_specjax(head, target)
    for (tokens, logits, confidences), ends, roots in zip(results, lengths, anchors, strict=True):
        for b, (n, root) in enumerate(zip(ends, roots, strict=True)):
            context = reference.context(torch.from_numpy(texts[b][:n]), range(n))
            states = reference.states(int(root), n, context)
            their_tokens, their_logits, their_confidences = reference.draw(states, int(root))
            assert relative_error(logits[:, b], their_logits) <= TOLERANCE
            assert tokens[:, b].tolist() == their_tokens
            assert (confidences is None) == (their_confidences is None)
            if their_confidences is not None:
                assert relative_error(confidences[:, b], their_confidences) <= TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_drafts(name: str, target: Pair, tmp_path: Path) -> None:
    case = CASES[name]
    path = write(case, target, tmp_path / "draft", seed=len(name))
    opened = open_block(str(path), target.checkpoint)
    opened.check_weights()
    config = opened.config
    assert (config.anchor_first, config.block) == (not case.fills_in, case.rows)
    assert (config.num_drafts, config.mask_token_id) == (case.drafts, case.mask)
    assert (config.feature_layers, config.rope_theta) == (case.taps, case.theta)
    assert tuple(window or None for window in config.windows) == case.layer_windows
    assert (config.causal, config.markov_head) == (case.layer_causal, case.markov)
    assert config.max_position_embeddings >= target.checkpoint.config.max_position_embeddings
    head = build(partial(BlockDraft, config), opened.load_weights())
    check_rounds(head, target.model, read_block(path, target.reference))


def test_rope_theta_override(target: Pair, tmp_path: Path) -> None:
    """An explicit theta replaces the file's."""
    path = write(CASES["1"], target, tmp_path / "draft")
    opened = open_block(str(path), target.checkpoint, rope_theta=321.0)
    head = build(partial(BlockDraft, opened.config), opened.load_weights())
    check_rounds(head, target.model, replace(read_block(path, target.reference), theta=321.0))
