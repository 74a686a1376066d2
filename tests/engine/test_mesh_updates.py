"""Weights of an engine on several devices are replaced by arrays of devices and of the host."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from specjax import Engine, SamplingParams
from specjax.checkpoints import open_target
from specjax.engine import weights as engine_weights
from specjax.testing import Files, Job, dense_decode
from specjax.testing.files import write_folder

from ..support import mxfp4_files
from ..support.compilation import counted_compilations
from ..support.meshes import (
    PROMPTS,
    check_dense,
    dense_weights,
    nothing_passes_the_host,
    replicas_that_differ,
)
from ..support.model_files import read_folder
from ..support.waiting import wait_for

pytestmark = pytest.mark.slow
SPEC = PartitionSpec("x", "y")
# where a trainer has its tensors
WHERE: dict[str, Callable[[], Any]] = {
    "rows": lambda: _sharding((2, 1), 0, 1),
    "columns": lambda: _sharding((1, 2), 0, 1),
    "other order": lambda: _sharding((2, 1), 1, 0),
    "more devices": lambda: _sharding((2, 2), 0, 1, 2, 3),
    "other devices": lambda: _sharding((1, 2), 2, 3),
    "one device": lambda: SingleDeviceSharding(jax.devices()[3]),
}


def _sharding(shape: tuple[int, int], *ids: int) -> NamedSharding:
    devices = np.array([jax.devices()[i] for i in ids]).reshape(shape)
    return NamedSharding(Mesh(devices, ("x", "y")), SPEC)


@pytest.fixture(scope="module", params=[1, 2], ids="tp_size {}".format)
def engine(request: Any, files: Files) -> Iterator[Engine]:
    with files.engine(tp_size=request.param) as made:
        yield made


def tensors_of(engine: Engine) -> dict[str, np.ndarray]:
    """The tensors of an engine's target, under the names of its files."""
    source = open_target(engine.target.path, dtype="float32").source()
    return {name: source.read(name).astype(np.float32) for name in source.infos}


@pytest.mark.parametrize("where", WHERE)
def test_arrays_of_any_devices_are_taken_over_without_the_host(
    engine: Engine, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, sharding = tensors_of(engine), WHERE[where]()
    flat = engine.runner.networks.target
    whole = dict(zip(flat.names, dense_weights(engine), strict=True))
    # tensors under the names of files, and whole weights under those of the engine
    stored = {name: np.flip(x, -1) for name, x in old.items() if "lm_head" not in name}
    named = {"lm_head.kernel": np.flip(np.asarray(whole["lm_head.kernel"]), 0)}
    even = {n: x for n, x in (stored | named).items() if x.ndim == 2 and x.shape[0] % 2 == 0}
    given = jax.device_put(even, sharding)
    first = next(iter(sharding.device_set))
    given |= jax.device_put({n: x for n, x in (stored | named).items() if n not in even}, first)

    def on_host(*inputs: Any) -> Any:
        raise AssertionError("a weight is made on the host")

    monkeypatch.setattr(engine_weights, "make_weight", on_host)
    with nothing_passes_the_host():
        engine.update_weights_from_tensor(given)
    monkeypatch.undo()
    check_dense(engine, _weights_of(engine, stored, named))
    assert not replicas_that_differ(engine)
    engine.update_weights_from_tensor(old)  # from the host
    check_dense(engine, dense_weights(engine))


def _weights_of(engine: Engine, stored: dict[str, Any], named: dict[str, Any]) -> Any:
    """Whole weights that numpy makes from tensors of files."""
    flat, made = engine.runner.networks.target, dict(named)
    for name, recipe in flat.recipes.items():
        if name not in made:
            joined = np.concatenate([part.arranged(stored[part.name]) for part in recipe.parts])
            made[name] = joined.T if recipe.transpose else joined
    return jax.device_put(tuple(made[name] for name in flat.names))


def test_packed_experts_are_made_on_the_host(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files have their inputs in another order, which devices would exchange."""
    monkeypatch.setattr(mxfp4_files, "INNER", 192)  # devices have different numbers of blocks
    path = mxfp4_files.write_gpt_oss(tmp_path / "old", files.target)
    config, tensors = read_folder(path)
    new = {name: np.flip(x, 0) for name, x in tensors.items() if ".experts." in name}
    other = open_target(write_folder(tmp_path / "new", config, tensors | new), dtype="float32")
    source = replace(files, target=path)
    with source.engine(tp_size=2, speculative=False, draft=None) as made:
        given = {
            name: jax.device_put(x, made.runner.networks.placement.sharding(1))
            for name, x in new.items()
        }
        with counted_compilations() as compiled:
            engine_weights.weights_from_tensors(made._plan, given, draft=False)
        assert not compiled
        made.update_weights_from_tensor(given)
        flat = made.runner.networks.target
        check_dense(made, jax.device_put(tuple(flat.order(other.load_weights()))))
        assert not replicas_that_differ(made)


def test_aborts_preemption_and_an_update_in_flight(files: Files) -> None:
    """All requests have the tokens of dense decoding; the pool holds about half of them."""
    sizes: dict[str, Any] = {"page_size": 4, "max_running_requests": 4, "batch_buckets": (4,)}
    params = SamplingParams(temperature=0.8, sampling_seed=3, max_new_tokens=40, ignore_eos=True)
    prompts = [[i, *PROMPTS[-1][:i]] for i in range(8)]
    limits: dict[str, Any] = {"context_length": 90, "max_total_tokens": 92}
    with files.engine(tp_size=2, **sizes, **limits) as made, ThreadPoolExecutor(1) as executor:
        weights = dense_weights(made)
        expected = [
            dense_decode(weights, Job(prompt=tuple(x), params=params, seed=3), made.target.config)
            for x in prompts
        ]
        rids = [f"request {i}" for i in range(1, len(prompts))]
        first = made.generate(input_ids=prompts[0], sampling_params=params, stream=True)
        next(first)
        asked = executor.submit(
            made.generate, input_ids=prompts[1:], sampling_params=params, rid=rids
        )
        wait_for(lambda: made.debug_state()["running"] > 2)
        made.abort(rids[1])
        old = dict(zip(made.runner.networks.target.names, map(np.asarray, weights), strict=True))
        given = jax.device_put(old["lm_head.kernel"], WHERE["rows"]())
        made.update_weights_from_tensor({"lm_head.kernel": given})
        *_, last = first
        results = [last, *asked.result()]
        assert results[2]["meta_info"]["finish_reason"]["type"] == "abort"
        for i, (result, dense) in enumerate(zip(results, expected, strict=True)):
            count = len(result["output_ids"])
            assert result["output_ids"] == dense.tokens[:count]
            assert count == 40 or i == 2
        results = made.generate(input_ids=prompts, sampling_params=params)
        assert [x["output_ids"] for x in results] == [dense.tokens for dense in expected]
        assert any(x["meta_info"]["num_retractions"] for x in results)
        assert not replicas_that_differ(made)
