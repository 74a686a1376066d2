"""Build the device side of an engine from its plan: compile, load and measure."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from specjax.adaptive import (
    AdaptiveSpecPolicy,
    AdaptiveSpeculativeParams,
    BudgetPolicy,
    TierController,
)
from specjax.adaptive.cost import CONTEXTS
from specjax.checks import check_number
from specjax.compiling.cache import CompileCache, open_compile_cache
from specjax.compiling.pool import CompiledFunction
from specjax.disaggregation.rows import KVTransfer
from specjax.engine.args import EngineArgs
from specjax.engine.plan import EnginePlan, plan_engine
from specjax.engine.weights import is_same, load_weights
from specjax.runtime.runner import ModelRunner
from specjax.runtime.runner_config import device_memory
from specjax.sampling.params import SamplingParams
from specjax.speculative.prefill import UNLIMITED
from specjax.text.chat_template import start_renderer
from specjax.text.tokenizer import Tokenizer
from specjax.types import DraftShape

logger = logging.getLogger(__name__)

ROUND_SECONDS = "round_seconds"
# round times are medians over stretches of this many dispatches: 3 s for six buckets (8B, H200)
STRETCHES, DISPATCHES = 2, 3
GREEDY = SamplingParams(temperature=0.0)


def build_engine(
    args: EngineArgs,
    shared: tuple[EnginePlan, ModelRunner] | None = None,
    *,
    compile_on_use: bool = False,
) -> tuple[EnginePlan, ModelRunner, Tokenizer | None]:
    """Return the plan, a compiled and loaded runner, and the tokenizer if there is one.

    If ``shared``, an engine over the same model, is given, both engines use its weights. If
    ``compile_on_use`` is set, each function is compiled at its first use.
    """
    plan = plan_engine(args)
    if shared is not None and not is_same(shared[0].target, plan.target):
        other = shared[0].target
        raise ValueError(
            f"share_weights_with must be an engine with the model {plan.target.path}, dtype "
            f"{plan.target.config.dtype} and matrices {plan.target.config.quantization}; got "
            f"{other.path}, {other.config.dtype} and {other.config.quantization}"
        )
    if args.load_format != "dummy":
        for checkpoint in (plan.target, *plan.drafts):
            checkpoint.check_weights()  # before compiling, which may take minutes
    runner = ModelRunner(plan.networks, plan.config, open_cache(plan))
    with ThreadPoolExecutor(1) as executor:
        loading = executor.submit(load_weights, plan, shared)
        tokenizer = None if args.skip_tokenizer_init else plan.target.load_tokenizer()
        if tokenizer is not None and tokenizer.chat_template is not None:
            start_renderer()
        compile_all(args, runner, on_use=compile_on_use)
        try:
            runner.load(*loading.result())
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            total = device_memory(plan.networks.placement.device)
            raise ValueError(
                f"{plan.needs.weight_bytes / 1e9:.2f} GB of weights and {plan.kv_bytes / 1e9:.2f} "
                f"GB of KV do not fit into the free part of {total / 1e9:.2f} GB; stop other "
                "processes and engines, or lower mem_fraction_static, max_total_tokens, "
                "max_running_requests or context_length"
            ) from error
    return plan, runner, tokenizer


def open_cache(plan: EnginePlan) -> CompileCache | None:
    directory, device = plan.args.compile_cache_dir, plan.networks.placement.device
    return open_compile_cache(directory, *plan.cache_facts, devices=[device])


def compile_all(args: EngineArgs, runner: ModelRunner, **options: bool) -> None:
    """Compile all functions that serving dispatches; ``options`` are of ``ModelRunner.compile``."""
    runner.compile(show_progress=args.shows_progress, **options)
    if args.disaggregation_mode is not None:
        gives = args.disaggregation_mode == "prefill"
        KVTransfer(runner).compile(gives=gives, show_progress=args.shows_progress)


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Result of a warm-up."""

    folder: str  # folder of the cache entries
    functions: tuple[CompiledFunction, ...]  # all functions that serving dispatches
    seconds: float
    weight_bytes: int  # device memory of the weights, which are not loaded
    kv_bytes: int  # device memory of the KV pools, which are not allocated
    device: str  # kind of device

    @property
    def num_compiled(self) -> int:
        """Number of functions that were compiled; the others were in the cache."""
        return sum(not function.is_hit for function in self.functions)

    @property
    def num_bytes(self) -> int:
        return sum(function.num_bytes or 0 for function in self.functions)

    @property
    def is_complete(self) -> bool:
        """Whether every function is on disk."""
        return all(function.num_bytes is not None for function in self.functions)

    def as_dict(self) -> dict[str, Any]:
        derived = {"num_compiled": self.num_compiled, "num_bytes": self.num_bytes}
        return asdict(self) | derived | {"jax": jax.__version__}

    def table(self) -> str:
        """Format the result as lines of text, with sizes in MB."""
        width = max(len(each.key) for each in self.functions)
        lines = [f"{'function':<{width}}  seconds  MB on disk  MB arguments  MB temporary"]
        for each in self.functions:
            kept = "-" if each.num_bytes is None else f"{each.num_bytes / 1e6:.2f}"
            lines.append(
                f"{each.key:<{width}}{each.seconds:>9.2f}{kept:>12}"
                f"{each.argument_bytes / 1e6:>14.2f}{each.temp_bytes / 1e6:>14.2f}  "
                f"{'present' if each.is_hit else 'compiled'}"
            )
        most = max(function.temp_bytes for function in self.functions)
        lines += [
            f"{len(self.functions)} functions, {self.num_compiled} compiled, in "
            f"{self.seconds:.1f} s; {self.num_bytes / 1e6:.2f} MB in {self.folder}",
            f"device memory on {self.device}: weights {self.weight_bytes / 1e9:.2f} GB, "
            f"KV {self.kv_bytes / 1e9:.2f} GB, temporary up to {most / 1e9:.2f} GB",
        ]
        return "\n".join(lines)


