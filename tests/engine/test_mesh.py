"""An engine whose target is split over two devices writes the texts of one device."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from specjax import Engine, SamplingParams
from specjax.checkpoints import open_target
from specjax.compiling.pool import CompilePool
from specjax.config import Quantization
from specjax.engine.args import EngineArgs
from specjax.engine.plan import plan_engine
from specjax.engine.weights import check_finite
from specjax.models import mesh
from specjax.models.decoder import CausalLM
from specjax.models.eagle import build_head
from specjax.models.family import alike
from specjax.models.flat import FlatModel
from specjax.models.layers import Attention
from specjax.models.mesh import draft_shards, refusals
from specjax.models.pieces import put_pieces
from specjax.models.placement import Placement
from specjax.models.registry import FAMILIES
from specjax.models.short_conv import ConvConfig
from specjax.runtime.runner_config import RunnerConfig
from specjax.scheduling.loop import EngineFault
from specjax.speculative.eagle import Eagle
from specjax.testing import Files
from specjax.testing.files import HEAD
from specjax.testing.models import EAGLE3, SIZES, TARGET

from ..support import mxfp4_files
from ..support.compilation import counted_compilations
from ..support.meshes import (
    PROMPTS,
    check_bytes,
    check_dense,
    check_exchanges,
    dense_weights,
    nothing_passes_the_host,
    passes,
    replicas_that_differ,
)

COUNT = 2
EAGLE_OPTIONS = {"speculative_algorithm": "EAGLE3"}
PROJECTIONS = ("qkv", "output", "gate_up", "down", "lm_head")
PROCESSED = {
    "temperature": 1.0,
    "top_p": 0.8,
    "top_k": 20,
    "min_p": 0.02,
    "sampling_seed": 9,
    "repetition_penalty": 1.2,
    "logit_bias": {"5": 2.0},
}


@pytest.fixture(scope="module")
def pair(files: Files) -> Iterator[Engine]:
    """Has functions for greedy batches, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunnerConfig, "has_greedy", True)
        with files.engine(tp_size=COUNT) as made:
            yield made


def test_tokens_are_those_of_dense_decoding(pair: Engine) -> None:
    assert check_dense(pair, dense_weights(pair)) > 20
    assert not replicas_that_differ(pair)


