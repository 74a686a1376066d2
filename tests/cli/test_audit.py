"""``specjax audit`` against servers that are lossless, and against ones with a fault."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specjax import Engine
from specjax.cli import main
from specjax.cli.audit import DIFFERENT, EQUAL, NOTHING, prompts_of
from specjax.kv import pages
from specjax.scheduling.request import Request
from specjax.server import native
from specjax.testing import Files, serve

pytestmark = pytest.mark.slow

TREE = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
# a round with a wrong token in so many
RARE = 500


@pytest.fixture(scope="module")
def engine(files: Files) -> Iterator[Engine]:
    with files.engine(**TREE) as made:
        yield made


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": 3 * letter + "bc"} for letter in "abcdef"]
    rows.append({"turns": ["hello", "again"]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def audit(prompts: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(engine: Engine, *options: str) -> tuple[int, str]:
        with serve(engine) as client:
            url = f"http://127.0.0.1:{client.port}"
            shown = [option.replace("SAME", url) for option in options]
            sizes = ["--prompts", str(prompts), "--max-new-tokens", "40", "--parallel", "4"]
            status = main(["audit", url, *sizes, *shown])
        return status, capsys.readouterr().out

    return run


def test_a_lossless_server_is_equal(engine: Engine, audit: Callable[..., Any]) -> None:
    status, out = audit(engine)
    assert status == EQUAL
    again, among, cached, plain = out.splitlines()
    for line in (again, among, cached, plain):
        assert "equal: 7 of 7 greedy, 7 of 7 seeded" in line
    assert again.startswith("alone again:")
    assert "; 0 prompt tokens were cached" not in cached
    assert plain.startswith("plain decoding:")
    assert "verify passes" in plain


def test_a_rare_wrong_draft_is_found(
    engine: Engine, audit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, right = [0], Request.append_round

    def wrong(self: Request, tokens: list[int], proposed: int, accepted: int, *rest: Any) -> int:
        rounds[0] += accepted > 0
        if accepted and rounds[0] % RARE == RARE // 2:
            tokens = [tokens[0] ^ 1, *tokens[1:]]
        return right(self, tokens, proposed, accepted, *rest)

    monkeypatch.setattr(Request, "append_round", wrong)
    status, out = audit(engine)
    assert rounds[0] > RARE // 2
    assert status == DIFFERENT
    assert ", from token " in out


def test_kv_that_is_not_moved_is_found(
    files: Files, audit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "move_kv", lambda pool, *_, **options: pool)
    with files.engine(**TREE, compile_cache_dir=None) as engine:
        status, out = audit(engine)
    assert status == DIFFERENT
    *_, plain = (line for line in out.splitlines() if not line.startswith(" "))
    assert plain.startswith("plain decoding:")
    assert "equal: 7 of 7 greedy" not in plain


def test_a_server_without_the_switch_is_not_tested(
    engine: Engine, audit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = native._sampling
    monkeypatch.setattr(
        native, "_sampling", lambda given, *others: read(given | {"speculative": True}, *others)
    )
    status, out = audit(engine, "--limit", "2")
    assert status == NOTHING
    assert "not tested: meta_info does not confirm speculative=false" in out
    status, out = audit(engine, "--limit", "2", "--plain", "SAME")
    assert status == NOTHING
    assert "not tested: drafts were verified, although there should be none" in out


def test_a_server_without_drafts_is_not_tested(
    engine: Engine, audit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = native._sampling
    monkeypatch.setattr(
        native, "_sampling", lambda given, *others: read(given | {"speculative": False}, *others)
    )
    status, out = audit(engine, "--limit", "1")
    assert status == NOTHING
    assert "not tested: the server did not verify any drafts" in out


def test_bad_input_is_refused(
    engine: Engine, audit: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(engine, "--limit", "0")[0] == 2
    path = tmp_path / "other.jsonl"
    path.write_text('{"question": "?"}\n')
    assert main(["audit", "http://127.0.0.1:9", "--prompts", str(path)]) == 2
    assert "each line needs 'prompt' or 'turns'" in capsys.readouterr().err
    path.write_text("\n")
    assert main(["audit", "http://127.0.0.1:9", "--prompts", str(path)]) == 2
    assert "has no prompts" in capsys.readouterr().err
    assert main(["audit", "http://127.0.0.1:9"]) == 2
    assert "http://127.0.0.1:9/generate did not answer" in capsys.readouterr().err
    assert len(set(prompts_of(None))) == 32
