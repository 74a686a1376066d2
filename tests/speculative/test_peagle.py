"""P-EAGLE: one pass over mask tokens drafts a chain; tokens are those of dense decoding."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from specjax.sampling.params import SamplingParams
from specjax.speculative.drafting import DraftInput
from specjax.speculative.eagle import EAGLE3 as EAGLE3_ALGORITHM
from specjax.speculative.eagle import masked_shapes
from specjax.testing import EAGLE3, Files, check_tokens
from specjax.testing.files import write_head
from specjax.types import NO_DRAFTS, DraftShape

from ..support.runners import chains, copied_runner, make_runner
from .driver import Served, start
from .identity import JOBS, check, expected

HEAD = replace(EAGLE3, mask_token_id=7, num_layers=2)
NORMED = replace(HEAD, num_layers=1, qk_norm=True, has_own_embedding=True)


def masked(*steps: int) -> tuple[DraftShape, ...]:
    return masked_shapes(chains(*steps), HEAD)


def test_tiers_have_the_rows_of_the_pass() -> None:
    """Accepted tokens, the last of which drafts, and one mask for each further draft."""
    assert masked(0, 1, 4) == (NO_DRAFTS, DraftShape(1, 1, 2, 2), DraftShape(4, 1, 5, 8))
    assert masked_shapes((DraftShape.chain(7, 4),), HEAD) == (DraftShape(7, 1, 4, 6),)
    assert masked_shapes(chains(0, 4), EAGLE3) == chains(0, 4)


@pytest.mark.slow
def test_tokens_equal_dense_decoding() -> None:
    """Prompts take up to three chunks; the first round already has a complete chain."""
    runner = copied_runner(3, draft=HEAD, shapes=masked(3))
    assert check(runner, JOBS, expected(True)) > 1.6
    start(runner, 1, JOBS[4])
    packed = runner.round([1]).read()[0, 0]
    runner.clear_slot(1)
    assert packed[-3] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "shape", "rounds"),
    [
        (NORMED, DraftShape.chain(4), 1),
        (HEAD, DraftShape.chain(1), 2),
        (HEAD, DraftShape.chain(7, 4), 3),
    ],
    ids=["norms", "one draft", "cut chain"],
)
def test_other_heads_and_tiers_equal_dense_decoding(head, shape, rounds) -> None:
    shapes = masked_shapes((shape,), head)
    check(make_runner(head, shape.steps, rounds=rounds, shapes=shapes), JOBS, expected(False))


@pytest.mark.slow
def test_tiers_propose_what_the_round_before_drafted() -> None:
    runner = copied_runner(3, draft=HEAD, shapes=masked(0, 1, 3))
    none, one, three = runner.config.shapes
    job, truth = JOBS[0], expected(True)[0]
    output = Served()
    output.take(start(runner, 1, job).read()[:1], job, None, 0)
    drafted, proposed = 3, []
    for tier in (three, one, three, none, three, three, one, one, three):
        packed = runner.round([1], tier).read()[0, 0]
        output.take(packed[: packed[-1]], replace(job, top_logprobs=None), None, 0)
        proposed.append(int(packed[-3]))
        assert proposed[-1] == min(drafted, tier.steps)
        drafted = tier.steps
    assert max(proposed) == 3
    runner.clear_slot(1)
    assert output.tokens == truth.tokens[: len(output.tokens)]


@pytest.mark.slow
def test_rows_of_another_number_of_steps_are_fitted() -> None:
    """Levels that a prefill engine did not draft are empty."""
    ids, ints = np.arange(3, dtype=np.int32)[None], np.zeros(1, np.int32)
    rows = DraftInput(np.ones((1, 3), np.float32), ids, np.ones((1, 3, 4), np.float32))
    for width in (2, 3, 5):
        own = DraftInput(np.zeros((1, width)), np.zeros((1, width)), np.zeros((1, width, 4)))
        future = SimpleNamespace(rows=own)
        found = EAGLE3_ALGORITHM.build_disagg_draft_input(rows, ints, ints, ints, future)
        assert found.hidden.shape == (1, width, 4)
        assert found.topk_ids[0, : min(width, 3)].tolist() == [0, 1, 2][:width]
        assert found.topk_probs[0].tolist() == [1, 1, 1, 0, 0][:width]


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_head(tmp_path / "peagle", mask_token_id=11, num_layers=2)


def test_branches_are_refused(files: Files, draft: Path) -> None:
    with pytest.raises(ValueError, match=r"speculative_eagle_topk=2 must be 1: .*P-EAGLE head"):
        files.engine(draft=draft, speculative_eagle_topk=2)


@pytest.mark.slow
def test_an_engine_drafts_alike_whatever_it_has_cached(files: Files, draft: Path) -> None:
    """Neither a hit in the prefix cache nor other prompts in the batch change a draft."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, 90, (4, 21)).tolist()
    params = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
    counts: Callable = lambda results: [r["meta_info"]["spec_num_correct_drafts"] for r in results]  # noqa: E731
    with files.engine(draft=draft, dtype="float32", max_total_tokens=200) as engine:
        assert "P-EAGLE (2 layers, mask token 11) head" in " ".join(engine._plan.describe())
        together = engine.generate(input_ids=prompts, sampling_params=params)
        engine.flush_cache()
        cold = [engine.generate(input_ids=p, sampling_params=params) for p in prompts]
        again = engine.generate(input_ids=prompts[-1], sampling_params=params)
        assert again["meta_info"]["cached_tokens"] >= 20
        assert counts(together) == counts(cold)
        assert counts([again]) == counts(cold[-1:])
        assert min(counts(cold)) > 4
        check_tokens(engine, prompts)
    with files.small(
        draft=draft, dtype="float32", speculative_use_rejection_sampling=True
    ) as engine:
        result = engine.generate(input_ids=prompts[0], sampling_params=params)
        assert result["output_ids"] == cold[0]["output_ids"]
        assert counts([result]) == counts(cold[:1])
