"""Token rows from another runner; tests/disaggregation/test_sides.py serves with both."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from specjax.disaggregation.fingerprints import fingerprint, joined
from specjax.disaggregation.rows import KVTransfer, check_facts, token_axes
from specjax.runtime.runner import ModelRunner
from specjax.speculative.future_map import stash_handover
from specjax.types import DraftShape

from ..support.runners import copied_runner, make_runner


def transfer_of(runner: ModelRunner) -> KVTransfer:
    transfer = KVTransfer(runner)
    transfer.compile(gives=False, show_progress=False)
    return transfer


@pytest.mark.slow
def test_put_changes_no_other_rows():
    runner = copied_runner(3)
    transfer = transfer_of(runner)
    kv = tuple(
        jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), transfer._kv[transfer.widths[0]])
    )
    before = jax.tree.map(np.asarray, runner.on_device.pools)
    page = runner.config.page_size
    transfer.put([5, 2], page - 1, 3, kv)
    after = jax.tree.map(np.asarray, runner.on_device.pools)
    written = [5 * page + page - 1, 2 * page, 2 * page + 1]
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert (new[:, written] == 1).all()
        rest = np.delete(np.arange(old.shape[1]), written)
        np.testing.assert_array_equal(new[:, rest], old[:, rest])


@pytest.mark.slow
def test_pools_are_written_in_place():
    runner = copied_runner(3)
    transfer = transfer_of(runner)
    state = jax.tree.leaves(runner.abstract_state)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in state)
    for key, function in runner.compiled.items():
        if key[0] in ("put_rows", "begin"):
            assert function.memory_analysis().alias_size_in_bytes >= size
    assert transfer.widths


@pytest.mark.parametrize("make", [lambda: copied_runner(3), lambda: make_runner(None, 0)])
def test_which_arrays_have_an_axis_of_tokens(make):
    runner = make()
    axes = token_axes(runner)
    pools = jax.tree.leaves(runner.abstract_state.pools)
    assert axes == (1,) * len(pools)


def test_an_array_without_an_axis_of_tokens_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = copied_runner(3)
    size = runner.config.sizes.num_kv

    def abstract_state(algorithm, networks, sizes):
        shapes = {"kv": (3, 2, sizes.num_kv), "table": (size, 5)}
        return {name: jax.ShapeDtypeStruct(x, np.float32) for name, x in shapes.items()}

    monkeypatch.setattr(type(runner.config.algorithm), "abstract_state", abstract_state)
    assert token_axes(runner) == (1, 2, None)


def test_a_wrong_width_names_both():
    runner = copied_runner(3)
    future = runner.on_device.future
    rows = jax.tree.map(lambda leaf: leaf[:1], future.rows)
    slots = np.array([1], np.int32)
    size = rows.hidden.shape[1]
    wide = replace(rows, hidden=np.zeros((1, 2 * size), np.float32))
    with pytest.raises(ValueError, match=rf"width \({2 * size},\) .* width \({size},\)"):
        stash_handover(future, slots, wide)


@pytest.mark.slow
def test_the_first_branches_of_more():
    """Rows of a tree also serve a chain."""
    chain = copied_runner(3)
    tree = copied_runner(3, shapes=(DraftShape(3, 4, 9),))
    build = chain.config.algorithm.build_disagg_draft_input
    rows = jax.tree.map(lambda leaf: leaf[:2], tree.on_device.future.rows)
    ints = np.zeros(2, np.int32)
    given = build(rows, ints, ints, ints, chain.on_device.future)
    assert given.topk_probs.shape == given.topk_ids.shape == (2, 1)
    np.testing.assert_array_equal(given.topk_ids, rows.topk_ids[:, :1])
    assert build(None, ints, ints, ints, chain.on_device.future) is None


@pytest.mark.parametrize("rows", [None, [], [[[1], "float32"]], [[["a"], "x"]] * 3, 5])
def test_rows_of_another_algorithm_are_refused(rows):
    transfer = KVTransfer(copied_runner(3))
    with pytest.raises(ValueError, match="rows="):
        transfer.expect(transfer.facts | {"rows": rows})


def test_sides_that_differ_are_named():
    facts = KVTransfer(copied_runner(3)).facts["both"]
    check_facts(facts, dict(facts))
    with pytest.raises(ValueError, match="algorithm: EAGLE3 here, None there"):
        check_facts(facts, {name: facts[name] for name in facts if name != "algorithm"})


@pytest.mark.slow
def test_a_fingerprint_sees_every_bit():
    rng = np.random.default_rng(0)
    weights = tuple(rng.normal(size=shape).astype("f4") for shape in ((3, 5), (7,), (5, 3)))

    def of(*weights: np.ndarray) -> str:
        return joined([fingerprint(one, np.uint32(i)) for i, one in enumerate(weights)])

    seen = {of(*weights)}
    for i, weight in enumerate(weights):
        for place in np.ndindex(weight.shape):
            changed = weight.copy()
            changed[place] = np.nextafter(changed[place], np.inf)
            seen.add(of(*weights[:i], changed, *weights[i + 1 :]))
    assert len(seen) == 1 + sum(weight.size for weight in weights)
    swapped = of(weights[0], weights[1], weights[0].reshape(5, 3))
    assert swapped not in seen


@pytest.mark.parametrize("count", [1, 64, 65, 512, 513, 1100])
def test_sent_bytes_of_a_prompt_include_padding(count: int) -> None:
    transfer = KVTransfer(copied_runner(3))
    widths = [512] * (count // 512)
    if rest := count % 512:
        widths.append(64 if rest <= 64 else 512)
    sent = sum(widths) * transfer.token_bytes
    # one chunk may end between two pieces
    assert sent <= transfer.sent_bytes(count) <= sent + 512 * transfer.token_bytes
    assert transfer.sent_bytes(-1) == 0
