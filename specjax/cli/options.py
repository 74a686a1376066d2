"""Command-line options of an engine, for every command that makes one.

Flags, types and help come from the fields and docstrings of dataclasses. Options that are not set
stay out of the namespace, so that only ``EngineArgs`` defines their defaults. The parser therefore
needs ``argument_default=argparse.SUPPRESS``.
"""

import argparse
import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from specjax.cli.parser import add_aliases, add_answers, translated
from specjax.config import EMBEDDED_MODELS
from specjax.engine.args import CHOICES, EngineArgs
from specjax.engine.names import flag
from specjax.speculative.catalog import DEFAULT

MODEL = ("model", "draft", "dtype", "tokenizer", "chat_template", "revision")
# further options of commands that do not serve
MEMORY = (
    "quantization quantize_activations kv_cache_dtype context_length page_size max_total_tokens "
    "chunked_prefill_size rounds_per_dispatch mem_fraction_static seed compile_cache_dir "
    "enable_deterministic_inference"
).split()
# show_progress is set by --quiet
ALL = tuple(field.name for field in fields(EngineArgs) if field.name != "show_progress")
SPECULATION = tuple(name for name in ALL if name.startswith(("speculative_", "draft_")))
SUFFIXES = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
SECRET, VARIABLE = "disaggregation_secret", "SPECJAX_DISAGGREGATION_SECRET"  # secrets are not flags
SERVING = tuple(name for name in ALL if name not in (*MODEL, *SPECULATION, SECRET))


def add_command(
    commands: Any,
    name: str,
    run: Callable[..., int],
    summary: str,
    description: str,
    *,
    file_prefix: str | None = "@",
) -> Any:
    """Add the parser of a command that makes an engine and can read options from ``@FILE``."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        argument_default=argparse.SUPPRESS,
        fromfile_prefix_chars=file_prefix,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def add_switches(group: argparse._ActionsContainer, switches: Mapping[str, str]) -> None:
    for switch, text in switches.items():
        group.add_argument(switch, action="store_true", default=False, help=text)


def add_options(group: argparse._ActionsContainer, cls: type, names: Collection[str]) -> None:
    """Add a flag for each named field of a dataclass."""
    hints, help_texts = get_type_hints(cls), _descriptions(cls)
    defaults = {field.name: field.default for field in fields(cls)}
    for name in names:
        text, default = help_texts.get(name, ""), defaults[name]
        text = text if ". " in text else text.rstrip(".")
        options = _option(hints[name], default)
        if choices := CHOICES.get(name):
            options |= {"choices": [choice for choice in choices if choice], "metavar": None}
            options["type"] = translated(name, options["type"])
        if default is not None and not isinstance(default, bool) and default != "":
            text += f" (default: {default})"
        group.add_argument(flag(name), **options, help=text)
        if cls is EngineArgs:
            add_aliases(group, name, options)


def add_engine_options(parser: argparse.ArgumentParser, memory: Collection[str] = MEMORY) -> None:
    groups = {"model": MODEL, "speculation": SPECULATION, "memory and start-up": memory}
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        add_options(group, EngineArgs, names)
    if "disaggregation_mode" in memory:
        group.add_argument(
            "--disaggregation-secret-file",
            dest=SECRET,
            type=_first_line,
            metavar="FILE",
            help=f"file whose first line is the secret that both sides share; or set {VARIABLE}",
        )
        group.add_argument("--disaggregation-secret", type=_refused, help=argparse.SUPPRESS)
    add_answers(parser)


def add_model(parser: argparse.ArgumentParser) -> None:
    text = "the same as --model"
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help=text)


def add_start_options(
    group: argparse._ArgumentGroup,
    names: Collection[str] = ("max_running_requests", "batch_buckets"),
) -> None:
    """Add the options that determine which functions a start compiles."""
    group.add_argument(
        "--preset",
        metavar="NAME",
        default=None,
        help="use the shape of this published model, with random weights, instead of --model and "
        "--draft",
    )
    add_options(group, EngineArgs, names)


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the ``Engine`` arguments that are set; speculation is on if a draft is available."""
    options = {name: getattr(args, name) for name in ALL if hasattr(args, name)}
    if hasattr(args, "positional_model"):
        model = args.positional_model
        if options.setdefault("model", model) != model:
            raise ValueError(f"MODEL={model} and --model={options['model']} differ; pass only one")
    if "disaggregation_mode" in options:
        options.setdefault(SECRET, os.environ.get(VARIABLE, ""))
    has_head = (
        options.get("draft") is not None
        or options.get("model", EngineArgs.model) in EMBEDDED_MODELS
        or getattr(args, "preset", None) is not None
    )
    algorithm = DEFAULT
    if preset := getattr(args, "preset", None):
        from specjax.checkpoints.presets import preset_algorithm

        algorithm = preset_algorithm(preset) or DEFAULT
    return {"speculative_algorithm": algorithm if has_head else None} | options


def with_preset(engine_args: dict[str, Any], preset: str | None, folder: Path) -> dict[str, Any]:
    """Return the ``Engine`` arguments for a preset; write its configurations to ``folder``."""
    if preset is None:
        return engine_args
    if conflicts := ", ".join(f"--{name}" for name in ("model", "draft") if name in engine_args):
        raise ValueError(f"--preset={preset} and {conflicts} cannot be combined; pass only one")
    from specjax.checkpoints.presets import write_preset

    target, draft = write_preset(preset, folder)
    dummy = {"model": str(target), "load_format": "dummy", "skip_tokenizer_init": True}
    has_head = EngineArgs(**engine_args).algorithm.reads("draft")
    return engine_args | dummy | ({"draft": str(draft)} if has_head else {})


def _option(hint: Any, default: Any) -> dict[str, Any]:
    kinds = [get_origin(kind) or kind for kind in get_args(hint) or (hint,)]
    if bool in kinds:
        has_no = NoneType in kinds or default is True
        return {"action": argparse.BooleanOptionalAction if has_no else "store_true"}
    if int in kinds or float in kinds:
        is_integer = int in kinds
        return {"type": _integer if is_integer else float, "metavar": "N" if is_integer else "X"}
    if list in kinds:
        return {"action": "append", "metavar": "TEXT"}
    if Sequence in kinds:
        return {"type": _integers, "metavar": "N,N"}
    kind = (lambda text: None if text.lower() == "none" else text) if NoneType in kinds else str
    return {"type": kind, "metavar": "TEXT"}


def _integer(text: str) -> int:
    """Read an integer, perhaps with vLLM's suffix: 32k is 32,000 and 32K is 32,768."""
    try:
        return int(text[:-1]) * SUFFIXES[text[-1:]] if text[-1:] in SUFFIXES else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _first_line(path: str) -> str:
    try:
        line = Path(path).read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{path!r}: {error}") from None
    if not line:
        raise argparse.ArgumentTypeError(f"{path!r} must have the secret in its first line")
    return line


def _refused(_: str) -> str:
    raise argparse.ArgumentTypeError(
        "a secret on the command line is visible to other users; use "
        f"--disaggregation-secret-file or set {VARIABLE} in the environment"
    )


def _descriptions(cls: type) -> dict[str, str]:
    attributes = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2]
    pairs = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", attributes, re.MULTILINE)
    return {key: " ".join(text.split()).replace("``", "").replace("%", "%%") for key, text in pairs}
