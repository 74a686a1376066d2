"""Rounds whose stages are dispatched one by one, so that a tool sees what lies between them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.flat import Weights
from specjax.runtime.state import SpecRuntimeState
from specjax.speculative.future_map import DeviceState
from specjax.types import RoundOutput, VerifyInput, VerifyOutput

# of request slots i32 [B], padding included, what was drafted and what of it was accepted
Watch = Callable[[jax.Array, VerifyInput, VerifyOutput], None]


@dataclass(frozen=True)
class StagedRounds:
    """Called as the compiled rounds of one call, which it equals."""

    stages: tuple[Callable[..., Any], ...]  # draft, verify, extend
    num_rounds: int
    watch: Watch

    def __call__(
        self, target: Weights, draft: Weights, state: DeviceState, *inputs: Any
    ) -> tuple[DeviceState, RoundOutput]:
        draft_stage, verify_stage, extend_stage = self.stages
        outs = []
        for _ in range(self.num_rounds):
            state, tree = draft_stage(target, draft, state, *inputs)
            state, verified = verify_stage(target, draft, state, *inputs, tree)
            state, out = extend_stage(target, draft, state, *inputs, verified)
            self.watch(inputs[-1], tree, verified)
            outs.append(out)
        return state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)


def staged(state: SpecRuntimeState, num_rounds: int, watch: Watch) -> SpecRuntimeState:
    """The state with ``num_rounds`` staged rounds a call, of its compiled stages."""
    rounds = {}
    for batch in state.round:
        stages = state.draft[batch], state.verify[batch], state.extend[batch]
        rounds[batch] = StagedRounds(stages, num_rounds, watch)
    return replace(state, round=rounds, greedy_round={})
