"""One pass of each kind of draft head, compared with numpy in float64."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.eagle import MtpHead, build_head
from specjax.models.flat import FlatModel
from specjax.testing import EAGLE3, TARGET

from ..support.numpy_layers import NumpyLayers, random_named
from ..support.runners import EAGLE

SIZE, VALUES, GROUP = 32, 16, 2  # hidden size, width of all values, queries per value
NORMED = {"has_fc_norm": True, "norm_output": True, "norm_before_residual": True}
CASES: dict[str, Any] = {
    "EAGLE-3": replace(EAGLE3, norm_before_fc=True),
    "EAGLE 3.1": replace(EAGLE3, **NORMED),
    "EAGLE": replace(EAGLE, num_layers=2),
}


def attend(kv: Any, layer: int, q: Any, k: Any, v: Any, rope: Any) -> Any:
    """Attention to one key, whatever its score is."""
    return kv, jnp.repeat(v, GROUP, axis=2)


class Reference(NumpyLayers):
    """The weights of a head, and the computations on one row per text."""

    def attention(self, name: str, x: np.ndarray) -> np.ndarray:
        values = self.linear(f"{name}attention.qkv", x)[..., -VALUES:].reshape(len(x), -1, 8)
        return self.linear(f"{name}attention.output", values.repeat(GROUP, 1).reshape(len(x), -1))

    def layer(self, name: str, x: np.ndarray) -> np.ndarray:
        has_norm = f"{name}input_norm.scale" in self.named
        x = x + self.attention(name, self.norm(f"{name}input_norm", x) if has_norm else x)
        return x + self.mlp(name, x)

    def eagle3(self, features: np.ndarray, embeds: np.ndarray) -> list[np.ndarray]:
        if "feature_norm.scale" in self.named:
            features = self.norm("feature_norm", features)
        if is_normed := "fc_norms.0.scale" in self.named:
            each = enumerate(np.split(features, 3, axis=-1))
            features = np.concatenate([self.norm(f"fc_norms.{i}", x) for i, x in each], axis=-1)
        hidden = self.linear("fc", features)
        normed = self.norm("hidden_norm", hidden)
        mixed = self.attention("", np.c_[self.norm("input_norm", embeds), normed])
        x = (normed if is_normed else hidden) + mixed
        x = x + self.mlp("", x)
        last = self.norm("norm", x)
        return [last if is_normed else x, self.linear("lm_head", last)]

    def eagle(self, features: np.ndarray, embeds: np.ndarray) -> list[np.ndarray]:
        x = self.linear("fc", np.c_[embeds, features])
        return [self.layer("layers.1.", self.layer("layers.0.", x))]

    def module(self, hidden: np.ndarray, embeds: np.ndarray) -> list[np.ndarray]:
        name = "modules.1."
        joined = np.c_[
            self.norm(f"{name}hidden_norm", hidden), self.norm(f"{name}token_norm", embeds)
        ]
        x = self.layer(f"{name}layer.", self.linear(f"{name}fc", joined))
        return [self.norm(f"{name}norm", x)]


def check(network: Any, config: Any, width: int, run: Any, expected: Any) -> None:
    """Compare ``run(head, features, embeds)`` of random weights with ``expected``."""
    flat, rng = FlatModel.of(partial(network, config)), np.random.default_rng(0)
    named = random_named(flat, rng)
    inputs = [rng.normal(size=(3, 1, size)).astype(np.float32) for size in (width, SIZE)]
    outputs = jax.jit(lambda weights, *x: run(flat.rebuild(weights), *x))(
        flat.order(named), *inputs
    )
    references = expected(Reference(named, TARGET.rms_norm_eps), *(x[:, 0] for x in inputs))
    for output, values in zip(outputs, references, strict=True):
        most = np.abs(values).max()
        np.testing.assert_allclose(output[:, 0], values, rtol=1e-4, atol=1e-4 * most)


POSITIONS = np.zeros((3, 1), np.int32)


@pytest.mark.parametrize("name", CASES)
def test_heads_equal_a_reference_in_numpy(name: str) -> None:
    config = CASES[name]

    def run(head: Any, features: Any, embeds: Any) -> Any:
        out = head(embeds, head.fuse(features), POSITIONS, None, attend)[0]
        return [out, head.logits(out, None)] if config.fuses_features else [out]

    expected = Reference.eagle3 if config.fuses_features else Reference.eagle
    check(build_head, config, config.feature_size, run, expected)


def test_modules_equal_a_reference_in_numpy() -> None:
    def run(head: Any, hidden: Any, embeds: Any) -> Any:
        return [head.modules[1](embeds, hidden, POSITIONS, None, 1, attend)[0]]

    check(MtpHead, TARGET, SIZE, run, Reference.module)
