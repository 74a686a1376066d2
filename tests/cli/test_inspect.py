"""``specjax inspect``: facts about drafts of every kind, and reasons why one does not fit."""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specjax.checkpoints import export_draft
from specjax.cli.main import main
from specjax.testing.files import CONFIG, HEAD, write_folder, write_head, write_target
from specjax.testing.models import copying_head, copying_target

from ..support.block_files import CASES, BlockCase, publish, random_tensors
from ..support.checkpoint_files import write_glm
from ..support.model_files import (
    read_folder,
    write_block_draft,
    write_draft_model,
    write_eagle_head,
    write_hybrid,
    write_lfm2,
    write_mixture,
    write_modules,
)
from ..support.packed_files import PACKED
from ..support.quantized_files import GROUP, quantised

SIZES: dict[str, Any] = {"vocab": 98, "hidden": 32, "target_hidden": 32, "target_layers": 2}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "target")


def inspect(capsys: pytest.CaptureFixture[str], *options: object) -> tuple[int, dict[str, str]]:
    status = main(["inspect", *map(str, options)])
    lines = capsys.readouterr().out.splitlines()
    return status, dict(line.split(": ", 1) for line in lines)


def write(case: BlockCase, path: Path) -> Path:
    return publish(case, random_tensors(case, {}, 0), path)


def test_block_drafters(target: Path, tmp_path: Path, capsys: Any) -> None:
    sizes = {"draft_vocab": 50, "mask": 97, **SIZES}
    case = BlockCase(format=6, drafts=7, taps=(-1, 1), markov="gated", **sizes)
    path = write(case, tmp_path / "draft")
    expected = {
        "draft": str(path),
        "format": "DSpark of speculators",
        "algorithm": "DSPARK",
        "layout": "anchor-first, 7 drafts per round from 7 rows, mask token 97",
        "layers": "2 of width 32",
        "target layers": "-1, 1",
        "vocabulary": "50 of 98, mapped by d2t",
        "rope_theta": "1e+06",
        "stated length": "64 tokens",
        "KV memory": "512 bytes per token in float32, 128 in fp8_e4m3",
    }
    assert inspect(capsys, path) == (0, expected)
    expected |= {
        "stated length": "64 tokens, of up to 128 in the target's context; for longer texts, see "
        "speculative_draft_window_size",
        "KV memory": "256 bytes per token in bfloat16, 128 in fp8_e4m3",
        f"fits {target}": "yes",
    }
    assert inspect(capsys, path, "--model", target) == (0, expected)


@pytest.mark.parametrize("name", ["1", "1-aliases", "2-no-copies", "4", "5-reduced", "6-fill-in"])
def test_formats(name: str, tmp_path: Path, capsys: Any) -> None:
    case = CASES[name]
    status, facts = inspect(capsys, write(case, tmp_path / "draft"))
    assert status == 0
    assert facts["algorithm"] == ("DSPARK" if case.markov else "DFLASH")
    assert facts["layout"].startswith("fill-in" if case.fills_in else "anchor-first")
    assert facts["target layers"] == "1, 4"


def test_default_layers_need_the_target(tmp_path: Path, capsys: Any) -> None:
    case = CASES["1-default-three-layers"]
    _, facts = inspect(capsys, write(case, tmp_path / "draft"))
    assert facts["target layers"] == "follow from the target; pass --model"


@pytest.mark.parametrize("is_checked", [False, True])
def test_other_drafts(is_checked: bool, target: Path, tmp_path: Path, capsys: Any) -> None:
    write_head(tmp_path / "eagle3")
    config = dataclasses.replace(HEAD, mask_token_id=5)
    tensors = copying_head(config, copying_target(CONFIG, HEAD))
    export_draft(tmp_path / "p-eagle", config, tensors)
    options = ["--model", target] if is_checked else []
    for path, algorithm, layers in (
        (tmp_path / "eagle3", "EAGLE3", "0, 0, 1"),
        (tmp_path / "p-eagle", "EAGLE3", "0, 0, 1"),
        (write_eagle_head(tmp_path / "eagle", target), "EAGLE", "the last, after the final norm"),
        (write_draft_model(tmp_path / "model", target), "STANDALONE", None),
        (write_modules(tmp_path / "modules", target, 2), "MULTI_LAYER_EAGLE", None),
    ):
        status, facts = inspect(capsys, path, *options)
        assert status == 0, facts
        if algorithm == "STANDALONE" and not is_checked:  # it may be a target
            algorithm += ", if it drafts for another model"
            assert facts["model"] == str(path)
        else:
            assert facts["draft"] == str(path)
        assert (facts["algorithm"], facts.get("target layers")) == (algorithm, layers)
        assert facts.get(f"fits {target}") == ("yes" if is_checked else None)
        assert (facts["format"] == "P-EAGLE") == (path.name == "p-eagle")


