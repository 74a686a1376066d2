"""Draft heads: resolved configurations, tensor layout, errors, export."""

import dataclasses
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specjax.checkpoints import (
    DraftCheckpoint,
    TargetCheckpoint,
    export_draft,
    open_draft,
    open_target,
)
from specjax.config import BlockConfig, DraftConfig, Quantization, RopeScaling, TransformerConfig
from specjax.models.eagle import build_head
from specjax.models.flat import FlatModel
from specjax.testing.files import write_folder

from ..support.checkpoint_files import (
    CONFIG,
    DIM,
    EAGLE_CONFIG,
    HEAD_CONFIG,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    PEAGLE,
    VOCAB,
    add_biases,
    eagle_tensors,
    head_tensors,
    peagle_tensors,
)

Q, KV = HEADS * DIM, KV_HEADS * DIM
FULL, TIED = {"draft_vocab_size": VOCAB}, {"tie_word_embeddings": True}
NO_HEAD = {"lm_head": False, "draft_vocab": VOCAB}


def of_layers(ids: Any, **more: Any) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, **more}}


def target(path: Path, **changes: Any) -> TargetCheckpoint:
    directory = path / "target"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    return open_target(directory)


def open_head(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    target_changes: dict[str, Any] | None = None,
    **options: Any,
) -> DraftCheckpoint:
    body = {key: value for key, value in config.items() if value is not ...}
    directory = write_folder(path / "head", body, tensors)
    return open_draft(directory, target(path, **(target_changes or {})), **options)


Change = Callable[[dict[str, np.ndarray]], object]
ONES = np.ones(HIDDEN, np.float32)


def put(name: str, value: Any) -> Change:
    """Change that replaces or adds a tensor, or derives it from the stored one."""
    return lambda t: t.update({name: value(t[name]) if callable(value) else value})


def drop(name: str) -> Change:
    return lambda t: t.pop(name)


