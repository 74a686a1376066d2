"""Time one round of decoding: draft, verify, accept, compact, extend and state update.

Two figures a row, both medians in ms: rounds dispatched back to back with the tokens left on the
device, and rounds through ``Engine.generate`` with results read one round late. Beside them the
floor: the bytes that a round cannot avoid reading (target weights, KV of the contexts, draft
weights once a draft pass) at the copy bandwidth measured in the same run. 0 steps is plain
decoding.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import specjax
from specjax import Engine, SamplingParams
from specjax.bandwidth import copy_bandwidth
from specjax.bench_data import jsonl_requests
from specjax.checkpoints.presets import PRESETS, write_preset
from specjax.engine.args import EngineArgs
from specjax.engine.build import plan_parts
from specjax.kv.sizes import kv_bytes_per_token
from specjax.launches import Launches, profile_rounds

PROFILED_DISPATCHES = 5
PREFILL_CHUNK = 512
# presets with real weights, whose prompts are text
REAL_PRESETS = ("smollm2-135m",)
PROMPT_TEXT = Path(__file__).parent / "data" / "prompts.jsonl"
NUM_TEXTS = 36
# rounds until those that count: what was dispatched beside prefill, and results of the round before
SETTLING_ROUNDS = 4


def floor_bytes(engine: Engine, steps: int, tokens: int) -> int:
    """Bytes that a round must read with ``tokens`` tokens of context in the batch."""
    nets = engine.runner.networks
    size = {}
    for part, flat in (("target", nets.target), ("head", nets.head)):
        for name, leaf in zip(flat.names, flat.abstract, strict=True) if flat else ():
            # an untied embedding table is read one row a token
            if name == "embedding.table" and not nets.target_config.tie_word_embeddings:
                continue
            size[part] = size.get(part, 0) + leaf.size * leaf.dtype.itemsize
    total = size["target"] + tokens * kv_bytes_per_token(nets.target_config)
    if steps:
        # steps - 1 recurrent passes and the extend
        total += steps * (size["head"] + tokens * kv_bytes_per_token(nets.head_config))
    return total


def prefill(engine: Engine, prompts: list[list[int]]) -> list[int]:
    """Put the prompts on the device, past the scheduler; returns their request slots."""
    runner, width = engine.runner, engine.runner.config.prefill_buckets[-1]
    pages_each = runner.config.pages_per_request
    slots = list(range(1, len(prompts) + 1))
    for slot, prompt in zip(slots, prompts, strict=True):
        pages = range(1 + (slot - 1) * pages_each, 1 + slot * pages_each)
        runner.set_slot(slot, SamplingParams(temperature=0.0), seed=0)
        runner.set_pages(slot, pages)
        for at in range(0, len(prompt), width):
            end = min(at + width, len(prompt))
            runner.prefill(slot, prompt[at:end], at, prompt[end] if end < len(prompt) else None)
    for _ in range(3):
        runner.round(slots).read()
    return slots


def device_ms(engine: Engine, prompts: list[list[int]], rounds: int) -> float:
    """Median ms a round over repeats of ``rounds`` rounds without reading anything back."""
    runner, slots = engine.runner, prefill(engine, prompts)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(rounds):
            result = runner.round(slots)
        result.read()
        made = rounds * runner.config.rounds_per_dispatch
        times.append((time.perf_counter() - started) / made * 1e3)
    for slot in slots:
        runner.clear_slot(slot)
    return statistics.median(times)


def launches(engine: Engine, prompts: list[list[int]]) -> Launches:
    """What a round launches, from a profile of a few of them."""
    runner, slots = engine.runner, prefill(engine, prompts)

    def run() -> None:
        for _ in range(PROFILED_DISPATCHES):
            result = runner.round(slots)
        result.read()

    found = profile_rounds(run, PROFILED_DISPATCHES * runner.config.rounds_per_dispatch)
    for slot in slots:
        runner.clear_slot(slot)
    return found


def dispatches_needed(lengths: list[int], rounds: int) -> int:
    """Dispatches of the first of such prompts until ``rounds`` are timed, one more in flight."""
    return sum(-(-n // PREFILL_CHUNK) for n in lengths) + SETTLING_ROUNDS + rounds + 1


def engine_ms(engine: Engine, prompts: list[list[int]], rounds: int) -> tuple[float, float]:
    """Median ms a round through ``generate``, and the mean accept length.

    Prompts are prefilled one after the other, a chunk beside each round of those that decode
    already; only the time when all of them decode counts.
    """
    config = engine.runner.config
    needed = SETTLING_ROUNDS + rounds
    dispatches = dispatches_needed([len(prompt) for prompt in prompts], rounds)
    tokens = dispatches * config.rounds_per_dispatch * (config.num_steps + 1)
    params = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    stamps: list[float] = []
    last: dict[int, dict[str, Any]] = {}
    stream = engine.generate(input_ids=prompts, sampling_params=params, stream=True)
    for out in stream:
        last[out["index"]] = out
        if out["index"] == 0 and len(last) == len(prompts):
            stamps.append(time.perf_counter())
        if len(stamps) == needed:
            break
    stream.close()
    engine.flush_cache()  # returns when nothing runs
    gaps = np.diff(stamps)[3:] / config.rounds_per_dispatch
    lengths = [out["meta_info"].get("spec_accept_length", 1.0) for out in last.values()]
    return float(np.median(gaps)) * 1e3, float(np.mean(lengths))


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--preset", choices=[*PRESETS, *REAL_PRESETS], default="llama3.1-8b")
    parser.add_argument("--model", help="real weights instead of a preset: name, folder or file")
    parser.add_argument("--draft", help="draft head of --model")
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32])
    parser.add_argument("--steps", type=numbers, default=[0, 1, 3, 7])
    parser.add_argument("--batch-buckets", type=numbers, help="sizes that batches are padded to")
    parser.add_argument("--context", type=int, default=1024, help="shortest prompt; +20 percent")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of one timed stretch")
    parser.add_argument("--rounds-per-dispatch", type=int, default=1)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--simulate-accept-length", type=float)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--profile", action="store_true", help="also list the kernels of a round")
    parser.add_argument("--output", type=Path, help="append one JSON line a row")
    args = parser.parse_args()
    if args.model is None and args.preset in REAL_PRESETS:
        args.model = args.preset
    return args


def make_prompts(engine: Engine, lengths: list[int], rng: np.random.Generator) -> list[list[int]]:
    """Prompts of so many tokens: text where the weights are real, else random tokens."""
    if engine.tokenizer is None:
        vocab_size = engine.target.config.vocab_size
        return [rng.integers(100, vocab_size, size=n).tolist() for n in lengths]
    requests = jsonl_requests(PROMPT_TEXT, NUM_TEXTS, engine.tokenizer, output_len=1)
    tokens = [token for request in requests for token in request.input_ids]
    starts = rng.integers(len(tokens), size=len(lengths))
    return [
        np.resize(np.roll(tokens, -at), n).tolist() for at, n in zip(starts, lengths, strict=True)
    ]


def build(args: argparse.Namespace, steps: int, batches: list[int], folder: Path) -> Engine:
    """An engine for one step count over all batch sizes."""
    longest = args.context + args.context // 5
    # twelve stretches left on the device, or what engine_ms asks for and one dispatch run ahead
    through = dispatches_needed([longest] * max(batches), 2 * args.rounds) + 1
    rounds = max(12 * args.rounds, through)
    room = rounds * args.rounds_per_dispatch * (steps + 1)
    context = longest + room
    options = {
        "model": args.model,
        "dtype": args.dtype,
        "page_size": args.page_size,
        "rounds_per_dispatch": args.rounds_per_dispatch,
        "context_length": context,
        "max_running_requests": max(batches),
        "chunked_prefill_size": PREFILL_CHUNK,
        "skip_tokenizer_init": not args.model,
        "max_total_tokens": max(batches) * (context + args.page_size),
    }
    if steps:
        options |= {"speculative_algorithm": "EAGLE3", "speculative_num_steps": steps}
        if args.simulate_accept_length:
            options["simulate_accept_length"] = args.simulate_accept_length
    draft = args.draft
    if not args.model:
        options["model"], draft = write_preset(args.preset, folder)
        options["load_format"] = "dummy"
    if steps:
        options["draft"] = draft
    buckets = args.batch_buckets
    if buckets is None:  # the batches, but a batch of one as the engine would pad it
        plan = plan_parts(EngineArgs(**options, show_progress=False))
        buckets = sorted({max(plan.config.batch_buckets[0], batch) for batch in batches})
    return Engine(**options, batch_buckets=buckets)


def main() -> None:
    """Run the grid and print a table."""
    args = parse_args()
    device = jax.devices()[0]
    bandwidth = copy_bandwidth(device)
    console = Console(width=120)
    rng = np.random.default_rng(0)
    name = args.model or args.preset
    table = Table(title=f"{name}, {args.dtype}, {device.device_kind}, jax {jax.__version__}")
    for column in (
        "steps",
        "batch",
        "device ms",
        "engine ms",
        "floor ms",
        "ratio",
        "accept length",
        "ready s",
        "peak GB",
    ):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        for steps in args.steps:
            started = time.perf_counter()
            engine = build(args, steps, args.batch, Path(folder))
            ready = time.perf_counter() - started
            for batch in args.batch:
                lengths = rng.integers(args.context, args.context + args.context // 5, size=batch)
                prompts = make_prompts(engine, lengths.tolist(), rng)
                on_device = device_ms(engine, prompts, args.rounds)
                through, accept = engine_ms(engine, prompts, 2 * args.rounds)
                nbytes = floor_bytes(engine, steps, int(lengths.sum()))
                floor = nbytes / bandwidth * 1e3
                stats = device.memory_stats() or {}
                row = {
                    "model": args.model or args.preset,
                    "rounds_per_dispatch": args.rounds_per_dispatch,
                    "steps": steps,
                    "batch": batch,
                    "device_ms": on_device,
                    "engine_ms": through,
                    "floor_ms": floor,
                    "ratio": through / floor,
                    "accept_length": accept,
                    "simulated": args.simulate_accept_length if steps else None,
                    "bandwidth_tb_s": bandwidth / 1e12,
                    "ready_s": ready,
                    "peak_gb": stats.get("peak_bytes_in_use", 0) / 1e9,
                    "batch_buckets": list(engine.runner.config.batch_buckets),
                    "page_size": args.page_size,
                    "context": args.context,
                    "dtype": args.dtype,
                    "device": device.device_kind,
                    "jax": jax.__version__,
                    "specjax": specjax.__version__,
                }
                line = json.dumps(row)
                console.print(line, soft_wrap=True, highlight=False)
                if args.profile:
                    found = launches(engine, prompts)
                    console.print(found.table(), soft_wrap=True, highlight=False, markup=False)
                if args.output:
                    with args.output.open("a") as file:
                        file.write(line + "\n")
                figures = (on_device, through, floor, through / floor, accept)
                sizes = (f"{ready:.0f}", f"{row['peak_gb']:.1f}")
                table.add_row(str(steps), str(batch), *(f"{x:.2f}" for x in figures), *sizes)
            engine.close()
    console.print(table)
    label = f" (simulated: {args.simulate_accept_length})" if args.simulate_accept_length else ""
    console.print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s; accept length as measured{label}")


if __name__ == "__main__":
    main()
