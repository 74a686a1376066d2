import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from specjax.adaptive import (
    AdaptiveController,
    AdaptiveSpecPolicy,
    AdaptiveSpeculativeParams,
    AdaptiveSpecWorker,
    BudgetPolicy,
    SpecRuntimeState,
)
from specjax.adaptive.survival import RoundRecord
from specjax.engine.args import EngineArgs
from specjax.types import DraftShape

from .simulation import LLAMA_8B, round_seconds

chain = DraftShape.chain
AT_ONCE = {"ema_alpha": 1.0, "warmup_batches": 0, "update_interval": 1}


class FakeState:
    """A state defined by the worker."""

    def __init__(self, steps: int) -> None:
        self.speculative_num_steps = steps


class FakeWorker:
    """Counts built and applied states."""

    def __init__(self, steps: int) -> None:
        self.state = FakeState(steps)
        self.built: list[tuple[int, int]] = []
        self.applied: list[FakeState] = []

    @property
    def speculative_num_steps(self) -> int:
        return self.state.speculative_num_steps

    def build_adaptive_runtime_state(
        self, *, speculative_num_steps: int, speculative_num_draft_tokens: int
    ) -> FakeState:
        self.built.append((speculative_num_steps, speculative_num_draft_tokens))
        return FakeState(speculative_num_steps)

    def apply_runtime_state(self, state: FakeState) -> None:
        self.applied.append(state)
        self.state = state


def controller_at(steps: int, **config: object) -> tuple[FakeWorker, AdaptiveController]:
    worker = FakeWorker(steps)
    policy = AdaptiveSpeculativeParams(steps, {**AT_ONCE, **config})
    return worker, AdaptiveController(worker, policy)


def test_the_parts_fit_their_protocols() -> None:
    worker: AdaptiveSpecWorker[FakeState] = FakeWorker(3)
    policies: list[AdaptiveSpecPolicy] = [
        AdaptiveSpeculativeParams(3),
        BudgetPolicy(round_seconds(LLAMA_8B), 3),
    ]
    for policy in policies:
        controller = AdaptiveController(worker, policy)
        controller.init_states()
        assert controller.activate_for_batch(1) == policy.tier == chain(3)
        assert json.loads(json.dumps(controller.describe())) == controller.describe()


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "tiers.json"
    path.write_text(json.dumps({**AT_ONCE, "candidate_steps": [1, 4]}))
    return path


def test_a_configuration_makes_the_policy(config_path: Path) -> None:
    controller = AdaptiveController(FakeWorker(3), config_path=config_path)
    assert isinstance(controller.params, AdaptiveSpeculativeParams)
    assert controller.params is controller.policy
    assert controller.params.candidate_steps == (1, 4)
    assert controller.params.current_steps == 4  # the candidate nearest to the worker's
    assert AdaptiveController(FakeWorker(3)).params.candidate_steps == (1, 3, 7)
    policy = AdaptiveSpeculativeParams(3)
    assert AdaptiveController(FakeWorker(3), policy).params is policy


@pytest.mark.parametrize("policy", ["tiers.json", Path("tiers.json"), {"candidate_steps": [1]}])
def test_a_configuration_is_not_a_policy(policy: Any) -> None:
    found = re.escape(repr(policy))
    with pytest.raises(ValueError, match=f"policy={found} is not a policy; .* as config_path"):
        AdaptiveController(FakeWorker(3), policy)


def test_a_policy_has_its_configuration_already() -> None:
    with pytest.raises(ValueError, match=r"config_path='tiers.json' cannot be combined; pass"):
        AdaptiveController(FakeWorker(3), AdaptiveSpeculativeParams(3), config_path="tiers.json")


def test_states_are_built_once_and_for_all_candidates() -> None:
    worker, controller = controller_at(3)
    registered = FakeState(3)
    controller.register(registered)
    controller.init_states()
    controller.init_states()
    assert worker.built == [(1, 2), (7, 8)]
    # applied although the worker is already at 3: its functions may differ from the registered ones
    assert worker.applied == [registered] * 2


def test_tiers_may_differ_in_their_rows_alone() -> None:
    worker, tiers = FakeWorker(7), [chain(7, 4), chain(7), DraftShape(3, 2, 7)]
    policy = AdaptiveSpeculativeParams(7, {**AT_ONCE, "candidate_steps": [7]}, tiers)
    controller = AdaptiveController(worker, policy)
    controller.register(SpecRuntimeState(speculative_num_steps=7, speculative_num_draft_tokens=8))
    controller.init_states()
    assert worker.built == [(7, 4)]
    assert controller.tier == chain(7)
    controller.on_verify_complete([2])
    assert (controller.tier, controller.switches) == (chain(7, 4), 1)
    with pytest.raises(ValueError, match="must be from 0 to 3"):
        controller.on_verify_complete([4])
    controller.on_verify_complete([3])
    assert controller.tier == chain(7)
    assert set(controller.describe()["tiers"]) == {"7-1-4", "7"}


