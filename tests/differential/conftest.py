"""Draft files of all algorithms, and the plugin under examples/."""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from specjax.testing import Files
from specjax.testing.files import write_head

from ..support.model_files import (
    write_block_draft,
    write_draft_model,
    write_eagle_head,
    write_modules,
)
from .draws import MODULES, Drafts

PLUGIN = Path(__file__).parents[2] / "examples" / "specjax-markov"


@pytest.fixture(scope="module", autouse=True)
def _plugin() -> Iterator[None]:
    """Make the plugin importable, here and in processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PLUGIN))
        patch.setenv("PYTHONPATH", str(PLUGIN))
        found = import_module("specjax_markov").__file__ or ""
        assert Path(found).is_relative_to(PLUGIN)
        yield


@pytest.fixture(scope="module")
def drafts(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Drafts:
    root = tmp_path_factory.mktemp("drafts")
    corpus: Path = root / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps(list(range(i, 94, i))) for i in range(1, 9)))
    return Drafts(
        files.head,
        write_eagle_head(root / "eagle", files.target),
        corpus,
        write_draft_model(root / "model", files.target),
        write_modules(root / "modules", files.target, MODULES),
        write_block_draft(root / "dflash", markov_head=None, windows=(0, 8), causal=(False, True)),
        write_block_draft(root / "dspark"),
        write_head(root / "peagle", mask_token_id=11, num_layers=2),
    )
