"""Compares adaptive speculation with fixed step counts on prompts of low and high acceptance.

    python scripts/bench_adaptive_speculative.py --workload transition --concurrency 8 \\
        --repeats 3 --json figures.json --plot tiers.png

All modes run in one process, over the same weights and prompts, each with an engine of its own that
is warmed up first. Each phase is run by all modes before the next one begins, each time in another
order, so that a drift of the device's clocks meets all of them; medians of the repeats count.
`--modes` takes `plain` (no drafts), fixed numbers of drafted tokens, and the adaptive policies
`cost` and `ema`. A policy keeps what it knows from one phase to the next and from one repeat to the
next.

The exit status is 1 where float32 texts differ between modes, and 2 for bad input.
"""

import argparse
import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specjax.bench_adaptive import (
    POLICIES,
    PROMPTS,
    WORKLOADS,
    Phase,
    PhaseRun,
    RecordingPolicy,
    is_steps,
    make_phases,
    summarize,
)
from specjax.bench_adaptive_plot import draw
from specjax.cli.errors import report_error
from specjax.cli.options import (
    add_batch_buckets_option,
    add_memory_options,
    add_model_options,
    engine_arguments,
)
from specjax.json_file import read_json
from specjax.markdown import markdown_table

DEFAULT_MODES = ("plain", "1", "3", "7", *POLICIES)
# tokens of context for a prompt with its chat template, beside --max-tokens
PROMPT_ROOM = 256
WARM_UP_TOKENS = 128
HEADINGS = (
    "tok/s",
    "latency s",
    "accept len",
    "wasted",
    "/ best static",
    "/ worst static",
    "/ plain",
)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], argument_default=argparse.SUPPRESS
    )
    add_model_options(parser.add_argument_group("model"))
    speculation = parser.add_argument_group("speculation")
    speculation.add_argument(
        "--speculative-algorithm", choices=("EAGLE3", "EAGLE"), default="EAGLE3"
    )
    speculation.add_argument(
        "--speculative-num-steps", type=int, metavar="N", help="where the policies begin"
    )
    speculation.add_argument(
        "--speculative-adaptive-config",
        type=Path,
        default=None,
        metavar="FILE",
        help="of both policies; its key policy is left out",
    )
    speculation.add_argument("--draft-rope-theta", type=float, metavar="X")
    memory = parser.add_argument_group("memory and start-up")
    add_memory_options(memory)
    add_batch_buckets_option(memory)
    data = parser.add_argument_group("requests")
    data.add_argument("--workload", choices=tuple(WORKLOADS), default="transition")
    data.add_argument("--requests", type=int, default=8, help="of each phase (default: 8)")
    data.add_argument(
        "--concurrency", type=int, default=2, help="requests decoded at once (default: 2)"
    )
    data.add_argument("--max-tokens", type=int, default=256, help="of a request (default: 256)")
    data.add_argument(
        "--stop-at-eos", action="store_true", default=False, help="requests may end earlier"
    )
    data.add_argument("--raw", action="store_true", default=False, help="no chat template")
    run = parser.add_argument_group("run")
    run.add_argument(
        "--modes",
        type=lambda text: text.split(","),
        default=list(DEFAULT_MODES),
        help=f"default: {','.join(DEFAULT_MODES)}",
    )
    run.add_argument(
        "--warmup", type=int, default=2, help="requests of each kind before (default: 2)"
    )
    run.add_argument("--repeats", type=int, default=1, help="medians count (default: 1)")
    run.add_argument("--json", type=Path, default=None, metavar="FILE")
    run.add_argument(
        "--plot", type=Path, default=None, metavar="FILE.png", help="needs specjax[bench]"
    )
    args = parser.parse_args(argv)
    bad = [m for m in args.modes if m not in ("plain", *POLICIES) and not is_steps(m)]
    if bad or len(set(args.modes)) < len(args.modes):
        parser.error(
            f"--modes {args.modes} must be different ones of plain, cost, ema and numbers from 1"
        )
    for name in ("requests", "concurrency", "max_tokens", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if args.warmup < 0:
        parser.error(f"--warmup {args.warmup} must be at least 0")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'specjax[bench]'")
    return args


def adaptive_config(args: argparse.Namespace, policy: str) -> Mapping[str, Any]:
    """The configuration of the command line for one policy."""
    path = args.speculative_adaptive_config
    return {**({} if path is None else read_json(path, is_strict=True)), "policy": policy}


def make_engine(args: argparse.Namespace, mode: str, lender: Any) -> Any:
    """The engine of a mode, with the weights of ``lender`` where there is one."""
    from specjax import Engine

    options = engine_arguments(args)
    context = options.setdefault("context_length", args.max_tokens + PROMPT_ROOM)
    options.setdefault("max_total_tokens", 2 * args.concurrency * context)
    initial = options.pop("speculative_num_steps", None)
    del options["speculative_adaptive_config"]
    if mode == "plain":
        unused = ("speculative_", "draft")
        options = {name: value for name, value in options.items() if not name.startswith(unused)}
    elif mode in POLICIES:
        options |= {
            "speculative_adaptive": True,
            "speculative_adaptive_config": adaptive_config(args, mode),
            "speculative_num_steps": initial,
        }
    else:
        options["speculative_num_steps"] = int(mode)
    engine = Engine(
        **options,
        max_running_requests=args.concurrency,
        share_weights_with=lender,
    )
    if engine._controller is not None:
        engine._controller.policy = RecordingPolicy(engine._controller.policy)
    return engine


def recorder(engine: Any) -> RecordingPolicy | None:
    """What writes an engine's rounds down; ``None`` for a fixed number of steps."""
    policy: RecordingPolicy | None
    policy = None if engine._controller is None else engine._controller.policy
    return policy


def generate(
    engine: Any, prompts: Sequence[str], args: argparse.Namespace, max_tokens: int
) -> list[dict[str, Any]]:
    """Answers all prompts, as many at once as the engine decodes."""
    sampling = {
        "temperature": 0.0,
        "max_new_tokens": max_tokens,
        "ignore_eos": not args.stop_at_eos,
    }
    inputs = (
        {"prompt": list(prompts)}
        if args.raw
        else {"messages": [[{"role": "user", "content": prompt}] for prompt in prompts]}
    )
    outputs: list[dict[str, Any]] = engine.generate(**inputs, sampling_params=sampling)
    return outputs


def warm_up(engine: Any, args: argparse.Namespace) -> None:
    """Answers requests of both kinds, one alone and all together, with every tier in turn."""
    prompts = [text for kind in PROMPTS for text in PROMPTS[kind][: args.warmup]]
    record = recorder(engine)
    if not prompts:
        return
    if record is not None:
        record.is_warming = True
    count = min(args.max_tokens, WARM_UP_TOKENS)
    generate(engine, prompts[:1], args, count)
    generate(engine, prompts, args, count)
    if record is not None:
        record.is_warming = False
        record.rounds.clear()


def run_phase(engine: Any, phase: Phase, args: argparse.Namespace) -> PhaseRun:
    """Answers the prompts of a phase."""
    start = time.perf_counter()
    outputs = generate(engine, phase.prompts, args, args.max_tokens)
    seconds = time.perf_counter() - start
    return PhaseRun(
        start,
        seconds,
        [output["meta_info"] for output in outputs],
        [output["output_ids"] for output in outputs],
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs all modes and returns everything that was measured."""
    phases = make_phases(args.workload, args.requests)
    runs: dict[str, list[list[PhaseRun]]] = {mode: [] for mode in args.modes}
    engines: dict[str, Any] = {}
    with ExitStack() as stack:
        # an engine with a draft head comes first: the others read its weights
        for mode in sorted(args.modes, key=lambda mode: mode == "plain"):
            lender = next(iter(engines.values()), None)
            engines[mode] = stack.enter_context(make_engine(args, mode, lender))
        for engine in engines.values():
            warm_up(engine, args)
        total = args.repeats * len(engines) * len(phases)
        with tqdm(total=total, unit="phase", file=sys.stderr) as bar:
            for repeat in range(args.repeats):
                for mode in args.modes:
                    engines[mode].flush_cache()
                    runs[mode].append([])
                for i, phase in enumerate(phases):
                    shift = (repeat + i) % len(args.modes)
                    for mode in args.modes[shift:] + args.modes[:shift]:
                        bar.set_description(f"{mode}, {phase.name}")
                        runs[mode][-1].append(run_phase(engines[mode], phase, args))
                        bar.update()
        settings = describe_settings(args, next(iter(engines.values())))
        records = {mode: recorder(engine) for mode, engine in engines.items()}
        policies = {
            mode: engines[mode].get_server_info()["internal_states"][0]["adaptive"]
            for mode in args.modes
            if records[mode] is not None
        }
    return summarize(phases, runs, records, policies, settings)


def describe_settings(args: argparse.Namespace, engine: Any) -> dict[str, Any]:
    """What was measured, without folders."""
    import jax

    info = engine.get_server_info()
    names = ("workload", "requests", "concurrency", "max_tokens", "warmup", "repeats", "modes")
    return {
        **{name: getattr(args, name) for name in (*names, "stop_at_eos", "raw")},
        "model": Path(info["model_path"]).name,
        **{name: info[name] for name in ("dtype", "context_length", "page_size")},
        "max_total_num_tokens": info["max_total_num_tokens"],
        "rounds_per_dispatch": info["rounds_per_dispatch"],
        "specjax": info["version"],
        "jax": version("jax"),
        "device_kind": jax.devices()[0].device_kind,
    }


def format_tables(result: Mapping[str, Any]) -> str:
    """Figures of every phase and of the whole run as Markdown tables."""
    modes = result["settings"]["modes"]
    blocks = []
    for name, rows in [*result["phases"].items(), ("whole run", result["overall"])]:
        compared = result["ratios"]["overall" if name == "whole run" else name]
        lines = [[name, *HEADINGS]]
        for mode in modes:
            row = rows[mode]
            accept = row["accept_len"]
            line = [mode, f"{row['throughput']:.1f}", f"{row['latency']:.3f}"]
            line += ["-" if accept is None else f"{accept:.2f}", str(row["wasted_drafts"])]
            for key in ("best_static", "worst_static", "plain"):
                ratio = compared.get(mode, {}).get(key)
                line.append("-" if ratio is None else f"{ratio:.3f}")
            lines.append(line)
        blocks.append(markdown_table(lines))
    return "\n\n".join(blocks)


def format_notes(result: Mapping[str, Any]) -> str:
    """Accept length at full depth, switches, and how many texts are equal."""
    lines = []
    depth = result["full_depth"]
    if depth is not None:
        lengths = ", ".join(f"{kind} {x:.2f}" for kind, x in depth["accept_len"].items())
        ratio = depth["high_over_low"]
        suffix = "" if ratio is None else f"; high over low {ratio:.2f}"
        lines.append(f"accept length with {depth['steps']} steps: {lengths}{suffix}")
    for mode, line in result["timelines"].items():
        steps = [record["steps"] for record in line["rounds"]]
        switches = sum(before != after for before, after in pairwise(steps))
        tiers = dict(sorted(Counter(steps).items()))
        lines.append(f"{mode}: {switches} switches, rounds by drafted tokens {tiers}")
    lines.append(f"texts equal to those of the first run: {result['equal_share']:.1%}")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Measures, shows the tables and writes the files."""
    result = measure(args)
    print(format_tables(result))
    print()
    print(format_notes(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        draw(result, args.plot)
    return int(result["settings"]["dtype"] == "float32" and result["equal_share"] < 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns the exit status."""
    args = parse_arguments(argv)
    try:
        return run(args)
    except (ValueError, OSError) as error:
        return report_error("bench_adaptive_speculative", error)


if __name__ == "__main__":
    sys.exit(main())
