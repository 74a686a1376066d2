"""Device memory that functions take while they run, as planned before they are compiled."""

import numpy as np

from specjax.config import TransformerConfig
from specjax.runtime.runner_config import RunnerConfig
from specjax.types import DraftShape

# Arrays of logits in float32 that live at once. In a round those of the target, and as they are
# after penalties and temperature, which the kernels of sampling read; without these kernels noise
# and what filters keep too. What is drafted in one pass has its logits, their noise and their
# probabilities. A prefill has few rows of logits, but its output head adds up partial sums.
ROUND_LOGITS, ROUND_LOGITS_CPU, DRAFT_LOGITS, PREFILL_LOGITS = 2, 6, 3, 6
# where drafts are judged by probabilities: both models', the residual and its logarithm
ACCEPT_LOGITS = 4
# bytes per token of a context that penalties count: its id twice, and indices of two scatters
HISTORY_BYTES = 32
# what products of few rows add up
PARTIAL_SUMS = 2**27


def temporary_bytes(model: TransformerConfig, config: RunnerConfig, num_features: int) -> int:
    """The most that a round or a prefill takes beside weights and state, estimated from above.

    ``num_features`` of the target's layers are read. XLA takes 0.93 to 1.25 GB of 1.18 to 1.31
    planned (Llama-3.1-8B shape, three drafts, 8 to 256 slots). On a CPU attention comes on top.
    """
    rounds = (
        _round_bytes(model, config, shape, batch, num_features)
        for shape in config.shapes
        for batch in config.batch_buckets
    )
    prefills = (
        _prefill_bytes(model, config, width, num_features) for width in config.prefill_buckets
    )
    return PARTIAL_SUMS + max((*rounds, *prefills))


def _activations(model: TransformerConfig, rows: int, num_features: int) -> int:
    """Of one layer: gate and up, their product, the residual stream, and what is kept of layers."""
    width = 3 * model.intermediate_size + (2 + num_features) * model.hidden_size
    return rows * width * np.dtype(model.jnp_dtype).itemsize


def _round_bytes(
    model: TransformerConfig, config: RunnerConfig, shape: DraftShape, batch: int, num_features: int
) -> int:
    in_one_pass = config.algorithm.supports_target_verify_for_draft()
    rows, drafted = batch * shape.nodes, batch * (shape.nodes if in_one_pass else shape.topk)
    copies = ROUND_LOGITS if config.on_gpu else ROUND_LOGITS_CPU
    copies += 0 if config.acceptance.is_coupled else ACCEPT_LOGITS
    logits = max(copies * rows, DRAFT_LOGITS * drafted) * model.vocab_size * 4
    history = HISTORY_BYTES * batch * config.context
    drafting = config.algorithm.draft_bytes(batch, config.context, shape)
    return logits + _activations(model, rows, num_features) + max(history, drafting)


def _prefill_bytes(
    model: TransformerConfig, config: RunnerConfig, width: int, num_features: int
) -> int:
    chunks = config.max_chunks(width)
    logits = chunks * (PREFILL_LOGITS * model.vocab_size * 4 + HISTORY_BYTES * config.context)
    kept = width * (1 + num_features) * model.hidden_size * np.dtype(model.jnp_dtype).itemsize
    if width in config.logprob_buckets:  # every row has logits there
        logits += (1 if config.on_gpu else 2) * width * model.vocab_size * 4
    return max(_activations(model, width, num_features), kept + logits)