def check_eagle3_layout(head: DraftCheckpoint, tensors: dict[str, np.ndarray], layer: str) -> None:
    weights, config = head.load_weights(), head.config
    flat = FlatModel.of(partial(build_head, config))
    assert set(weights) == set(flat.names)
    for name, like in zip(flat.names, flat.abstract, strict=True):
        assert (weights[name].shape, weights[name].dtype) == (like.shape, like.dtype), name
    expected = {
        "fc.kernel": tensors["fc.weight"].T,
        "attention.qkv.kernel": np.concatenate(
            [tensors[f"{layer}.self_attn.{letter}_proj.weight"] for letter in "qkv"]
        ).T,
        "attention.output.kernel": tensors[f"{layer}.self_attn.o_proj.weight"].T,
        "mlp.gate_up.kernel": np.concatenate(
            [tensors[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        ).T,
        "mlp.down.kernel": tensors[f"{layer}.mlp.down_proj.weight"].T,
        "input_norm.scale": tensors[f"{layer}.input_layernorm.weight"],
        "hidden_norm.scale": tensors[f"{layer}.hidden_norm.weight"],
        "post_attention_norm.scale": tensors[f"{layer}.post_attention_layernorm.weight"],
        "norm.scale": tensors["norm.weight"],
    }
    optional = {
        "lm_head.kernel": ("lm_head.weight", np.transpose),
        "embedding.table": ("embed_tokens.weight", np.asarray),
        "feature_norm.scale": ("input_norm.weight", np.asarray),
        "d2t": ("d2t", np.asarray),
    }
    for name in optional.keys() & weights.keys():
        stored, change = optional[name]
        expected[name] = change(tensors[stored])
    for name, value in expected.items():
        np.testing.assert_array_equal(weights[name], value.astype(weights[name].dtype), name)


@pytest.mark.parametrize("layer", ["midlayer", "layers.0"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_eagle3_name_styles(tmp_path: Path, layer: str, prefix: str) -> None:
    tensors = head_tensors(layer=layer, prefix=prefix)
    head = open_head(tmp_path, HEAD_CONFIG, tensors)
    plain = {name.removeprefix("model."): value for name, value in tensors.items()}
    check_eagle3_layout(head, plain, layer)


def test_eagle3_resolution(tmp_path: Path) -> None:
    config = open_head(tmp_path, HEAD_CONFIG, head_tensors()).config
    # like the published Llama 3.1 heads: no rotary base, and a context of 64 that is raised to the
    # target's
    assert config == dataclasses.replace(
        HEAD, rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=128, dtype="float32"
    )


def test_description(tmp_path: Path) -> None:
    scaling = {"type": "linear", "factor": 2.0}
    config = HEAD_CONFIG | {"rope_theta": 5e5, "rope_scaling": scaling}
    text = open_head(tmp_path, config, head_tensors()).describe()
    assert "eagle-3 head" in text
    assert "rope_theta=500000 (linear x2)" in text
    assert "features of layers [0, 1, 2]" in text
    assert "vocabulary 20 of 61" in text
    assert "embedding the target's, output head own" in text


def test_rope_override_and_longer_context(tmp_path: Path) -> None:
    config = HEAD_CONFIG | {"rope_theta": 5e5, "max_position_embeddings": 512}
    assert open_head(tmp_path, config, head_tensors()).config.rope_theta == 5e5
    head = open_head(tmp_path, config, head_tensors(), rope_theta=1234.0)
    assert head.config.rope_theta == 1234.0
    assert head.config.max_position_embeddings == 512
    with pytest.raises(ValueError, match="rope_theta=-1"):
        open_head(tmp_path, config, head_tensors(), rope_theta=-1.0)


@pytest.mark.parametrize(
    ("changes", "num_layers", "expected"),
    [
        ({}, 3, (0, 1, 2)),
        (of_layers([1, 3, 9]), 12, (1, 3, 9)),
        # with the number of layers among them, the ids count hidden states: 0 is the embedding
        (of_layers([24, 30, 36]), 36, (23, 29, 35)),
        (of_layers([24, 30, 35]), 36, (24, 30, 35)),
        # at the top level they always do
        ({"eagle_config": ..., "eagle_aux_hidden_state_layer_ids": [2, 6, 9]}, 12, (1, 5, 8)),
        ({"eagle_config": ...}, 12, (1, 5, 8)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, 36, (1, 17, 32)),
    ],
)
def test_feature_layers(
    tmp_path: Path, changes: dict[str, Any], num_layers: int, expected: tuple[int, ...]
) -> None:
    head = open_head(
        tmp_path,
        HEAD_CONFIG | changes,
        head_tensors(),
        target_changes={"num_hidden_layers": num_layers},
    )
    assert head.config.feature_layers == expected


@pytest.mark.parametrize(
    ("stored", "changes", "expected"),
    [
        ({}, {}, (True, False, False, 20)),
        ({"embedding": True}, {}, (True, False, True, 20)),
        # the configuration says tied, but the tensor exists and decides
        ({}, TIED, (True, False, False, 20)),
        ({}, {"draft_vocab_size": ...}, (True, False, False, 20)),
        ({"draft_vocab": VOCAB}, FULL, (True, False, False, VOCAB)),
        (NO_HEAD, {"draft_vocab_size": None}, (False, False, False, VOCAB)),
        (NO_HEAD, {"draft_vocab_size": ...}, (False, False, False, VOCAB)),
        (NO_HEAD | {"embedding": True}, FULL | TIED, (False, True, True, VOCAB)),
    ],
)
def test_embeddings_and_heads(
    tmp_path: Path,
    stored: dict[str, Any],
    changes: dict[str, Any],
    expected: tuple[bool, bool, bool, int],
) -> None:
    tensors = head_tensors(**stored)
    head = open_head(tmp_path, HEAD_CONFIG | changes, tensors)
    names = ("has_own_lm_head", "ties_lm_head", "has_own_embedding", "draft_vocab_size")
    assert tuple(getattr(head.config, name) for name in names) == expected
    check_eagle3_layout(head, tensors, "midlayer")


def test_speculators_format(tmp_path: Path) -> None:
    layer = {
        key: value
        for key, value in HEAD_CONFIG.items()
        if key not in ("architectures", "draft_vocab_size", "eagle_config")
    } | {"rope_theta": 5e5}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 20,
        "transformer_layer_config": layer,
        "norm_before_fc": False,
    }
    tensors = head_tensors(layer="layers.0", embedding=True)
    extra = {"verifier_norm.weight": np.ones(HIDDEN, np.float32)}
    changes = {"num_hidden_layers": 12}
    head = open_head(tmp_path, config, tensors | extra, target_changes=changes)
    assert head.config.norm_before_residual is True
    assert head.config.rope_theta == 5e5
    assert head.config.feature_layers == (1, 5, 8)
    check_eagle3_layout(head, tensors, "layers.0")
    config["norm_before_residual"] = False
    head = open_head(tmp_path, config, tensors, target_changes=changes)
    assert head.config.norm_before_residual is False


def test_eagle31_norms(tmp_path: Path) -> None:
    norms = {f"fc_norm.{i}.weight": np.full(HIDDEN, i, np.float32) for i in range(3)}
    config = HEAD_CONFIG | {"fc_norm": True, "norm_output": True}
    head = open_head(tmp_path, config, head_tensors() | norms)
    assert head.config.has_fc_norm
    assert head.config.norm_output
    weights = head.load_weights()
    for i in range(3):
        np.testing.assert_array_equal(weights[f"fc_norms.{i}.scale"], norms[f"fc_norm.{i}.weight"])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"norm_before_fc": True}, True),
        (of_layers([0, 1, 2], norm_before_fc=True), True),
        ({}, True),  # the tensor exists
        ({"norm_before_fc": False}, False),
    ],
)
def test_norm_before_fc(tmp_path: Path, changes: dict[str, Any], expected: bool) -> None:
    tensors = head_tensors() | {"input_norm.weight": np.arange(3 * HIDDEN, dtype=np.float32)}
    head = open_head(tmp_path, HEAD_CONFIG | changes, tensors)
    assert head.config.norm_before_fc is expected
    assert not head.config.has_fc_norm
    if expected:
        check_eagle3_layout(head, tensors, "midlayer")


