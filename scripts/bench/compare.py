"""Compare decoding methods on prompts: tokens/s, accept length, ratio to plain decoding.

    specjax bench compare --case plain --case EAGLE3 --case "EAGLE3 topk=4 draft_tokens=16" \\
        --prompts scripts/data/editing_prompts.jsonl --batch 1,8,32
    specjax bench adaptive --batch 8 --num-prompts 16 --repeats 5

A case is ``plain``, or an algorithm and its options: ``steps``, ``topk``, ``draft_tokens``,
``policy`` (of adaptive speculation), or any engine argument. If a case names no algorithm, the
command line's is used. ``adaptive`` differs only in its defaults: fixed numbers of drafts and both
policies, on prompts of low and high acceptance. Alternative option names are SGLang's.

All cases of a batch size run in one process and share weights and requests. An engine gets all
requests of a phase in one call and runs --batch of them in parallel. Each phase rotates the order
of the cases, so that drift of the device's clocks affects all of them. The median repeat is shown.
Every text is compared with plain decoding. Policies are not reset, not even after the warm-up.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import common
from specjax import Engine
from specjax.cli.options import engine_arguments
from specjax.engine.args import EngineArgs
from specjax.json_file import read_json
from specjax.speculative import catalog
from specjax.speculative.algorithm import DRAFTING

PLAIN = "plain"
SHORT = {
    "steps": "speculative_num_steps",
    "topk": "speculative_eagle_topk",
    "draft_tokens": "speculative_num_draft_tokens",
}
ADAPTIVE = "speculative_adaptive"
CONFIG = f"{ADAPTIVE}_config"
CASES = [PLAIN, "steps=1", "steps=3", "steps=7", "policy=ema", "policy=budget"]
DEFAULTS: dict[str, dict[str, Any]] = {
    "compare": {"prompts": [str(common.PROMPTS)], "batch": [1, 8, 32], "num_prompts": 32},
    "adaptive": {"prompts": ["transition"], "batch": [2], "num_prompts": 8, "case": CASES},
}
DEFAULTS["compare"] |= {"output_len": 128, "warmup": 16, "ignore_eos": False}
DEFAULTS["adaptive"] |= {"output_len": 256, "warmup": 2, "ignore_eos": True}
# context tokens for a prompt with its chat template, in addition to the completion
PROMPT_LEN = 1024
ENGINE_OPTIONS = ("batch_buckets", "disable_radix_cache", "overlap", "simulate_accept_length")
COLUMNS = (
    ("case", "case", ""),
    ("prompts", "prompts", ""),
    ("temperature", "temperature", ".1f"),
    ("batch", "batch", "d"),
    ("requests", "requests", "d"),
    ("seconds", "median_seconds", ".3f"),
    ("tokens/s", "output_throughput", ".0f"),
    ("/ plain", "speedup", ".3f"),
    ("/ best fixed", "over_best", ".3f"),
    ("/ worst fixed", "over_worst", ".3f"),
    ("accept", "accept_length", ".2f"),
    ("round ms", "round_ms", ".2f"),
    ("latency s", "mean_latency", ".3f"),
    ("wasted", "wasted_drafts", "d"),
    ("equal", "equal_share", ".3f"),
)
Phases = Mapping[str, Sequence[list[int]]]
PhaseRun = tuple[float, list[dict[str, Any]]]  # seconds and results of one run of a phase


def parse_arguments(name: str, argv: Sequence[str]) -> argparse.Namespace:
    parser = common.engine_parser(name, __doc__, ENGINE_OPTIONS)
    add = parser.add_argument_group("run").add_argument
    add("--case", action="append", help="decoding method; repeatable (default of compare: plain)")
    add(
        "--prompts",
        "--workload",
        action="append",
        help="JSON lines file, or a built-in set (low, high or transition acceptance); repeatable",
    )
    add("--num-prompts", "--requests", type=int, help="requests per phase")
    add("--output-len", "--max-tokens", type=int, help="maximum tokens of a completion")
    degrees = "comma-separated list of temperatures (default: 0)"
    add("--temperatures", type=common.list_of(float), default=[0.0], help=degrees)
    ignored = "ignore end tokens, so that all completions have the same length"
    add("--ignore-eos", action=argparse.BooleanOptionalAction, help=ignored)
    add("--batch", "--concurrency", type=common.list_of(int), help="requests in parallel")
    median = "runs per phase; the median is reported (default: 1)"
    add("--repeats", type=int, default=1, help=median)
    add("--warmup", type=int, help="warm-up requests per phase, not measured")
    rows = "file to append the results to, one JSON line per row"
    add("--output", "--json", type=Path, default=None, metavar="FILE", help=rows)
    args = argparse.Namespace(**DEFAULTS[name] | vars(parser.parse_args(argv)))
    # all cases are compared with plain decoding
    args.case = list(dict.fromkeys([PLAIN, *getattr(args, "case", [])]))
    args.seed = getattr(args, "seed", 1)
    common.check_at_least(parser, args, 1, "num_prompts", "repeats", "output_len", "batch")
    common.check_at_least(parser, args, 0, "warmup")
    return args


def options_of(case: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the engine arguments of the command line with those of a case."""
    name, values = common.pairs_of("--case", case)
    extra = {SHORT.get(key, key): value for key, value in values.items()}
    policy = extra.pop("policy", None)
    # drafting options of the command line apply only to cases without an algorithm
    left_out = DRAFTING if name else ADAPTIVE
    base = {key: value for key, value in options.items() if not key.startswith(left_out)}
    if name:
        base["speculative_algorithm"] = catalog.PLAIN if name == PLAIN else name
    if policy is not None:
        config = read_json(Path(options[CONFIG]), is_strict=True) if CONFIG in options else {}
        base |= {ADAPTIVE: True, CONFIG: config | {"policy": policy}}
    return base | extra


