"""Runners over tiny networks, compiled once per set of arguments, and requests without engine."""

import copy
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.config import DraftConfig, ModelConfig
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel, Networks, Weights
from specjax.runtime.runner import ModelRunner
from specjax.runtime.runner_config import RunnerConfig
from specjax.sampling.params import SamplingParams
from specjax.sampling.table import HostTables
from specjax.scheduling.request import GenerateRequest, Request
from specjax.scheduling.scheduler import Scheduler
from specjax.speculative.algorithm import SpeculativeAlgorithm
from specjax.testing import EAGLE3, TARGET, Job, dense_decode, random_weights
from specjax.testing.models import copying_head, copying_target
from specjax.types import DraftShape

EAGLE = dataclasses.replace(
    EAGLE3,
    checkpoint_format="eagle-1",
    draft_vocab_size=61,
    feature_layers=(),
    has_own_lm_head=False,
)


def chains(*steps: int) -> tuple[DraftShape, ...]:
    """Tiers of chains."""
    return tuple(map(DraftShape.chain, steps))


def algorithm_of(head: DraftConfig | ModelConfig | None) -> SpeculativeAlgorithm:
    """Algorithm that drafts with a head or model of this configuration."""
    name = None
    if isinstance(head, ModelConfig):
        name = "STANDALONE"
    elif head is not None:
        name = "EAGLE3" if head.fuses_features else "EAGLE"
    found = SpeculativeAlgorithm.from_string(name)
    assert isinstance(found, SpeculativeAlgorithm)
    return found


@cache
def target_model() -> tuple[FlatModel[CausalLM], Weights]:
    """Random target weights, scaled so that distributions are neither flat nor peaked."""
    flat = FlatModel.of(partial(CausalLM, TARGET))
    weights = random_weights(flat, 0)
    head = flat.names.index("lm_head.kernel")
    return flat, (*weights[:head], 4 * weights[head], *weights[head + 1 :])


@cache
def head_weights(config: DraftConfig | ModelConfig) -> Weights:
    """Random weights of a draft head or a draft model."""
    flat = algorithm_of(config).draft_model(config, None)
    weights = list(random_weights(flat, 1))
    if isinstance(config, DraftConfig) and "d2t" in flat.names:
        rng = np.random.default_rng(2)
        ids = np.sort(rng.choice(config.vocab_size, config.draft_vocab_size, replace=False))
        offsets = (ids - np.arange(config.draft_vocab_size)).astype(np.int32)
        weights[flat.names.index("d2t")] = jnp.asarray(offsets)
    return tuple(weights)


@cache
def copied_weights(config: DraftConfig = EAGLE3) -> tuple[Weights, Weights]:
    """Flat weights of the copying target and of a head of the same sizes."""
    networks = algorithm_of(config).networks(TARGET, config)
    target = copying_target(TARGET, config)
    head = networks.draft.order(copying_head(config, target))
    return jax.device_put((networks.target.order(target), head))


def runner_config(page_size: int = 4, **changes: Any) -> RunnerConfig:
    """Configuration with four request slots and pools of 600 tokens.

    Rounds and prefill have one bucket each, as every function takes seconds to compile.
    """
    config: dict[str, Any] = {
        "page_size": page_size,
        "num_pages": 1 + 600 // page_size,
        "pages_per_request": -(-128 // page_size),
        "num_slots": 5,
        "batch_buckets": (4,),
        "prefill_buckets": (16,),
        "implementation": "xla",
    }
    return RunnerConfig(**(config | changes))


def new_runner(
    networks: Networks, config: RunnerConfig, target: Weights, draft: Weights
) -> ModelRunner:
    """A runner that compiles each function at its first use."""
    runner = ModelRunner(networks, config)
    runner.compile(show_progress=False, on_use=True)
    runner.load(target, draft)
    return runner


def with_weights(runner: ModelRunner, target: Weights, draft: Weights) -> ModelRunner:
    """A separate runner that shares the compiled functions of another."""
    runner, config = copy.copy(runner), runner.config
    runner.tables = HostTables(config.num_slots, config.pages_per_request, TARGET.vocab_size)
    runner._slots_on_device = {}
    runner.load(target, draft)
    return runner


@cache
def _made_runner(head: Any, config: RunnerConfig) -> ModelRunner:
    networks = config.algorithm.networks(TARGET, head, implementation=config.implementation)
    draft = head_weights(head) if isinstance(head, (DraftConfig, ModelConfig)) else ()
    return new_runner(networks, config, target_model()[1], draft)


def make_runner(
    head: Any = None, num_steps: int = 0, *, rounds: int = 1, **changes: Any
) -> ModelRunner:
    """A runner with random weights, one per set of arguments. Tests clear its slots."""
    algorithm = changes.pop("algorithm", None) or algorithm_of(head)
    options = {"algorithm": algorithm, "shapes": chains(num_steps)} | changes
    return _made_runner(head, runner_config(rounds_per_dispatch=rounds, **options))


@cache
def copied_runner(
    num_steps: int, rounds: int = 1, draft: DraftConfig = EAGLE3, **changes: Any
) -> ModelRunner:
    """Runner with the copying networks and the same compiled functions; 0 steps is plain."""
    head_config = draft if num_steps else None
    target, head = copied_weights(draft)
    runner = make_runner(head_config, num_steps, rounds=rounds, **changes)
    return with_weights(runner, target, head if num_steps else ())


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
    """Make a request, by default without a tokenizer.

    Token 5, or ``ends``, ends it unless ``ignore_eos`` is set.
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
    """Serve requests to their end and check that every page is free again."""
    scheduler = Scheduler(runner, run_ahead=run_ahead)
    for request in requests:
        scheduler.check(request)
        scheduler.add(request)
    while scheduler.has_work:
        scheduler.step()
    assert scheduler.debug_state()["pages_free"] == runner.config.num_pages - 1


def dense_greedy(prompt: Sequence[int], count: int) -> list[int]:
    """Greedy continuation by the random target, without cache, pages and rounds."""
    params = SamplingParams(temperature=0.0, max_new_tokens=count)
    return dense_decode(target_model()[1], Job(prompt=tuple(prompt), params=params)).tokens


@cache
def plain_output(prompt: tuple[int, ...], params: SamplingParams, seed: int) -> list[int]:
    """Output of plain decoding by the copying target for one request alone."""
    request = make_request(list(prompt), params, seed=seed)
    run_requests(copied_runner(0), [request])
    return request.output_ids


def plain_outputs(
    prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
) -> list[list[int]]:
    """Output of plain decoding for each request alone."""
    return [plain_output(tuple(p), params, s) for p, s in zip(prompts, seeds, strict=True)]