def test_norm_before_fc_spans_all_features(tmp_path: Path) -> None:
    """One root mean square divides the features of all layers; they are scaled and projected."""
    tensors = head_tensors()
    scale = np.linspace(0.5, 2, 3 * HIDDEN, dtype=np.float32)
    config = HEAD_CONFIG | {"norm_before_fc": True, "rms_norm_eps": 0.25}
    head = open_head(tmp_path, config, tensors | {"input_norm.weight": scale})
    flat = FlatModel.of(partial(build_head, head.config))
    weights = head.load_weights()
    model = flat.rebuild(tuple(jnp.asarray(weights[name]) for name in flat.names))
    # layers of different magnitude: separate norms would treat them equally
    features = np.random.default_rng(0).normal(size=(1, 2, 3 * HIDDEN)).astype(np.float32)
    features *= np.repeat([0.1, 1, 10], HIDDEN).astype(np.float32)
    normed = features / np.sqrt((features**2).mean(-1, keepdims=True) + 0.25) * scale
    expected = normed @ tensors["fc.weight"].T
    np.testing.assert_allclose(model.fuse(jnp.asarray(features)), expected, rtol=1e-4, atol=1e-4)


def test_biases(tmp_path: Path) -> None:
    tensors = add_biases(head_tensors(), ("q_proj", "k_proj", "v_proj"))
    tensors["fc.bias"] = np.arange(HIDDEN, dtype=np.float32)
    head = open_head(tmp_path, HEAD_CONFIG, tensors)
    weights = head.load_weights()
    np.testing.assert_array_equal(weights["fc.bias"], tensors["fc.bias"])
    qkv = [tensors[f"midlayer.self_attn.{letter}_proj.bias"] for letter in "qkv"]
    np.testing.assert_array_equal(weights["attention.qkv.bias"], np.concatenate(qkv))


