"""Measures the throughput of engines that get all requests at once.

    python scripts/bench throughput --dataset-name jsonl --num-prompts 64 \\
        --modes spec,plain,spec_sync,plain_sync --batch 1,4,16,64
    python scripts/bench_adaptive_speculative.py --workload transition --concurrency 8 \\
        --repeats 3 --json figures.json --plot tiers.png

The flags are those of SGLang's benchmark of this name where it has them, and those of the engine.
The second script differs in its defaults: adaptive policies beside fixed numbers of drafts, on
prompts of low and high acceptance. Where an option has two names, the second one is that script's.

Modes: ``plain`` (no drafts), ``spec`` (what the options say), numbers of drafted tokens, and the
adaptive policies ``cost`` and ``ema``. With ``_sync`` behind it a mode waits for every round; else
it runs one round ahead on a GPU. All modes of a batch size run in one process, over the same
weights and requests, each phase in another order, so that a drift of the device's clocks meets
all; medians of the repeats count. A policy keeps what it knows, that of the warm-up included.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from bench import common
from bench.data import DATASETS, PROMPTS, WORKLOADS, BenchRequest, answers, load_phases
from specjax.cli.options import add_options, engine_arguments
from specjax.engine.args import EngineArgs
from specjax.json_file import read_json

POLICIES = ("cost", "ema")
ADAPTIVE_DEFAULTS = {
    "dataset_name": "transition",
    "num_prompts": 8,
    "output_len": 256,
    "modes": ["plain", "1", "3", "7", *POLICIES],
    "batch": [2],
    "warmup": 2,
}
# tokens of context for a prompt with its chat template, beside the completion
PROMPT_ROOM = 256
WARM_UP_TOKENS = 64
Phases = Mapping[str, Sequence[BenchRequest]]

# heading, key of a row, format
COLUMNS = (
    ("mode", "mode", ""),
    ("batch", "max_running_requests", "d"),
    ("requests", "successful_requests", "d"),
    ("seconds", "total_latency", ".2f"),
    ("in tok", "total_input_tokens", "d"),
    ("out tok", "total_output_tokens", "d"),
    ("out tok/s", "output_throughput", ".1f"),
    ("latency s", "mean_latency", ".3f"),
    ("accept", "accept_length", ".2f"),
    ("wasted", "wasted_drafts", "d"),
    ("retracted", "num_retractions", "d"),
    ("cached", "cached_tokens", "d"),
    ("equal", "equal_share", ".3f"),
)
RATIO_COLUMNS = (
    ("/ best static", "best_static", ".3f"),
    ("/ worst static", "worst_static", ".3f"),
    ("/ plain", "plain", ".3f"),
)


class PhaseRun(NamedTuple):
    """What one run of a phase took and gave."""

    seconds: float
    outputs: list[dict[str, Any]]


def parse_arguments(name: str, argv: Sequence[str]) -> argparse.Namespace:
    parser = common.engine_parser(name, __doc__)
    more = parser.add_argument_group("more of the engine")
    add_options(more, EngineArgs, ["batch_buckets", "disable_radix_cache"])
    add = parser.add_argument
    add("--dataset-name", "--workload", choices=DATASETS, default="jsonl")
    add("--dataset-path", type=Path, default=PROMPTS, help="of jsonl")
    add("--num-prompts", "--requests", type=int, default=1000, help="of each phase")
    add("--jsonl-output-len", "--max-tokens", dest="output_len", type=int, default=128)
    add("--temperature", type=float, default=0.0)
    add("--modes", type=lambda text: text.split(","), default=None)
    add("--batch", "--concurrency", type=common.numbers, default=[None], help="requests at once")
    add("--repeats", type=int, default=1, help="runs of a phase; medians count")
    add("--warmup", type=int, default=16, help="requests of each phase before")
    add("--json", type=Path, default=None, metavar="FILE", help="append figures, a line a batch")
    add("--plot", type=Path, default=None, metavar="PNG", help="needs specjax[bench]")
    if name == "adaptive":
        parser.set_defaults(**ADAPTIVE_DEFAULTS)
    args = parser.parse_args(argv)
    is_plain = args.speculative_algorithm is None
    args.modes = args.modes or ["plain" if is_plain else "spec"]
    args.seed = getattr(args, "seed", 1)
    kinds = [mode.removesuffix("_sync") for mode in args.modes]
    bad = [k for k in kinds if k not in ("plain", "spec", *POLICIES) and not _is_steps(k)]
    if bad or len(set(args.modes)) < len(args.modes):
        parser.error(
            f"--modes {args.modes} must be different ones of plain, spec, cost, ema and numbers "
            "from 1, _sync behind them or not"
        )
    if is_plain and set(kinds) != {"plain"}:
        parser.error(f"--modes {args.modes} and --speculative-algorithm none exclude each other")
    common.check_at_least(parser, args, 1, "num_prompts", "repeats", "output_len")
    common.check_at_least(parser, args, 0, "warmup")
    if len(args.batch) > 1 and args.plot:
        parser.error(f"--plot takes one batch size, not --batch {args.batch}")
    common.check_plot(parser, args.plot)
    return args


def _is_steps(mode: str) -> bool:
    return mode.isascii() and mode.isdecimal() and not mode.startswith("0")


def _make_engine(args: argparse.Namespace, mode: str, batch: int | None, lender: Any) -> Any:
    """The engine of a mode; the weights come from ``lender`` where there is one."""
    from specjax import Engine

    options = engine_arguments(args)
    if args.dataset_name in WORKLOADS and batch is not None:
        context = options.setdefault("context_length", args.output_len + PROMPT_ROOM)
        options.setdefault("max_total_tokens", 2 * batch * context)
    kind = mode.removesuffix("_sync")
    unused = {"plain": "speculative_ draft", "spec": "-"}.get(kind, "speculative_adaptive").split()
    path = options.get("speculative_adaptive_config")
    options = {k: v for k, v in options.items() if not k.startswith(tuple(unused))}
    if kind in POLICIES:
        config = {} if path is None else read_json(Path(path), is_strict=True)
        options["speculative_adaptive"] = True
        options["speculative_adaptive_config"] = config | {"policy": kind}
    elif kind not in ("plain", "spec"):
        options["speculative_num_steps"] = int(kind)
    overlap = False if mode.endswith("_sync") else None
    return Engine(**options, max_running_requests=batch, overlap=overlap, share_weights_with=lender)


def _warm_up(engine: Any, phases: Phases, args: argparse.Namespace) -> None:
    """Answers the first requests of each phase briefly, one alone and all together."""
    requests = [
        replace(request, output_len=min(request.output_len, WARM_UP_TOKENS))
        for phase in phases.values()
        for request in phase[: args.warmup]
    ]
    if requests:
        answers(engine, requests[:1], args.temperature, args.seed)
        answers(engine, requests, args.temperature, args.seed)


def _measure(engines: Mapping[str, Any], phases: Phases, args: argparse.Namespace) -> Any:
    """Runs all phases with all modes: for each mode the runs of each repeat."""
    modes = list(args.modes)
    runs: dict[str, list[list[PhaseRun]]] = {mode: [] for mode in modes}
    for engine in engines.values():
        _warm_up(engine, phases, args)
    with tqdm(total=args.repeats * len(phases) * len(modes), unit="run", file=sys.stderr) as bar:
        for repeat in range(args.repeats):
            for mode in modes:
                engines[mode].flush_cache()
                runs[mode].append([])
            for i, (name, requests) in enumerate(phases.items()):
                shift = (repeat + i) % len(modes)
                for mode in modes[shift:] + modes[:shift]:
                    bar.set_description(f"{mode}, {name}")
                    start = time.perf_counter()
                    outputs = answers(engines[mode], requests, args.temperature, args.seed)
                    runs[mode][-1].append(PhaseRun(time.perf_counter() - start, outputs))
                    bar.update()
    return runs


def _output_ids(runs: Sequence[PhaseRun]) -> list[list[int]]:
    return [output["output_ids"] for run in runs for output in run.outputs]


def figures(runs: Sequence[PhaseRun], reference: Sequence[list[int]]) -> dict[str, Any]:
    """Figures of phases that ran one after the other; throughputs are over all their time.

    ``mean_latency`` is from the moment a request is admitted, ``equal_share`` the share of the
    requests whose tokens are those of ``reference``.
    """
    seconds = sum(run.seconds for run in runs)
    metas = [output["meta_info"] for run in runs for output in run.outputs]
    done = [meta for meta in metas if meta["finish_reason"]["type"] != "abort"]
    ids = _output_ids(runs)
    rounds: Counter[str] = Counter()
    for meta in metas:
        rounds.update(meta.get("spec_rounds_by_steps", {}))

    def total(name: str) -> int:
        return sum(meta.get(name, 0) for meta in metas)

    drafts = common.acceptance(metas)
    latencies = [meta["e2e_latency"] - (meta["queue_time"] or 0.0) for meta in done]
    return {
        "successful_requests": len(done),
        "total_latency": seconds,
        "total_input_tokens": total("prompt_tokens"),
        "total_output_tokens": total("completion_tokens"),
        "num_retractions": total("num_retractions"),
        "cached_tokens": total("cached_tokens"),
        "output_throughput": total("completion_tokens") / seconds,
        "accept_length": drafts["accept_length_pooled"],
        "accept_rate": drafts["accept_rate"],
        "verify_calls": drafts["verify_calls"],
        "wasted_drafts": drafts["proposed_drafts"] - drafts["correct_drafts"],
        "row_rounds_by_steps": dict(sorted(rounds.items(), key=lambda item: int(item[0]))),
        "mean_latency": statistics.fmean(latencies) if latencies else None,
        "equal_share": sum(map(list.__eq__, ids, reference)) / len(ids),
    }


def median_run(repeats: Sequence[Sequence[PhaseRun]]) -> Sequence[PhaseRun]:
    ordered = sorted(repeats, key=lambda runs: sum(run.seconds for run in runs))
    return ordered[(len(ordered) - 1) // 2]


def ratios(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Throughput of each adaptive mode over the best and worst fixed tier and over plain decoding.

    Plain decoding is none of the fixed tiers, all of which draft.
    """
    speeds = {mode: row["output_throughput"] for mode, row in rows.items()}
    fixed = [speed for mode, speed in speeds.items() if _is_steps(mode)]
    others = {"best_static": max(fixed), "worst_static": min(fixed)} if fixed else {}
    others |= {"plain": speeds["plain"]} if "plain" in speeds else {}
    return {
        mode: {name: speeds[mode] / other for name, other in others.items()}
        for mode in POLICIES
        if mode in speeds
    }