def test_quantised_files_name_their_format(target: Path, tmp_path: Path, capsys: Any) -> None:
    stored, _ = quantised(target, tmp_path / "model", PACKED["awq"], "lm_head embed_tokens")
    status, facts = inspect(capsys, stored)
    text = f"int4 in groups of {GROUP} with zero points, from AWQ, without lm_head"
    assert (status, facts["matrices"]) == (0, text)
    block = write_block_draft(tmp_path / "block")
    plain = "lm_head markov confidence_head embed_tokens"
    stored, _ = quantised(block, tmp_path / "draft", "int4", plain)
    status, facts = inspect(capsys, stored, "--model", target)
    assert (status, facts["algorithm"], facts[f"fits {target}"]) == (0, "DSPARK", "yes")
    assert facts["matrices"].startswith(f"int4 in groups of {GROUP}, without ")


def test_a_mixture(tmp_path: Path, capsys: Any) -> None:
    write_mixture(tmp_path)
    assert inspect(capsys, tmp_path)[1]["experts"] == "2, of which a token uses 1, of width 16"


def test_modules_after_the_layers(tmp_path: Path, capsys: Any) -> None:
    path = write_glm(tmp_path / "glm")
    status, facts = inspect(capsys, path, "--model", path)
    assert (status, facts["algorithm"]) == (0, "MULTI_LAYER_EAGLE")
    assert facts["layers"] == "1 of width 32"


@pytest.mark.parametrize(
    ("write", "algorithm", "count"),
    [(write_glm, "MULTI_LAYER_EAGLE", 3), (write_hybrid, "EAGLE", 2)],
)
def test_a_model_that_drafts_for_itself(
    write: Any, algorithm: str, count: int, target: Path, tmp_path: Path, capsys: Any
) -> None:
    path = write(tmp_path / "model", *[target] * (write is write_hybrid))
    status, facts = inspect(capsys, path)
    assert (status, facts["model"]) == (0, str(path))
    assert facts["algorithm"] == f"{algorithm}, without a draft"
    assert facts["layers"] == f"{count} of width 32"


def test_a_layer_that_drafts_all_tokens(target: Path, tmp_path: Path, capsys: Any) -> None:
    path = write_hybrid(tmp_path / "hybrid", target)
    status, facts = inspect(capsys, path, "--model", path)
    assert (status, facts["algorithm"], facts[f"fits {path}"]) == (0, "EAGLE", "yes")
    assert "states" not in facts


def test_a_model_with_recurrent_layers(target: Path, tmp_path: Path, capsys: Any) -> None:
    """Its other layers alone have KV, and it cannot draft for another model."""
    config, tensors = read_folder(write_hybrid(tmp_path / "hybrid", target))
    kept = {name: x for name, x in tensors.items() if not name.startswith("mtp.")}
    path = write_folder(tmp_path / "model", config, kept)
    status, facts = inspect(capsys, path)
    assert (status, facts["layers"]) == (0, f"2 of width {config['hidden_size']}")
    assert facts["states"] == f"{4 * 4 * 16 * 16} bytes per request in 1 of 2 layers"
    values = 2 * config["num_key_value_heads"] * config["head_dim"]
    assert facts["KV memory"].endswith(f", {values} in fp8_e4m3")
    status, facts = inspect(capsys, path, "--model", target)
    assert (status, facts[f"fits {target}"]) == (
        1,
        f"no: {path} has recurrent layers, which a draft model must not have",
    )


def test_a_model_with_convolutions(target: Path, tmp_path: Path, capsys: Any) -> None:
    """Its rows need little memory, whatever the length of the text."""
    path = write_lfm2(tmp_path / "lfm2", target)
    status, facts = inspect(capsys, path)
    assert (status, facts["convolutions"]) == (0, "of 3 tokens in 1 of 2 layers")
    values = 2 * CONFIG.num_kv_heads * CONFIG.head_dim
    assert facts["KV memory"] == f"{2 * values} bytes per token in bfloat16"
    status, facts = inspect(capsys, path, "--model", target)
    assert (status, facts[f"fits {target}"]) == (0, "yes")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab": 99}, "the head has vocab_size=99, but the target has 98"),
        ({"hidden": 16, "target_hidden": 16}, "hidden_size=16 differs from the target"),
        ({"taps": (0, 2), "target_layers": 3}, "num_target_layers=3"),
    ],
)
def test_a_draft_of_another_target(
    changes: dict[str, Any], reason: str, target: Path, tmp_path: Path, capsys: Any
) -> None:
    """The facts are printed, then the reason."""
    sizes = {"mask": 5, "taps": (0, 1), **SIZES, **changes}
    path = write(BlockCase(format=1, **sizes), tmp_path / "draft")
    assert inspect(capsys, path)[0] == 0
    status, facts = inspect(capsys, path, "--model", target)
    assert status == 1
    assert facts["format"] == "DFlash"
    assert facts[f"fits {target}"].startswith("no: ")
    assert reason in facts[f"fits {target}"]
    assert facts["vocabulary"] == str(changes.get("vocab", 98))


