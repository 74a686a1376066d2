"""Random engines and random requests, reproducible from the generator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax import DisaggregatedEngine
from specjax.sampling.params import SamplingParams
from specjax.testing.files import CONFIG, EOS_ID, LETTERS

from ..support.engine_process import ApartEngine
from ..support.model_files import BLOCK

CONTEXT = CONFIG.max_position_embeddings
CANDIDATES = ([0, 1, 3], [0, 4], [1, 4], [2, 3])
MODULES = 4
SPLIT = 0.4  # share of engines whose prompts are computed by another engine
APART = 0.2  # share of those with the other engine in another process, which takes seconds to start
Options = dict[str, Any]


@dataclass(frozen=True)
class Drafts:
    """Draft files of all algorithms."""

    eagle3: Path
    eagle: Path
    corpus: Path
    model: Path
    modules: Path  # one module per step of the largest candidate
    dflash: Path
    dspark: Path
    peagle: Path


@dataclass(frozen=True)
class Wish:
    """A request for any engine, and the behaviour of its caller.

    Attributes:
        options: options of ``generate``, which say what to report.
        is_stream: whether the caller reads a stream.
        abort_at: number of streamed tokens after which the caller aborts.
        timeout: seconds after which the engine aborts it.
    """

    prompt: list[int]
    params: SamplingParams
    options: Options = field(default_factory=dict)
    is_stream: bool = False
    abort_at: int | None = None
    timeout: float | None = None

    @property
    def may_abort(self) -> bool:
        return self.abort_at is not None or self.timeout is not None


def one_of(rng: np.random.Generator, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def chance(rng: np.random.Generator, share: float) -> bool:
    return bool(rng.random() < share)


# Algorithms


def _adaptive(rng: np.random.Generator) -> Options:
    config: Options = {"candidate_steps": one_of(rng, CANDIDATES), "policy": "budget"}
    if chance(rng, 0.6):
        config |= {"policy": "ema", "warmup_batches": 1, "update_interval": 2}
    steps = one_of(rng, config["candidate_steps"])
    return {
        "speculative_adaptive": True,
        "speculative_adaptive_config": config,
        "speculative_num_steps": steps,
    }


def _head(rng: np.random.Generator, draft: Path) -> Options:
    """Chains and trees of a head, with any number of rows that they can fill."""
    topk = one_of(rng, (1, 1, 2, 3, 4, 8))
    options: Options = {"draft": draft, "speculative_eagle_topk": topk}
    if chance(rng, 0.3):
        return options | _adaptive(rng)
    steps = int(rng.integers(1, 4 if topk == 8 else 7))
    if topk > 1:
        candidates = topk + (steps - 1) * topk**2
        options["speculative_num_draft_tokens"] = int(
            rng.integers(topk + 1, min(candidates, 23) + 2)
        )
    elif chance(rng, 0.3):
        options["speculative_num_draft_tokens"] = int(rng.integers(2, steps + 2))
    return options | {"speculative_num_steps": steps}


def _modules(rng: np.random.Generator, draft: Path) -> Options:
    options: Options = {"draft": draft}
    if chance(rng, 0.3):
        return options | _adaptive(rng)
    return options | {"speculative_num_steps": int(rng.integers(1, 1 + MODULES))}


def _masked(rng: np.random.Generator, draft: Path) -> Options:
    """Chains of a P-EAGLE head."""
    options: Options = {"draft": draft, "speculative_algorithm": "EAGLE3"}
    if chance(rng, 0.3):
        return options | _adaptive(rng)
    steps = int(rng.integers(1, 7))
    if chance(rng, 0.3):
        options["speculative_num_draft_tokens"] = int(rng.integers(2, steps + 2))
    return options | {"speculative_num_steps": steps}


def _block(rng: np.random.Generator, draft: Path) -> Options:
    """Any number of the block's drafts is verified; by default all."""
    options: Options = {"draft": draft}
    if chance(rng, 0.3):
        return options | _adaptive(rng)
    if chance(rng, 0.3):
        return options
    return options | {"speculative_num_steps": int(rng.integers(1, BLOCK.num_drafts + 1))}


