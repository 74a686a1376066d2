"""Tiny networks: random ones, and a target with an untrained EAGLE-3 head that is often right.

The copying target is close to a Markov chain: its attention and feed-forward layers only perturb
the embedding of the last token. In its head, each node attends only to itself, because the very
large rotary score peaks at distance 0. The head copies the last token's embedding and applies the
target's output head. It errs if the perturbation decides, or its vocabulary lacks the token.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from specjax.config import DraftConfig, ModelConfig, TransformerConfig
from specjax.models.decoder import CausalLM
from specjax.models.eagle import build_head
from specjax.models.flat import FlatModel, Weights

SIZES: Any = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48}
SIZES |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
TARGET = ModelConfig(model_type="llama", num_layers=2, max_position_embeddings=256, **SIZES)
EAGLE3 = DraftConfig(
    checkpoint_format="eagle-3",
    num_layers=1,
    target_hidden_size=TARGET.hidden_size,
    draft_vocab_size=40,
    feature_layers=(0, 0, 1),
    **SIZES,
)
PERTURBATION = 0.095
Named = dict[str, np.ndarray]


def random_weights(flat: FlatModel[Any], seed: int) -> Weights:
    """Make weights as the models' initialisers do, but in numpy, without compiling."""
    rng = np.random.default_rng(seed)
    weights = []
    for leaf, (mean, stddev) in zip(flat.abstract, flat.initial, strict=True):
        array = np.full(leaf.shape, mean)
        if stddev:
            is_packed = leaf.dtype == np.uint16
            array = rng.normal(size=leaf.shape) * stddev
            array = rng.integers(65536, size=leaf.shape) if is_packed else array
        weights.append(array.astype(leaf.dtype))
    return jax.device_put(tuple(weights))


def copying_target(config: ModelConfig, head: TransformerConfig) -> Named:
    """Make the weights of the copying target, by name.

    Embeddings use only the first coordinates, as many as the head's values have. They have equal
    length, so that every norm scales them equally. The first coordinate is constant.
    """
    named = _random(partial(CausalLM, config), 0)
    width = head.num_kv_heads * head.head_dim
    rows = np.random.default_rng(5).normal(size=(config.vocab_size, width - 1))
    table = np.zeros((config.vocab_size, config.hidden_size), np.float32)
    table[:, 1:width] = 3 * rows / np.linalg.norm(rows, axis=1, keepdims=True)
    table[:, 0] = 1.0
    named["embedding.table"] = table
    named["lm_head.kernel"] = 4 * named["lm_head.kernel"]
    for name in named:
        if name.endswith(("attention.output.kernel", "mlp.down.kernel")):
            named[name] = np.float32(PERTURBATION) * named[name]
    return named


def copying_head(config: DraftConfig, target: Mapping[str, np.ndarray]) -> Named:
    """Make the weights of the head, by name; its output is the last token's embedding.

    The other layers of a P-EAGLE head perturb this output. Each mask token predicts what follows
    the mask token itself, which is seldom right.
    """
    named = _random(partial(build_head, config), 1)
    for name in named:
        if name.startswith("layers.") and name.endswith(("output.kernel", "down.kernel")):
            named[name] = np.float32(0.02) * named[name]
        elif name == "mask_hidden":
            named[name] = np.zeros_like(named[name])
    size, dim = config.hidden_size, config.head_dim
    q_size, width = config.num_heads * dim, config.num_kv_heads * dim
    qkv = np.zeros((2 * size, q_size + 2 * width), np.float32)
    qkv[0, 0:q_size:dim] = 1e3  # queries and keys: the constant coordinate, in the fastest pair
    qkv[0, q_size : q_size + width : dim] = 1e3
    qkv[:width, q_size + width :] = np.eye(width)
    # subtract the residual: a recurrent state is already such a copy, unchanged by the norm
    qkv[size : size + width, q_size + width :] = -np.eye(width)
    output = np.zeros((q_size, size), np.float32)
    group = config.num_heads // config.num_kv_heads
    for i in range(width):  # the first query head of each group returns the group's values
        output[i // dim * group * dim + i % dim, i] = 1.0
    named |= {"attention.qkv.kernel": qkv, "attention.output.kernel": output}
    named["fc.kernel"] = np.zeros_like(named["fc.kernel"])
    named["mlp.down.kernel"] = np.zeros_like(named["mlp.down.kernel"])
    # the head has the tokens that the unperturbed chain writes, then other ids up to its size
    written = np.unique(np.argmax(target["embedding.table"] @ target["lm_head.kernel"], axis=1))
    other_ids = np.setdiff1d(np.arange(config.vocab_size), written)
    ids = np.sort(np.concatenate([written, other_ids])[: config.draft_vocab_size])
    named["d2t"] = (ids - np.arange(len(ids))).astype(np.int32)
    named["lm_head.kernel"] = target["lm_head.kernel"][:, ids]
    return named


def _random(build: Any, seed: int) -> Named:
    flat = FlatModel.of(build)
    return dict(zip(flat.names, map(np.asarray, random_weights(flat, seed)), strict=True))
