"""What an engine is made of: planned from its arguments, compiled, and put on the device."""

import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax

from specjax.checkpoints import TargetCheckpoint, open_target
from specjax.checkpoints.assemble import Checkpoint
from specjax.compiling.cache import CompileCache, open_compile_cache
from specjax.config import ModelConfig
from specjax.disaggregation.decode import RemotePrompts
from specjax.disaggregation.local import LocalPeer
from specjax.disaggregation.placing import TRANSIT_TOKENS
from specjax.disaggregation.prefill import PrefillJobs
from specjax.disaggregation.remote import PrefillServer, RemotePeer
from specjax.disaggregation.rows import RowPort
from specjax.engine.args import EngineArgs
from specjax.engine.weights import is_same, load_weights
from specjax.kernels.tree_attention import attention_implementation
from specjax.kv.budget import Reach
from specjax.kv.pages import ATTENTION_OPTIONS
from specjax.kv.sizes import PoolPlan, device_memory, plan_pools
from specjax.models.flat import Networks, Placement
from specjax.models.registry import check_attention, layer_kinds
from specjax.runtime.runner import ModelRunner
from specjax.runtime.runner_config import (
    DEFAULT_CHUNK,
    RunnerConfig,
    checked_buckets,
    prefill_buckets,
    smallest_bucket,
    temporary_bytes,
)
from specjax.scheduling.loop import EngineLoop
from specjax.scheduling.scheduler import Scheduler
from specjax.speculative.algorithm import kv_pool
from specjax.speculative.registry import HINT
from specjax.text.chat_template import start_renderer
from specjax.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# The number of pages is part of the shapes that functions are compiled for. What a device reports
# is its total memory times a fraction, whatever else is allocated; the granule takes away what
# still differs between drivers' reserves of one start and the next.
MEMORY_GRANULE = 2**28
# where none decodes, or many start: 42,500 tokens/s of that shape against 39,400 in chunks of 2,048
IDLE_CHUNK = 8192
Peer = PrefillServer | RemotePeer | LocalPeer


@dataclass(frozen=True)
class EnginePlan:
    """What an engine is made of: checkpoints, structures and sizes, no weights."""

    target: TargetCheckpoint
    drafts: tuple[Checkpoint[Any], ...]  # one, or none where the draft has no network
    networks: Networks
    pools: PoolPlan
    config: RunnerConfig
    context_length: int  # prompt and completion together

    def make_runner(self, cache: CompileCache | None = None) -> ModelRunner:
        """A runner that is neither compiled nor loaded; executables come from ``cache``."""
        runner = ModelRunner(self.networks, self.config)
        if cache is not None:
            nets = self.networks
            runner.compiled.cache = cache.bound(
                nets.target_config,
                nets.draft_config,
                [layer_kinds(model) for model in nets.models],
                self.config,
                nets.placement.describe(),
                *self.config.algorithm.cache_facts(),
                devices=[nets.placement.device],
            )
        return runner


def build_engine(
    args: EngineArgs, lender: tuple[EnginePlan, ModelRunner] | None = None
) -> tuple[EnginePlan, ModelRunner, Tokenizer | None]:
    """The plan, a runner that is compiled and loaded, and the tokenizer, if one is wanted.

    The weights of the ``lender``, another engine over the same model, are used again.
    """
    plan = plan_parts(args)  # first: it says what is missing where JAX has no device
    cache = open_compile_cache(args.compile_cache_dir)
    if lender is not None and not is_same(lender[0].target, plan.target):
        other = lender[0].target
        raise ValueError(
            f"share_weights_with is an engine over {other.path} in {other.config.dtype}, not over "
            f"{plan.target.path} in {plan.target.config.dtype}"
        )
    is_dummy = args.load_format == "dummy"
    if not is_dummy:
        plan.target.check_weights()  # before the minutes of compiling
        for draft in plan.drafts:
            draft.check_weights()
    lent = None
    if lender is not None:
        weights, place = lender[1].weights, plan.networks.placement
        is_here = lender[0].networks.placement == place
        lent = lender[0].drafts, weights if is_here else place.put(weights)
    runner = plan.make_runner(cache)
    with ThreadPoolExecutor(1) as executor:
        loading = executor.submit(
            load_weights, plan.networks, plan.target, plan.drafts, is_dummy=is_dummy, lender=lent
        )
        tokenizer = None if args.skip_tokenizer_init else plan.target.load_tokenizer()
        if tokenizer is not None and tokenizer.chat_template is not None:
            start_renderer()
        compile_runner(args, runner)
        runner.load(*loading.result())
    return plan, runner, tokenizer


