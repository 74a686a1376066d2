"""Packed verification: rows go to the drafts that survive most often, and no text changes."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.adaptive import TierController
from specjax.adaptive.survival import RoundRecord
from specjax.config import DraftConfig
from specjax.kv.pages import Segments
from specjax.runtime.runner import ModelRunner
from specjax.sampling.accept_draws import Acceptance
from specjax.sampling.params import SamplingParams
from specjax.speculative.eagle import masked_shapes
from specjax.speculative.ngram import Ngram
from specjax.speculative.packing import admit, keep_best, survival, tried_confidences
from specjax.speculative.tree import chain_input, take
from specjax.testing import EAGLE3, TARGET, Job, dense_decode
from specjax.types import DraftShape, VerifyInput

from ..support.compilation import counted_compilations
from ..support.lowering import TRITON_CALL, lower_for_cuda
from ..support.runners import (
    algorithm_of,
    copied_runner,
    copied_weights,
    make_request,
    make_runner,
    plain_outputs,
    runner_config,
)
from ..support.schedulers import Forced, Serving
from .blocks import CONFIGS, block_runner
from .driver import serve, start
from .identity import JOBS, check, expected
from .mtp import mtp_runner

BATCH, NODES = 3, 6


def draw_tree(rng: np.random.Generator, values: tuple[float, ...]) -> VerifyInput:
    """A tree per request; every node is a child of an earlier one."""
    parents = np.array([[-1, *(rng.integers(0, i) for i in range(1, NODES))] for _ in range(BATCH)])
    mask = np.zeros((BATCH, NODES, NODES), bool)
    for b, i in np.ndindex(BATCH, NODES):
        mask[b, i, i] = True
        if i:
            mask[b, i] |= mask[b, parents[b, i]]
    lens = rng.integers(0, 9, BATCH)
    return jax.tree.map(
        jnp.asarray,
        VerifyInput(
            draft_tokens=rng.integers(0, 99, (BATCH, NODES)).astype(np.int32),
            num_proposed=rng.integers(0, NODES, BATCH).astype(np.int32),
            parents=parents.astype(np.int32),
            positions=(lens[:, None] + mask.sum(axis=2) - 1).astype(np.int32),
            tree_mask=mask,
            draft_rows=rng.integers(-1, 9, (BATCH, NODES)).astype(np.int32),
            confidences=rng.choice(values, (BATCH, NODES - 1)).astype(np.float32),
        ),
    )


def paths(tree: VerifyInput, b: int) -> dict[tuple[int, ...], int]:
    """Row of each proposed node by the tokens (and KV rows) of its path."""
    found, parents = {}, np.asarray(tree.parents[b])
    for row in range(int(tree.num_proposed[b]) + 1):
        path, node = [], row
        while node >= 0:
            path.append((int(tree.draft_tokens[b, node]), int(tree.draft_rows[b, node])))
            node = parents[node]
        found[tuple(path)] = row
    return found


cases = given(
    values=st.sampled_from([(0.9, 0.5, 0.25), (0.5,), (1.0,), (1.0, 1e-30), (0.3, np.nan, 0.0)]),
    packed=st.integers(1, NODES - 1),
    live=st.lists(st.booleans(), min_size=BATCH, max_size=BATCH),
    seed=st.integers(0, 2**16),
)
best_of = jax.jit(keep_best, static_argnums=(1, 4))
survivals_of = jax.jit(survival)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@cases
def test_the_best_drafts_of_the_batch_are_verified(values, packed, live, seed) -> None:
    """They fill the rows, contain their parents, and survive most often; also with ties and NaN."""
    rng = np.random.default_rng(seed)
    tree, slots = draw_tree(rng, values), jnp.array([i + 1 if x else 0 for i, x in enumerate(live)])
    offsets = rng.normal(size=BATCH + 1).astype(np.float32)
    numbers = rng.normal(size=NODES).astype(np.float32)  # slope and intercepts
    calibration = jnp.concatenate([numbers, offsets])
    before = np.asarray(survivals_of(tree, numbers[0], numbers[1:], offsets[slots]))
    kept = best_of(tree, DraftShape(5, 3, NODES, packed=packed), slots, calibration, BATCH + 1)
    counts, num_live = np.asarray(kept.num_proposed), sum(live)
    capacity = BATCH * packed - num_live
    available = sum(int((before[b] > 0).sum()) for b in range(BATCH) if live[b])
    assert counts.sum() == min(capacity, available)
    assert all(counts[b] == 0 for b in range(BATCH) if not live[b])
    verified, others = [], []
    for b in range(BATCH):
        assert (np.asarray(kept.parents[b, 1:]) < np.arange(1, NODES)).all()
        for row in range(NODES):
            ancestors = {row} | ({int(kept.parents[b, row])} if row else set())
            assert all(kept.tree_mask[b, row, i] for i in ancestors)
            depth = int(kept.tree_mask[b, row].sum()) - 1
            assert int(kept.positions[b, row]) == int(kept.positions[b, 0]) + depth
        if not live[b]:
            continue
        own, rows = paths(kept, b), paths(tree, b)
        assert set(own) <= set(rows)
        chosen = {rows[path] for path in own} - {0}
        assert len(chosen) <= counts[b]  # equal nodes count once
        verified += np.sort(before[b])[::-1][: counts[b]].tolist()
        others += np.sort(before[b])[::-1][counts[b] :].tolist()
    assert min(verified, default=1.0) >= max(others, default=0.0)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=4, max_size=4),
        min_size=3,
        max_size=3,
    ),
    live=st.lists(st.booleans(), min_size=3, max_size=3),
    num_rows=st.integers(3, 15),
)
def test_rows_are_admitted_as_in_python(rows, live, num_rows) -> None:
    """Of equal drafts, the earlier row comes first, and then the lower request."""
    survivals = -np.sort(-np.array(rows, np.float32), axis=1)
    order = sorted(
        ((-survivals[b, i], i, b) for b in range(3) for i in range(4) if live[b]), key=lambda x: x
    )
    wanted = [int(x) for x in live]
    for score, _, b in order[: num_rows - sum(live)]:
        wanted[b] += score < 0
    found = admit(jnp.asarray(survivals), jnp.array(live), num_rows)
    assert found.tolist() == wanted


@pytest.mark.slow
def test_survival_in_numbers() -> None:
    """Products along the path, with slope, intercepts by depth and offsets by request."""
    tree = chain_input(jnp.zeros((2, 4), jnp.int32), jnp.array([7, 2]), jnp.array([3, 2]))
    q = np.array([[0.9, 0.5, 0.2], [0.8, 1.0, 0.5]], np.float32)
    slope, intercepts, offsets = 0.5, np.array([0.1, -0.2, 0.3, 9.0]), np.array([0.0, -1.0])
    found = survival(replace(tree, confidences=jnp.asarray(q)), slope, intercepts, offsets)
    with np.errstate(divide="ignore"):
        odds = np.clip(np.log(q) - np.log1p(-q), -6, 6)
    factors = 1 / (1 + np.exp(-(slope * odds + intercepts[:3] + offsets[:, None])))
    wanted = np.cumprod(factors, axis=1) * [[1, 1, 1], [1, 1, 0]]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_a_reordered_tree_has_the_same_paths(seed) -> None:
    rng = np.random.default_rng(seed)
    tree = replace(draw_tree(rng, (0.5,)), num_proposed=jnp.full(BATCH, NODES - 1))
    # a random order in which parents come first: sort by depth and then at random
    depths = np.asarray(tree.positions - tree.positions[:, :1])[:, 1:]
    order = np.argsort(depths + rng.random(depths.shape), axis=1).astype(np.int32)
    other = take(tree, jnp.pad(order + 1, ((0, 0), (1, 0))))
    for b in range(BATCH):
        assert set(paths(other, b)) == set(paths(tree, b))
        old = np.asarray(tree.tree_mask[b])[np.ix_(*[[0, *(order[b] + 1)]] * 2)]
        assert (np.asarray(other.tree_mask[b]) == old).all()


@pytest.mark.slow
def test_confidences_of_drafts_that_were_tried() -> None:
    """Of a chain: two accepted and one rejected, all accepted, ended, cut, and padding."""
    q = np.tile(np.array([0.9, 0.8, 0.7], np.float32), (5, 1))
    proposed = jnp.array([3, 3, 3, 2, 3])
    tree = chain_input(jnp.zeros((5, 4), jnp.int32), jnp.zeros(5, jnp.int32), proposed)
    path = jnp.array([[0, 1, 2, -1], [0, 1, 2, 3], [0, 1, -1, -1], [0, 1, 2, -1], [-1] * 4])
    running = jnp.array([True, True, False, True, False])
    found = tried_confidences(replace(tree, confidences=jnp.asarray(q)), path, running)
    wanted = [[0.9, 0.8, 0.7], [0.9, 0.8, 0.7], [0.9, 0, 0], [0.9, 0.8, 0], [0, 0, 0]]
    np.testing.assert_allclose(found, wanted)


@pytest.mark.slow
def test_gather_and_spread() -> None:
    counts = jnp.array([2, 0, 3, 1])
    rows = Segments.of(jnp.array([5, 9, 0, 7]), counts, 8)
    x = jnp.arange(12).reshape(4, 3)
    packed = rows.gather(x)
    assert packed[0, :6].tolist() == [0, 1, 6, 7, 8, 9]
    spread = rows.scatter(packed, 3)
    for g, count in enumerate(counts.tolist()):
        assert spread[g, :count].tolist() == x[g, :count].tolist()
    # nobody has rows
    assert not Segments.of(jnp.zeros(4, jnp.int32), jnp.zeros(4, jnp.int32), 8).is_real.any()


CHAIN, TREE = DraftShape.chain(5), DraftShape(3, 3, 8)
P_EAGLE = replace(EAGLE3, mask_token_id=7, num_layers=2)
OPT_OUT = [
    replace(job, params=replace(job.params, speculative=i % 4 > 0)) for i, job in enumerate(JOBS)
]


def packed_runner(
    shape: DraftShape, packed: int, rounds: int = 1, draft: DraftConfig = EAGLE3
) -> ModelRunner:
    """A runner whose drafts are often right, with a tier of all rows and a packed one."""
    shapes = (shape, shape._replace(packed=packed))
    return copied_runner(shape.steps, rounds, draft, shapes=shapes, reads_confidence=True)


@pytest.mark.long_after(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "packed", "rounds"),
    [
        (CHAIN, 3, 1),
        pytest.param(TREE, 4, 1, marks=pytest.mark.slow),
        pytest.param(CHAIN, 2, 4, marks=pytest.mark.slow),
    ],
)
def test_texts_equal_dense_decoding(shape, packed, rounds) -> None:
    """Greedy and seeded, with penalties, log-probabilities, opt-outs and padding."""
    runner = packed_runner(shape, packed, rounds)
    for tier in runner.config.shapes:
        assert check(runner, JOBS, expected(True), tier=tier) > 1.5
    assert check(runner, OPT_OUT, expected(True), tier=runner.config.shapes[1]) > 1.3


@pytest.mark.slow
def test_requests_share_the_rows() -> None:
    """Offsets by slot move rows from one request to another; nothing compiles."""
    runner = packed_runner(CHAIN, 3)
    runner.compile(show_progress=False)
    rounds, greedy = [], SamplingParams(temperature=0.0)
    for slot, job in enumerate(JOBS[:4], start=1):
        start(runner, slot, Job(prompt=job.prompt, params=greedy))
    tier = runner.config.shapes[1]
    with counted_compilations() as compiled, jax.transfer_guard("disallow"):
        for likelier in ([0, 2], [1, 3], [0, 1], [2, 3]):
            offsets = [30.0 if slot in likelier else -30.0 for slot in range(4)]
            runner.set_calibration(1.0, (), offsets, [1, 2, 3, 4])
            rounds.append(runner.round([1, 2, 3, 4], tier))
            uploaded = runner._calibration
            runner.set_calibration(1.0, (), offsets[::-1], [4, 3, 2, 1])
            assert runner._calibration is uploaded  # the same values are not uploaded again
    assert not compiled
    runner.set_calibration()
    for likelier, result in zip(([0, 2], [1, 3], [0, 1], [2, 3]), rounds, strict=True):
        packed = result.read()[0]
        num_rows = packed[:, -3] + 1
        assert num_rows.sum() == 12
        assert num_rows[likelier].sum() == 10
        check_tried(packed, tier.depth)
    for slot in range(1, 5):
        runner.clear_slot(slot)


def check_tried(packed: np.ndarray, depth: int) -> None:
    """The accepted drafts have a confidence, and only the next one may have another."""
    for row in packed:
        found = np.ascontiguousarray(row[-3 - depth : -3]).view(np.float32)
        accepted, proposed = row[-2], row[-3]
        assert (found[:accepted] > 0).all()
        assert (found <= 1).all()
        assert not found[accepted + 1 :].any()
        if accepted < proposed:
            assert found[accepted] > 0


def packed_block_runner(name: str) -> ModelRunner:
    """A runner of a block drafter; DSPARK has a confidence head."""
    shape = DraftShape(4, 1, 5, CONFIGS[name].block, packed=3)
    return block_runner(name, (shape,), reads_confidence=True)


class Silent(Ngram):
    """An algorithm that has no confidences."""

    def propose(self, *args: Any) -> tuple[VerifyInput, Any]:
        tree, state = super().propose(*args)
        return replace(tree, confidences=None), state


def ngram_runner(kind: type[Ngram] = Ngram, **options: Any) -> ModelRunner:
    algorithm = kind("NGRAM", **options)
    shape = DraftShape(5, 10, 6, packed=3, stores_drafts=False)
    runner = make_runner(None, algorithm=algorithm, shapes=(shape,), reads_confidence=True)
    runner.load(copied_weights()[0], ())
    return runner


@pytest.mark.long_after(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["DSPARK", "DFLASH"])
def test_block_drafters_change_no_token(name) -> None:
    runner = packed_block_runner(name)
    jobs = [replace(job, top_logprobs=None) for job in JOBS[:6]]
    outputs = serve(runner, jobs)
    for job, output in zip(jobs, outputs, strict=True):
        assert output.tokens == dense_decode(runner.weights[0], job).tokens


@pytest.mark.long_after(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        ngram_runner,
        lambda: ngram_runner(by_frequency=True),
        lambda: ngram_runner(Silent),
        lambda: mtp_runner((3,), shapes=(DraftShape(3, 1, 4, packed=2),), reads_confidence=True),
        lambda: packed_runner(*masked_shapes((DraftShape.chain(5),), P_EAGLE), 3, draft=P_EAGLE),
    ],
    ids=["ngram", "frequency", "no confidences", "mtp", "peagle"],
)
def test_other_drafters_change_no_token(make: Callable[[], ModelRunner]) -> None:
    check(make(), JOBS, expected(True))


@pytest.mark.slow
def test_another_model_as_the_draft_changes_no_token() -> None:
    shapes = (TREE._replace(packed=3), CHAIN._replace(packed=3))
    runner = make_runner(TARGET, 5, shapes=shapes, reads_confidence=True)
    for tier in shapes:
        check(runner, JOBS, expected(False), tier=tier)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_packed_rounds_lower_for_gpus(shape: DraftShape) -> None:
    """Without a conditional, which would make the host read a value inside a round."""
    config = runner_config(
        algorithm=algorithm_of(EAGLE3),
        shapes=(shape._replace(packed=3),),
        reads_confidence=True,
        implementation="pallas",
    )
    models = (replace(one, head_dim=16) for one in (TARGET, EAGLE3))
    networks = config.algorithm.networks(*models, implementation="pallas")
    for key, function, arguments, _ in ModelRunner(networks, config)._functions().jobs():
        if str(key[0]).endswith("round"):
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
            text = lower_for_cuda(function, *shapes)
            assert TRITON_CALL in text
            assert not re.search(r"stablehlo\.(case|if|while)\b", text)


class Calibrated(Forced):
    """Prefers requests with odd ids; every third one does not use drafts."""

    shares: ClassVar[set[float]] = set()

    def tier_for_batch(self, batch_size: int, *known: Any) -> DraftShape:
        record: RoundRecord = known[0]
        assert all(int(rid[1:]) % 3 < 2 for rid in record.requests)
        self.shares.add(record.share)
        return super().tier_for_batch(batch_size, *known)

    def on_verify_complete(self, counts: Sequence[int], **options: Any) -> bool:
        assert options["record"].share in self.shares
        return super().on_verify_complete(counts, **options)

    def calibration(self, requests: Sequence[str]) -> tuple[float, list[float], list[float]]:
        return 0.5, [1.0, 0.5], [float(int(rid[1:]) % 2) for rid in requests]


@pytest.mark.slow
def test_a_scheduler_that_switches_tiers_changes_nothing() -> None:
    """Preemptions, cached prefixes and opt-outs, while rounds are packed and not."""
    runner = packed_runner(CHAIN, 3)
    tiers = [runner.config.shapes[i] for i in (0, 1, 1, 0, 1)]
    serving = Serving(
        runner=runner,
        run_ahead=1,
        num_pages=26,
        is_cached=True,
        controller=TierController(Calibrated(runner, cycle(tiers))),
    )
    greedy = SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True)
    seeded = replace(greedy, temperature=0.9)
    kinds = greedy, seeded, replace(seeded, speculative=False)
    prompts = [list(job.prompt) for job in JOBS] * 2
    requests = [
        make_request(prompt, kinds[i % 3], seed=i, width=CHAIN.steps, rid=f"r{i}")
        for i, prompt in enumerate(prompts)
    ]
    serving.add_all(requests)
    serving.finish()
    assert sum(request.num_retractions for request in requests) > 0
    assert {0.5, 0.75} <= Calibrated.shares <= {1 / 4, 1 / 3, 0.5, 2 / 3, 0.75, 1.0}
    for request in requests:
        (whole,) = plain_outputs([request.input_ids], request.params, [request.seed])
        assert request.output_ids == whole


def test_tiers_that_cannot_be_packed() -> None:
    config = make_runner().config
    for packed in (-1, 3, 4):
        shape = DraftShape(2, 1, 3, packed=packed)
        with pytest.raises(ValueError, match=f"packed={packed} must be from 1 to 2"):
            replace(config, shapes=(shape,), reads_confidence=True)
    shape = DraftShape(2, 1, 3, packed=2)
    with pytest.raises(ValueError, match="needs reads_confidence=True"):
        replace(config, shapes=(shape,))
    rejection = Acceptance(uses_rejection=True)
    with pytest.raises(ValueError, match="packed=2 needs acceptance=COUPLED"):
        replace(config, shapes=(shape,), reads_confidence=True, acceptance=rejection)
    assert [str(s) for s in (CHAIN._replace(packed=4), TREE._replace(packed=4))] == [
        "5p4",
        "3-3-8p4",
    ]
