"""Matrices that are quantised when they are loaded."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import load_file, save_file

from specjax import Engine, SamplingParams
from specjax.checkpoints import open_target
from specjax.checkpoints.tensors import quantise
from specjax.engine.args import EngineArgs
from specjax.engine.plan import plan_engine
from specjax.testing import Files

DTYPES = {"fp8": np.dtype(ml_dtypes.float8_e4m3fn), "int8": np.dtype(np.int8)}
KINDS = pytest.mark.parametrize("kind", DTYPES)
PROMPTS = [[5, 9, 11, 40, 2, 7], [33, 12], [8] * 20]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, max_new_tokens=24, ignore_eos=True, sampling_seed=3)


@KINDS
@given(
    matrix=arrays.arrays(
        np.float32, (3, 8), elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False)
    )
)
def test_values_are_rounded_to_the_nearest(kind: str, matrix: np.ndarray) -> None:
    values, scale = quantise(matrix, DTYPES[kind])
    assert values.dtype == DTYPES[kind]
    assert (scale > 0).all()
    found, most = np.float32(values) * scale, np.abs(matrix).max(axis=1, keepdims=True)
    # int8 has steps of one scale; e4m3 has three bits of mantissa, and 2 ** -9 is its last step
    step = scale if kind == "int8" else np.maximum(np.abs(matrix) / 8, 2.0**-9 * scale)
    assert (np.abs(found - matrix) <= 0.501 * step + 1e-6 * most).all()
    assert (values[most[:, 0] == 0].astype(np.float32) == 0).all()


def dequantised(files: Files, kind: str, path: Path) -> Path:
    """A checkpoint of plain matrices with the values that the quantised ones have."""
    shutil.copytree(files.target, path)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "embed_tokens" not in name:
            values, scale = quantise(tensor, DTYPES[kind])
            tensors[name] = np.float32(values) * scale
    save_file(tensors, path / "model.safetensors")
    return path


def texts(engine: Engine) -> list[list[int]]:
    results = [
        engine.generate(input_ids=PROMPTS, sampling_params=params, return_logprob=True)
        for params in (GREEDY, SEEDED)
    ]
    return [result["output_ids"] for batch in results for result in batch]


@pytest.fixture(scope="module", params=["fp8", pytest.param("int8", marks=pytest.mark.slow)])
def engines(request, files: Files, tmp_path_factory) -> Iterator[tuple[str, Engine, Engine]]:
    """Plain decoding of dequantised matrices, and drafts for quantised ones."""
    kind, folder = request.param, tmp_path_factory.mktemp("plain")
    path = dequantised(files, kind, folder / "target")
    sizes = {"dtype": "float32", "skip_tokenizer_init": True}
    plain = files.engine(target=path, speculative=False, **sizes)
    drafting = files.engine(quantization=kind, **sizes)
    yield kind, plain, drafting
    plain.close()
    drafting.close()


def test_texts_are_those_of_the_dequantised_model(engines) -> None:
    kind, plain, drafting = engines
    assert texts(drafting) == texts(plain)
    info = drafting.get_server_info()
    assert info["quantization"] == kind
    names = dict(
        zip(
            drafting.runner.networks.target.names,
            drafting.runner.networks.target.abstract,
            strict=True,
        )
    )
    kernels = [x for name, x in names.items() if name.endswith("kernel.values")]
    assert len(kernels) == 2 * 4 + 1
    assert {x.dtype for x in kernels} == {DTYPES[kind]}
    draft = drafting.runner.networks.draft
    assert "fc.kernel.values" in draft.names


def test_new_weights_are_quantised_too(engines, files: Files) -> None:
    kind, plain, drafting = engines
    before = texts(drafting)
    tensors = load_file(files.target / "model.safetensors")
    changed = {name: x for name, x in tensors.items() if "mlp.down_proj" in name}
    rng = np.random.default_rng(0)
    changed = {name: x + rng.normal(size=x.shape) * x.std() for name, x in changed.items()}
    drafting.update_weights_from_tensor(changed)
    restored = {}
    for name, tensor in changed.items():
        values, scale = quantise(np.float32(tensor), DTYPES[kind])
        restored[name] = np.float32(values) * scale
    plain.update_weights_from_tensor(restored)
    after = texts(drafting)
    assert after == texts(plain)
    assert after != before
    drafting.update_weights_from_disk(files.target)
    assert texts(drafting) == before


def test_weights_by_the_names_of_the_engine(engines, files: Files) -> None:
    kind, _, drafting = engines
    before = texts(drafting)
    names = drafting.runner.networks.target.names
    arrays = dict(zip(names, map(np.asarray, drafting.runner.weights[0]), strict=True))
    own = {name: x for name, x in arrays.items() if "mlp.down.kernel" in name}
    assert {x.dtype for x in own.values()} == {DTYPES[kind], np.dtype(np.float32)}
    drafting.update_weights_from_tensor(own)
    assert texts(drafting) == before
    name = "model.layers.0.mlp.down_proj.weight"
    values = own["layers.0.mlp.down.kernel.values"]
    drafting.update_weights_from_tensor(
        {name: values, f"{name}_scale": own["layers.0.mlp.down.kernel.scale"]}
    )
    assert texts(drafting) == before
    for wrong in (
        {"layers.0.mlp.down.kernel.values": values},
        {name: values},
        {name: values[0]},
        {f"{name}_scale": own["layers.0.mlp.down.kernel.scale"]},
    ):
        with pytest.raises(ValueError, match=r"without|needs"):
            drafting.update_weights_from_tensor(wrong)
    assert texts(drafting) == before


@KINDS
def test_loaded_weights(kind: str, files: Files) -> None:
    plain = open_target(files.target, dtype="float32").load_weights()
    found = open_target(files.target, dtype="float32").quantised(kind).load_weights()
    for name, weight in plain.items():
        if name.endswith(".kernel"):
            values, scale = quantise(weight.T, DTYPES[kind])
            assert np.array_equal(found[f"{name}.values"].view(np.int8), values.view(np.int8))
            assert np.array_equal(found[f"{name}.scale"], scale)
        else:
            assert np.array_equal(found[name], weight)


def test_a_corpus_stays_as_it_is(files: Files, tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text(json.dumps([1, 2, 3, 4, 5, 6] * 3))
    options = {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3}
    options |= {"speculative_ngram_external_corpus_path": file, "quantization": "int8"}
    plan = plan_engine(EngineArgs(**files.arguments(speculative=False, **options)))
    (corpus,) = plan.drafts
    assert corpus.config.num_tokens >= 18
    assert plan.target.config.quantization == "int8"


def test_refusals(files: Files) -> None:
    with pytest.raises(ValueError, match="quantization='int4' must be None or 'fp8' or 'int8'"):
        files.engine(quantization="int4")