def _summarize(
    phases: Phases, runs: Mapping[str, list[list[PhaseRun]]], reference: Sequence[PhaseRun]
) -> dict[str, Any]:
    """Figures of all modes, phase by phase and over everything, as JSON values."""

    def rows_of(part: slice) -> dict[str, Any]:
        ids = _output_ids(reference[part])
        return {
            mode: figures(median_run([run[part] for run in repeats]), ids)
            for mode, repeats in runs.items()
        }

    parts = {name: slice(i, i + 1) for i, name in enumerate(phases)} if len(phases) > 1 else {}
    rows = {name: rows_of(part) for name, part in (parts | {"overall": slice(None)}).items()}
    return {
        "rows": rows,
        "ratios": {name: ratios(by_mode) for name, by_mode in rows.items()},
        "seconds": {
            mode: [[run.seconds for run in repeat] for repeat in repeats]
            for mode, repeats in runs.items()
        },
    }


def _describe_settings(args: argparse.Namespace, engine: Any) -> dict[str, Any]:
    names = ["dataset_name", "num_prompts", "temperature", "seed", "repeats", "modes"]
    names += ["warmup", "output_len"]
    return {
        **{name: getattr(args, name) for name in names},
        "dataset_file": args.dataset_path.name if args.dataset_name == "jsonl" else None,
        **common.engine_settings(engine),
    }


