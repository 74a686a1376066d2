"""DFlash and DSpark drafters in PyTorch, for one request, in float64, with dense masks.

The code reads the published files itself and shares nothing with specjax. It follows the papers
(arXiv 2602.06036 for DFlash, 2607.05147 for DSpark) and the tensor names of the checkpoints: keys
and values of the context are a list by position, every pass builds its whole mask, and rotary
embeddings are products of complex numbers.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

Tensors = dict[str, torch.Tensor]
# keys and values [T, KV, hd] of each layer
Context = list[tuple[torch.Tensor, torch.Tensor]]

# transformer_layer_config of speculators lacks the keys with the defaults of Qwen3
QWEN3 = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 151936,
}
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
ALIASES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


@dataclass(frozen=True)
class Target:
    """The parts of a target that drafters use: embeddings and output head ``[V, h]``."""

    embedding: torch.Tensor
    lm_head: torch.Tensor
    layers: int


@dataclass(frozen=True, kw_only=True)
class Block:
    """A drafter; ``windows`` and ``causal`` have one entry per layer, ``taps`` count from 0."""

    tensors: Tensors
    target: Target
    fills_in: bool
    rows: int
    taps: tuple[int, ...]
    mask: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    markov: str | None

    @property
    def drafts(self) -> int:
        return self.rows - self.fills_in

    @property
    def layers(self) -> int:
        return len(self.windows)

    def context(self, features: torch.Tensor, positions: Sequence[int]) -> Context:
        """Keys and values of target rows, from their features ``[T, K * h]``."""
        c = self._norm("hidden_norm", features.double() @ self._weight("fc").T)
        out = []
        for i in range(self.layers):
            k, v = (self._project(i, letter, c) for letter in "kv")
            out.append((self._rotated(self._norm(f"layers.{i}.self_attn.k_norm", k), positions), v))
        return out

    def seen(self, layer: int, n: int) -> torch.Tensor:
        """Which keys the block's rows see, ``[B, n + B]``: the context, then the block."""
        row = torch.arange(n, n + self.rows)[:, None]
        key = torch.arange(n + self.rows)[None]
        seen = (key < n) | (key <= row) if self.causal[layer] else torch.ones(1, 1) > 0
        window = self.windows[layer]
        return seen & (key > row - window) if window else seen.expand(self.rows, n + self.rows)

    def states(self, anchor: int, n: int, context: Context) -> torch.Tensor:
        """Final hidden states ``[B, h]`` of the block after ``n`` tokens of context."""
        ids = [anchor] + [self.mask] * (self.rows - 1)
        positions = range(n, n + self.rows)
        x = self.tensors.get("embed_tokens.weight", self.target.embedding)[ids].double()
        for i in range(self.layers):
            name = f"layers.{i}"
            y = self._norm(f"{name}.input_layernorm", x)
            q, k, v = (self._project(i, letter, y) for letter in "qkv")
            q = self._rotated(self._norm(f"{name}.self_attn.q_norm", q), positions)
            k = self._rotated(self._norm(f"{name}.self_attn.k_norm", k), positions)
            keys, values = (
                torch.cat([old[:n], new]) for old, new in zip(context[i], (k, v), strict=True)
            )
            shared = torch.arange(self.heads) // (self.heads // self.kv_heads)
            scores = torch.einsum("qhd,khd->hqk", q, keys[:, shared]) / self.head_dim**0.5
            weights = scores.masked_fill(~self.seen(i, n), -torch.inf).softmax(-1)
            mixed = torch.einsum("hqk,khd->qhd", weights, values[:, shared])
            x = x + self._linear(f"{name}.self_attn.o_proj", mixed.flatten(1))
            y = self._norm(f"{name}.post_attention_layernorm", x)
            gate, up = (self._linear(f"{name}.mlp.{part}_proj", y) for part in ("gate", "up"))
            x = x + self._linear(f"{name}.mlp.down_proj", gate * gate.sigmoid() * up)
        return self._norm("norm", x)

    def draw(
        self,
        states: torch.Tensor,
        anchor: int,
        noise: torch.Tensor | None = None,
        temperature: float = 0.0,
    ) -> tuple[list[int], torch.Tensor, torch.Tensor | None]:
        """Draft tokens (target ids), their logits ``[g, draft vocabulary]``, and confidences.

        ``noise [g, V]`` is by target id. Confidences are ``[g]``, None without a confidence head.
        """
        hidden = states[1:] if self.fills_in else states
        base = hidden @ self.tensors.get("lm_head.weight", self.target.lm_head).double().T
        offsets = self.tensors.get("d2t", torch.zeros(base.shape[1], dtype=torch.int64))
        ids = torch.arange(base.shape[1]) + offsets
        previous, memory = anchor, torch.zeros(0)
        tokens, logits, confidences = [], [], []
        for j, state in enumerate(hidden):
            e = self._embedded(previous)
            bias, memory = self._bias(state, e, memory)
            logits.append(base[j] + bias)
            scores = logits[-1]
            if temperature:
                assert noise is not None
                scores = scores / temperature + noise[j][ids].double()
            previous = int(ids[scores.argmax()])
            tokens.append(previous)
            if "confidence_head.proj.weight" in self.tensors:
                width = self._weight("confidence_head.proj").shape[1]
                given = torch.cat([state, e])[:width]
                confidences.append(self._linear("confidence_head.proj", given).sigmoid())
        return tokens, torch.stack(logits), torch.cat(confidences) if confidences else None

    def _embedded(self, token: int) -> torch.Tensor:
        if self.markov is None:
            return torch.zeros(0, dtype=torch.float64)
        return self.tensors["markov_head.markov_w1.weight"][token].double()

    def _bias(
        self, state: torch.Tensor, e: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor | float, torch.Tensor]:
        """The Markov head's term of the logits, and its next state (``rnn`` only)."""
        if self.markov is None:
            return 0.0, memory
        out = self._weight("markov_head.markov_w2")
        if self.markov == "vanilla":
            return out @ e, memory
        if self.markov == "gated":
            gate = self._linear("markov_head.gate_proj", torch.cat([state, e])).sigmoid()
            return out @ (gate * e), memory
        assert self.markov == "rnn", self.markov
        s = memory if len(memory) else torch.zeros_like(e)
        gate, new, read = self._linear("markov_head.joint_proj", torch.cat([s, e, state])).chunk(3)
        gate = gate.sigmoid()
        return out @ read.tanh(), gate * s + (1 - gate) * new.tanh()

    def _weight(self, name: str) -> torch.Tensor:
        return self.tensors[f"{name}.weight"].double()

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self.tensors.get(f"{name}.bias")
        out = x @ self._weight(name).T
        return out if bias is None else out + bias.double()

    def _project(self, layer: int, letter: str, x: torch.Tensor) -> torch.Tensor:
        out = self._linear(f"layers.{layer}.self_attn.{letter}_proj", x)
        return out.view(len(x), -1, self.head_dim)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self._weight(name)

    def _rotated(self, x: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        half = self.head_dim // 2
        frequencies = self.theta ** -(torch.arange(half, dtype=torch.float64) / half)
        angles = torch.tensor(list(positions), dtype=torch.float64)[:, None] * frequencies
        turned = torch.complex(x[..., :half], x[..., half:])
        turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat([turned.real, turned.imag], dim=-1)


def read_tensors(path: Path) -> Tensors:
    """All tensors of a directory under their usual names."""
    index = path / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors = {}
    for file in files:
        for name, tensor in safetensors.torch.load_file(path / file).items():
            name = name.removeprefix("model.")
            for old, new in ALIASES.items():
                name = new + name[len(old) :] if name.startswith(old) else name
            tensors[name] = tensor
    return tensors


def default_taps(draft_layers: int, target_layers: int) -> tuple[int, ...]:
    """Target layers of a DFlash file that names none."""
    if draft_layers == 1:
        return (target_layers // 2,)
    step = (target_layers - 4) / (draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(draft_layers))


def read_block(path: Path, target: Target) -> Block:
    """Read a drafter of the formats 1 to 6."""
    config = json.loads((path / "config.json").read_text())
    kind = config.get("speculators_model_type")
    body = {**QWEN3, **config["transformer_layer_config"]} if kind else config
    nested = {**config.get("dflash_config", {}), **config.get("dspark_config", {})}
    keys = {**nested, **config}
    rows = keys.get("block_size", 16)
    layers = body["num_hidden_layers"]
    if kind:
        taps = [k - 1 for k in keys["aux_hidden_state_layer_ids"]]
    else:
        total = keys.get("num_target_layers", target.layers)
        taps = keys.get("target_layer_ids", default_taps(layers, total))
    rank = keys.get("markov_rank", 0)
    windows, causal = _attention(body, keys, layers)
    rope = body.get("rope_parameters") or {}
    return Block(
        tensors=read_tensors(path),
        target=target,
        fills_in=_fills_in(config, keys, rows),
        rows=rows,
        taps=tuple(taps),
        mask=next(keys[key] for key in MASK_KEYS if key in keys),
        heads=body["num_attention_heads"],
        kv_heads=body["num_key_value_heads"],
        head_dim=body["head_dim"],
        eps=body["rms_norm_eps"],
        theta=rope.get("rope_theta", body.get("rope_theta", 10000.0)),
        windows=windows,
        causal=causal,
        markov=keys.get("markov_head_type", "vanilla") if rank else None,
    )


def _fills_in(config: dict[str, Any], keys: dict[str, Any], rows: int) -> bool:
    """Whether row j predicts its own position."""
    kind, architecture = config.get("speculators_model_type"), config["architectures"][0]
    if kind == "dspark":
        method = config["speculators_config"]["proposal_methods"][0]
        return not keys.get("sample_from_anchor", method["speculative_tokens"] == rows)
    if kind == "dflash" or architecture == "DFlashDraftModel":
        return True
    assert architecture in ("Qwen3DSparkModel", "DSparkDraftModel"), architecture
    return False


def _attention(
    body: dict[str, Any], keys: dict[str, Any], layers: int
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Window and causality of every layer."""
    slides = [kind == "sliding_attention" for kind in body.get("layer_types") or [""] * layers]
    window = keys.get("sliding_window", body.get("sliding_window", keys.get("swa_window_size")))
    windows = [window if slide or keys.get("use_swa") else None for slide in slides]
    causal = [slide and not keys.get("sliding_window_non_causal") for slide in slides]
    for key in ("causal", "is_causal"):
        if key in keys:
            causal = [keys[key]] * layers
    return tuple(windows), tuple(causal)