def answer(
    args: argparse.Namespace, engine: Any, prompts: Sequence[list[int]], temperature: float
) -> PhaseRun:
    """Run requests in one call; request i has the seed ``args.seed + i``."""
    shared = {"temperature": temperature, "ignore_eos": args.ignore_eos}
    shared["max_new_tokens"] = args.output_len
    sampling = [shared | {"sampling_seed": args.seed + i} for i in range(len(prompts))]
    started = time.perf_counter()
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
    return time.perf_counter() - started, outputs


def measure(
    args: argparse.Namespace, engines: Mapping[str, Any], phases: Phases, temperature: float
) -> dict[str, list[list[PhaseRun]]]:
    """Run all phases with all cases; return the runs of each repeat by case."""
    cases = list(engines)
    runs: dict[str, list[list[PhaseRun]]] = {case: [] for case in cases}
    warm = [prompt for phase in phases.values() for prompt in phase[: args.warmup]]
    for engine in engines.values() if warm else ():
        answer(args, engine, warm[:1], temperature)
        answer(args, engine, warm, temperature)
    with tqdm(
        total=args.repeats * len(phases) * len(cases), unit="run", disable=None, file=sys.stderr
    ) as bar:
        for repeat in range(args.repeats):
            for case in cases:
                engines[case].flush_cache()
                runs[case].append([])
            for i, (name, prompts) in enumerate(phases.items()):
                shift = (repeat + i) % len(cases)
                for case in cases[shift:] + cases[:shift]:
                    bar.set_description(f"{case}, {name}")
                    runs[case][-1].append(answer(args, engines[case], prompts, temperature))
                    bar.update()
    return runs


def ids_of(runs: Sequence[PhaseRun]) -> list[list[int]]:
    return [output["output_ids"] for _, outputs in runs for output in outputs]


def metrics(repeats: Sequence[Sequence[PhaseRun]], truth: Sequence[list[int]]) -> dict[str, Any]:
    """Compute the metrics of consecutive phases in the median repeat.

    ``equal_share`` is the share of requests whose tokens equal ``truth``. ``mean_latency``
    starts when a request is admitted. Without speculation, a round is one token.
    """
    totals = [sum(seconds for seconds, _ in runs) for runs in repeats]
    seconds = statistics.median_low(totals)
    runs = repeats[totals.index(seconds)]
    metas = [output["meta_info"] for _, outputs in runs for output in outputs]
    tokens = sum(meta["completion_tokens"] for meta in metas)
    by_steps: Counter[str] = Counter()
    for meta in metas:
        by_steps.update(meta.get("spec_rounds_by_steps", {}))
    decoding = sum(meta["e2e_latency"] - (meta["time_to_first_token"] or 0.0) for meta in metas)
    latencies = [meta["e2e_latency"] - (meta["queue_time"] or 0.0) for meta in metas]
    drafts = common.acceptance(metas)
    return {
        "requests": len(metas),
        "seconds": totals,
        "median_seconds": seconds,
        "output_tokens": tokens,
        "output_throughput": tokens / seconds,
        "mean_latency": statistics.fmean(latencies),
        "round_ms": 1e3 * decoding / max(1, by_steps.total() or tokens - len(metas)),
        "accept_length": drafts["accept_length_pooled"],
        "verify_calls": drafts["verify_calls"],
        "wasted_drafts": drafts["proposed_drafts"] - drafts["correct_drafts"],
        "row_rounds_by_steps": dict(sorted(by_steps.items(), key=lambda item: int(item[0]))),
        "equal_share": sum(map(list.__eq__, ids_of(runs), truth)) / len(metas),
    }


