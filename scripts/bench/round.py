"""Time one round of decoding: draft, verify, accept, compact, extend and state update.

    specjax bench round --batch 1,8,32 --steps 0,1,3,7 --rounds 20
    specjax bench round --steps 0,3 --sampling greedy,sampled,filtered,logprobs

Each row has two medians in ms. "device" is for rounds dispatched back to back, whose tokens stay on
the device (greedy only). "engine" is for ``Engine.generate``, which reads results one round late.
The floor is the time needed to read the target's weights, the KV of the contexts and the draft's
weights (once per draft pass) at the copy bandwidth of the same run. 0 steps is plain decoding. For
mixtures of experts, "experts" is the mean number of distinct experts that a layer read in a round.
"""

import json
import re
import statistics
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.profiler import ProfileData
from specjax.kernels.tree_attention import MAX_MASKED

from bench import common
from specjax import Engine, SamplingParams
from specjax.checkpoints.presets import PRESETS, preset_algorithm, write_preset
from specjax.cli.options import add_options
from specjax.config import BlockConfig, FeatureConfig
from specjax.engine.args import EngineArgs
from specjax.engine.plan import plan_engine
from specjax.metrics import Totals
from specjax.models.flat import dtype_bits
from specjax.speculative.algorithm import kv_pool
from specjax.speculative.catalog import DEFAULT
from specjax.speculative.prefill import Chunk

QUANTISED = ("quantization", "quantize_activations", "kv_cache_dtype")
SETTINGS = ("model", "rounds_per_dispatch", "page_size", "context", "dtype", *QUANTISED)
REPEATS = 5
PROFILED_DISPATCHES = 5
PREFILL_CHUNK = 512
# rounds that are not timed: some are dispatched alongside prefill, and their results arrive late
SETTLING_ROUNDS = 4
PROFILED_KERNELS = 20
# sampling parameters, and options for Engine.generate
SAMPLING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0.0}, {}),
    "sampled": ({"temperature": 0.8}, {}),
    "filtered": ({"temperature": 0.8, "top_p": 0.95, "top_k": 50}, {}),
    "top-p": ({"temperature": 0.8, "top_p": 0.95}, {}),
    "penalized": ({"temperature": 0.8, "repetition_penalty": 1.1}, {}),
    "logprobs": ({"temperature": 0.0}, {"return_logprob": True, "top_logprobs_num": 5}),
}
COLUMNS = (
    ("steps", "steps", "d"),
    ("topk", "topk", "d"),
    ("rows", "nodes", "d"),
    ("batch", "batch", "d"),
    ("sampling", "sampling", ""),
    ("device ms", "device_ms", ".2f"),
    ("engine ms", "engine_ms", ".2f"),
    ("/ greedy", "over_greedy", ".3f"),
    ("floor ms", "floor_ms", ".2f"),
    ("ratio", "ratio", ".2f"),
    ("accept length", "accept_length", ".2f"),
    ("experts", "experts_read_per_layer", ".1f"),
    ("ready s", "ready_s", ".0f"),
    ("peak GB", "peak_gb", ".2f"),
    ("planned GB", "planned_gb", ".2f"),
)


