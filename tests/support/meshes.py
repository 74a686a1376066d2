"""Checks of engines whose target is split over several devices."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest

from specjax import Engine, SamplingParams
from specjax.models.flat import FlatModel, Weights
from specjax.testing.dense import Job, dense_decode

COLLECTIVES = (
    r"= .*?(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
PROMPTS = [[5, 19, 40], [1, 2, 3, 4, 5, 6, 7, 8], list(range(20, 45))]


def dense_weights(engine: Engine) -> Weights:
    """The whole weights of an engine's target, from its files."""
    flat: FlatModel[Any] = engine.runner.networks.target
    return jax.device_put(tuple(flat.order(engine.target.load_weights())))


def check_dense(engine: Engine, weights: Weights, count: int = 24) -> int:
    """Check greedy and seeded tokens against dense decoding; return the number of accepted drafts.

    Sums in another order change logits by 3e-6, which changes no token of these texts.
    """
    accepted = 0
    for temperature in (0.0, 0.8):
        params = SamplingParams(
            temperature=temperature, max_new_tokens=count, sampling_seed=3, ignore_eos=True
        )
        outputs = engine.generate(input_ids=PROMPTS, sampling_params=params)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            job = Job(prompt=tuple(prompt), params=params, seed=3)
            assert output["output_ids"] == dense_decode(weights, job, engine.target.config).tokens
            accepted += output["meta_info"].get("spec_num_correct_drafts", 0)
    return accepted


def check_bytes(engine: Engine) -> None:
    """Check that each device has as many bytes of weights and pools as planned."""
    stats = Counter[Any]()
    for leaf in jax.tree.leaves((engine.runner.weights, engine.runner.on_device.pools)):
        stats.update({shard.device: shard.data.nbytes for shard in leaf.addressable_shards})
    plan = engine._plan
    planned = plan.needs.weight_bytes + plan.kv_bytes
    assert [*stats.values()] == [planned] * plan.networks.placement.count


def passes(engine: Engine) -> dict[str, Any]:
    """The functions of rounds and prefills that an engine compiled, by name."""
    compiled = engine.runner.compiled.items()
    return {key[0]: x for key, x in compiled if key[0].endswith(("round", "prefill"))}


def collectives(engine: Engine) -> dict[str, dict[str, int]]:
    """How many sums and other exchanges between devices each of the passes has."""
    texts = {name: function.as_text() for name, function in passes(engine).items()}
    return {name: dict(Counter(re.findall(COLLECTIVES, text))) for name, text in texts.items()}


def check_exchanges(engine: Engine, num_sums: int) -> None:
    """Check that a pass has this number of sums, and joins logits or adds up the best."""
    found = collectives(engine)
    assert found.pop("greedy_round") == {"all-reduce": num_sums + 1}
    assert found
    assert all(x == {"all-reduce": num_sums, "all-gather": 1} for x in found.values())


def replicas_that_differ(engine: Engine) -> list[str]:
    """Leaves of the state and the weights that are whole on each device but not equal."""
    held = {"state": engine.runner.on_device, "weights": engine.runner.weights}
    return [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(held)
        if leaf.is_fully_replicated
        and any(
            not np.array_equal(leaf.addressable_shards[0].data, other.data)
            for other in leaf.addressable_shards
        )
    ]


@contextmanager
def nothing_passes_the_host() -> Iterator[None]:
    """In all threads, no array is uploaded unasked, and the pieces of none are joined on the host.

    A guard of JAX sees no reads from a CPU, where an array of one device needs no copy.
    """
    array = type(jax.numpy.zeros(1))
    value = vars(array)["_value"]

    def read(self: Any) -> Any:
        assert self.size == 1 or self.is_fully_replicated, f"{self.shape} was read on the host"
        return value.fget(self)

    guard = jax.config.jax_transfer_guard  # type: ignore[attr-defined]
    jax.config.update("jax_transfer_guard", "disallow")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(array, "_value", property(read))
            yield
    finally:
        jax.config.update("jax_transfer_guard", guard)