def add_ratios(rows: Mapping[str, dict[str, Any]], adaptive: Sequence[str]) -> None:
    """Add throughput ratios: all cases to plain decoding, and adaptive cases to fixed cases."""
    speeds = {case: row["output_throughput"] for case, row in rows.items()}
    fixed = [speed for case, speed in speeds.items() if case not in (PLAIN, *adaptive)]
    for case, row in rows.items():
        row["speedup"] = speeds[case] / speeds[PLAIN]
        if case in adaptive and fixed:
            row["over_best"] = speeds[case] / max(fixed)
            row["over_worst"] = speeds[case] / min(fixed)


def rows_of(
    args: argparse.Namespace, engines: Mapping[str, Any], phases: Phases, truths: dict[Any, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one batch size: one per temperature, phase (or overall) and case."""
    spans = {name: slice(i, i + 1) for i, name in enumerate(phases)}
    spans |= {"overall": slice(None)} if len(phases) > 1 else {}
    settings = {case: common.settings_of(x.get_server_info()) for case, x in engines.items()}
    for temperature in args.temperatures:
        runs = measure(args, engines, phases, temperature)
        states = {
            case: state
            for case, engine in engines.items()
            if (state := engine.get_server_info()["internal_states"][0].get("adaptive"))
        }
        for name, span in spans.items():
            truth = truths.setdefault((temperature, name), ids_of(runs[PLAIN][0][span]))
            rows = {case: metrics([run[span] for run in x], truth) for case, x in runs.items()}
            add_ratios(rows, list(states))
            for case, row in rows.items():
                labels = {"case": case, "prompts": name, "temperature": temperature}
                labels |= {"batch": settings[case]["max_running_requests"]}
                yield labels | row | settings[case] | {"policy": states.get(case)}


def main(name: str, argv: Sequence[str]) -> int:
    args = parse_arguments(name, argv)
    shared = {"context_length": args.output_len + PROMPT_LEN} | engine_arguments(args)
    rows: list[dict[str, Any]] = []
    phases: dict[str, list[list[int]]] = {}
    truths: dict[Any, Any] = {}
    options = {case: options_of(case, shared) for case in args.case}
    # a bad case fails here, before loading; with other acceptance rules a seed gives another text
    is_exact = all(EngineArgs(**x).acceptance.is_coupled for x in options.values())
    with ExitStack() as outer:
        lender: Any = None  # all engines share its weights
        for batch in args.batch:
            with ExitStack() as stack:
                engines: dict[str, Any] = {}
                for case, values in options.items():
                    values = values | {"max_running_requests": batch, "share_weights_with": lender}
                    engines[case] = (stack if lender else outer).enter_context(Engine(**values))
                    lender = lender or engines[case]
                for prompts in () if phases else args.prompts:
                    phases |= common.phases_of(prompts, lender.tokenizer, args.num_prompts)
                for row in rows_of(args, engines, phases, truths):
                    rows.append(row | common.software())
                    common.append_json(args.output, rows[-1])
    print(common.table_of([c for c in COLUMNS if any(row.get(c[1]) for row in rows)], rows))
    for row in rows:
        if row["policy"] and row["prompts"] == rows[-1]["prompts"]:
            switches, rounds = row["policy"]["switches"], row["row_rounds_by_steps"]
            print(f"{row['case']}: {switches} switches, rounds by drafted tokens {rounds}")
    print("{model}, {dtype}, {device_kind}".format(**rows[0]))
    is_equal = all(row["equal_share"] == 1 for row in rows)
    return int(not is_equal and is_exact and rows[0]["dtype"] == "float32")
