"""What an engine is made of, resolved from its arguments and put on the device."""

import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax

from specjax.checkpoints import DraftCheckpoint, TargetCheckpoint, open_draft, open_target
from specjax.config import ModelConfig
from specjax.engine_args import EngineArgs
from specjax.kernels.tree_attention import attention_implementation
from specjax.runtime.buckets import MIN_ROWS_GPU, checked_buckets, prefill_buckets
from specjax.runtime.compile_pool import enable_compile_cache
from specjax.runtime.memory import PoolPlan, device_memory, kv_bytes_per_token, plan_pools
from specjax.runtime.networks import Networks
from specjax.runtime.runner import ModelRunner
from specjax.runtime.runner_config import RunnerConfig
from specjax.tokenizer import Tokenizer
from specjax.weights import is_same, load_weights

logger = logging.getLogger(__name__)


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


def build_parts(args: EngineArgs, lender: EngineParts | None = None) -> EngineParts:
    """Open the checkpoints, plan the memory, compile and load.

    Args:
        args: checked arguments.
        lender: the parts of another engine over the same model, whose weights are used again.

    Raises:
        ValueError: for checkpoints and sizes that do not work, with the knob to turn.
    """
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    show = sys.stderr.isatty() if args.show_progress is None else args.show_progress
    speculative = args.speculative
    cache_dir = args.compile_cache_dir
    enable_compile_cache(None if cache_dir is None else str(cache_dir))

    target = open_target(
        args.model, dtype="float32" if args.dtype == "auto" and on_cpu else args.dtype
    )
    if lender is not None and not is_same(lender.target, target):
        raise ValueError(
            f"share_weights_with is an engine over {lender.target.path} in "
            f"{lender.target.config.dtype}, not over {target.path} in {target.config.dtype}"
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
    networks = Networks.of(
        target.config, None if draft is None else draft.config, "xla" if on_cpu else "pallas"
    )
    context_length = resolve_context_length(args.context_length, target.config)
    slots = args.max_running_requests or (4 if on_cpu else 32)
    chunk = args.chunked_prefill_size or (512 if on_cpu else 1024)
    plan = _plan(args, networks, context_length, slots)
    _announce(f"{target.name} ({target.config.dtype}): {plan.describe()}", show)
    buckets = checked_buckets(
        args.batch_buckets, slots, 1 if on_cpu or speculative else MIN_ROWS_GPU
    )
    _announce(
        f"context of {context_length} tokens, {slots} requests at once in batches of "
        f"{list(buckets)}",
        show,
    )
    configs = [c for c in (networks.target_config, networks.head_config) if c is not None]
    runner = ModelRunner(
        networks,
        RunnerConfig(
            num_steps=0 if speculative is None else speculative.num_steps,
            page_size=args.page_size,
            num_pages=plan.num_pages,
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
        ),
    )
    with ThreadPoolExecutor(1) as executor:
        loading = executor.submit(
            load_weights,
            networks,
            target,
            draft,
            is_dummy=args.load_format == "dummy",
            lender=None if lender is None else (lender.draft, lender.runner.weights),
        )
        tokenizer = None if args.skip_tokenizer_init else target.load_tokenizer()
        runner.compile(show_progress=show)
        runner.load(*loading.result())
    return EngineParts(target, draft, runner, tokenizer, context_length, slots)


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


def _plan(args: EngineArgs, networks: Networks, context_length: int, slots: int) -> PoolPlan:
    device = jax.devices()[0]
    flats = [flat for flat in (networks.target, networks.head) if flat is not None]
    configs = [c for c in (networks.target_config, networks.head_config) if c is not None]
    leaves = [leaf for flat in flats for leaf in flat.abstract]
    return plan_pools(
        memory=device_memory(device),
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
