"""Any two ways to serve meet in at least one engine, which produces the tokens of plain decoding.

Each row of the table is an engine. Its pool is too small for the concurrent requests, and greedy
and seeded requests share its batches. Meanwhile callers abort, flush and update weights.
"""

from collections.abc import Iterable, Iterator
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from specjax.engine.args import EngineArgs

from .draws import ALGORITHMS, Drafts
from .rows import BATCHES, SEEN, Row, drafting, serving
from .trial import Reference, Trial

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "algorithm": tuple(ALGORITHMS),
    "shape": ("chain", "cut chain", "tree"),
    "rounds": ("in turn", "ahead"),
    "page size": (1, 16),
    "prompts": ("here", "split"),
    "steps": ("fixed", "adaptive"),
    "rounds per dispatch": (1, 3),
}
# the fewest rows that a search found
ROWS: list[Row] = [
    ("EAGLE3", "chain", "in turn", 16, "here", "adaptive", 3),
    ("EAGLE3", "tree", "in turn", 16, "here", "fixed", 1),
    ("EAGLE3", "cut chain", "ahead", 1, "split", "adaptive", 3),
    ("EAGLE", "chain", "ahead", 16, "here", "fixed", 3),
    ("EAGLE", "tree", "ahead", 1, "split", "adaptive", 1),
    ("EAGLE", "cut chain", "in turn", 16, "here", "fixed", 3),
    ("STANDALONE", "chain", "in turn", 1, "here", "adaptive", 3),
    ("STANDALONE", "tree", "in turn", 16, "split", "fixed", 3),
    ("STANDALONE", "cut chain", "ahead", 1, "here", "adaptive", 1),
    ("MULTI_LAYER_EAGLE", "chain", "in turn", 16, "split", "adaptive", 1),
    ("MULTI_LAYER_EAGLE", "cut chain", "ahead", 1, "here", "fixed", 3),
    ("markov", "chain", "in turn", 1, "here", "fixed", 3),
    ("markov", "chain", "ahead", 16, "split", "adaptive", 1),
    ("NGRAM", "chain", "in turn", 16, "split", "fixed", 1),
    ("NGRAM", "tree", "ahead", 1, "here", "adaptive", 3),
    ("DFLASH", "chain", "in turn", 1, "split", "adaptive", 3),
    ("DFLASH", "chain", "ahead", 16, "here", "fixed", 1),
    ("DSPARK", "chain", "ahead", 16, "here", "fixed", 3),
    ("DSPARK", "chain", "in turn", 1, "split", "adaptive", 1),
    ("P-EAGLE", "chain", "in turn", 16, "here", "adaptive", 3),
    ("P-EAGLE", "cut chain", "ahead", 1, "split", "fixed", 1),
]
OFTEN = (1, 3, 7, 10, 11, 14, 16, 18, 19)  # the fewest rows with all algorithms and other values


def is_accepted(row: Row, drafts: Drafts) -> bool:
    options = drafting(row, drafts) | serving(row)
    if row[:2] == ("P-EAGLE", "tree"):  # refused when the file is read
        return False
    try:
        EngineArgs(**{name: options[name] for name in options if name not in ("kind", "prefill")})
    except ValueError:
        return False
    return True


def pairs(rows: Iterable[Row]) -> set[Any]:
    named = (zip(DIMENSIONS, row, strict=True) for row in rows)
    return {pair for row in named for pair in combinations(row, 2)}


def test_rows_that_run_often_have_all_values() -> None:
    for values, present in zip(
        DIMENSIONS.values(), zip(*(ROWS[i] for i in OFTEN), strict=True), strict=True
    ):
        assert set(values) == set(present)


def test_every_pair_that_engines_accept_is_in_the_table(drafts) -> None:
    accepted = {row for row in product(*DIMENSIONS.values()) if is_accepted(row, drafts)}
    assert not set(ROWS) - accepted
    assert not pairs(accepted) - pairs(ROWS)
    for shape, refused in (
        ("tree", {"P-EAGLE", "MULTI_LAYER_EAGLE", "DFLASH", "DSPARK", "markov"}),
        ("cut chain", {"NGRAM", "DFLASH", "DSPARK", "markov"}),
    ):
        assert {row[0] for row in accepted if row[1] == shape} == set(ALGORITHMS) - refused


@pytest.fixture(scope="module")
def plain(files) -> Iterator[Reference]:
    reference = Reference.of(files)
    yield reference
    reference.close()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if i in OFTEN else pytest.mark.long) for i, row in enumerate(ROWS)],
    ids=lambda row: "-".join(map(str, row)),
)
def test_engines_equal_plain_decoding(files, drafts, plain, row, device) -> None:
    rng = np.random.default_rng(ROWS.index(row))
    options = drafting(row, drafts) | serving(row)
    if has_grammars := ROWS.index(row) % 3 == 0:
        options["grammar_backend"] = "llguidance"
    counts = Trial(files, plain, rng, options).run(BATCHES)
    assert (counts["constrained samples"] > 0) == has_grammars
    print(row, dict(counts))
    for name in SEEN:  # few prompts have equal pages of 16 tokens
        assert counts[name] > 0 or (name == "cached tokens" and 16 in row), name
    assert counts["switches"] > 0 or "adaptive" not in row
    assert (counts["tokens prefilled elsewhere"] > 100) == ("split" in row)
