"""Trees on the terminal: how they are drawn, and that watching rounds changes no token."""

import re
from contextlib import nullcontext

import jax.numpy as jnp
import pytest

from specjax import Engine
from specjax.cli.main import main
from specjax.cli.painting import RoundTree, TreePainter, watched_trees
from specjax.speculative.tree import chain_input
from specjax.testing import Files
from specjax.types import NodeOutputs, VerifyInput, VerifyOutput

pytestmark = pytest.mark.slow

TREE = RoundTree(
    tokens=[10, 11, 12, 13, 14, 15],
    parents=[-1, 0, 0, 1, 1, 3],
    path=[0, 1, 4],
    bonus=16,
)
DRAWN = """
round 1: 2 of 5 drafts accepted, 3 tokens
  ' a'
* ├─ ' b'
  │  ├─ '\\n'
  │  │  └─ ' f'
* │  └─ ' e'
+ │     └─ '\\x1b'
  └─ ' c'"""
TEXTS = {10: " a", 11: " b", 12: " c", 13: "\n", 14: " e", 15: " f", 16: "\x1b"}
ADAPTIVE = {"candidate_steps": [1, 3], "warmup_batches": 1, "update_interval": 1, "ema_alpha": 0.9}
PROMPT = "hello there"
FIGURE = "spec_correct_drafts_histogram"
# with a penalty, because the greedy text of this model repeats one token
SAMPLINGS = [
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 0.9, "sampling_seed": 7},
]


def decode(ids: list[int], *, skip_special_tokens: bool) -> str:
    """Decode like a decoder that drops a leading space; special tokens stay."""
    assert not skip_special_tokens
    return "".join(map(TEXTS.__getitem__, ids)).removeprefix(" ")


def test_a_tree_is_drawn_with_marks() -> None:
    assert TreePainter(decode, colour=False).draw([TREE], 20) == DRAWN


def test_colours_only_add_to_it() -> None:
    drawn = TreePainter(decode, colour=True).draw([TREE], 20)
    assert re.sub(r"\x1b\[\d*m", "", drawn) == DRAWN
    lines = drawn.splitlines()
    assert len({line[:4] for line in (lines[3], lines[6])}) == 1
    assert len({line[:4] for line in (lines[3], lines[4], lines[7])}) == 3


@pytest.mark.parametrize(
    ("tree", "lines"),
    [
        (  # a chain without an accepted draft
            RoundTree(tokens=[10, 11, 12], parents=[-1, 0, 1], path=[0], bonus=14),
            ["0 of 2 drafts accepted, 1 token", "  ' a'", "+ ├─ ' e'", "  └─ ' b'", "     └─ ' c'"],
        ),
        (  # a fully accepted chain
            RoundTree(tokens=[10, 11], parents=[-1, 0], path=[0, 1], bonus=14),
            ["1 of 1 drafts accepted, 2 tokens", "  ' a'", "* └─ ' b'", "+    └─ ' e'"],
        ),
        (  # a round without drafts
            RoundTree(tokens=[10], parents=[-1], path=[0], bonus=14),
            ["0 of 0 drafts accepted, 1 token", "  ' a'", "+ └─ ' e'"],
        ),
    ],
)
def test_chains_are_drawn_likewise(tree: RoundTree, lines: list[str]) -> None:
    drawn = TreePainter(decode, colour=False).draw([tree], 20).splitlines()
    assert drawn == ["", f"round 1: {lines[0]}", *lines[1:]]


def test_the_end_of_the_text_is_shown() -> None:
    """Four tokens, the first from prefill: two rounds, the second is cut, no third."""
    chain = RoundTree(tokens=[10, 11], parents=[-1, 0], path=[0, 1], bonus=14)
    drawn = TreePainter(decode, colour=False).draw([chain] * 3, 4)
    assert [line for line in drawn.splitlines() if line.startswith("round")] == [
        "round 1: 1 of 1 drafts accepted, 2 tokens",
        "round 2: 1 of 1 drafts accepted, 2 tokens, 1 within the text",
    ]


