"""``specjax generate``: generate from one prompt; print streamed text and metrics, or JSON.

``--compare`` times the request with and without speculation and finds the first difference.
"""

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from specjax.cli.options import SERVING, add_command, add_engine_options, add_options, add_switches
from specjax.engine.args import EngineArgs
from specjax.sampling.params import SamplingParams
from specjax.speculative.catalog import PLAIN

if TYPE_CHECKING:
    from specjax.cli.painting import AcceptPainter

NUM_TIMED_RUNS = 3
NO_TIMEOUT = 1e9  # seconds
NO_GAIN = "drafts do not pay for this request here: verifying them takes longer than they save\n"
Decode = Callable[[list[int]], str]
# parameters without a command-line form are left out
SAMPLING_ARGUMENTS = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name
    not in "n logit_bias stop_token_ids allowed_token_ids bad_words cache_salt "
    "simulate_acceptance".split()
)


def add_generate_parser(commands: Any) -> None:
    parser = add_command(
        commands,
        "generate",
        run_generate,
        "generate text from one prompt",
        "Generate text from one prompt. The text goes to standard output. Progress and a final "
        "line of metrics go to standard error.",
        file_prefix=None,  # a prompt may begin with @
    )
    parser.add_argument("prompt", metavar="PROMPT", help="prompt, or - to read it from stdin")
    add_engine_options(parser, SERVING)
    group = parser.add_argument_group("prompt and sampling")
    add_switches(group, {"--raw": "skip the chat template"})
    group.add_argument("--system", default=None, help="system message for the chat template")
    add_options(group, SamplingParams, SAMPLING_ARGUMENTS)
    for action in group._group_actions:  # the command is greedy by default, unlike the engine
        action.help = str(action.help).replace("greedy (default: 1.0)", "greedy (default: 0)")
    switches = {
        "--compare": "also decode without speculation; report speed-up and whether texts are equal",
        "--show-accepts": "colour accepted draft tokens",
        "--show-tree": "draw the draft tree of each round with accepted tokens; slower, same text",
        "--json": "print only one JSON object",
        "--quiet": "hide progress and metrics",
    }
    add_switches(parser.add_argument_group("output"), switches)


def run_generate(
    args: argparse.Namespace, engine_args: dict[str, Any], make_engine: Callable[..., Any]
) -> int:
    """Run the command; return 1 if ``--compare`` finds texts that differ and must not, else 0."""
    sampling = _sampling(args)
    request = {"sampling_params": sampling, **_prompt(args)}
    SamplingParams.of(sampling)  # validate before loading a model
    for option in ("compare", "show_accepts", "show_tree"):
        if getattr(args, option) and engine_args["speculative_algorithm"] is None:
            flag = f"--{option.replace('_', '-')}"
            raise ValueError(f"{flag} needs speculation; set --draft or --speculative-algorithm")
    if args.json and args.show_accepts:
        raise ValueError(
            "--show-accepts cannot be combined with --json; output_is_draft in the JSON marks "
            "accepted tokens"
        )
    if args.json and args.show_tree:
        raise ValueError("--show-tree cannot be combined with --json; leave out one of them")
    # imported after the checks, because JAX takes seconds
    from specjax.cli.painting import AcceptPainter, TreePainter, use_colour, watched_trees
    from specjax.text.tokenizer import IncrementalDecoder

    engine_args = {"max_running_requests": 1} | engine_args
    adaptive = EngineArgs(**engine_args).adaptive
    # the EMA policy may move to any tier during the request
    on_use = adaptive is None or adaptive.policy != "ema"
    with make_engine(**engine_args, compile_on_use=on_use) as engine:
        colour = use_colour(sys.stdout)
        painter = None
        if args.show_accepts:
            painter = AcceptPainter(IncrementalDecoder(engine.tokenizer).push, colour=colour)
        with ExitStack() as stack:
            trees = stack.enter_context(watched_trees(engine)) if args.show_tree else []
            _compile_for(engine, request)
            engine.flush_cache()  # the request then computes its prompt, as in a new engine
            trees.clear()
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
        body = final | {"tokens_per_second": _tokens_per_second(final["meta_info"])}
        is_wrong = False
        if args.compare:
            stats, difference = compare_with_plain(engine, engine_args, make_engine, request)
            is_wrong = stats["is_exact"] and not stats["equal"]
            body["compare"] = stats | {"difference": difference and asdict(difference)}
            if not args.json:
                print(report(stats, difference, engine.tokenizer.decode))
        if args.json:
            print(json.dumps(body))  # escapes non-ASCII, which some locales cannot print
        return int(is_wrong)


