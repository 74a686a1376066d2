"""Multi-token prediction modules for the copying target: often right, and often wrong."""

import dataclasses
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.decoder import CausalLM
from specjax.models.eagle import MtpHead
from specjax.models.flat import FlatModel, Weights
from specjax.models.layers import dense_attention, rotated
from specjax.speculative.multi_layer_eagle import MULTI_LAYER_EAGLE
from specjax.testing import TARGET, random_weights
from specjax.testing.dense import dense_attend

from ..support.runners import chains, copied_weights, new_runner, runner_config

MODULES = dataclasses.replace(TARGET, num_layers=3)
WIDTH = 128
# scale of each module's change to the embedding, so that drafts depend on everything attended to
PERTURBATION = 0.3


@cache
def module_weights() -> Weights:
    """Each module copies the last token's embedding, like the target's last state almost does."""
    flat = FlatModel.of(partial(MtpHead, MODULES))
    size = MODULES.hidden_size
    weights = []
    for name, weight in zip(flat.names, map(np.array, random_weights(flat, 3)), strict=True):
        if name.endswith("fc.kernel"):
            weight *= PERTURBATION / 2
            weight[size:] += np.eye(size, dtype=np.float32)
        elif name.endswith(("attention.output.kernel", "mlp.down.kernel")):
            weight *= PERTURBATION
        weights.append(weight)
    return jax.device_put(tuple(weights))


@cache
def mtp_runner(steps: tuple[int, ...] = (3,), **changes: Any) -> Any:
    """A compiled runner whose rounds can be watched; cached by its arguments."""
    algorithm = dataclasses.replace(MULTI_LAYER_EAGLE, num_modules=MODULES.num_layers)
    config = runner_config(**{"algorithm": algorithm, "shapes": chains(*steps), **changes})
    networks = algorithm.networks(TARGET, MODULES)
    return new_runner(networks, config, copied_weights()[0], module_weights())


@rotated
def _recording_attend(
    kv: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[Any, jax.Array]:
    """Causal attention over the given tokens, which records the keys and values of each layer."""
    return {**kv, layer: jnp.stack([k[0], v[0]], axis=1)}, dense_attention(q, k, v, is_causal=True)


@cache
def _dense_function() -> Any:
    target_flat = FlatModel.of(partial(CausalLM, TARGET))
    head_flat = FlatModel.of(partial(MtpHead, MODULES))
    positions = jnp.arange(WIDTH, dtype=jnp.int32)[None]

    @jax.jit
    def run(target_weights, head_weights, tokens, length):
        target, head = target_flat.rebuild(target_weights), head_flat.rebuild(head_weights)
        hidden, _, _ = target(tokens[None], positions, None, dense_attend)
        drafts, kv = [], {}
        for k in range(MODULES.num_layers):
            embeds = head.embed(jnp.roll(tokens, -1 - k)[None], target)
            inputs = embeds, hidden, positions, kv
            hidden, kv = head.modules[k](*inputs, k, _recording_attend)
            drafts.append(jnp.argmax(head.logits(hidden[0, length - 2], target)).astype(jnp.int32))
            tokens = tokens.at[length + k].set(drafts[-1])
        return jnp.stack(drafts), jnp.stack([kv[k] for k in range(MODULES.num_layers)])

    return run


def dense_modules(text: Sequence[int]) -> tuple[list[int], np.ndarray]:
    """Drafts of the modules after a text, and their keys and values ``[M, W, 2, KV, H]``.

    Computed without a cache, pages or rounds.
    """
    padded = np.zeros(WIDTH, np.int32)
    padded[: len(text)] = text
    weights = copied_weights()[0], module_weights()
    drafts, kv = _dense_function()(*weights, padded, np.int32(len(text)))
    return np.asarray(drafts).tolist(), np.asarray(kv)
