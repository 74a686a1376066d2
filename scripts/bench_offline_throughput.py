"""Measures the throughput of an engine that gets all requests at once.

The flags are those of SGLang's benchmark of this name where it has them, and those of the engine.
Several modes and batch sizes can be compared in one run, over the same requests and weights:

    python scripts/bench_offline_throughput.py --dataset-name jsonl --num-prompts 64 \\
        --modes spec,plain,spec_sync,plain_sync --batch 1,4,16,64 --result-filename rows.jsonl

`spec` and `plain` run one round ahead of the host, the `_sync` modes wait for every round. One row
a mode and batch size is shown as a table and appended to the result file as one JSON line. The
exit status is 1 where float32 outputs are not equal in all rows, and 2 for bad input.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specjax.bench_data import (
    BenchRequest,
    jsonl_requests,
    random_requests,
    sharegpt_requests,
)
from specjax.cli.errors import report_error
from specjax.cli.options import (
    add_memory_options,
    add_model_options,
    add_speculation_options,
    engine_arguments,
)
from specjax.markdown import markdown_table

MODES = ("spec", "plain", "spec_sync", "plain_sync")
BUNDLED_PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"
WARM_UP_INPUT, WARM_UP_OUTPUT, WARM_UP_REQUESTS = 256, 16, 16
PROGRESS_SECONDS = 0.2

# heading, key of a row, format
COLUMNS = (
    ("mode", "mode", ""),
    ("batch", "max_running_requests", "d"),
    ("requests", "successful_requests", "d"),
    ("seconds", "total_latency", ".2f"),
    ("in tok", "total_input_tokens", "d"),
    ("out tok", "total_output_tokens", "d"),
    ("req/s", "request_throughput", ".2f"),
    ("in tok/s", "input_throughput", ".1f"),
    ("out tok/s", "output_throughput", ".1f"),
    ("total tok/s", "total_throughput", ".1f"),
    ("accept", "accept_length", ".2f"),
    ("retracted", "num_retractions", "d"),
    ("cached", "cached_tokens", "d"),
    ("equal", "equal_share", ".3f"),
)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], argument_default=argparse.SUPPRESS
    )
    add_model_options(parser.add_argument_group("model"))
    add_speculation_options(parser.add_argument_group("speculation"))
    memory = parser.add_argument_group("memory and start-up")
    add_memory_options(memory)
    memory.add_argument("--disable-radix-cache", action="store_true", help="no prefix cache")
    memory.add_argument("--load-format", choices=("auto", "dummy"), help="dummy: random weights")
    memory.add_argument("--simulate-accept-length", type=float, metavar="X")
    data = parser.add_argument_group("requests")
    data.add_argument("--dataset-name", choices=("random", "sharegpt", "jsonl"), default="random")
    data.add_argument("--dataset-path", type=Path, default=None, help="jsonl has one of its own")
    data.add_argument("--num-prompts", type=int, default=1000)
    data.add_argument("--random-input-len", type=int, default=1024)
    data.add_argument("--random-output-len", type=int, default=1024)
    data.add_argument("--random-range-ratio", type=float, default=0.0)
    data.add_argument("--sharegpt-output-len", type=int, default=None)
    data.add_argument("--sharegpt-context-len", type=int, default=None)
    data.add_argument("--jsonl-output-len", type=int, default=128)
    data.add_argument("--apply-chat-template", action="store_true", default=False)
    data.add_argument("--disable-ignore-eos", action="store_true", default=False)
    data.add_argument("--temperature", type=float, default=0.0)
    data.add_argument(
        "--extra-request-body", type=json.loads, default={}, help="JSON: more sampling parameters"
    )
    run = parser.add_argument_group("run")
    run.add_argument("--modes", type=lambda text: text.split(","), default=None)
    run.add_argument("--batch", type=_numbers, default=None, help="max_running_requests of a row")
    run.add_argument("--repeats", type=int, default=1, help="runs a row; the median one counts")
    run.add_argument("--skip-warmup", action="store_true", default=False)
    run.add_argument("--result-filename", type=Path, default=None, help="append JSON lines")
    args = parser.parse_args(argv)
    is_plain = args.speculative_algorithm == "none"
    args.modes = args.modes or ["plain" if is_plain else "spec"]
    args.seed = getattr(args, "seed", 1)
    unknown = [mode for mode in args.modes if mode not in MODES]
    if unknown:
        parser.error(f"--modes {unknown} not among {list(MODES)}")
    if is_plain and any(mode.startswith("spec") for mode in args.modes):
        parser.error(f"--modes {args.modes} and --speculative-algorithm none exclude each other")
    for name in ("num_prompts", "repeats", "jsonl_output_len"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if args.dataset_name == "sharegpt" and args.dataset_path is None:
        parser.error("--dataset-name sharegpt needs --dataset-path")
    if not isinstance(args.extra_request_body, dict):
        parser.error("--extra-request-body must be a JSON object")
    return args


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def data_path(args: argparse.Namespace) -> Any:
    """The file that the requests come from, if there is one."""
    if args.dataset_name == "jsonl":
        return args.dataset_path or BUNDLED_PROMPTS
    return args.dataset_path if args.dataset_name == "sharegpt" else None


def load_requests(args: argparse.Namespace, engine: Any) -> list[BenchRequest]:
    """The requests that the command line asks for, tokenized for an engine."""
    if args.dataset_name == "random":
        return random_requests(
            args.num_prompts,
            engine.target.config.vocab_size,
            args.random_input_len,
            args.random_output_len,
            args.random_range_ratio,
            args.seed,
        )
    if args.dataset_name == "sharegpt":
        return sharegpt_requests(
            args.dataset_path,
            args.num_prompts,
            engine.tokenizer,
            context_length=args.sharegpt_context_len or engine.context_length,
            output_len=args.sharegpt_output_len,
            apply_chat_template=args.apply_chat_template,
            seed=args.seed,
        )
    return jsonl_requests(
        data_path(args),
        args.num_prompts,
        engine.tokenizer,
        output_len=args.jsonl_output_len,
        apply_chat_template=args.apply_chat_template,
    )


def make_engine(args: argparse.Namespace, mode: str, batch: int | None, lender: Any) -> Any:
    """The engine of one row; the weights come from ``lender`` where there is one."""
    from specjax import Engine

    options = engine_arguments(args)
    for name in ("disable_radix_cache", "load_format", "simulate_accept_length"):
        if hasattr(args, name):
            options[name] = getattr(args, name)
    if mode.startswith("plain"):
        unused = ("speculative_", "draft", "simulate_accept_length")
        options = {name: value for name, value in options.items() if not name.startswith(unused)}
    return Engine(
        **options,
        max_running_requests=batch,
        overlap=not mode.endswith("_sync"),
        share_weights_with=lender,
    )


def warm_up(engine: Any, args: argparse.Namespace) -> None:
    """Answers a few short requests, and forgets their prefixes."""
    output_len = min(WARM_UP_OUTPUT, engine.context_length // 2)
    input_len = min(WARM_UP_INPUT, engine.context_length - output_len)
    count = min(WARM_UP_REQUESTS, args.num_prompts)
    vocab_size = engine.target.config.vocab_size
    requests = random_requests(count, vocab_size, input_len, output_len, 1.0, args.seed + 1)
    generate(engine, requests, args)
    engine.flush_cache()


def generate(
    engine: Any, requests: list[BenchRequest], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Answers all requests at once; each has its own seed."""
    sampling = [
        {
            "temperature": args.temperature,
            "max_new_tokens": request.output_len,
            "ignore_eos": not args.disable_ignore_eos,
            "sampling_seed": args.seed + index,
            **args.extra_request_body,
        }
        for index, request in enumerate(requests)
    ]
    ids = [request.input_ids for request in requests]
    outputs: list[dict[str, Any]] = engine.generate(input_ids=ids, sampling_params=sampling)
    return outputs


