"""Multi-token prediction modules in PyTorch, over whole texts, in float64; and their files.

The code follows MiMo's technical report (arXiv 2505.07608) and the tensor names of its checkpoints.
It shares nothing with specjax: every draft reads the whole text again, and rotary embeddings are
products of complex numbers.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
import transformers

PREFIX = "model.mtp_layers."
Tensors = dict[str, torch.Tensor]


def module_tensors(
    model: transformers.PreTrainedModel, count: int, seed: int, *, scale: float = 1.5
) -> Tensors:
    """Random modules with a layer like the model's: sharp attention, uneven norms."""
    generator = torch.Generator().manual_seed(seed)
    size = model.config.hidden_size
    shapes = {name: weight.shape for name, weight in model.model.layers[0].named_parameters()}
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        shapes[f"{name}.weight"] = torch.Size([size])
    shapes["input_proj.weight"] = torch.Size([size, 2 * size])
    tensors = {}
    for i in range(count):
        for name, shape in shapes.items():
            noise = torch.randn(shape, generator=generator)
            if "norm" in name:
                noise = 1 + 0.3 * noise
            else:
                noise *= 0.5 if len(shape) == 1 else scale * shape[-1] ** -0.5
            tensors[f"{PREFIX}{i}.{name}"] = noise
    return tensors


def add_modules(path: Path, tensors: Tensors, **changes: object) -> Path:
    """Add modules to a saved model, in the form of published checkpoints."""
    file = path / "model.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(file) | tensors, file)
    config = json.loads((path / "config.json").read_text())
    count = len({name.split(".")[2] for name in tensors})
    config |= {"num_nextn_predict_layers": count, **changes}
    (path / "config.json").write_text(json.dumps(config))
    return path


@dataclass(frozen=True)
class Modules:
    """Modules that use the embeddings and the output head of a model."""

    model: transformers.PreTrainedModel
    tensors: Tensors

    def drafts(self, text: list[int], count: int) -> list[int]:
        """Draft tokens after a text with the first ``count`` modules, one token per module."""
        last, text = len(text) - 2, list(text)
        hidden = self._target(text[: last + 1])
        for k in range(count):
            hidden = self.states(k, text[k + 1 : k + 2 + last], hidden)
            text.append(int(self.logits(hidden[last]).argmax()))
        return text[last + 2 :]

    def _target(self, text: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model.model(torch.tensor([text])).last_hidden_state[0].double()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.model.lm_head.weight.detach().double().T

    def states(self, k: int, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """States ``[T, D]`` of module ``k`` from T tokens and the states of module ``k - 1``."""
        table = self.model.model.embed_tokens.weight.detach()
        embeds = self._norm(k, "token_layernorm", table[tokens].double())
        x = torch.cat([self._norm(k, "hidden_layernorm", hidden), embeds], dim=-1)
        x = self._linear(k, "input_proj", x)
        x = x + self._attention(k, self._norm(k, "input_layernorm", x))
        normed = self._norm(k, "post_attention_layernorm", x)
        gate, up = (self._linear(k, f"mlp.{name}_proj", normed) for name in ("gate", "up"))
        x = x + self._linear(k, "mlp.down_proj", gate * gate.sigmoid() * up)
        return self._norm(k, "final_layernorm", x)

    def _attention(self, k: int, x: torch.Tensor) -> torch.Tensor:
        config, count = self.model.config, len(x)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        q, key, value = (
            self._linear(k, f"self_attn.{name}_proj", x).view(count, n, -1)
            for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if f"{PREFIX}{k}.self_attn.q_norm.weight" in self.tensors:
            q, key = self._norm(k, "self_attn.q_norm", q), self._norm(k, "self_attn.k_norm", key)
        q, key = self._rotated(q), self._rotated(key)
        shared = torch.arange(heads) * kv_heads // heads
        scores = torch.einsum("qnh,knh->nqk", q, key[:, shared]) / q.shape[-1] ** 0.5
        seen = torch.ones(count, count, dtype=torch.bool).tril()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = torch.einsum("nqk,knh->qnh", weights, value[:, shared])
        return self._linear(k, "self_attn.o_proj", mixed.reshape(count, -1))

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        # the model's own frequencies, which the logits tests check
        frequencies = self.model.model.rotary_emb.inv_freq.double()
        angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
        turned = torch.complex(x[..., :half], x[..., half:])
        turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat([turned.real, turned.imag], dim=-1)

    def _linear(self, k: int, name: str, x: torch.Tensor) -> torch.Tensor:
        out = x @ self.tensors[f"{PREFIX}{k}.{name}.weight"].double().T
        bias = self.tensors.get(f"{PREFIX}{k}.{name}.bias")
        return out if bias is None else out + bias.double()

    def _norm(self, k: int, name: str, x: torch.Tensor) -> torch.Tensor:
        root = (x.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps).sqrt()
        return x / root * self.tensors[f"{PREFIX}{k}.{name}.weight"].double()
