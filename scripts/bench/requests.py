"""Times what requests feel: rounds of each kind of sampling, and bursts of prompts.

    python scripts/bench requests --preset llama3.1-8b --dtype bfloat16 --batch 1,8,32 \\
        --speculative-num-steps 3 --max-running-requests 64 --context-length 1536

A round is (time of 128 new tokens - time of 32) over the rounds between them, medians of
``--repeats``, of requests with random prompts of 1,024 tokens. A burst hands in 64 prompts at once
and ends when all have their first token, best of ``--repeats``. A load hands in 128 requests of
1,024 and 256 tokens at once. Prefixes are not cached.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench import common
from specjax import Engine
from specjax.cli.options import add_options, add_start_options, engine_arguments, with_preset
from specjax.engine.args import EngineArgs

PROMPT, SHORT, LONG = 1024, 32, 128
# sampling parameters and options of generate, by name
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0.0}, {}),
    "sampled": ({"temperature": 0.8}, {}),
    "filtered": ({"temperature": 0.8, "top_p": 0.95, "top_k": 50}, {}),
    "top-p": ({"temperature": 0.8, "top_p": 0.95}, {}),
    "penalized": ({"temperature": 0.8, "repetition_penalty": 1.1}, {}),
    "logprobs": ({"temperature": 0.0}, {"return_logprob": True, "top_logprobs_num": 5}),
}
COLUMNS = (
    ("what", "what", ""),
    ("batch", "batch", "d"),
    ("ms", "ms", ".2f"),
    ("over greedy", "ratio", ".3f"),
    ("tokens/s", "tokens_s", ",.0f"),
)


def parse_arguments(name: str, argv: Sequence[str]) -> argparse.Namespace:
    parser = common.engine_parser(name, __doc__)
    run = parser.add_argument_group("run")
    add_start_options(run)
    add_options(run, EngineArgs, ["simulate_accept_length"])
    run.add_argument("--batch", type=common.numbers, default=[1, 8, 32])
    run.add_argument("--kinds", default=",".join(KINDS), help="of sampling; empty for none")
    run.add_argument("--burst", type=common.numbers, default=[64, 256, 1024], help="prompt tokens")
    run.add_argument("--burst-size", type=int, default=64, help="prompts at once")
    run.add_argument("--load", type=int, default=128, help="requests; 0 for none")
    run.add_argument("--repeats", type=int, default=3)
    run.add_argument("--output", type=Path, default=None, help="append JSON lines")
    args = parser.parse_args(argv)
    args.kinds = [kind for kind in args.kinds.split(",") if kind]
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"--kinds {sorted(unknown)} are not among {list(KINDS)}")
    return args


class Clock:
    """Runs requests with random prompts and takes the time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rng = np.random.default_rng(0)

    def run(
        self, count: int, prompt: int, new: int, params: dict[str, Any], **options: Any
    ) -> tuple[float, int]:
        """Seconds for ``count`` requests, and the rounds of the longest."""
        top = self._engine.target.config.vocab_size
        prompts = self._rng.integers(top // 2, top, size=(count, prompt)).tolist()
        each = params | {"max_new_tokens": new, "ignore_eos": True}
        started = time.perf_counter()
        outputs = self._engine.generate(input_ids=prompts, sampling_params=each, **options)
        seconds = time.perf_counter() - started
        metas = [out["meta_info"] for out in outputs]
        return seconds, max(meta.get("spec_verify_ct", new - 1) for meta in metas)

    def round_ms(self, kind: str, batch: int, repeats: int) -> float:
        params, options = KINDS[kind]
        times, rounds = [], 0
        for new in (SHORT, LONG):
            self.run(batch, PROMPT, 2, params, **options)
            runs = [self.run(batch, PROMPT, new, params, **options) for _ in range(repeats)]
            times.append(statistics.median(seconds for seconds, _ in runs))
            rounds = statistics.median(count for _, count in runs) - rounds
        return (times[1] - times[0]) / rounds * 1e3


def row_of(what: str, count: int, seconds: float, tokens: int) -> dict[str, Any]:
    return {"what": what, "batch": count, "ms": seconds * 1e3, "tokens_s": tokens / seconds}


def main(name: str, argv: Sequence[str]) -> int:
    args = parse_arguments(name, argv)
    rows: list[dict[str, Any]] = []
    bandwidth = common.copy_bandwidth()
    with tempfile.TemporaryDirectory() as folder:
        options = with_preset(engine_arguments(args), args.preset, Path(folder))
        options |= {"disable_radix_cache": True, "skip_tokenizer_init": True}
        with Engine(**options) as engine:
            clock = Clock(engine)
            for batch in args.batch:
                base = None
                for kind in args.kinds:
                    found = clock.round_ms(kind, batch, args.repeats)
                    base = found if kind == "greedy" else base
                    ratio = None if base is None else found / base
                    rows.append({"what": kind, "batch": batch, "ms": found, "ratio": ratio})
            greedy = KINDS["greedy"][0]
            for size in args.burst:
                count = args.burst_size
                clock.run(count, size, 1, greedy)
                best = min(clock.run(count, size, 1, greedy)[0] for _ in range(args.repeats))
                rows.append(row_of(f"burst of {size}", count, best, count * size))
            if args.load:
                clock.run(args.burst_size, PROMPT, SHORT, greedy)
                seconds, _ = clock.run(args.load, PROMPT, 2 * LONG, greedy)
                rows.append(row_of("load", args.load, seconds, args.load * 2 * LONG))
            stats = jax.devices()[0].memory_stats() or {}
            planned = engine.get_server_info()["internal_states"][0]["memory_usage"]
            facts = common.engine_settings(engine) | {
                "peak_gb": stats.get("peak_bytes_in_use", 0) / 1e9,
                "planned_gb": sum(planned[name] for name in ("weight", "kvcache", "temporary")),
                "bandwidth_tb_s": bandwidth / 1e12,
            }
    for row in rows:
        common.append_json(args.output, row | facts)
    print(common.table_of(COLUMNS, rows))
    memory = f"peak memory {facts['peak_gb']:.2f} GB, planned {facts['planned_gb']:.2f}"
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s, {memory}")
    return 0
