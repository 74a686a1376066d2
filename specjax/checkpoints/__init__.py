"""Checkpoints in and out: Hugging Face, GGUF and orbax, targets and draft heads."""

from specjax.checkpoints.orbax_store import save_orbax as save_orbax
from specjax.checkpoints.target import TargetCheckpoint as TargetCheckpoint
from specjax.checkpoints.target import open_target as open_target

__all__ = ["TargetCheckpoint", "open_target", "save_orbax"]
