"""A tiny target and an EAGLE-3 head that is right often, made by construction instead of training.

The target is close to a Markov chain: its attention and feed-forward layers only perturb the
embedding of the newest token. The head's attention sees nothing but its own row (a rotary score of
huge scale peaks at distance 0), copies the newest token's embedding, and applies the target's own
output head, so it is wrong where the perturbation decides or its smaller vocabulary ends.
"""

import copy
from collections.abc import Sequence
from functools import cache

import jax.numpy as jnp
import numpy as np

from specjax.models.flat import Weights
from specjax.runtime.runner import HostTables, ModelRunner
from specjax.sampling_params import SamplingParams

from .tiny import EAGLE3, TARGET, head_weights, make_request, make_runner, run_requests
from .tiny import target_model as random_target

PERTURBATION = 0.03
WIDTH = EAGLE3.num_kv_heads * EAGLE3.head_dim  # of the embedding that the head's values can carry


def embedding_table(vocab_size: int, hidden_size: int, seed: int) -> np.ndarray:
    """Rows of equal length in the first ``WIDTH`` coordinates, the first of which is constant."""
    table = np.zeros((vocab_size, hidden_size), np.float32)
    rows = np.random.default_rng(seed).normal(size=(vocab_size, WIDTH - 1))
    table[:, 1:WIDTH] = 3 * rows / np.linalg.norm(rows, axis=1, keepdims=True)
    table[:, 0] = 1.0
    return table


@cache
def copied_weights() -> tuple[Weights, Weights]:
    """Flat weights of the target and of the head."""
    flat, random = random_target()
    target = dict(zip(flat.names, random, strict=True))
    target["embedding.table"] = jnp.asarray(
        embedding_table(TARGET.vocab_size, TARGET.hidden_size, 5)
    )
    for name in flat.names:
        if name.endswith(("attention.output.kernel", "mlp.down.kernel")):
            target[name] = PERTURBATION * target[name]
    networks = make_runner(EAGLE3, 4).networks
    assert networks.head is not None
    head = dict(zip(networks.head.names, head_weights(EAGLE3), strict=True))
    head |= {name: jnp.asarray(array) for name, array in copying_layer().items()}
    # the head knows the tokens that the unperturbed chain writes, and fills up with others
    written = np.argmax(np.asarray(target["embedding.table"] @ target["lm_head.kernel"]), axis=1)
    order = (
        np.unique(written).tolist() + np.setdiff1d(np.arange(TARGET.vocab_size), written).tolist()
    )
    ids = np.sort(order[: EAGLE3.draft_vocab_size])
    head["d2t"] = jnp.asarray((ids - np.arange(len(ids))).astype(np.int32))
    head["lm_head.kernel"] = target["lm_head.kernel"][:, ids]
    return flat.order(target), networks.head.order(head)


def copying_layer() -> dict[str, np.ndarray]:
    """Weights of the head, but for its vocabulary: output = the newest token's embedding."""
    size, dim = EAGLE3.hidden_size, EAGLE3.head_dim
    q_size = EAGLE3.num_heads * dim
    qkv = np.zeros((2 * size, q_size + 2 * WIDTH), np.float32)
    qkv[0, 0:q_size:dim] = 1e3  # queries and keys: the constant coordinate, in the fastest pair
    qkv[0, q_size : q_size + WIDTH : dim] = 1e3
    qkv[:WIDTH, q_size + WIDTH :] = np.eye(WIDTH)
    output = np.zeros((q_size, size), np.float32)
    group = EAGLE3.num_heads // EAGLE3.num_kv_heads
    for i in range(WIDTH):  # the first query head of each group returns the group's values
        output[i // dim * group * dim + i % dim, i] = 1.0
    return {
        "attention.qkv.kernel": qkv,
        "attention.output.kernel": output,
        "fc.kernel": np.zeros((EAGLE3.feature_size, size), np.float32),
        "mlp.down.kernel": np.zeros((EAGLE3.intermediate_size, size), np.float32),
    }


@cache
def copied_runner(num_steps: int) -> ModelRunner:
    """A runner over these weights with the compiled functions of the tiny one; 0 is plain."""
    runner = copy.copy(make_runner(EAGLE3, num_steps) if num_steps else make_runner())
    config = runner.config
    runner.tables = HostTables.empty(config.num_slots, config.pages_per_request, TARGET.vocab_size)
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
