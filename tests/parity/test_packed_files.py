"""GPTQ and AWQ files against what compressed-tensors makes of them.

It has a converter of AWQ. Files of GPTQ are converted here, with its functions for words.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.compressors.pack_quantized import helpers  # noqa: E402
from compressed_tensors.entrypoints.convert import AutoAWQConverter  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # noqa: E402

from specjax.testing import Files  # noqa: E402

from ..support.packed_files import AWQ, V2, awq, gptq, gptq_config  # noqa: E402
from ..support.quantized_files import (  # noqa: E402
    Format,
    edit,
    logits_of,
    make,
    write_tensors,
)

pytestmark = pytest.mark.parity
GROUP = 16  # all inputs are whole groups
OF_AWQ = AWQ | {"group_size": GROUP}
of_gptq, zeros = partial(gptq_config, group_size=GROUP), partial(gptq, group=GROUP, has_zeros=True)
FORMATS: dict[str, Format] = {
    "awq": (OF_AWQ, partial(awq, group=GROUP)),
    "awq-symmetric": (OF_AWQ | {"zero_point": False}, partial(awq, group=GROUP, has_zeros=False)),
    "gptq": (of_gptq(), partial(gptq, group=GROUP)),
    "gptq-8": (of_gptq(bits=8), partial(gptq, group=GROUP, bits=8)),
    "gptq-zeros": (of_gptq(sym=False), zeros),
    "gptq-zeros-v2": (of_gptq(sym=False, **V2), partial(zeros, version=2)),
}
Tensors = dict[str, Any]


def converted_gptq(tensors: Tensors, bits: int, version: int) -> Tensors:
    """A GPTQ file as pack-quantized, with zero points."""
    out = dict(tensors)
    for at in [name.removesuffix("qweight") for name in tensors if name.endswith("qweight")]:
        words, scales, zeros, order = (
            out.pop(at + x) for x in "qweight scales qzeros g_idx".split()
        )
        shapes = (len(order), words.shape[1]), scales.shape
        values = helpers.unpack_from_int32(words, bits, torch.Size(shapes[0]), packed_dim=0)
        offsets = helpers.unpack_from_int32(zeros, bits, torch.Size(shapes[1]), packed_dim=1)
        half = 2 ** (bits - 1)
        offsets = (offsets.int() + (version == 1) + half) % (2 * half) - half
        out[f"{at}weight_packed"] = helpers.pack_to_int32(values.T.contiguous(), bits)
        out[f"{at}weight_shape"] = torch.tensor(values.T.shape)
        out[f"{at}weight_scale"] = scales.T.contiguous()
        packed = offsets.T.contiguous().to(torch.int8)
        out[f"{at}weight_zero_point"] = helpers.pack_to_int32(packed, bits, packed_dim=0)
    return out


def decompressed(tensors: Tensors, bits: int, *, symmetric: bool) -> dict[str, np.ndarray]:
    """The whole matrices of a pack-quantized file."""
    options: dict[str, Any] = {"num_bits": bits, "strategy": "group", "group_size": GROUP}
    args = QuantizationArgs(**options, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    whole = {name: x for name, x in tensors.items() if ".weight_" not in name}
    for name in tensors:
        if name.endswith(".weight_packed"):
            at = name.removesuffix("weight_packed")
            found = {x[len(at) :]: y for x, y in tensors.items() if x.startswith(f"{at}weight_")}
            found["weight_scale"] = found["weight_scale"].float()
            whole[f"{at}weight"] = compressor.decompress(found, scheme)["weight"]
    return {name: x.numpy() for name, x in whole.items()}


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_compressed_tensors(files: Files, tmp_path: Path, name: str) -> None:
    stated = FORMATS[name][0]
    stored, whole = make(files, tmp_path, FORMATS[name])
    ours = logits_of(stored)
    loaded = load_file(stored / "model.safetensors")
    tensors = {key: torch.from_numpy(x) for key, x in loaded.items()}
    if "awq" in name:
        converter = AutoAWQConverter.from_autoawq_config(stated)
        converter.validate(tensors)
        tensors = converter.process(tensors)
        config = converter.update_config(None).model_dump(mode="json", exclude_none=True)
        edit(stored, lambda fields: fields.update(quantization_config=config))
        converted = {key: x.contiguous().numpy() for key, x in tensors.items()}
        if stated["zero_point"]:  # else some scales are negative, which they must not be there
            write_tensors(stored / "model.safetensors", converted)
            np.testing.assert_array_equal(logits_of(stored), ours)
    elif "gptq" in name:
        tensors = converted_gptq(tensors, stated["bits"], 2 if "v2" in name else 1)
    symmetric = name == "awq-symmetric"
    save_file(
        decompressed(tensors, stated.get("bits", 4), symmetric=symmetric),
        whole / "model.safetensors",
    )
    theirs = logits_of(whole)
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())