@contextmanager
def progress_bar(engine: Any, count: int, title: str) -> Iterator[None]:
    """A bar of ended requests on standard error, which reads the engine's figures now and then."""
    ended = threading.Event()
    before = engine.metrics.snapshot().num_finished

    def watch() -> None:
        with tqdm(total=count, desc=title, unit="req", file=sys.stderr) as bar:
            while True:
                is_last = ended.wait(PROGRESS_SECONDS)
                now = engine.metrics.snapshot()
                bar.set_postfix_str(f"{now.last_gen_throughput:.0f} tok/s", refresh=False)
                bar.update(now.num_finished - before - bar.n)
                if is_last:
                    return

    watcher = threading.Thread(target=watch, name="bench-progress")
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def measure(
    engine: Any, requests: list[BenchRequest], args: argparse.Namespace, title: str
) -> tuple[dict[str, Any], list[list[int]]]:
    """Figures of the median run of a row, and its outputs."""
    runs = []
    for _ in range(args.repeats):
        engine.flush_cache()
        with progress_bar(engine, len(requests), title):
            start = time.perf_counter()
            outputs = generate(engine, requests, args)
            seconds = time.perf_counter() - start
        state = engine.get_server_info()["internal_states"][0]
        runs.append((seconds, state["last_gen_throughput"], outputs))
    seconds, last, outputs = sorted(runs, key=lambda run: run[0])[(len(runs) - 1) // 2]
    row = {"last_gen_throughput": last, **summarize(seconds, outputs)}
    return row, [output["output_ids"] for output in outputs]


def summarize(seconds: float, outputs: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a run; the throughputs are over all of its time.

    ``accept_length`` is completion tokens over verifies, prefill's tokens included; ``None`` where
    nothing was verified.
    """
    metas = [output["meta_info"] for output in outputs]
    done = [meta for meta in metas if meta["finish_reason"]["type"] != "abort"]

    def total(name: str) -> int:
        return sum(meta.get(name, 0) for meta in metas)

    num_in, num_out = total("prompt_tokens"), total("completion_tokens")
    verifies, proposed = total("spec_verify_ct"), total("spec_num_proposed_drafts")
    first_tokens = [m["time_to_first_token"] for m in done]
    return {
        "successful_requests": len(done),
        "total_latency": seconds,
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(done) / seconds,
        "input_throughput": num_in / seconds,
        "output_throughput": num_out / seconds,
        "total_throughput": (num_in + num_out) / seconds,
        "accept_length": num_out / verifies if verifies else None,
        "accept_rate": total("spec_num_correct_drafts") / proposed if proposed else None,
        "verify_calls": verifies,
        "num_retractions": total("num_retractions"),
        "cached_tokens": total("cached_tokens"),
        "median_time_to_first_token": statistics.median(first_tokens) if done else None,
        "median_e2e_latency": statistics.median(m["e2e_latency"] for m in done) if done else None,
    }


def describe_settings(args: argparse.Namespace, engine: Any) -> dict[str, Any]:
    """What a row was measured with, without folders."""
    import jax

    names = ["dataset_name", "num_prompts", "temperature", "seed", "repeats", "disable_ignore_eos"]
    if args.dataset_name == "random":
        names += ["random_input_len", "random_output_len", "random_range_ratio"]
    info = engine.get_server_info()
    return {
        **{name: getattr(args, name) for name in names},
        "dataset_file": path.name if (path := data_path(args)) is not None else None,
        "model": Path(info["model_path"]).name,
        **{name: info[name] for name in ("dtype", "context_length", "page_size")},
        "max_total_num_tokens": info["max_total_num_tokens"],
        "disable_radix_cache": info["disable_radix_cache"],
        "rounds_per_dispatch": info["rounds_per_dispatch"],
        "speculative_num_steps": info["internal_states"][0].get("speculative_num_steps", 0),
        "specjax": info["version"],
        "jax": version("jax"),
        "device_kind": jax.devices()[0].device_kind,
    }


def format_table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    lines = [[heading for heading, _, _ in COLUMNS]]
    for row in rows:
        values = [(row.get(key), form) for _, key, form in COLUMNS]
        lines.append(["-" if value is None else format(value, form) for value, form in values])
    return markdown_table(lines)


def run(args: argparse.Namespace) -> int:
    """Measures all rows, shows the table and writes the result file."""
    rows: list[dict[str, Any]] = []
    requests: list[BenchRequest] = []
    reference: list[list[int]] = []
    with ExitStack() as kept:
        first: Any = None
        for batch in args.batch or [None]:
            for mode in args.modes:
                with ExitStack() as stack:
                    engine = make_engine(args, mode, batch, first)
                    # the first engine stays: the others read its weights
                    (stack if first is not None else kept).enter_context(engine)
                    info = engine.get_server_info()
                    size = info["max_running_requests"]
                    if first is None:
                        first, requests = engine, load_requests(args, engine)
                    if not args.skip_warmup:
                        warm_up(engine, args)
                    row, outputs = measure(engine, requests, args, f"{mode}, batch {size}")
                    reference = reference or outputs
                    row = {"backend": "specjax", "mode": mode, "max_running_requests": size} | row
                    row["equal_share"] = equal_share(outputs, reference)
                    row["settings"] = describe_settings(args, engine)
                rows.append(row)
                if args.result_filename is not None:
                    with args.result_filename.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
    print(format_table(rows))
    is_real = not hasattr(args, "simulate_accept_length")
    share = min(row["equal_share"] for row in rows)
    if is_real and len(rows) > 1:
        print(f"outputs equal to those of the first row: {share:.1%} or more in every row")
    return int(is_real and share < 1 and rows[0]["settings"]["dtype"] == "float32")


def equal_share(outputs: list[list[int]], reference: list[list[int]]) -> float:
    """Share of the requests with the same tokens."""
    return sum(map(list.__eq__, outputs, reference)) / len(reference)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns the exit status."""
    args = parse_arguments(argv)
    try:
        return run(args)
    except (ValueError, OSError) as error:
        return report_error("bench_offline_throughput", error)


if __name__ == "__main__":
    sys.exit(main())
