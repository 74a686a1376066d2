"""Structures of target and draft head, without weights."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from specjax.config import DraftConfig, ModelConfig
from specjax.models.decoder import CausalLM
from specjax.models.eagle import build_head
from specjax.models.flat import FlatModel


@dataclass(frozen=True)
class Networks:
    """Structures of target and draft, without weights."""

    target: FlatModel[CausalLM]
    head: FlatModel[Any] | None
    target_config: ModelConfig
    head_config: DraftConfig | None

    @classmethod
    def of(cls, target: ModelConfig, head: DraftConfig | None, kernels: str = "xla") -> "Networks":
        """Structures of two configurations; ``kernels`` as :class:`RMSNorm` has it."""
        return cls(
            FlatModel.of(partial(CausalLM, target, kernels=kernels)),
            None if head is None else FlatModel.of(partial(build_head, head, kernels=kernels)),
            target,
            head,
        )

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers that the head reads."""
        return () if self.head_config is None else self.head_config.feature_layers
