"""Command-line options of an engine, for every command that makes one.

Options that were not given stay out of the namespace, so that ``Engine`` keeps the only copy of
their defaults: the parser needs ``argument_default=argparse.SUPPRESS``.
"""

import argparse
from typing import Any

ENGINE_ARGUMENTS = (
    "model",
    "draft",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "draft_rope_theta",
    "speculative_adaptive",
    "speculative_adaptive_config",
    "dtype",
    "context_length",
    "page_size",
    "max_total_tokens",
    "chunked_prefill_size",
    "rounds_per_dispatch",
    "mem_fraction_static",
    "seed",
    "compile_cache_dir",
)


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of ``Engine`` that the command line sets."""
    given = {name: getattr(args, name) for name in ENGINE_ARGUMENTS if hasattr(args, name)}
    for name in ("speculative_algorithm", "compile_cache_dir"):
        if given.get(name) == "none":
            given[name] = None
    return given


def add_model_options(group: argparse._ArgumentGroup) -> None:
    """Which weights, and in which precision."""
    group.add_argument(
        "--model", help="embedded name, checkpoint directory or repo id (default: smollm2-135m)"
    )
    group.add_argument(
        "--draft", help="draft head: directory or repo id (default: the model's own)"
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="auto (default): float32 on a CPU, the checkpoint's own on a GPU",
    )


def add_speculation_options(group: argparse._ArgumentGroup) -> None:
    """What a round drafts."""
    group.add_argument(
        "--speculative-algorithm",
        choices=("EAGLE3", "EAGLE", "none"),
        default="EAGLE3",
        help="none decodes plainly (default: EAGLE3)",
    )
    group.add_argument(
        "--speculative-num-steps", type=int, metavar="N", help="tokens drafted per round"
    )
    group.add_argument("--speculative-eagle-topk", type=int, metavar="N")
    group.add_argument("--speculative-num-draft-tokens", type=int, metavar="N")
    group.add_argument(
        "--speculative-adaptive",
        action="store_true",
        help="choose the tokens drafted per round by what is being accepted",
    )
    group.add_argument(
        "--speculative-adaptive-config", metavar="FILE", help="JSON, see docs/adaptive_decoding.md"
    )
    group.add_argument(
        "--draft-rope-theta", type=float, metavar="X", help="override the head's rotary base"
    )


def add_memory_options(group: argparse._ArgumentGroup) -> None:
    """Sizes, and what happens at start-up."""
    group.add_argument("--context-length", type=int, metavar="N")
    group.add_argument("--page-size", type=int, metavar="N", help="tokens per KV page")
    group.add_argument("--max-total-tokens", type=int, metavar="N", help="size of the KV pool")
    group.add_argument("--chunked-prefill-size", type=int, metavar="N", help="prompt tokens a pass")
    group.add_argument(
        "--rounds-per-dispatch", type=int, metavar="N", help="rounds in one call on the device"
    )
    group.add_argument("--mem-fraction-static", type=float, metavar="X")
    group.add_argument("--seed", type=int, metavar="N", help="seed of unseeded sampled requests")
    group.add_argument(
        "--compile-cache-dir",
        metavar="DIR",
        help="where compiled functions are kept; none: nowhere",
    )
