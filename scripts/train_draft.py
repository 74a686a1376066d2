#!/usr/bin/env python3
"""Train an EAGLE-3 draft head for a target model on the target's own text.

Three stages, each of which can be run by itself: prompts (from files, or sampled from the target
itself), the target's answers to them, and training with an export in the published format.

    python scripts/train_draft.py --model smollm2-135m --self-sample 2000 --output my-head
    python scripts/train_draft.py --model DIR --prompts questions.jsonl --output my-head
"""

import argparse
import dataclasses
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from specjax.checkpoints import open_target
from specjax.checkpoints.export import export_draft
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel
from specjax.training.collect import (
    CollectConfig,
    answer_prompts,
    collect,
    file_prompts,
    read_prompts,
)
from specjax.training.data import Corpus, draft_vocabulary, pack
from specjax.training.generate import GeneratorConfig, Sampler
from specjax.training.measure import measure_acceptance
from specjax.training.saving import checkpoint_manager, restore_state, save_state
from specjax.training.trainer import TrainConfig, Trainer, TrainState, head_config

logger = logging.getLogger("train_draft")

# small files travel better than one large file
SHARD_BYTES = 15_000_000


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command-line arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="name, directory, .gguf file or repo id")
    add("--dtype", default="auto", help="float32, bfloat16 or auto (bfloat16 on a GPU)")
    add("--output", type=Path, help="directory of the exported head")
    add("--seed", type=int, default=0)
    data = parser.add_argument_group("data")
    add = data.add_argument
    add("--prompts", type=Path, action="append", default=[], metavar="FILE.jsonl")
    add("--self-sample", type=int, default=0, metavar="N", help="prompts sampled from the target")
    add("--file-samples", type=int, default=1, help="sampled answers for each prompt of a file")
    add("--data", type=Path, help="corpus .npz: read if it exists, else written")
    add("--generate-only", action="store_true", help="stop once --data is written")
    add("--max-answer-tokens", type=int, default=256)
    add("--max-user-tokens", type=int, default=96)
    add("--max-prompt-len", type=int, default=224)
    add("--generator-rows", type=int, default=64, help="sequences generated at the same time")
    add("--prefill-rows", type=int, default=16)
    add("--sample-file", type=Path, help="write some of the corpus as text")
    head = parser.add_argument_group("head")
    add = head.add_argument
    add("--draft-vocab-size", type=int, default=8192)
    add("--intermediate-size", type=int, help="default: the target's")
    switch = argparse.BooleanOptionalAction
    add("--fc-norm", action=switch, default=True, help="norm each feature (EAGLE 3.1)")
    add("--norm-output", action=switch, default=True, help="feed back the normed output (3.1)")
    train = parser.add_argument_group("training")
    add = train.add_argument
    add("--steps", type=int, default=2000)
    add("--stop-at", type=int, help="end this run early; --checkpoint-dir resumes it")
    add("--ttt-steps", type=int, default=6)
    add("--batch-rows", type=int, default=8)
    add("--row-length", type=int, default=512)
    add("--learning-rate", type=float, help="default: 3e-3, less for heads wider than 576")
    add("--warmup-steps", type=int, default=100)
    add("--hard-weight", type=float, default=0.7, help="share of the one-hot label")
    add("--held-out", type=float, default=0.01, help="share of the prompts")
    add("--checkpoint-dir", type=Path, help="orbax checkpoints; resumes from the newest")
    add("--checkpoint-every", type=int, default=1000)
    add("--log-every", type=int, default=50)
    evaluation = parser.add_argument_group("evaluation")
    add = evaluation.add_argument
    add("--evaluate", type=Path, metavar="FILE.jsonl", help="measure accept length, by category")
    add("--evaluate-tokens", type=int, default=128)
    add("--evaluate-steps", type=int, default=5, help="draft steps of a round")
    add("--report", type=Path, help="write figures as JSON")
    args = parser.parse_args(argv)
    if args.generate_only and args.data is None:
        parser.error("--generate-only needs --data")
    if not args.generate_only and args.output is None:
        parser.error("--output is needed, unless --generate-only")
    return args


class GenerationBar:
    """Progress bar over tokens, called as prompts finish."""

    def __init__(self) -> None:
        self.bar = tqdm(unit="tok", unit_scale=True, mininterval=2.0, desc="generating")
        self.prompts = 0

    def __call__(self, prompts: int, tokens: int) -> None:
        """Count finished prompts and their tokens."""
        self.prompts += prompts
        self.bar.update(tokens)
        self.bar.set_postfix_str(f"{self.prompts} finished", refresh=False)


