"""Compares ways to draft on prompts: tokens/s and accept length against plain decoding.

    python scripts/bench compare --case EAGLE3 --case "EAGLE3 topk=4 draft_tokens=16" \\
        --case NGRAM --prompts scripts/data/editing_prompts.jsonl --batch 1,8,32

A case is an algorithm and options of it: ``steps``, ``topk``, ``draft_tokens`` or the name of any
engine argument, with a JSON value or a text. Plain decoding comes first; every text is compared
with its.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import common
from bench.data import PROMPTS, BenchRequest, answers, jsonl_requests
from specjax.cli.options import engine_arguments
from specjax.engine.args import EngineArgs
from specjax.speculative.algorithm import DRAFTING

PLAIN = "plain"
SHORT = {
    "steps": "speculative_num_steps",
    "topk": "speculative_eagle_topk",
    "draft_tokens": "speculative_num_draft_tokens",
}
COLUMNS = (
    ("algorithm", "case", ""),
    ("prompts", "prompts", ""),
    ("temperature", "temperature", ".1f"),
    ("batch", "batch", "d"),
    ("tokens/s", "output_throughput", ".0f"),
    ("/ plain", "speedup", ".2f"),
    ("accept", "accept_length", ".2f"),
    ("round ms", "round_ms", ".2f"),
    ("equal", "equal_share", ".3f"),
)


def floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def parse_arguments(name: str, argv: Sequence[str]) -> argparse.Namespace:
    parser = common.engine_parser(name, __doc__)
    add = parser.add_argument
    add("--case", action="append", required=True, help="an algorithm and its options; repeatable")
    add("--batch", type=common.numbers, default=[1, 8, 32], help="requests at once")
    add("--prompts", type=Path, action="append", help="JSON lines; repeatable")
    add("--num-prompts", type=int, default=32, help="of each batch size, at least one batch")
    add("--output-len", type=int, default=128)
    add("--temperatures", type=floats, default=[0.0])
    add("--ignore-eos", action="store_true", default=False, help="all with as many new tokens")
    add("--json", type=Path, default=None, metavar="FILE", help="append JSON lines")
    args = parser.parse_args(argv)
    args.prompts = getattr(args, "prompts", [PROMPTS])
    common.check_at_least(parser, args, 1, "num_prompts", "output_len")
    return args


def options_of(case: str) -> dict[str, Any]:
    """Engine arguments of a case. ValueError for an option without a value."""
    if case == PLAIN:
        return {}
    name, *pairs = case.split()
    options: dict[str, Any] = {"speculative_algorithm": name}
    for pair in pairs:
        key, found, value = pair.partition("=")
        if not found:
            raise ValueError(f"--case {case!r}: {pair!r} must be option=value")
        try:
            options[SHORT.get(key, key)] = json.loads(value)
        except ValueError:
            options[SHORT.get(key, key)] = value
    return options


def answer(
    engine: Any,
    requests: Sequence[BenchRequest],
    batch: int,
    *,
    temperature: float,
    seed: int,
    ignore_eos: bool,
) -> dict[str, Any]:
    """Figures of requests that run ``batch`` at once, and their tokens."""
    started = time.perf_counter()
    outputs: list[dict[str, Any]] = []
    for first in range(0, len(requests), batch):
        group = requests[first : first + batch]
        outputs += answers(engine, group, temperature, seed + first, ignore_eos=ignore_eos)
    seconds = time.perf_counter() - started
    metas = [output["meta_info"] for output in outputs]
    # without speculation a round is a token; the first one is that of the prompt
    rounds = [
        sum(meta.get("spec_rounds_by_steps", {}).values()) or meta["completion_tokens"] - 1
        for meta in metas
    ]
    decoding = [meta["e2e_latency"] - meta["time_to_first_token"] for meta in metas]
    return {
        "batch": batch,
        "output_throughput": sum(meta["completion_tokens"] for meta in metas) / seconds,
        "accept_length": common.acceptance(metas)["accept_length_pooled"],
        "round_ms": 1e3 * sum(decoding) / max(1, sum(rounds)),
        "output_ids": [output["output_ids"] for output in outputs],
    }


def main(name: str, argv: Sequence[str]) -> int:
    from specjax import Engine

    args = parse_arguments(name, argv)
    given = engine_arguments(args)
    common_options = {k: v for k, v in given.items() if not k.startswith(DRAFTING)}
    sizes = {"max_running_requests": max(args.batch), "batch_buckets": sorted(set(args.batch))}
    cases = [sizes | common_options | options_of(case) for case in [PLAIN, *args.case]]
    # before the minutes of the first; other ways to accept give a seed another text
    checked = [EngineArgs(**options) for options in cases]
    is_exact = all(one.acceptance.is_coupled for one in checked)
    rows: list[dict[str, Any]] = []
    truths: dict[Any, dict[str, Any]] = {}
    with ExitStack() as kept:
        lender: Any = None
        named = zip([PLAIN, *args.case], cases, strict=True)
        for case, options in tqdm(named, total=len(cases), unit="engine", file=sys.stderr):
            with ExitStack() as stack:
                engine = Engine(**options, share_weights_with=lender)
                (stack if lender else kept).enter_context(engine)
                lender = lender or engine
                settings = common.engine_settings(engine)
                for row, truth in measured(args, engine, truths):
                    equal = map(list.__eq__, row["output_ids"], truth["output_ids"])
                    row |= settings | {
                        "case": case,
                        "speedup": row["output_throughput"] / truth["output_throughput"],
                        "equal_share": sum(equal) / len(truth["output_ids"]),
                    }
                    rows.append(row)
    for row in rows:
        del row["output_ids"]
        common.append_json(args.json, row)
    print(common.table_of(COLUMNS, rows))
    print(f"{settings['model']}, {settings['dtype']}, {settings['device_kind']}")
    is_equal = all(row["equal_share"] == 1 for row in rows)
    return int(not is_equal and is_exact and settings["dtype"] == "float32")


def measured(args: argparse.Namespace, engine: Any, truths: dict[Any, Any]) -> Any:
    """Figures of one engine, and those of plain decoding of the same requests."""
    for path in args.prompts:
        most = max(max(args.num_prompts // batch, 1) * batch for batch in args.batch)
        requests = jsonl_requests(path, most, engine.tokenizer, args.output_len)
        for temperature in args.temperatures:
            for batch in args.batch:
                count = max(args.num_prompts // batch, 1) * batch
                how: Any = {"temperature": temperature, "seed": 1, "ignore_eos": args.ignore_eos}
                answer(engine, requests[:batch], batch, **how)  # what is made on first use
                engine.flush_cache()
                row = answer(engine, requests[:count], batch, **how)
                row |= {"prompts": path.stem, "temperature": temperature}
                yield row, truths.setdefault((path, temperature, batch), row)
