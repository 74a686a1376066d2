"""Tiny random models and runners that tests share."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.config import DraftConfig, ModelConfig
from specjax.engine.info import dense_attend
from specjax.kv.pages import PageAllocator
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel, Weights
from specjax.runtime.runner import ModelRunner
from specjax.runtime.runner_config import RunnerConfig
from specjax.sampling.params import SamplingParams
from specjax.scheduling.request import GenerateRequest, Request
from specjax.scheduling.scheduler import Scheduler
from specjax.speculative.algorithm import SpeculativeAlgorithm
from specjax.types import DraftShape

TARGET = ModelConfig(
    model_type="llama",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=256,
)
EAGLE3 = DraftConfig(
    checkpoint_format="eagle-3",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    target_hidden_size=32,
    draft_vocab_size=40,
    feature_layers=(0, 0, 1),
)
EAGLE = dataclasses.replace(
    EAGLE3,
    checkpoint_format="eagle-1",
    draft_vocab_size=61,
    feature_layers=(),
    has_own_lm_head=False,
)


def random_weights(flat: FlatModel[Any], seed: int) -> Weights:
    """Weights as the models' own initialisers make them, in numpy, which compiles nothing."""
    rng = np.random.default_rng(seed)
    weights = []
    for name, leaf in zip(flat.names, flat.abstract, strict=True):
        kind, array = name.rsplit(".", 1)[-1], np.zeros(leaf.shape)
        if kind in ("kernel", "table"):
            fan_in = leaf.shape[0] if kind == "kernel" else leaf.shape[1]
            array = rng.normal(size=leaf.shape) * fan_in**-0.5
        elif kind == "scale":
            array = np.ones(leaf.shape)
        weights.append(array.astype(leaf.dtype))
    return jax.device_put(tuple(weights))


@cache
def target_model() -> tuple[FlatModel[CausalLM], Weights]:
    """Random target weights, scaled so that its distributions are neither flat nor peaked."""
    flat = FlatModel.of(partial(CausalLM, TARGET))
    weights = random_weights(flat, 0)
    head = flat.names.index("lm_head.kernel")
    return flat, (*weights[:head], 4 * weights[head], *weights[head + 1 :])


@cache
def head_weights(config: DraftConfig | ModelConfig) -> Weights:
    """Random weights of a draft head or a draft model."""
    flat = algorithm_of(config).draft_model(config, "xla")
    weights = list(random_weights(flat, 1))
    if isinstance(config, DraftConfig) and "d2t" in flat.names:
        rng = np.random.default_rng(2)
        ids = np.sort(rng.choice(config.vocab_size, config.draft_vocab_size, replace=False))
        offsets = (ids - np.arange(config.draft_vocab_size)).astype(np.int32)
        weights[flat.names.index("d2t")] = jnp.asarray(offsets)
    return tuple(weights)


def algorithm_of(head: DraftConfig | ModelConfig | None) -> SpeculativeAlgorithm:
    """What drafts with a head, or a model, of this configuration."""
    name = None
    if isinstance(head, ModelConfig):
        name = "STANDALONE"
    elif head is not None:
        name = "EAGLE3" if head.fuses_features else "EAGLE"
    found = SpeculativeAlgorithm.from_string(name)
    assert isinstance(found, SpeculativeAlgorithm)
    return found


def chains(*steps: int) -> tuple[DraftShape, ...]:
    """Tiers of chains."""
    return tuple(map(DraftShape.chain, steps))


@cache
def _made_runner(head: Any, config: RunnerConfig) -> ModelRunner:
    runner = ModelRunner(config.algorithm.networks(TARGET, head), config)
    runner.compile(show_progress=False)
    runner.load(
        target_model()[1],
        head_weights(head) if isinstance(head, (DraftConfig, ModelConfig)) else (),
    )
    return runner


def make_runner(
    head: Any = None,
    num_steps: int = 0,
    *,
    rounds: int = 1,
    page_size: int = 4,
    **changes: Any,
) -> ModelRunner:
    """A compiled runner with weights, one for equal arguments; a test leaves its slots clear.

    Rounds and prefill have one bucket each, since every function takes seconds to compile.
    """
    config: dict[str, Any] = {
        "algorithm": changes.get("algorithm") or algorithm_of(head),
        "shapes": chains(num_steps),
        "page_size": page_size,
        "num_pages": 1 + 600 // page_size,
        "pages_per_request": -(-128 // page_size),
        "num_slots": 5,
        "batch_buckets": (4,),
        "prefill_buckets": (16,),
        "attention": "reference",
        "rounds_per_dispatch": rounds,
    }
    return _made_runner(head, RunnerConfig(**(config | changes)))


def make_request(
    input_ids: list[int],
    params: SamplingParams,
    *,
    seed: int = 0,
    width: int = 0,
    rid: str = "r",
    decoder: Any = None,
    ends: Iterable[int] | None = None,
    top_logprobs: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> Request:
    """A request, without a tokenizer if none is given.

    Token 5 ends it, or ``ends``, unless ``ignore_eos`` is set.
    """
    if top_logprobs is not None:
        options |= {"return_logprob": True, "top_logprobs_num": top_logprobs}
    if ends is None:
        ends = () if params.ignore_eos else (5,)
    return Request(
        GenerateRequest(rid=rid, input_ids=input_ids, sampling_params=params, **options),
        seed=seed,
        max_new_tokens=params.max_new_tokens,
        end_token_ids=frozenset(ends),
        decoder=decoder,
        spec_width=width,
        clock=clock,
    )


def run_requests(runner: ModelRunner, requests: list[Request], *, run_ahead: int = 0) -> None:
    """Serve requests to their end; afterwards every page is free again."""
    config = runner.config
    allocator = PageAllocator(config.num_pages, config.page_size)
    scheduler = Scheduler(runner, allocator, run_ahead=run_ahead)
    for request in requests:
        scheduler.check(request)
        scheduler.add(request)
    while scheduler.has_work:
        scheduler.step()
    assert allocator.num_free == config.num_pages - 1


def dense_greedy(prompt: list[int], count: int) -> list[int]:
    """Greedy continuation by a full dense pass per token: no cache, no pages, no rounds."""
    flat, weights = target_model()
    ids = list(prompt)
    width = len(prompt) + count
    positions = jnp.arange(width, dtype=jnp.int32)[None]

    @jax.jit
    def logits(tokens: jax.Array) -> jax.Array:
        model = flat.rebuild(weights)
        return model.logits(model(tokens, positions, None, dense_attend)[0])

    for _ in range(count):
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(np.argmax(np.asarray(logits(padded))[0, len(ids) - 1])))
    return ids[len(prompt) :]
