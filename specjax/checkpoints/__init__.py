"""Load and save checkpoints of targets and drafts: Hugging Face, GGUF and orbax."""

from specjax.checkpoints.draft import DraftCheckpoint, open_draft
from specjax.checkpoints.export import export_draft
from specjax.checkpoints.orbax import save_orbax
from specjax.checkpoints.target import TargetCheckpoint, open_target

__all__ = [
    "DraftCheckpoint",
    "TargetCheckpoint",
    "export_draft",
    "open_draft",
    "open_target",
    "save_orbax",
]
