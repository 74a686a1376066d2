"""Matrices that are quantised when they are loaded."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import load_file, save_file

from specjax import Engine, SamplingParams
from specjax.checkpoints import open_target
from specjax.checkpoints.draft import DraftCheckpoint
from specjax.checkpoints.quantization import quantise, to_e4m3
from specjax.config import Quantization
from specjax.disaggregation.fingerprints import fingerprint
from specjax.engine.args import EngineArgs
from specjax.engine.plan import plan_engine
from specjax.engine.weights import weights_from_tensors
from specjax.models.placement import Placement
from specjax.models.weights import (
    LEAST_8BIT_ROWS,
    MAX_FUSED_ROWS,
    QuantArray,
    QuantLayout,
    dot,
    partial_dot,
    round_rows,
    take_outputs,
)
from specjax.testing import Files
from specjax.testing.files import CONFIG, HEAD

DTYPES = {
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
    "int8": np.dtype(np.int8),
    "int4": np.dtype(ml_dtypes.int4),
}
GROUPS = {"fp8": None, "int8": None, "int4": 128}
KINDS = pytest.mark.parametrize("kind", DTYPES)
PROMPTS = [[5, 9, 11, 40, 2, 7], [33, 12], [8] * 20]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, max_new_tokens=24, ignore_eos=True, sampling_seed=3)


@pytest.mark.slow
@KINDS
@given(
    matrix=arrays.arrays(
        np.float32, (3, 8), elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False)
    )
)
def test_values_are_rounded_to_the_nearest(kind: str, matrix: np.ndarray) -> None:
    values, scale = quantise(matrix, DTYPES[kind])
    assert values.dtype == DTYPES[kind]
    assert ((scale > 0) | (kind == "int4")).all()
    found, most = np.float32(values) * scale, np.abs(matrix).max(axis=1, keepdims=True)
    # integers have steps of one scale; e4m3 has 3 bits of mantissa, and 2 ** -9 is its last step
    step = np.maximum(np.abs(matrix) / 8, 2.0**-9 * scale) if kind == "fp8" else np.abs(scale)
    # 4-bit integers end at 7 on one side
    steps = np.where((kind == "int4") & (matrix / scale > 7), 1.0, 0.501)
    assert (np.abs(found - matrix) <= steps * step + 1e-6 * most).all()
    assert (values[most[:, 0] == 0].astype(np.float32) == 0).all()


@pytest.mark.slow
@given(arrays.arrays(np.float32, 32, elements=st.floats(-448, 448, width=32)))
def test_8_bit_floats_are_those_of_ml_dtypes(values: np.ndarray) -> None:
    expected = values.astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(to_e4m3(values).view(np.uint8), expected.view(np.uint8))
    steps = np.arange(-448, 448.25, 2**-6, np.float32)
    scaled = np.concatenate([steps, steps * np.float32(2**-9)])  # all values, and ties
    expected = scaled.astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(to_e4m3(scaled).view(np.uint8), expected.view(np.uint8))


def restored(matrix: np.ndarray, kind: str) -> np.ndarray:
    """The matrix with the values of the quantised one; no tiny matrix has more than 128 inputs."""
    values, scale = quantise(np.float32(matrix), DTYPES[kind], GROUPS[kind])
    return np.float32(values) * scale


def dequantised(files: Files, kind: str, path: Path) -> Path:
    """A checkpoint of plain matrices with the values that the quantised ones have."""
    shutil.copytree(files.target, path)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "embed_tokens" not in name:
            tensors[name] = restored(tensor, kind)
    save_file(tensors, path / "model.safetensors")
    return path


def texts(engine: Engine) -> list[list[int]]:
    results = [
        engine.generate(input_ids=PROMPTS, sampling_params=params, return_logprob=True)
        for params in (GREEDY, SEEDED)
    ]
    return [result["output_ids"] for batch in results for result in batch]


@pytest.fixture(
    scope="module", params=["fp8", "int4", pytest.param("int8", marks=pytest.mark.slow)]
)
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


@pytest.mark.long_after(1)
@pytest.mark.slow
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


@pytest.mark.slow
def test_new_weights_are_quantised_too(engines, files: Files) -> None:
    kind, plain, drafting = engines
    before = texts(drafting)
    tensors = load_file(files.target / "model.safetensors")
    changed = {name: x for name, x in tensors.items() if "mlp.down_proj" in name}
    rng = np.random.default_rng(0)
    changed = {name: x + rng.normal(size=x.shape) * x.std() for name, x in changed.items()}
    drafting.update_weights_from_tensor(changed)
    plain.update_weights_from_tensor({name: restored(x, kind) for name, x in changed.items()})
    after = texts(drafting)
    assert after == texts(plain)
    assert after != before
    drafting.update_weights_from_disk(files.target)
    assert texts(drafting) == before


@pytest.mark.slow
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
    whole = own["layers.0.mlp.down.kernel.values"]
    values, scale = whole[0, :, : CONFIG.intermediate_size], own["layers.0.mlp.down.kernel.scale"]
    drafting.update_weights_from_tensor({name: values, f"{name}_scale": scale[0]})
    assert texts(drafting) == before
    for wrong in (
        {"layers.0.mlp.down.kernel.values": whole},
        {name: values},
        {name: values[0]},
        {f"{name}_scale": scale[0]},
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
            values, scale = quantise(weight.T, DTYPES[kind], GROUPS[kind])
            own = found[f"{name}.values"][0, :, : len(weight)]
            assert own.dtype == values.dtype
            assert np.array_equal(np.float32(own), np.float32(values))
            assert np.array_equal(found[f"{name}.scale"][0], scale)
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
    with pytest.raises(ValueError, match="named_tensors cannot replace the corpus"):
        weights_from_tensors(plan, {"order": np.zeros(1)}, draft=True)
    assert plan.target.config.quantization == Quantization("int8")


def test_refusals(files: Files) -> None:
    with pytest.raises(ValueError, match="quantization='int2' must be None or 'fp8' or 'int8'"):
        files.engine(quantization="int2")
    with pytest.raises(ValueError, match="quantize_activations=True needs quantised matrices"):
        files.engine(quantize_activations=True)
    with pytest.raises(ValueError, match=r"needs fp8 or int8 .*int4 in groups of 128"):
        files.engine(quantization="int4", quantize_activations=True)


@pytest.mark.parametrize(
    ("own", "kind", "message"),
    [
        (Quantization("int4", group=32), "fp8", "config.json: quantization_config"),
        (Quantization("int4", group=32), "fp8", "(int4 in groups of 32)"),
        (Quantization("int8"), None, ""),
        (None, "fp8", ""),
        (None, None, "the draft folder stays whole"),
    ],
)
def test_drafts_whose_activations_stay_are_named(own, kind, message, caplog) -> None:
    config = replace(HEAD, quantization=own)
    draft = DraftCheckpoint(config, Path("folder"), lambda: None)
    draft = draft.quantised_draft(kind, rounds_activations=True)
    rounds = draft.config.quantization is not None and draft.config.quantization.rounds_activations
    assert rounds == (not message)
    assert len(caplog.records) == bool(message)
    assert message in caplog.text
    caplog.clear()
    draft.quantised_draft(kind)
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("rows", [3, LEAST_8BIT_ROWS])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_round_activations(kind: str, rows: int, dtype: str) -> None:
    """Few and many rows give the product of the same rounded values, within the sum's error."""
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 48)).astype(dtype)
    x[1] = 0
    values, scale = quantise(np.float32(rng.normal(size=(20, 48))), DTYPES[kind])
    format = Quantization(kind, rounds_activations=True)
    kernel = QuantArray(jnp.asarray(values[None]), jnp.asarray(scale[None]), None, format)
    found = np.asarray(dot(jnp.asarray(x), kernel, jnp.dtype("float32")))
    codes, factor = (np.asarray(y) for y in round_rows(jnp.asarray(x), format.dtype))
    expected = (np.float32(codes) * factor) @ (np.float32(values) * scale).T
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    # the codes are those of the nearest values, except at ties, which one unit in the last place
    # of a scale decides
    exact, row_scale = quantise(np.float32(x), DTYPES[kind])
    np.testing.assert_allclose(factor, row_scale, rtol=1e-6)
    assert np.mean(np.float32(exact) != np.float32(codes)) < 0.005