@pytest.mark.parametrize("count", [1, 3])
def test_peagle(tmp_path: Path, count: int) -> None:
    head = open_head(tmp_path, PEAGLE, peagle_tensors(count), checkpoint_format="eagle-3")
    assert head.config == dataclasses.replace(
        HEAD,
        mask_token_id=60,
        num_layers=count,
        qk_norm=True,
        has_own_embedding=True,
        norm_before_residual=False,  # unlike other heads of speculators
        rope_theta=10000.0,
    )
    assert f"P-EAGLE ({count} layers, mask token 60) head" in head.describe()
    weights = head.load_weights()
    assert set(weights) == set(FlatModel.of(partial(build_head, head.config)).names)
    np.testing.assert_array_equal(weights["mask_hidden"][0, 0], np.arange(3 * HIDDEN))
    for i in range(1, count):
        assert (weights[f"layers.{i - 1}.input_norm.scale"] == i).all()
        assert (weights[f"layers.{i - 1}.attention.k_norm.scale"] == 2 * i + 1).all()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"model_type": "llama", "num_attention_heads": HEADS}, (11008, HEADS, HEADS, 8)),
        ({"model_type": "qwen3", "vocab_size": VOCAB}, (22016, 32, 32, 128)),
    ],
)
def test_absent_settings_are_the_defaults_of_transformers(
    tmp_path: Path, body: dict[str, Any], expected: tuple[int, ...]
) -> None:
    """speculators writes only keys that differ from them."""
    layer = body | {"hidden_size": HIDDEN}
    config = PEAGLE | {"transformer_layer_config": layer}
    found = open_head(tmp_path, config, peagle_tensors(1)).config
    names = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    assert tuple(getattr(found, name) for name in names) == expected


@pytest.mark.parametrize(
    ("changes", "damage", "message"),
    [
        (
            {"mask_token_id": ...},
            drop("t2d"),
            r"has none of \['mask_token_id', .*'ptd_token_id'\].*set mask_token_id in this file",
        ),
        ({"mask_token_id": VOCAB}, drop("t2d"), r"mask_token_id=61 needs .* in \[0, 61\)"),
        ({}, drop("mask_hidden"), "no tensor 'mask_hidden', which a P-EAGLE head needs"),
        (
            {"speculators_model_type": "eagle3", "architectures": ["PEagleDraftModel"]},
            drop("mask_hidden"),
            "no tensor 'mask_hidden'",
        ),
    ],
)
def test_refused_peagle(
    tmp_path: Path, changes: dict[str, Any], damage: Change, message: str
) -> None:
    tensors = peagle_tensors(2)
    damage(tensors)
    with pytest.raises(ValueError, match=message):
        open_head(tmp_path, PEAGLE | changes, tensors)


@pytest.mark.parametrize("bias", [None, True, False])
def test_eagle1(tmp_path: Path, bias: bool | None) -> None:
    tensors = eagle_tensors(bias=bias is not False)
    changes = {} if bias is None else {"bias": bias}
    copies = {"lm_head.weight": np.ones((VOCAB, HIDDEN), np.float32)}
    head = open_head(
        tmp_path, EAGLE_CONFIG | changes, tensors | copies, checkpoint_format="eagle-1"
    )
    config, weights = head.config, head.load_weights()
    assert config.checkpoint_format == "eagle-1"
    assert config.fc_bias is (bias is not False)
    assert not config.has_own_embedding
    assert not config.has_own_lm_head
    assert config.draft_vocab_size == VOCAB
    assert set(weights) == set(FlatModel.of(partial(build_head, config)).names)
    np.testing.assert_array_equal(weights["fc.kernel"], tensors["fc.weight"].T)
    qkv = weights["layers.0.attention.qkv.kernel"]
    assert qkv.shape == (HIDDEN, Q + 2 * KV)
    key = tensors["layers.0.self_attn.k_proj.weight"]
    np.testing.assert_array_equal(qkv[:, Q : Q + KV], key.T)
    assert "output head the target's" in head.describe()


