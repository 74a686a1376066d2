"""Engines for gpt-oss with packed experts produce the tokens of plain decoding."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from specjax.testing import Files, check_tokens

from ..support.mxfp4_files import write_gpt_oss, write_wide_head
from .draws import Drafts
from .rows import BATCHES, SEEN, Row, drafting, serving
from .trial import Reference, Trial

ROWS: list[Row] = [
    ("EAGLE3", "tree", "ahead", 4, "here", "fixed", 1),
    ("NGRAM", "tree", "in turn", 16, "split", "adaptive", 3),
    ("STANDALONE", "chain", "ahead", 4, "split", "fixed", 3),
    ("EAGLE3", "cut chain", "in turn", 1, "split", "adaptive", 1),
]


@pytest.fixture(scope="module")
def gpt_oss(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("gpt_oss")
    target = write_gpt_oss(folder / "target", files.target)
    return replace(files, target=target, head=write_wide_head(folder / "head"))


@pytest.fixture(scope="module")
def plain(gpt_oss: Files) -> Iterator[Reference]:
    reference = Reference.of(gpt_oss)
    yield reference
    reference.close()


@pytest.mark.slow
def test_tokens_of_a_tree_are_those_of_dense_decoding(gpt_oss: Files) -> None:
    """Texts are longer than the windows."""
    shape = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 12}
    prompts = np.random.default_rng(0).integers(60, size=(2, 30)).tolist()
    with gpt_oss.engine(dtype="float32", **shape) as engine:
        assert check_tokens(engine, prompts, count=40) > 20


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "index", [0, 1, *(pytest.param(i, marks=pytest.mark.long) for i in range(2, len(ROWS)))]
)
def test_engines_equal_plain_decoding(
    gpt_oss: Files, drafts: Drafts, plain: Reference, index: int, device: str
) -> None:
    row = ROWS[index]
    options = drafting(row, replace(drafts, eagle3=gpt_oss.head)) | serving(row)
    counts = Trial(gpt_oss, plain, np.random.default_rng(index), options).run(BATCHES)
    print(row, dict(counts))
    for seen in SEEN:
        assert counts[seen] > 0, seen