def compile_runner(args: EngineArgs, runner: ModelRunner, *, stages: bool = False) -> None:
    """Compile everything that serving with these arguments dispatches."""
    runner.compile(show_progress=shows_progress(args), stages=stages)
    if args.disaggregation_mode is not None:
        gives = args.disaggregation_mode == "prefill"
        RowPort(runner).compile(gives=gives, show_progress=shows_progress(args))


def make_scheduler(
    args: EngineArgs, runner: ModelRunner, *inputs: Any, **options: Any
) -> Scheduler:
    """The scheduler of a compiled and loaded runner."""
    source = None
    if args.disaggregation_mode is not None:
        source = (PrefillJobs if args.disaggregation_mode == "prefill" else RemotePrompts)(runner)
    return Scheduler(runner, *inputs, prompt_source=source, **options)


def open_peer(args: EngineArgs, side: tuple[EngineLoop, Any]) -> Peer | None:
    """What connects an engine to the other side, where that is in another process."""
    if args.disaggregation_address is None:
        return None
    kind = PrefillServer if args.disaggregation_mode == "prefill" else RemotePeer
    return kind(args.disaggregation_address, args.disaggregation_secret, side)


def shows_progress(args: EngineArgs) -> bool:
    """Whether sizes and progress go to standard error, which a process may be without."""
    if sys.stderr is None:
        return False
    return sys.stderr.isatty() if args.show_progress is None else args.show_progress


