"""Weights of targets: layout, shards, dtypes, damage, lookup of models."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from specjax.checkpoints import open_target
from specjax.checkpoints.tensors import TensorSource, make_weight
from specjax.models import registry
from specjax.models.declare import Part, Recipe
from specjax.models.placement import Placement
from specjax.models.registry import FAMILIES
from specjax.testing.files import write_folder
from specjax.testing.files import write_target as tiny_target

from ..support.checkpoint_files import CONFIG, QKV, add_biases, target_tensors, write_sharded
from .layout import check_layout


class Point:
    """An entry point of an installed package."""

    value, dist = "post_package.family", None

    def __init__(self, load: Callable[[], Any]) -> None:
        self.load = load


def test_a_family_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points: list[Point] = []
    named = {("specjax.families", "post"): points}
    monkeypatch.setattr(registry, "entry_points", lambda group, name: named[group, name])
    changes = {"model_type": "post"}
    directory = write_folder(tmp_path / "hf", CONFIG | changes, target_tensors())
    with pytest.raises(ValueError, match=r"model_type='post' must be one of \['ernie4_5'"):
        open_target(directory)
    points.append(Point(lambda: 1 / 0))
    with pytest.raises(ValueError, match=r"'post' is from post_package.family .* ZeroDivision"):
        open_target(directory)
    points[0].load = lambda: None
    with pytest.raises(ValueError, match=r"'post' is from .* does not add it to FAMILIES"):
        open_target(directory)
    points[0].load = lambda: monkeypatch.setitem(FAMILIES, "post", FAMILIES["llama"])
    assert open_target(directory).config.model_type == "post"
    # the family is in FAMILIES now
    points[0].load = lambda: 1 / 0
    assert open_target(directory).config.model_type == "post"


def test_layout(tmp_path: Path) -> None:
    tensors = target_tensors()
    check_layout(open_target(write_folder(tmp_path, CONFIG, tensors)), tensors)


def test_layout_of_shards_biases_and_wide_heads(tmp_path: Path) -> None:
    changes = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "head_dim": 10}
    tensors = add_biases(target_tensors(dim=10), QKV)
    check_layout(open_target(write_sharded(tmp_path, CONFIG | changes, tensors)), tensors)


def test_the_head_of_a_tied_model_is_a_copy(tmp_path: Path) -> None:
    tensors = target_tensors(tied=True)
    config, table = CONFIG | {"tie_word_embeddings": True}, tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    rounded = table.astype(ml_dtypes.bfloat16)
    for dtype, copy in (("float32", table), ("bfloat16", table), ("bfloat16", rounded)):
        path = write_folder(tmp_path, config, tensors | {"lm_head.weight": copy})
        checkpoint = open_target(path, dtype=dtype)
        check_layout(checkpoint, tensors)
        assert "lm_head.kernel" not in checkpoint.load_weights()
    other = table.copy()
    other[-1, 0] += 1
    for copy in (other, table[1:], rounded):
        write_folder(tmp_path, config, tensors | {"lm_head.weight": copy})
        with pytest.raises(ValueError, match=r"'lm_head\.weight' in .* tie_word_embeddings=true"):
            open_target(tmp_path, dtype="float32").load_weights()


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_casts(tmp_path: Path, stored: str, dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, stored, None) or stored)
    tensors = {name: value.astype(kind) for name, value in target_tensors().items()}
    path = write_folder(tmp_path, CONFIG, tensors)
    check_layout(open_target(path, dtype=dtype), tensors)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"lacks 1 tensor.*'model\.layers\.1\.mlp\.up_proj\.weight' \(48, 32\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.ones(31, np.float32)}),
            r"'model\.norm\.weight' in .*model\.safetensors has shape \(31,\).*requires \(32,\)",
        ),
        (
            lambda t: t.update({"model.layers.0.mystery.weight": np.ones((2, 3), np.float32)}),
            r"model does not use: 'model\.layers\.0\.mystery\.weight' \(2, 3\) in .*\.safetensors",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}),
            r"'model\.layers\.0\.self_attn\.q_proj\.bias' \(32,\)",
        ),
    ],
)
def test_wrong_tensors(tmp_path: Path, damage: Any, message: str) -> None:
    tensors = target_tensors()
    damage(tensors)
    with pytest.raises(ValueError, match=message):
        open_target(write_folder(tmp_path, CONFIG, tensors)).load_weights()


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path, CONFIG, target_tensors())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"missing.*model-00002-of-00003"):
        open_target(tmp_path).load_weights()


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    tensors = target_tensors()
    write_sharded(tmp_path, CONFIG, tensors)
    name = "model.norm.weight"
    for file in sorted(tmp_path.glob("*-of-00003.safetensors"))[:2]:
        save_file({name: tensors[name]}, file)
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' is in both"):
        open_target(tmp_path).load_weights()


def test_no_weights(tmp_path: Path) -> None:
    write_folder(tmp_path, CONFIG, target_tensors())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="contains no weights"):
        open_target(tmp_path).load_weights()


def test_pytorch_file_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, CONFIG, target_tensors())
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match=r"torch is not installed.*safetensors\.torch\.save_file"):
        open_target(tmp_path).load_weights()


def test_unknown_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a known name"):
        open_target("no-such-model")
    with pytest.raises(ValueError, match="no such file"):
        open_target(tmp_path / "absent.gguf")
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ValueError, match=r"expected a directory or a \.gguf file"):
        open_target(tmp_path / "weights.bin")


def test_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, CONFIG, target_tensors())
    calls = []

    def snapshot(repo_id: str, **options: list[str]) -> str:
        calls.append((repo_id, options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    checkpoint = open_target("some/model")
    assert checkpoint.name == "some/model"
    assert checkpoint.path == tmp_path
    wanted = ["*.json", "*.jinja", "*.safetensors", "mask_embedding.pt"]
    assert calls == [("some/model", wanted)]


@given(
    widths=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    in_size=st.integers(1, 300),
    dtype=st.sampled_from([np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]),
)
def test_blocked_transposition(widths: list[int], in_size: int, dtype: np.dtype) -> None:
    """Blocked fusing and transposing equals numpy's, at and around the block size."""
    rng = np.random.default_rng(0)
    parts = {str(i): rng.random((n, in_size), np.float32) for i, n in enumerate(widths)}
    recipe = Recipe(tuple(Part(name, x.shape) for name, x in parts.items()), transpose=True)
    expected = np.concatenate(list(parts.values())).T.astype(dtype)
    np.testing.assert_array_equal(
        make_weight(recipe, TensorSource(Path("memory"), {}, parts.__getitem__), dtype), expected
    )


