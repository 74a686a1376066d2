"""Requests of the benchmarks, from data sets on disk."""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.engine.requests import tokenize_inputs
from specjax.json_file import read_json_lines
from specjax.text.tokenizer import Tokenizer
from specjax.training.collect import check_turns

DATA = Path(__file__).parents[1] / "data"
PROMPTS = DATA / "prompts.jsonl"
# chosen for SmolLM2-135M with its shipped head: docs/adaptive_decoding.md has the accept lengths
ADAPTIVE_PROMPTS = DATA / "adaptive_prompts.jsonl"
SPEC_BENCH = ("question_id", "category", "turns")
WORKLOADS = {"low": ["low"], "high": ["high"], "transition": ["low", "high", "low", "high"]}
DATASETS = ("jsonl", *WORKLOADS)


@dataclass(frozen=True)
class BenchRequest:
    """Prompt tokens, and the completion tokens to ask for."""

    input_ids: list[int]
    output_len: int


def read_lines(path: Path, required: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Objects of a file with one JSON object a line.

    Each has ``prompt`` (text), ``messages`` (a conversation) or ``turns`` (user messages), and the
    ``required`` keys. ``ValueError`` names a line of another form.
    """
    wanted = " and ".join(required) or "prompt, messages or turns"

    def read(row: Any) -> dict[str, Any]:
        keys = row.keys() if isinstance(row, dict) else set()
        if not {"prompt", "messages", "turns"} & keys or not keys >= set(required):
            raise ValueError(f"it lacks {wanted}")
        check_turns(row.get("turns", [""]))
        return row

    rows = read_json_lines(path, read)
    if not rows:
        raise ValueError(f"{path.name} holds no prompts")
    return rows


def jsonl_requests(
    path: Path, count: int, tokenizer: Tokenizer, output_len: int
) -> list[BenchRequest]:
    """Prompts of :func:`read_lines`, from the start again where there are too few.

    Of ``turns`` the first is taken; a line may have an ``output_len`` of its own.
    """
    prompts = [
        BenchRequest(_tokenize(tokenizer, row), row.get("output_len", output_len))
        for row in read_lines(path)
    ]
    return [prompts[i % len(prompts)] for i in range(count)]


def workload_phases(
    workload: str, count: int, tokenizer: Tokenizer, output_len: int
) -> dict[str, list[BenchRequest]]:
    """``count`` prompts a phase; a kind that comes again goes on with its next prompts."""
    kinds = WORKLOADS[workload]
    rows = read_lines(ADAPTIVE_PROMPTS, SPEC_BENCH)
    phases: dict[str, list[BenchRequest]] = {}
    seen: Counter[str] = Counter()
    for kind in kinds:
        own = [row for row in rows if row["category"] == kind]
        chosen = [own[i % len(own)] for i in range(seen[kind] * count, (seen[kind] + 1) * count)]
        seen[kind] += 1
        phases[f"{kind}_{seen[kind]}" if len(kinds) > 1 else kind] = [
            BenchRequest(_tokenize(tokenizer, row), output_len) for row in chosen
        ]
    return phases


def load_phases(args: argparse.Namespace, engine: Any) -> dict[str, list[BenchRequest]]:
    name, count, tokenizer = args.dataset_name, args.num_prompts, engine.tokenizer
    if name in WORKLOADS:
        return workload_phases(name, count, tokenizer, args.output_len)
    return {name: jsonl_requests(args.dataset_path, count, tokenizer, args.output_len)}


def answers(
    engine: Any,
    requests: Sequence[BenchRequest],
    temperature: float,
    seed: int,
    *,
    ignore_eos: bool = True,
) -> list[dict[str, Any]]:
    """What an engine answers to requests that come at once; the i-th has the seed ``seed + i``."""
    shared = {"temperature": temperature, "ignore_eos": ignore_eos}
    sampling = [
        shared | {"max_new_tokens": request.output_len, "sampling_seed": seed + index}
        for index, request in enumerate(requests)
    ]
    ids = [request.input_ids for request in requests]
    outputs: list[dict[str, Any]] = engine.generate(input_ids=ids, sampling_params=sampling)
    return outputs


def _tokenize(tokenizer: Tokenizer, row: dict[str, Any]) -> list[int]:
    """Conversations go through the chat template, a ``prompt`` does not."""
    if "messages" not in row and "turns" not in row:
        return tokenizer.encode(row["prompt"])
    messages = row.get("messages") or [{"role": "user", "content": row["turns"][0]}]
    return tokenize_inputs(tokenizer, None, None, messages)[0][0]
