"""What an engine is made of: planned from its arguments, compiled, and put on the device."""

import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax

from specjax.checkpoints import DraftCheckpoint, TargetCheckpoint, open_draft, open_target
from specjax.compiling.cache import CompileCache, open_compile_cache
from specjax.config import ModelConfig
from specjax.engine.args import EngineArgs
from specjax.engine.loading import is_same, load_weights
from specjax.kernels.tree_attention import attention_implementation
from specjax.kv.sizes import PoolPlan, device_memory, kv_bytes_per_token, plan_pools
from specjax.models.networks import Networks
from specjax.runtime.buckets import checked_buckets, prefill_buckets, smallest_bucket
from specjax.runtime.runner import ModelRunner
from specjax.runtime.runner_config import RunnerConfig
from specjax.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# The number of pages is part of the shapes that functions are compiled for. What a device reports
# is its total memory times a fraction, whatever else is allocated; the granule takes away what
# still differs between drivers' reserves of one start and the next.
MEMORY_GRANULE = 2**28


@dataclass
class EngineParts:
    """Models, tokenizer and a runner that is compiled and loaded.

    Attributes:
        target: where the target's weights come from.
        draft: where the draft head's weights come from, if there is one.
        runner: the device side.
        tokenizer: ``None`` with ``skip_tokenizer_init``.
        context_length: prompt and completion together.
        max_running_requests: requests decoded at once.
    """

    target: TargetCheckpoint
    draft: DraftCheckpoint | None
    runner: ModelRunner
    tokenizer: Tokenizer | None
    context_length: int
    max_running_requests: int


@dataclass(frozen=True)
class EnginePlan:
    """All that compiling needs: configurations and sizes, no weights.

    Attributes:
        target: where the target's weights will come from.
        draft: where the draft head's weights will come from, if there is one.
        networks: structures of both.
        kernels: ``"pallas"`` or ``"xla"``, what the structures compute with.
        pools: sizes of weights and KV pools.
        config: sizes of the runner.
        context_length: prompt and completion together.
        max_running_requests: requests decoded at once.
    """

    target: TargetCheckpoint
    draft: DraftCheckpoint | None
    networks: Networks
    kernels: str
    pools: PoolPlan
    config: RunnerConfig
    context_length: int
    max_running_requests: int

    def make_runner(self, cache: CompileCache | None = None) -> ModelRunner:
        """A runner that is neither compiled nor loaded; executables come from ``cache``."""
        runner = ModelRunner(self.networks, self.config)
        if cache is not None:
            nets = self.networks
            runner.compiled.cache = cache.bound(
                nets.target_config, nets.head_config, self.kernels, self.config
            )
        return runner


def build_parts(args: EngineArgs, lender: EngineParts | None = None) -> EngineParts:
    """Open the checkpoints, plan the memory, compile and load.

    Args:
        args: checked arguments.
        lender: the parts of another engine over the same model, whose weights are used again.

    Raises:
        ValueError: for checkpoints and sizes that do not work, with the knob to turn.
    """
    show = shows_progress(args)
    cache = open_cache(args)
    plan = plan_parts(args)
    if lender is not None and not is_same(lender.target, plan.target):
        raise ValueError(
            f"share_weights_with is an engine over {lender.target.path} in "
            f"{lender.target.config.dtype}, not over {plan.target.path} in "
            f"{plan.target.config.dtype}"
        )
    runner = plan.make_runner(cache)
    with ThreadPoolExecutor(1) as executor:
        loading = executor.submit(
            load_weights,
            plan.networks,
            plan.target,
            plan.draft,
            is_dummy=args.load_format == "dummy",
            lender=None if lender is None else (lender.draft, lender.runner.weights),
        )
        tokenizer = None if args.skip_tokenizer_init else plan.target.load_tokenizer()
        runner.compile(show_progress=show)
        runner.load(*loading.result())
    return EngineParts(
        plan.target,
        plan.draft,
        runner,
        tokenizer,
        plan.context_length,
        plan.max_running_requests,
    )


def open_cache(args: EngineArgs) -> CompileCache | None:
    """The cache of compiled functions that ``compile_cache_dir`` names.

    Raises:
        ValueError: if a folder that was asked for by name cannot be used.
    """
    directory = args.compile_cache_dir
    return open_compile_cache(None if directory is None else str(directory))


def shows_progress(args: EngineArgs) -> bool:
    """Whether sizes and progress go to standard error."""
    return sys.stderr.isatty() if args.show_progress is None else args.show_progress


