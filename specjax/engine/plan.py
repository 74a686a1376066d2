"""Plan of an engine: checkpoints, networks and sizes, decided before compiling and loading."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specjax.checkpoints import TargetCheckpoint, open_target
from specjax.checkpoints.checkpoint import Checkpoint
from specjax.config import BlockConfig, ModelConfig, TransformerConfig
from specjax.disaggregation.decode import TRANSIT_TOKENS
from specjax.engine.args import EngineArgs
from specjax.kernels.backend import WORD, takes_head_dim
from specjax.kernels.invariant_attention import HEAD_DIMS, MAX_ROWS
from specjax.kv.holding import KVWrites
from specjax.models.flat import Networks
from specjax.models.placement import Placement
from specjax.models.registry import layer_kinds
from specjax.runtime import runner_config as sizing
from specjax.types import DraftShape

logger = logging.getLogger(__name__)

# The number of pages is part of the shapes that functions are compiled for. The memory that a
# device reports varies slightly between starts, as the driver's reserve does. Rounding it down to
# this granule keeps the number of pages, and so the compiled functions, the same.
MEMORY_GRANULE = 2**28
# Prompt tokens per step if nothing decodes: 42,500 tokens/s (Llama-3.1-8B shape) instead of 39,400
# in chunks of 2,048.
IDLE_CHUNK = 8192
# the same for models with windows and few slots
LEAST_IDLE_CHUNK = 2048
# Minimum compute capability of GPUs that convert 8-bit floats.
LEAST_8BIT_CAPABILITY = 8.9
# rows of the smallest tier that the budget policy also runs packed
LEAST_PACKED_NODES = 5
# On a GPU, packed rounds need weights of this size. Smaller models gain nothing, and confidences of
# drafts cost them time: 0.3 of 1.4 ms with seven drafts and eight requests (SmolLM2-135M, H100).
LEAST_PACKED_BYTES = 2**30


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
    def has_trained_draft(self) -> bool:
        """Whether acceptance depends on the loaded weights of a draft."""
        simulated = self.args.simulate_accept_length, self.args.simulate_acceptance
        return bool(self.drafts) and (self.args.load_format, *simulated) == ("auto", None, None)

    @property
    def cache_facts(self) -> tuple[Any, ...]:
        """Values that compiled functions depend on, in addition to arguments and source code."""
        nets = self.networks
        kinds = [layer_kinds(model) for model in nets.models]
        models = nets.target_config, nets.draft_config, kinds
        own = self.config.algorithm.cache_facts()
        device = f"{nets.placement.device.device_kind} {nets.placement.device.id}"
        return (*models, self.config, device, *own)

    def describe(self) -> list[str]:
        """Describe drafts, sizes and memory in lines for the log and the terminal."""
        config, largest, target = self.config, self.config.largest, self.target
        speculation = "plain decoding"
        if self.args.speculative_algorithm is None:  # with "NONE", the user chose plain decoding
            speculation += "; for drafts set draft to a head, or speculative_algorithm to 'NGRAM'"
        if largest.steps > 0:
            *others, deepest = (str(shape.steps) for shape in config.shapes if not shape.packed)
            steps = f"{', '.join(others)} or {deepest}" if others else deepest
            what = "drafted tokens" if largest.topk == 1 else "steps"
            adaptive = self.args.adaptive
            how = "" if adaptive is None else f", adaptive ({adaptive.policy})"
            speculation = (
                f"{config.algorithm.name}: {steps} {what} per round{how}, topk {largest.topk}, "
                f"{largest.nodes} tokens verified per round"
            )
        kind, windows = self.networks.placement.device.device_kind, ""
        weights = target.config.quantization or target.config.dtype
        kv = "" if self.args.kv_cache_dtype == "auto" else f" of {self.args.kv_cache_dtype}"
        if config.num_window_pages:
            windows = f", and {config.num_window_pages - 1} pages for layers with a window"
        return [
            *(f"draft: {draft.describe()}" for draft in self.drafts),
            speculation,
            f"context length {self.context_length} tokens, up to {config.num_slots - 1} running "
            f"requests, batch buckets {list(config.batch_buckets)}",
            f"{target.name} ({weights}) on {kind}: weights "
            f"{self.needs.weight_bytes / 1e9:.2f} GB, KV {self.kv_bytes / 1e9:.2f} GB{kv}: "
            f"{config.num_pages - 1} pages of {config.page_size} tokens, {config.max_total_tokens} "
            f"tokens{windows}; temporary memory up to {self.needs.temporary_bytes / 1e9:.2f} GB",
        ]


def packed_tiers(
    args: EngineArgs, deepest: DraftShape, batch: int, networks: Networks
) -> tuple[DraftShape, ...]:
    """The packed tier of the budget policy: the deepest tier with 5/8 of its verified rows."""
    is_budget = args.adaptive is not None and args.adaptive.policy == "budget"
    is_possible = deepest.nodes >= LEAST_PACKED_NODES and batch > 1 and args.acceptance.is_coupled
    is_large = networks.placement.on_cpu or networks.weight_bytes >= LEAST_PACKED_BYTES
    if not (is_budget and is_possible and is_large):
        return ()
    return (deepest._replace(packed=5 * deepest.nodes // 8),)


def check_deterministic(config: ModelConfig, placement: Placement) -> None:
    """Raise ValueError if ``enable_deterministic_inference`` does not cover a model or device."""
    reason = ""
    if placement.on_cpu:
        reason = "needs a GPU"
    elif config.dtype != "bfloat16":
        reason = f"needs dtype='bfloat16'; the model has {config.dtype}"
    elif config.quantization is not None:
        reason = f"does not support quantised matrices; the model has {config.quantization}"
    elif config.head_dim not in HEAD_DIMS:
        reason = f"needs a head dim of {' or '.join(map(str, HEAD_DIMS))}, not {config.head_dim}"
    elif config.kv_cache_dtype != "auto" and not takes_head_dim(config.head_dim, WORD):
        kind = config.kv_cache_dtype
        least = f"needs a head dim of at least 32 with kv_cache_dtype={kind!r}"
        reason = f"{least}, not {config.head_dim}"
    elif config.num_heads > MAX_ROWS * config.num_kv_heads:
        heads = f"num_heads={config.num_heads} and num_key_value_heads={config.num_kv_heads}"
        reason = f"needs at most {MAX_ROWS} query heads per KV head, not {heads}"
    elif config.hidden_size % 16 or config.intermediate_size % 16:
        reason = (
            f"needs multiples of 16 as hidden_size={config.hidden_size} and "
            f"intermediate_size={config.intermediate_size}"
        )
    elif options := next(filter(None, (k.attention_options for k in layer_kinds(config))), None):
        reason = f"does not support the attention options {sorted(options)} of the model's layers"
    if reason:
        raise ValueError(f"enable_deterministic_inference=True {reason}")


def check_kv_dtype(kind: str, placement: Placement) -> None:
    """Raise ValueError if kernels on a GPU cannot convert the values of a ``kv_cache_dtype``."""
    found = getattr(placement.device, "compute_capability", LEAST_8BIT_CAPABILITY)
    if kind != "auto" and float(found) < LEAST_8BIT_CAPABILITY:
        raise ValueError(
            f"kv_cache_dtype={kind!r} needs compute capability {LEAST_8BIT_CAPABILITY} or later; "
            f"{placement.device.device_kind} has {found}"
        )


def quantised(drafts: Sequence[Any], args: EngineArgs) -> tuple[Any, ...]:
    """Quantise the matrices of draft heads and models; all other drafts stay as they are.

    Logs a warning for a draft that ``quantize_activations`` leaves as it is.
    """

    def quantise(draft: Any) -> Any:
        if not isinstance(draft, Checkpoint):
            return draft
        own, rounds = draft.config.quantization, args.quantize_activations
        kind = args.quantization if own is None else own.kind
        is_whole = kind is None or isinstance(draft.config, BlockConfig)
        if rounds and is_whole:
            logger.warning("quantize_activations: the draft %s stays whole", draft.path)
        elif rounds and own is not None and not own.permits_rounding:
            text = "quantize_activations: %s: quantization_config (%s) does not permit it"
            logger.warning(text, draft.path / "config.json", own)
            rounds = False
        return draft if is_whole else draft.quantised(kind, rounds_activations=rounds)

    return tuple(map(quantise, drafts))


def plan_engine(args: EngineArgs) -> EnginePlan:
    """Open the checkpoints and decide all sizes. On a device, equal arguments give an equal plan.

    Raises ValueError if the device is missing or sizes do not fit the model or the device.
    """
    placement = Placement.on(args.base_gpu_id)
    on_cpu = placement.on_cpu
    dtype = "float32" if args.dtype == "auto" and on_cpu else args.dtype
    target = open_target(args.model, dtype=dtype, revision=args.revision)
    if args.tokenizer is not None or args.chat_template is not None:
        target = target.with_tokenizer(args.tokenizer, args.chat_template)
    drafts = quantised(args.algorithm.open_draft(args, target, args.draft), args)
    target = target.quantised(args.quantization, rounds_activations=args.quantize_activations)
    if args.quantize_activations and target.config.quantization is None:
        raise ValueError(
            "quantize_activations=True needs quantised matrices; set quantization to 'fp8' or "
            f"'int8', because those of {target.path} are whole"
        )
    shapes = args.algorithm.fit_shapes(args, drafts[0].config if drafts else None)
    args.check_simulation(shapes)
    context_length = target.config.context_length(args.context_length)
    if args.enable_deterministic_inference:
        check_deterministic(target.config.within(context_length), placement)
    check_kv_dtype(args.kv_cache_dtype, placement)
    draft = drafts[0].config if drafts else None
    if isinstance(draft, TransformerConfig):
        draft = replace(draft.within(context_length), kv_cache_dtype=args.kv_cache_dtype)
    if isinstance(draft, ModelConfig):
        draft = replace(draft, kv_exponents=())
    networks = args.algorithm.networks(
        replace(
            target.config.within(context_length),
            kv_cache_dtype=args.kv_cache_dtype,
            kv_exponents=(),  # of weights, not of functions
        ),
        draft,
        deterministic=args.enable_deterministic_inference,
        placement=placement,
    )
    for own in networks.configs:
        if args.kv_cache_dtype != "auto" and not takes_head_dim(own.head_dim, WORD) and not on_cpu:
            logger.warning(
                "with kv_cache_dtype=%r and head_dim=%d, every round reads the KV of the whole "
                "context length; kernels take heads of 32 to 256 dims, in steps of 32",
                args.kv_cache_dtype,
                own.head_dim,
            )
    splits = args.disaggregation_mode is None  # KV is sent from a single pool
    slots = args.max_running_requests or (4 if on_cpu else 32)
    chunk = args.chunked_prefill_size or (sizing.DEFAULT_CHUNK_CPU if on_cpu else IDLE_CHUNK)
    if on_cpu:
        most = min(chunk, context_length)
    else:
        idle, windows = IDLE_CHUNK, networks.target_config.windows
        # a prefill needs window pages for its tokens: no more than a quarter
        if windows and splits:
            idle = min(idle, max(LEAST_IDLE_CHUNK, slots * max(windows) // 4))
        most = min(max(args.chunked_prefill_size or 0, idle), context_length * slots)
    smallest = sizing.smallest_bucket(
        on_gpu=not on_cpu, drafts=shapes[-1].steps > 0, weight_bytes=networks.weight_bytes
    )
    buckets = sizing.batch_buckets(args.batch_buckets, slots, smallest)
    shapes += packed_tiers(args, shapes[-1], buckets[-1], networks)
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
        mixed_prefill_tokens=min(chunk, most),
        processed_logprobs=args.logprobs_mode == "processed",
        rounds_per_dispatch=args.rounds_per_dispatch,
        simulate_accept_length=args.simulate_accept_length,
        simulates_acceptance=args.simulate_acceptance is not None,
        acceptance=args.acceptance,
        reads_confidence=any(shape.packed for shape in shapes),
        deterministic=args.enable_deterministic_inference,
        has_grammars=args.grammar_backend is not None,
    )
    memory = sizing.device_memory(placement.device) // MEMORY_GRANULE * MEMORY_GRANULE
    transit_tokens = TRANSIT_TOKENS if args.disaggregation_mode == "decode" else 0
    window_pages = sizing.num_window_pages(networks.target_config, config) if splits else 0
    for num_window_pages in (window_pages, 0):
        config = replace(config, num_window_pages=num_window_pages)
        needs = sizing.memory_needs(networks, config, transit_tokens)
        try:
            num_pages = sizing.plan_pages(
                needs,
                config,
                memory=memory,
                max_total_tokens=args.max_total_tokens,
                mem_fraction_static=args.mem_fraction_static,
            )
        except ValueError:
            if num_window_pages == 0:
                raise
            continue
        if num_pages > num_window_pages:  # otherwise, a split would save nothing
            break
    config = replace(config, num_pages=num_pages)
    plan = EnginePlan(args, target, drafts, networks, needs, config, context_length)
    for line in plan.describe():
        logger.info(line)
        if args.shows_progress and not logger.isEnabledFor(logging.INFO):
            print(line, file=sys.stderr)
    return plan
