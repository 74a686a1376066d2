"""How an engine chooses its drafted tokens: policy and controller over a runner."""

import logging

from specjax.adaptive import (
    AdaptiveController,
    AdaptiveSpecPolicy,
    AdaptiveSpeculativeParams,
    CostAwarePolicy,
    RoundTimes,
)
from specjax.adaptive.round_seconds import measure_round_seconds
from specjax.engine.args import EngineArgs
from specjax.runtime.runner import ModelRunner

logger = logging.getLogger(__name__)

ROUND_TIMES = "round_times"


def make_controller(args: EngineArgs, runner: ModelRunner) -> AdaptiveController | None:
    """The controller of a compiled and loaded runner; ``None`` where nothing adapts.

    The cost-aware policy needs round times: they are read from beside the compiled functions, or
    measured once, which takes some seconds, and kept there.
    """
    config, speculative = args.adaptive, args.speculative
    if config is None or speculative is None:
        return None
    policy: AdaptiveSpecPolicy
    if config.policy == "ema":
        policy = AdaptiveSpeculativeParams(speculative.num_steps, config)
    else:
        policy = CostAwarePolicy(round_times(runner), speculative.num_steps, config)
    controller = AdaptiveController(runner, policy)
    controller.init_states()
    return controller


def round_times(runner: ModelRunner) -> RoundTimes:
    """Seconds of a round for each tier and batch bucket, kept or measured."""
    cache = runner.compiled.cache
    kept = None if cache is None else cache.load_json(ROUND_TIMES)
    if kept is not None:
        try:
            times = RoundTimes.from_json(kept)
            config = runner.config
            if {*config.tiers} <= {*times.steps} and {*config.batch_buckets} <= {*times.buckets}:
                return times
            logger.warning("the kept round times lack a tier or batch size: measured again")
        except ValueError as error:
            logger.warning("the kept round times are measured again: %s", error)
    times = RoundTimes(measure_round_seconds(runner))
    for steps in times.steps:
        logger.info(
            "round of %d drafted tokens: %s",
            steps,
            ", ".join(f"{1e3 * times.seconds(steps, b):.2f} ms at {b}" for b in times.buckets),
        )
    if cache is not None:
        cache.store_json(ROUND_TIMES, times.to_json())
    return times
