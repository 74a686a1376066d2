"""Rotary embeddings: their frequencies, tables and scalings, and how configurations state them.

Axes: B batch, T tokens per row, H head dim, of which the first R are rotated. A family whose heads
are rotated in another order, or only in part, stores its weights in the order that ``rotated_rows``
gives, so the kernels rotate all heads alike: element i with element i + H / 2.
"""

import math
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from msgspec import Meta

from specjax.checks import annotations
from specjax.config import Rope, RopeScaling, Scale, Theta
from specjax.json_file import Fields, PositiveSize
from specjax.kernels.rope_store import Norms


class RopeTables(NamedTuple):
    """Cosine and sine f32 ``[B, T, 1, H / 2]`` that rotate queries and keys, and their norms."""

    cos: Array
    sin: Array
    norms: Norms | None = None  # applied to each head before the rotation
    query_scale: Array | None = None  # f32 [B, T, 1, 1], multiplies queries


def rope_frequencies(rope: Rope) -> np.ndarray:
    """Inverse rotary frequencies, float32 ``[H / 2]``; 0 where a head is not rotated.

    Sources: YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753), and for ``llama3`` the release of
    Llama 3.1, which keeps high frequencies, divides low ones and blends in between.
    """
    head_dim, theta, scaling, rotary_dim = rope
    size = head_dim if rotary_dim is None else rotary_dim
    frequencies = np.zeros(head_dim // 2, np.float32)
    inverse = 1.0 / theta ** (np.arange(0, size, 2, dtype=np.float64) / max(size, 1))
    frequencies[: size // 2] = _scaled(inverse, theta, scaling) if scaling else inverse
    return frequencies


def _scaled(inverse: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    kind, factor = scaling.rope_type, scaling.factor
    original = scaling.original_max_position_embeddings
    if kind == "linear":
        return inverse / factor
    if kind == "proportional":
        rotated = int(scaling.partial_rotary_factor * 2 * len(inverse) // 2)
        return np.where(np.arange(len(inverse)) < rotated, inverse / factor, 0.0)
    if kind == "llama3":
        smooth = (original * inverse / (2 * np.pi) - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        share = np.clip(smooth, 0.0, 1.0)
        return (1 - share) * inverse / factor + share * inverse
    if kind == "yarn":
        last = 2 * len(inverse) - 1

        def dimension(rotations: float) -> float:
            """The dimension that rotates this often over the original context."""
            log_period = math.log(original / (rotations * 2 * math.pi))
            return float(len(inverse) * log_period / math.log(theta))

        low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, last)
        ramp = (np.arange(len(inverse)) - low) / (high - low or 0.001)
        share = 1.0 - np.clip(ramp, 0.0, 1.0)
        return (1 - share) * inverse / factor + share * inverse
    if kind == "longrope":
        return inverse / np.asarray(scaling.long_factor)
    return inverse  # "dynamic" changes the base, see Rope.within


def rope_tables(rope: Rope, positions: Array) -> RopeTables:
    """Cosine and sine, float32 ``[B, T, 1, H / 2]``, for integer positions ``[B, T]``."""
    scaling, frequencies = rope.scaling, rope_frequencies(rope)
    places = positions.astype(jnp.float32)[..., None, None]
    angles = places * frequencies
    cos, sin, query_scale = jnp.cos(angles), jnp.sin(angles), None
    if scaling is not None and scaling.attention_factor != 1.0:
        rotated = frequencies > 0  # dimensions that are not rotated keep their values
        factor = np.where(rotated, scaling.attention_factor, 1.0).astype(np.float32)
        cos, sin = cos * factor, sin * factor
    if scaling is not None and scaling.llama_4_scaling_beta:
        spans = jnp.floor(places / scaling.original_max_position_embeddings)
        query_scale = 1.0 + scaling.llama_4_scaling_beta * jnp.log(1.0 + spans)
    return RopeTables(cos, sin, query_scale=query_scale)


# layers share an order, which takes 8 MB with 1,024 heads of 1,024 dimensions
@lru_cache(maxsize=8)
def rotated_rows(heads: int, head_dim: int, rotary_dim: int, *, interleaved: bool) -> np.ndarray:
    """The order of stored rows ``[heads * H]`` of a projection whose first R rows are rotated.

    The files of some families rotate neighbouring rows (``interleaved``), others row i with row
    i + R / 2.
    """
    rotary, half = np.arange(rotary_dim), rotary_dim // 2
    firsts, seconds = (rotary[::2], rotary[1::2]) if interleaved else (rotary[:half], rotary[half:])
    unrotated = np.arange(rotary_dim, head_dim)
    middle = len(unrotated) // 2
    order = np.concatenate([firsts, unrotated[:middle], seconds, unrotated[middle:]])
    rows = (np.arange(heads)[:, None] * head_dim + order).reshape(-1)
    rows.flags.writeable = False
    return rows


def read_rope(config: Fields, head_dim: int) -> dict[str, Any]:
    """Read base, scaling and rotated dimensions from a ``config.json``.

    transformers 4 writes ``rope_theta`` and ``rope_scaling``; transformers 5 writes
    ``rope_parameters``, for some families by layer type. The result is for full attention.
    """
    place = config.fields("rope_parameters")
    if isinstance(place.values.get("full_attention"), dict):
        place = place.fields("full_attention")
    elif not place.values:
        place = config.fields("rope_scaling")
    if any(isinstance(value, dict) for value in place.values.values()):
        raise config.wrong("rope_parameters", "must be one set, or have one for 'full_attention'")
    share = place.get(
        "partial_rotary_factor", float, config.get("partial_rotary_factor", float, 1.0)
    )
    if not 2 / head_dim <= share <= 1.0:
        place = place if "partial_rotary_factor" in place else config
        demand = f"must be at most 1 and rotate at least 2 of the {head_dim} dimensions of a head"
        raise place.wrong("partial_rotary_factor", demand)
    if place.get("rope_type", str, "default") == "proportional":
        share = 1.0  # of all pairs
    return {
        "rope_theta": place.get("rope_theta", Theta, config.get("rope_theta", Theta, 10000.0)),
        "rope_scaling": _scaling(place, config, int(head_dim * share)),
        "rotary_dim": None if share == 1.0 else int(head_dim * share),
    }


def local_theta(config: Fields, default: float) -> float:
    """Read the rotary base of layers with a window."""
    place = config.fields("rope_parameters").fields("sliding_attention")
    if place.get("rope_type", str, "default") != "default":
        raise place.wrong("rope_type", "is not supported in layers with a window")
    return place.get("rope_theta", Theta, config.get("rope_local_base_freq", Theta, default))


_NUMBERS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_Mscale = Annotated[float, Meta(ge=0.0, le=1e3)]
_OLD_NAMES = {"su": "longrope", "mrope": "default"}
_ORIGINAL = "original_max_position_embeddings"


def _scaling(place: Fields, config: Fields, size: int) -> RopeScaling | None:
    """Read the scaling of ``size`` rotated dimensions."""
    kind = place.get("rope_type", str, place.get("type", str, "default"))
    kind = _OLD_NAMES.get(kind, kind)
    if kind == "default":
        return None
    longest = config.get("max_position_embeddings", PositiveSize)
    kinds = annotations(RopeScaling)

    def read(name: str, default: Any = ...) -> Any:
        return place.get(name, kinds[name], default)

    values: dict[str, Any] = {name: read(name) for name in _NUMBERS.get(kind, ())}
    if kind in ("llama3", "yarn"):
        # some files of YaRN leave it out, and mean their context before the scaling
        values[_ORIGINAL] = read(_ORIGINAL, ... if kind == "llama3" else longest)
    if kind == "dynamic":
        values[_ORIGINAL] = longest
        if size < 4:
            raise config.wrong("head_dim", "must be at least 4 with dynamic rope scaling")
    if kind == "yarn":
        values |= {"beta_fast": read("beta_fast", 32.0), "beta_slow": read("beta_slow", 1.0)}
        values["truncate"] = read("truncate", True)
        values["llama_4_scaling_beta"] = read("llama_4_scaling_beta", 0.0)
        factor = read("factor", max(1.0, longest / values[_ORIGINAL]))
        values["factor"], scale = factor, place.get("mscale", _Mscale, 0.0)
        all_scale = place.get("mscale_all_dim", _Mscale, 0.0)
        attention = _yarn_factor(factor, 1.0)
        if scale and all_scale:
            attention = _yarn_factor(factor, scale) / _yarn_factor(factor, all_scale)
        values["attention_factor"] = read("attention_factor", attention)
    if kind == "proportional":
        values |= {name: read(name, 1.0) for name in ("factor", "partial_rotary_factor")}
    if kind == "longrope":
        original = config.get(_ORIGINAL, kinds[_ORIGINAL], read(_ORIGINAL, longest))
        factor = read("factor", max(1.0, longest / original))
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
        values |= {_ORIGINAL: original, "factor": factor}
        values["attention_factor"] = read("attention_factor", attention)
        for name in ("short_factor", "long_factor"):
            values[name] = tuple(place.get(name, list[Scale]))
            if len(values[name]) != size // 2:
                raise place.wrong(name, f"must be {size // 2} numbers above 0, one for each pair")
    return place.build(RopeScaling, {"rope_type": kind} | values)


def _yarn_factor(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0
