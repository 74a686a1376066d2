"""Lossless speculative decoding of language models in JAX on NVIDIA GPUs."""

from importlib.metadata import version as _version

__version__ = _version("specjax")
