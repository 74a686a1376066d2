"""Adaptive speculation: how many tokens to draft in the next round."""

from specjax.adaptive.config import AdaptiveConfig as AdaptiveConfig
from specjax.adaptive.config import AdaptiveSlot as AdaptiveSlot
from specjax.adaptive.config import CostSettings as CostSettings
from specjax.adaptive.config import load_adaptive_config as load_adaptive_config
from specjax.adaptive.controller import AdaptiveController as AdaptiveController
from specjax.adaptive.controller import AdaptiveSpecWorker as AdaptiveSpecWorker
from specjax.adaptive.controller import SpecRuntimeState as SpecRuntimeState
from specjax.adaptive.cost_policy import CostAwarePolicy as CostAwarePolicy
from specjax.adaptive.params import AdaptiveSpeculativeParams as AdaptiveSpeculativeParams
from specjax.adaptive.policy import AdaptiveSpecPolicy as AdaptiveSpecPolicy
from specjax.adaptive.round_times import RoundTimes as RoundTimes

__all__ = [
    "AdaptiveConfig",
    "AdaptiveController",
    "AdaptiveSlot",
    "AdaptiveSpecPolicy",
    "AdaptiveSpecWorker",
    "AdaptiveSpeculativeParams",
    "CostAwarePolicy",
    "CostSettings",
    "RoundTimes",
    "SpecRuntimeState",
    "load_adaptive_config",
]
