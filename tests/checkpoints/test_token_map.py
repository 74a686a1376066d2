"""Reading hot vocabularies, and drafts with one."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specjax.checkpoints import TargetCheckpoint, open_target
from specjax.checkpoints.token_map import read_token_map
from specjax.engine.args import EngineArgs
from specjax.speculative.eagle import EAGLE, EAGLE3
from specjax.testing import Files
from specjax.testing.files import CONFIG, EOS_ID

from ..support.model_files import write_eagle_head

TEXT = "the cat and the hat and the bat\n" * 3 + "é"


@pytest.fixture(scope="module")
def target(files: Files) -> TargetCheckpoint:
    return open_target(files.target, dtype="float32")


@pytest.fixture(scope="module")
def head(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_eagle_head(tmp_path_factory.mktemp("hot") / "head", files.target)


def options(token_map: Any, **changes: Any) -> Any:
    return SimpleNamespace(
        **{"draft_rope_theta": None, "speculative_eagle_topk": 1}
        | {"speculative_token_map": token_map}
        | changes
    )


def test_ids_ascend(tmp_path: Path, target: TargetCheckpoint) -> None:
    (tmp_path / "hot.json").write_text("[40, 7, 9, 0]")
    read = read_token_map(tmp_path / "hot.json", target)
    assert read.dtype == np.int32
    assert read.tolist() == [0, 7, 9, 40]


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_the_most_frequent_tokens_of_a_text(
    tmp_path: Path, target: TargetCheckpoint, count: int
) -> None:
    """End tokens come first, and of equally frequent tokens the one with the lower id."""
    (tmp_path / "text:1.txt").write_text(TEXT)
    counts = Counter(target.load_tokenizer().encode(TEXT))
    ranked = [EOS_ID, *sorted(counts, key=lambda i: (-counts[i], i))]
    assert EOS_ID not in counts
    read = read_token_map(f"{tmp_path}/text:1.txt:{count}", target)
    assert read.tolist() == sorted(ranked[:count])


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", "[]", r"in \[0, vocab_size=98\); got none"),
        ("a.json", "{}", "a.json must have a list of token ids: Expected `array`"),
        ("a.json", "[1, true]", r"a.json must have a list of token ids: .*at `\$\[1\]`"),
        ("a.json", "[1, 2.5]", r"a.json must have a list of token ids: .*at `\$\[1\]`"),
        ("a.json", "[1", "a.json must have a list of token ids"),
        ("a.json", "[" * 100_000, "a.json must have a list of token ids"),
        ("a.json", "[3, -1]", rf"in \[0, vocab_size={CONFIG.vocab_size}\).*from -1 to 3"),
        ("a.json", f"[3, {CONFIG.vocab_size}]", f"from 3 to {CONFIG.vocab_size}"),
        ("a.json", f"[{10**30}]", "10{30}|out of range"),
        ("a.json", "[3, 5, 1, 5]", "token id 5 is in the list twice"),
        ("freq.pt", "", r"must be a .json file .* convert a .pt file: json.dump"),
        ("a.txt", "1\n2", "TEXT:COUNT"),
        ("a.txt:0", "", "COUNT=0 must be from 1 to 1,"),
        ("a.txt:5", "abc", "COUNT=5 must be from 1 to 4, the different tokens"),
        (":5", None, "is missing|cannot be read|is not a regular file"),
        ("none.json", None, "none.json"),
        ("none.txt:3", None, "none.txt"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, target: TargetCheckpoint, head: Path, name: str, content: Any, reason: str
) -> None:
    """Messages begin with the option and its value."""
    if content is not None:
        (tmp_path / name.partition(":")[0]).write_text(content)
    args = options(str(tmp_path / name))
    with pytest.raises(ValueError, match=f"(?s)^speculative_token_map='.*{reason}"):
        EAGLE.open_draft(args, target, head)


def test_a_draft_with_a_token_map_has_its_vocabulary(
    tmp_path: Path, target: TargetCheckpoint, head: Path
) -> None:
    paths = [tmp_path / f"{i}.json" for i in range(2)]
    for path, ids in zip(paths, ([5, 90, 7], [5, 90, 8]), strict=True):
        path.write_text(json.dumps(ids))
    one, other = (EAGLE.open_draft(options(path), target, head)[0] for path in paths)
    one.check_weights()
    assert (one.load_weights()["hot_head.offsets"] + np.arange(3)).tolist() == [5, 7, 90]
    assert one.has_weights_of(one)
    assert not one.has_weights_of(other)
    assert repr(one.config) == repr(other.config)  # so both share compiled functions
    with pytest.raises(ValueError, match=r"speculative_eagle_topk=4 exceeds .* 3 tokens"):
        EAGLE.open_draft(options(paths[0], speculative_eagle_topk=4), target, head)


def test_a_head_with_its_own_output_head_is_refused(
    tmp_path: Path, files: Files, target: TargetCheckpoint
) -> None:
    path = tmp_path / "hot.json"
    path.write_text("[1, 2]")
    with pytest.raises(
        ValueError, match=r"speculative_token_map=.*of its own, with 80 tokens; leave"
    ):
        EAGLE3.open_draft(options(path), target, files.head)


@pytest.mark.parametrize(
    "algorithm", [None, "NGRAM", "STANDALONE", "MULTI_LAYER_EAGLE", "DFLASH", "DSPARK"]
)
def test_algorithms_without_such_a_head_refuse_the_option(algorithm: str | None) -> None:
    with pytest.raises(ValueError, match=r"\['speculative_token_map'\] have no effect with"):
        EngineArgs(
            speculative_algorithm=algorithm,
            speculative_token_map="hot.json",
            draft="folder" if algorithm == "STANDALONE" else None,
        )
