"""Static sizes: pages of the pool, padded sizes of functions, and temporary memory."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.checkpoints.presets import LLAMA31_8B
from specjax.config import Quantization
from specjax.runtime.runner import ModelRunner
from specjax.runtime.runner_config import (
    PARTIAL_SUMS,
    MemoryNeeds,
    RunnerConfig,
    batch_buckets,
    pick_bucket,
    plan_pages,
    prefill_buckets,
    smallest_bucket,
    temporary_bytes,
)
from specjax.sampling.accept_draws import Acceptance
from specjax.speculative.eagle import masked_shapes
from specjax.speculative.ngram import NGRAM
from specjax.testing import EAGLE3, TARGET
from specjax.types import DraftShape

from ..runners import algorithm_of, chains, runner_config

FP8 = Quantization("fp8")
BASE = runner_config(algorithm=algorithm_of(None), shapes=chains(0))
NEEDS = MemoryNeeds(weight_bytes=1_000, token_bytes=10, temporary_bytes=500)
CONFIG: dict[str, Any] = {
    "implementation": "pallas",
    "page_size": 4,
    "pages_per_request": 8,
    "num_slots": 1001,
}


def plan(memory: int = 10_000, **changes: Any) -> int:
    """Number of pages."""
    needs = NEEDS._replace(**{n: changes.pop(n) for n in NEEDS._fields if n in changes})
    config = CONFIG | {n: changes.pop(n) for n in CONFIG if n in changes}
    limits = {"max_total_tokens": None, "mem_fraction_static": None} | changes
    return plan_pages(needs, replace(BASE, **config), memory=memory, **limits)


def test_max_total_tokens_excludes_the_padding_page() -> None:
    for tokens, pages in ((1, 1), (4, 1), (5, 2), (100, 25)):
        assert plan(max_total_tokens=tokens) == pages + 1


def test_temporary_memory_stays_free() -> None:
    # 8,500 of 10,000 bytes, in pages of 40 with the padding page
    assert plan(max_total_tokens=844) == 212
    with pytest.raises(ValueError, match="lower max_total_tokens"):
        plan(max_total_tokens=848)
    assert plan(mem_fraction_static=1.0) == 212


def test_max_total_tokens_wins_over_the_fraction() -> None:
    assert plan(max_total_tokens=100, mem_fraction_static=0.11) == 26


def test_never_more_than_all_requests_can_use() -> None:
    # 3 requests of 9 pages
    assert plan(memory=10**12, pages_per_request=9, num_slots=4) == 28


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mem_fraction_static": 0.05}, "raise mem_fraction_static"),
        ({"mem_fraction_static": 0.104}, "no KV page fits"),
        ({"weight_bytes": 8_450}, "mem_fraction_static=0.85"),
        ({"weight_bytes": 10_000}, "lower max_running_requests"),
        ({"max_total_tokens": 10**6}, "lower max_total_tokens"),
        ({"temporary_bytes": 9_000}, "temporary memory; lower max_running_requests"),
        ({"temporary_bytes": 9_000, "max_total_tokens": 1}, "temporary memory; lower max_running"),
    ],
)
def test_refusals_name_the_option(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**changes)


@given(st.integers(1, 10**7), st.integers(0, 10**6), st.integers(1, 64), st.floats(0.01, 1.0))
def test_a_plan_fits_or_is_refused(memory, weight_bytes, page_size, fraction) -> None:
    changes = {"memory": memory, "weight_bytes": weight_bytes, "page_size": page_size}
    try:
        num_pages = plan(**changes, mem_fraction_static=fraction)
    except ValueError:
        # less than the padding page and one more
        most = min(int(memory * fraction), memory - NEEDS.temporary_bytes)
        assert most - weight_bytes < 2 * 10 * page_size
    else:
        assert num_pages >= 2
        taken = weight_bytes + num_pages * page_size * NEEDS.token_bytes
        assert taken <= memory * fraction
        assert taken + NEEDS.temporary_bytes <= memory


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 8, 9))],
)
def test_batch_buckets(limit, sizes) -> None:
    assert batch_buckets(None, limit) == sizes


@pytest.mark.parametrize(
    ("on_gpu", "drafts", "weight_bytes", "rows"),
    [
        (False, False, 10**8, 1),
        (False, True, 10**8, 1),
        (True, False, 10**8, 2),
        (True, False, 10**10, 2),
        (True, True, 3 * 10**8, 2),
        (True, True, 10**10, 1),
    ],
)
def test_a_batch_of_one_is_padded_if_that_is_faster(on_gpu, drafts, weight_bytes, rows) -> None:
    sizes = {"on_gpu": on_gpu, "drafts": drafts, "weight_bytes": weight_bytes}
    assert smallest_bucket(**sizes) == rows


@pytest.mark.parametrize(
    ("largest", "on_cpu", "sizes"),
    [
        (8192, False, (128, 256, 512, 1024, 2048, 4096, 8192)),
        (5000, False, (156, 312, 625, 1250, 2500, 5000)),
        (512, False, (128, 256, 512)),
        (511, False, (255, 511)),
        (512, True, (32, 128, 512)),
        (300, True, (75, 300)),
        (127, True, (127,)),
        (1, True, (1,)),
    ],
)
def test_prefill_buckets(largest, on_cpu, sizes) -> None:
    assert prefill_buckets(largest, on_cpu=on_cpu) == sizes


@given(st.integers(1, 5_000), st.integers(1, 20_000))
def test_prompts_fill_three_quarters_of_prefills(largest, num_tokens) -> None:
    """Except for the last tokens, which do not fill the smallest bucket."""
    config = replace(BASE, prefill_buckets=prefill_buckets(largest))
    widths = []
    left = num_tokens
    while left > 0:
        widths.append(config.prefill_width(left))
        left -= widths[-1]
    assert set(widths) <= set(config.prefill_buckets)
    assert -left <= max(config.prefill_buckets[0] - 1, num_tokens // 3)


@pytest.mark.parametrize(
    ("shape", "last"),
    [
        # the next draft starts after 4 accepted tokens; its last level stores no KV
        (DraftShape.chain(3), 4 + 2),
        (DraftShape(2, 3, 6), 3 + 3),
        (DraftShape.chain(3)._replace(block=5), 4 + 4),
        (DraftShape(3, 4, 9, stores_drafts=False), 8),  # drafts have no KV
        (DraftShape.chain(0), 0),
    ],
)
def test_rounds_with_grammars_also_write_the_drafts_of_the_next(shape, last) -> None:
    config = replace(BASE, shapes=(shape,))
    assert config.kv_writes.rows == shape.rows
    ahead = replace(config, has_grammars=True).kv_writes
    assert ahead.rows == last + 1
    assert ahead.tail == config.kv_writes.tail


def test_pick_bucket() -> None:
    assert [pick_bucket(n, (1, 4, 6)) for n in (1, 2, 4, 5, 6)] == [1, 4, 4, 6, 6]
    with pytest.raises(ValueError, match=r"size=7 exceeds the largest bucket of \(1, 4, 6\)"):
        pick_bucket(7, (1, 4, 6))


def config_of(slots: int, *shapes: DraftShape) -> RunnerConfig:
    changes = {"num_slots": slots + 1, "batch_buckets": (slots,), "implementation": "pallas"}
    return replace(BASE, shapes=shapes, prefill_buckets=prefill_buckets(8192), **changes)


@pytest.mark.parametrize(
    ("slots", "steps", "measured"), [(8, 7, 0.927e9), (64, 3, 0.98e9), (256, 3, 1.25e9)]
)
def test_the_plan_covers_the_memory_of_xla(slots, steps, measured) -> None:
    """The largest ``temp_bytes`` of any function, of jax 0.11.2 on an H200."""
    planned = temporary_bytes(LLAMA31_8B, config_of(slots, *chains(steps)), 3)
    assert measured <= planned <= 1.3 * measured


@pytest.mark.parametrize(("slots", "measured"), [(1, 1.100e9), (64, 1.117e9)])
def test_the_plan_covers_converted_matrices(slots, measured) -> None:
    """Prefill with matrices in FP8, of jax 0.11.2 on an H200."""
    model = replace(LLAMA31_8B, quantization=FP8)
    planned = temporary_bytes(model, config_of(slots, *chains(0)), 0)
    assert measured <= planned <= 1.35 * measured


def test_converted_matrices_count_in_large_rounds_and_on_a_cpu() -> None:
    head = LLAMA31_8B.vocab_size * LLAMA31_8B.hidden_size * LLAMA31_8B.dtypes.activations.itemsize
    large = config_of(64, DraftShape.chain(15))
    plans = [temporary_bytes(replace(LLAMA31_8B, quantization=q), large, 3) for q in (None, FP8)]
    assert plans[1] == plans[0] + head
    small = replace(config_of(4, *chains(0)), implementation="xla", prefill_buckets=(32,))
    plans = [temporary_bytes(replace(LLAMA31_8B, quantization=q), small, 3) for q in (None, FP8)]
    assert plans[1] == plans[0] + head


def test_logits_of_all_nodes_count() -> None:
    tree, wide = DraftShape(3, 4, 64), DraftShape(6, 16, 17)
    logits = 64 * LLAMA31_8B.vocab_size * 4
    assert temporary_bytes(LLAMA31_8B, config_of(64, tree), 3) > 2 * 64 * logits
    # the drafted levels are wider than the verified tree
    assert temporary_bytes(LLAMA31_8B, config_of(64, wide), 3) > 3 * 16 * logits


def test_noise_is_stored_without_sampling_kernels() -> None:
    on_gpu = config_of(256, *chains(3))
    on_cpu = replace(on_gpu, implementation="xla")
    more = temporary_bytes(LLAMA31_8B, on_cpu, 3) - temporary_bytes(LLAMA31_8B, on_gpu, 3)
    assert more == 4 * 1024 * LLAMA31_8B.vocab_size * 4


def test_probabilities_that_drafts_are_judged_by_count() -> None:
    coupled = config_of(256, *chains(3))
    judged = replace(coupled, acceptance=Acceptance(uses_rejection=True))
    plans = [temporary_bytes(LLAMA31_8B, config, 3) for config in (coupled, judged)]
    assert plans[1] - plans[0] == 4 * 1024 * LLAMA31_8B.vocab_size * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "shape", "breadth"),
    [
        (2**17, DraftShape(11, 10, 12, stores_drafts=False), 10),
        (2**17, DraftShape.chain(11), 1),
        (2**10, DraftShape(63, 16, 64, stores_drafts=False), 16),
    ],
    ids=["long", "chain", "wide"],
)
def test_the_plan_covers_ngram_rounds(context, shape, breadth) -> None:
    """Temporary memory of XLA on this CPU for 64 requests; attention takes very little of it."""
    algorithm = replace(NGRAM, breadth=breadth)
    config = replace(
        BASE,
        algorithm=algorithm,
        shapes=(shape,),
        num_slots=65,
        batch_buckets=(64,),
        page_size=16,
        pages_per_request=context // 16,
        implementation="chunked",
    )
    taken = temporary_of(ModelRunner(algorithm.networks(TARGET), config), "round", shape, 64)
    planned = temporary_bytes(TARGET, config, 0)
    assert PARTIAL_SUMS < taken <= planned <= 3 * taken


def temporary_of(runner: ModelRunner, *key: Any) -> int:
    """Temporary memory of XLA for one function of a runner, in bytes."""
    jobs = {found: (function, inputs) for found, function, inputs, _ in runner._functions().jobs()}
    function, arguments = jobs[key]
    return int(function.lower(*arguments).compile().memory_analysis().temp_size_in_bytes)


@pytest.mark.slow
def test_the_plan_covers_the_drafts_of_a_prefill() -> None:
    """A P-EAGLE head drafts the whole chain in each prefill; an engine may run only prefills."""
    sizes = {"vocab_size": 8192, "max_position_embeddings": 128}
    target = replace(TARGET, **sizes)
    head = replace(EAGLE3, **sizes, draft_vocab_size=8192, num_layers=2, mask_token_id=7)
    config = replace(
        BASE,
        algorithm=algorithm_of(head),
        shapes=masked_shapes(chains(31), head),
        num_slots=129,
        batch_buckets=(),
        prefill_buckets=(1024,),
        implementation="chunked",
    )
    networks = config.algorithm.networks(target, head)
    taken = temporary_of(ModelRunner(networks, config), "prefill", 1024)
    planned = temporary_bytes(target, config, 3)
    assert 4 * PARTIAL_SUMS < taken <= planned <= 2 * taken
