"""Plan of an engine: checkpoints, networks and sizes, decided before compiling and loading."""

import logging
import sys
from dataclasses import dataclass, replace
from typing import Any

from specjax.checkpoints import TargetCheckpoint, open_target
from specjax.checkpoints.checkpoint import Checkpoint
from specjax.config import DraftWindow
from specjax.disaggregation.decode import TRANSIT_TOKENS
from specjax.engine.args import EngineArgs
from specjax.kernels import deterministic as deterministic_kernels
from specjax.kernels import kv_format
from specjax.kv.holding import KVWrites
from specjax.kv.recurrent import check_networks
from specjax.models import experts, mesh, registry
from specjax.models.declare import pool_windows, request_layers, request_shapes
from specjax.models.flat import Networks
from specjax.models.placement import Placement
from specjax.models.routes import with_routes
from specjax.runtime import runner_config as sizing

logger = logging.getLogger(__name__)

# The number of pages is part of the shapes that functions are compiled for. The memory that a
# device reports varies slightly between starts, as the driver's reserve does. Rounding it down to
# this granule keeps the number of pages, and so the compiled functions, the same.
MEMORY_GRANULE = 2**28
# who may refuse a model or a device
OWNERS = (
    deterministic_kernels.refusals,
    registry.refusals,
    experts.refusals,
    kv_format.refusals,
)


@dataclass(frozen=True)
class EnginePlan:
    """All decisions made before an engine compiles and loads; it holds no weights."""

    args: EngineArgs
    target: TargetCheckpoint
    drafts: tuple[Checkpoint[Any], ...]  # one, or none if the draft has no network
    networks: Networks
    needs: sizing.MemoryNeeds
    config: sizing.RunnerConfig
    context_length: int  # prompt and completion together

    @property
    def kv_bytes(self) -> int:
        tokens = self.config.num_pages * self.config.page_size
        return tokens * self.needs.token_bytes + self.needs.window_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights alone."""
        return self.needs.weight_bytes - self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of recurrent layers, which ``needs`` counts as weights."""
        target = self.networks.target
        shapes = request_shapes(target.caches, self.config.num_states)
        return sum(x.size * x.dtype.itemsize for x in shapes) // target.shards

    @property
    def has_trained_draft(self) -> bool:
        """Whether acceptance depends on the loaded weights of a draft."""
        simulated = self.args.simulate_accept_length, self.args.simulate_acceptance
        return bool(self.drafts) and (self.args.load_format, *simulated) == ("auto", None, None)

    @property
    def cache_facts(self) -> tuple[Any, ...]:
        """Values that compiled functions depend on, in addition to arguments and source code."""
        nets = self.networks
        kinds = [registry.layer_kinds(model) for model in nets.models]
        models = nets.target_config, nets.draft_config, kinds
        modules = [fact for model in nets.models for fact in registry.cache_facts(model)]
        facts = *modules, *self.config.algorithm.cache_facts()
        devices = (f"{device.device_kind} {device.id}" for device in nets.placement.devices)
        return (*models, self.config, *devices, nets.draft.shards, *facts)

    def fitted(self, temporary_bytes: int) -> "EnginePlan":
        """Return a plan with as many pages as the temporary memory of functions permits."""
        config, needs = decide_pages(self.args, self.networks, self.config, temporary_bytes)
        return replace(self, config=config, needs=needs)

    def announce(self) -> None:
        """Log the lines of :meth:`describe`, and print them if the log does not show them."""
        for line in self.describe():
            logger.info(line)
            if self.args.shows_progress and not logger.isEnabledFor(logging.INFO):
                print(line, file=sys.stderr)

    def describe(self) -> list[str]:
        """Describe drafts, sizes and memory in lines for the log and the terminal."""
        config, largest, target = self.config, self.config.largest, self.target
        speculation = "plain decoding"
        if self.args.speculative_algorithm is None:  # with "NONE", the user chose plain decoding
            speculation += "; for drafts set draft to a head, or speculative_algorithm to 'NGRAM'"
        if largest.steps > 0:
            *shallower, deepest = (str(shape.steps) for shape in config.shapes if not shape.packed)
            steps = f"{', '.join(shallower)} or {deepest}" if shallower else deepest
            unit = "drafted tokens" if largest.topk == 1 else "steps"
            adaptive = self.args.adaptive
            how = "" if adaptive is None else f", adaptive ({adaptive.policy})"
            speculation = (
                f"{config.algorithm.name}: {steps} {unit} per round{how}, topk {largest.topk}, "
                f"{largest.nodes} tokens verified per round"
            )
            if (hot := getattr(self.networks.draft_config, "hot", None)) is not None:
                speculation += f", drafts among {hot.size} tokens"
            if (limit := getattr(self.networks.draft_config, "draft_window", None)) is not None:
                first = f" and the first {limit.sink_tokens}" if limit.sink_tokens else ""
                speculation += f", drafts from the last {limit.size} tokens{first}"
            if (count := self.networks.draft.shards) > 1:
                speculation += f", draft split over {count} devices"
        place, windows = self.networks.placement, ""
        kind, of_each = place.device.device_kind, ""
        if place.count > 1:
            kind, of_each = f"{place.count} x {kind} (tp_size={place.count})", ", on each"
        states = f", states {self.state_bytes / 1e9:.2f} GB" if self.state_bytes else ""
        kv = "" if self.args.kv_cache_dtype == "auto" else f" of {self.args.kv_cache_dtype}"
        if tokens := config.max_window_tokens:
            windows = f", and {tokens // config.page_size} pages for layers with a window"
        return [
            *(f"draft: {draft.describe()}" for draft in self.drafts),
            speculation,
            f"context length {self.context_length} tokens, up to {config.num_slots - 1} running "
            f"requests, batch buckets {list(config.batch_buckets)}",
            f"{target.name} ({target.matrices}) on {kind}: weights "
            f"{self.weight_bytes / 1e9:.2f} GB{states}, KV "
            f"{self.kv_bytes / 1e9:.2f} GB{kv}{of_each}: "
            f"{config.num_pages - 1} pages of {config.page_size} tokens, {config.max_total_tokens} "
            f"tokens{windows}",
        ]


