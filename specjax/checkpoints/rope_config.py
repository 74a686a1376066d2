"""Rotary settings in model configurations, as transformers 4 and 5 write them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.config import RopeScaling

_LLAMA3_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


def read_rope(config: Mapping[str, Any], path: Path) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling of a configuration.

    transformers 4 writes ``rope_theta`` and ``rope_scaling``, transformers 5 one
    ``rope_parameters``; 10000 is both libraries' default base for the supported families.

    Args:
        config: the parsed ``config.json``.
        path: its file, for errors.

    Raises:
        ValueError: for a scaling type that is not supported or lacks a parameter.
    """
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(value, Mapping) or any(isinstance(v, Mapping) for v in value.values()):
            raise ValueError(
                f"{path}: {key}={value!r} is not supported; it must be one set of parameters for "
                "all layers"
            )
    parameters = new or old
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"{path}: partial_rotary_factor={partial} is not supported; only 1.0 is")
    try:
        scaling = _scaling(parameters)
    except KeyError as error:
        raise ValueError(f"{path}: rotary scaling {dict(parameters)} lacks {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return 10000.0 if theta is None else float(theta), scaling


def _scaling(parameters: Mapping[str, Any]) -> RopeScaling | None:
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type == "default":
        return None
    if rope_type == "linear":
        return RopeScaling(rope_type="linear", factor=float(parameters["factor"]))
    if rope_type == "llama3":
        factor, low, high, original = (parameters[key] for key in _LLAMA3_KEYS)
        return RopeScaling(
            rope_type="llama3",
            factor=float(factor),
            low_freq_factor=float(low),
            high_freq_factor=float(high),
            original_max_position_embeddings=int(original),
        )
    return RopeScaling(rope_type=str(rope_type))  # raises, listing what is supported
