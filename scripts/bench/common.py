"""What the benchmarks share: options, figures of requests, tables, and facts of the machine."""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any

from specjax.cli.options import add_engine_options
from specjax.speculative.registry import DEFAULT

COPIES, COPY_REPEATS = 4, 5
# of an engine's server info
SIZES = (
    "dtype",
    "context_length",
    "page_size",
    "max_total_num_tokens",
    "rounds_per_dispatch",
    "disable_radix_cache",
    "max_running_requests",
    "chunked_prefill_size",
    "batch_buckets",
)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def engine_parser(name: str, doc: str) -> argparse.ArgumentParser:
    """A parser with the options of an engine, which stay unset where they are not given."""
    parser = argparse.ArgumentParser(
        prog=f"bench {name}", description=doc.splitlines()[0], argument_default=argparse.SUPPRESS
    )
    add_engine_options(parser)
    parser.set_defaults(speculative_algorithm=DEFAULT)
    return parser


def check_at_least(
    parser: argparse.ArgumentParser, args: argparse.Namespace, least: int, *names: str
) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} {value} must be at least {least}")


def check_plot(parser: argparse.ArgumentParser, path: Path | None) -> None:
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install '.[bench]'")


def acceptance(metas: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What drafts gave, from the ``meta_info`` of requests; requests without a verify do not count.

    ``accept_length`` is the mean over requests of tokens a verify, prefill's included and plain
    rounds left out; ``accept_length_pooled`` divides the sums. ``None`` where nothing was verified.
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
    """Rows as a padded Markdown table; a column is its heading, the key of a row, and a format."""
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
    import jax

    devices = jax.devices()
    return {name: version(name) for name in ("specjax", "jax", "jaxlib")} | {
        "python": platform.python_version(),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
        "num_cpus": os.cpu_count(),
    }


def engine_settings(engine: Any) -> dict[str, Any]:
    """What an engine runs with and on, without the paths of its files."""
    info = engine.get_server_info()
    return {
        "model": Path(info["model_path"]).name,
        **{name: info[name] for name in SIZES},
        "simulate_accept_length": info["simulate_accept_length"],
        "speculative_num_steps": info["internal_states"][0].get("speculative_num_steps", 0),
        **software(),
    }


def copy_bandwidth() -> float:
    """Bytes read and written a second by an elementwise pass over 4 GiB (64 MiB on a CPU)."""
    import jax
    import jax.numpy as jnp

    x = jnp.arange(2**30 if jax.default_backend() == "gpu" else 2**24, dtype=jnp.float32)
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