def open_drafts(args: EngineArgs, target: TargetCheckpoint, draft: Any) -> tuple[Any, ...]:
    """Open the checkpoints of the draft network, quantised and limited as the arguments say."""
    drafts = [
        opened.quantised_draft(args.quantization, rounds_activations=args.quantize_activations)
        for opened in args.algorithm.open_draft(args, target, draft)
    ]
    if (size := args.speculative_draft_window_size) is None:
        return tuple(drafts)
    window = DraftWindow(size, args.speculative_draft_sink_size)
    return tuple(replace(x, config=replace(x.config, draft_window=window)) for x in drafts)


def splits_pools(args: EngineArgs) -> bool:
    """Whether layers with windows may have pools of their own: KV is sent from a single pool."""
    return args.disaggregation_mode is None


def num_snapshots(args: EngineArgs, networks: Networks, slots: int) -> int:
    """Number of snapshots for the prefix cache: by default, two for each of ``slots`` requests."""
    if args.disable_radix_cache or not request_layers(networks.target.caches):
        return 0
    return 2 * slots if args.max_state_snapshots is None else args.max_state_snapshots


def decide_pages(
    args: EngineArgs, networks: Networks, config: sizing.RunnerConfig, temporary_bytes: int = 0
) -> tuple[sizing.RunnerConfig, sizing.MemoryNeeds]:
    """Return ``config`` with the number of pages of each pool, and the memory that it needs.

    ``temporary_bytes`` of memory stay free while functions run.
    """
    memory = sizing.least_memory(networks.placement) // MEMORY_GRANULE * MEMORY_GRANULE
    transit_tokens = TRANSIT_TOKENS if args.disaggregation_mode == "decode" else 0
    window_pages = sizing.window_pages(networks.target.caches, config) if splits_pools(args) else ()
    for pools in (window_pages, ()):
        config = replace(config, window_pages=pools)
        needs = sizing.memory_needs(networks, config, temporary_bytes, transit_tokens)
        try:
            num_pages, spare = sizing.plan_pages(
                needs,
                config,
                memory=memory,
                max_total_tokens=args.max_total_tokens,
                mem_fraction_static=args.mem_fraction_static,
            )
        except ValueError:
            if not pools:
                raise
            continue
        if all(num_pages > count for _, count in pools):  # otherwise, a split would save nothing
            break
    config = replace(config, num_pages=num_pages)
    if config.window_pages and spare:
        spare *= networks.target.shards  # the bytes of all devices
        pools = sizing.grown_window_pages(networks.target.caches, config, spare)
        config = replace(config, window_pages=pools)
        needs = sizing.memory_needs(networks, config, temporary_bytes, transit_tokens)
    return config, needs


