"""Reference implementation of plain decoding: one full pass per token, and sampling in numpy.

It has no KV cache, pages, batches or rounds, so tests can check all of these against it. Only the
network's layers and the random noise for a seed are shared with the engine.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.config import ModelConfig
from specjax.kernels.delta_inputs import RequestRows
from specjax.kernels.draw_tokens import position_noise
from specjax.kv.recurrent import abstract_pool, recur_in_order
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel, Weights
from specjax.models.layers import dense_attention, rotated
from specjax.models.short_conv import DenseAttend
from specjax.sampling.params import SamplingParams
from specjax.testing.models import TARGET

WIDTH = 128  # texts are padded to multiples of it, in tokens


@rotated
def dense_attend(
    kv: Any,
    layer: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[Any, jax.Array]:
    """Causal attention over the given tokens, without KV storage."""
    gap = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])
    mask = ((gap >= 0) & (gap < (window or q.shape[1])))[None, None]
    return kv, dense_attention(q, k, v, mask=mask, softcap=softcap, sinks=sinks)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request; it resumes after ``done``, the output of an earlier run."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    ends: tuple[int, ...] = ()
    top_logprobs: int | None = None
    done: tuple[int, ...] = ()

    @property
    def text(self) -> tuple[int, ...]:
        """The tokens to prefill."""
        return self.prompt + self.done


@dataclass
class Output:
    """Tokens of a job, and their log-probabilities if requested."""

    tokens: list[int] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)

    def is_over(self, job: Job) -> bool:
        """Whether the job is finished."""
        max_tokens = job.params.max_new_tokens - len(job.done)
        return len(self.tokens) >= max_tokens or bool(set(self.tokens[-1:]) & set(job.ends))


@cache
def _dense_function(config: ModelConfig, width: int) -> Callable[..., jax.Array]:
    flat = FlatModel.of(partial(CausalLM, config))
    positions = jnp.arange(width, dtype=jnp.int32)[None]
    pool = abstract_pool(flat.caches, 2)
    rows = RequestRows(*(jnp.array([x], jnp.int32) for x in (1, -1, 0, width)))

    @jax.jit
    def logits(weights: Weights, tokens: jax.Array) -> jax.Array:
        model = flat.rebuild(weights)
        inputs: Any = None, DenseAttend(dense_attend)
        if pool is not None:  # states from zeros, row by row
            recur = recur_in_order(rows, width, pool.num_taps, group=1, implementation="xla")
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), pool)
            inputs = (None, zeros), (inputs[1], recur)
        return model.logits(model(tokens, positions, *inputs)[0])[0]

    return logits


def dense_logits(weights: Weights, ids: Sequence[int], config: ModelConfig = TARGET) -> np.ndarray:
    """Compute the raw logits f32 ``[N, V]`` of a whole text."""
    padded = np.zeros((1, -(-len(ids) // WIDTH) * WIDTH), np.int32)
    padded[0, : len(ids)] = ids
    return np.asarray(_dense_function(config, padded.size)(weights, padded))[: len(ids)]


def dense_decode(
    weights: Weights,
    job: Job,
    config: ModelConfig = TARGET,
    allowed: Callable[[Sequence[int]], Collection[int]] | None = None,
) -> Output:
    """Decode a job token by token with the target's weights, ``engine.runner.weights[0]``.

    ``allowed`` returns the tokens that may follow a completion; it ends where there are none.
    """
    params, output = job.params, Output()
    while not output.is_over(job):
        produced = [*job.done, *output.tokens]
        ids = [*job.prompt, *produced]
        raw = dense_logits(weights, ids, config)[-1].astype(np.float64)
        if allowed is not None:
            tokens = allowed(produced)
            if not tokens:
                break
            raw[list(set(range(len(raw))) - set(tokens))] = -np.inf
        logits = adjusted_logits(raw, job.prompt, produced, params, job.ends)
        if not params.is_greedy:
            logits = logits / params.temperature
            top_k = len(raw) if params.top_k == -1 else params.top_k
            eligible, _ = kept_by_sorting(logits, top_k, params.top_p, params.min_p)
            seed = np.array([[job.seed >> 32, job.seed & 0xFFFFFFFF]], np.uint32)
            noise = position_noise(jnp.asarray(seed), jnp.array([len(ids)]), len(raw))
            logits = logits + np.asarray(noise)[0]
            logits[list(set(range(len(raw))) - eligible)] = -np.inf
        token = int(np.argmax(logits))
        output.tokens.append(token)
        if job.top_logprobs is not None:
            logprobs = raw - np.log(np.sum(np.exp(raw)))
            best = np.argsort(-raw, kind="stable")[: job.top_logprobs].tolist()
            output.chosen.append(float(logprobs[token]))
            output.top.append({i: float(logprobs[i]) for i in best})
    return output


def adjusted_logits(
    logits: Any,
    prompt: Collection[int],
    produced: Sequence[int],
    params: SamplingParams,
    end_token_ids: Iterable[int] = (),
) -> np.ndarray:
    """Apply penalties, bias and minimum length to the logits f64 ``[V]`` after a text."""
    logits = np.array(logits, np.float64)
    for token in range(len(logits)):
        times = produced.count(token)
        logits[token] -= params.frequency_penalty * times
        logits[token] -= params.presence_penalty * (times > 0)
        if times or token in prompt:
            if logits[token] > 0:
                logits[token] /= params.repetition_penalty
            else:
                logits[token] *= params.repetition_penalty
    for biased, value in (params.logit_bias or {}).items():
        logits[int(biased)] += value
    if len(produced) < params.min_new_tokens:
        logits[list(end_token_ids)] = -np.inf
    return logits


def kept_by_sorting(
    logits: Any, top_k: int, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[set[int], float]:
    """Filter by top-k, then by top-p (both keep ties), then by min-p; return the kept tokens.

    Also return the smallest distance of a share from its limit: near 0, rounding may decide.
    """
    logits = np.asarray(logits, np.float64)
    mask = logits >= np.sort(logits)[::-1][min(top_k, len(logits)) - 1]
    weights = np.where(mask, np.exp(logits - logits.max()), 0.0)
    gaps = [np.inf]
    if top_p < 1:
        mass = {v: weights[logits >= v].sum() / weights.sum() for v in set(logits[mask])}
        mask &= logits >= max((v for v, share in mass.items() if share >= top_p), default=-np.inf)
        gaps += [abs(share - top_p) for share in mass.values()]
    if min_p > 0:
        gaps += list(np.abs(weights - min_p))
    mask &= weights >= min_p
    return set(np.flatnonzero(mask & (logits > -np.inf)).tolist()), min(gaps)
