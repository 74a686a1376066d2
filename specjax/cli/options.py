"""Command-line options of an engine, for every command that makes one.

Options that were not given stay out of the namespace, so that ``Engine`` keeps the only copy of
their defaults: the parser needs ``argument_default=argparse.SUPPRESS``.
"""

import argparse
from pathlib import Path
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
    "max_running_requests",
    "batch_buckets",
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


def add_batch_buckets_option(group: argparse._ArgumentGroup) -> None:
    """Which batch sizes are compiled."""
    group.add_argument(
        "--batch-buckets",
        type=lambda text: [int(part) for part in text.split(",")],
        metavar="N,N",
        help="batch sizes to compile for (default: powers of two, some from 2 on)",
    )


def add_start_options(group: argparse._ArgumentGroup) -> None:
    """What a start compiles, for commands that serve nobody."""
    group.add_argument(
        "--preset",
        metavar="NAME",
        default=None,
        help="a published model's shape with random weights instead of --model and --draft",
    )
    group.add_argument(
        "--max-running-requests",
        type=int,
        metavar="N",
        help="requests decoded at once (default: as the engine; specjax generate has 1)",
    )
    add_batch_buckets_option(group)


def with_preset(engine_args: dict[str, Any], preset: str | None, folder: Path) -> dict[str, Any]:
    """Keyword arguments of ``Engine`` for a preset, whose configurations go to ``folder``.

    Raises:
        ValueError: for an unknown preset, or one beside a model or a draft head.
    """
    if preset is None:
        return engine_args
    excluded = [f"--{name}" for name in ("model", "draft") if name in engine_args]
    if excluded:
        raise ValueError(f"--preset={preset} excludes {', '.join(excluded)}")
    from specjax.checkpoints.presets import write_preset

    target, draft = write_preset(preset, folder)
    dummy = {"model": str(target), "load_format": "dummy", "skip_tokenizer_init": True}
    has_head = engine_args["speculative_algorithm"] is not None
    return engine_args | dummy | ({"draft": str(draft)} if has_head else {})
