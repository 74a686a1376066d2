"""Sides with different numbers of devices: texts, rows and fingerprints are those of one device."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from specjax import DisaggregatedEngine
from specjax.disaggregation.heads import cuts_of, of_all_heads
from specjax.disaggregation.remote import PrefillServer, RemotePeer
from specjax.disaggregation.rows import KVTransfer, put_rows, take_rows
from specjax.testing import Files

from ..support.meshes import PROMPTS, check_dense, dense_weights, replicas_that_differ
from ..support.model_files import write_hybrid
from ..support.quantized_files import FORMATS, compressed, make, packed
from ..support.waiting import wait_for
from .sides import SIZES, wait_until_empty

pytestmark = pytest.mark.slow
# numbers of devices of the prefill side and of the decode side
PAIRS = [(1, 2), (2, 1), (2, 2)]


@pytest.fixture(scope="module", params=PAIRS, ids="{0[0]}-{0[1]}".format)
def sides(request: Any, files: Files) -> Iterator[DisaggregatedEngine]:
    there, here = request.param
    with files.engine(
        kind=DisaggregatedEngine, tp_size=here, prefill={"tp_size": there, "page_size": 16}, **SIZES
    ) as engine:
        places = [x.runner.networks.placement for x in (engine.prefill, engine)]
        assert [place.count for place in places] == [there, here]
        assert not set(places[0].devices) & set(places[1].devices)
        yield engine


def check(engine: DisaggregatedEngine, num_accepted: int = 20) -> None:
    """Tokens are those of dense decoding, and the prefill side computed all prompts."""
    engine.prefill.flush_cache()
    before = engine.prefill.metrics.snapshot().prefilled_tokens
    assert check_dense(engine, dense_weights(engine)) > num_accepted
    wait_until_empty(engine)
    after = engine.prefill.metrics.snapshot().prefilled_tokens
    assert after - before == 2 * sum(map(len, PROMPTS))
    assert not replicas_that_differ(engine)


def test_tokens_are_those_of_dense_decoding(sides: DisaggregatedEngine) -> None:
    check(sides)


def test_sockets_between_the_sides(sides: DisaggregatedEngine) -> None:
    assert sides._peer is not None
    sides._peer.close()
    prefill = sides.prefill
    wait_for(lambda: not sides.peer_connected and not prefill.peer_connected)
    server = PrefillServer("127.0.0.1:0", "", prefill._side)
    peer = RemotePeer(server.address, "", sides._side)
    try:
        assert sides.wait_for_peer(20)
        assert prefill.wait_for_peer(20)
        check(sides)
    finally:
        peer.close()
        server.close()


def test_sides_of_quantised_matrices(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices have groups of inputs; the second side gets its weights from the first."""
    stored = compressed(8, "int", "group", group_size=8, symmetric=False)
    monkeypatch.setitem(FORMATS, "groups", (stored, partial(packed, 8, True, 8)))
    options = {"target": make(files, tmp_path, "groups")[0]} | SIZES
    with files.engine(
        kind=DisaggregatedEngine, tp_size=2, prefill={"tp_size": 1, "page_size": 16}, **options
    ) as engine:
        assert engine._side[1].weights == engine.prefill._side[1].weights
        check(engine)


def test_states_of_sides_without_a_draft_network(files: Files, tmp_path: Path) -> None:
    hybrid = replace(files, target=write_hybrid(tmp_path / "hybrid", files.target))
    options = SIZES | {"speculative_algorithm": "NGRAM", "draft": None}
    with hybrid.engine(
        kind=DisaggregatedEngine, tp_size=2, prefill={"page_size": 16}, **options
    ) as engine:
        check(engine, 0)


def test_heads_that_two_devices_have_are_sent_once(sides: DisaggregatedEngine) -> None:
    """With a model of half as many KV heads as the pool of the devices has."""
    runner = next(x.runner for x in (sides.prefill, sides) if x.args.tp_size == 2)
    nets, transfer = runner.networks, KVTransfer(runner)
    half = replace(nets.target_config, num_kv_heads=nets.target_config.num_kv_heads // 2)
    state = runner.abstract_state
    own = (partial(x, axes=transfer._axes, implementation="xla") for x in (take_rows, put_rows))
    nets = replace(nets, target_config=half)
    take, put = of_all_heads(*own, nets, state, cuts_of(nets, state, transfer._axes))
    index = np.arange(5, 9, dtype=np.int32)
    state = runner._empty_state()
    shapes = jax.eval_shape(take, state.pools, index)
    assert shapes[0].shape[3] == half.num_kv_heads
    rng = np.random.default_rng(0)
    kv = tuple(rng.normal(size=x.shape).astype(x.dtype) for x in shapes)
    state = jax.jit(put)(state, index, kv)
    first, second = (shard.data for shard in state.pools.target[0].addressable_shards)
    np.testing.assert_array_equal(first, second)
    for sent, taken in zip(kv, jax.jit(take)(state.pools, index), strict=True):
        np.testing.assert_array_equal(sent, taken)


def test_a_fingerprint_is_that_of_one_device(sides: DisaggregatedEngine, files: Files) -> None:
    name = "layers.0.mlp.gate_up.kernel"
    flat = sides.runner.networks.target
    old = np.asarray(dense_weights(sides)[flat.names.index(name)])
    seen = set()
    for column in (None, 0, old.shape[1] // 2, old.shape[1] - 1):
        new = old.copy()
        if column is not None:
            new[3, column] = np.nextafter(new[3, column], np.inf)
        sides.update_weights_from_tensor({name: new})
        assert sides._side[1].weights == sides.prefill._side[1].weights
        seen.add(sides._side[1].weights)
    assert len(seen) == 4
    sides.update_weights_from_tensor({name: old})
