"""Model shapes for measurements of speed with random weights.

Each preset is the published configuration of a target and of an EAGLE-3 head for it; written to a
folder it opens like a checkpoint with ``load_format="dummy"``.
"""

import json
from pathlib import Path
from typing import Any

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "llama3.1-8b": {
        "target": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        "draft": {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": 128256,
            "draft_vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 1,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
    }
}


def write_preset(name: str, folder: Path) -> tuple[Path, Path]:
    """Write the configurations of a preset; returns the folders of target and draft.

    Raises:
        ValueError: for an unknown preset.
    """
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is not one of {sorted(PRESETS)}")
    paths = []
    for part, config in PRESETS[name].items():
        path = folder / name / part
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        paths.append(path)
    return paths[0], paths[1]
