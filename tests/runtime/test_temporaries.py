"""What functions take while they run, as planned."""

from dataclasses import replace

import pytest

from specjax.checkpoints.presets import LLAMA31_8B
from specjax.runtime.runner import ModelRunner
from specjax.runtime.runner_config import (
    PARTIAL_SUMS,
    RunnerConfig,
    prefill_buckets,
    temporary_bytes,
)
from specjax.sampling.accept_draws import Acceptance
from specjax.speculative.ngram import NGRAM, NgramShape
from specjax.testing import TARGET
from specjax.types import DraftShape

from ..runners import chains, make_runner


def config_of(slots: int, *shapes: DraftShape) -> RunnerConfig:
    changes = {"num_slots": slots + 1, "batch_buckets": (slots,), "on_gpu": True}
    return replace(
        make_runner().config, shapes=shapes, prefill_buckets=prefill_buckets(8192), **changes
    )


@pytest.mark.parametrize(
    ("slots", "steps", "measured"), [(8, 7, 0.927e9), (64, 3, 0.98e9), (256, 3, 1.25e9)]
)
def test_the_plan_holds_what_xla_takes(slots, steps, measured) -> None:
    """The largest ``temp_bytes`` of any function, of jax 0.11.2 on an H200."""
    planned = temporary_bytes(LLAMA31_8B, config_of(slots, *chains(steps)), 3)
    assert measured <= planned <= 1.3 * measured


def test_logits_of_all_nodes_count() -> None:
    tree, wide = DraftShape(3, 4, 64), DraftShape(6, 16, 17)
    logits = 64 * LLAMA31_8B.vocab_size * 4
    assert temporary_bytes(LLAMA31_8B, config_of(64, tree), 3) > 2 * 64 * logits
    # of the drafted levels, which are wider than the verified tree
    assert temporary_bytes(LLAMA31_8B, config_of(64, wide), 3) > 3 * 16 * logits


def test_noise_is_stored_where_no_kernel_draws() -> None:
    on_gpu = config_of(256, *chains(3))
    on_cpu = replace(on_gpu, on_gpu=False)
    more = temporary_bytes(LLAMA31_8B, on_cpu, 3) - temporary_bytes(LLAMA31_8B, on_gpu, 3)
    assert more == 4 * 1024 * LLAMA31_8B.vocab_size * 4


def test_probabilities_that_drafts_are_judged_by_count() -> None:
    coupled = config_of(256, *chains(3))
    judged = replace(coupled, acceptance=Acceptance(uses_rejection=True))
    plans = [temporary_bytes(LLAMA31_8B, config, 3) for config in (coupled, judged)]
    assert plans[1] - plans[0] == 4 * 1024 * LLAMA31_8B.vocab_size * 4


@pytest.mark.parametrize(
    ("context", "shape", "breadth"),
    [
        (2**17, NgramShape(11, 10, 12), 10),
        (2**17, DraftShape.chain(11), 1),
        (2**10, NgramShape(63, 16, 64), 16),
    ],
    ids=["long", "chain", "wide"],
)
def test_the_plan_holds_rounds_with_ngrams(context, shape, breadth) -> None:
    """What XLA takes on this CPU for 64 requests, of which attention is next to nothing."""
    algorithm = replace(NGRAM, breadth=breadth)
    config = replace(
        make_runner().config,
        algorithm=algorithm,
        shapes=(shape,),
        num_slots=65,
        batch_buckets=(64,),
        page_size=16,
        pages_per_request=context // 16,
        attention="chunked",
    )
    runner = ModelRunner(algorithm.networks(TARGET), config)
    jobs = {
        key: (function, arguments) for key, function, arguments, _ in runner._functions().jobs()
    }
    function, arguments = jobs["round", shape, 64]
    taken = function.lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    planned = temporary_bytes(TARGET, config, 0)
    assert PARTIAL_SUMS < taken <= planned <= 3 * taken
