"""Requests on a runner without a scheduler."""

from dataclasses import dataclass, replace
from functools import cache

import jax
import numpy as np

from specjax.config import DraftConfig
from specjax.runtime.runner import Dispatched, ModelRunner
from specjax.speculative.prefill import Chunk
from specjax.testing import Job, Output
from specjax.types import DraftShape

from ..support.runners import make_runner, new_runner


@dataclass
class Served(Output):
    """Results of a job's rounds."""

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


def start(
    runner: ModelRunner, slot: int, job: Job, *, num_cached: int = 0, pages: list[int] | None = None
) -> Dispatched:
    """Prefill a job into a slot, starting at token ``num_cached``."""
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
) -> list[Served]:
    """Run jobs to their end, at most as many at once as there are slots."""
    at_once = runner.config.num_slots - 1
    outputs = [Served() for _ in jobs]
    for begin in range(0, len(jobs), at_once):
        batch = list(zip(jobs, outputs, strict=True))[begin : begin + at_once]
        slots = list(range(1, len(batch) + 1))
        for slot, (job, output) in zip(slots, batch, strict=True):
            result = start(runner, slot, job, **first_start)
            logprobs = jax.tree.map(np.asarray, result.logprobs)
            assert (logprobs is None) == (job.top_logprobs is None)
            output.take(result.read()[:1], job, logprobs, (slice(1),))
        while not all(output.is_over(job) for job, output in batch):
            result = runner.round(slots, tier)
            packed, logprobs = result.read(), jax.tree.map(np.asarray, result.logprobs)
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
def staged_runner(head: DraftConfig | None, num_steps: int) -> ModelRunner:
    """A runner whose rounds consist of separately compiled stages; else equal to the tiny one."""
    fused = make_runner(head, num_steps)
    staged = new_runner(fused.networks, fused.config, *fused.weights)
    staged.watch_rounds(lambda *_: None)
    return staged


def resumed(job: Job, output: Output, count: int) -> Job:
    """A job that continues after the first ``count`` tokens of another."""
    return replace(job, done=(*job.done, *output.tokens[:count]))
