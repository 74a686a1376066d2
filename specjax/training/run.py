"""Run a training: generate the target's answers, train a draft on them, and export the draft."""

import argparse
import dataclasses
import json
import logging
import os
import sys
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from specjax.checkpoints import TargetCheckpoint, open_target
from specjax.checkpoints.block import open_block
from specjax.checkpoints.draft import open_draft
from specjax.checkpoints.export import export_draft
from specjax.checks import check_integer, check_number, is_integer
from specjax.config import BlockConfig, DraftConfig, ModelConfig
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel
from specjax.models.gated_delta import DeltaConfig
from specjax.models.short_conv import ConvConfig
from specjax.training.block import BlockTrainer, block_draft_config, feature_scale
from specjax.training.collect import CollectConfig, collect, read_prompts
from specjax.training.data import Corpus, batches, draft_vocabulary, pack
from specjax.training.generate import Sampler
from specjax.training.trainer import (
    TrainConfig,
    Trainer,
    TrainState,
    checkpoint_manager,
    default_draft_config,
    restore_state,
    save_state,
)
from specjax.training.ttt import PackedBatch, StepStatistics

logger = logging.getLogger(__name__)

# several small files are easier to transfer than one large file
SHARD_BYTES = 15_000_000


NUMBER_LIMITS: dict[str, dict[str, float]] = {
    "held_out": {"at_least": 0.0, "below": 1.0},
    "join": {"at_least": 0.0, "at_most": 1.0},
    "hard_weight": {"at_least": 0.0, "at_most": 1.0},
    "learning_rate": {"above": 0.0},
}


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for invalid arguments, before anything is loaded."""
    for name, value in vars(args).items():
        if is_integer(value):
            least = 0 if name in ("seed", "self_sample", "file_samples", "warmup_steps") else 1
            check_integer(option(name), value, least)
        elif isinstance(value, float):
            check_number(option(name), value, **NUMBER_LIMITS[name])
    if args.generate_only and args.data is None:
        raise ValueError("--generate-only needs --data")
    if not args.generate_only and args.output is None:
        raise ValueError("--output is required unless --generate-only is given")
    if not (args.self_sample or args.prompts or (args.data is not None and args.data.exists())):
        raise ValueError(
            "nothing to train on: pass prompt files (--prompts), or the number of prompts to "
            "sample from the target (--self-sample), or both"
        )
    for name in ("output", "checkpoint_dir", "data", "report"):
        path = getattr(args, name)
        if path is None:
            continue
        is_file = name in ("data", "report")
        if is_file and path.is_dir():
            raise ValueError(f"{option(name)} {path} is a directory")
        folder = path.absolute().parent if is_file else path.absolute()
        there = next(p for p in (folder, *folder.parents) if p.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise ValueError(f"{option(name)} {path}: {there} is not a writable directory")


def run(args: argparse.Namespace) -> None:
    """Generate, train and export as the options of ``scripts/train_draft.py`` say."""
    entries = [entry for path in args.prompts for entry in read_prompts(path)]
    on_gpu = jax.default_backend() == "gpu"
    dtype = args.dtype if args.dtype != "auto" else ("bfloat16" if on_gpu else "float32")
    target = open_target(args.model, dtype=dtype)
    model = target.config
    if model.quantization is not None:
        raise ValueError(
            f"--model {args.model}: training needs whole weights, not {model.quantization}"
        )
    if isinstance(model, DeltaConfig | ConvConfig):
        layers = "recurrent layers" if isinstance(model, DeltaConfig) else "short convolutions"
        raise ValueError(f"--model {args.model}: training does not support {layers}")
    opened = args.initial and open_initial(args, target)
    draft = opened.config if opened else draft_config(args, model)
    args.data = args.data or data_file(args, target.path, entries)
    num_answers = args.self_sample + len(entries) * (1 + args.file_samples)
    if args.batch_rows > num_answers and not (args.generate_only or args.data.exists()):
        raise ValueError(
            f"--batch-rows={args.batch_rows} exceeds the {num_answers} answers to generate; "
            "lower it, or use more prompts (--prompts, --self-sample)"
        )
    max_new_tokens = max(args.max_answer_tokens, args.max_user_tokens)
    longest = args.max_prompt_len + max_new_tokens
    if longest > model.context_limit:
        raise ValueError(
            f"--max-prompt-len={args.max_prompt_len} plus {max_new_tokens} tokens (the larger of "
            "--max-answer-tokens and --max-user-tokens) exceeds the model's context of "
            f"{model.context_limit} tokens; lower one of them"
        )
    if args.join and args.row_length > model.context_limit:
        raise ValueError(
            f"--row-length={args.row_length} exceeds the model's context of {model.context_limit} "
            "tokens, and --join makes texts as long as a row; lower --row-length"
        )
    if args.join:
        longest = max(longest, args.row_length)
    corpus = make_corpus(args, entries, target, dtype, max_new_tokens)
    report: dict[str, Any] = {"model": args.model, "data": corpus.describe()}
    if not args.generate_only:
        training, held = corpus.split(args.held_out, args.seed)
        args.learning_rate = args.learning_rate or 3e-3 * min(1.0, 576 / draft.hidden_size)
        args.warmup_steps = min(args.warmup_steps, args.steps - 1)
        config = TrainConfig(**chosen(args, TrainConfig))
        flat = FlatModel.of(partial(CausalLM, model.within(longest), implementation="xla"))
        weights = tuple(jax.device_put(w) for w in flat.order(target.load_weights()))
        initial = opened.load_weights() if opened else {}
        vocabulary = draft_vocabulary(training, draft.draft_vocab_size, model.vocab_size)
        if "d2t" in initial:
            vocabulary = np.arange(len(initial["d2t"]), dtype=np.int32) + initial["d2t"]
        rows, held_rows = (
            pack(x, config.row_length, args.seed, config.join) for x in (training, held)
        )
        arguments = config, draft.within(longest), flat, weights, vocabulary
        if args.algorithm != "EAGLE3":
            sample = PackedBatch(*(x[:2] for x in rows))
            scale = feature_scale(flat, weights, draft.feature_layers, sample)
            trainer: Trainer = BlockTrainer(*arguments, scale)
        else:
            trainer = Trainer(*arguments)
        state = train(args, trainer, trainer.init(initial), rows, held_rows)
        report |= {"steps": int(state.step), "config": dataclasses.asdict(config)}
        named = trainer.named_weights(state.params)
        export_draft(args.output, draft, named, max_shard_bytes=SHARD_BYTES)
        logger.info("wrote %s", args.output)
        if len(held_rows.tokens):
            figures = trainer.evaluate(state.params, held_rows)
            report["held_out_acceptance"] = [float(a) for a in figures.acceptance()]
            report["predicted_accept_length"] = figures.accept_length()
    if args.report is not None:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def open_initial(args: argparse.Namespace, target: TargetCheckpoint) -> Any:
    """Open the draft that training starts from."""
    opened: Any
    if args.algorithm == "EAGLE3":
        opened = open_draft(args.initial, target, checkpoint_format="eagle-3")
        unsupported = opened.config.windows
    else:
        opened = open_block(args.initial, target)
        config = opened.config
        if (config.markov_head is None) != (args.algorithm == "DFLASH"):
            raise ValueError(f"--initial {args.initial} is not for --algorithm {args.algorithm}")
        unsupported = *config.windows, *config.causal, config.qkv_bias
    if any(unsupported) or opened.config.quantization is not None:
        raise ValueError(
            f"--initial {args.initial}: drafters with sliding windows, causal layers, biases or "
            "quantised matrices cannot be trained; leave --initial out"
        )
    return opened


def draft_config(args: argparse.Namespace, model: ModelConfig) -> DraftConfig | BlockConfig:
    largest = 8192 if args.algorithm == "EAGLE3" else model.vocab_size
    changes = {
        "intermediate_size": args.intermediate_size or model.intermediate_size,
        "draft_vocab_size": min(args.draft_vocab_size or largest, model.vocab_size),
    }
    if args.algorithm == "EAGLE3":
        changes |= {"has_fc_norm": args.fc_norm, "norm_output": args.norm_output}
        return default_draft_config(model, **changes)
    changes |= {"num_layers": args.draft_layers, "num_drafts": args.num_drafts}
    changes["markov_rank"] = args.markov_rank
    if args.algorithm == "DFLASH":
        changes |= {"anchor_first": False, "markov_head": None, "markov_rank": 0}
        changes |= dict.fromkeys(("has_confidence_head", "confidence_with_markov"), False)
    return block_draft_config(model, **changes)


def chosen(args: argparse.Namespace, config: Any) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(config)}


def data_file(args: argparse.Namespace, model: Path, entries: list[tuple[str, str]]) -> Path:
    """The default path of ``--data``, which depends on the options, prompts and model files."""
    files = [path for path in (model, *model.glob("*")) if path.is_file()]
    stamps = sorted((str(path.resolve()), path.stat().st_mtime_ns) for path in files)
    options = (args.dtype, args.max_prompt_len, chosen(args, CollectConfig))
    name = sha256(repr((stamps, options, entries)).encode()).hexdigest()[:12]
    return args.output / f"data-{name}.npz"


def make_corpus(
    args: argparse.Namespace,
    entries: list[tuple[str, str]],
    target: TargetCheckpoint,
    dtype: str,
    max_new_tokens: int,
) -> Corpus:
    if args.data.exists():
        logger.info("using the text in %s", args.data)
        corpus = Corpus.load(args.data)
        largest = max((x.tokens.max(initial=0) for x in corpus), default=0)
        limit = target.config.vocab_size
        if largest >= limit:
            raise ValueError(
                f"{args.data} was generated for another model: it contains token {largest}, but "
                f"--model has {limit} tokens; pass another --data"
            )
        return corpus
    config, tokenizer = CollectConfig(**chosen(args, CollectConfig)), target.load_tokenizer()
    sampler = Sampler.open(
        args.model,
        dtype,
        stop_ids=tokenizer.eos_token_ids,
        num_rows=args.generator_rows,
        prefill_rows=args.prefill_rows,
        max_prompt_len=args.max_prompt_len,
        max_new_tokens=max_new_tokens,
    )
    bar = tqdm(unit="tok", unit_scale=True, mininterval=2.0, disable=None, desc="generating")
    with sampler.engine, bar:
        corpus = collect(sampler, tokenizer, config, entries, lambda _, count: bar.update(count))
    logger.info("generated %d sequences with %d answer tokens", len(corpus), corpus.answer_tokens)
    corpus.save(args.data)
    return corpus


def train(
    args: argparse.Namespace,
    trainer: Trainer,
    state: TrainState,
    rows: PackedBatch,
    held: PackedBatch,
) -> TrainState:
    """Run the training loop from ``state``, or from the latest one in ``--checkpoint-dir``."""
    config = trainer.config
    fill = float((rows.segments > 0).mean())
    logger.info("%d training rows of %d tokens, %.0f%% full", *rows.tokens.shape, 100 * fill)
    manager = checkpoint_manager(args.checkpoint_dir) if args.checkpoint_dir else None
    if manager is not None and (restored := restore_state(manager, state, trainer.vocabulary)):
        state = restored
        logger.info("resumed at step %d", int(state.step))
    first_step = int(state.step)
    last = min(config.steps, args.stop_at or config.steps)
    stream = batches(rows, config.batch_rows, config.seed, first_step)
    with tqdm(
        total=config.steps, initial=first_step, mininterval=2.0, disable=None, desc="training"
    ) as bar:
        for done in range(first_step + 1, last + 1):
            state, statistics = trainer.step(state, trainer.target_weights, next(stream))
            if done % args.log_every == 0 or done == last:
                bar.update(done - bar.n)
                bar.set_postfix_str(summary(statistics), refresh=False)
                if bar.disable:  # standard error is not a terminal
                    logger.info("step %d of %d: %s", done, config.steps, summary(statistics))
            if done % args.checkpoint_every == 0 or done == last:
                if manager is not None:
                    save_state(manager, state, trainer.vocabulary)
                if len(held.tokens):
                    figures = trainer.evaluate(state.params, held)
                    tqdm.write(f"step {done}, held-out data: {summary(figures)}", file=sys.stderr)
    return state


def summary(statistics: StepStatistics) -> str:
    loss = float(statistics.loss[0] / max(float(statistics.weight[0]), 1.0))
    steps = " ".join(f"{a:.2f}" for a in statistics.acceptance())
    return f"loss {loss:.3f} accept [{steps}] length {statistics.accept_length():.3f}"