@pytest.mark.parametrize(
    ("config", "target_changes", "message"),
    [
        ({"vocab_size": 62}, {}, "the head has vocab_size=62, but the target has 61"),
        ({"target_hidden_size": 64}, {}, "the head has target_hidden_size=64, .* has 32"),
        ({}, {"hidden_size": 64}, r"'fc\.weight'.*\(32, 96\).*make 192 inputs"),
        (of_layers([0, 1]), {}, r"'fc\.weight'.*\(32, 96\).*make 64 inputs"),
        (of_layers([0, 1, 4]), {}, r"\[0, 1, 4\] must be layers of the target, which has 3"),
        (of_layers([0, 2, 3]), {}, r"\[0, 2, 3\] must be layers of the target, which has 3"),
        ({"eagle_config": ...}, {}, r"the default for 3 layers, \(1, 0, -1\)"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {"num_hidden_layers": 9}, "use_aux"),
        ({"draft_vocab_size": 70}, {}, r"draft_vocab_size=70 must be.*61"),
        ({"num_hidden_layers": 2}, {}, "num_layers=2"),
        ({"hidden_act": "quick_gelu"}, {}, "hidden_act='quick_gelu'"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, {}, "'ntk'"),
        ({"quantization_config": {"quant_method": "hqq"}}, {}, "quant_method='hqq'"),
        ({"hidden_size": ...}, {}, "no hidden_size"),
        ({"num_attention_heads": 0}, {}, "num_attention_heads=0 must be"),
        (of_layers("0,1,2"), {}, "'0,1,2' must be a list"),
        (
            {"norm_before_fc": True, "fc_norm": True},
            {},
            r"config\.json: norm_before_fc=True .*has_fc_norm=True",
        ),
    ],
)
def test_refused_configurations(
    tmp_path: Path, config: dict[str, Any], target_changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_head(tmp_path, HEAD_CONFIG | config, head_tensors(), target_changes=target_changes)


@pytest.mark.parametrize(
    ("damage", "config", "message"),
    [
        (put("d2t", lambda x: x + 50), {}, r"'d2t' in .*target ids .*vocab_size=61"),
        (put("d2t", lambda x: x - 40), {}, "'d2t' in .*target ids -"),
        (put("t2d", np.invert), {}, r"'t2d' in .*model\.safetensors .*20 target ids"),
        (put("t2d", lambda x: x[:-1]), {}, r"'t2d' in .*\(60,\)"),
        (put("t2d", np.float32), {}, "'t2d' in .* is float32"),
        (put("d2t", np.float32), {}, "'d2t' in .* is float32"),
        (put("d2t", lambda x: x[:-1]), {}, r"'d2t' in .* has shape \(19,\).*\(20,\)"),
        (drop("d2t"), {}, r"lacks 1 tensor.*'d2t' \(20,\)"),
        (drop("norm.weight"), {}, r"lacks 1 .*'norm\.weight' \(32,\)"),
        (drop("fc.weight"), {}, r"no tensor 'fc\.weight'"),
        (drop("lm_head.weight"), {}, r"no tensor 'lm_head\.weight'.*draft_vocab_size=20 of 61"),
        (
            put("lm_head.weight", lambda x: x[1:]),
            {},
            r"'lm_head\.weight' in .* has shape \(19, 32\).*\(20, 32\)",
        ),
        (
            put("midlayer.self_attn.q_norm.weight", np.ones(DIM, np.float32)),
            {},
            r"lacks 1 .*'midlayer\.self_attn\.k_norm\.weight' \(8,\)",
        ),
        (put("model.norm.weight", ONES), {}, r"'model\.norm\.weight' and 'norm\.weight'"),
        (
            put("input_norm.weight", np.ones(96, np.float32)),
            {"norm_before_fc": False},
            r"has 1 tensors that the model does not use: .*'input_norm\.weight' \(96,\)",
        ),
        (
            put("input_norm.weight", ONES),
            {"norm_before_fc": True},
            r"'input_norm\.weight' in .*\(32,\).*\(96,\)",
        ),
        (
            drop("t2d"),
            {"norm_before_fc": True},
            r"lacks 1 .*'input_norm\.weight' \(96,\)",
        ),
    ],
)
def test_refused_tensors(
    tmp_path: Path, damage: Change, config: dict[str, Any], message: str
) -> None:
    tensors = head_tensors()
    damage(tensors)
    with pytest.raises(ValueError, match=message):
        open_head(tmp_path, HEAD_CONFIG | config, tensors).load_weights()


def test_a_head_of_another_width_needs_embeddings(tmp_path: Path) -> None:
    tensors = head_tensors() | {"fc.weight": np.ones((HIDDEN, 192), np.float32)}
    changes = {"hidden_size": 64}
    with pytest.raises(ValueError, match=r"no tensor 'embed_tokens\.weight'.*32.*64"):
        open_head(tmp_path, HEAD_CONFIG, tensors, target_changes=changes)
    with pytest.raises(ValueError, match="must match"):
        open_head(tmp_path, EAGLE_CONFIG, eagle_tensors(), target_changes=changes)


def test_refused_eagle1(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks 1 .*'fc\.bias' \(32,\)"):  # required by default
        open_head(tmp_path, EAGLE_CONFIG, eagle_tensors(bias=False)).load_weights()
    with pytest.raises(ValueError, match=r"is an eagle-1 head.*_algorithm drafts with eagle-3"):
        open_head(tmp_path, EAGLE_CONFIG, eagle_tensors(), checkpoint_format="eagle-3")
    with pytest.raises(ValueError, match=r"is an eagle-3 head.*_algorithm drafts with eagle-1"):
        open_head(tmp_path, HEAD_CONFIG, head_tensors(), checkpoint_format="eagle-1")


def test_reordered_full_vocabulary_is_refused(tmp_path: Path) -> None:
    tensors = head_tensors(draft_vocab=VOCAB)
    tensors |= {"d2t": np.zeros(VOCAB, np.int64), "t2d": np.ones(VOCAB, bool)}
    assert "d2t" not in open_head(tmp_path, HEAD_CONFIG | FULL, tensors).load_weights()
    tensors["d2t"][:2] = 1, -1
    with pytest.raises(ValueError, match="reordered vocabularies"):
        open_head(tmp_path, HEAD_CONFIG | FULL, tensors).load_weights()


def test_no_head(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for draft, message in (
        (None, r"only .*'smollm2-135m'.*pass draft=DIRECTORY"),
        ("nowhere", "draft='nowhere' is neither"),
        (tmp_path / "file", "is a file; expected a directory"),
    ):
        with pytest.raises(ValueError, match=message):
            open_draft(draft, target(tmp_path))


def random_weights(config: DraftConfig, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    flat = FlatModel.of(partial(build_head, config))
    weights = {
        name: rng.normal(size=like.shape).astype(like.dtype)
        for name, like in zip(flat.names, flat.abstract, strict=True)
    }
    if "d2t" in weights:
        ids = np.sort(rng.choice(config.vocab_size, config.draft_vocab_size, replace=False))
        weights["d2t"] = (ids - np.arange(config.draft_vocab_size)).astype(np.int32)
    return weights


HEAD = DraftConfig(
    checkpoint_format="eagle-3",
    vocab_size=VOCAB,
    draft_vocab_size=20,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_layers=1,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    max_position_embeddings=128,
    target_hidden_size=HIDDEN,
    feature_layers=(0, 1, 2),
)
EAGLE1_HEAD = dataclasses.replace(
    HEAD,
    checkpoint_format="eagle-1",
    feature_layers=(),
    draft_vocab_size=VOCAB,
    has_own_lm_head=False,
)
LLAMA3 = RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=64)


FLAGS = (
    "fc_bias",
    "qkv_bias",
    "qk_norm",
    "has_own_embedding",
    "norm_before_residual",
    "norm_output",
)
HEADS_OF_ALL_KINDS = st.builds(
    dataclasses.replace,
    st.sampled_from(
        [
            HEAD,
            *(dataclasses.replace(HEAD, **{n: True}) for n in ("has_fc_norm", "norm_before_fc")),
            dataclasses.replace(HEAD, mask_token_id=3, num_layers=3),
        ]
    ),
    draft_vocab_size=st.sampled_from([1, 20, VOCAB]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    rope_scaling=st.sampled_from([None, LLAMA3, RopeScaling(rope_type="linear", factor=2.0)]),
    feature_layers=st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True).map(tuple),
    **dict.fromkeys(FLAGS, st.booleans()),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=HEADS_OF_ALL_KINDS, max_shard_bytes=st.sampled_from([1, 5_000, 4 * 1024**3]))
def test_export_round_trip(
    tmp_path_factory: pytest.TempPathFactory, config: DraftConfig, max_shard_bytes: int
) -> None:
    """Exported heads of all kinds load with the same weights."""
    path = tmp_path_factory.mktemp("export")
    weights = random_weights(config, 0)
    export_draft(path / "head", config, weights, max_shard_bytes=max_shard_bytes)
    pair = target(path, torch_dtype=config.dtype)
    head = open_draft(path / "head", pair, checkpoint_format="eagle-3")
    restored = head.load_weights()
    if config.rope_scaling is not None and config.rope_scaling.rope_type == "linear":
        config = dataclasses.replace(config, rope_scaling=head.config.rope_scaling)
    assert head.config == config
    assert set(restored) == set(weights)
    for name, value in weights.items():
        assert restored[name].dtype == value.dtype, name
        np.testing.assert_array_equal(restored[name], value, err_msg=name)


def test_export_is_the_published_format(tmp_path: Path) -> None:
    export_draft(tmp_path, HEAD, random_weights(HEAD, 1), max_shard_bytes=1)
    first = {file.name for file in tmp_path.iterdir()}
    assert "model.safetensors.index.json" in first
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {f for f in first if f.endswith(".safetensors")}
    # a second export leaves no files of the first
    export_draft(tmp_path, HEAD, random_weights(HEAD, 2))
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    body = json.loads((tmp_path / "config.json").read_text())
    assert body["architectures"] == ["LlamaForCausalLMEagle3"]
    assert body["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    from safetensors.numpy import load_file

    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == set(head_tensors())
    for name, value in head_tensors().items():
        assert tensors[name].shape == value.shape, name
    assert tensors["d2t"].dtype == np.int64
    assert tensors["t2d"].dtype == bool
    ids = tensors["d2t"] + np.arange(20)
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), ids)


@pytest.mark.parametrize("max_shard_bytes", [1, 2**30])
def test_export_respects_the_umask(tmp_path: Path, max_shard_bytes: int) -> None:
    weights, before = random_weights(HEAD, 1), os.umask(0o027)
    try:
        export_draft(tmp_path / "head", HEAD, weights, max_shard_bytes=max_shard_bytes)
    finally:
        os.umask(before)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {oct(file.stat().st_mode & 0o777) for file in files} == {"0o640"}


TIED = {"ties_lm_head": True, "has_own_embedding": True, "draft_vocab_size": VOCAB}


BLOCK = BlockConfig(
    **{f.name: getattr(HEAD, f.name) for f in dataclasses.fields(TransformerConfig)}
    | {"rms_norm_eps": 1e-6, "num_layers": 2},
    **{"checkpoint_format": "", "target_hidden_size": 32, "draft_vocab_size": HEAD.vocab_size},
    **{"feature_layers": (0, 1), "num_drafts": 5, "anchor_first": True, "mask_token_id": 3},
)
# settings that the formats have no key for
FIELDS_WITHOUT_KEYS: list[tuple[str, Any]] = [
    ("rotary_dim", 4),
    ("kv_cache_dtype", "fp8_e4m3"),
    ("quantization", Quantization("fp8")),
    ("windows", (8,)),
    ("rope_scaling", RopeScaling(rope_type="linear", factor=2.0, attention_factor=2.0)),
]
BLOCK_FIELDS_WITHOUT_KEYS: list[tuple[str, Any]] = [
    *FIELDS_WITHOUT_KEYS[:3],
    ("windows", (8, 4)),
    ("causal", (True, False)),
    ("qk_norm", False),
    ("output_bias", True),
]


def test_export_refusals(tmp_path: Path) -> None:
    weights = random_weights(HEAD, 0)
    others = {k: v for k, v in weights.items() if k != "norm.scale"} | {"x": 1}
    short = weights | {"fc.kernel": weights["fc.kernel"][1:]}
    for config, arrays, size, message in (
        (dataclasses.replace(EAGLE1_HEAD, draft_vocab_size=7), {}, 1, "draft_vocab_size=7"),
        (HEAD, others, 1, r"missing \['norm\.scale'\], unknown \['x'\]"),
        (HEAD, weights | {"context.kernel": 1}, 1, r"missing \[\], unknown \['context\.kernel'\]"),
        (HEAD, short, 1, r"'fc\.kernel' has shape \(95, 32\)"),
        (HEAD, weights, 0, "max_shard_bytes=0"),
        (dataclasses.replace(HEAD, **TIED), {}, 1, "cannot export has_own_lm_head=True"),
        (dataclasses.replace(HEAD, hidden_size=64), {}, 1, "hidden_size=64"),
        *(
            (dataclasses.replace(base, **{name: value}), {}, 1, f"cannot export {name}=")
            for base, fields in ((HEAD, FIELDS_WITHOUT_KEYS), (BLOCK, BLOCK_FIELDS_WITHOUT_KEYS))
            for name, value in fields
        ),
    ):
        with pytest.raises(ValueError, match=message):
            export_draft(tmp_path, config, arrays, max_shard_bytes=size)
    assert not list(tmp_path.iterdir())
