"""``specjax generate``: one prompt in, streamed text, figures or one JSON object out."""

import argparse
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from specjax.cli.accepts import AcceptPainter, use_colour
from specjax.cli.compare import Comparison, compare_with_plain
from specjax.sampling.params import SamplingParams
from specjax.text.tokenizer import IncrementalDecoder

SAMPLING_ARGUMENTS = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "min_new_tokens",
    "sampling_seed",
    "stop",
    "ignore_eos",
)


def run_generate(
    args: argparse.Namespace, engine_args: dict[str, Any], make_engine: Callable[..., Any]
) -> int:
    """Runs the command and returns its exit status.

    Args:
        args: the parsed command line.
        engine_args: keyword arguments of the engine.
        make_engine: builds the engine; called twice with ``--compare``.

    Returns:
        0, or 1 where ``--compare`` finds different texts in float32.

    Raises:
        ValueError: for options that exclude each other and whatever the engine refuses.
    """
    request = build_request(args)
    sampling = build_sampling(args)
    SamplingParams.of(sampling)  # refused before a model is loaded
    plain = engine_args["speculative_algorithm"] is None
    for option in ("compare", "show_accepts"):
        if plain and getattr(args, option):
            raise ValueError(
                f"--{option.replace('_', '-')} needs speculation; "
                "leave out --speculative-algorithm none"
            )
    if args.json and args.show_accepts:
        raise ValueError(
            "--show-accepts colours a text and --json prints none; its output_is_draft says which "
            "tokens were accepted"
        )
    with make_engine(**engine_args) as engine:
        outputs = engine.generate(sampling_params=sampling, stream=True, **request)
        if args.json:
            final = _last(outputs)
        elif args.show_accepts:
            final = _show_accepts(outputs, engine, legend=not args.quiet)
        else:
            final = _show_text(outputs)
        if not (args.json or args.quiet):
            print(figures(final["meta_info"]), file=sys.stderr)
        comparison = None
        if args.compare:
            comparison = compare_with_plain(engine, engine_args, make_engine, request, sampling)
        if args.json:
            print(json.dumps(_as_json(final, comparison), ensure_ascii=False))
        elif comparison is not None:
            print(comparison.report(engine.tokenizer.decode))
        return 0 if comparison is None or comparison.is_acceptable else 1


def build_request(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the prompt as keyword arguments of `Engine.generate`."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if args.raw:
        if args.system is not None:
            raise ValueError("--system belongs to the chat template, which --raw turns off")
        return {"prompt": prompt}
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return {"messages": [*system, {"role": "user", "content": prompt}]}


def build_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the sampling parameters that the command line sets.

    A comparison of sampled texts needs one seed for both runs; 0 is taken where none is given.
    """
    sampling = {name: getattr(args, name) for name in SAMPLING_ARGUMENTS if hasattr(args, name)}
    if args.compare and args.temperature > 0:
        sampling.setdefault("sampling_seed", 0)
    return sampling


def figures(meta: dict[str, Any]) -> str:
    """Returns the closing line: tokens, speed and, where drafts were verified, acceptance."""
    num_tokens, seconds = meta["completion_tokens"], meta["e2e_latency"]
    parts = [
        f"{num_tokens} tokens in {seconds:.2f} s",
        f"{tokens_per_second(meta):.1f} tok/s",
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
            f"{meta['spec_ema_accept_len']:.2f} drafts accepted on average",
            f"{meta['spec_num_wasted_drafts']} drafts wasted",
        ]
    return " | ".join([*parts, f"finished by {meta['finish_reason']['type']}"])


def tokens_per_second(meta: dict[str, Any]) -> float:
    """Returns completion tokens over the request's time, prefill included, start-up not."""
    return meta["completion_tokens"] / meta["e2e_latency"] if meta["e2e_latency"] > 0 else 0.0


def _last(outputs: Iterator[dict[str, Any]]) -> dict[str, Any]:
    return deque(outputs, maxlen=1)[0]


def _show_text(outputs: Iterator[dict[str, Any]]) -> dict[str, Any]:
    shown = 0

    def printed() -> Iterator[dict[str, Any]]:
        nonlocal shown
        for output in outputs:
            print(output["text"][shown:], end="", flush=True)
            shown = max(shown, len(output["text"]))
            yield output

    final = _last(printed())
    print(flush=True)
    return final


def _show_accepts(
    outputs: Iterator[dict[str, Any]], engine: Any, *, legend: bool
) -> dict[str, Any]:
    painter = AcceptPainter(
        IncrementalDecoder(engine.tokenizer).push, colour=use_colour(sys.stdout)
    )

    def printed() -> Iterator[dict[str, Any]]:
        for output in outputs:
            print(paint(output, final=False), end="", flush=True)
            yield output

    def paint(output: dict[str, Any], *, final: bool) -> str:
        is_draft = output["meta_info"]["output_is_draft"]
        return painter.paint(output["text"], output["output_ids"], is_draft, final=final)

    try:
        final = _last(printed())
        print(paint(final, final=True), flush=True)
    except KeyboardInterrupt:
        print(painter.end_mark(), end="", flush=True)
        raise
    if legend:
        print(painter.legend, file=sys.stderr)
    return final


def _as_json(final: dict[str, Any], comparison: Comparison | None) -> dict[str, Any]:
    body = {**final, "tokens_per_second": tokens_per_second(final["meta_info"])}
    return body if comparison is None else {**body, "compare": comparison.as_dict()}