def _ngram(rng: np.random.Generator, corpus: Path) -> Options:
    least = int(rng.integers(1, 4))
    options: Options = {
        "speculative_ngram_min_match_window_size": least,
        "speculative_ngram_max_match_window_size": int(rng.integers(least, 13)),
        "speculative_ngram_max_bfs_breadth": one_of(rng, (1, 4, 10)),
        "speculative_ngram_match_type": one_of(rng, ("BFS", "PROB")),
    }
    if chance(rng, 0.4):
        options["speculative_ngram_external_corpus_path"] = corpus
    if chance(rng, 0.3):
        return options | _adaptive(rng)
    nodes = int(rng.integers(2, 17))
    # at most as deep as its branches can fill
    least = -(-(nodes - 1) // options["speculative_ngram_max_bfs_breadth"])
    return options | {
        "speculative_num_draft_tokens": nodes,
        "speculative_num_steps": int(rng.integers(least, nodes)),
    }


def _markov(rng: np.random.Generator) -> Options:
    if chance(rng, 0.3):
        return _adaptive(rng)
    return {"speculative_num_steps": int(rng.integers(1, 7))}


# options of an engine by algorithm; P-EAGLE is a head of EAGLE3, and markov the example plugin
ALGORITHMS: dict[str, Callable[[np.random.Generator, Drafts], Options]] = {
    "EAGLE3": lambda rng, drafts: _head(rng, drafts.eagle3),
    "EAGLE": lambda rng, drafts: _head(rng, drafts.eagle),
    "P-EAGLE": lambda rng, drafts: _masked(rng, drafts.peagle),
    "NGRAM": lambda rng, drafts: _ngram(rng, drafts.corpus),
    "STANDALONE": lambda rng, drafts: _head(rng, drafts.model),
    "MULTI_LAYER_EAGLE": lambda rng, drafts: _modules(rng, drafts.modules),
    "DFLASH": lambda rng, drafts: _block(rng, drafts.dflash),
    "DSPARK": lambda rng, drafts: _block(rng, drafts.dspark),
    "markov": lambda rng, drafts: _markov(rng),
}


def draw_engine(rng: np.random.Generator, algorithm: str, drafts: Drafts) -> Options:
    """Options of an engine; three of four pools are too small for the concurrent requests."""
    running = int(rng.integers(2, 9))
    options = {
        "speculative_algorithm": algorithm,
        "page_size": one_of(rng, (1, 4, 16)),
        "max_running_requests": running,
        "batch_buckets": one_of(rng, (*[(running,)] * 2, (running + 1,), (1, running + 1))),
        "max_total_tokens": int(rng.integers(80, 160) if chance(rng, 0.75) else 170 * running),
        "chunked_prefill_size": one_of(rng, (1, 5, 16, 24)),
        "rounds_per_dispatch": one_of(rng, (1, 1, 2, 4)),
        "overlap": chance(rng, 0.6),
        "disable_radix_cache": chance(rng, 0.3),
        "grammar_backend": one_of(rng, (None, "llguidance")),
    } | ALGORITHMS[algorithm](rng, drafts)
    if algorithm not in ("NGRAM", "markov") and chance(rng, 0.4):
        options["speculative_draft_window_size"] = int(rng.integers(1, 40))
        options["speculative_draft_sink_size"] = one_of(rng, (0, 1, 4, 30))
    is_split, is_apart = chance(rng, SPLIT), chance(rng, APART)
    sizes = {
        "page_size": one_of(rng, (1, 4, 16)),
        "chunked_prefill_size": one_of(rng, (5, 16, 24)),
        "max_total_tokens": 400,
    }
    if not is_split:
        return options
    # two processes cannot share a GPU
    return options | split(sizes, is_apart=is_apart and jax.default_backend() == "cpu")


def split(sizes: Options, *, is_apart: bool = False) -> Options:
    """Options of an engine whose prompts are computed by another engine of these sizes.

    The other engine is on the last device of this process, or in another process.
    """
    if is_apart:
        return {"kind": ApartEngine, "prefill": sizes, "modules": ["specjax_markov"]}
    last = len(jax.devices()) - 1
    return {"kind": DisaggregatedEngine, "prefill": sizes | {"base_gpu_id": last}}


# Requests


def draw_phrases(rng: np.random.Generator, lengths: Sequence[int]) -> list[list[int]]:
    """Common beginnings of prompts."""
    return [rng.integers(len(LETTERS), size=n).tolist() for n in lengths]


def draw_wish(rng: np.random.Generator, phrases: list[list[int]], room: int) -> Wish:
    """A request that fits the context and ``room`` KV tokens."""
    limit = min(CONTEXT - 1, room)
    prompt = _prompt(rng, phrases, limit)
    # beyond the context, if the pool can hold all of it
    most = CONTEXT + 5 - len(prompt) if room >= CONTEXT - 1 else room + 1 - len(prompt)
    count = min(one_of(rng, (1, 2, int(rng.integers(3, 20)), int(rng.integers(20, 100)))), most)
    params = _params(rng, count)
    options: Options = {}
    if chance(rng, 0.25):
        options |= {"return_logprob": True, "top_logprobs_num": int(rng.integers(3))}
        if chance(rng, 0.4):
            options["logprob_start_len"] = int(rng.integers(len(prompt)))
    if chance(rng, 0.1):
        options["return_hidden_states"] = True
    is_stream = chance(rng, 0.6)
    abort_at = int(rng.integers(1, 1 + count)) if is_stream and chance(rng, 0.3) else None
    timeout = one_of(rng, (0.003, 0.03, 0.3)) if chance(rng, 0.08) else None
    return Wish(prompt, params, options, is_stream, abort_at, timeout)


def _prompt(rng: np.random.Generator, phrases: list[list[int]], limit: int) -> list[int]:
    phrase = one_of(rng, phrases)
    own = rng.integers(len(LETTERS), size=int(rng.integers(1, 20))).tolist()
    if chance(rng, 0.1):
        prompt = rng.integers(len(LETTERS), size=limit).tolist()
    elif chance(rng, 0.3):  # periodic
        prompt = phrase + own[:6] * 3 + own[: int(rng.integers(1, 6))]
    elif chance(rng, 0.2):
        prompt = phrase
    else:
        prompt = phrase[: int(rng.integers(len(phrase)))] + own
    return prompt[:limit]


def _params(rng: np.random.Generator, count: int) -> SamplingParams:
    changes: Options = {"temperature": 0.0}
    if chance(rng, 0.5):
        changes = {
            "temperature": one_of(rng, (0.3, 0.8, 1.0, 1.5)),
            "top_k": one_of(rng, (-1, -1, 1, 5, 30)),
            "top_p": one_of(rng, (1.0, 1.0, 0.95, 0.6)),
            "min_p": one_of(rng, (0.0, 0.0, 0.05)),
            "n": one_of(rng, (1, 1, 1, 2, 3)),
        }
    if chance(rng, 0.25):
        changes |= {
            "repetition_penalty": one_of(rng, (1.0, 0.8, 1.3)),
            "frequency_penalty": one_of(rng, (0.0, -0.3, 0.4)),
            "presence_penalty": one_of(rng, (0.0, 0.5)),
        }
    if chance(rng, 0.2):
        tokens = rng.choice(EOS_ID + 1, size=3, replace=False).tolist()
        changes["logit_bias"] = {t: float(rng.integers(-8, 9)) for t in tokens}
    if chance(rng, 0.2):
        changes["min_new_tokens"] = int(rng.integers(count + 1))
    if chance(rng, 0.25):
        changes["stop_token_ids"] = rng.integers(len(LETTERS), size=3).tolist()
    if chance(rng, 0.2):
        letters = [LETTERS[i] for i in rng.integers(len(LETTERS), size=6)]
        changes["stop"] = [*letters[:2], "".join(letters[2:4]), "".join(letters[4:])]
    return SamplingParams(
        max_new_tokens=count,
        ignore_eos=chance(rng, 0.4),
        speculative=chance(rng, 0.9),
        sampling_seed=int(rng.integers(2**63)),
        **changes,
    )


def to_the_end(wish: Wish, temperature: float, room: int) -> Wish:
    """The same request with as many tokens as fit, and without an early end."""
    prompt = wish.prompt[:30]
    params = replace(
        wish.params,
        temperature=temperature,
        max_new_tokens=min(CONTEXT - 1, room) + 1 - len(prompt),
        min_new_tokens=0,
        ignore_eos=True,
        stop_token_ids=None,
        stop=None,
        n=1,
        **dict.fromkeys(("json_schema", "regex", "ebnf")),
    )
    options = {name: value for name, value in wish.options.items() if name != "logprob_start_len"}
    return replace(wish, prompt=prompt, params=params, options=options, abort_at=None, timeout=None)


GRAMMARS: tuple[Options, ...] = (
    {"regex": "[a-f]{3,40}(xyz|uvw)+"},
    {"json_schema": {"enum": ["a", 17, "abcabcabcabc", {"a": [1, 2, {"b": None}]}]}},
    {"json_schema": {"type": "object", "properties": {"k": {"type": "string"}}}},
    {"ebnf": 'start: "(" start ")" | "[" start "]" | /[0-9]+/'},
)


def constrained(rng: np.random.Generator, wish: Wish) -> Wish:
    """The same request with a grammar."""
    params = replace(wish.params, min_new_tokens=0, **one_of(rng, GRAMMARS))
    return replace(wish, params=params)


def without_count(wish: Wish) -> Wish:
    """The same request, with tokens that do not depend on the end of the prompt."""
    params = replace(
        wish.params,
        **dict.fromkeys(("json_schema", "regex", "ebnf")),
        repetition_penalty=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        min_new_tokens=0,
        stop=None,
    )
    return replace(wish, params=params, options={})


def quiet(wish: Wish) -> Wish:
    """A greedy request without reports: on a GPU, batches of these run separate rounds."""
    return without_count(
        replace(wish, params=replace(wish.params, temperature=0.0, logit_bias=None))
    )
