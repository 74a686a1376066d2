#!/usr/bin/env python3
"""Train a draft for a target model on the target's own text: an EAGLE-3 head or a block drafter.

The three stages are prompts (from files, or sampled from the target), the target's answers to
them, and training with an export in the published format. Each stage can run on its own.

    python scripts/train_draft.py --model smollm2-135m --self-sample 2000 --output my-head
    python scripts/train_draft.py --model DIR --prompts questions.jsonl --output my-head

A later run with the same target, prompts and options reads the generated text from --output.
"""

import argparse
import logging
import sys
from pathlib import Path

from specjax.cli.main import report_error
from specjax.cli.options import add_options
from specjax.training.collect import CollectConfig
from specjax.training.run import check_arguments, run
from specjax.training.trainer import TrainConfig


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="name, directory, .gguf file or repo id")
    dtypes = ("auto", "bfloat16", "float32")
    add("--dtype", default="auto", choices=dtypes, help="auto is bfloat16 on a GPU, else float32")
    output = "directory for the exported draft; required unless --generate-only; no default"
    add("--output", type=Path, help=output)
    add("--seed", type=int, help="seed of prompts, answers, held-out data and training")
    data = parser.add_argument_group("data")
    add = data.add_argument
    prompts = "file of prompts, repeatable; no default"
    add("--prompts", type=Path, action="append", default=[], metavar="FILE.jsonl", help=prompts)
    text = "corpus .npz to read if it exists, else to write (default: data-*.npz in --output)"
    add("--data", type=Path, help=text)
    add("--generate-only", action="store_true", help="stop after writing --data")
    add("--max-prompt-len", type=int, default=224, help="skip prompts above this many tokens")
    add("--generator-rows", type=int, default=64, help="sequences generated in parallel")
    add("--prefill-rows", type=int, default=16, help="prompts prefilled in parallel")
    add = parser.add_argument_group("draft").add_argument
    names = ("EAGLE3", "DSPARK", "DFLASH")
    add("--algorithm", default="EAGLE3", choices=names, help="algorithm that the draft is for")
    text = "draft to start from, whose sizes and vocabulary stay (default: none)"
    add("--initial", metavar="DRAFT", help=text)
    add("--draft-layers", type=int, default=3, help="layers of a block drafter")
    add("--num-drafts", type=int, default=7, help="tokens that a block drafts")
    add("--markov-rank", type=int, default=32, help="rank of the Markov head (DSPARK)")
    size = "number of tokens that the draft can predict, the most frequent ones of the answers; "
    size += (
        "default: 8192 for EAGLE3; all for block drafters, which then use the target's output head"
    )
    add("--draft-vocab-size", type=int, help=size)
    add("--intermediate-size", type=int, help="size of the feed-forward layer (default: target's)")
    switch = argparse.BooleanOptionalAction
    add("--fc-norm", action=switch, default=True, help="normalize each feature (EAGLE 3.1)")
    fed_back = "feed back normalized output (EAGLE 3.1)"
    add("--norm-output", action=switch, default=True, help=fed_back)
    training = parser.add_argument_group("training")
    add = training.add_argument
    add("--stop-at", type=int, help="step at which this run ends (default: --steps)")
    add("--held-out", type=float, default=0.01, help="share of the prompts held out of training")
    checkpoints = "orbax checkpoints; the run resumes from the latest; no default"
    add("--checkpoint-dir", type=Path, help=checkpoints)
    add("--checkpoint-every", type=int, default=1000, help="steps between checkpoints")
    add("--log-every", type=int, default=50, help="steps between updates of the progress bar")
    add("--report", type=Path, help="write metrics to this file as JSON; no default")
    for group, config in ((data, CollectConfig()), (training, TrainConfig())):
        add_options(group, type(config), [name for name in vars(config) if name != "seed"])
        parser.set_defaults(**vars(config))
    parser.set_defaults(learning_rate=None)  # depends on the width of the draft
    for action in parser._actions:
        if "default" not in str(action.help) and action.default != argparse.SUPPRESS:
            action.help = f"{str(action.help).rstrip('.')} (default: %(default)s)"
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    logging.getLogger("absl").setLevel(logging.WARNING)
    try:
        check_arguments(args)
        run(args)
    except (ValueError, OSError) as error:
        return report_error("train_draft", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
