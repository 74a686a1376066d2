"""Checkpoints in and out: Hugging Face, GGUF and orbax, targets and draft heads."""

from specjax.checkpoints.draft import DraftCheckpoint as DraftCheckpoint
from specjax.checkpoints.draft import open_draft as open_draft
from specjax.checkpoints.export import export_draft as export_draft
from specjax.checkpoints.orbax_store import save_orbax as save_orbax
from specjax.checkpoints.target import TargetCheckpoint as TargetCheckpoint
from specjax.checkpoints.target import open_target as open_target

__all__ = [
    "DraftCheckpoint",
    "TargetCheckpoint",
    "export_draft",
    "open_draft",
    "open_target",
    "save_orbax",
]
