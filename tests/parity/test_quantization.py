"""Checkpoints that the library compressed-tensors writes, against its own reading of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import (  # noqa: E402
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from compressed_tensors.quantization.utils import calculate_qparams  # noqa: E402
from safetensors.torch import load_file as load_tensors  # noqa: E402

from specjax.checkpoints import export_fp8  # noqa: E402
from specjax.testing import Files  # noqa: E402

from ..support.quantized_files import compressed, edit, logits_of, write_tensors  # noqa: E402

pytestmark = pytest.mark.parity
GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "int8 channel": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8 packed": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int4": ("pack-quantized", GROUP),
    "int4 with zero points": ("pack-quantized", GROUP | {"symmetric": False}),
}


def parameters(weight: Any, args: Any) -> tuple[Any, Any]:
    """Scales and zero points for the smallest and largest values."""
    if args.strategy == "tensor":
        return calculate_qparams(weight.min().reshape(1), weight.max().reshape(1), args)
    size = args.group_size or weight.shape[1]
    grouped = weight.reshape(len(weight), -1, size)
    return calculate_qparams(grouped.amin(dim=-1), grouped.amax(dim=-1), args)


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_compressed_tensors(files: Files, tmp_path: Path, name: str) -> None:
    layout, options = FORMATS[name]
    args = QuantizationArgs(**options)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(layout)
    stored, whole = {}, {}
    for key, x in load_file(files.target / "model.safetensors").items():
        if x.ndim == 1 or "embed_tokens" in key or "lm_head" in key:
            stored[key] = whole[key] = x
            continue
        weight = torch.from_numpy(x)
        scale, zero = parameters(weight, args)
        found = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        found = compressor.compress(found, scheme)
        base = key.removesuffix("weight")
        for part, value in found.items():
            is_float8 = value.dtype == torch.float8_e4m3fn
            array = value.view(torch.uint8).numpy() if is_float8 else value.numpy()
            stored[base + part] = array.view("float8_e4m3fn") if is_float8 else array
        whole[key] = compressor.decompress(found, scheme)["weight"].numpy()
    paths = tmp_path / "stored", tmp_path / "whole"
    for path in paths:
        shutil.copytree(files.target, path)
    write_tensors(paths[0] / "model.safetensors", stored)
    save_file(whole, paths[1] / "model.safetensors")
    config = compressed(options["num_bits"], options["type"], options["strategy"])
    config["config_groups"]["group_0"]["weights"] |= options
    edit(paths[0], lambda fields: fields.update(quantization_config=config | {"format": layout}))
    ours, theirs = map(logits_of, paths)
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def test_compressed_tensors_reads_exported_files(files: Files, tmp_path: Path) -> None:
    paths = tmp_path / "stored", tmp_path / "whole"
    export_fp8(paths[0], files.target)
    stated = json.loads((paths[0] / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(stated).config_groups["group_0"]
    assert scheme.format in (None, "float-quantized")
    compressor = BaseCompressor.get_value_from_registry(stated["format"])
    stored = load_tensors(paths[0] / "model.safetensors")
    whole = {name: x.numpy() for name, x in stored.items() if f"{name}_scale" not in stored}
    scales = [name for name in whole if name.endswith("_scale")]
    assert len(scales) == 14
    for name in scales:
        key = name.removesuffix("_scale")
        found = {"weight": stored[key], "weight_scale": torch.from_numpy(whole.pop(name))}
        whole[key] = compressor.decompress(found, scheme)["weight"].float().numpy()
    shutil.copytree(files.target, paths[1])
    save_file(whole, paths[1] / "model.safetensors")
    ours, theirs = map(logits_of, paths)
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())
