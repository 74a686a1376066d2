"""The multi-token prediction module of GLM-4.5, a mixture of experts, in its published names."""

import logging
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints import open_target
from specjax.checkpoints.draft import MtpCheckpoint, open_mtp
from specjax.models.eagle import MtpHead
from specjax.models.experts import Experts
from specjax.models.flat import FlatModel
from specjax.models.layers import MLP
from specjax.testing.dense import dense_attend
from specjax.types import TokenInputs

from ..support.checkpoint_files import (
    CONFIG,
    DIM,
    EXPERTS,
    GLM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    Tensors,
    glm_tensors,
    write_glm,
)
from ..support.quantized_files import channel

MODULE = "model.layers.3."
LENGTH = 7


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return glm_tensors()


def opened(path: Path, num_modules: int = 1) -> MtpCheckpoint:
    return open_mtp(None, open_target(path), num_modules=num_modules)


class Reference:
    """The module in float64, from its tensors by published name."""

    def __init__(self, tensors: Tensors) -> None:
        names = (name for name in tensors if name.startswith(MODULE))
        self.named = {name.removeprefix(MODULE): np.float64(tensors[name]) for name in names}

    def states(self, embeds: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        """States ``[T, D]`` of a text from embeddings and the target's states ``[T, D]``."""
        joined = np.concatenate([self.norm("enorm", embeds), self.norm("hnorm", hidden)], axis=1)
        x = self.linear("eh_proj", joined)
        x = x + self.attention(self.norm("input_layernorm", x))
        normed = self.norm("post_attention_layernorm", x)
        return self.norm("shared_head.norm", x + np.stack([self.mixture(row) for row in normed]))

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.named[f"{name}.weight"].T + self.named.get(f"{name}.bias", 0.0)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        mean = np.mean(x**2, axis=-1, keepdims=True)
        return x / np.sqrt(mean + CONFIG["rms_norm_eps"]) * self.named[f"{name}.weight"]

    def attention(self, x: np.ndarray) -> np.ndarray:
        q, k, v = (
            self.linear(f"self_attn.{name}_proj", x).reshape(len(x), -1, DIM) for name in "qkv"
        )
        q = rotated(self.norm("self_attn.q_norm", q))
        k = rotated(self.norm("self_attn.k_norm", k))
        out = np.zeros((len(x), HEADS, DIM))
        for row, head in np.ndindex(len(x), HEADS):
            of_head = head * KV_HEADS // HEADS
            scores = k[: row + 1, of_head] @ q[row, head] / DIM**0.5
            weights = np.exp(scores - scores.max())
            out[row, head] = weights / weights.sum() @ v[: row + 1, of_head]
        return self.linear("self_attn.o_proj", out.reshape(len(x), -1))

    def mixture(self, x: np.ndarray) -> np.ndarray:
        """Two experts from the better half of all, and the shared one, for a row ``[D]``."""
        scores = 1 / (1 + np.exp(-self.named["mlp.gate.weight"] @ x))
        ranked = scores + self.named["mlp.gate.e_score_correction_bias"]
        halves = np.split(np.arange(EXPERTS), 2)
        best = max(halves, key=lambda half: np.sort(ranked[half])[-2:].sum())
        chosen = sorted(best, key=lambda i: -ranked[i])[:2]
        weights = scores[chosen] / scores[chosen].sum() * GLM["routed_scaling_factor"]
        pairs = zip(chosen, weights, strict=True)
        routed = sum(weight * self.gated(f"mlp.experts.{i}.", x) for i, weight in pairs)
        return routed + self.gated("mlp.shared_experts.", x)

    def gated(self, at: str, x: np.ndarray) -> np.ndarray:
        gate, up = (self.linear(f"{at}{name}_proj", x) for name in ("gate", "up"))
        return self.linear(f"{at}down_proj", gate / (1 + np.exp(-gate)) * up)


def rotated(x: np.ndarray) -> np.ndarray:
    """Rotate the first half of each head ``[T, N, H]``, whose two quarters are pairs."""
    size = DIM // 2
    frequencies = CONFIG["rope_theta"] ** (-np.arange(0, size, 2) / size)
    turns = np.exp(1j * np.arange(len(x))[:, None, None] * frequencies)
    turned = (x[..., : size // 2] + 1j * x[..., size // 2 : size]) * turns
    return np.concatenate([turned.real, turned.imag, x[..., size:]], axis=-1)


def test_states_equal_a_reference_in_numpy(tmp_path: Path, tensors: Tensors) -> None:
    """Names, the order of the inputs and the choice of experts; padding reads no expert."""
    checkpoint = opened(write_glm(tmp_path / "glm", tensors))
    flat = FlatModel.of(partial(MtpHead, checkpoint.config))
    weights = flat.order(checkpoint.load_weights())
    rng = np.random.default_rng(0)
    embeds, hidden = (rng.normal(size=(LENGTH, HIDDEN)).astype(np.float32) for _ in range(2))

    @jax.jit
    def run(weights, embeds, hidden):
        at = jnp.arange(LENGTH, dtype=jnp.int32)
        inputs = embeds[None], hidden[None], at[None]
        by_token = TokenInputs(at[None] < LENGTH - 1, None, None)  # whose requests nothing reads
        module = flat.rebuild(weights).modules[0]
        return module(*inputs, None, 0, dense_attend, by_token=by_token)[0][0]

    expected, states = Reference(tensors).states(embeds, hidden), run(weights, embeds, hidden)
    np.testing.assert_allclose(states[:-1], expected[:-1], atol=1e-4)
    assert np.abs(states[-1] - expected[-1]).max() > 0.1


def test_the_layer_is_a_mixture_also_after_a_dense_one(tmp_path: Path, tensors: Tensors) -> None:
    """The target ignores the module, and the module the target."""
    path = write_glm(tmp_path / "glm", tensors)
    target = open_target(path)
    target.check_weights()
    checkpoint = opened(path)
    checkpoint.check_weights()
    network = MtpHead(checkpoint.config)
    assert isinstance(network.modules[0].layer.mlp, Experts)
    model = target._network(target.config)
    assert [type(layer.mlp) for layer in model.layers] == [MLP, Experts, Experts]


def test_refusals(tmp_path: Path, tensors: Tensors) -> None:
    path = write_glm(tmp_path / "glm", tensors)
    with pytest.raises(ValueError, match=r"speculative_num_steps=2 needs 2 modules, but .* has 1"):
        opened(path, 2)
    few = {name: x for name, x in tensors.items() if not name.endswith("eh_proj.weight")}
    with pytest.raises(ValueError, match=r"lacks 1 tensor.*'model\.layers\.3\.eh_proj\.weight'"):
        opened(write_glm(tmp_path / "few", few)).check_weights()
    plain = {name: x for name, x in tensors.items() if not name.startswith(MODULE)}
    with pytest.raises(ValueError, match=r"of 0 multi-token .* num_nextn_predict_layers=1"):
        opened(write_glm(tmp_path / "plain", plain))


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_a_copy_that_differs_is_reported(
    name: str, tmp_path: Path, tensors: Tensors, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {
        "embedding.table": tensors["model.embed_tokens.weight"],
        "lm_head.kernel": tensors["lm_head.weight"].T,
    }
    with caplog.at_level(logging.WARNING):
        opened(write_glm(tmp_path / "glm", tensors)).compare_copies(weights)
    assert not caplog.messages
    changed = tensors | {f"{MODULE}{name}.weight": 2 * tensors[f"{MODULE}{name}.weight"]}
    with caplog.at_level(logging.WARNING):
        opened(write_glm(tmp_path / "changed", changed)).compare_copies(weights)
    (message,) = caplog.messages
    assert f"{MODULE}{name}.weight" in message


def test_quantised_files_may_leave_projections_whole(tmp_path: Path, tensors: Tensors) -> None:
    stored: Tensors = {}
    for name, x in tensors.items():
        is_quantised = ".mlp.experts." in name or ".o_proj." in name
        pieces = channel("fp8", x)[0] if is_quantised else {"": x}
        stored |= {name + ending: value for ending, value in pieces.items()}
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
    group["weights"] |= {"strategy": "channel", "symmetric": True}
    scheme = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    scheme["format"] = "float-quantized"
    checkpoint = opened(write_glm(tmp_path / "fp8", stored, quantization_config=scheme))
    checkpoint.check_weights()
    loaded = checkpoint.load_weights()
    assert loaded["modules.0.layer.mlp.gate_up.values"].dtype == "float8_e4m3fn"
    expected = tensors[f"{MODULE}eh_proj.weight"].T
    np.testing.assert_array_equal(loaded["modules.0.fc.kernel"], expected)