def make_sampler(args: argparse.Namespace, target: Any, flat: Any, weights: Any) -> Sampler:
    """The generator of training data."""
    tokenizer = target.load_tokenizer()
    stops = tuple(sorted({*target.config.eos_token_ids, *tokenizer.eos_token_ids}))
    longest = max(args.max_answer_tokens, args.max_user_tokens)
    if args.evaluate:
        longest = max(longest, args.evaluate_tokens)
    config = GeneratorConfig(
        num_rows=args.generator_rows,
        prefill_rows=args.prefill_rows,
        max_prompt_len=args.max_prompt_len,
        max_new_tokens=longest,
    )
    return Sampler(flat, weights, target.config, config, stops)


def make_corpus(args: argparse.Namespace, sampler: Sampler, tokenizer: Any) -> Corpus:
    """Read the corpus, or generate and save it."""
    if args.data is not None and args.data.exists():
        return Corpus.load(args.data)
    config = CollectConfig(
        self_sample=args.self_sample,
        file_samples=args.file_samples,
        max_user_tokens=args.max_user_tokens,
        max_answer_tokens=args.max_answer_tokens,
        seed=args.seed,
    )
    entries = [entry for path in args.prompts for entry in read_prompts(path)]
    start = time.perf_counter()
    corpus = collect(sampler, tokenizer, config, entries, GenerationBar())
    seconds = time.perf_counter() - start
    logger.info(
        "%d sequences, %d answer tokens in %.0f s", len(corpus), corpus.answer_tokens, seconds
    )
    if args.data is not None:
        corpus.save(args.data)
    return corpus


def describe(corpus: Corpus) -> dict[str, dict[str, int]]:
    """Sequences and answer tokens by source."""
    answers = corpus.lengths - corpus.prompt_lens
    return {
        name: {
            "sequences": int((corpus.sources == i).sum()),
            "answer_tokens": int(answers[corpus.sources == i].sum()),
        }
        for i, name in enumerate(corpus.source_names)
    }


def write_samples(path: Path, corpus: Corpus, tokenizer: Any, per_source: int = 12) -> None:
    """Some sequences of each source as text."""
    rng = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for source, name in enumerate(corpus.source_names):
            members = np.flatnonzero(corpus.sources == source)
            for i in rng.permutation(members)[:per_source]:
                ids, prompt = corpus.sequence(i), corpus.prompt_lens[i]
                file.write(f"=== {name}\n{tokenizer.decode(ids[:prompt], False)}")
                file.write(f"<<<answer>>>{tokenizer.decode(ids[prompt:], False)}\n")


def train(args: argparse.Namespace, trainer: Trainer, kept: Corpus, held: Corpus) -> TrainState:
    """Run the training loop, resuming from ``--checkpoint-dir``."""
    config = trainer.config
    rows = pack(kept, config.row_length, args.seed)
    fill = float((rows.segments > 0).mean())
    logger.info("%d training rows of %d tokens, %.0f%% full", *rows.tokens.shape, 100 * fill)
    held_rows = pack(held, config.row_length, args.seed) if len(held) else None
    state = trainer.init()
    manager = checkpoint_manager(args.checkpoint_dir) if args.checkpoint_dir else None
    if manager is not None:
        restored = restore_state(manager, state)
        if restored is not None:
            state = restored
            logger.info("resumed at step %d", int(state.step))
    step_function, evaluation = trainer.step_function(), trainer.evaluation_function()
    first = int(state.step)
    last = min(config.steps, args.stop_at or config.steps)
    stream = trainer.training_batches(rows, first)
    hard_weight = np.float32(config.hard_weight)
    with tqdm(total=config.steps, initial=first, mininterval=2.0, desc="training") as bar:
        for index in range(first, last):
            rate = np.float32(config.rate(index))
            state, statistics = step_function(
                state, trainer.target_weights, next(stream), rate, hard_weight
            )
            done = index + 1
            if done % args.log_every == 0 or done == last:
                bar.update(done - bar.n)
                bar.set_postfix_str(summary(statistics), refresh=False)
            if done % args.checkpoint_every == 0 or done == last:
                if manager is not None:
                    save_state(manager, state)
                if held_rows is not None and len(held_rows.tokens):
                    figures = trainer.evaluate(evaluation, state.params, held_rows)
                    tqdm.write(f"step {done} held out: {summary(figures)}", file=sys.stderr)
    if manager is not None:
        manager.wait_until_finished()
    return state