@pytest.mark.long_after(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8", pytest.param("int8", marks=pytest.mark.slow)])
def test_texts_do_not_depend_on_the_number_of_rows(kind: str, files: Files) -> None:
    """Engines whose prefill and rounds have few and many rows, without and with drafts."""
    sizes = {"dtype": "float32", "skip_tokenizer_init": True, "quantization": kind}
    sizes |= {"quantize_activations": True}
    found = []
    for options in (
        {"speculative": False, "chunked_prefill_size": 16},
        {"speculative": False, "max_running_requests": 64, "batch_buckets": (64,)},
        {"chunked_prefill_size": 64, "max_running_requests": 16, "batch_buckets": (16,)},
    ):
        with files.engine(**sizes | options) as engine:
            found.append(texts(engine))
            info = engine.get_server_info()
            assert info["quantize_activations"] is True
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [False, True])
@KINDS
def test_many_rows_in_bfloat16_are_those_of_few(kind: str, *, rounds: bool) -> None:
    """Their sums are rounded to bfloat16 before they are scaled, those of few rows after it."""
    rng, rows = np.random.default_rng(0), MAX_FUSED_ROWS + 2
    x = jnp.asarray(rng.normal(size=(rows, 256)), jnp.bfloat16)
    group = GROUPS[kind]
    values, scale = quantise(np.float32(rng.normal(size=(20, 256))), DTYPES[kind], group)
    format = Quantization(kind, group=group, rounds_activations=rounds and group is None)
    cut = QuantLayout.of(format, 256, 20).cut
    kernel = QuantArray(jnp.asarray(cut(values)), jnp.asarray(cut(scale)), None, format)
    few = np.concatenate([np.float32(dot(part, kernel)) for part in jnp.split(x, 2)])
    many = dot(x, kernel)
    assert many.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(many), few, rtol=2**-7, atol=2**-7)
    # logits are not rounded
    halves = [dot(part, kernel, jnp.dtype("float32")) for part in jnp.split(x, 2)]
    logits = dot(x, kernel, jnp.dtype("float32"))
    np.testing.assert_allclose(logits, jnp.concatenate(halves), rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("rows", [1, 5, MAX_FUSED_ROWS + 1])
@pytest.mark.parametrize("size", [(512, 40), (500, 40), (128, 8)], ids=str)
def test_products_of_groups(size: tuple[int, int], rows: int, *, has_zeros: bool) -> None:
    """Products in parts, and with inputs that fill no whole group."""
    (in_size, out_size), rng = size, np.random.default_rng(0)
    format = Quantization("int4", group=32, has_zeros=has_zeros)
    layout = QuantLayout.of(format, in_size, out_size)
    assert layout.parts == (8 if in_size > 128 else 4)
    values, scale = quantise(np.float32(rng.normal(size=(out_size, in_size))), DTYPES["int4"], 32)
    zeros = rng.integers(-8, 8, scale.shape) * has_zeros
    offset = jnp.asarray(layout.cut(np.float32(-zeros * scale))) if has_zeros else None
    kernel = QuantArray(
        jnp.asarray(layout.cut(values)), jnp.asarray(layout.cut(scale)), offset, format
    )
    wide = np.float32(values) - np.repeat(zeros, 32, axis=1)[:, :in_size]
    whole = wide * np.repeat(scale, 32, axis=1)[:, :in_size]
    x = np.float32(rng.normal(size=(rows, in_size)))
    expected = x @ whole.T
    for found in (dot(jnp.asarray(x), kernel), partial_dot(jnp.asarray(x), kernel)):
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    half = jnp.asarray(x, jnp.bfloat16)
    sums = np.float32(partial_dot(half, kernel))
    assert sums.shape == ((layout.parts, rows, out_size) if rows < 6 else (rows, out_size))
    total = sums.sum(axis=0) if sums.ndim == 3 else sums
    np.testing.assert_allclose(total, expected, atol=2e-2 * np.abs(expected).max())
    some = jnp.array([3, 0, 7])
    chosen = dot(jnp.asarray(x), take_outputs(kernel, some))
    np.testing.assert_allclose(chosen, expected[:, [3, 0, 7]], atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.int4, jnp.int8, jnp.float8_e4m3fn])