def plan_parts(args: EngineArgs) -> EnginePlan:
    """Open the checkpoints and decide all sizes; equal arguments give an equal plan on a device."""
    placement = Placement.on(args.base_gpu_id)
    on_cpu, algorithm, largest = placement.on_cpu, args.algorithm, args.shapes[-1]
    dtype = "float32" if args.dtype == "auto" and on_cpu else args.dtype
    target = open_target(args.model, dtype=dtype, revision=args.revision)
    if args.tokenizer is not None or args.chat_template is not None:
        target = target.with_tokenizer(args.tokenizer, args.chat_template)
    drafts = algorithm.open_draft(args, target, args.draft)
    for draft in drafts:
        _announce(args, f"draft: {draft.describe()}")
    if largest.steps > 0:
        sizes = f"topk {largest.topk}, {largest.nodes} rows a verify"
        _announce(args, f"{algorithm.name}: {_describe_tiers(args)}, {sizes}")
    else:
        _announce(args, f"plain decoding; {HINT}")
    context_length = _context_length(args.context_length, target.config)
    networks = algorithm.networks(
        target.config.within(context_length),
        drafts[0].config if drafts else None,
        kernels="xla" if on_cpu else "pallas",
        placement=placement,
    )
    for model in networks.models:
        check_attention(model, ATTENTION_OPTIONS)
    slots = args.max_running_requests or (4 if on_cpu else 32)
    chunk = args.chunked_prefill_size or DEFAULT_CHUNK
    most = (
        min(chunk, context_length)
        if on_cpu
        else min(max(chunk, IDLE_CHUNK), context_length * slots)
    )
    whole = context_length + Reach.of(args.shapes, args.rounds_per_dispatch).overhang
    drafts_any, weight_bytes = largest.steps > 0, networks.weight_bytes
    smallest = smallest_bucket(on_gpu=not on_cpu, drafts=drafts_any, weight_bytes=weight_bytes)
    buckets = checked_buckets(args.batch_buckets, slots, smallest)
    if args.disaggregation_mode == "prefill":
        buckets = ()  # no rounds
    sizes = f"{slots} requests at once in batches of {list(buckets)}"
    _announce(args, f"context of {context_length} tokens, {sizes}")
    config = RunnerConfig(
        algorithm=algorithm,
        shapes=args.shapes,
        page_size=args.page_size,
        num_pages=0,  # until the pools are planned
        pages_per_request=-(-whole // args.page_size),
        num_slots=slots + 1,
        batch_buckets=buckets,
        prefill_buckets=prefill_buckets(most, on_cpu=on_cpu),
        mixed_prefill_tokens=min(chunk, most),
        processed_logprobs=args.logprobs_mode == "processed",
        on_gpu=not on_cpu,
        attention=attention_implementation(
            "cpu" if on_cpu else "gpu", [config.head_dim for config in networks.configs]
        ),
        rounds_per_dispatch=args.rounds_per_dispatch,
        simulate_accept_length=args.simulate_accept_length,
        acceptance=args.acceptance,
    )
    pools = _plan_pools(args, networks, config)
    kind = placement.device.device_kind
    _announce(args, f"{target.name} ({target.config.dtype}) on {kind}: {pools.describe()}")
    config = replace(config, num_pages=pools.num_pages)
    return EnginePlan(target, drafts, networks, pools, config, context_length)


def _describe_tiers(args: EngineArgs) -> str:
    *others, deepest = (str(shape.steps) for shape in args.shapes)
    steps = f"{', '.join(others)} or {deepest}" if others else deepest
    how = "" if args.adaptive is None else f", adaptive ({args.adaptive.policy})"
    what = "drafted tokens" if args.shapes[-1].topk == 1 else "steps"
    return f"{steps} {what} a round{how}"


def _context_length(asked: int | None, config: ModelConfig) -> int:
    """The context length asked for, or the model's own: its limit or its sliding window."""
    limit, longest = config.context_limit, config.max_position_embeddings
    what = f"limit of {limit} (max_position_embeddings)"
    if limit < longest:
        what = f"sliding window of {limit}, beyond which attention is not supported"
        if asked is None:
            logger.warning("context_length=%d of %d: the %s", limit, longest, what)
    if asked is not None and asked > limit:
        raise ValueError(f"context_length={asked} exceeds the model's {what}; lower context_length")
    return asked or limit


def _plan_pools(args: EngineArgs, networks: Networks, config: RunnerConfig) -> PoolPlan:
    place, algorithm, model = networks.placement, args.algorithm, networks.target_config

    def state_bytes(num_kv: int) -> int:
        sizes = config.sizes._replace(num_kv=num_kv)
        state = algorithm.abstract_state(networks, sizes), kv_pool(model, num_kv)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))

    token_bytes = state_bytes(2) - state_bytes(1)
    num_features = len(algorithm.feature_layers(networks))
    transit_bytes = TRANSIT_TOKENS * token_bytes * (args.disaggregation_mode == "decode")
    return plan_pools(
        memory=device_memory(place.device) // MEMORY_GRANULE * MEMORY_GRANULE,
        on_cpu=place.on_cpu,
        # what does not grow with the tokens stands beside the weights
        weight_bytes=networks.weight_bytes + state_bytes(1) - token_bytes,
        # the draft may be the wider one
        temporary_bytes=transit_bytes
        + max(temporary_bytes(one, config, num_features) for one in networks.configs),
        token_bytes=token_bytes,
        page_size=args.page_size,
        context_length=config.context,
        max_running_requests=config.num_slots - 1,
        max_total_tokens=args.max_total_tokens,
        mem_fraction_static=args.mem_fraction_static,
    )


def _announce(args: EngineArgs, line: str) -> None:
    """Log a line, and show it where progress is shown and the log is not."""
    logger.info(line)
    if shows_progress(args) and not logger.isEnabledFor(logging.INFO):
        print(line, file=sys.stderr)
