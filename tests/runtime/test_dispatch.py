"""Arguments that a runner passes to compiled functions, and results that it makes of theirs."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.runtime.runner import ModelRunner
from specjax.sampling.params import SamplingParams
from specjax.speculative.tree import chain_input
from specjax.types import RoundOutput

from ..support.runners import EAGLE3, TARGET, algorithm_of, chains, runner_config


class Functions(dict[Any, Any]):
    """In place of compiled functions; records each call and numbers the results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def has(self, key: Any) -> bool:
        return True

    def __missing__(self, key: Any) -> Any:
        def call(*arguments: Any) -> tuple[Any, Any]:
            self.calls.append((key[0], arguments))
            number = len(self.calls)
            tree = chain_input(jnp.full((4, 3), number), jnp.zeros(4, jnp.int32))
            out = RoundOutput(jnp.full((1, 4, 6), number), None, None)
            results = {
                "draft": tree,
                "target": "passed",
                "watched": (out, tree, f"verified{number}"),
            }
            return None, results.get(key[0], out)

        return call


@pytest.fixture
def runner() -> ModelRunner:
    algorithm = algorithm_of(EAGLE3)
    config = runner_config(algorithm=algorithm, shapes=chains(2), rounds_per_dispatch=2)
    made = ModelRunner(algorithm.networks(TARGET, EAGLE3, implementation="xla"), config)
    made.weights, made.compiled = ((), ()), Functions()  # type: ignore[assignment]
    made.on_device = None  # type: ignore[assignment]
    return made


def test_inputs_are_uploaded_if_a_slot_of_the_dispatch_changed(runner: ModelRunner) -> None:
    def inputs(*slots: int) -> Any:
        runner.round(slots)
        return runner.compiled.calls[-1][1][3]  # type: ignore[attr-defined]

    before = inputs(1)
    runner.set_slot(2, SamplingParams(temperature=0.9), seed=7)
    runner.set_pages(2, [6, 7])
    assert inputs(1) is before
    changed = inputs(1, 2)
    assert changed.pages.page_table is not before.pages.page_table
    assert changed.pages.page_table[2, :3].tolist() == [6, 7, 0]
    assert changed.sampling is not before.sampling
    assert changed.calibration is before.calibration
    runner.set_calibration(2.0)
    assert inputs(1).calibration[0] == 2.0


def test_a_watched_call_runs_its_rounds_in_parts_with_open_masks(runner: ModelRunner) -> None:
    seen: list[Any] = []
    runner.watch_rounds(lambda slots, tree, verified: seen.append((slots, tree, verified)))
    packed = runner.round([3, 1]).read()
    calls = runner.compiled.calls  # type: ignore[attr-defined]
    assert [name for name, _ in calls] == ["draft", "target", "watched", "target", "watched"]
    assert packed[:, 0, 0].tolist() == [3, 5]
    assert packed.shape == (2, 4, 6)
    # the second round verifies the drafts of the first one's last call
    assert [int(tree.draft_tokens[0, 0]) for _, tree, _ in seen] == [1, 3]
    assert [verified for *_, verified in seen] == ["verified3", "verified5"]
    assert seen[0][0].tolist() == [3, 1, 0, 0]
    masks, forced = map(np.asarray, calls[2][1][-2:])
    assert (masks.shape, forced.shape) == ((4, 3, -(-TARGET.vocab_size // 32)), (4, 3, 3))
    assert (masks == -1).all()
    assert (forced == -1).all()
    runner.watch_rounds(None)
    assert runner.round([3, 1]).read().shape == (1, 4, 6)
    assert calls[-1][0] == "round"
