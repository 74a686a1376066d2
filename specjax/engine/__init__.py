"""The engine: text or tokens in, text and metrics out."""

from specjax.engine.disaggregated import DisaggregatedEngine as DisaggregatedEngine
from specjax.engine.engine import Engine as Engine
