"""Rotary frequencies and tables of each scaling, compared with its definition."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specjax.config import Rope, RopeScaling
from specjax.models.rope import rope_frequencies, rope_tables

DIM = 16
LLAMA3 = RopeScaling(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096)
LONG = RopeScaling(
    rope_type="longrope",
    short_factor=tuple(1.0 + i / 10 for i in range(8)),
    long_factor=tuple(2.0 + i for i in range(8)),
    original_max_position_embeddings=64,
)


def plain(theta: float, size: int = DIM) -> list[float]:
    return [theta ** (-2 * i / size) for i in range(size // 2)]


def llama3(frequency: float, low: float = 1.0, high: float = 4.0, factor: float = 8.0) -> float:
    """Frequencies that turn often in 64 tokens stay, slow ones are divided, others in between."""
    turns = 64 * frequency / (2 * math.pi)
    share = min(1.0, max(0.0, (turns - low) / (high - low)))
    return share * frequency + (1 - share) * frequency / factor


def yarn(theta: float, scaling: RopeScaling) -> list[float]:
    """A ramp between the dimensions that turn ``beta_fast`` and ``beta_slow`` times."""

    def dimension(turns: float) -> float:
        length = scaling.original_max_position_embeddings
        return DIM * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, DIM - 1)
    shares = [min(1.0, max(0.0, (i - first) / (last - first))) for i in range(DIM // 2)]
    pairs = zip(plain(theta), shares, strict=True)
    return [x * (1 - share) + x / scaling.factor * share for x, share in pairs]


WIDE = replace(YARN, beta_fast=500.0)
SHORT = replace(YARN, original_max_position_embeddings=100)
SCALED: dict[str, Any] = {
    "none": (Rope(DIM, 1e4), plain(1e4)),
    "none, in part": (Rope(DIM, 1e4, rotary_dim=6), plain(1e4, 6) + [0.0] * 5),
    "linear": (
        Rope(DIM, 1e4, RopeScaling(rope_type="linear", factor=2.0)),
        [x / 2 for x in plain(1e4)],
    ),
    "llama3": (Rope(DIM, 100.0, LLAMA3), [llama3(x) for x in plain(100.0)]),
    "yarn": (Rope(DIM, 1e4, YARN), yarn(1e4, YARN)),
    # the ramp ends after the last dimension, and begins before the first
    "yarn, small base": (Rope(DIM, 10.0, WIDE), yarn(10.0, WIDE)),
    "yarn, short": (Rope(DIM, 1e4, SHORT), yarn(1e4, SHORT)),
    "yarn, not truncated": (
        Rope(DIM, 1e4, replace(YARN, truncate=False)),
        yarn(1e4, replace(YARN, truncate=False)),
    ),
    "longrope": (
        Rope(DIM, 1e4, LONG).within(65),
        [x / (2.0 + i) for i, x in enumerate(plain(1e4))],
    ),
    "longrope, short": (
        Rope(DIM, 1e4, LONG).within(64),
        [x / (1.0 + i / 10) for i, x in enumerate(plain(1e4))],
    ),
    # the base grows, so that the slowest frequency is divided by 2 * 256 / 64 - 1
    "dynamic": (
        Rope(DIM, 1e4, replace(LONG, rope_type="dynamic", factor=2.0)).within(256),
        plain(1e4 * 7 ** (DIM / (DIM - 2))),
    ),
    "dynamic, short": (
        Rope(DIM, 1e4, replace(LONG, rope_type="dynamic", factor=2.0)).within(64),
        plain(1e4),
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_frequencies(name: str) -> None:
    rope, expected = SCALED[name]
    np.testing.assert_allclose(rope_frequencies(rope), expected, rtol=1e-6)


def test_tables_have_the_scales_of_attention() -> None:
    """Dimensions that are not rotated keep their values; queries grow with their position."""
    scaling = replace(YARN, factor=1.0, attention_factor=1.5, llama_4_scaling_beta=0.1)
    positions = np.array([[0, 5, 4095, 4096, 9000]], np.int32)
    tables = rope_tables(Rope(DIM, 1e4, scaling, rotary_dim=12), positions)
    angles = np.array([*plain(1e4, 12), 0.0, 0.0]) * positions[..., None, None]
    factors = [1.5] * 6 + [1.0] * 2
    np.testing.assert_allclose(tables.cos, np.cos(angles) * factors, atol=2e-3)
    np.testing.assert_allclose(tables.sin, np.sin(angles) * factors, atol=2e-3)
    growth = np.array([1.0, 1.0, 1.0, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3)])
    np.testing.assert_allclose(tables.query_scale, growth.reshape(1, 5, 1, 1), rtol=1e-6)
