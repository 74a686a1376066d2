"""The position of every weight of a target, by the definition of its projection."""

from functools import partial

import numpy as np

from specjax.checkpoints import TargetCheckpoint
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel

from ..support.checkpoint_files import INNER


def check_layout(checkpoint: TargetCheckpoint, tensors: dict[str, np.ndarray]) -> None:
    """Check the position of every weight by the definition of its projection."""
    weights = checkpoint.load_weights()
    flat = FlatModel.of(partial(CausalLM, checkpoint.config))
    assert set(weights) == set(flat.names)
    dtype = checkpoint.config.dtypes.activations
    for name, like in zip(flat.names, flat.abstract, strict=True):
        assert weights[name].shape == like.shape, name
        assert weights[name].dtype == like.dtype == dtype, name

    def equal(found: np.ndarray, name: str) -> None:
        np.testing.assert_array_equal(found, tensors[name].astype(dtype), err_msg=name)

    equal(weights["embedding.table"], "model.embed_tokens.weight")
    equal(weights["norm.scale"], "model.norm.weight")
    config = checkpoint.config
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    stripes = {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        qkv, gate_up = (
            weights[f"{ours}.attention.qkv.kernel"],
            weights[f"{ours}.mlp.gate_up.kernel"],
        )
        for letter, stripe in stripes.items():
            equal(qkv[:, stripe].T, f"{theirs}.self_attn.{letter}_proj.weight")
            if config.qkv_bias:
                bias = weights[f"{ours}.attention.qkv.bias"][stripe]
                equal(bias, f"{theirs}.self_attn.{letter}_proj.bias")
        equal(gate_up[:, :INNER].T, f"{theirs}.mlp.gate_proj.weight")
        equal(gate_up[:, INNER:].T, f"{theirs}.mlp.up_proj.weight")
        equal(weights[f"{ours}.mlp.down.kernel"].T, f"{theirs}.mlp.down_proj.weight")
        equal(weights[f"{ours}.attention.output.kernel"].T, f"{theirs}.self_attn.o_proj.weight")
        equal(weights[f"{ours}.input_norm.scale"], f"{theirs}.input_layernorm.weight")
        name = "post_attention_layernorm.weight"
        equal(weights[f"{ours}.post_attention_norm.scale"], f"{theirs}.{name}")
    if not config.tie_word_embeddings:
        equal(weights["lm_head.kernel"].T, "lm_head.weight")