def test_a_switch_waits_for_activation_and_swaps_the_prepared_state() -> None:
    worker, controller = controller_at(3)
    controller.register(worker.state)
    controller.init_states()
    assert controller.activate_for_batch(1) == chain(3)
    assert controller.on_verify_complete([3], tier=chain(3), batch_size=1)
    assert worker.speculative_num_steps == 3
    assert controller.activate_for_batch(1) == chain(7)
    assert worker.state.speculative_num_steps == 7
    # results of rounds in flight do not change the tier
    assert not controller.on_verify_complete([0], tier=chain(3), batch_size=1)
    assert controller.activate_for_batch(1) == chain(7)
    assert controller.on_verify_complete([0], tier=chain(7), batch_size=1)
    controller.activate_for_batch(1)
    assert controller.on_verify_complete([1], tier=chain(1), batch_size=1)
    assert controller.activate_for_batch(1) == chain(3)
    assert [s.speculative_num_steps for s in worker.applied] == [3, 7, 1, 3]
    assert controller.switches == 3
    assert worker.applied[0] is worker.applied[3]
    assert len(worker.built) == 2


def test_the_worker_begins_with_the_first_tier_and_without_a_switch() -> None:
    worker, controller = controller_at(6)  # not a candidate
    controller.init_states()
    assert worker.speculative_num_steps == controller.tier.steps == 7
    controller.activate_for_batch(1)
    assert controller.switches == 0


def test_the_batch_chooses_the_slot() -> None:
    _, controller = controller_at(3, **{"1": {}, "8": {"candidate_steps": [0, 1]}})
    controller.init_states()
    tiers = [controller.activate_for_batch(n).steps for n in (1, 8, 9, 7, 7)]
    assert tiers == [3, 1, 1, 3, 3]
    assert controller.switches == 2


def test_counts_by_tier() -> None:
    _, controller = controller_at(3, candidate_steps=[0, 3])
    controller.init_states()
    for counts, steps in (([3, 1], 3), ([], 3), ([0], 3), ([0, 0, 0], 0), ([2], 3)):
        controller.on_verify_complete(counts, tier=chain(steps), batch_size=4)
    controller.activate_for_batch(4)
    info = controller.describe()
    assert info["tiers"] == {
        "0": {"rounds": 1, "proposed_drafts": 0, "accepted_drafts": 0},
        "3": {"rounds": 3, "proposed_drafts": 12, "accepted_drafts": 6},
    }
    assert (info["num_verify_rounds"], info["wasted_drafts"]) == (3, 6)
    assert info["candidate_steps"] == [0, 3]
    assert info["speculative_num_steps"] in (0, 3)
    shape = DraftShape(3, 5, 16)
    policy = AdaptiveSpeculativeParams(3, {"candidate_steps": [3]}, [shape])
    tree = AdaptiveController(None, policy)
    tree.on_verify_complete([3, 1], tier=shape, batch_size=4)
    assert tree.describe()["wasted_drafts"] == 2 * 15 - 4
    assert info["policy"] == "ema"


def test_a_packed_round_wastes_only_verified_drafts() -> None:
    """A batch with padding verifies more drafts per request than the mean of the tier."""
    packed = chain(7)._replace(packed=4)
    policy = BudgetPolicy({(chain(7), 4): 2.0, (packed, 4): 1.0})
    controller = AdaptiveController(None, policy)
    record = RoundRecord([7, 6], requests=["a", "b"])
    controller.on_verify_complete([7, 5], tier=packed, batch_size=4, record=record)
    assert controller.wasted_drafts == 1


@pytest.mark.parametrize(("counts", "steps"), [([4], 3), ([-1], 3), ([1], 0)])
def test_impossible_counts_are_refused(counts: list[int], steps: int) -> None:
    _, controller = controller_at(3)
    with pytest.raises(ValueError, match=f"must be from 0 to {steps}"):
        controller.on_verify_complete(counts, tier=chain(steps), batch_size=1)


def test_wrong_states_are_refused() -> None:
    worker, controller = controller_at(3)
    with pytest.raises(ValueError, match="init_states"):
        controller.activate_for_batch(1)
    controller.register(worker.state)
    with pytest.raises(ValueError, match="a state for speculative_num_steps=3 was already added"):
        controller.register(worker.state)
    with pytest.raises(ValueError, match=r"speculative_num_steps=5 .* is not one of"):
        controller.register(FakeWorker(5).state)
    worker.build_adaptive_runtime_state = (  # type: ignore[method-assign]
        lambda **tier: worker.state
    )
    with pytest.raises(ValueError, match="built speculative_num_steps=3, but 1"):
        controller.init_states()


