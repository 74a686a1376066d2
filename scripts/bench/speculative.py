"""Finds where drafts pay: a grid of steps, branches, rows of a verify and requests at once.

    python scripts/bench_speculative.py --steps 1,3,5 --topk 1,4 --draft-tokens 4,8,16 \\
        --batch 1,4,16 --num-prompts 32 --plot grid.png

Prompts are real ones, answered in groups of the batch size, all with as many new tokens. Of trees
those sizes are measured that there are: a chain has one row more than its steps, a tree at most its
candidates and the root. Plain decoding comes first; every text is compared with its.
"""

import argparse
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
from specjax.speculative.drafting import most_nodes
from specjax.types import DraftShape

PLAIN = DraftShape.chain(0)
COLUMNS = (
    ("steps", "steps", "d"),
    ("topk", "topk", "d"),
    ("rows", "nodes", "d"),
    ("batch", "batch", "d"),
    ("tokens/s", "output_throughput", ".1f"),
    ("/ plain", "speedup", ".3f"),
    ("accept", "accept_length", ".2f"),
    ("round ms", "round_ms", ".2f"),
    ("equal", "equal_share", ".3f"),
)


def parse_arguments(door: str, argv: Sequence[str]) -> argparse.Namespace:
    parser = common.engine_parser(door, __doc__)
    add = parser.add_argument
    add("--steps", type=common.numbers, default=[1, 3, 5])
    add("--topk", type=common.numbers, default=[1, 4], help="branches a level; 1 is a chain")
    add("--draft-tokens", type=common.numbers, default=[4, 8, 16], help="rows of a verify")
    add("--batch", type=common.numbers, default=[1, 4, 16], help="requests at once")
    add("--prompts", type=Path, default=PROMPTS, help="JSON lines")
    add("--num-prompts", type=int, default=16, help="of each batch size, at least one batch")
    add("--output-len", type=int, default=128)
    add("--temperature", type=float, default=0.0)
    add("--json", type=Path, default=None, metavar="FILE", help="append JSON lines")
    add("--plot", type=Path, default=None, metavar="PNG", help="needs specjax[bench]")
    args = parser.parse_args(argv)
    args.seed = getattr(args, "seed", 1)
    for name in ("steps", "topk", "draft_tokens", "batch"):
        if min(getattr(args, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    common.check_at_least(parser, args, 1, "num_prompts", "output_len")
    common.check_plot(parser, args.plot)
    return args


def grid(steps: Sequence[int], topk: Sequence[int], draft_tokens: Sequence[int]) -> list[Any]:
    """Plain decoding, and every shape that there is."""
    shapes = [PLAIN]
    for s in steps:
        for k in topk:
            sizes = [t for t in draft_tokens if 2 <= t <= most_nodes(s, k)]
            shapes += [DraftShape(s, k, t) for t in ([s + 1] if k == 1 else sizes)]
    return list(dict.fromkeys(shapes))


def make_engine(args: argparse.Namespace, shape: DraftShape, lender: Any) -> Any:
    from specjax import Engine

    options = engine_arguments(args)
    if shape == PLAIN:
        options = {k: v for k, v in options.items() if not k.startswith(("speculative", "draft"))}
    else:
        options["speculative_num_steps"] = shape.steps
        options["speculative_eagle_topk"] = shape.topk
        options["speculative_num_draft_tokens"] = shape.nodes
    sizes = {"max_running_requests": max(args.batch), "batch_buckets": sorted(set(args.batch))}
    return Engine(**(sizes | options), share_weights_with=lender)


def answer(
    engine: Any,
    requests: Sequence[BenchRequest],
    batch: int,
    *,
    temperature: float,
    seed: int,
    ignore_eos: bool = True,
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


def main(door: str, argv: Sequence[str]) -> int:
    args = parse_arguments(door, argv)
    shapes = grid(args.steps, args.topk, args.draft_tokens)
    rows: list[dict[str, Any]] = []
    truths: dict[int, dict[str, Any]] = {}
    counts = {batch: max(args.num_prompts // batch, 1) * batch for batch in args.batch}
    requests: list[BenchRequest] = []
    how = {"temperature": args.temperature, "seed": args.seed}
    with ExitStack() as kept, tqdm(total=len(shapes), unit="shape", file=sys.stderr) as bar:
        lender = None
        for shape in shapes:
            bar.set_description("/".join(map(str, shape)))
            with ExitStack() as stack:
                engine = make_engine(args, shape, lender)
                (stack if lender else kept).enter_context(engine)
                lender = lender or engine
                requests = requests or jsonl_requests(
                    args.prompts, max(counts.values()), engine.tokenizer, args.output_len
                )
                for batch in args.batch:
                    count = counts[batch]
                    answer(engine, requests[:batch], batch, **how)  # what is made on first use
                    engine.flush_cache()
                    row = answer(engine, requests[:count], batch, **how)
                    truth = truths.setdefault(batch, row)
                    equal = map(list.__eq__, row["output_ids"], truth["output_ids"])
                    row |= shape._asdict() | {
                        "speedup": row["output_throughput"] / truth["output_throughput"],
                        "equal_share": sum(equal) / count,
                    }
                    rows.append(row)
            bar.update()
        settings = common.engine_settings(lender)
        # other ways to accept give a seed another text
        is_exact = args.temperature == 0 or engine.args.acceptance.is_coupled
    for row in rows:
        del row["output_ids"]
        common.append_json(args.json, row | {"temperature": args.temperature} | settings)
    print(common.table_of(COLUMNS, rows))
    print(f"{settings['model']}, {settings['dtype']}, {settings['device_kind']}")
    if args.plot is not None:
        from bench.plot import draw_grid

        draw_grid(rows, settings, args.plot)
    is_equal = all(row["equal_share"] == 1 for row in rows)
    return int(not is_equal and is_exact and settings["dtype"] == "float32")