def warm_up(args: EngineArgs, *, stages: bool = False) -> WarmUp:
    """Compile the functions of an engine with these arguments into its ``compile_cache_dir``.

    Functions on disk are read, not compiled, so an interrupted warm-up resumes. Neither weights
    nor KV pools are allocated. ``stages`` adds draft, verify and extend as separate functions.
    Raises ValueError if the folder is not usable.
    """
    started = time.perf_counter()
    plan = plan_engine(args)
    cache = open_cache(plan)
    if cache is None:
        raise ValueError(
            "compiled functions cannot be stored in "
            f"compile_cache_dir={args.compile_cache_dir!r}; pass a folder that you own"
        )
    runner = ModelRunner(plan.networks, plan.config, cache)
    compile_all(args, runner, stages=stages)
    return WarmUp(
        folder=str(cache.path),
        functions=tuple(runner.compiled.report),
        seconds=time.perf_counter() - started,
        weight_bytes=plan.needs.weight_bytes,
        kv_bytes=plan.kv_bytes,
        device=plan.networks.placement.device.device_kind,
    )


def make_controller(args: EngineArgs, runner: ModelRunner) -> TierController | None:
    """Make the controller of a compiled and loaded runner; ``None`` if tiers do not adapt."""
    config, first = args.adaptive, args.shape.steps
    if config is None or not runner.config.batch_buckets:
        return None
    policy: AdaptiveSpecPolicy
    if config.policy == "ema":
        policy = AdaptiveSpeculativeParams(first, config, runner.config.shapes)
    else:
        policy = BudgetPolicy(round_seconds(runner), first, config)
    return TierController(policy)