def test_refused_files(tmp_path: Path, capsys: Any) -> None:
    path = write(CASES["1"], tmp_path / "draft")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["DominoDraftModel"]}))
    status, facts = inspect(capsys, path)
    assert (status, set(facts)) == (1, {"draft", "supported"})
    assert "Domino is not supported" in facts["supported"]
    (path / "config.json").write_text("{")
    assert inspect(capsys, path)[0] == 1
    (path / "model.safetensors").write_bytes(np.zeros(4).tobytes())
    assert inspect(capsys, path)[0] == 1


def test_a_block_drafter_without_its_norm(tmp_path: Path, capsys: Any) -> None:
    for name in ("1", "2-no-copies", "4", "6"):
        tensors = random_tensors(CASES[name], {}, 0)
        del tensors["hidden_norm.weight"]
        status, facts = inspect(capsys, publish(CASES[name], tensors, tmp_path / name))
        assert status == 1
        assert "lacks 1 tensor(s)" in facts["supported"]
        assert "'hidden_norm.weight'" in facts["supported"]


def test_missing_files_are_bad_input(target: Path, capsys: Any) -> None:
    assert main(["inspect", "/no/such/folder"]) == 2
    assert main(["inspect", str(target), "--model", "/no/such/folder"]) == 2
    assert "/no/such/folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["d2t", "markov_head.markov_w1.weight", "lm_head.weight"])
def test_a_tensor_without_axes_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = BlockCase(**SIZES, format=6, markov="vanilla", draft_vocab=50, taps=(0, 1), mask=9)
    tensors = random_tensors(case, {}, 1)
    tensors[name] = np.zeros((), tensors[name].dtype)
    status, facts = inspect(capsys, publish(case, tensors, tmp_path / "draft"))
    assert status == 1
    assert f"tensor '{name}'" in facts["supported"]


class Hub:
    """The repositories ``owner/NAME`` in folders, which counts the bytes that are read."""

    def __init__(self, root: Path) -> None:
        self.root, self.num_read = root, 0

    def ls(self, repo_id: str, detail: bool) -> list[str]:
        assert not detail
        return [f"{repo_id}/{x.name}" for x in sorted(self._path(repo_id).iterdir())]

    def cat_file(self, name: str) -> bytes:
        return self._path(name).read_bytes()

    def open(self, name: str, mode: str, block_size: int) -> Any:
        file = self._path(name).open(mode)
        read = file.read

        def counted(count: int) -> bytes:
            self.num_read += count
            return read(count)

        return contextlib.closing(SimpleNamespace(read=counted, seek=file.seek, close=file.close))

    def _path(self, name: str) -> Path:
        return self.root / name.removeprefix("owner/")


def test_of_a_repository_only_headers_are_read(
    target: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path)
    monkeypatch.setattr("huggingface_hub.HfFileSystem", lambda: hub)
    shutil.copytree(target, tmp_path / "model")
    write_head(tmp_path / "head")
    local = [inspect(capsys, tmp_path / "head", "--model", target), inspect(capsys, target)]
    found = [
        inspect(capsys, "owner/head", "--model", "owner/model"),
        inspect(capsys, "owner/model"),
    ]
    expected = [
        (0, local[0][1] | {"draft": "owner/head", "fits owner/model": "yes"}),
        (0, local[1][1] | {"model": "owner/model"}),
    ]
    del expected[0][1][f"fits {target}"]
    assert found == expected
    stored = sum(x.stat().st_size for x in tmp_path.rglob("*.safetensors"))
    assert hub.num_read < stored / 3
    status = main(["inspect", "owner/none"])
    assert status == 2
    assert "draft='owner/none'" in capsys.readouterr().err


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.gguf", "consolidated.safetensors"])
def test_a_repository_without_headers_is_refused(
    weights: str, target: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are not downloaded."""
    monkeypatch.setattr("huggingface_hub.HfFileSystem", lambda: Hub(tmp_path))
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    shutil.copytree(target, tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "other" / weights)
    for knob, options in (("draft", ["owner/other"]), ("model", [target, "--model=owner/other"])):
        assert main(["inspect", *map(str, options)]) == 2
        refusal = capsys.readouterr().err
        assert f"{knob}='owner/other' has no *.safetensors" in refusal