def _show(result: Mapping[str, Any]) -> None:
    """Prints tables of the phases where there are several, and of the whole run."""
    columns = COLUMNS + (RATIO_COLUMNS if result["policies"] else ())
    for name, rows in result["rows"].items():
        compared = result["ratios"][name]
        lines = [
            settings | rows[mode] | compared.get(mode, {}) | {"mode": mode}
            for mode, settings in result["settings"].items()
        ]
        print(f"{name}\n\n{common.table_of(columns, lines)}\n")
    for mode, policy in result["policies"].items():
        rounds = result["rows"]["overall"][mode]["row_rounds_by_steps"]
        print(f"{mode}: {policy['switches']} switches, row rounds by drafted tokens {rounds}")


def main(name: str, argv: Sequence[str]) -> int:
    args = parse_arguments(name, argv)
    first, shares = None, []
    phases: Phases = {}
    reference: list[PhaseRun] = []
    with ExitStack() as kept:
        for batch in args.batch:
            with ExitStack() as stack:
                engines: dict[str, Any] = {}
                # an engine with a draft comes first and stays: the others read its weights
                for mode in sorted(args.modes, key=lambda mode: mode.startswith("plain")):
                    engine = _make_engine(args, mode, batch, first)
                    (kept if first is None else stack).enter_context(engine)
                    first, engines[mode] = first or engine, engine
                phases = phases or load_phases(args, first)
                runs = _measure(engines, phases, args)
                settings = {mode: _describe_settings(args, engines[mode]) for mode in args.modes}
                states = {
                    mode: engine.get_server_info()["internal_states"][0].get("adaptive")
                    for mode, engine in engines.items()
                }
            reference = reference or runs[args.modes[0]][0]
            result = _summarize(phases, runs, reference) | {
                "policies": {mode: state for mode, state in states.items() if state},
                "settings": settings,
            }
            common.append_json(args.json, result)
            shares += [row["equal_share"] for row in result["rows"]["overall"].values()]
            _show(result)
    if args.plot is not None:
        from bench.plot import draw

        draw(result, args.plot)
    if len(shares) > 1:
        print(f"outputs equal to those of the first row: {min(shares):.1%} or more in every row")
    return int(min(shares) < 1 and settings[args.modes[0]]["dtype"] == "float32")