@pytest.mark.slow
def test_processed_logits_and_their_reports_are_those_of_one_device(
    pair: Engine, base_engine: Engine
) -> None:
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, **PROCESSED)
    reports = {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0}
    ours, theirs = (
        made.generate(input_ids=PROMPTS, sampling_params=params, **reports)
        for made in (pair, base_engine)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one["output_ids"] == other["output_ids"]
        for name in ("output_token_logprobs", "input_token_logprobs"):
            values, expected = (
                [value for value, *_ in x["meta_info"][name] if value is not None]
                for x in (one, other)
            )
            assert values == pytest.approx(expected, abs=1e-4)


def check_shares(made: Engine, *, splits_draft: bool) -> None:
    """Check which weights and pools are cut, and that the plan counts the bytes of a device."""
    runner, pools = made.runner, made.runner.on_device.pools
    for is_draft, flat in enumerate((runner.networks.target, runner.networks.draft)):
        cut = {
            name.split(".")[-2]
            for name, weight in zip(flat.names, runner.weights[is_draft], strict=True)
            if not weight.is_fully_replicated
        }
        assert cut == ({*PROJECTIONS} if splits_draft or not is_draft else set())
    (pool,), drafted = pools.target, pools.draft
    for each, count in ((pool, COUNT), (drafted, COUNT if splits_draft else 1)):
        own = (*each.shape[:3], each.shape[3] // count, each.shape[4])
        assert [shard.data.shape for shard in each.addressable_shards] == [own] * COUNT
    check_bytes(made)
    plan = made._plan
    assert "on 2 x cpu (tp_size=2): weights " in plan.describe()[-1]
    info = made.get_server_info()
    usage = info["internal_states"][0]["memory_usage"]
    assert info["tp_size"] == COUNT
    assert usage["weight"] * 1e9 == pytest.approx(runner.networks.weight_bytes)
    held = jax.tree.leaves(runner.weights)
    whole = sum(weight.nbytes for weight in held if weight.is_fully_replicated)
    assert usage["replicated_weight"] * 1e9 == pytest.approx(whole)
    assert ("draft split over 2 devices" in plan.describe()[1]) == splits_draft


def test_each_device_has_a_share_of_the_target_and_all_of_the_draft(pair: Engine) -> None:
    check_shares(pair, splits_draft=False)


@pytest.mark.slow
def test_each_device_has_a_share_of_the_draft(files: Files, pair: Engine) -> None:
    with files.engine(tp_size=COUNT, draft_tp_size=COUNT, share_weights_with=pair) as made:
        assert made.runner.weights[0][0] is pair.runner.weights[0][0]
        check_shares(made, splits_draft=True)
        made.update_weights_from_tensor(
            {"lm_head.kernel": np.ones((HEAD.hidden_size, HEAD.draft_vocab_size), np.float32)},
            draft=True,
        )
        check_shares(made, splits_draft=True)


def test_large_drafts_are_split_by_default() -> None:
    sizes: Any = {"hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128}
    sizes |= {"num_heads": 32, "num_kv_heads": 8, "dtype": "bfloat16"}
    large = replace(EAGLE3, vocab_size=32000, draft_vocab_size=32000, **sizes)
    chosen = {}
    for name, config, asked in (
        ("large", large, None),
        ("large, asked for whole", large, 1),
        ("small", EAGLE3, None),
        ("small, asked for split", EAGLE3, 2),
        ("odd heads", replace(large, num_heads=31, num_kv_heads=31), None),
    ):
        flat = FlatModel.of(partial(build_head, config))
        chosen[name] = draft_shards(flat, config, 2, asked)
        assert draft_shards(flat, config, 1, None) == 1
    assert chosen == {
        "large": 2,
        "large, asked for whole": 1,
        "small": 1,
        "small, asked for split": 2,
        "odd heads": 1,
    }


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (replace(EAGLE3, num_kv_heads=1), "draft_tp_size=2 must divide num_key_value_heads=1 of "),
        (replace(EAGLE3, intermediate_size=47), "draft_tp_size=2 must divide intermediate_size=47"),
        (None, "draft_tp_size=2 must be 1: the draft's network cannot be split"),
    ],
)
def test_drafts_that_cannot_be_split_are_refused(config: Any, text: str) -> None:
    flat = FlatModel.of(partial(build_head, config or EAGLE3))
    with pytest.raises(ValueError, match=text):
        draft_shards(flat, config, 2, 2)


def test_networks_that_a_subclass_makes_without_shards_are_whole() -> None:
    class Own(Eagle):
        def draft_model(self, config: Any, implementation: str | None) -> Any:
            return super().draft_model(config, implementation)

    options: dict[str, Any] = {"placement": Placement.on(0, COUNT)}
    for kind, count in ((Eagle, 2), (Own, 1)):
        algorithm = kind(name="EAGLE3", checkpoint_format="eagle-3")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mesh, "BYTES_PER_SUM", 0.0)
            assert algorithm.networks(TARGET, EAGLE3, **options).draft.shards == count
    with pytest.raises(ValueError, match="draft_tp_size=2 must be 1: the draft's network"):
        algorithm.networks(TARGET, EAGLE3, **options, draft_tp_size=2)


def test_devices_exchange_two_sums_of_a_layer_and_the_logits(pair: Engine) -> None:
    pair.generate(input_ids=PROMPTS[:1], sampling_params={"max_new_tokens": 8})
    state = pair.runner.abstract_state
    state_bytes = sum(
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    )
    check_exchanges(pair, 2 * TARGET.num_layers)
    for function in passes(pair).values():
        # all of the state is updated in place
        assert function.memory_analysis().alias_size_in_bytes >= state_bytes


@pytest.mark.slow
def test_weights_are_replaced_under_their_whole_shapes(pair: Engine) -> None:
    flat = pair.runner.networks.target
    old = dict(zip(flat.names, dense_weights(pair), strict=True))
    names = ("layers.0.attention.qkv.kernel", "layers.1.mlp.down.kernel", "lm_head.kernel")
    new = {name: np.asarray(old[name])[::-1] for name in names}
    pair.update_weights_from_tensor(new)
    try:
        check_dense(pair, tuple(jax.device_put({**old, **new}[name]) for name in flat.names))
    finally:
        pair.update_weights_from_tensor({name: old[name] for name in names})
    check_dense(pair, tuple(old.values()))


@pytest.mark.parametrize(
    ("changes", "count", "text"),
    [
        ({"num_heads": 6}, 4, "tp_size=4 must divide num_attention_heads=6 "),
        (
            {"num_heads": 12, "num_kv_heads": 6},
            4,
            "tp_size=4 must divide num_key_value_heads=6 of the model, or be a multiple of it",
        ),
        ({"intermediate_size": 47}, 2, "tp_size=2 must divide intermediate_size=47 "),
        (
            {"quantization": Quantization("fp8", group=32)},
            2,
            r"32 inputs of a matrix (num_attention_heads=4) into 16 per device, which must be",
        ),
    ],
)
def test_models_that_cannot_be_split_are_refused(
    changes: dict[str, Any], count: int, text: str
) -> None:
    config = replace(TARGET, **changes)
    assert any(text in reason for reason in refusals(config, (), count))
    assert not list(refusals(config, (), 1))