def summary(statistics: Any) -> str:
    """Loss of the first step, acceptance of each step, predicted accept length."""
    loss = float(statistics.loss[0] / max(float(statistics.weight[0]), 1.0))
    steps = " ".join(f"{float(a):.2f}" for a in statistics.acceptance())
    return f"loss {loss:.3f} accept [{steps}] length {float(statistics.accept_length()):.3f}"


def evaluate(
    args: argparse.Namespace, trainer: Trainer, params: Any, sampler: Sampler, tokenizer: Any
) -> dict[str, Any]:
    """Accept length on greedy answers to a prompt file, by category and over all rounds."""
    prompts = file_prompts(tokenizer, read_prompts(args.evaluate))
    longest = sampler.config.max_prompt_len
    short = [p for p in prompts if len(p.ids) <= longest]
    if len(short) < len(prompts):
        logger.warning("%d prompts are longer than %d tokens", len(prompts) - len(short), longest)
    config = CollectConfig(max_answer_tokens=args.evaluate_tokens, seed=args.seed)
    corpus = answer_prompts(sampler, short, [0.0] * len(short), config)
    row_length = -(-(longest + args.evaluate_tokens) // 64) * 64
    steps = args.evaluate_steps
    acceptance = measure_acceptance(trainer, params, corpus, steps, row_length)
    figures: dict[str, Any] = {"steps": steps, "tokens": args.evaluate_tokens, "categories": {}}
    for source, name in [*enumerate(corpus.source_names), (None, "all")]:
        chosen = np.ones(len(corpus), bool) if source is None else corpus.sources == source
        length, predicted = acceptance.length(chosen), acceptance.predicted(chosen)
        figures["categories"][name] = {
            "prompts": int(chosen.sum()),
            "accept_length": length,
            "predicted": predicted,
        }
        message = "%-24s accept length %.3f (predicted %.3f), %d prompts"
        logger.info(message, name, length, predicted, chosen.sum())
    return figures


def main(argv: list[str] | None = None) -> None:
    """Run the stages that the arguments ask for."""
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    logging.getLogger("absl").setLevel(logging.WARNING)
    on_gpu = jax.default_backend() == "gpu"
    dtype = args.dtype if args.dtype != "auto" else ("bfloat16" if on_gpu else "float32")
    target = open_target(args.model, dtype=dtype)
    model = target.config
    flat = FlatModel.of(lambda rngs: CausalLM(model, rngs))
    weights = tuple(jax.device_put(w) for w in flat.order(target.load_weights()))
    tokenizer = target.load_tokenizer()
    sampler = make_sampler(args, target, flat, weights)
    corpus = make_corpus(args, sampler, tokenizer)
    report: dict[str, Any] = {"model": args.model, "data": describe(corpus)}
    if args.sample_file is not None:
        write_samples(args.sample_file, corpus, tokenizer)
    if not args.generate_only:
        kept, held = corpus.split(args.held_out, args.seed)
        draft = head_config(
            model,
            intermediate_size=args.intermediate_size or model.intermediate_size,
            draft_vocab_size=min(args.draft_vocab_size, model.vocab_size),
            dtype=dtype,
            has_fc_norm=args.fc_norm,
            norm_output=args.norm_output,
        )
        vocabulary = draft_vocabulary(kept, draft.draft_vocab_size, model.vocab_size)
        config = TrainConfig(
            steps=args.steps,
            batch_rows=args.batch_rows,
            row_length=args.row_length,
            ttt_steps=args.ttt_steps,
            learning_rate=args.learning_rate or 3e-3 * min(1.0, 576 / draft.hidden_size),
            warmup_steps=min(args.warmup_steps, args.steps - 1),
            hard_weight=args.hard_weight,
            seed=args.seed,
        )
        trainer = Trainer(config, draft, flat, weights, vocabulary)
        state = train(args, trainer, kept, held)
        report |= {"steps": int(state.step), "config": dataclasses.asdict(config)}
        weights_by_name = trainer.named_weights(state.params)
        export_draft(args.output, draft, weights_by_name, max_shard_bytes=SHARD_BYTES)
        logger.info("wrote %s", args.output)
        if len(held):
            rows = pack(held, config.row_length, args.seed)
            figures = trainer.evaluate(trainer.evaluation_function(), state.params, rows)
            report["held_out_acceptance"] = [float(a) for a in figures.acceptance()]
            report["predicted_accept_length"] = float(figures.accept_length())
        if args.evaluate is not None:
            report["measured"] = evaluate(args, trainer, state.params, sampler, tokenizer)
    if args.report is not None:
        args.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
