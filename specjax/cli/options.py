"""Command-line options of an engine, for every command that makes one.

Flags, types and help come from the fields of dataclasses and their descriptions. Options that
were not given stay out of the namespace, so that ``EngineArgs`` keeps the only copy of their
defaults: the parser needs ``argument_default=argparse.SUPPRESS``.
"""

import argparse
import inspect
import re
from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from specjax.checkpoints.presets import write_preset
from specjax.engine.args import EngineArgs
from specjax.speculative.registry import DEFAULT

MODEL = ("model", "draft", "dtype")
MEMORY = (
    "context_length",
    "page_size",
    "max_total_tokens",
    "chunked_prefill_size",
    "rounds_per_dispatch",
    "mem_fraction_static",
    "seed",
    "compile_cache_dir",
)
# --quiet says whether progress is shown
ALL = tuple(field.name for field in fields(EngineArgs) if field.name != "show_progress")
SPECULATION = tuple(name for name in ALL if name.startswith(("speculative_", "draft_")))
SERVING = tuple(name for name in ALL if name not in (*MODEL, *SPECULATION))


def add_options(group: argparse._ActionsContainer, cls: type, names: Collection[str]) -> None:
    """Add a flag for each of the fields of a dataclass that are named."""
    hints, help_texts = get_type_hints(cls), _descriptions(cls)
    for name in names:
        options = _option(hints[name]) | {"help": help_texts.get(name)}
        group.add_argument(f"--{name.replace('_', '-')}", **options)


def add_engine_options(parser: argparse.ArgumentParser, memory: Collection[str] = MEMORY) -> None:
    """Add flags for fields of ``EngineArgs``; a command line speculates unless told otherwise."""
    for title, names in (
        ("model", MODEL),
        ("speculation", SPECULATION),
        ("memory and start-up", memory),
    ):
        add_options(parser.add_argument_group(title), EngineArgs, names)
    parser.set_defaults(speculative_algorithm=DEFAULT)


def add_start_options(group: argparse._ArgumentGroup) -> None:
    """What a start compiles, for commands that serve nobody."""
    group.add_argument(
        "--preset",
        metavar="NAME",
        default=None,
        help="a published model's shape with random weights instead of --model and --draft",
    )
    add_options(group, EngineArgs, ("max_running_requests", "batch_buckets"))


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ALL if hasattr(args, name)}


def with_preset(engine_args: dict[str, Any], preset: str | None, folder: Path) -> dict[str, Any]:
    """Keyword arguments of ``Engine`` for a preset, whose configurations go to ``folder``."""
    if preset is None:
        return engine_args
    excluded = [f"--{name}" for name in ("model", "draft") if name in engine_args]
    if excluded:
        raise ValueError(f"--preset={preset} excludes {', '.join(excluded)}")
    target, draft = write_preset(preset, folder)
    dummy = {"model": str(target), "load_format": "dummy", "skip_tokenizer_init": True}
    has_head = EngineArgs(**engine_args).algorithm.reads("draft")
    return engine_args | dummy | ({"draft": str(draft)} if has_head else {})


def _option(hint: Any) -> dict[str, Any]:
    """How a value of a type is written on a command line."""
    kinds = [get_origin(kind) or kind for kind in get_args(hint) or (hint,)]
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction if NoneType in kinds else "store_true"}
    if int in kinds or float in kinds:
        return {"type": int, "metavar": "N"} if int in kinds else {"type": float, "metavar": "X"}
    if list in kinds:
        return {"action": "append", "metavar": "TEXT"}
    if Sequence in kinds:
        return {"type": _integers, "metavar": "N,N"}
    return {"type": _or_none if NoneType in kinds else str, "metavar": "TEXT"}


def _or_none(text: str) -> str | None:
    return None if text.lower() == "none" else text


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _descriptions(cls: type) -> dict[str, str]:
    attributes = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2]
    found = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", attributes, re.MULTILINE)
    return {
        name: " ".join(text.split()).replace("``", "").replace("%", "%%") for name, text in found
    }