def parse_arguments(name: str, argv: Sequence[str]) -> Namespace:
    parser = ArgumentParser(prog=f"specjax bench {name}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="llama3.1-8b", help="model shape, random weights")
    add("--model", help="real weights instead of --preset: name, folder or file")
    add("--draft", help="draft head of --model")
    ints = common.list_of(int)
    add("--batch", type=ints, default=[1, 8, 32], help="list of batch sizes (default: 1,8,32)")
    algorithm = "algorithm that drafts with --draft (default: the preset's algorithm, or EAGLE3)"
    add("--algorithm", help=algorithm)
    add("--steps", type=ints, default=[0, 1, 3, 7], help="list of draft depths (default: 0,1,3,7)")
    add("--topk", type=int, default=1, help="branches per tree level (default: 1, a chain)")
    add("--num-draft-tokens", type=int, help="tree drafting: tokens verified per round")
    kinds = common.list_of(str, SAMPLING)
    add("--sampling", type=kinds, default=["greedy"], help=f"list of {', '.join(SAMPLING)}")
    tokens = "tokens of the shortest prompt (default: 1024); the longest is 20 %% longer"
    add("--context", type=int, default=1024, help=tokens)
    add("--rounds", type=int, default=30, help="rounds per measurement (default: 30)")
    add("--rounds-per-dispatch", type=int, default=1, help="rounds per call (default: 1)")
    add("--page-size", type=int, default=16, help="tokens per KV page (default: 16)")
    add("--dtype", default="bfloat16", help="dtype of weights and KV (default: bfloat16)")
    add_options(parser, EngineArgs, (*QUANTISED, "speculative_token_map"))
    parser.set_defaults(kv_cache_dtype=EngineArgs.kv_cache_dtype)
    add("--simulate-acceptance", type=float, help="probability that a draft is accepted")
    add("--profile", action="store_true", help="also list the kernels of a round")
    add("--output", type=Path, help="file to append one JSON line per row to")
    return parser.parse_args(argv)


# names of the stacked weights of experts
_EXPERTS = re.compile(r"\.mlp\.(gate_up|down)(\.values|[._]scale|_bias)?$")


def floor_bytes(
    engine: Engine, steps: int, lengths: list[int], experts: float | None = None
) -> int:
    """Return the number of bytes that a round must read if contexts have these lengths in tokens.

    A layer with a window reads only the last keys of a context, and one with experts those of
    ``experts`` of them. States of recurrent layers are read and written, with drafts read twice.
    """
    nets = engine.runner.networks
    share = 1.0 if experts is None else experts / getattr(nets.target_config, "num_experts", 1)

    def read(flat: Any, config: Any) -> int:
        pool = kv_pool(config, 1)
        windows = getattr(config, "windows", ()) or [0] * config.num_layers
        if flat.caches:
            windows = [x.window or 0 for x in flat.caches if x.per_token is not None]
        keys = sum(min(length, window or length) for window in windows for length in lengths)
        return keys * pool.size * pool.dtype.itemsize // config.num_layers + sum(
            int((share if _EXPERTS.search(name) else 1) * leaf.size * dtype_bits(leaf.dtype)) // 8
            for name, leaf in zip(flat.names, flat.abstract, strict=True)
            # only one row per token is read from an untied embedding table
            if not name.endswith("embedding.table") or nets.target_config.tie_word_embeddings
        )

    states = [x for cache in nets.target.caches for x in cache.per_request]
    passes = len(lengths) * (3 if steps else 2)
    total = passes * sum(x.size * x.dtype.itemsize for x in states)
    total += read(nets.target, nets.target_config)
    model, draft, head = nets.target_config, nets.draft_config, 0
    is_module = getattr(draft, "first_layer", 0) > 0
    if is_module or (isinstance(draft, FeatureConfig) and not draft.has_own_lm_head):
        if draft.hot is None:  # else the draft has its columns
            format = model.dtypes.without("lm_head").quantization
            bits = dtype_bits(format.dtype if format else model.dtypes.activations)
            head = model.hidden_size * model.vocab_size * bits // 8
    if not isinstance(draft, BlockConfig):
        # read by steps - 1 recurrent passes and by the extend pass
        return total + (steps * (read(nets.draft, draft) + head) if steps else 0)
    # read by one pass, along with the target's output head; each draft reads the Markov head
    markov = (steps - 1) * draft.markov_rank * draft.draft_vocab_size
    markov *= model.dtypes.activations.itemsize
    return total + read(nets.draft, draft) + head + markov


def dispatch(engine: Engine, slots: list[int], count: int) -> None:
    for _ in range(count):
        result = engine.runner.round(slots)
    result.read()


def prefill(engine: Engine, prompts: list[list[int]]) -> list[int]:
    """Prefill the prompts without the scheduler; return their request slots."""
    params = SamplingParams(temperature=0.0, simulate_acceptance=engine.args.simulate_acceptance)
    runner, width = engine.runner, engine.runner.config.prefill_buckets[-1]
    slots = list(range(1, len(prompts) + 1))
    for slot, prompt in zip(slots, prompts, strict=True):
        runner.set_slot(slot, params, seed=slot)
        runner.set_measured_pages(slot, runner.config.pages_per_request)
        for at in range(0, len(prompt), width):
            runner.prefill([Chunk.of(slot, prompt, at, at + width)])
    for _ in range(3):
        dispatch(engine, slots, 1)
    return slots


