"""Weights stream from their files to the device."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.checkpoints import open_target
from specjax.engine import loading
from specjax.engine.args import EngineArgs
from specjax.engine.loading import stream_weights
from specjax.engine.plan import plan_engine
from specjax.engine.weights import load_weights
from specjax.testing import Files

LARGEST = 9  # sizes of the largest weight that a load may take of host memory


def wide_model(folder: Path, files: Files, dtype: str) -> Path:
    """Write a model of 12 layers whose weights are large enough to measure."""
    config = json.loads((files.target / "config.json").read_text())
    size, inner, layers, vocab = 128, 512, 12, 256
    config |= {
        "hidden_size": size,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
    }
    stored = load_file(files.target / "model.safetensors")
    heads = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    rows = {"q_proj": (heads, size), "k_proj": (kv, size), "v_proj": (kv, size)}
    rows |= {"o_proj": (size, heads), "gate_proj": (inner, size), "up_proj": (inner, size)}
    rows |= {"down_proj": (size, inner), "embed_tokens": (vocab, size)}
    tensors = {}
    for name, tensor in stored.items():
        shape = rows.get(name.split(".")[-2], (size,))
        values = np.full(shape, 0.5, tensor.dtype).astype(dtype)
        for layer in range(layers if ".layers.0." in name else ".layers." not in name):
            tensors[name.replace("layers.0", f"layers.{layer}")] = values
    del tensors["lm_head.weight"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_few_weights_are_in_host_memory_at_once(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str
) -> None:
    monkeypatch.setattr(loading, "usable_cores", lambda: 8)
    target = open_target(wide_model(tmp_path / "wide", files, stored), dtype="float32")
    names, total, largest = [], 0, 0
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for name, weight in stream_weights(target):
            names.append(name)
            total += weight.nbytes
            largest = max(largest, weight.nbytes)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert sorted(names) == sorted(target.recipes)
    assert total > 2 * LARGEST * largest  # all at once would be too much
    assert peak <= LARGEST * largest


def test_weights_equal_those_loaded_at_once(files: Files) -> None:
    target = open_target(files.target, dtype="float32")
    at_once, streamed = target.load_weights(), dict(stream_weights(target))
    assert streamed.keys() == at_once.keys()
    for name, weight in streamed.items():
        assert np.array_equal(weight, at_once[name])


def test_a_reader_that_stops_early_ends_the_threads(files: Files) -> None:
    stream = stream_weights(open_target(files.target, dtype="float32"))
    next(stream)
    stream.close()
    with pytest.raises(StopIteration):
        next(stream)


def test_drafts_stream_too(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_engine(EngineArgs(**files.arguments()))
    (draft,) = plan.drafts
    at_once = draft.load_weights()

    def fail(checkpoint: Any) -> Any:
        raise AssertionError("all weights are in host memory at once")

    monkeypatch.setattr(type(draft), "load_weights", fail)
    _, weights = load_weights(plan)
    for name, weight in zip(plan.networks.draft.names, weights, strict=True):
        assert np.array_equal(weight, at_once[name])