@pytest.mark.parametrize(("version", "accepts"), [((0, 10, 2), False), ((0, 11, 0), True)])
def test_4_bit_integers_need_a_jax_that_takes_them(version, accepts, monkeypatch) -> None:
    """Arrays of a mesh are committed to it; compiled functions of jax 0.10 refuse such ones."""
    monkeypatch.setattr(jax, "__version_info__", version)
    even = replace(TARGET, vocab_size=62)
    quantised = replace(even, quantization=Quantization("int4", group=8))
    for target, draft in ((even, quantised), (quantised, even)):
        reasons = list(refusals(target, (draft,), 2))
        assert [text.startswith("tp_size=2 needs jax 0.11 or later") for text in reasons] == [
            True
        ] * (not accepts)


def test_each_device_has_blocks_of_packed_experts(files: Files, tmp_path: Path) -> None:
    config = open_target(mxfp4_files.write_gpt_oss(tmp_path, files.target)).config
    (text,) = refusals(config, (), 2)
    assert text == (
        "tp_size=2 exceeds 1, the number of blocks of 128 columns in moe_intermediate_size=64, "
        "which devices share in MXFP4"
    )
    assert not list(refusals(replace(config, moe_intermediate_size=192), (), 2))


def test_convolutions_are_refused() -> None:
    config = ConvConfig(**SIZES, num_layers=2, model_type="lfm2", conv_layers=(0,))
    (text,) = refusals(config, (), 2)
    assert text.startswith("tp_size=2 does not support layers of ShortConv and MLP; it needs")


@pytest.mark.slow
def test_random_packed_experts_are_drawn_in_pieces(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mxfp4_files, "INNER", 192)
    config = open_target(mxfp4_files.write_gpt_oss(tmp_path, files.target)).config
    flat = FlatModel.of(partial(CausalLM, config, shards=COUNT))
    drawn = dict(zip(flat.names, flat.random(0, place := Placement.on(0, COUNT)), strict=True))
    for name, axis in (("gate_up", 2), ("down", 1)):
        assert drawn[f"layers.0.mlp.{name}"].sharding == place.sharding(axis)