def device_ms(engine: Engine, prompts: list[list[int]], rounds: int, *, profiled: bool) -> float:
    """Dispatch ``rounds`` times, read only the last result; return the median ms per round."""
    slots, per_dispatch = prefill(engine, prompts), engine.runner.config.rounds_per_dispatch
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        dispatch(engine, slots, rounds)
        times.append((time.perf_counter() - started) / (rounds * per_dispatch) * 1e3)
    if profiled:
        run = partial(dispatch, engine, slots, PROFILED_DISPATCHES)
        print(launch_table(profile(run), PROFILED_DISPATCHES * per_dispatch))
    for slot in slots:
        engine.runner.clear_slot(slot)
    return statistics.median(times)


def profile(run: Callable[[], object]) -> list[Any]:
    """Profile ``run``, which must wait for its last round; return all planes of the profile.

    During profiling XLA launches the kernels of its CUDA graphs one by one. To keep the graphs, set
    ``XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true``.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        return list(ProfileData.from_file(str(file)).planes)


def launch_table(planes: Iterable[Any], num_rounds: int) -> str:
    """Make a table of launches and device time per round: the slowest kernels, then the sum."""
    launches: Counter[str] = Counter()
    nanoseconds: Counter[str] = Counter()
    for plane in planes:
        for line in plane.lines:
            # the other lines of a device repeat the events of its streams
            if plane.name.startswith("/device:GPU") and line.name.startswith("Stream"):
                for event in line.events:
                    launches[event.name] += 1
                    nanoseconds[event.name] += event.duration_ns
    most = nanoseconds.most_common(PROFILED_KERNELS)
    rows = [(launches[name], duration, name[:90]) for name, duration in most]
    rows.append((launches.total(), nanoseconds.total(), f"all {len(launches)}"))
    lines = [f"{'us/round':>10}  {'launches':>8}  kernel"]
    for count, duration, name in rows:
        lines.append(f"{duration / 1e3 / num_rounds:10.1f}  {count / num_rounds:8.1f}  {name}")
    return "\n".join(lines)


def dispatches_needed(lengths: list[int], rounds: int) -> int:
    """Return how many dispatches prefill and ``rounds`` timed rounds take, with one in flight."""
    return sum(-(-n // PREFILL_CHUNK) for n in lengths) + SETTLING_ROUNDS + rounds + 1


def engine_ms(
    engine: Engine, prompts: list[list[int]], rounds: int, sampling: str
) -> tuple[float, float, float | None]:
    """Return median ms per round while all prompts decode, the accept length, and the experts.

    These are the distinct ones that a layer of a mixture read in a round. The last two are means.
    """
    config = engine.runner.config
    dispatches = dispatches_needed([len(prompt) for prompt in prompts], rounds)
    tokens = dispatches * config.rounds_per_dispatch * config.largest.accept_width
    values, options = SAMPLING[sampling]
    params = SamplingParams(**values, max_new_tokens=tokens, ignore_eos=True)
    stamps: list[float] = []
    started: Totals | None = None
    last: dict[int, dict[str, Any]] = {}
    stream = engine.generate(input_ids=prompts, sampling_params=params, stream=True, **options)
    for out in stream:
        last[out["index"]] = out
        if out["index"] == 0 and len(last) == len(prompts):
            stamps.append(time.perf_counter())
            started = started or engine.metrics.snapshot()
        if len(stamps) == SETTLING_ROUNDS + rounds:
            break
    totals = engine.metrics.snapshot()
    stream.close()
    engine.flush_cache()  # returns when nothing runs
    gaps = np.diff(stamps) / config.rounds_per_dispatch
    gaps = gaps[min(3, len(gaps) - 1) :]  # a delayed reader gets fewer outputs
    lengths = [out["meta_info"].get("spec_accept_length", 1.0) for out in last.values()]
    experts = None
    if started is not None and totals.is_mixture:
        num_rounds = max(totals.expert_rounds - started.expert_rounds, 1)
        experts = (totals.num_experts_read - started.num_experts_read) / num_rounds
    return float(np.median(gaps)) * 1e3, float(np.mean(lengths)), experts


def make_prompts(engine: Engine, lengths: list[int], rng: np.random.Generator) -> list[list[int]]:
    """Make different prompts of these lengths: text if the weights are real, else random tokens."""
    if engine.tokenizer is None:
        vocab_size = engine.target.config.vocab_size
        return [rng.integers(100, vocab_size, size=n).tolist() for n in lengths]
    rows = common.read_lines(common.PROMPTS)
    tokens = [token for row in rows for token in common.tokens_of(row, engine.tokenizer)]
    starts = rng.choice(len(tokens), len(lengths), replace=False)
    return [
        np.resize(np.roll(tokens, -at), n).tolist() for at, n in zip(starts, lengths, strict=True)
    ]


def build(args: Namespace, steps: int, folder: Path) -> Engine:
    largest, longest = max(args.batch), args.context + args.context // 5
    # enough for twelve repeats in device_ms, and for engine_ms with one dispatch ahead
    through = dispatches_needed([longest] * largest, 2 * args.rounds) + 1
    rounds = max(12 * args.rounds, through)
    context = longest + rounds * args.rounds_per_dispatch * (steps + 1)
    options = {
        **{name: getattr(args, name) for name in SETTINGS if name != "context"},
        "context_length": context,
        "max_running_requests": largest,
        "chunked_prefill_size": PREFILL_CHUNK,
        "skip_tokenizer_init": not args.model,
        # trees and blocks write KV after the last token
        "max_total_tokens": largest * (context + args.page_size + MAX_MASKED),
    }
    draft = args.draft
    if not args.model:
        options["model"], draft = write_preset(args.preset, folder)
        options["load_format"] = "dummy"
    if steps:
        default = preset_algorithm(None if args.model else args.preset)
        options["speculative_algorithm"] = args.algorithm or default or DEFAULT
        options["speculative_num_steps"] = steps
        options["speculative_eagle_topk"] = args.topk
        options["speculative_num_draft_tokens"] = args.num_draft_tokens
        options["speculative_token_map"] = args.speculative_token_map
        options["draft"] = draft
        options["simulate_acceptance"] = args.simulate_acceptance
    # compile for these batch sizes; the engine may pad a batch of one
    smallest = plan_engine(EngineArgs(**options, show_progress=False)).config.batch_buckets[0]
    return Engine(**options, batch_buckets=sorted({max(smallest, batch) for batch in args.batch}))


def measure(
    args: Namespace, engine: Engine, steps: int, batch: int, rng: np.random.Generator
) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of sampling at one batch size, without ``floor_ms``."""
    lengths = rng.integers(args.context, args.context + args.context // 5, size=batch).tolist()
    prompts = make_prompts(engine, lengths, rng)
    greedy = None
    for sampling in args.sampling:
        on_device = None
        if sampling == "greedy":
            on_device = device_ms(engine, prompts, args.rounds, profiled=args.profile)
        through, accept, experts = engine_ms(engine, prompts, 2 * args.rounds, sampling)
        greedy = through if sampling == "greedy" else greedy
        yield engine.runner.config.largest._asdict() | {
            "batch": batch,
            "sampling": sampling,
            "device_ms": on_device,
            "engine_ms": through,
            "over_greedy": greedy and through / greedy,
            "floor_bytes": floor_bytes(engine, steps, lengths, experts),
            "accept_length": accept,
            "experts_read_per_layer": experts,
            "simulate_acceptance": engine.args.simulate_acceptance,
            "speculative_token_map": args.speculative_token_map,
            "peak_gb": common.peak_gb(),
            "planned_gb": common.settings_of(engine.get_server_info())["planned_gb"],
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
                for row in (
                    row for n in args.batch for row in measure(args, engine, steps, n, rng)
                ):
                    floor = row["floor_bytes"] / bandwidth * 1e3
                    row |= {"ready_s": ready, "floor_ms": floor, "ratio": row["engine_ms"] / floor}
                    rows.append(row | {"bandwidth_tb_s": bandwidth / 1e12})
                    print(json.dumps(rows[-1]), flush=True)
                    common.append_json(args.output, rows[-1])
    print(f"{args.model or args.preset}, {args.dtype}, {rows[0]['device_kind']}")
    columns = [c for c in COLUMNS if any(row.get(c[1]) is not None for row in rows)]
    print(common.table_of(columns, rows))
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    return 0
