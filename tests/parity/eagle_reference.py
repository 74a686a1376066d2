"""EAGLE-1/2 and EAGLE-3 draft forwards in PyTorch, for one request, in float64.

The code follows the papers (arXiv 2401.15077, 2503.01840) and the published tensor names. The rows
of a P-EAGLE head after the first one have mask tokens instead of drafts and states. It shares
nothing with specjax: keys and values are stored by position, rotary embeddings are products of
complex numbers, and every row attends separately.
"""

import math
from dataclasses import dataclass, field

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Head:
    """A draft head: its published tensors (``layers.0.`` names, no prefix) and its sizes."""

    algorithm: str
    tensors: Tensors
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    layers: int = 1
    llama3_scaling: dict[str, float] | None = None
    is_residual_normed: bool = False
    is_output_normed: bool = False
    mask_token: int | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name].double()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def frequency(head: Head, pair: int) -> float:
    """Angle per position of one rotary pair."""
    plain = head.theta ** (-2 * pair / head.head_dim)
    scaling = head.llama3_scaling
    if scaling is None:
        return plain
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if turns <= low:
        return plain / scaling["factor"]
    if turns >= high:
        return plain
    share = (turns - low) / (high - low)
    return plain * (share + (1 - share) / scaling["factor"])


def rotate(head: Head, x: torch.Tensor, position: int) -> torch.Tensor:
    """Rotary embedding of ``x [heads, head_dim]`` at one position."""
    half = head.head_dim // 2
    angles = torch.tensor([position * frequency(head, i) for i in range(half)], dtype=torch.float64)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


@dataclass
class Draft:
    """State of a head for one request: ``kv[layer]`` maps each position to its key and value."""

    head: Head
    embedding: torch.Tensor
    lm_head: torch.Tensor
    kv: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = field(init=False)

    def __post_init__(self) -> None:
        self.kv = [{} for _ in range(self.head.layers)]

    def forget_from(self, position: int) -> None:
        """Drop keys and values of ``position`` and later."""
        for slots in self.kv:
            for slot in [slot for slot in slots if slot >= position]:
                del slots[slot]

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Project the target's features to the width of the head."""
        head, features = self.head, features.double()
        if head.algorithm == "EAGLE":
            return features
        if "input_norm.weight" in head:
            features = rms_norm(features, head["input_norm.weight"], head.eps)
        if "fc_norm.0.weight" in head:
            chunks = features.chunk(3, dim=-1)
            features = torch.cat(
                [rms_norm(x, head[f"fc_norm.{i}.weight"], head.eps) for i, x in enumerate(chunks)],
                dim=-1,
            )
        return self._linear("fc", features)

    def forward(
        self, token: int, hidden: torch.Tensor, position: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and the next recurrent state after ``token`` at ``position``."""
        head = self.head
        embed = self.embedding[token].double()
        if head.algorithm == "EAGLE":
            x = self._linear("fc", torch.cat([embed, hidden]))
            for layer in range(head.layers):
                name = f"layers.{layer}.input_layernorm.weight"
                normed = rms_norm(x, head[name], head.eps) if layer else x
                x = self._block(layer, normed, x, position)
            return self.lm_head.double() @ x, x
        normed = rms_norm(hidden, head["layers.0.hidden_norm.weight"], head.eps)
        embed = rms_norm(embed, head["layers.0.input_layernorm.weight"], head.eps)
        residual = normed if head.is_residual_normed else hidden
        x = self._block(0, torch.cat([embed, normed]), residual, position)
        for layer in range(1, head.layers):
            weight = head[f"layers.{layer}.input_layernorm.weight"]
            x = self._block(layer, rms_norm(x, weight, head.eps), x, position)
        y = rms_norm(x, head["norm.weight"], head.eps)
        return self.lm_head.double() @ y, y if head.is_output_normed else x

    def next_row(self, draft: int, state: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Token and hidden state of the row that follows a drafted token and its state."""
        if self.head.mask_token is None:
            return draft, state
        return self.head.mask_token, self.fuse(self.head["mask_hidden"].reshape(-1))

    def target_token(self, logits: torch.Tensor) -> int:
        """Greedy draft token as an id of the target's vocabulary."""
        draft = int(logits.argmax())
        return draft + int(self.head["d2t"][draft]) if "d2t" in self.head else draft

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        out = x @ self.head[f"{name}.weight"].T
        return out + self.head[f"{name}.bias"] if f"{name}.bias" in self.head else out

    def _block(
        self, layer: int, normed: torch.Tensor, residual: torch.Tensor, position: int
    ) -> torch.Tensor:
        head, prefix = self.head, f"layers.{layer}"
        x = residual + self._attention(layer, normed, position)
        inner = rms_norm(x, head[f"{prefix}.post_attention_layernorm.weight"], head.eps)
        gate = self._linear(f"{prefix}.mlp.gate_proj", inner)
        up = self._linear(f"{prefix}.mlp.up_proj", inner)
        return x + self._linear(f"{prefix}.mlp.down_proj", gate / (1 + (-gate).exp()) * up)

    def _attention(self, layer: int, x: torch.Tensor, position: int) -> torch.Tensor:
        head, prefix = self.head, f"layers.{layer}.self_attn"
        q, k, v = (
            self._linear(f"{prefix}.{letter}_proj", x).reshape(-1, head.head_dim)
            for letter in "qkv"
        )
        if f"{prefix}.q_norm.weight" in head:
            q = rms_norm(q, head[f"{prefix}.q_norm.weight"], head.eps)
            k = rms_norm(k, head[f"{prefix}.k_norm.weight"], head.eps)
        q, k = rotate(head, q, position), rotate(head, k, position)
        slots = self.kv[layer]
        slots[position] = (k, v)
        assert sorted(slots)[: position + 1] == list(range(position + 1)), "hole in the draft KV"
        keys = torch.stack([slots[i][0] for i in range(position + 1)])
        values = torch.stack([slots[i][1] for i in range(position + 1)])
        out = []
        for index in range(head.heads):
            shared = index // (head.heads // head.kv_heads)
            scores = keys[:, shared] @ q[index] / math.sqrt(head.head_dim)
            out.append(torch.softmax(scores, dim=0) @ values[:, shared])
        return self._linear(f"{prefix}.o_proj", torch.cat(out))
