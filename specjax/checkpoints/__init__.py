"""Load and save checkpoints of targets and drafts: Hugging Face and GGUF."""

from specjax.checkpoints.draft import DraftCheckpoint as DraftCheckpoint
from specjax.checkpoints.draft import open_draft as open_draft
from specjax.checkpoints.export import export_draft as export_draft
from specjax.checkpoints.export import export_fp8 as export_fp8
from specjax.checkpoints.target import TargetCheckpoint as TargetCheckpoint
from specjax.checkpoints.target import open_target as open_target