def test_counts_alone_decide_and_apply_at_once() -> None:
    worker, controller = controller_at(3)
    controller.init_states()
    assert controller.on_verify_complete([3, 3])
    assert worker.speculative_num_steps == 7
    assert not controller.on_verify_complete([])
    assert controller.on_verify_complete([0])
    assert worker.speculative_num_steps == 1
    assert controller.switches == 2
    with pytest.raises(ValueError, match="must be from 0 to 1"):
        controller.on_verify_complete([2])
    assert controller.tiers[chain(1)].rounds == 0
    assert worker.speculative_num_steps == 1


def test_keywords_go_together() -> None:
    _, controller = controller_at(3)
    for keywords in ({"tier": chain(3)}, {"batch_size": 1}):
        with pytest.raises(ValueError, match="must be given together"):
            controller.on_verify_complete([1], **keywords)


def test_a_round_of_a_tier_that_is_not_a_candidate_is_refused() -> None:
    _, controller = controller_at(3)
    with pytest.raises(ValueError, match=r"steps=5.* is not one of"):
        controller.on_verify_complete([1], tier=chain(5), batch_size=1)


@pytest.mark.parametrize("name", ["ema", "budget"])
def test_a_policy_may_start_at_step_0(name: str) -> None:
    worker = FakeWorker(7)
    policy: AdaptiveSpecPolicy = (
        AdaptiveSpeculativeParams(0, {**AT_ONCE, "candidate_steps": [0, 1, 3]})
        if name == "ema"
        else BudgetPolicy(round_seconds(LLAMA_8B), 0)
    )
    controller = AdaptiveController(worker, policy)
    controller.init_states()
    assert worker.speculative_num_steps == policy.tier.steps == 0
    assert controller.ema_accept_len == 0.0
    assert "-1" not in json.dumps(controller.describe())
    for _ in range(40):
        controller.on_verify_complete([worker.speculative_num_steps])
    assert controller.tier == policy.tiers[-1]


def test_start_and_switches_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "specjax.adaptive"):
        _, controller = controller_at(3)
        controller.init_states()
        controller.on_verify_complete([3])
        controller.on_verify_complete([7])
    assert [record.getMessage() for record in caplog.records] == [
        "adaptive decoding: policy ema, tiers 1, 3, 7, first tier 3",
        "adaptive decoding: speculative_num_steps changed from 3 to 7",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "DEBUG"]


def test_the_worker_of_the_docs_switches() -> None:
    text = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    (source,) = re.findall(r"```python\n(from specjax.adaptive .*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(source, names)
    worker = names["ChainWorker"]()
    assert worker.speculative_num_steps == 3
    for _ in range(20):
        worker.verify([worker.speculative_num_steps])
    assert worker.speculative_num_steps == 7
    assert worker.state == worker.states[7]


class EAGLEWorker:
    """SGLang's worker with its method names; in each round, ``correct`` drafts would be right."""

    def __init__(self, server_args: EngineArgs) -> None:
        steps = server_args.speculative_num_steps
        assert steps is not None
        self.state = self.build_adaptive_runtime_state(
            speculative_num_steps=steps, speculative_num_draft_tokens=steps + 1
        )
        path = server_args.speculative_adaptive_config
        self.adaptive_controller = AdaptiveController(self, config_path=path)
        self.adaptive_controller.register(self.state)
        self.adaptive_controller.init_states()

    @property
    def speculative_num_steps(self) -> int:
        return self.state.speculative_num_steps

    def build_adaptive_runtime_state(self, **tier: int) -> SpecRuntimeState:
        return SpecRuntimeState(**tier, draft=f"draft of {tier['speculative_num_steps']}")

    def apply_runtime_state(self, state: SpecRuntimeState) -> None:
        self.state = state

    def forward_batch_generation(self, correct: int) -> None:
        assert self.state.draft == f"draft of {self.speculative_num_steps}"
        assert self.state.speculative_num_draft_tokens == self.speculative_num_steps + 1
        count = min(correct, self.speculative_num_steps)
        self.adaptive_controller.on_verify_complete([count])


def test_the_worker_of_sglang_runs_by_its_own_names(config_path: Path) -> None:
    args = EngineArgs(
        speculative_algorithm="EAGLE",
        speculative_num_steps=1,
        speculative_adaptive=True,
        speculative_adaptive_config=config_path,
    )
    worker, tiers = EAGLEWorker(args), []
    for correct in (1, 4, 0, 0):
        worker.forward_batch_generation(correct)
        tiers.append(worker.speculative_num_steps)
    assert tiers == [4, 4, 1, 1]
    assert worker.adaptive_controller.params.candidate_steps == (1, 4)
    assert worker.adaptive_controller.switches == 2
