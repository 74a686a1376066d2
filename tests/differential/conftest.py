"""Files that algorithms draft with."""

import json
from pathlib import Path

import pytest

from ..tiny_checkpoints import write_draft_model, write_eagle_head, write_modules
from ..tiny_engines import Files
from .draws import MODULES, Drafts


@pytest.fixture(scope="module")
def drafts(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Drafts:
    root = tmp_path_factory.mktemp("drafts")
    corpus: Path = root / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps(list(range(i, 94, i))) for i in range(1, 9)))
    return Drafts(
        files.head,
        write_eagle_head(root / "eagle"),
        corpus,
        write_draft_model(root / "model", files.target),
        write_modules(root / "modules", files.target, MODULES),
    )
