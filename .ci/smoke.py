"""Imports specjax and decodes with tiny random weights, with and without speculation."""

import importlib.util
import json
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import specjax
from specjax import Engine, SamplingParams

VOCAB, HIDDEN, INTER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 97, 32, 48, 4, 4, 2, 8
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


def layer(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a decoder layer whose attention reads ``width`` features."""
    return {
        f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, width),
        f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, width),
        f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, width),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        f"{prefix}.mlp.gate_proj.weight": (INTER, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (INTER, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, INTER),
        f"{prefix}.input_layernorm.weight": (HIDDEN,),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
    }


def write(path: Path, config: dict[str, object], shapes: dict[str, tuple[int, ...]]) -> None:
    """Writes a checkpoint with random weights in the Hugging Face layout."""
    path.mkdir()
    rng = np.random.default_rng(len(shapes))
    tensors = {
        name: rng.normal(1.0 if len(shape) == 1 else 0.0, 0.3, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({**COMMON, **config}))


def main() -> None:
    """Fails with an exception where the installation does not work."""
    assert importlib.util.find_spec("specjax.kernels") is not None
    assert "site-packages" in str(specjax.__file__), specjax.__file__
    with tempfile.TemporaryDirectory() as folder:
        target, draft = Path(folder, "target"), Path(folder, "draft")
        shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
        for i in range(LAYERS):
            shapes |= layer(f"model.layers.{i}", HIDDEN)
        write(
            target,
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "num_hidden_layers": LAYERS,
                "tie_word_embeddings": True,
                "eos_token_id": VOCAB - 1,
            },
            shapes,
        )
        head = {
            **layer("midlayer", 2 * HIDDEN),
            "midlayer.hidden_norm.weight": (HIDDEN,),
            "fc.weight": (HIDDEN, 3 * HIDDEN),
            "norm.weight": (HIDDEN,),
            "lm_head.weight": (VOCAB, HIDDEN),
        }
        write(
            draft,
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                "model_type": "llama",
                "num_hidden_layers": 1,
                "tie_word_embeddings": False,
                "draft_vocab_size": VOCAB,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
            },
            head,
        )
        common = {"model": target, "dtype": "float32", "skip_tokenizer_init": True}
        prompts = [[1, 2, 3], [5, 8, 13, 21, 34], [7]]
        with (
            Engine(**common, draft=draft, speculative_algorithm="EAGLE3") as engine,
            Engine(**common, speculative_algorithm=None) as plain,
        ):
            for temperature in (0.0, 0.8):
                params = SamplingParams(
                    temperature=temperature, max_new_tokens=24, sampling_seed=1, ignore_eos=True
                )
                outputs = engine.generate(input_ids=prompts, sampling_params=params)
                expected = plain.generate(input_ids=prompts, sampling_params=params)
                for output, reference in zip(outputs, expected, strict=True):
                    assert output["output_ids"] == reference["output_ids"]
                    assert len(output["output_ids"]) == 24
                    assert output["meta_info"]["spec_verify_ct"] > 0
    print(f"smoke test passed with jax {version('jax')} and flax {version('flax')}")


if __name__ == "__main__":
    main()
