"""Measure a draft head on prompts: acceptance by category, equality with plain decoding, speed.

    specjax bench acceptance --prompts scripts/data/prompts.jsonl --output results.json

The prompts are JSON lines in Spec-Bench form: ``question_id``, ``category`` and ``turns``, a list
of user messages. Each turn is encoded with the chat template, after all earlier turns. To measure
the effect of long contexts, ``--context-before N,N`` begins each request with N tokens of a text,
once for each N. Two engines run side by side, so --mem-fraction-static is 0.3 by default.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import common
from specjax import Engine
from specjax.cli.generate import Difference, find_difference
from specjax.cli.options import engine_arguments
from specjax.engine.requests import tokenize_inputs
from specjax.speculative.algorithm import DRAFTING
from specjax.speculative.catalog import PLAIN

SAMPLING = ("max_new_tokens", "temperature", "sampling_seed")
COLUMNS = (
    ("requests", "requests", "d"),
    ("length", "accept_length", ".2f"),
    ("pooled", "accept_length_pooled", ".2f"),
    ("rate", "accept_rate", ".3f"),
    ("identical", "compared", ""),
)
LOGPROB = ("logprob", "logprob", ".3f")
SMALLEST_CONTEXT = 128  # prompt tokens of the first row of the table by context


@dataclass(frozen=True)
class Answer:
    """Result of one turn; ``difference`` is None if plain decoding gives the same tokens."""

    question_id: str
    category: str
    turn: int
    meta_info: dict[str, Any]
    difference: Difference | None


@dataclass
class Stopwatch:
    """An engine, with the completion tokens and the seconds of its calls."""

    engine: Any
    num_tokens: int = 0
    seconds: float = 0.0

    def generate(self, ids: list[list[int]], options: dict[str, Any]) -> list[dict[str, Any]]:
        start = time.perf_counter()
        outputs = self.engine.generate(input_ids=ids, **options)
        self.seconds += time.perf_counter() - start
        self.num_tokens += sum(len(output["output_ids"]) for output in outputs)
        return outputs


def evaluate(
    watches: Mapping[str, Stopwatch],
    prompts: Sequence[dict[str, Any]],
    contexts: Sequence[list[int]],
    options: dict[str, Any],
    batch_size: int,
) -> Iterator[list[Answer]]:
    """Answer all turns of all prompts with both engines, one batch of requests at a time.

    Both engines continue with the speculative answer, so that a difference is counted once. The
    requests of a prompt begin with one of the ``contexts``. ``options`` are for ``generate``.
    """
    plain = watches["plain"].engine
    conversations: list[list[dict[str, str]]] = [[] for _ in prompts]
    for turn in range(max(len(prompt["turns"]) for prompt in prompts)):
        remaining = [i for i, prompt in enumerate(prompts) if len(prompt["turns"]) > turn]
        for start in range(0, len(remaining), batch_size):
            batch = remaining[start : start + batch_size]
            for i in batch:
                conversations[i].append({"role": "user", "content": prompts[i]["turns"][turn]})
            chats = [conversations[i] for i in batch]
            encoded, _ = tokenize_inputs(plain.tokenizer, messages=chats)
            rows = [
                [*contexts[i % len(contexts)], *ids] for i, ids in zip(batch, encoded, strict=True)
            ]
            outputs = [watch.generate(rows, options) for watch in watches.values()]
            answers = []
            for i, prompt_ids, output, reference in zip(batch, rows, *outputs, strict=True):
                conversations[i].append({"role": "assistant", "content": output["text"]})
                ids, plain_ids = output["output_ids"], reference["output_ids"]
                difference = None
                if ids != plain_ids:
                    difference = find_difference(ids, plain_ids, prompt_ids, plain)
                names = str(prompts[i]["question_id"]), str(prompts[i]["category"])
                answers.append(Answer(*names, turn, output["meta_info"], difference))
            yield answers


def summarize(answers: Sequence[Answer]) -> dict[str, Any]:
    """Compute the metrics of a set of answers; averages are 0 if nothing was verified."""
    metas = [answer.meta_info for answer in answers]
    drafts = {name: value or 0 for name, value in common.acceptance(metas).items()}
    logprobs = [value for meta in metas for value, *_ in meta.get("output_token_logprobs", ())]
    return drafts | {
        "logprob": statistics.fmean(logprobs) if logprobs else None,
        "requests": len(answers),
        "completion_tokens": sum(meta["completion_tokens"] for meta in metas),
        "identical": sum(answer.difference is None for answer in answers),
    }


def parse_arguments(name: str, argv: Sequence[str]) -> argparse.Namespace:
    parser = common.engine_parser(name, __doc__, ["batch_buckets"])
    # by default, two engines with this share each leave room for temporaries and other processes
    parser.set_defaults(dtype="float32", mem_fraction_static=0.3)
    add = parser.add_argument_group("run", argument_default=None).add_argument
    form = "JSON lines in Spec-Bench form: question_id, category, turns (user messages)"
    add("--prompts", type=Path, required=True, help=form)
    most = "maximum tokens of a completion (default: %(default)s)"
    add("--max-new-tokens", type=int, default=128, help=most)
    add("--batch-size", type=int, default=8, help="requests in parallel (default: %(default)s)")
    limit = "number of prompts (lines) to use; each turn is a request (default: all)"
    add("--limit", type=int, help=limit)
    warmth = "sampling temperature (default: %(default)s)"
    add("--temperature", type=float, default=0.0, help=warmth)
    add("--sampling-seed", type=int, default=0, help="random seed (default: %(default)s)")
    text = "begin each request with this many tokens of a text of --context (default: 0)"
    add("--context-before", type=common.list_of(int), default=[0], metavar="N,N", help=text)
    texts = "text file for --context-before; repeatable, taken in turns; adds log-probabilities"
    add("--context", type=Path, action="append", default=[], metavar="FILE", help=texts)
    add("--output", type=Path, help="file to write the results to, as JSON (default: none)")
    args = parser.parse_args(argv)
    common.check_at_least(parser, args, 1, "batch_size", "max_new_tokens", "limit")
    common.check_at_least(parser, args, 0, "context_before")
    if any(args.context_before) and not args.context:
        parser.error(f"--context-before {args.context_before} needs at least one --context FILE")
    return args


def contexts_of(tokenizer: Any, files: Sequence[Path], count: int) -> list[list[int]]:
    """Return the first ``count`` token ids of each file; without files, one empty context."""
    encoded = [tokenizer.encode(file.read_text(encoding="utf-8"))[:count] for file in files]
    for file, ids in zip(files, encoded, strict=True):
        if len(ids) < count:
            few = f"{len(ids)} tokens, too few for --context-before={count}"
            raise ValueError(f"--context {file} has only {few}; lower it or use a longer file")
    return encoded or [[]]


def by_context(answers: Sequence[Answer]) -> dict[int, list[Answer]]:
    """Group answers by prompt tokens, up to a power of two, in ascending order."""
    groups: dict[int, list[Answer]] = {}
    for answer in sorted(answers, key=lambda answer: answer.meta_info["prompt_tokens"]):
        most = max(SMALLEST_CONTEXT, 1 << (answer.meta_info["prompt_tokens"] - 1).bit_length())
        groups.setdefault(most, []).append(answer)
    return groups


def main(name: str, argv: Sequence[str]) -> int:
    args = parse_arguments(name, argv)
    prompts = common.read_lines(args.prompts, common.SPEC_BENCH)[: args.limit]
    options = engine_arguments(args) | {"max_running_requests": args.batch_size}
    options["show_progress"] = True
    plainly = {name: value for name, value in options.items() if not name.startswith(DRAFTING)}
    plainly["speculative_algorithm"] = PLAIN
    sampling = {name: getattr(args, name) for name in SAMPLING}
    answers: list[Answer] = []
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(**options))
        plain = stack.enter_context(Engine(**plainly, share_weights_with=engine))
        watches = {"speculative": Stopwatch(engine), "plain": Stopwatch(plain)}
        total = sum(len(prompt["turns"]) for prompt in prompts) * len(args.context_before)
        bar = stack.enter_context(tqdm(total=total, unit="request", disable=None, file=sys.stderr))
        request = {"sampling_params": sampling, "return_logprob": bool(args.context)}
        texts = [
            contexts_of(engine.tokenizer, args.context, count) for count in args.context_before
        ]
        runs = (evaluate(watches, prompts, x, request, args.batch_size) for x in texts)
        for batch in chain.from_iterable(runs):
            answers += batch
            length = f"accept length {summarize(answers)['accept_length']:.2f}"
            bar.set_description(length)
            bar.update(len(batch))
            if bar.disable:  # standard error is not a terminal
                print(f"{len(answers)} of {total} requests, {length}", file=sys.stderr)
        settings = common.settings_of(engine.get_server_info()) | sampling
    categories = {
        name: summarize([answer for answer in answers if answer.category == name])
        for name in dict.fromkeys(answer.category for answer in answers)
    }
    contexts = {f"to {most}": summarize(group) for most, group in by_context(answers).items()}
    overall = summarize(answers)
    speeds = {name: watch.num_tokens / watch.seconds for name, watch in watches.items()}
    for title, groups in ("category", categories), ("prompt tokens", contexts):
        rows = [
            row | {"name": name, "compared": f"{row['identical']}/{row['requests']}"}
            for name, row in (groups | {"all": overall}).items()
        ]
        columns = (title, "name", ""), *COLUMNS, *([LOGPROB] if args.context else [])
        print(common.table_of(columns, rows))
    print("  ".join(f"{name}: {speed:.1f} tok/s" for name, speed in speeds.items()))
    for answer in answers:
        if answer.difference is not None:
            print(f"{answer.question_id}, turn {answer.turn}: {answer.difference.describe()}")
    if args.output is not None:
        files: dict[str, Any] = {"prompts": {"file": args.prompts.name, "count": len(prompts)}}
        files |= {"context": [file.name for file in args.context]}
        files["context_before"] = args.context_before
        results = {
            "software": common.software(),
            "settings": settings | files,
            "seconds": {name: watch.seconds for name, watch in watches.items()},
            "tokens_per_second": speeds,
            "overall": overall,
            "categories": categories,
            "contexts": contexts,
            "requests": [dataclasses.asdict(answer) for answer in answers],
        }
        args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    is_exact = settings["dtype"] == "float32" or engine.args.enable_deterministic_inference
    return int(is_exact and overall["identical"] < overall["requests"])