def plan_parts(args: EngineArgs) -> EnginePlan:
    """Open the checkpoints and decide all sizes; equal arguments give an equal plan on a device.

    Raises:
        ValueError: for checkpoints and sizes that do not work, with the knob to turn.
    """
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    show = shows_progress(args)
    speculative = args.speculative
    target = open_target(
        args.model, dtype="float32" if args.dtype == "auto" and on_cpu else args.dtype
    )
    draft = None
    if speculative is not None:
        draft = open_draft(
            args.draft,
            target,
            algorithm=speculative.algorithm,
            rope_theta=args.draft_rope_theta,
        )
        _announce(f"draft head: {draft.describe()}", show)
        _announce(
            f"speculative decoding: {speculative.num_steps} drafted tokens a round, "
            f"topk {speculative.topk}, {speculative.num_draft_tokens} rows a verify",
            show,
        )
    kernels = "xla" if on_cpu else "pallas"
    networks = Networks.of(target.config, None if draft is None else draft.config, kernels)
    context_length = resolve_context_length(args.context_length, target.config)
    slots = args.max_running_requests or (4 if on_cpu else 32)
    chunk = args.chunked_prefill_size or (512 if on_cpu else 1024)
    pools = _plan_pools(args, networks, context_length, slots)
    _announce(f"{target.name} ({target.config.dtype}): {pools.describe()}", show)
    smallest = smallest_bucket(
        on_gpu=not on_cpu, speculative=speculative is not None, weight_bytes=pools.weight_bytes
    )
    buckets = checked_buckets(args.batch_buckets, slots, smallest)
    _announce(
        f"context of {context_length} tokens, {slots} requests at once in batches of "
        f"{list(buckets)}",
        show,
    )
    configs = [c for c in (networks.target_config, networks.head_config) if c is not None]
    config = RunnerConfig(
        num_steps=args.tiers[-1],
        other_tiers=args.tiers[:-1],
        page_size=args.page_size,
        num_pages=pools.num_pages,
        pages_per_request=-(-context_length // args.page_size),
        num_slots=slots + 1,
        batch_buckets=buckets,
        prefill_buckets=prefill_buckets(chunk, context_length),
        on_gpu=not on_cpu,
        attention=attention_implementation(
            "cpu" if on_cpu else "gpu", [config.head_dim for config in configs]
        ),
        rounds_per_dispatch=args.rounds_per_dispatch,
        simulate_accept_length=args.simulate_accept_length,
    )
    return EnginePlan(target, draft, networks, kernels, pools, config, context_length, slots)


def resolve_context_length(context_length: int | None, config: ModelConfig) -> int:
    """The context length asked for, or the model's own.

    Raises:
        ValueError: if it exceeds the model's limit or its sliding window.
    """
    window = config.sliding_window
    limit = config.max_position_embeddings
    if window is not None and window < limit:
        if context_length is not None and context_length > window:
            raise ValueError(
                f"context_length={context_length} exceeds the model's sliding window of {window}; "
                "sliding-window attention is not supported beyond it; lower context_length"
            )
        if context_length is None:
            logger.warning(
                "context_length=%d of %d: the sliding window, beyond which attention is not "
                "supported",
                window,
                limit,
            )
        limit = window
    if context_length is not None and context_length > limit:
        raise ValueError(
            f"context_length={context_length} exceeds the model's limit of {limit} "
            "(max_position_embeddings); lower context_length"
        )
    return context_length or limit


def _plan_pools(args: EngineArgs, networks: Networks, context_length: int, slots: int) -> PoolPlan:
    device = jax.devices()[0]
    memory = device_memory(device) // MEMORY_GRANULE * MEMORY_GRANULE
    flats = [flat for flat in (networks.target, networks.head) if flat is not None]
    configs = [c for c in (networks.target_config, networks.head_config) if c is not None]
    leaves = [leaf for flat in flats for leaf in flat.abstract]
    return plan_pools(
        memory=memory,
        on_cpu=device.platform == "cpu",
        weight_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
        token_bytes=sum(map(kv_bytes_per_token, configs)),
        page_size=args.page_size,
        context_length=context_length,
        max_running_requests=slots,
        max_total_tokens=args.max_total_tokens,
        mem_fraction_static=args.mem_fraction_static,
    )


def _announce(line: str, show: bool) -> None:
    """Log a line, and show it where progress is shown and the log is not."""
    logger.info(line)
    if show and not logger.isEnabledFor(logging.INFO):
        print(line, file=sys.stderr)