def plan_engine(args: EngineArgs) -> EnginePlan:
    """Open the checkpoints and decide all sizes. On a device, equal arguments give an equal plan.

    Raises ValueError if the device is missing or sizes do not fit the model or the device.
    """
    placement = Placement.on(args.base_gpu_id, args.tp_size)
    on_cpu = placement.on_cpu
    dtype = "float32" if args.dtype == "auto" and on_cpu else args.dtype
    target = open_target(args.model, dtype=dtype, revision=args.revision)
    if args.tokenizer is not None or args.chat_template is not None:
        target = target.with_tokenizer(args.tokenizer, args.chat_template)
    target = target.quantised(args.quantization, rounds_activations=args.quantize_activations)
    drafts = open_drafts(args, target, args.draft)
    shapes = args.algorithm.fit_shapes(args, drafts[0].config if drafts else None)
    args.check_simulation(shapes)
    context_length = target.config.context_length(args.context_length)
    served = [
        checkpoint.config.served(context_length, args.kv_cache_dtype)
        for checkpoint in (target, *drafts)
    ]
    served[0] = with_routes(served[0], args)
    deterministic, device = args.enable_deterministic_inference, placement.device
    for refusals in OWNERS:
        for reason in refusals(served[0], device, deterministic=deterministic):
            raise ValueError(reason)
    for reason in mesh.refusals(served[0], served[1:], placement.count):
        raise ValueError(reason)
    how: Any = {"deterministic": deterministic, "placement": placement}
    networks = args.algorithm.networks(*served, **how, draft_tp_size=args.draft_tp_size)
    check_networks(networks, args, shapes)
    for text in (x for model in networks.configs for x in kv_format.warnings(model, device)):
        logger.warning(text)
    slots = args.max_running_requests or (4 if on_cpu else 32)
    mixed, most = sizing.prefill_tokens(
        args.chunked_prefill_size,
        context_length,
        slots,
        max(pool_windows(networks.target.caches), default=0) if splits_pools(args) else 0,
        on_cpu=on_cpu,
    )
    smallest = sizing.smallest_bucket(
        on_gpu=not on_cpu, drafts=shapes[-1].steps > 0, weight_bytes=networks.weight_bytes
    )
    buckets = sizing.batch_buckets(args.batch_buckets, slots, smallest)
    if args.adaptive is not None and args.acceptance.is_coupled:
        weight_bytes = None if on_cpu else networks.weight_bytes
        shapes += args.adaptive.packed_tiers(shapes[-1], buckets[-1], weight_bytes)
    longest = context_length + KVWrites.of(shapes, args.rounds_per_dispatch).tail
    config = sizing.RunnerConfig(
        algorithm=args.algorithm,
        shapes=shapes,
        page_size=args.page_size,
        num_pages=0,
        pages_per_request=-(-longest // args.page_size),
        num_slots=slots + 1,
        # a prefill engine runs no rounds
        batch_buckets=() if args.disaggregation_mode == "prefill" else buckets,
        prefill_buckets=sizing.prefill_buckets(most, on_cpu=on_cpu),
        mixed_prefill_tokens=mixed,
        processed_logprobs=args.logprobs_mode == "processed",
        rounds_per_dispatch=args.rounds_per_dispatch,
        simulate_accept_length=args.simulate_accept_length,
        simulates_acceptance=args.simulate_acceptance is not None,
        acceptance=args.acceptance,
        reads_confidence=any(shape.packed for shape in shapes),
        deterministic=deterministic,
        has_grammars=args.grammar_backend is not None,
        num_snapshots=num_snapshots(args, networks, slots),
    )
    config, needs = decide_pages(args, networks, config)
    return EnginePlan(args, target, drafts, networks, needs, config, context_length)
