"""``specjax generate``: one prompt in, streamed text, figures or one JSON object out."""

import argparse
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, fields
from typing import Any

from specjax.cli.accepts import AcceptPainter, use_colour
from specjax.cli.compare import compare_with_plain
from specjax.cli.options import SERVING, add_engine_options, add_options
from specjax.cli.trees import TreePainter, watched_trees
from specjax.sampling.params import SamplingParams
from specjax.text.tokenizer import IncrementalDecoder

# samples and biases have no form on a command line
SAMPLING_ARGUMENTS = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name not in ("n", "logit_bias", "stop_token_ids")
)


def add_generate_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate text from one prompt",
        description="Generate text from one prompt. The text goes to standard output; progress and "
        "the closing line of figures go to standard error.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt, or - to read it from stdin")
    add_engine_options(parser, SERVING)
    group = parser.add_argument_group("prompt and sampling")
    group.add_argument("--raw", action="store_true", default=False, help="no chat template")
    group.add_argument("--system", default=None, help="system message of the chat template")
    add_options(group, SamplingParams, SAMPLING_ARGUMENTS)
    output = parser.add_argument_group("output")
    for flag, text in (
        ("--compare", "also decode plainly: speed-up, and whether the texts are equal"),
        ("--show-accepts", "colour the accepted drafts"),
        ("--show-tree", "draw what each round drafted and accepted; slower rounds, equal text"),
        ("--json", "print one JSON object and nothing else"),
        ("--quiet", "no progress and no figures"),
    ):
        output.add_argument(flag, action="store_true", default=False, help=text)


def run_generate(
    args: argparse.Namespace, engine_args: dict[str, Any], make_engine: Callable[..., Any]
) -> int:
    """Run the command; returns 1 where ``--compare`` finds different texts in float32, else 0."""
    sampling = _sampling(args)
    request = {"sampling_params": sampling, **_prompt(args)}
    SamplingParams.of(sampling)  # refused before a model is loaded
    for option in ("compare", "show_accepts", "show_tree"):
        if getattr(args, option) and engine_args["speculative_algorithm"] is None:
            flag = f"--{option.replace('_', '-')}"
            raise ValueError(f"{flag} needs speculation; give --draft or --speculative-algorithm")
    if args.json and args.show_accepts:
        raise ValueError(
            "--show-accepts colours a text and --json prints none; its output_is_draft says which "
            "tokens were accepted"
        )
    if args.json and args.show_tree:
        raise ValueError("--show-tree draws trees and --json prints none; leave out one of them")
    with make_engine(**engine_args) as engine:
        colour = use_colour(sys.stdout)
        painter = None
        if args.show_accepts:
            painter = AcceptPainter(IncrementalDecoder(engine.tokenizer).push, colour=colour)
        with ExitStack() as stack:
            trees = stack.enter_context(watched_trees(engine)) if args.show_tree else []
            outputs = engine.generate(stream=True, **request)
            final = deque(outputs, maxlen=1)[0] if args.json else _show(outputs, painter)
        if args.show_tree:
            tree_painter = TreePainter(engine.tokenizer.decode, colour=colour)
            print(tree_painter.draw(trees, len(final["output_ids"])))
        if not args.quiet:
            if painter is not None:
                print(painter.legend, file=sys.stderr)
            if args.show_tree:
                print(tree_painter.legend, file=sys.stderr)
            if not args.json:
                print(_figures(final["meta_info"]), file=sys.stderr)
        comparison = None
        if args.compare:
            comparison = compare_with_plain(engine, engine_args, make_engine, request)
        if args.json:
            body = final | {"tokens_per_second": _tokens_per_second(final["meta_info"])}
            if comparison is not None:
                body["compare"] = asdict(comparison)
            print(json.dumps(body))  # escaped: not every locale can write every character
        elif comparison is not None:
            print(comparison.report(engine.tokenizer.decode))
        return 0 if comparison is None or comparison.is_acceptable else 1


def _prompt(args: argparse.Namespace) -> dict[str, Any]:
    prompt = args.prompt
    if prompt == "-":
        if sys.stdin is None:
            raise ValueError("the prompt is -, but standard input is closed")
        prompt = sys.stdin.read()
    if args.raw:
        if args.system is not None:
            raise ValueError("--system belongs to the chat template, which --raw turns off")
        return {"prompt": prompt}
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return {"messages": [*system, {"role": "user", "content": prompt}]}


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Sampling parameters, greedy unless told otherwise; ``--compare`` needs a seed for both."""
    given = {name: getattr(args, name) for name in SAMPLING_ARGUMENTS if hasattr(args, name)}
    sampling: dict[str, Any] = {"temperature": 0.0} | given
    if args.compare and sampling["temperature"] > 0:
        sampling.setdefault("sampling_seed", 0)
    return sampling


def _figures(meta: dict[str, Any]) -> str:
    """The closing line: tokens, speed and, where drafts were verified, acceptance."""
    parts = [
        f"{meta['completion_tokens']} tokens in {meta['e2e_latency']:.2f} s",
        f"{_tokens_per_second(meta):.1f} tok/s",
    ]
    if meta.get("spec_verify_ct"):
        parts += [
            f"accept length {meta['spec_accept_length']:.2f}",
            f"accept rate {meta['spec_accept_rate']:.2f}",
            f"{meta['spec_verify_ct']} verify calls",
        ]
    if "spec_ema_accept_len" in meta:
        parts += [
            f"{meta['spec_num_steps']} steps at the end, {meta['spec_num_switches']} switches",
            f"{meta['spec_ema_accept_len']:.2f} drafts accepted on average, bonus left out",
            f"{meta['spec_num_wasted_drafts']} drafts wasted",
        ]
    return " | ".join([*parts, f"finished by {meta['finish_reason']['type']}"])


def _tokens_per_second(meta: dict[str, Any]) -> float:
    return meta["completion_tokens"] / meta["e2e_latency"] if meta["e2e_latency"] > 0 else 0.0


def _show(outputs: Iterator[dict[str, Any]], painter: AcceptPainter | None) -> dict[str, Any]:
    shown = 0
    output: dict[str, Any] = {"text": "", "output_ids": [], "meta_info": {"output_is_draft": []}}

    def piece(*, final: bool) -> str:
        if painter is None:
            return output["text"][shown:]
        is_draft = output["meta_info"]["output_is_draft"]
        return painter.paint(output["text"], output["output_ids"], is_draft, final=final)

    try:
        for output in outputs:
            print(piece(final=False), end="", flush=True)
            shown = max(shown, len(output["text"]))
        print(piece(final=True), flush=True)
    except KeyboardInterrupt:
        print("" if painter is None else painter.end_mark(), end="", flush=True)
        raise
    return output
