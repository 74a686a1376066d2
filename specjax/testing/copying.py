"""A tiny target and an EAGLE-3 head that is right often, made by construction instead of training.

The target is close to a Markov chain: its attention and feed-forward layers only perturb the
embedding of the newest token. The head's attention sees nothing but its own row (a rotary score of
huge scale peaks at distance 0), copies the newest token's embedding, and applies the target's own
output head, so it is wrong where the perturbation decides or its smaller vocabulary ends.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import numpy as np

from specjax.config import DraftConfig, ModelConfig
from specjax.models.decoder import CausalLM
from specjax.models.eagle import build_head
from specjax.models.flat import FlatModel, Weights
from specjax.runtime.runner import ModelRunner
from specjax.sampling.params import SamplingParams
from specjax.sampling.table import HostTables
from specjax.testing.tiny import (
    EAGLE3,
    TARGET,
    algorithm_of,
    make_request,
    make_runner,
    random_weights,
    run_requests,
)

PERTURBATION = 0.095
Named = dict[str, np.ndarray]


def _random(build: Any, seed: int) -> Named:
    flat = FlatModel.of(build)
    return dict(zip(flat.names, map(np.asarray, random_weights(flat, seed)), strict=True))


def copying_target(config: ModelConfig, head: DraftConfig) -> Named:
    """Weights of the target by flat name.

    Embeddings lie in the first coordinates, as many as the head's values can carry; they have equal
    length, so that every norm scales them alike, and the first coordinate is constant.
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
    """Weights of the head by flat name; its output is the newest token's embedding."""
    named = _random(partial(build_head, config), 1)
    size, dim = config.hidden_size, config.head_dim
    q_size, width = config.num_heads * dim, config.num_kv_heads * dim
    qkv = np.zeros((2 * size, q_size + 2 * width), np.float32)
    qkv[0, 0:q_size:dim] = 1e3  # queries and keys: the constant coordinate, in the fastest pair
    qkv[0, q_size : q_size + width : dim] = 1e3
    qkv[:width, q_size + width :] = np.eye(width)
    # takes the residual back: a recurrent state is such a copy itself, and its norm changes nothing
    qkv[size : size + width, q_size + width :] = -np.eye(width)
    output = np.zeros((q_size, size), np.float32)
    group = config.num_heads // config.num_kv_heads
    for i in range(width):  # the first query head of each group returns the group's values
        output[i // dim * group * dim + i % dim, i] = 1.0
    named |= {"attention.qkv.kernel": qkv, "attention.output.kernel": output}
    named["fc.kernel"] = np.zeros_like(named["fc.kernel"])
    named["mlp.down.kernel"] = np.zeros_like(named["mlp.down.kernel"])
    # the head knows the tokens that the unperturbed chain writes, and fills up with others
    written = np.unique(np.argmax(target["embedding.table"] @ target["lm_head.kernel"], axis=1))
    others = np.setdiff1d(np.arange(config.vocab_size), written)
    ids = np.sort(np.concatenate([written, others])[: config.draft_vocab_size])
    named["d2t"] = (ids - np.arange(len(ids))).astype(np.int32)
    named["lm_head.kernel"] = target["lm_head.kernel"][:, ids]
    return named


@cache
def copied_weights() -> tuple[Weights, Weights]:
    """Flat weights for the networks of ``tiny``."""
    networks = algorithm_of(EAGLE3).networks(TARGET, EAGLE3)
    target = copying_target(TARGET, EAGLE3)
    head = networks.draft.order(copying_head(EAGLE3, target))
    return jax.device_put((networks.target.order(target), head))


@cache
def copied_runner(num_steps: int, rounds: int = 1, **changes: Any) -> ModelRunner:
    """A runner over these weights with the compiled functions of the tiny one; 0 is plain."""
    head_config = EAGLE3 if num_steps else None
    runner = copy.copy(make_runner(head_config, num_steps, rounds=rounds, **changes))
    config = runner.config
    runner.tables = HostTables(config.num_slots, config.pages_per_request, TARGET.vocab_size)
    runner._slots_on_device = {}
    target, head = copied_weights()
    runner.load(target, head if num_steps else ())
    return runner


@cache
def plain_output(prompt: tuple[int, ...], params: SamplingParams, seed: int) -> list[int]:
    """What plain decoding of one request alone gives."""
    request = make_request(list(prompt), params, seed=seed)
    run_requests(copied_runner(0), [request])
    return request.output_ids


def plain_outputs(
    prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
) -> list[list[int]]:
    """What plain decoding gives, each request alone."""
    return [plain_output(tuple(p), params, s) for p, s in zip(prompts, seeds, strict=True)]
