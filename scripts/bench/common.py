"""Shared code of the benchmarks: options, prompts, metrics, tables, machine data and a server."""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any

from specjax.cli.options import add_engine_options, add_options
from specjax.engine.args import EngineArgs
from specjax.engine.requests import tokenize_inputs
from specjax.speculative.catalog import DEFAULT
from specjax.text.tokenizer import Tokenizer
from specjax.training.collect import read_lines

COPIES, COPY_REPEATS = 4, 5
DATA = Path(__file__).parents[1] / "data"
PROMPTS = DATA / "prompts.jsonl"
# chosen for SmolLM2-135M with its shipped head; docs/performance.md lists the accept lengths
ADAPTIVE_PROMPTS = DATA / "adaptive_prompts.jsonl"
SPEC_BENCH = ("question_id", "category", "turns")
WORKLOADS = {"low": ["low"], "high": ["high"], "transition": ["low", "high", "low", "high"]}
# keys in an engine's server info
SIZES = (
    "dtype context_length page_size max_total_num_tokens rounds_per_dispatch disable_radix_cache "
    "max_running_requests chunked_prefill_size batch_buckets simulate_accept_length "
    "simulate_acceptance speculative_algorithm speculative_eagle_topk speculative_num_draft_tokens"
).split()


def list_of(kind: Callable[[str], Any], names: Collection[str] = ()) -> Callable[[str], list[Any]]:
    """Return a parser of comma-separated values; all must be in ``names`` if it is not empty."""

    def read(text: str) -> list[Any]:
        values = [kind(word) for word in text.split(",")]
        if names and (unknown := set(values) - set(names)):
            raise argparse.ArgumentTypeError(f"unknown {sorted(unknown)}; choose from {[*names]}")
        return values

    return read


def pairs_of(option: str, text: str) -> tuple[str, dict[str, Any]]:
    """Split ``NAME key=value ...`` into the name (or ``""``) and values (JSON or strings)."""
    words = text.split()
    name = words.pop(0) if words and "=" not in words[0] else ""
    values: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{option} {text!r}: {word!r} must have the form NAME=VALUE")
        try:
            values[key] = json.loads(value)
        except ValueError:
            values[key] = value
    return name, values


def engine_parser(name: str, doc: str, options: Collection[str]) -> argparse.ArgumentParser:
    """Create a parser with engine options, including ``options``; omitted options stay unset."""
    parser = argparse.ArgumentParser(
        prog=f"specjax bench {name}",
        description=doc.splitlines()[0],
        argument_default=argparse.SUPPRESS,
    )
    add_engine_options(parser)
    add_options(parser.add_argument_group("more engine options"), EngineArgs, options)
    parser.set_defaults(speculative_algorithm=DEFAULT)
    return parser


def check_at_least(
    parser: argparse.ArgumentParser, args: argparse.Namespace, least: int, *names: str
) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None and min(value if isinstance(value, list) else [value]) < least:
            parser.error(f"--{name.replace('_', '-')} {value} must be at least {least}")


