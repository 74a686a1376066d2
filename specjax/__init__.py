"""Lossless speculative decoding of language models in JAX on NVIDIA GPUs."""

from importlib.metadata import version as _version

from specjax.engine import Engine as Engine
from specjax.sampling_params import SamplingParams as SamplingParams

__version__ = _version("specjax")
__all__ = ["Engine", "SamplingParams", "__version__"]
