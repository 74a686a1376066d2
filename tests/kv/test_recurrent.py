"""Passes of a decoder with recurrent layers and attention over both pools."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.kernels.delta_inputs import RequestRows
from specjax.kernels.delta_rule import DeltaPool, delta_replay

from specjax.kv.pages import PageView
from specjax.kv.recurrent import DraftedStates, recur_in_order, recur_over_drafts
from specjax.models import registry
from specjax.models.declare import pool_shapes, request_shapes
from specjax.models.decoder import CausalLM
from specjax.models.family import alike
from specjax.models.flat import FlatModel
from specjax.models.gated_delta import DeltaConfig, GatedDelta
from specjax.testing.models import SIZES, random_weights

from ..support.lowering import TRITON_CALL, lower_for_cuda

PAGE, PAGES, TAPS, BATCH = 4, 8, 3, 2


def layers(config: Any, **differences: Any) -> Any:
    """Attention in layer 1 of three."""
    kinds = alike(config, **differences)
    recurrent = (replace(kind, mixer=GatedDelta) for kind in kinds)
    return tuple(y if i == 1 else x for i, (x, y) in enumerate(zip(recurrent, kinds, strict=True)))


def decoder(monkeypatch: pytest.MonkeyPatch, implementation: str, **changes: Any) -> Any:
    """The structure of a decoder with two recurrent layers."""
    family = replace(registry.FAMILIES["llama"], layers=layers)
    monkeypatch.setitem(registry.FAMILIES, "llama", family)
    sizes = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_conv_kernel_dim": TAPS}
    sizes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    sizes |= SIZES | {"head_dim": 16} | changes
    config = DeltaConfig(model_type="llama", num_layers=3, **sizes)
    return FlatModel.of(partial(CausalLM, config, implementation))


class Run:
    """A decoder and its pools; passes of two texts at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, implementation: str) -> None:
        flat = decoder(monkeypatch, implementation)
        self.weights, self.flat, self.how = random_weights(flat, 3), flat, implementation
        table = jnp.arange(1, 1 + BATCH * PAGES, dtype=jnp.int32).reshape(BATCH, PAGES)
        self.view = PageView((table,), PAGE, implementation)
        zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype))
        (self.kv,) = zeros(pool_shapes(flat.caches, (PAGE * (1 + BATCH * PAGES),)))
        self.states = DeltaPool(*zeros(request_shapes(flat.caches, 1 + BATCH)))
        self.lens = np.zeros(BATCH, np.int32)

    def rows(self, width: int) -> RequestRows:
        slots = np.array([2, 1])
        sources = np.where(self.lens > 0, slots, -1)
        arrays = slots, sources, np.arange(BATCH) * width, np.full(BATCH, width)
        return RequestRows(*(jnp.asarray(x, jnp.int32) for x in arrays))

    def run(self, tokens: Any, positions: Any, states: Any, attend: Any) -> Any:
        def call(weights: Any, tokens: Any, positions: Any, pools: Any) -> Any:
            model = self.flat.rebuild(weights)
            hidden, _, pools = model(tokens, positions, pools, attend)
            return hidden, pools

        arrays = jnp.asarray(tokens, jnp.int32), jnp.asarray(positions, jnp.int32)
        hidden, (self.kv, states) = jax.jit(call)(self.weights, *arrays, (self.kv, states))
        return np.asarray(hidden), states

    def in_order(self, tokens: np.ndarray) -> np.ndarray:
        width = tokens.shape[1]
        recur = recur_in_order(self.rows(width), BATCH * width, TAPS, implementation=self.how)
        attend = self.view.attend(jnp.asarray(self.lens), width), recur
        positions = self.lens[:, None] + np.arange(width)
        hidden, self.states = self.run(tokens, positions, self.states, attend)
        self.lens = self.lens + width
        return hidden

    def tree(self, tokens: np.ndarray, parents: np.ndarray, path: np.ndarray) -> np.ndarray:
        """Verify a tree, and keep a path of it."""
        width, rows = tokens.shape[1], self.rows(tokens.shape[1])
        mask = np.broadcast_to(np.eye(width, dtype=bool), (BATCH, width, width)).copy()
        for i in range(1, width):
            for b in range(BATCH):
                mask[b, i] |= mask[b, parents[b, i]]
        positions = self.lens[:, None] + mask.sum(2) - 1
        how = {"implementation": self.how}
        arrays = jnp.asarray(parents, jnp.int32), jnp.asarray(path, jnp.int32)
        recur = recur_over_drafts(rows, BATCH * width, TAPS, width, arrays[0], **how)
        lens = jnp.asarray(self.lens)
        form = {"tree_mask": jnp.asarray(mask), "positions": jnp.asarray(positions, jnp.int32)}
        attend = self.view.attend(lens, width, **form), recur
        states = DraftedStates.of(self.states, BATCH * width)
        hidden, states = self.run(tokens, positions, states, attend)
        self.states = delta_replay(*states, rows, arrays[1], **how)
        (self.kv,) = self.view.commit((self.kv,), lens, arrays[1], is_chain=False)
        self.lens = self.lens + (path >= 0).sum(1)
        return hidden


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_chunks_and_trees_equal_whole_texts(
    monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    """The first text goes on with another path of the tree than the second."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, SIZES["vocab_size"], (BATCH, 9))
    drafts = rng.integers(0, SIZES["vocab_size"], (BATCH, 5))
    last = rng.integers(0, SIZES["vocab_size"], (BATCH, 3))
    parents = np.array([[-1, 0, 0, 2, 3], [-1, 0, 1, 0, 1]])
    path = np.array([[0, 2, 3, 4, -1], [0, 1, 4, -1, -1]])
    run = Run(monkeypatch, implementation)
    hidden = [run.in_order(prompts[:, :5]), run.in_order(prompts[:, 5:])]
    of_tree = run.tree(drafts, parents, path)
    end = run.in_order(last)
    for b in range(BATCH):
        accepted = path[b][path[b] >= 0]
        text = np.concatenate([prompts[b], drafts[b, accepted], last[b]])
        whole = Run(monkeypatch, implementation).in_order(np.stack([text] * BATCH))[b]
        pieces = [*(x[b] for x in hidden), of_tree[b, accepted], end[b]]
        np.testing.assert_allclose(np.concatenate(pieces), whole, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("is_drafted", "width"), [pytest.param(True, 4, marks=pytest.mark.slow), (False, 1)]
)
def test_a_pass_lowers_for_cuda(
    monkeypatch: pytest.MonkeyPatch, is_drafted: bool, width: int
) -> None:
    """A recurrent layer has two launches, and the layers of a kind share one function."""
    flat = decoder(monkeypatch, "pallas", dtype="bfloat16")
    view = PageView((jnp.zeros((BATCH, PAGES), jnp.int32),), PAGE, "pallas")
    rows = RequestRows(*(jnp.ones(BATCH, jnp.int32) for _ in range(4)))

    def call(weights: Any, tokens: Any, kv: Any, pool: DeltaPool) -> Any:
        form = rows, BATCH * width, TAPS
        recur, states = recur_in_order(*form, group=1, implementation="pallas"), pool
        if is_drafted:
            recur = recur_over_drafts(*form, width, implementation="pallas")
            states = DraftedStates.of(pool, BATCH * width)
        attend = view.attend(jnp.zeros(BATCH, jnp.int32), width), recur
        model = flat.rebuild(weights)
        hidden, _, (kv, states) = model(tokens, jnp.zeros_like(tokens), (kv, states), attend)
        if is_drafted:
            path = jnp.zeros((BATCH, width), jnp.int32)
            states = delta_replay(*states, rows, path, implementation="pallas")
        return hidden, kv, states

    tokens = jax.ShapeDtypeStruct((BATCH, width), jnp.int32)
    pool = DeltaPool(*request_shapes(flat.caches, 3))
    (kv,) = pool_shapes(flat.caches, (PAGE * PAGES,))
    text = lower_for_cuda(call, flat.abstract, tokens, kv, pool)
    names = ["verify", "replay"] if is_drafted else ["steps"]
    for name in ["inputs", *names]:
        assert f"specjax_delta_{name}" in text, name
    calls = text.count(f"custom_call @{TRITON_CALL}")
    without = [x for x in text.splitlines() if TRITON_CALL in x and "specjax_delta" not in x]
    assert calls - len(without) == (3 if is_drafted else 2)
