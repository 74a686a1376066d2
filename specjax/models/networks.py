"""Structures of target and draft, without weights, and where they live."""

from dataclasses import dataclass
from typing import Any

from specjax.config import ModelConfig, TransformerConfig
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel
from specjax.models.placement import Placement


@dataclass(frozen=True)
class Networks:
    """Structures of target and draft."""

    target: FlatModel[CausalLM]
    draft: FlatModel[
        Any
    ]  # what an algorithm drafts with; without weights where it needs no network
    target_config: ModelConfig
    draft_config: Any  # ``None`` where an algorithm needs no network
    placement: Placement  # where both live

    @property
    def configs(self) -> tuple[TransformerConfig, ...]:
        """Configurations of the networks that there are."""
        configs = (self.target_config, self.draft_config)
        return tuple(config for config in configs if isinstance(config, TransformerConfig))

    @property
    def weight_bytes(self) -> int:
        leaves = (*self.target.abstract, *self.draft.abstract)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
