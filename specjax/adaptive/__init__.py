"""Adaptive speculation: choose how many tokens to draft in the next round."""

from specjax.adaptive.budget import BudgetPolicy as BudgetPolicy
from specjax.adaptive.config import AdaptiveConfig as AdaptiveConfig
from specjax.adaptive.config import AdaptiveSlot as AdaptiveSlot
from specjax.adaptive.config import load_adaptive_config as load_adaptive_config
from specjax.adaptive.controller import AdaptiveSpecPolicy as AdaptiveSpecPolicy
from specjax.adaptive.controller import TierController as TierController
from specjax.adaptive.ema import AdaptiveSpeculativeParams as AdaptiveSpeculativeParams
from specjax.adaptive.survival import RoundRecord as RoundRecord
from specjax.adaptive.worker import AdaptiveController as AdaptiveController
from specjax.adaptive.worker import AdaptiveSpecWorker as AdaptiveSpecWorker
from specjax.adaptive.worker import SpecRuntimeState as SpecRuntimeState