def round_seconds(runner: ModelRunner) -> dict[tuple[DraftShape, int], list[float]]:
    """Return seconds per round by (tier, batch bucket), at each of :data:`CONTEXTS`.

    They are measured if they are not cached.
    """
    cache, config = runner.compiled.cache, runner.config
    keys = {(tier, batch): f"tier {tier}, batch {batch}" for tier, batch in config.rounds}
    kept = None if cache is None else cache.load_json(ROUND_SECONDS)
    if kept is not None:
        try:
            return {
                pair: [check_number(k, x, above=0) for x in kept.get(k) or [None]]
                for pair, k in keys.items()
            }
        except (ValueError, TypeError) as error:
            logger.warning("measuring round times again: cached ones are invalid: %s", error)
    seconds = measure_round_seconds(runner)
    for pair, key in keys.items():
        shown = " and ".join(f"{1e3 * value:.2f}" for value in seconds[pair])
        logger.info("round of %s: %s ms with %d and %d tokens", key, shown, *CONTEXTS)
    if cache is not None:
        cache.store_json(ROUND_SECONDS, {key: seconds[pair] for pair, key in keys.items()})
    return seconds


def measure_round_seconds(runner: ModelRunner) -> dict[tuple[DraftShape, int], list[float]]:
    """Measure seconds per round by (tier, batch bucket) at each context: medians of stretches.

    Each result is read after the next dispatch, as in serving, and a round takes the time since the
    result before it. The rows are greedy, and their last tokens differ. Their KV is zero or left
    over, because its values do not affect the time. The measurements take turns stretch by stretch,
    so that a temporary slowdown of the device affects all of them. Only the largest bucket that
    fits is also measured at the longer context. The time it adds is that of reading its KV, so it
    is proportional to the batch size.
    The runner must have no requests; only the contents of its pages change.
    """
    config = runner.config
    for slot in range(1, config.num_slots):
        runner.set_slot(slot, GREEDY, seed=0)
    (short, long), buckets = CONTEXTS, config.batch_buckets
    held = config.num_pages * config.page_size // long  # requests of this length in the pool
    most = max((batch for batch in buckets if 1 < batch <= held), default=buckets[-1])
    points = [(pair, short) for pair in config.rounds]
    points += [((tier, most), long) for tier in config.shapes]
    times: dict[Any, list[float]] = {point: [] for point in points}
    before, last, read = None, None, 0.0
    for stretch in range(1 + STRETCHES):
        for pair, context in points:
            slots, count = _place(runner, *pair, context)
            # the first dispatch of a function loads it and captures its CUDA graph
            count = count if stretch else 1
            for number in range(count):
                following = runner.round(slots, pair[0])
                if last is not None:
                    last.read()
                    now = time.perf_counter()
                    if before is not None:
                        times[before].append(now - read)
                    read = now
                # the last result of a stretch is read after the next batch is placed, which may
                # take the host longer than a round
                is_counted = stretch and (number < count - 1 or count == 1)
                before, last = (pair, context) if is_counted else None, following
    runner.reset_rows()
    for slot in range(1, config.num_slots):
        runner.clear_slot(slot)
    jax.block_until_ready(runner.on_device)
    found = {one: float(np.median(times[one])) / config.rounds_per_dispatch for one in points}
    added = {tier: found[(tier, most), long] - found[(tier, most), short] for tier in config.shapes}
    return {
        (tier, batch): [value, value + max(0.0, added[tier]) * batch / most]
        for ((tier, batch), context), value in found.items()
        if context == short
    }


def _place(runner: ModelRunner, tier: DraftShape, bucket: int, context: int) -> tuple[range, int]:
    """Give a batch ``context`` tokens per request, or as many as fit; return its slots.

    Also return the number of dispatches that its pages have room for, up to ``DISPATCHES``.
    """
    config = runner.config
    slots = range(1, min(bucket, config.num_slots - 1) + 1)
    pages = min(config.pages_per_request, (config.num_pages - 1) // len(slots))
    room, advance = pages * config.page_size, config.kv_writes.after(config.rounds_per_dispatch)
    filled = max(1, min(context, room - (DISPATCHES + 1) * advance))
    lens, remaining = np.zeros((2, config.num_slots), np.int32)
    for slot in slots:
        lens[slot], remaining[slot] = filled, UNLIMITED
        runner.set_measured_pages(slot, pages)
    runner.reset_rows(lens, remaining)
    return slots, max(1, min(DISPATCHES, (room - filled) // advance - 1))
