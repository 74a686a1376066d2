"""Times one round of decoding: draft, verify, accept, compact, extend and state update.

    python scripts/bench round --batch 1,8,32 --steps 0,1,3,7 --rounds 20

Two figures a row, both medians in ms: rounds dispatched back to back with the tokens left on the
device, and rounds through ``Engine.generate`` with results read one round late. The floor is what
a round has to read (target weights, KV of the contexts, draft weights once a draft pass) at the
copy bandwidth of the same run. 0 steps is plain decoding.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from specjax.kernels.tree_attention import MAX_MASKED

from bench import common
from bench.data import PROMPTS, jsonl_requests
from bench.launches import profile_rounds, table
from specjax import Engine, SamplingParams
from specjax.checkpoints.presets import PRESETS, write_preset
from specjax.engine.args import EngineArgs
from specjax.engine.build import plan_parts
from specjax.speculative.algorithm import kv_pool
from specjax.speculative.prefill import Chunk
from specjax.speculative.registry import DEFAULT

SETTINGS = ("model", "rounds_per_dispatch", "page_size", "context", "dtype")
REPEATS = 5
PROFILED_DISPATCHES = 5
PREFILL_CHUNK = 512
REAL_PRESET = "smollm2-135m"
NUM_TEXTS = 36
# rounds until those that count: what was dispatched beside prefill, and results of the round before
SETTLING_ROUNDS = 4
COLUMNS = (
    ("steps", "steps", "d"),
    ("topk", "topk", "d"),
    ("rows", "nodes", "d"),
    ("batch", "batch", "d"),
    ("device ms", "device_ms", ".2f"),
    ("engine ms", "engine_ms", ".2f"),
    ("floor ms", "floor_ms", ".2f"),
    ("ratio", "ratio", ".2f"),
    ("accept length", "accept_length", ".2f"),
    ("ready s", "ready_s", ".0f"),
    ("peak GB", "peak_gb", ".1f"),
)


def parse_arguments(name: str, argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"bench {name}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--preset", choices=[*PRESETS, REAL_PRESET], default="llama3.1-8b")
    add("--model", help="real weights instead of a preset: name, folder or file")
    add("--draft", help="draft head of --model")
    add("--batch", type=common.numbers, default=[1, 8, 32])
    add("--steps", type=common.numbers, default=[0, 1, 3, 7])
    add("--topk", type=int, default=1, help="branches a level of a tree; 1 is a chain")
    add("--num-draft-tokens", type=int, help="rows of a verify of a tree")
    add("--context", type=int, default=1024, help="shortest prompt; +20 percent")
    add("--rounds", type=int, default=30, help="rounds of one timed stretch")
    add("--rounds-per-dispatch", type=int, default=1)
    add("--page-size", type=int, default=16)
    add("--dtype", default="bfloat16")
    add("--profile", action="store_true", help="also list the kernels of a round")
    add("--output", type=Path, help="append one JSON line a row")
    args = parser.parse_args(argv)
    if args.model is None and args.preset == REAL_PRESET:
        args.model = args.preset
    return args


def floor_bytes(engine: Engine, steps: int, tokens: int) -> int:
    """Bytes that a round must read with ``tokens`` tokens of context in the batch."""
    nets = engine.runner.networks

    def read(flat: Any, config: Any) -> int:
        pool = kv_pool(config, tokens)
        return pool.size * pool.dtype.itemsize + sum(
            leaf.size * leaf.dtype.itemsize
            for name, leaf in zip(flat.names, flat.abstract, strict=True)
            # an untied embedding table is read one row a token
            if name != "embedding.table" or nets.target_config.tie_word_embeddings
        )

    total = read(nets.target, nets.target_config)
    # steps - 1 recurrent passes and the extend
    return total + (steps * read(nets.draft, nets.draft_config) if steps else 0)


def dispatch(engine: Engine, slots: list[int], count: int) -> None:
    for _ in range(count):
        result = engine.runner.round(slots)
    result.read()


def prefill(engine: Engine, prompts: list[list[int]]) -> list[int]:
    """Puts the prompts on the device, past the scheduler; returns their request slots."""
    runner, width = engine.runner, engine.runner.config.prefill_buckets[-1]
    pages_each = runner.config.pages_per_request
    slots = list(range(1, len(prompts) + 1))
    for slot, prompt in zip(slots, prompts, strict=True):
        runner.set_slot(slot, SamplingParams(temperature=0.0), seed=0)
        runner.set_pages(slot, range(1 + (slot - 1) * pages_each, 1 + slot * pages_each))
        for at in range(0, len(prompt), width):
            runner.prefill([Chunk.of(slot, prompt, at, at + width)])
    for _ in range(3):
        dispatch(engine, slots, 1)
    return slots


def device_ms(engine: Engine, prompts: list[list[int]], rounds: int, *, profile: bool) -> float:
    """Median ms a round over repeats of ``rounds`` dispatches with nothing read back."""
    slots, each = prefill(engine, prompts), engine.runner.config.rounds_per_dispatch
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        dispatch(engine, slots, rounds)
        times.append((time.perf_counter() - started) / (rounds * each) * 1e3)
    if profile:
        run = lambda: dispatch(engine, slots, PROFILED_DISPATCHES)  # noqa: E731
        print(table(*profile_rounds(run, PROFILED_DISPATCHES * each)))
    for slot in slots:
        engine.runner.clear_slot(slot)
    return statistics.median(times)


def dispatches_needed(lengths: list[int], rounds: int) -> int:
    """Dispatches of the first of such prompts until ``rounds`` are timed, one more in flight."""
    return sum(-(-n // PREFILL_CHUNK) for n in lengths) + SETTLING_ROUNDS + rounds + 1


def engine_ms(engine: Engine, prompts: list[list[int]], rounds: int) -> tuple[float, float]:
    """Median ms a round through ``generate`` while all requests decode, and mean accept length."""
    config = engine.runner.config
    dispatches = dispatches_needed([len(prompt) for prompt in prompts], rounds)
    tokens = dispatches * config.rounds_per_dispatch * config.largest.accept_width
    params = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    stamps: list[float] = []
    last: dict[int, dict[str, Any]] = {}
    stream = engine.generate(input_ids=prompts, sampling_params=params, stream=True)
    for out in stream:
        last[out["index"]] = out
        if out["index"] == 0 and len(last) == len(prompts):
            stamps.append(time.perf_counter())
        if len(stamps) == SETTLING_ROUNDS + rounds:
            break
    stream.close()
    engine.flush_cache()  # returns when nothing runs
    gaps = np.diff(stamps)[3:] / config.rounds_per_dispatch
    lengths = [out["meta_info"].get("spec_accept_length", 1.0) for out in last.values()]
    return float(np.median(gaps)) * 1e3, float(np.mean(lengths))


def make_prompts(engine: Engine, lengths: list[int], rng: np.random.Generator) -> list[list[int]]:
    """Prompts of so many tokens: text where the weights are real, else random tokens."""
    if engine.tokenizer is None:
        vocab_size = engine.target.config.vocab_size
        return [rng.integers(100, vocab_size, size=n).tolist() for n in lengths]
    requests = jsonl_requests(PROMPTS, NUM_TEXTS, engine.tokenizer, output_len=1)
    tokens = [token for request in requests for token in request.input_ids]
    starts = rng.integers(len(tokens), size=len(lengths))
    return [
        np.resize(np.roll(tokens, -at), n).tolist() for at, n in zip(starts, lengths, strict=True)
    ]


def build(args: argparse.Namespace, steps: int, folder: Path) -> Engine:
    largest, longest = max(args.batch), args.context + args.context // 5
    # twelve stretches left on the device, or what engine_ms asks for and one dispatch run ahead
    through = dispatches_needed([longest] * largest, 2 * args.rounds) + 1
    rounds = max(12 * args.rounds, through)
    context = longest + rounds * args.rounds_per_dispatch * (steps + 1)
    options = {
        **{name: getattr(args, name) for name in SETTINGS if name != "context"},
        "context_length": context,
        "max_running_requests": largest,
        "chunked_prefill_size": PREFILL_CHUNK,
        "skip_tokenizer_init": not args.model,
        # a tree writes rows behind the last token
        "max_total_tokens": largest * (context + args.page_size + MAX_MASKED * (args.topk > 1)),
    }
    draft = args.draft
    if not args.model:
        options["model"], draft = write_preset(args.preset, folder)
        options["load_format"] = "dummy"
    if steps:
        options |= {"speculative_algorithm": DEFAULT, "speculative_num_steps": steps}
        options["speculative_eagle_topk"] = args.topk
        options["speculative_num_draft_tokens"] = args.num_draft_tokens
        options["draft"] = draft
    # the batches, but a batch of one as the engine would pad it
    smallest = plan_parts(EngineArgs(**options, show_progress=False)).config.batch_buckets[0]
    return Engine(**options, batch_buckets=sorted({max(smallest, batch) for batch in args.batch}))


def measure(
    args: argparse.Namespace, engine: Engine, steps: int, batch: int, rng: np.random.Generator
) -> dict[str, Any]:
    """One row of the grid, but for the floor's time."""
    lengths = rng.integers(args.context, args.context + args.context // 5, size=batch).tolist()
    prompts = make_prompts(engine, lengths, rng)
    on_device = device_ms(engine, prompts, args.rounds, profile=args.profile)
    through, accept = engine_ms(engine, prompts, 2 * args.rounds)
    stats = jax.devices()[0].memory_stats() or {}
    return engine.runner.config.largest._asdict() | {
        "batch": batch,
        "device_ms": on_device,
        "engine_ms": through,
        "floor_bytes": floor_bytes(engine, steps, sum(lengths)),
        "accept_length": accept,
        "peak_gb": stats.get("peak_bytes_in_use", 0) / 1e9,
        "batch_buckets": list(engine.runner.config.batch_buckets),
        **{name: getattr(args, name) for name in SETTINGS},
        "model": args.model or args.preset,
        **common.software(),
    }


def main(name: str, argv: Sequence[str]) -> int:
    args = parse_arguments(name, argv)
    bandwidth = common.copy_bandwidth()
    rng = np.random.default_rng(0)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for steps in args.steps:
            started = time.perf_counter()
            with build(args, steps, Path(folder)) as engine:
                ready = time.perf_counter() - started
                for batch in args.batch:
                    row = measure(args, engine, steps, batch, rng) | {"ready_s": ready}
                    floor = row["floor_bytes"] / bandwidth * 1e3
                    row |= {"floor_ms": floor, "ratio": row["engine_ms"] / floor}
                    rows.append(row | {"bandwidth_tb_s": bandwidth / 1e12})
                    print(json.dumps(rows[-1]), flush=True)
                    common.append_json(args.output, rows[-1])
    print(f"{args.model or args.preset}, {args.dtype}, {rows[0]['device_kind']}")
    print(common.table_of(COLUMNS, rows))
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    return 0
