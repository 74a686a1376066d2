"""Checkpoints of GPTQ and AWQ, and of compressed-tensors with an order of inputs."""

from functools import partial
from typing import Any

import numpy as np

from .quantized_files import GROUP, INT4, Format, Stored, compressed, packed

# AutoAWQ: bits 4i to 4i + 3 of a word have output 8w + AWQ_ORDER[i]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def words(values: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """Unsigned integers along the first axis, as words of 32 bits."""
    count = 32 // bits
    packed = np.zeros((-(-len(values) // count), values.shape[1]), np.uint64)
    for row in range(len(packed)):
        for place, i in enumerate(order or range(count)):
            if row * count + i < len(values):
                value = values[row * count + i].astype(np.uint64)
                packed[row] |= value << np.uint64(place * bits)
    return packed.astype(np.uint32).view(np.int32)


def rounded(
    matrix: np.ndarray, bits: int, groups: np.ndarray, has_zeros: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Integers ``[out, in]``, scales f16 and zero points ``[out, G]``, and the values.

    ``groups [in]`` is the group of each input. Zero points reach both of their limits.
    """
    most, count = 2**bits - 1, groups.max() + 1
    scales = np.zeros((len(matrix), count), np.float16)
    zeros = np.full((len(matrix), count), (most + 1) // 2)
    for group in range(count):
        part = matrix[:, groups == group]
        low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
        if has_zeros:
            scales[:, group] = (high - low) / most
            zeros[:, group] = np.clip(np.rint(-low / scales[:, group]), 0, most)
            zeros[::3, group], zeros[1::3, group] = 0, most
        else:
            scales[:, group] = np.abs(part).max(axis=1) / (most // 2)
            scales[::2, group] *= -1
    of_inputs = np.float32(scales)[:, groups], zeros[:, groups]
    values = np.clip(np.rint(matrix / of_inputs[0]) + of_inputs[1], 0, most).astype(np.int64)
    return values, scales, zeros, np.float32((values - of_inputs[1]) * of_inputs[0])


def gptq(
    matrix: np.ndarray,
    bits: int = 4,
    group: int = GROUP,
    *,
    has_zeros: bool = False,
    version: int = 1,
    is_permuted: bool = False,
    is_mixed: bool = False,
) -> Stored:
    """``is_permuted`` stores groups in reversed order; ``is_mixed`` those of any inputs."""
    columns = matrix.shape[1]
    groups = np.arange(columns) // (columns if group == -1 else group)
    if is_permuted:
        groups = groups.max() - groups
    if is_mixed:
        groups = np.random.default_rng(0).permutation(groups)
    values, scales, zeros, whole = rounded(matrix, bits, groups, has_zeros)
    offsets = (zeros - (version == 1)) % 2**bits
    stored = {
        ".qweight": words(values.T, bits),
        ".scales": np.ascontiguousarray(scales.T),
        ".qzeros": np.ascontiguousarray(words(offsets, bits).T),
        ".g_idx": groups.astype(np.int32),
    }
    return stored, whole


def awq(matrix: np.ndarray, group: int = GROUP, *, has_zeros: bool = True) -> Stored:
    groups = np.arange(matrix.shape[1]) // group
    values, scales, zeros, whole = rounded(matrix, 4, groups, has_zeros)
    stored = {
        ".qweight": np.ascontiguousarray(words(values, 4, AWQ_ORDER).T),
        ".scales": np.ascontiguousarray(scales.T),
        ".qzeros": np.ascontiguousarray(words(zeros, 4, AWQ_ORDER).T),
    }
    return stored, whole


def reordered(matrix: np.ndarray) -> Stored:
    """compressed-tensors with the groups of inputs in reversed order."""
    stored, whole = packed(4, True, GROUP, matrix)
    groups = np.arange(matrix.shape[1]) // GROUP
    stored["_scale"] = np.ascontiguousarray(stored["_scale"][:, ::-1])
    stored["_zero_point"] = np.ascontiguousarray(stored["_zero_point"][:, ::-1])
    return stored | {"_g_idx": (groups.max() - groups).astype(np.int32)}, whole


def gptq_config(bits: int = 4, group_size: int = GROUP, **changes: Any) -> dict[str, Any]:
    stated = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": True}
    return stated | {"desc_act": False, "checkpoint_format": "gptq"} | changes


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
V2 = {"checkpoint_format": "gptq_v2"}
PACKED: dict[str, Format] = {
    "gptq": (gptq_config(), gptq),
    "gptq-wrong-version": (gptq_config(), partial(gptq, version=2)),
    "gptq-whole-rows": (gptq_config(group_size=-1), partial(gptq, group=-1)),
    "gptq-zeros": (gptq_config(sym=False), partial(gptq, has_zeros=True)),
    "gptq-zeros-v2": (gptq_config(sym=False, **V2), partial(gptq, has_zeros=True, version=2)),
    "gptq-8": (gptq_config(8, dynamic={"-:.*head": {}}), partial(gptq, bits=8)),
    "gptq-8-zeros": (gptq_config(8, sym=False), partial(gptq, bits=8, has_zeros=True)),
    "gptq-order": (
        gptq_config(sym=False, desc_act=True, static_groups=True),
        partial(gptq, has_zeros=True, is_permuted=True),
    ),
    "awq": (AWQ, awq),
    "awq-symmetric": (AWQ | {"zero_point": False}, partial(awq, has_zeros=False)),
    "int4-order": (compressed(**INT4, symmetric=False, actorder="group"), reordered),
}
MIXED: Format = (gptq_config(desc_act=True), partial(gptq, is_mixed=True))
