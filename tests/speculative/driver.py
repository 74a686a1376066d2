"""Requests on a runner without a scheduler, and the same requests decoded densely in numpy."""

from dataclasses import dataclass, field, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from specjax.kernels.draw_tokens import position_noise

from specjax.config import DraftConfig, ModelConfig
from specjax.engine.info import dense_attend
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel, Weights
from specjax.runtime.runner import Dispatched, ModelRunner
from specjax.sampling.params import SamplingParams
from specjax.speculative.prefill import Chunk
from specjax.testing import TARGET, make_runner
from specjax.types import DraftShape

from .reference import adjusted_logits, kept_by_sorting

WIDTH = 128


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request; ``done`` is output of an earlier run that it resumes from."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    ends: tuple[int, ...] = ()
    top_logprobs: int | None = None
    done: tuple[int, ...] = ()

    @property
    def text(self) -> tuple[int, ...]:
        """What is prefilled."""
        return self.prompt + self.done


@dataclass
class Output:
    """Tokens of a job, and the log-probabilities beside them."""

    tokens: list[int] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    num_rounds: int = 0

    def take(self, tokens, job: Job, logprobs, at) -> None:
        """Append tokens up to the end of the job, with log-probabilities at index ``at``."""
        for i, token in enumerate(tokens):
            if self.is_over(job):
                return
            self.tokens.append(int(token))
            if job.top_logprobs is not None:
                n = job.top_logprobs
                self.chosen.append(float(logprobs.chosen[at][i]))
                ids, values = logprobs.top_ids[at][i, :n], logprobs.top_values[at][i, :n]
                self.top.append(dict(zip(ids.tolist(), values.tolist(), strict=True)))

    def is_over(self, job: Job) -> bool:
        """Whether the job has all its tokens."""
        left = job.params.max_new_tokens - len(job.done)
        return len(self.tokens) >= left or bool(set(self.tokens[-1:]) & set(job.ends))


def start(
    runner: ModelRunner,
    slot: int,
    job: Job,
    *,
    num_cached: int = 0,
    pages: list[int] | None = None,
) -> Dispatched:
    """Prefill a job into a slot, from token ``num_cached`` on."""
    config = runner.config
    per_slot = (config.num_pages - 1) // (config.num_slots - 1)
    first = 1 + (slot - 1) * per_slot
    text = list(job.text)
    runner.check(job.params, job.ends, job.top_logprobs)
    runner.set_slot(
        slot,
        job.params,
        seed=job.seed,
        end_token_ids=job.ends,
        prompt_len=len(job.prompt),
        top_logprobs=job.top_logprobs,
        cached_ids=text[:num_cached],
    )
    count = min(per_slot, config.pages_per_request)
    runner.set_pages(slot, list(range(first, first + count)) if pages is None else pages)
    width = config.prefill_buckets[-1]
    for at in range(num_cached, len(text), width):
        budget = job.params.max_new_tokens - len(job.done)
        result = runner.prefill([Chunk.of(slot, text, at, at + width, budget, num_cached)])
    return result


def serve(
    runner: ModelRunner, jobs: list[Job], tier: DraftShape | None = None, **first_start
) -> list[Output]:
    """Run jobs to their end, as many at once as there are slots."""
    at_once = runner.config.num_slots - 1
    outputs = [Output() for _ in jobs]
    for begin in range(0, len(jobs), at_once):
        batch = list(zip(jobs, outputs, strict=True))[begin : begin + at_once]
        slots = list(range(1, len(batch) + 1))
        for slot, (job, output) in zip(slots, batch, strict=True):
            result = start(runner, slot, job, **first_start)
            logprobs = result.read_logprobs()
            assert (logprobs is None) == (job.top_logprobs is None)
            output.take(result.read()[:1], job, logprobs, (slice(1),))
        while not all(output.is_over(job) for job, output in batch):
            result = runner.round(slots, tier)
            packed, logprobs = result.read(), result.read_logprobs()
            for r in range(packed.shape[0]):
                for i, (job, output) in enumerate(batch):
                    count = packed[r, i, -1]
                    assert (count == 0) == output.is_over(job)
                    output.num_rounds += bool(count)
                    output.take(packed[r, i, :count], job, logprobs, (r, i))
        for slot in slots:
            runner.clear_slot(slot)
    return outputs


@cache
def _dense_function(config: ModelConfig):
    flat = FlatModel.of(partial(CausalLM, config))
    positions = jnp.arange(WIDTH, dtype=jnp.int32)[None]

    @jax.jit
    def logits(weights, tokens):
        model = flat.rebuild(weights)
        return model.logits(model(tokens, positions, None, dense_attend)[0])[0]

    return logits


def dense_logits(weights: Weights, ids, config: ModelConfig = TARGET) -> np.ndarray:
    """Raw logits f32 ``[N, V]`` of a whole text: no cache, no pages, no rounds."""
    padded = np.zeros((1, WIDTH), np.int32)
    padded[0, : len(ids)] = ids
    return np.asarray(_dense_function(config)(weights, padded))[: len(ids)]


def dense_decode(weights: Weights, job: Job) -> Output:
    """Decode a job one token at a time, sampling in numpy on dense logits."""
    params, vocab_size = job.params, None
    output = Output()
    while not output.is_over(job):
        produced = [*job.done, *output.tokens]
        ids = [*job.prompt, *produced]
        raw = dense_logits(weights, ids)[-1].astype(np.float64)
        vocab_size = len(raw)
        logits = adjusted_logits(raw, job.prompt, produced, params, job.ends)
        if not params.is_greedy:
            logits = logits / params.temperature
            top_k = vocab_size if params.top_k == -1 else params.top_k
            kept, _ = kept_by_sorting(logits, top_k, params.top_p, params.min_p)
            seed = np.array([[job.seed >> 32, job.seed & 0xFFFFFFFF]], np.uint32)
            noise = position_noise(jnp.asarray(seed), jnp.array([len(ids)]), vocab_size)
            logits = logits + np.asarray(noise)[0]
            logits[list(set(range(vocab_size)) - kept)] = -np.inf
        token = int(np.argmax(logits))
        output.tokens.append(token)
        if job.top_logprobs is not None:
            logprobs = raw - np.log(np.sum(np.exp(raw)))
            best = np.argsort(-raw, kind="stable")[: job.top_logprobs].tolist()
            output.chosen.append(float(logprobs[token]))
            output.top.append({i: float(logprobs[i]) for i in best})
    return output


@cache
def staged_runner(head: DraftConfig | None, num_steps: int) -> ModelRunner:
    """A runner whose rounds are made of stages that were compiled apart, equal to the tiny one."""
    fused = make_runner(head, num_steps)
    staged = ModelRunner(fused.networks, fused.config)
    staged.compile(show_progress=False, stages=True)
    staged.load(*fused.weights)
    staged.watch_rounds(lambda *_: None)
    return staged


def resumed(job: Job, output: Output, count: int) -> Job:
    """The rest of a job behind ``count`` of its tokens."""
    return replace(job, done=(*job.done, *output.tokens[:count]))
