"""XLA options of rounds and prefills by rows and formats of matrices."""

import pytest

from specjax.config import Quantization
from specjax.models.weights import MAX_FUSED_ROWS
from specjax.runtime.functions import (
    SCALED_GROUPS,
    WITHOUT_GRAPHS,
    WITHOUT_TRITON,
    compiler_options,
    prefill_options,
)

NO_SPLIT = {"xla_gpu_experimental_force_split_k": "1"}
FP8 = Quantization("fp8")
ROUNDED = Quantization("fp8", rounds_activations=True)
INT4 = Quantization("int4", group=128)


@pytest.mark.parametrize(
    ("rows", "formats", "expected"),
    [
        (8, [None, None], {}),
        (64, [None], NO_SPLIT),
        (256, [None, None], NO_SPLIT | WITHOUT_TRITON),
        (256, [FP8, FP8], {}),
        (MAX_FUSED_ROWS + 1, [FP8], NO_SPLIT | WITHOUT_TRITON),
        (8, [ROUNDED, ROUNDED], {}),
        (256, [ROUNDED, ROUNDED], NO_SPLIT | WITHOUT_TRITON),
        (8, [None, INT4], SCALED_GROUPS),
        (256, [INT4], SCALED_GROUPS),
        (MAX_FUSED_ROWS + 1, [INT4], SCALED_GROUPS | WITHOUT_TRITON),
    ],
)
def test_options_of_a_round(rows, formats, expected) -> None:
    assert compiler_options(rows, formats) == expected


@pytest.mark.parametrize(
    ("width", "formats", "expected"),
    [
        (128, [None], WITHOUT_TRITON),
        (MAX_FUSED_ROWS, [FP8], {}),
        (MAX_FUSED_ROWS, [None, INT4], SCALED_GROUPS),
        (128, [ROUNDED, ROUNDED], WITHOUT_TRITON),
        (MAX_FUSED_ROWS + 1, [FP8], WITHOUT_TRITON),
        (MAX_FUSED_ROWS + 1, [INT4], WITHOUT_TRITON),
    ],
)
def test_options_of_a_prefill(width, formats, expected) -> None:
    assert prefill_options(width, formats) == WITHOUT_GRAPHS | expected