def _compile_for(engine: Any, request: dict[str, Any]) -> None:
    """Compile the functions of a request, so that its time includes no compilation.

    The brief request has a seed, because others take the next one of the engine, and no deadline.
    """
    limits = {"max_new_tokens": 2, "min_new_tokens": 0}
    sampling = limits | {"sampling_seed": 0} | request["sampling_params"]
    sampling |= {name: min(2, sampling[name]) for name in limits} | {"ignore_eos": True}
    engine.generate(**request | {"sampling_params": sampling, "timeout": NO_TIMEOUT})


def _prompt(args: argparse.Namespace) -> dict[str, Any]:
    prompt = args.prompt
    if prompt == "-":
        if sys.stdin is None:
            raise ValueError("PROMPT is -, but standard input is closed")
        prompt = sys.stdin.read()
    if args.raw:
        if args.system is not None:
            raise ValueError("--system needs the chat template, which --raw turns off")
        return {"prompt": prompt}
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return {"messages": [*system, {"role": "user", "content": prompt}]}


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return sampling parameters (default: greedy). ``--compare`` sets one seed for both runs."""
    options = {name: getattr(args, name) for name in SAMPLING_ARGUMENTS if hasattr(args, name)}
    sampling: dict[str, Any] = {"temperature": 0.0} | options
    if args.compare and sampling["temperature"] > 0:
        sampling.setdefault("sampling_seed", 0)
    return sampling


def _figures(meta: dict[str, Any]) -> str:
    """Return the final line: tokens, speed and, if drafts were verified, acceptance."""
    figures = [
        f"{meta['completion_tokens']} tokens in {meta['e2e_latency']:.2f} s",
        f"{_tokens_per_second(meta):.1f} tok/s",
    ]
    if meta.get("spec_verify_ct") == 0:
        figures.append("no drafts")
    elif "spec_verify_ct" in meta:
        figures += [
            f"accept length {meta['spec_accept_length']:.2f}",
            f"accept rate {meta['spec_accept_rate']:.2f}",
            f"{meta['spec_verify_ct']} verify calls",
        ]
    if "spec_ema_accept_len" in meta:
        figures += [
            f"{meta['spec_num_steps']} steps at the end, {meta['spec_num_switches']} switches",
            f"{meta['spec_ema_accept_len']:.2f} accepted drafts on average without bonus",
            f"{meta['spec_num_wasted_drafts']} drafts wasted",
        ]
    return " | ".join([*figures, f"finished by {meta['finish_reason']['type']}"])


def _tokens_per_second(meta: dict[str, Any]) -> float:
    return meta["completion_tokens"] / meta["e2e_latency"] if meta["e2e_latency"] > 0 else 0.0


def _show(outputs: Iterator[dict[str, Any]], painter: "AcceptPainter | None") -> dict[str, Any]:
    num_shown = 0
    output: dict[str, Any] = {"text": "", "output_ids": [], "meta_info": {"output_is_draft": []}}

    def piece(*, final: bool) -> str:
        if painter is None:
            return output["text"][num_shown:]
        is_draft = output["meta_info"]["output_is_draft"]
        return painter.paint(output["text"], output["output_ids"], is_draft, final=final)

    try:
        for output in outputs:
            print(piece(final=False), end="", flush=True)
            num_shown = max(num_shown, len(output["text"]))
        print(piece(final=True), flush=True)
    except KeyboardInterrupt:
        print("" if painter is None else painter.end_mark(), end="", flush=True)
        raise
    return output


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first token that differs between two completions, and the logit gap there."""

    index: int  # index in the completion's tokens, from 0
    speculative_id: int | None  # None if the completion is shorter
    plain_id: int | None
    top_ids: tuple[int, int]  # top two tokens of the plain pass at this index
    gap: float  # difference between their logits

    def describe(self, decode: Decode | None = None) -> str:
        """Describe the difference; ``decode`` adds the text of tokens to their ids."""

        def name(token_id: int | None) -> str:
            if token_id is None:
                return "the end"
            return f"{token_id}" if decode is None else f"{token_id} {decode([token_id])!r}"

        return (
            f"token {self.index} is {name(self.speculative_id)} with speculation and "
            f"{name(self.plain_id)} without; the top two logits differ by {self.gap:.4g} "
            f"({name(self.top_ids[0])} and {name(self.top_ids[1])})"
        )


