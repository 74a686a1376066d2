"""The PyTorch statement of block drafters: its reading of files, layouts and masks."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ..support.block_files import CASES, BlockCase, publish, random_tensors  # noqa: E402
from .block_reference import Block, Target, default_taps, read_block  # noqa: E402

pytestmark = pytest.mark.parity


def make_target(case: BlockCase, seed: int = 0) -> Target:
    rng = np.random.default_rng(seed)
    table, head = rng.normal(size=(2, case.vocab, case.target_hidden)).astype(np.float32)
    return Target(torch.from_numpy(table), torch.from_numpy(head), case.target_layers)


def make_block(case: BlockCase, path: Path, seed: int = 1) -> Block:
    target = make_target(case)
    copies = {
        "embed_tokens.weight": target.embedding.numpy(),
        "lm_head.weight": target.lm_head.numpy(),
    }
    publish(case, random_tensors(case, copies, seed), path)
    return read_block(path, target)


def features(case: BlockCase, count: int) -> "torch.Tensor":
    width = len(case.taps) * case.target_hidden
    return torch.from_numpy(np.random.default_rng(7).normal(size=(count, width)))


@pytest.mark.parametrize("name", CASES)
def test_spellings(name: str, tmp_path: Path) -> None:
    """Every spelling is read as it was meant."""
    case = CASES[name]
    block = make_block(case, tmp_path / "draft")
    assert (block.fills_in, block.rows, block.drafts) == (case.fills_in, case.rows, case.drafts)
    assert (block.taps, block.mask, block.markov) == (case.taps, case.mask, case.markov)
    assert (block.windows, block.causal) == (case.layer_windows, case.layer_causal)
    assert (block.theta, block.eps) == (case.theta, case.eps)
    assert (block.heads, block.kv_heads, block.head_dim) == (
        case.heads,
        case.kv_heads,
        case.head_dim,
    )
    context = block.context(features(case, 5), range(5))
    tokens, logits, confidences = block.draw(block.states(2, 5, context), 2)
    assert len(tokens) == len(logits) == case.drafts
    assert logits.shape[1] == (case.draft_vocab or case.vocab)
    assert (confidences is None) == (case.confidence is None)


def test_default_taps() -> None:
    assert default_taps(5, 36) == (1, 9, 17, 25, 33)
    assert default_taps(5, 24) == (1, 6, 11, 16, 21)
    assert default_taps(5, 64) == (1, 16, 31, 46, 61)
    assert default_taps(3, 7) == (1, 2, 4)  # half to even
    assert default_taps(1, 36) == (18,)


@pytest.mark.parametrize("name", ["1", "3"])
def test_worked_example(name: str, tmp_path: Path) -> None:
    """A B C are known and D is the anchor: three tokens are drafted for positions 4, 5 and 6."""
    block = make_block(CASES[name], tmp_path / "draft")
    context = block.context(features(CASES[name], 3), [0, 1, 2])
    states = block.states(11, 3, context)
    tokens, _, _ = block.draw(states, 11)
    assert len(states) == (4 if name == "1" else 3)
    assert len(tokens) == 3
    if name == "1":  # the anchor's row predicts nothing; the others their own positions
        head = block.target.lm_head.double()
        assert tokens == [int((head @ states[j]).argmax()) for j in (1, 2, 3)]


def test_masks(tmp_path: Path) -> None:
    """Rows of full layers see everything; rows of sliding layers a window, up to themselves."""
    block = make_block(CASES["1-sliding"], tmp_path / "draft")
    assert block.windows == (4, None)
    sliding, full = block.seen(0, 3).tolist(), block.seen(1, 3)
    assert full.shape == (4, 7)
    assert full.all()
    assert [[i for i, seen in enumerate(row) if seen] for row in sliding] == [
        [0, 1, 2, 3],
        [1, 2, 3, 4],
        [2, 3, 4, 5],
        [3, 4, 5, 6],
    ]


def test_context_is_read_up_to_the_anchor(tmp_path: Path) -> None:
    """Later positions do not matter, all earlier ones do, and rows see later rows."""
    case = CASES["1"]
    block = make_block(case, tmp_path / "draft")
    fed = features(case, 6)
    states = block.states(3, 4, block.context(fed, range(6)))
    for position in range(6):
        changed = fed.clone()
        changed[position] += 1
        other = block.states(3, 4, block.context(changed, range(6)))
        assert bool((other != states).any(1).all()) == (position < 4)
        assert bool((other != states).any()) == (position < 4)
    assert (block.states(4, 4, block.context(fed, range(6))) != states).any(1).all()


def test_context_by_parts(tmp_path: Path) -> None:
    block = make_block(CASES["3"], tmp_path / "draft")
    fed = features(CASES["3"], 6)
    whole = block.context(fed, range(6))
    for positions in ([0, 1], [2], [3, 4, 5]):
        for layer, part in enumerate(block.context(fed[positions], positions)):
            for x, y in zip(part, whole[layer], strict=True):
                torch.testing.assert_close(x, y[positions], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["3", "3-gated", "3-rnn", "6-reduced"])
def test_markov_chain(name: str, tmp_path: Path) -> None:
    """Each token's logits depend on the token before; noise and temperature change the draws."""
    case = CASES[name]
    block = make_block(case, tmp_path / "draft")
    states = block.states(2, 5, block.context(features(case, 5), range(5)))
    tokens, logits, _ = block.draw(states, 2)
    _, others, _ = block.draw(states, 3)
    assert (logits[0] != others[0]).any()
    noise = torch.zeros(case.drafts, case.vocab)
    assert block.draw(states, 2, noise, 0.5)[0] == tokens
    noise[0, (wanted := 77 if not case.draft_vocab else tokens[0])] = 1e6
    assert block.draw(states, 2, noise, 0.5)[0][0] == wanted