def verified(count: int) -> tuple[VerifyInput, VerifyOutput]:
    """A chain of three drafts; the last one is padding."""
    tree = chain_input(jnp.array([[5, 6, 7, 8]]), jnp.array([9]), jnp.array([2]))
    tokens = jnp.array([[6, 3, 0, 0]])
    return tree, VerifyOutput(
        accept_index=jnp.array([[0, 1, -1, -1]]),
        outputs=NodeOutputs(tokens, jnp.zeros((1, 4, 1))),
        packed=jnp.array([[6, 3, 0, 0, 2, count - 1, count]]),
        bonus_tokens=jnp.array([3]),
    )


def test_padding_and_rounds_after_the_end_are_left_out() -> None:
    expected = RoundTree(tokens=[5, 6, 7], parents=[-1, 0, 1], path=[0, 1], bonus=3)
    assert RoundTree.of(*verified(2)) == expected
    assert RoundTree.of(*verified(0)) is None


@pytest.fixture(
    scope="module",
    params=[
        {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 7, "rounds_per_dispatch": 2},
        {"overlap": True},
        pytest.param(
            {"speculative_adaptive": True, "speculative_adaptive_config": ADAPTIVE},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["tree", "chain", "adaptive"],
)
def engine(files: Files, request: pytest.FixtureRequest):
    with files.small(**request.param) as made:
        yield made


@pytest.mark.long_after(2)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
def test_watched_rounds_bring_the_same_tokens(engine: Engine, sampling) -> None:
    params = sampling | {"max_new_tokens": 24, "ignore_eos": True}
    served = engine.generate(PROMPT, params)
    runner, shapes = engine.runner, engine.args.shapes
    with watched_trees(engine) as trees:
        shown = engine.generate(PROMPT, params)
    assert runner._watch is None
    ids, meta = shown["output_ids"], shown["meta_info"]
    assert ids == served["output_ids"]
    if len(shapes) == 1:  # otherwise the text also depends on the request before
        assert meta[FIGURE] == served["meta_info"][FIGURE]
    # trees connect: each begins with the last token of the one before
    told, root = ids[:1], ids[0]
    for tree in trees:
        assert tree.tokens[0] == root
        assert [tree.parents[row] for row in tree.path[1:]] == tree.path[:-1]
        told += [*(tree.tokens[row] for row in tree.path[1:]), tree.bonus]
        root = tree.bonus
    assert told[: len(ids)] == ids
    assert max(len(tree.path) for tree in trees) > 1
    sizes = {len(tree.tokens) for tree in trees}
    assert shapes[-1].nodes in sizes <= {shape.nodes for shape in shapes}
    is_chain = all(tree.parents == [*range(-1, len(tree.tokens) - 1)] for tree in trees)
    assert is_chain == (shapes[-1].topk == 1)
    # the engine continues as before
    assert engine.generate(PROMPT, params)["output_ids"] == ids


@pytest.mark.long_after(4)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
def test_the_command_prints_the_text_and_then_the_trees(
    engine: Engine, sampling, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    options = [PROMPT, "--max-new-tokens", "12", "--ignore-eos"]
    for name, value in sampling.items():
        options += [f"--{name.replace('_', '-')}", str(value)]

    def run(*more: str) -> tuple[str, str]:
        argv = ["generate", *options, *more]
        assert main(argv, make_engine=lambda **_: nullcontext(engine)) == 0
        return capsys.readouterr()

    text, figures = run()
    out, err = run("--show-tree")
    assert out.startswith(text)
    trees = out.removeprefix(text).splitlines()
    headers = [line for line in trees if line.startswith("round ")]
    assert [int(line.split()[1].rstrip(":")) for line in headers] == [*range(1, len(headers) + 1)]
    assert f"| {len(headers)} verify calls |" in figures
    assert sum(line.startswith("+") for line in trees) == len(headers)
    accepted = sum(int(line.split()[2]) for line in headers)
    assert sum(line.startswith("*") for line in trees) == accepted > 0
    assert "* accepted, + bonus token of the target" in err
    assert "verify calls" in err
