"""Build the device side of an engine from its plan: compile and load."""

import logging
from concurrent.futures import ThreadPoolExecutor

import jax

from specjax.adaptive import (
    AdaptiveSpecPolicy,
    AdaptiveSpeculativeParams,
    BudgetPolicy,
    TierController,
)
from specjax.adaptive.cost import CONTEXTS
from specjax.compiling.cache import CompileCache, open_compile_cache
from specjax.disaggregation.rows import KVTransfer
from specjax.engine.args import EngineArgs
from specjax.engine.plan import EnginePlan, plan_engine
from specjax.engine.weights import load_weights
from specjax.runtime.runner import ModelRunner
from specjax.runtime.runner_config import least_memory
from specjax.runtime.timing import round_seconds
from specjax.text.chat_template import start_renderer
from specjax.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


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
    plan.networks.placement.check_others()
    if shared is not None and not plan.target.has_weights_of(shared[0].target):
        other = shared[0].target
        raise ValueError(
            f"share_weights_with must be an engine with the model {plan.target.path}, dtype "
            f"{plan.target.config.dtype} and matrices {plan.target.config.quantization}; got "
            f"{other.path}, {other.config.dtype} and {other.config.quantization}"
        )
    if args.load_format != "dummy":
        for checkpoint in (plan.target, *plan.drafts):
            checkpoint.check_weights()  # before compiling, which may take minutes
    with ThreadPoolExecutor(1) as executor:
        loading = executor.submit(load_weights, plan, shared)
        tokenizer = None if args.skip_tokenizer_init else plan.target.load_tokenizer()
        if tokenizer is not None and tokenizer.chat_template is not None:
            start_renderer()
        plan, runner = compile_plan(plan, on_use=compile_on_use)
        try:
            runner.load(*loading.result())
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            total = least_memory(plan.networks.placement)
            raise ValueError(
                f"{plan.needs.weight_bytes / 1e9:.2f} GB of weights and {plan.kv_bytes / 1e9:.2f} "
                f"GB of KV do not fit into the free part of {total / 1e9:.2f} GB; stop other "
                "processes and engines, or lower mem_fraction_static, max_total_tokens, "
                "max_running_requests or context_length"
            ) from error
    return plan, runner, tokenizer


def open_cache(plan: EnginePlan) -> CompileCache | None:
    directory, devices = plan.args.compile_cache_dir, plan.networks.placement.devices
    return open_compile_cache(directory, *plan.cache_facts, devices=devices)


def compile_plan(plan: EnginePlan, *, on_use: bool = False) -> tuple[EnginePlan, ModelRunner]:
    """Compile all functions that serving dispatches; ``on_use`` is of ``ModelRunner.compile``.

    Return the plan with their temporary memory. If the KV pools would not leave enough of it, the
    plan has fewer pages, for which the functions are compiled again. With ``on_use``, it is not
    known and counts as 0. Raises ValueError if no page or not ``max_total_tokens`` fit.
    """
    plan.announce()
    runner = _compiled(plan, on_use=on_use)
    fitted = plan.fitted(runner.compiled.temporary_bytes)
    if fitted.config != plan.config:
        fitted.announce()
        runner = _compiled(fitted, on_use=on_use)
    if not on_use:
        logger.info("temporary memory: %.2f GB", fitted.needs.temporary_bytes / 1e9)
    return fitted, runner


def _compiled(plan: EnginePlan, *, on_use: bool) -> ModelRunner:
    args, runner = plan.args, ModelRunner(plan.networks, plan.config, open_cache(plan))
    runner.compile(show_progress=args.shows_progress, on_use=on_use)
    if args.disaggregation_mode is not None:
        gives = args.disaggregation_mode == "prefill"
        KVTransfer(runner).compile(gives=gives, show_progress=args.shows_progress)
    return runner


def make_controller(args: EngineArgs, runner: ModelRunner) -> TierController | None:
    """Make the controller of a compiled and loaded runner; ``None`` if tiers do not adapt."""
    config, steps = args.adaptive, args.shape.steps
    if config is None or not runner.config.batch_buckets:
        return None
    policy: AdaptiveSpecPolicy
    if config.policy == "ema":
        policy = AdaptiveSpeculativeParams(steps, config, runner.config.shapes)
    else:
        policy = BudgetPolicy(round_seconds(runner, CONTEXTS), steps, config)
    return TierController(policy)
