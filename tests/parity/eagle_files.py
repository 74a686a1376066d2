"""Random draft heads in all published formats."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch

from .eagle_reference import Head, Tensors

VOCAB = 131
TARGET_HIDDEN = 48
TARGET_LAYERS = 8
NOT_PREFIXED = ("lm_head.weight", "d2t", "t2d")


@dataclass(frozen=True, kw_only=True)
class HeadCase:
    """One published format of a draft head.

    ``embedding`` and ``lm_head`` tell whether the file has ``"own"`` tensors. A ``"tied"`` head has
    no ``lm_head`` tensor and sets ``tie_word_embeddings``. A ``"mislabelled"`` head sets it but has
    the tensor. A head with a ``mask_key``, the key of its mask token, is a P-EAGLE head.
    """

    algorithm: str = "EAGLE3"
    hidden: int = TARGET_HIDDEN
    inner: int = 88
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 8
    layers: int = 1
    eps: float = 1e-5
    theta: float | None = None
    rope_scaling: dict[str, object] | None = None
    vocab: int = VOCAB
    draft_vocab: int = 61
    embedding: str = "none"
    lm_head: str = "own"
    fc_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    mask_key: str | None = None
    mask_token: int = 2
    is_3_1: bool = False
    norm_before_fc: bool = False
    is_speculators: bool = False
    norm_before_residual: bool = False
    style: str = "midlayer"
    prefix: str = ""
    file: str = "model.safetensors"
    dtype: torch.dtype = torch.float32
    config: dict[str, object] = field(default_factory=dict)

    @property
    def head_theta(self) -> float:
        return 10000.0 if self.theta is None else self.theta


def random_tensors(case: HeadCase, target_embedding: torch.Tensor, seed: int) -> Tensors:
    """Random tensors with ``layers.N.`` names: sharp attention, uneven norms, large biases."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return noise(rows, columns) * 1.5 * columns**-0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.3 * noise(size)

    h, is_3 = case.hidden, case.algorithm == "EAGLE3"
    q_size, kv_size = case.heads * case.head_dim, case.kv_heads * case.head_dim
    fc_in = 3 * TARGET_HIDDEN if is_3 else h + TARGET_HIDDEN
    tensors = {"fc.weight": matrix(h, fc_in)}
    if case.fc_bias:
        tensors["fc.bias"] = noise(h)
    for i in range(case.layers):
        layer, width = f"layers.{i}", 2 * h if is_3 and not i else h
        if is_3 and not i:
            tensors[f"{layer}.hidden_norm.weight"] = norm(h)
        if is_3 or i:
            tensors[f"{layer}.input_layernorm.weight"] = norm(h)
        tensors[f"{layer}.post_attention_layernorm.weight"] = norm(h)
        for letter, rows in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            tensors[f"{layer}.self_attn.{letter}_proj.weight"] = matrix(rows, width)
            if case.qkv_bias:
                tensors[f"{layer}.self_attn.{letter}_proj.bias"] = 0.5 * noise(rows)
        if case.qk_norm:
            norms = {f"{layer}.self_attn.{x}_norm.weight": norm(case.head_dim) for x in "qk"}
            tensors |= norms
        tensors[f"{layer}.self_attn.o_proj.weight"] = matrix(h, q_size)
        tensors[f"{layer}.mlp.gate_proj.weight"] = matrix(case.inner, h)
        tensors[f"{layer}.mlp.up_proj.weight"] = matrix(case.inner, h)
        tensors[f"{layer}.mlp.down_proj.weight"] = matrix(h, case.inner)
    if is_3:
        tensors["norm.weight"] = norm(h)
    if case.is_3_1:
        tensors |= {f"fc_norm.{i}.weight": norm(TARGET_HIDDEN) for i in range(3)}
    if case.mask_key is not None:
        tensors["mask_hidden"] = noise(1, 1, 3 * TARGET_HIDDEN)
    if case.norm_before_fc:
        tensors["input_norm.weight"] = norm(3 * TARGET_HIDDEN)
    if case.embedding == "own":
        tensors["embed_tokens.weight"] = noise(case.vocab, h)
    elif case.embedding == "copy":
        tensors["embed_tokens.weight"] = target_embedding.clone()
    if case.lm_head in ("own", "mislabelled"):
        tensors["lm_head.weight"] = matrix(case.draft_vocab, h)
    if case.draft_vocab != case.vocab:
        ids = torch.randperm(case.vocab, generator=generator)[: case.draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(case.draft_vocab)
        tensors["t2d"] = torch.zeros(case.vocab, dtype=torch.bool).index_fill(0, ids, True)
    floats = (torch.float32, torch.float64)
    return {
        name: (x.to(case.dtype) if x.dtype in floats else x).contiguous()
        for name, x in tensors.items()
    }


def published_config(case: HeadCase) -> dict[str, object]:
    """Contents of the head's ``config.json``."""
    layer: dict[str, object] = {
        "model_type": "qwen3" if case.qk_norm else "llama",
        "hidden_size": case.hidden,
        "intermediate_size": case.inner,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "num_hidden_layers": case.layers,
        "head_dim": case.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": case.eps,
        "vocab_size": case.vocab,
        "max_position_embeddings": 64,
        "attention_bias": case.qkv_bias,
        "initializer_range": 0.02,
        "torch_dtype": str(case.dtype).removeprefix("torch."),
        "transformers_version": "4.53.1",
        "use_cache": True,
    }
    if case.theta is not None:
        layer["rope_theta"] = case.theta
    if case.rope_scaling is not None:
        layer["rope_scaling"] = case.rope_scaling
    mask = {} if case.mask_key is None else {case.mask_key: case.mask_token}
    kind = "eagle3" if case.mask_key is None else "peagle"
    tied = case.lm_head in ("tied", "mislabelled")
    if case.is_speculators:
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": kind,
            "speculators_version": "0.2.0",
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"},
            },
            "draft_vocab_size": case.draft_vocab,
            "target_hidden_size": None,
            "tie_word_embeddings": tied,
            "torch_dtype": layer["torch_dtype"],
            "transformer_layer_config": layer,
            **mask,
            **case.config,
        }
    config = {**layer, "tie_word_embeddings": tied, **mask, **case.config}
    if case.algorithm == "EAGLE3":
        config.setdefault("architectures", ["LlamaForCausalLMEagle3"])
        config.setdefault("draft_vocab_size", case.draft_vocab)
        if case.hidden != TARGET_HIDDEN:
            config["target_hidden_size"] = TARGET_HIDDEN
    else:
        config.setdefault("architectures", ["LlamaForCausalLMEagle"])
    if case.is_3_1:
        config |= {"fc_norm": True, "norm_output": True}
    return config


def publish(case: HeadCase, tensors: Tensors, path: Path) -> Path:
    """Write the head to the directory ``path``."""
    path.mkdir()
    names = {}
    for name in tensors:
        new = name
        is_renamed = case.algorithm == "EAGLE3" and case.style == "midlayer"
        if is_renamed and name.startswith("layers.0."):
            new = "midlayer." + name.removeprefix("layers.0.")
        names[name] = new if new in NOT_PREFIXED else case.prefix + new
    renamed = {names[name]: value for name, value in tensors.items()}
    if case.file.endswith(".bin"):
        torch.save(renamed, path / case.file)
    else:
        safetensors.torch.save_file(renamed, path / case.file, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(published_config(case)))
    return path


def reference_head(case: HeadCase, tensors: Tensors) -> Head:
    scaling = case.rope_scaling
    return Head(
        algorithm=case.algorithm,
        tensors=tensors,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        eps=case.eps,
        theta=case.head_theta,
        layers=case.layers,
        llama3_scaling=None if scaling is None else {**scaling},
        is_residual_normed=case.norm_before_residual,
        is_output_normed=case.is_3_1,
        mask_token=None if case.mask_key is None else case.mask_token,
    )