def test_prefill_engines_compare_quantised_weights(dtype) -> None:
    weight = jnp.ones((1, 4, 8), dtype)
    one, other = (np.asarray(fingerprint(weight * x, jnp.uint32(3))) for x in (1, 2))
    assert not np.array_equal(one, other)


def test_weights_move_to_another_device() -> None:
    first, second = (Placement.on(i) for i in (0, len(jax.devices()) - 1))
    for value in (jnp.ones((2, 3), jnp.int4), np.ones((2, 3), np.int8)):
        (moved,) = second.put_weights(first.put_weights((value,)))
        assert moved.devices() == {second.device}
        assert (np.asarray(moved) == 1).all()


def test_updates_are_quantised_from_all_bits(engines, files: Files) -> None:
    """A float32 update gives the codes of a float32 file, also in a bfloat16 engine."""
    kind, _, drafting = engines
    tensors = load_file(files.target / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    values, scale = quantise(np.float32(tensors[name]), DTYPES[kind], GROUPS[kind])
    plan = drafting._plan
    half = replace(plan.target, config=replace(plan.target.config, dtype="bfloat16"))
    new, _ = weights_from_tensors(replace(plan, target=half), {name: tensors[name]}, draft=False)
    own = new["layers.0.mlp.down.kernel.values"][0, :, : tensors[name].shape[1]]
    assert np.array_equal(np.float32(own), np.float32(values))
    assert np.array_equal(new["layers.0.mlp.down.kernel.scale"][0], scale)
