"""Model shapes for speed measurements with random weights.

Each preset has the shapes of a published target and of an EAGLE-3 head for it. Written to a folder,
it opens like a checkpoint with ``load_format="dummy"``.
"""

from pathlib import Path
from typing import Any

from specjax.checkpoints.orbax import write_config
from specjax.config import DraftConfig, ModelConfig, RopeScaling

_LLAMA31_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
LLAMA31_8B = ModelConfig(
    model_type="llama",
    num_layers=32,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(rope_type="llama3", factor=8.0),
    **_LLAMA31_8B,
)
LLAMA31_8B_EAGLE3 = DraftConfig(
    checkpoint_format="eagle-3",
    draft_vocab_size=32000,
    target_hidden_size=LLAMA31_8B.hidden_size,
    num_layers=1,
    feature_layers=LLAMA31_8B.default_feature_layers,
    **_LLAMA31_8B,
)
PRESETS = {"llama3.1-8b": (LLAMA31_8B, LLAMA31_8B_EAGLE3)}


def write_preset(name: str, folder: Path) -> tuple[Path, Path]:
    """Write the configurations of a preset; return the folders of target and draft."""
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is not one of {sorted(PRESETS)}")
    paths = folder / name / "target", folder / name / "draft"
    for path, config in zip(paths, PRESETS[name], strict=True):
        path.mkdir(parents=True, exist_ok=True)
        write_config(path, config)
    return paths
