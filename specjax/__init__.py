"""Lossless speculative decoding of language models in JAX on NVIDIA GPUs."""

from importlib.metadata import version as _version

from specjax.engine import DisaggregatedEngine as DisaggregatedEngine
from specjax.engine import Engine as Engine
from specjax.sampling.params import SamplingParams as SamplingParams
from specjax.scheduling.loop import EngineFault as EngineFault
from specjax.scheduling.scheduler import QueueFullError as QueueFullError

__version__ = _version("specjax")
__all__ = [
    "DisaggregatedEngine",
    "Engine",
    "EngineFault",
    "QueueFullError",
    "SamplingParams",
    "__version__",
]
