"""Qwen3.5's own draft layer in numpy, over whole texts, in float64; and its tensors.

Published engines agree on it: the inputs are the embedding of token ``i + 1`` and the target's
state of token ``i`` after its final norm; further steps read the layer's own state after its norm.
The code shares nothing with specjax: every step computes all rows again, and rotary embeddings are
products of complex numbers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]


def layer_tensors(stored: dict[str, tuple[int, ...]], size: int, seed: int) -> Tensors:
    """Random tensors of a draft layer like an attention layer of the target: names and shapes."""
    rng = np.random.default_rng(seed)
    shapes = {f"mtp.layers.0.{name}": shape for name, shape in stored.items()}
    norms = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"
    shapes |= {f"mtp.{name}.weight": (size,) for name in norms}
    shapes["mtp.fc.weight"] = (size, 2 * size)
    tensors = {}
    for name, shape in shapes.items():
        noise = rng.normal(size=shape)
        noise *= 0.3 if "norm" in name else 1.5 * shape[-1] ** -0.5
        tensors[name] = noise.astype(np.float32)
    return tensors


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@dataclass(frozen=True)
class DraftLayer:
    """The layer; ``config`` is that of transformers, and table and head are the target's."""

    config: Any
    tensors: Tensors
    table: np.ndarray
    head: np.ndarray

    def drafts(self, text: list[int], hidden: np.ndarray, count: int) -> list[int]:
        """Draft tokens after a text, of which all but the last have target states ``[T, D]``."""
        text, hidden = list(text), np.array(hidden, np.float64)
        for _ in range(count):
            out = self.states(text[1:], hidden)[-1:]
            hidden = np.concatenate([hidden, out])
            text.append(int(np.argmax(out[0] @ self.head.T)))
        return text[-count:]

    def states(self, tokens: list[int], hidden: np.ndarray) -> np.ndarray:
        """States ``[T, D]`` after the last norm, which logits and the next step read."""
        inputs = [
            self.norm(self.table[tokens], "mtp.pre_fc_norm_embedding"),
            self.norm(np.asarray(hidden, np.float64), "mtp.pre_fc_norm_hidden"),
        ]
        x = np.concatenate(inputs, axis=1) @ self.tensor("mtp.fc").T
        at = "mtp.layers.0."
        x = x + self.attention(self.norm(x, f"{at}input_layernorm"))
        normed = self.norm(x, f"{at}post_attention_layernorm")
        is_mixture = f"{at}mlp.gate.weight" in self.tensors
        x = x + (self.mixture(normed) if is_mixture else self.mlp(normed, f"{at}mlp."))
        return self.norm(x, "mtp.norm")

    def tensor(self, name: str) -> np.ndarray:
        return self.tensors[f"{name}.weight"].astype(np.float64)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        root = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + self.config.rms_norm_eps)
        return x / root * (1 + self.tensor(name))

    def mlp(self, x: np.ndarray, at: str) -> np.ndarray:
        gate = x @ self.tensor(f"{at}gate_proj").T
        inner = gate * sigmoid(gate) * (x @ self.tensor(f"{at}up_proj").T)
        return inner @ self.tensor(f"{at}down_proj").T

    def mixture(self, x: np.ndarray) -> np.ndarray:
        at, out = "mtp.layers.0.mlp.", np.zeros_like(x)
        shares = np.exp(x @ self.tensor(f"{at}gate").T)
        shares /= shares.sum(axis=1, keepdims=True)
        for i, share in enumerate(shares):
            best = np.argsort(-share)[: self.config.num_experts_per_tok]
            for expert in best:
                output = self.mlp(x[i : i + 1], f"{at}experts.{expert}.")
                out[i] += share[expert] / share[best].sum() * output[0]
        gate = sigmoid(x @ self.tensor(f"{at}shared_expert_gate").T)
        return out + gate * self.mlp(x, f"{at}shared_expert.")

    def attention(self, x: np.ndarray) -> np.ndarray:
        config, at = self.config, "mtp.layers.0.self_attn."
        count, heads, dim = len(x), config.num_attention_heads, config.head_dim
        kv_heads = config.num_key_value_heads
        both = (x @ self.tensor(f"{at}q_proj").T).reshape(count, heads, 2 * dim)
        q, gate = both[..., :dim], both[..., dim:]
        k, v = (
            (x @ self.tensor(f"{at}{name}_proj").T).reshape(count, kv_heads, dim)
            for name in ("k", "v")
        )
        q, k = self.rotated(self.norm(q, f"{at}q_norm")), self.rotated(self.norm(k, f"{at}k_norm"))
        mixed = np.zeros((count, heads, dim))
        for row in range(count):
            for head in range(heads):
                shared = head * kv_heads // heads
                scores = k[: row + 1, shared] @ q[row, head] / dim**0.5
                weights = np.exp(scores - scores.max())
                mixed[row, head] = weights @ v[: row + 1, shared] / weights.sum()
        return (mixed * sigmoid(gate)).reshape(count, -1) @ self.tensor(f"{at}o_proj").T

    def rotated(self, x: np.ndarray) -> np.ndarray:
        rope = self.config.rope_parameters
        half = int(x.shape[-1] * rope["partial_rotary_factor"]) // 2
        frequencies = rope["rope_theta"] ** (-np.arange(half) / half)
        turns = np.exp(1j * np.arange(len(x))[:, None, None] * frequencies)
        turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * turns
        return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)
