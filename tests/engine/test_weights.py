"""Replacing the weights of a running engine."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax import Engine, SamplingParams
from specjax.checkpoints import open_target
from specjax.checkpoints.block import open_block
from specjax.checkpoints.tensors import cast
from specjax.engine.args import EngineArgs
from specjax.engine.plan import plan_engine
from specjax.engine.weights import load_weights, weights_from_tensors
from specjax.models.block import BlockDraft
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel
from specjax.models.placement import Placement
from specjax.scheduling.loop import EngineFault
from specjax.testing import Files, letter_tokenizer, num_held

from ..support.compilation import counted_compilations
from ..support.model_files import write_block_draft

SHARED = ("embed_tokens.weight", "lm_head.weight")
TEXTS = ["hello", "The sky is blue", "a", "def f(x): return x"]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.7, max_new_tokens=20, ignore_eos=True, sampling_seed=5)
LONG = SamplingParams(temperature=0.0, max_new_tokens=110, ignore_eos=True)
Tensors = dict[str, np.ndarray]


def perturbed(directory: Path, new: Path, names: str) -> Path:
    """Copy a checkpoint and change the tensors with ``names`` in their name."""
    shutil.copytree(directory, new)
    rng = np.random.default_rng(3)
    tensors = load_file(new / "model.safetensors")
    for name, tensor in tensors.items():
        if names in name and tensor.ndim == 2:
            noise = rng.normal(size=tensor.shape) * tensor.std()
            tensors[name] = (tensor + noise).astype(tensor.dtype)
    save_file(tensors, new / "model.safetensors")
    return new


@pytest.fixture(scope="module")
def others(files: Files) -> tuple[Path, Path]:
    """Another target and another head with the same shapes."""
    return (
        perturbed(files.target, files.target.with_name("other_target"), "weight"),
        perturbed(files.head, files.head.with_name("other_head"), "weight"),
    )


@pytest.fixture(scope="module")
def old_engine(base_engine: Engine) -> Engine:
    return base_engine


@pytest.fixture(scope="module")
def new_engine(files: Files, others: tuple[Path, Path]) -> Iterator[Engine]:
    with files.engine(target=others[0], draft=others[1]) as made:
        yield made


@pytest.fixture
def engine(files: Files, old_engine: Engine) -> Iterator[Engine]:
    """An engine that shares the weights of another one until it gets new ones."""
    with files.engine(share_weights_with=old_engine, compile_on_use=False) as made:
        yield made


def answers(engine: Engine) -> list[tuple[Any, ...]]:
    """Texts and metrics, which depend on target and head."""
    results = engine.generate(TEXTS * 2, [GREEDY] * len(TEXTS) + [SEEDED] * len(TEXTS))
    return [(r["output_ids"], r["meta_info"]["spec_correct_drafts_histogram"]) for r in results]


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at an address that JAX could use in place."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def tensors_of(directory: Path) -> Tensors:
    return load_file(directory / "model.safetensors")


@pytest.mark.slow
def test_weights_from_disk(engine, old_engine, new_engine, files, others) -> None:
    assert answers(old_engine) != answers(new_engine)
    engine.generate(TEXTS, GREEDY)  # prefixes that must be forgotten
    with counted_compilations() as events:
        engine.update_weights_from_disk(*others)
        assert answers(engine) == answers(new_engine)
        engine.update_weights_from_disk(files.target)
        old_ids, new_ids = ([ids for ids, _ in answers(e)] for e in (old_engine, new_engine))
        assert [ids for ids, _ in answers(engine)] == old_ids != new_ids
        assert answers(engine) != answers(old_engine)  # still the other head
        engine.update_weights_from_disk(draft_path=files.head)
        assert answers(engine) == answers(old_engine)
    # opening a checkpoint traces its model for names and shapes, which compiles nothing
    assert [event for event in events if "jaxpr_trace" not in event] == []
    assert (engine.target.path, engine.draft.path) == (files.target, files.head)


@pytest.mark.slow
def test_an_engine_can_borrow_updated_weights(files, engine, new_engine, others) -> None:
    engine.update_weights_from_disk(*others)
    with files.engine(target=others[0], draft=others[1], share_weights_with=engine) as borrower:
        assert borrower.runner.weights[1][0] is engine.runner.weights[1][0]
        assert answers(borrower) == answers(new_engine)
    with pytest.raises(ValueError, match="share_weights_with must be an engine with"):
        files.engine(share_weights_with=engine)


def test_weights_under_checkpoint_names(engine, new_engine, others) -> None:
    target, head = map(tensors_of, others)
    as_float = {name: tensor.astype(np.float32) for name, tensor in target.items()}
    with counted_compilations() as events:
        engine.update_weights_from_tensor(as_float)
        head["d2t"] = head["d2t"].astype(np.int32)
        published = {
            name: tensor if name in ("d2t", "t2d") else tensor.astype(np.float32)
            for name, tensor in head.items()
        }
        engine.update_weights_from_tensor(published.items(), draft=True)
        assert answers(engine) == answers(new_engine)
    assert events == []


def test_float32_is_cast_for_a_bfloat16_engine(files: Files, others) -> None:
    """As when the same checkpoint is read in bfloat16; needs no engine."""
    half, expected = (open_target(path, dtype="bfloat16") for path in (files.target, others[0]))
    flat = FlatModel.of(partial(CausalLM, half.config))
    nets = SimpleNamespace(target=flat, placement=Placement.on())
    plan: Any = SimpleNamespace(networks=nets, target=half, drafts=())
    given = tensors_of(others[0])
    assert {tensor.dtype for tensor in given.values()} == {np.dtype(np.float32)}
    for tensors in (given, {name: jnp.asarray(tensor) for name, tensor in given.items()}):
        weights, _ = weights_from_tensors(plan, tensors, draft=False)
        for name, weight in expected.load_weights().items():
            assert weights[name].dtype == jnp.bfloat16
            np.testing.assert_array_equal(weights[name], weight)
    norm = {"norm.scale": np.ones(32, np.int32)}
    with pytest.raises(ValueError, match=r"weight 'norm.scale' is int32 .* needs bfloat16"):
        weights_from_tensors(plan, norm, draft=False)


def test_copies_in_a_drafters_file_are_ignored(files: Files, tmp_path: Path) -> None:
    """As when the file is read from disk; other tensors are refused. Needs no engine."""
    opened = open_block(write_block_draft(tmp_path / "draft"), open_target(files.target))
    nets = SimpleNamespace(target=None, draft=FlatModel.of(partial(BlockDraft, opened.config)))
    plan: Any = SimpleNamespace(networks=nets, target=None, drafts=(opened,))
    copies = {name: np.ones((98, 32)) for name in SHARED}
    tensors = tensors_of(opened.path)
    _, weights = weights_from_tensors(plan, tensors | copies, draft=True)
    assert weights.keys() == set(nets.draft.names)
    for more in ({"other": np.ones(3)}, {}):
        given = copies | (tensors | more if more else {})
        with pytest.raises(ValueError, match=r"\['(other'|embed_tokens.weight).* are not weights"):
            weights_from_tensors(plan, given, draft=True)


@pytest.mark.slow
def test_arrays_are_copied(engine, new_engine) -> None:
    names, weights = engine.runner.networks.target.names, new_engine.runner.weights[0]
    mine = {name: aligned(np.asarray(w)) for name, w in zip(names, weights, strict=True)}
    theirs = [jnp.copy(w) for w in engine.runner.weights[1]]
    engine.update_weights_from_tensor(mine)
    engine.update_weights_from_tensor(
        zip(engine.runner.networks.draft.names, theirs, strict=True), draft=True
    )
    for array in mine.values():
        array[...] = np.nan
    for deleted in theirs:  # as a donation to the next training step does
        deleted.delete()
    assert [ids for ids, _ in answers(engine)] == [ids for ids, _ in answers(new_engine)]


@pytest.mark.slow
def test_running_requests_go_on_with_the_new_weights(engine, old_engine, new_engine) -> None:
    """The text so far stays; the new weights continue it."""
    prompt = letter_tokenizer().encode("The sky")
    stream = engine.generate(input_ids=prompt, sampling_params=LONG, stream=True)
    next(stream)
    names, weights = engine.runner.networks.target.names, new_engine.runner.weights[0]
    lengths = []
    engine._loop.run(
        lambda: lengths.extend(len(request.output_ids) for request in engine._loop._calls)
    )
    engine.update_weights_from_tensor(zip(names, weights, strict=True))
    *_, last = stream
    ids = last["output_ids"]
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 110}
    old = old_engine.generate(input_ids=prompt, sampling_params=LONG)["output_ids"]
    same = next(i for i, (ours, theirs) in enumerate(zip(ids, old, strict=True)) if ours != theirs)
    assert same >= lengths[0] > 0
    # no KV of the old weights is reused: the kept text continues as if it were the prompt
    assert any(
        ids[k:]
        == new_engine.generate(
            input_ids=prompt + ids[:k], sampling_params=replace(LONG, max_new_tokens=110 - k)
        )["output_ids"]
        for k in range(lengths[0], same + 1)
    )
    assert num_held(engine) == 0


@pytest.mark.slow
@pytest.mark.parametrize("disable_radix_cache", [False, True])
def test_flush_cache(files, old_engine, disable_radix_cache) -> None:
    """A prompt is found in the cache until a flush, and never with the cache disabled."""
    prompt = list(range(1, 14))
    options = {"input_ids": prompt, "sampling_params": GREEDY}
    with files.small(
        speculative=False, share_weights_with=old_engine, disable_radix_cache=disable_radix_cache
    ) as engine:
        results = [engine.generate(**options) for _ in range(2)]
        engine.flush_cache()
        results.append(engine.generate(**options))
        assert num_held(engine) == 0
    cached = [r["meta_info"]["cached_tokens"] for r in results]
    assert cached == ([0, 0, 0] if disable_radix_cache else [0, 12, 0])
    assert len({tuple(r["output_ids"]) for r in results}) == 1


@pytest.mark.parametrize("draft", [False, True])
def test_weights_that_do_not_fit_change_nothing(engine, old_engine, draft) -> None:
    nets = engine.runner.networks
    flat = nets.draft if draft else nets.target
    norm, fine = ("norm.scale", np.full(32, 2, np.float32))
    for tensors, message in (
        ({norm: fine, "mlp.nowhere": fine}, r"\['mlp.nowhere'\] are not weights of the model"),
        ({norm: fine[:31]}, r"weight 'norm.scale' is float32 \(31,\), but .* float32 \(32,\)"),
        ({norm: "x"}, "'norm.scale'"),
        ({norm: object()}, r"named_tensors\['norm.scale'\] is a object, not an array"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.update_weights_from_tensor(tensors, draft=draft)
    prefix = "midlayer." if draft else "model.layers.0."
    width = 64 if draft else 32
    q = {f"{prefix}self_attn.q_proj.weight": np.zeros((32, width), np.float32)}
    with pytest.raises(ValueError, match=r"q_proj.weight' without .*k_proj.*v_proj"):
        engine.update_weights_from_tensor(q | {norm: fine}, draft=draft)
    wrong = {
        f"{prefix}self_attn.{letter}_proj.weight": np.zeros((size, 9), np.float32)
        for letter, size in (("q", 32), ("k", 16), ("v", 16))
    }
    with pytest.raises(ValueError, match=r"tensor '.*q_proj.weight' is float32 \(32, 9\), but"):
        engine.update_weights_from_tensor(wrong | {norm: fine}, draft=draft)
    assert flat is not None
    for ours, theirs in zip(engine.runner.weights, old_engine.runner.weights, strict=True):
        assert all(a is b for a, b in zip(ours, theirs, strict=True))


def test_tensors_that_no_weight_can_be_made_of(old_engine) -> None:
    norm, gone = np.ones(32, np.float32), jnp.ones(32)
    gone.delete()
    names = old_engine.runner.networks.draft.names
    d2t = np.asarray(old_engine.runner.weights[1][names.index("d2t")])
    refused: list[tuple[Any, str]] = [
        *((bad, "named_tensors") for bad in ([1, 2], 5, {}, {1: norm}, {1: norm, "a": norm})),
        ({"norm.scale": norm, "norm.weight": norm}, r"'norm\.scale' whole and in parts"),
        ({"norm.scale": gone}, r"named_tensors\['norm.scale'\] cannot be copied.*deleted"),
        ({"d2t": d2t + 50}, "vocab_size=98"),
    ]
    for dtype in (np.int32, np.bool_, np.complex64):
        refused.append(({"norm.scale": np.ones(32, dtype)}, f"norm.scale.* is {np.dtype(dtype)}"))
        with pytest.raises(ValueError, match=f"{np.dtype(dtype)} cannot be converted to float32"):
            cast(np.ones(32, dtype), np.dtype(np.float32))  # as a checkpoint is read
    before = answers(old_engine)
    for tensors, message in refused:
        with pytest.raises(ValueError, match=message):
            old_engine.update_weights_from_tensor(tensors, draft=True)
    assert answers(old_engine) == before


@pytest.mark.slow
def test_weights_that_are_not_finite(engine, old_engine, files, others) -> None:
    """They are refused by name. If they are allowed, the next weights remove all traces of them."""
    names, weights = engine.runner.networks.target.names, old_engine.runner.weights[0]
    for value in (np.nan, np.inf, -np.inf):
        bad = np.asarray(weights[names.index("norm.scale")]).copy()
        bad[7] = value
        for given in (bad, jnp.asarray(bad)):
            with pytest.raises(ValueError, match=r"weight .norm.scale. has values .* not finite"):
                engine.update_weights_from_tensor({"norm.scale": given})
    expected = answers(engine)
    assert expected == answers(old_engine)
    table = "embedding.table"
    nan = np.full_like(np.asarray(weights[names.index(table)]), np.nan)
    with counted_compilations() as events:
        engine.update_weights_from_tensor({table: nan}, allow_nonfinite=True)
        engine.generate(TEXTS, GREEDY)
        engine.update_weights_from_tensor({table: weights[names.index(table)]})
        pools = jax.tree.leaves(engine.runner.on_device.pools)
        assert all(bool(np.isfinite(pool).all()) for pool in pools)
        assert answers(engine) == expected
    assert events == []


@pytest.mark.slow
def test_checkpoints_that_do_not_fit(engine, old_engine, files, tmp_path) -> None:
    target = tmp_path / "target"
    shutil.copytree(files.target, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"rope_theta": 5e4}))
    with pytest.raises(ValueError, match=r"rope_theta=50000.0 instead of 10000.0; make a new"):
        engine.update_weights_from_disk(target)
    with pytest.raises(ValueError, match="no/such"):
        engine.update_weights_from_disk("./no/such/model.gguf")
    for paths in ((5, None), (None, 5), (None, None)):
        with pytest.raises(ValueError, match="give model_path, draft_path or both"):
            engine.update_weights_from_disk(*paths)
    broken = tmp_path / "head"
    shutil.copytree(files.head, broken)
    tensors = tensors_of(broken)
    del tensors["fc.weight"]
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(ValueError, match=r"fc\.weight"):
        engine.update_weights_from_disk(files.target, broken)
    assert answers(engine) == answers(old_engine)


def test_a_plain_engine_has_no_draft(files, old_engine) -> None:
    with files.small(speculative=False, share_weights_with=old_engine) as plain:
        with pytest.raises(ValueError, match="has no draft network"):
            plain.update_weights_from_tensor({}, draft=True)
        with pytest.raises(ValueError, match=r"draft_path=.* no draft network"):
            plain.update_weights_from_disk(draft_path=files.head)
    with pytest.raises(ValueError, match="closed"):
        plain.update_weights_from_tensor({})
    with pytest.raises(ValueError, match="closed"):
        plain.flush_cache()


def test_a_flush_that_fails_is_a_fault_of_all(files, old_engine, monkeypatch) -> None:
    """No caller may wait for results that were lost in a partial flush."""
    with files.small(share_weights_with=old_engine) as engine:

        def fail() -> None:
            raise OSError("the read failed")

        monkeypatch.setattr(engine._scheduler, "flush_cache", fail)
        stream = engine.generate(input_ids=[3, 4, 5], sampling_params=LONG, stream=True)
        next(stream)
        with pytest.raises(OSError, match="the read failed"):
            engine.flush_cache()
        with pytest.raises(EngineFault, match="the read failed"):
            list(stream)


def test_an_update_that_fails_half_way_is_a_fault(engine, new_engine, monkeypatch) -> None:
    """The weights are mixed then, so no request may be served from them."""
    names, weights = engine.runner.networks.target.names, new_engine.runner.weights[0]
    replace_weight, count = engine.runner.replace_weight, 0

    def failing(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise MemoryError("out of memory")
        replace_weight(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "replace_weight", failing)
        with pytest.raises(MemoryError):
            engine.update_weights_from_tensor(zip(names, weights, strict=True))
    with pytest.raises(EngineFault, match="out of memory"):
        engine.generate("hello", GREEDY)


def test_an_output_head_next_to_tied_embeddings_must_equal_them(
    files: Files, tmp_path: Path
) -> None:
    """The update of a tied model may have the copy that its trainer holds."""
    shutil.copytree(files.target, tmp_path / "tied")
    body = json.loads((tmp_path / "tied/config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "tied/config.json").write_text(json.dumps(body))
    tied = files.arguments(target=tmp_path / "tied", speculative=False)
    plan = plan_engine(EngineArgs(**tied))
    table = np.float32(load_file(files.target / "model.safetensors")["model.embed_tokens.weight"])
    for name in ("model.embed_tokens.weight", "embedding.table"):
        update = {name: table, "lm_head.weight": table.copy()}
        assert list(weights_from_tensors(plan, update, draft=False)[0]) == ["embedding.table"]
        for other in (table + 1, table[1:]):
            update["lm_head.weight"] = other
            with pytest.raises(ValueError, match=r"lm_head.weight.*tie_word_embeddings=True"):
                weights_from_tensors(plan, update, draft=False)
    untied = plan_engine(EngineArgs(**files.arguments(speculative=False)))
    new, _ = weights_from_tensors(untied, update | {"lm_head.weight": table + 1}, draft=False)
    assert sorted(new) == ["embedding.table", "lm_head.kernel"]


@pytest.mark.parametrize("changed", [None, *SHARED])
def test_other_copies_of_target_tensors_cause_a_warning(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: str | None
) -> None:
    """A drafter reads the target's embeddings and output head, not the copies in its file."""
    path = write_block_draft(tmp_path / "draft") / "model.safetensors"
    stored, target = load_file(path), load_file(files.target / "model.safetensors")
    names = {"embed_tokens.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
    for name, owner in names.items():
        copy = target[owner].astype(jnp.bfloat16)  # rounded copies are equal enough
        stored[name] = copy[::-1].copy() if name == changed else copy
    save_file(stored, path)
    options = {"speculative_algorithm": "DSPARK", "draft": path.parent}
    load_weights(plan_engine(EngineArgs(**files.arguments(speculative=False, **options))))
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warned) == (changed is not None)
    assert all(f"{changed!r} in {path} differs from the target's" in w for w in warned)


@pytest.mark.parametrize(
    ("folder", "name", "weight"),
    [
        ("target", "model.layers.1.mlp.up_proj.weight", "layers.1.mlp.gate_up.kernel"),
        ("target", "model.norm.weight", "norm.scale"),
        ("head", "midlayer.self_attn.v_proj.weight", "attention.qkv.kernel"),
    ],
)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_files_must_be_finite(
    files: Files, tmp_path: Path, folder: str, name: str, weight: str, value: float
) -> None:
    paths = {"target": files.target, "head": files.head}
    changed = tmp_path / folder
    shutil.copytree(paths[folder], changed)
    tensors = load_file(changed / "model.safetensors")
    stored = next(x for x in tensors if x.endswith(name))
    tensors[stored].reshape(-1)[-1] = value
    save_file(tensors, changed / "model.safetensors")
    paths[folder] = changed
    arguments = files.arguments(target=paths["target"], draft=paths["head"])
    with pytest.raises(ValueError, match=f"weight '{weight}' of {changed} has values .* finite"):
        load_weights(plan_engine(EngineArgs(**arguments)))
