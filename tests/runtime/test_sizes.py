"""Static sizes: pages of the pool, and padded sizes of functions."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.runtime.runner import ModelRunner
from specjax.runtime.runner_config import (
    MemoryNeeds,
    batch_buckets,
    pick_bucket,
    plan_pages,
    prefill_buckets,
    smallest_bucket,
)
from specjax.testing import TARGET
from specjax.types import DraftShape

from ..support.runners import algorithm_of, chains, runner_config

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
    config = CONFIG | {n: changes.pop(n) for n in (*CONFIG, "num_snapshots") if n in changes}
    limits = {"max_total_tokens": None, "mem_fraction_static": None} | changes
    return plan_pages(needs, replace(BASE, **config), memory=memory, **limits)[0]


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
        ({"weight_bytes": 10_000, "num_snapshots": 7}, "states and .* max_state_snapshots=7, "),
        ({"weight_bytes": 8_450, "num_snapshots": 7}, "states, .* or lower max_state_snapshots=7$"),
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


@pytest.mark.slow
def test_temporary_memory_does_not_depend_on_the_number_of_pages() -> None:
    memory = []
    for num_pages in (9, 900):
        config = replace(BASE, num_pages=num_pages, shapes=chains(0), implementation="chunked")
        runner = ModelRunner(config.algorithm.networks(TARGET), config)
        runner.compile(show_progress=False)
        memory.append({f.key: (f.temp_bytes, f.output_bytes) for f in runner.compiled.report})
    assert memory[0] == memory[1]
    assert 0 < runner.compiled.temporary_bytes < 2**24
