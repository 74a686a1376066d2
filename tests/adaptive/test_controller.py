import json

import pytest

from specjax.adaptive import (
    AdaptiveController,
    AdaptiveSpecPolicy,
    AdaptiveSpeculativeParams,
    AdaptiveSpecWorker,
    CostAwarePolicy,
    SpecRuntimeState,
)

from .simulation import LLAMA_8B, round_times

AT_ONCE = {"ema_alpha": 1.0, "warmup_batches": 0, "update_interval": 1}


class FakeWorker:
    """Counts what it is asked for."""

    def __init__(self, steps: int) -> None:
        self.state = SpecRuntimeState(
            speculative_num_steps=steps, speculative_num_draft_tokens=steps + 1
        )
        self.built: list[tuple[int, int]] = []
        self.applied: list[SpecRuntimeState] = []

    @property
    def speculative_num_steps(self) -> int:
        return self.state.speculative_num_steps

    def build_adaptive_runtime_state(self, steps: int, draft_tokens: int) -> SpecRuntimeState:
        self.built.append((steps, draft_tokens))
        return SpecRuntimeState(
            speculative_num_steps=steps, speculative_num_draft_tokens=draft_tokens, round=object()
        )

    def apply_runtime_state(self, state: SpecRuntimeState) -> None:
        self.applied.append(state)
        self.state = state


def controller_at(steps: int, **config: object) -> tuple[FakeWorker, AdaptiveController]:
    worker = FakeWorker(steps)
    policy = AdaptiveSpeculativeParams(steps, {**AT_ONCE, **config})
    return worker, AdaptiveController(worker, policy)


def test_the_parts_fit_their_protocols() -> None:
    worker: AdaptiveSpecWorker = FakeWorker(3)
    policies: list[AdaptiveSpecPolicy] = [
        AdaptiveSpeculativeParams(3),
        CostAwarePolicy(round_times(LLAMA_8B), 3),
    ]
    for policy in policies:
        controller = AdaptiveController(worker, policy)
        controller.init_states()
        assert controller.activate_for_batch(1).speculative_num_steps == policy.current_steps == 3
        assert json.loads(json.dumps(controller.describe())) == controller.describe()


def test_states_are_built_once_and_for_all_candidates() -> None:
    worker, controller = controller_at(3)
    controller.register(worker.state)
    controller.init_states()
    controller.init_states()
    assert worker.built == [(1, 2), (7, 8)]
    assert worker.applied == []


def test_the_rows_of_a_verify_may_be_the_same_for_all_tiers() -> None:
    worker = FakeWorker(3)
    AdaptiveController(worker, AdaptiveSpeculativeParams(3), lambda steps: 12).init_states()
    assert worker.built == [(1, 12), (3, 12), (7, 12)]


def test_a_switch_waits_for_activation_and_swaps_the_prepared_state() -> None:
    worker, controller = controller_at(3)
    controller.register(worker.state)
    controller.init_states()
    assert controller.activate_for_batch(1) is worker.state
    assert controller.on_verify_complete([3], executed_steps=3, batch_size=1)
    assert worker.speculative_num_steps == 3
    state = controller.activate_for_batch(1)
    assert worker.state is state
    assert state.speculative_num_steps == 7
    # results of rounds in flight change nothing
    assert not controller.on_verify_complete([0], executed_steps=3, batch_size=1)
    assert controller.activate_for_batch(1) is state
    assert controller.on_verify_complete([0], executed_steps=7, batch_size=1)
    controller.activate_for_batch(1)
    assert controller.on_verify_complete([1], executed_steps=1, batch_size=1)
    assert controller.activate_for_batch(1).speculative_num_steps == 3
    assert [s.speculative_num_steps for s in worker.applied] == [7, 1, 3]
    assert controller.switches == 3
    assert len({id(s) for s in worker.applied}) == 3
    assert len(worker.built) == 2


def test_the_worker_begins_with_the_first_tier_and_without_a_switch() -> None:
    worker, controller = controller_at(6)  # no candidate
    controller.init_states()
    assert worker.speculative_num_steps == controller.policy.current_steps == 7
    controller.activate_for_batch(1)
    assert controller.switches == 0


def test_the_batch_chooses_the_slot() -> None:
    _, controller = controller_at(3, **{"1": {}, "8": {"candidate_steps": [0, 1]}})
    controller.init_states()
    tiers = [controller.activate_for_batch(n).speculative_num_steps for n in (1, 8, 9, 7, 7)]
    assert tiers == [3, 1, 1, 3, 3]
    assert controller.switches == 2


def test_counts_by_tier() -> None:
    _, controller = controller_at(3, candidate_steps=[0, 3])
    controller.init_states()
    for counts, steps in (([3, 1], 3), ([], 3), ([0], 3), ([0, 0, 0], 0), ([2], 3)):
        controller.on_verify_complete(counts, executed_steps=steps, batch_size=4)
    controller.activate_for_batch(4)
    info = controller.describe()
    assert info["tiers"] == {
        "0": {"rounds": 1, "proposed_drafts": 0, "accepted_drafts": 0},
        "3": {"rounds": 3, "proposed_drafts": 12, "accepted_drafts": 6},
    }
    assert (info["num_verify_rounds"], info["wasted_drafts"]) == (3, 6)
    assert info["candidate_steps"] == [0, 3]
    assert info["speculative_num_steps"] in (0, 3)
    assert info["policy"] == "ema"


@pytest.mark.parametrize(("counts", "steps"), [([4], 3), ([-1], 3), ([1], 0)])
def test_impossible_counts_are_refused(counts: list[int], steps: int) -> None:
    _, controller = controller_at(3)
    with pytest.raises(ValueError, match=f"executed_steps={steps}"):
        controller.on_verify_complete(counts, executed_steps=steps, batch_size=1)


def test_wrong_states_are_refused() -> None:
    worker, controller = controller_at(3)
    with pytest.raises(ValueError, match="init_states"):
        controller.activate_for_batch(1)
    controller.register(worker.state)
    with pytest.raises(ValueError, match="speculative_num_steps=3 is registered twice"):
        controller.register(worker.state)
    with pytest.raises(ValueError, match="speculative_num_steps=5 is not in"):
        controller.register(FakeWorker(5).state)
    worker.build_adaptive_runtime_state = (  # type: ignore[method-assign]
        lambda steps, draft_tokens: worker.state
    )
    with pytest.raises(ValueError, match="built speculative_num_steps=3 where 1"):
        controller.init_states()


@pytest.mark.parametrize(
    ("steps", "rows", "topk"), [(-1, 1, 1), (1, 0, 1), (1, 2, 0), (True, 2, 1)]
)
def test_sizes_of_a_state_are_checked(steps: int, rows: int, topk: int) -> None:
    with pytest.raises(ValueError, match="must be an integer"):
        SpecRuntimeState(speculative_num_steps=steps, speculative_num_draft_tokens=rows, topk=topk)
