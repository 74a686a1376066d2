"""Draft heads and block drafters whose files are quantised."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax import SamplingParams
from specjax.checkpoints import open_target
from specjax.checkpoints.block import BlockCheckpoint, open_block
from specjax.checkpoints.draft import DraftCheckpoint, open_draft
from specjax.config import Quantization
from specjax.testing import Files
from specjax.testing.files import write_folder

from ..support.model_files import read_folder, write_block_draft
from ..support.packed_files import PACKED
from ..support.quantized_files import FORMATS, edit, quantised, write_tensors

Opened = DraftCheckpoint | BlockCheckpoint
KINDS = FORMATS | PACKED
NAMES = ["fp8-channel", "fp8-blocks", "int4", "gptq-zeros", "awq"]
# matrices that published drafts leave whole
PLAIN = "lm_head markov confidence_head"


def write(files: Files, folder: Path, kind: str, name: str, plain: str) -> tuple[Path, Path]:
    path = folder / "draft"
    if kind == "block":
        write_block_draft(path)
    else:  # its zeros have no scale
        config, tensors = read_folder(files.head)
        rng = np.random.default_rng(0)
        noisy = {x: y + rng.normal(0, 0.01, y.shape) for x, y in tensors.items() if y.ndim == 2}
        write_folder(path, config, tensors | {x: np.float32(y) for x, y in noisy.items()})
    return quantised(path, folder, KINDS[name], f"{plain} embed_tokens")


def opened(files: Files, kind: str, path: Path) -> Opened:
    target = open_target(files.target, dtype="float32")
    return open_draft(path, target) if kind == "head" else open_block(path, target)


def dequantised(weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    """A matrix ``[in, out]``, whose inputs are padded."""
    values, scale = (np.float32(weights[f"{name}.{leaf}"]) for leaf in ("values", "scale"))
    grouped = values.reshape(*scale.shape, -1) * scale[..., None]
    if f"{name}.offset" in weights:
        grouped += weights[f"{name}.offset"][..., None]
    return grouped.swapaxes(0, 1).reshape(scale.shape[1], -1).T


@pytest.mark.parametrize("kind", ["head", "block"])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_have_the_values_of_their_files(
    files: Files, tmp_path: Path, kind: str, name: str
) -> None:
    stored, whole = write(files, tmp_path, kind, name, PLAIN)
    draft, plain = (opened(files, kind, path) for path in (stored, whole))
    draft.check_weights()
    found, expected = draft.load_weights(), plain.load_weights()
    assert draft.config.quantization is not None
    of_matrices = {x.removesuffix(".values") for x in found if x.endswith(".values")}
    layer = "layers.0." if kind == "block" else ""
    assert {"fc.kernel", f"{layer}mlp.down.kernel"} <= of_matrices
    assert ("context.kernel" in of_matrices) == (kind == "block")
    for key, value in expected.items():
        read = dequantised(found, key)[: len(value)] if key in of_matrices else found[key]
        np.testing.assert_allclose(read, value, rtol=1e-6, atol=1e-6 * np.abs(value).max())


@pytest.mark.parametrize("name", ["fp8-channel", "awq"])
def test_output_heads_of_drafts_may_be_quantised(files: Files, tmp_path: Path, name: str) -> None:
    stored, _ = write(files, tmp_path, "head", name, "none")
    draft = opened(files, "head", stored)
    assert isinstance(draft, DraftCheckpoint)
    assert draft.config.has_own_lm_head
    assert "lm_head.kernel.values" in draft.load_weights()


def test_packed_inputs_of_a_draft_must_fit(files: Files, tmp_path: Path) -> None:
    stored, _ = write(files, tmp_path, "head", "int4", PLAIN)
    tensors = load_file(stored / "model.safetensors")
    name = "fc.weight_packed"
    tensors[name] = tensors[name][:, :-1].copy()
    write_tensors(stored / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=f"tensor '{name}' in {stored}.* has shape"):
        opened(files, "head", stored).check_weights()
    del tensors[name]
    write_tensors(stored / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=r"fc\.weight"):
        opened(files, "head", stored)


def test_a_configuration_of_whole_matrices_has_no_effect(files: Files, tmp_path: Path) -> None:
    _, whole = write(files, tmp_path, "head", "int4", PLAIN)
    edit(whole, lambda fields: fields.update(quantization_config=KINDS["int4"][0]))
    assert opened(files, "head", whole).config.quantization is None


@pytest.mark.parametrize("kind", ["head", "block"])
@pytest.mark.parametrize("stated", [{"quant_method": "modelopt", "quant_algo": "NVFP4"}, {"x": 1}])
def test_other_formats_are_refused_by_their_key(
    files: Files, tmp_path: Path, kind: str, stated: dict[str, Any]
) -> None:
    path, _ = write(files, tmp_path, kind, "fp8-channel", PLAIN)
    edit(path, lambda fields: fields.update(quantization_config=stated))
    with pytest.raises(ValueError, match=r"config.json: quantization_config: quant_method="):
        opened(files, kind, path)


def test_options_of_the_target_do_not_change_them(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Except that products may round activations, if the format of the draft permits it."""
    for name, permits in (("fp8-channel", True), ("int4", False)):
        stored, _ = write(files, tmp_path / name, "block", name, PLAIN)
        draft = opened(files, "block", stored)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            served = draft.quantised_draft("int8", rounds_activations=True)
        format = served.config.quantization
        assert isinstance(format, Quantization)
        assert (format.kind, format.rounds_activations) == (name[:4].rstrip("-"), permits)
        assert [f"{stored}/config.json" in x.getMessage() for x in caplog.records] == (
            [] if permits else [True]
        )


@pytest.mark.long_after(1)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("block", "fp8-blocks"), ("head", "int4")])
def test_texts_and_accepted_drafts(files: Files, tmp_path: Path, kind: str, name: str) -> None:
    """They are those with the whole draft of the same values, also after an update."""
    paths = write(files, tmp_path, kind, name, PLAIN)
    options = {"dtype": "float32", "skip_tokenizer_init": True}
    if kind == "block":
        options["speculative_algorithm"] = "DSPARK"
    params = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
    outputs = []
    for path in paths:
        with files.engine(draft=path, **options) as engine:
            found = engine.generate(
                input_ids=[[5, 9, 11, 40, 2, 7], [8] * 20], sampling_params=params
            )
            if path == paths[0]:
                assert engine.runner.networks.draft_config.quantization is not None
        keys = "spec_num_correct_drafts", "spec_verify_ct"
        meta = [[one["meta_info"][key] for key in keys] for one in found]
        outputs.append(([one["output_ids"] for one in found], meta))
    assert outputs[0] == outputs[1]
    assert all(count for count, _ in outputs[0][1])
    with files.engine(speculative=False, **{**options, "speculative_algorithm": None}) as engine:
        found = engine.generate(input_ids=[[5, 9, 11, 40, 2, 7], [8] * 20], sampling_params=params)
    assert [one["output_ids"] for one in found] == outputs[0][0]