def test_layers_of_other_packages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mixer(Attention):
        pass

    family = replace(FAMILIES["llama"], layers=partial(alike, mixer=Mixer))
    monkeypatch.setitem(FAMILIES, "llama", family)
    text, *_ = refusals(replace(TARGET, vocab_size=62), (), 2)
    assert text.startswith("tp_size=2 does not support layers of Mixer and MLP; it needs those of")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tp_size": 0}, "tp_size=0 must be"),
        ({**EAGLE_OPTIONS, "draft_tp_size": 3, "tp_size": 2}, "draft_tp_size=3 must be 1 or tp_"),
        ({"draft_tp_size": 2, "tp_size": 2}, "'draft_tp_size'.* have no effect"),
        ({"tp_size": 2, "enable_deterministic_inference": True}, "inference=True needs tp_size=1"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        EngineArgs(**options)


def test_engines_name_what_they_cannot_split(files: Files) -> None:
    for options, text in (
        ({"tp_size": 1 + len(jax.devices())}, "tp_size=.* devices from base_gpu_id=0 on"),
        ({"tp_size": 2, "quantization": "int4"}, "tp_size=2 (needs jax|cuts .* of 128)"),
    ):
        with pytest.raises(ValueError, match=text):
            plan_engine(EngineArgs(**files.arguments(**options)))


def test_meshes_that_overlap_are_refused(files: Files, pair: Engine) -> None:
    text = r"tp_size=2 on devices \[1, 2\]: another engine of this process has devices \[0, 1\]"
    with pytest.raises(ValueError, match=text):
        files.engine(tp_size=COUNT, base_gpu_id=1)


def test_rounds_compile_nothing_and_copy_nothing_unasked(pair: Engine) -> None:
    def run() -> None:
        for drawn in ({"temperature": 0.0}, PROCESSED):
            params = {"max_new_tokens": 6, "ignore_eos": True} | drawn
            pair.flush_cache()
            pair.generate(input_ids=PROMPTS[:2], sampling_params=params, return_logprob=True)

    run()
    with nothing_passes_the_host(), counted_compilations() as compiled:
        run()
    assert not compiled


@pytest.mark.slow
def test_two_engines_share_weights_and_devices(files: Files, pair: Engine) -> None:
    """Their threads dispatch at the same time, and no device waits for ever."""
    with files.small(tp_size=COUNT, share_weights_with=pair, speculative=False) as other:
        assert other.runner.weights[0][0] is pair.runner.weights[0][0]
        weights = dense_weights(pair)
        with ThreadPoolExecutor(2) as executor:
            checks = [executor.submit(check_dense, x, weights) for x in (pair, other) * 3]
            for check in checks:
                check.result()


def test_calls_over_a_mesh_have_one_order(pair: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    place, keys = pair.runner.networks.placement, set()

    def get(pool: CompilePool, key: Any) -> Any:
        def run(*inputs: Any) -> Any:
            keys.add(key[0])
            assert place.in_order.locked()  # type: ignore[attr-defined]
            return function(*inputs)

        function = dict.__getitem__(pool, key)
        return run

    monkeypatch.setattr(CompilePool, "__getitem__", get, raising=False)
    params = {"max_new_tokens": 8, "repetition_penalty": 1.1}
    for _ in range(2):  # the second text has a cached prefix, whose tokens are recorded
        pair.generate(input_ids=PROMPTS[-1], sampling_params=params)
    assert keys == {"prefill", "round", "record_cached"}
    with ThreadPoolExecutor(1) as executor:
        with place.in_order:
            asked = executor.submit(pair.generate, input_ids=PROMPTS[0], sampling_params=params)
            with pytest.raises(TimeoutError):
                asked.result(timeout=0.2)
        asked.result(timeout=60)


@pytest.mark.parametrize("start", [2, 0])
@pytest.mark.parametrize("read", ["put_pieces", "check_finite"])
def test_arrays_of_devices_are_read_in_the_order_of_engines_there(read: str, start: int) -> None:
    """Of the devices of another engine, or of a trainer that also has others."""
    theirs = Placement(tuple(jax.devices()[start:]))
    array = jax.device_put(np.zeros((4, 4), np.float32), theirs.sharding(0))
    run = {
        "put_pieces": lambda: jax.block_until_ready(put_pieces(array, None, Placement.on(1))),
        "check_finite": lambda: check_finite({"x": array}),
    }[read]
    run()  # compiles
    with ThreadPoolExecutor(1) as executor:
        with Placement(tuple(jax.devices()[2:])).in_order:
            asked = executor.submit(run)
            with pytest.raises(TimeoutError):
                asked.result(timeout=0.2)
        asked.result(timeout=60)


@pytest.mark.slow
def test_a_device_that_fails_ends_all_requests(
    files: Files, pair: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that run and that wait, in a batch and in a stream; the engine can be closed."""
    made = files.engine(tp_size=COUNT, share_weights_with=pair)
    call, num_rounds = made.runner.call, 0

    def failing(key: Any, *inputs: Any) -> Any:
        nonlocal num_rounds
        num_rounds += key[0] == "round"
        if num_rounds == 3:
            raise jax.errors.JaxRuntimeError("INTERNAL: device 1 fell off")
        return call(key, *inputs)

    monkeypatch.setattr(made.runner, "call", failing)
    params = {"max_new_tokens": 60, "ignore_eos": True}
    asked = [
        lambda: made.generate(input_ids=PROMPTS * 3, sampling_params=params),
        lambda: [*made.generate(input_ids=PROMPTS[0], sampling_params=params, stream=True)],
        lambda: made.update_weights_from_tensor({"norm.scale": np.ones(32, np.float32)}),
    ]
    with ThreadPoolExecutor(2) as executor:
        for answer in [*map(executor.submit, asked[:2])]:
            with pytest.raises(EngineFault, match="device 1 fell off"):
                answer.result(timeout=60)
    for ask in asked:
        with pytest.raises(EngineFault, match="device 1 fell off"):
            ask()
    made.close()
    assert check_dense(pair, dense_weights(pair)) > 20  # its calls are not held up


@pytest.mark.slow
def test_dummy_weights_are_drawn_in_pieces(files: Files) -> None:
    simulated = {"load_format": "dummy", "simulate_accept_length": 2.5}
    with files.small(tp_size=COUNT, **simulated) as made:
        assert sum(not weight.is_fully_replicated for weight in made.runner.weights[0]) == 9
        (kernel,) = (
            weight
            for name, weight in zip(
                made.runner.networks.target.names, made.runner.weights[0], strict=True
            )
            if name == "layers.0.mlp.gate_up.kernel"
        )
        first, second = (np.asarray(shard.data) for shard in kernel.addressable_shards)
        assert not np.array_equal(first, second)
        result = made.generate(input_ids=PROMPTS[0], sampling_params={"max_new_tokens": 20})
        assert len(result["output_ids"]) == 20
        assert not replicas_that_differ(made)
