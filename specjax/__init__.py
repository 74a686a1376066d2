"""Lossless speculative decoding of language models in JAX on NVIDIA GPUs."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax.engine.disaggregated import DisaggregatedEngine as DisaggregatedEngine
    from specjax.engine.engine import Engine as Engine
    from specjax.sampling.params import SamplingParams as SamplingParams
    from specjax.scheduling.loop import EngineFault as EngineFault
    from specjax.scheduling.scheduler import QueueFullError as QueueFullError

__version__ = version("specjax")
# Modules of the public names. They are imported at the first use, because a process that follows
# grammars imports parts of the package and must not import JAX.
_MODULES = {
    "DisaggregatedEngine": "specjax.engine.disaggregated",
    "Engine": "specjax.engine.engine",
    "EngineFault": "specjax.scheduling.loop",
    "QueueFullError": "specjax.scheduling.scheduler",
    "SamplingParams": "specjax.sampling.params",
}
__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