def find_difference(
    speculative_ids: Sequence[int], plain_ids: Sequence[int], prompt_ids: Sequence[int], plain: Any
) -> Difference:
    """Find where two completions first differ; the engine ``plain`` gives the top two tokens."""
    shorter = min(len(speculative_ids), len(plain_ids))
    index = next((i for i in range(shorter) if speculative_ids[i] != plain_ids[i]), shorter)
    output = plain.generate(
        input_ids=[*prompt_ids, *plain_ids[:index]],
        sampling_params={"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=2,
    )
    [[(best, top_id, _), (other, next_id, _)]] = output["meta_info"]["output_top_logprobs"]
    return Difference(
        index=index,
        speculative_id=speculative_ids[index] if index < len(speculative_ids) else None,
        plain_id=plain_ids[index] if index < len(plain_ids) else None,
        top_ids=(top_id, next_id),
        gap=best - other,
    )


def report(stats: dict[str, Any], difference: Difference | None, decode: Decode) -> str:
    """Describe the results of :func:`compare_with_plain` in lines of text."""
    texts = "the texts are equal"
    if difference is not None:
        texts = f"the texts differ: {difference.describe(decode)}"
        if stats["is_exact"]:
            texts += f"\nwith these options in {stats['dtype']}, texts must be equal: this is a bug"
    return (
        f"\nplain        {stats['plain_tokens_per_second']:8.1f} tok/s"
        f"\nspeculative  {stats['speculative_tokens_per_second']:8.1f} tok/s"
        f"\nspeed-up     {stats['speed_up']:8.2f}x  (median of {NUM_TIMED_RUNS} runs each, "
        f"with prefill, without start-up)\n{'' if stats['speed_up'] > 1.0 else NO_GAIN}{texts}"
    )


def compare_with_plain(
    engine: Any,
    engine_args: dict[str, Any],
    make_engine: Callable[..., Any],
    request: dict[str, Any],
) -> tuple[dict[str, Any], Difference | None]:
    """Time a request with ``engine``, which has answered it before, and with a plain engine.

    The plain engine shares the weights and all arguments except those about drafts. It compiles
    only the functions that this request uses. ``request`` has the keyword arguments of
    :meth:`Engine.generate`; it needs a seed if its temperature is above 0. Returns JSON values, of
    which ``is_exact`` says that the texts must be equal, and the first difference.
    """
    from specjax.engine.requests import tokenize_inputs
    from specjax.speculative.algorithm import DRAFTING

    plain_args = {name: x for name, x in engine_args.items() if not name.startswith(DRAFTING)}
    plain_args |= {"speculative_algorithm": PLAIN, "share_weights_with": engine}
    with make_engine(**plain_args, compile_on_use=True) as plain:
        # after its first call, an engine has the prompt in the prefix cache, as in the timed runs
        for untimed in (engine, plain, plain):
            _compile_for(untimed, request)
        engines = {"speculative": engine, "plain": plain}
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        ids: dict[str, list[int]] = {}
        # alternate, so that a change of clock speed affects both
        for _ in range(NUM_TIMED_RUNS):
            for name, timed in engines.items():
                start = time.perf_counter()
                ids[name] = timed.generate(**request)["output_ids"]
                seconds[name].append(time.perf_counter() - start)
        difference = None
        if ids["speculative"] != ids["plain"]:
            (prompt_ids,), _ = tokenize_inputs(
                engine.tokenizer, request.get("prompt"), None, request.get("messages")
            )
            difference = find_difference(ids["speculative"], ids["plain"], prompt_ids, plain)
    dtype = engine.target.config.dtype
    samples = SamplingParams.of(request["sampling_params"]).temperature > 0
    is_lossless = engine.args.acceptance.is_coupled or not samples
    speculative, plainly = (len(ids[name]) / statistics.median(seconds[name]) for name in engines)
    return {
        "dtype": dtype,
        "is_exact": (dtype == "float32" or engine.args.enable_deterministic_inference)
        and is_lossless,
        "plain_tokens_per_second": plainly,
        "speculative_tokens_per_second": speculative,
        "speed_up": speculative / plainly,
        "equal": difference is None,
    }, difference