def test_another_tokenizer_and_template(tmp_path) -> None:
    model, other = tiny_target(tmp_path / "model"), tiny_target(tmp_path / "other")
    (other / "chat_template.jinja").write_text("other")
    (tmp_path / "mine.jinja").write_text("mine: {{ messages[0].content }}")
    opened = open_target(model)
    own = opened.load_tokenizer().chat_template
    for tokenizer, template, expected in (
        (None, None, own),
        (other, None, "other"),
        (None, tmp_path / "mine.jinja", "mine: {{ messages[0].content }}"),
        (other, tmp_path / "mine.jinja", "mine: {{ messages[0].content }}"),
    ):
        found = opened.with_tokenizer(tokenizer, template).load_tokenizer()
        assert found.chat_template == expected
    with pytest.raises(ValueError, match=r"none\.jinja"):
        opened.with_tokenizer(None, tmp_path / "none.jinja").load_tokenizer()
    with pytest.raises(ValueError, match="tokenizer='nowhere' is neither"):
        opened.with_tokenizer("nowhere", None).load_tokenizer()


def test_a_revision_is_passed_to_the_hub(monkeypatch) -> None:
    seen = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        seen.append((repo_id, options["revision"]))
        raise OSError("it is not there.")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match=r"it is not there\. Without a network"):
        open_target("owner/name", revision="v2")
    assert seen == [("owner/name", "v2")]


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("no plugin")])
def test_a_platform_without_a_plugin_names_the_extra(monkeypatch, error) -> None:
    def devices() -> None:
        raise error

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(ValueError, match=r"JAX_PLATFORMS='cuda'.*install the extra cuda12 or"):
        Placement.on()