def tokens_of(row: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Encode a line: its ``prompt``, or its messages or first turn with the chat template."""
    if "messages" not in row and "turns" not in row:
        return tokenizer.encode(row["prompt"])
    messages = row.get("messages") or [{"role": "user", "content": row["turns"][0]}]
    return tokenize_inputs(tokenizer, None, None, messages)[0][0]


def phases_of(prompts: str, tokenizer: Tokenizer, count: int) -> dict[str, list[list[int]]]:
    """Encode ``count`` prompts for each phase of a workload, or from a file as a single phase.

    If a category is repeated, its next prompts are used, and after the last one the first again.
    """
    if prompts in WORKLOADS:
        rows, kinds = read_lines(ADAPTIVE_PROMPTS, SPEC_BENCH), WORKLOADS[prompts]
    else:
        rows, kinds = read_lines(Path(prompts)), [Path(prompts).stem]
    phases: dict[str, list[list[int]]] = {}
    turn: Counter[str] = Counter()
    for kind in kinds:
        pool = [row for row in rows if prompts not in WORKLOADS or row["category"] == kind]
        chosen = [pool[i % len(pool)] for i in range(turn[kind] * count, (turn[kind] + 1) * count)]
        turn[kind] += 1
        name = f"{kind}_{turn[kind]}" if len(kinds) > 1 else kind
        phases[name] = [tokens_of(row, tokenizer) for row in chosen]
    return phases


def acceptance(metas: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute acceptance metrics from the ``meta_info`` of requests that were verified.

    ``accept_length`` is the mean over requests of tokens per verify. It counts the token of prefill
    and leaves out plain rounds. ``accept_length_pooled`` is the ratio of the sums.
    """
    verified = [meta for meta in metas if meta.get("spec_verify_ct")]
    verifies = sum(meta["spec_verify_ct"] for meta in verified)
    lengths = [meta["spec_accept_length"] for meta in verified]
    tokens = sum(meta["spec_accept_length"] * meta["spec_verify_ct"] for meta in verified)
    correct = sum(meta["spec_num_correct_drafts"] for meta in verified)
    proposed = sum(meta["spec_num_proposed_drafts"] for meta in verified)
    histograms = [meta["spec_correct_drafts_histogram"] for meta in verified]
    return {
        "verify_calls": verifies,
        "accept_length": statistics.fmean(lengths) if verified else None,
        "accept_length_pooled": tokens / verifies if verified else None,
        "accept_rate": correct / proposed if proposed else None,
        "correct_drafts": correct,
        "proposed_drafts": proposed,
        "correct_drafts_histogram": [sum(n) for n in zip_longest(*histograms, fillvalue=0)],
    }


def table_of(columns: Sequence[tuple[str, str, str]], rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as a padded Markdown table; a column is (heading, key in a row, format)."""
    lines = [[heading for heading, _, _ in columns]]
    for row in rows:
        values = [(row.get(key), form) for _, key, form in columns]
        lines.append(["-" if value is None else format(value, form) for value, form in values])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * (width - 1) + ":" for width in widths])
    padded = [[cell.rjust(w) for cell, w in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in padded)


def append_json(path: Path | None, row: Mapping[str, Any]) -> None:
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def software() -> dict[str, Any]:
    """Collect versions and devices. It initializes the devices: a client must not call it."""
    import jax

    devices = jax.devices()
    return {name: version(name) for name in ("specjax", "jax", "jaxlib")} | {
        "python": platform.python_version(),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
        "num_cpus": os.cpu_count(),
    }


def settings_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """Extract the sizes of an engine from its server info, without file paths."""
    state = info["internal_states"][0]
    memory = state["memory_usage"]
    return {
        "model": Path(info["model_path"]).name,
        **{name: info[name] for name in SIZES},
        "speculative_num_steps": state.get("speculative_num_steps", 0),
        "planned_gb": sum(memory[name] for name in ("weight", "states", "kvcache", "temporary")),
    }


def peak_gb() -> float:
    """Return the peak device memory of this process in GB; 0 if the backend has no count."""
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9


def copy_bandwidth() -> float:
    """Return bytes read and written per second by a pass over 1 GiB (64 MiB on a CPU).

    Up to three such arrays exist at a time: less than an engine takes, so that ``peak_gb`` is that
    of the engine.
    """
    import jax
    import jax.numpy as jnp

    x = jnp.arange(2**28 if jax.default_backend() == "gpu" else 2**24, dtype=jnp.float32)
    copy = jax.jit(lambda x: x + 1.0)
    copy(x).block_until_ready()
    seconds = []
    for _ in range(COPY_REPEATS):
        started = time.perf_counter()
        for _ in range(COPIES):
            y = copy(x)
        y.block_until_ready()
        seconds.append((time.perf_counter() - started) / COPIES)
    return float(2 * x.nbytes / statistics.median(seconds))


@contextmanager
def serve(options: Mapping[str, Any], gpu: str | None) -> Iterator[str]:
    """Run ``specjax serve`` with these engine arguments; yield its address when it is ready."""
    variables = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    command = [sys.executable, "-m", "specjax", "serve", "--port", "0"]
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command += [f"--{flag}"] if value else ["--no-overlap"] if name == "overlap" else []
        else:
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            command += [f"--{flag}", "none" if value is None else text]
    pipes: Any = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | variables, **pipes) as process:
        try:
            match = re.search(r"http://\S+", process.stdout.readline())
            if match is None:
                status = process.wait()
                raise ValueError(f"specjax serve exited with status {status}; see its output above")
            yield match[0]
        finally:
            process.terminate()
