"""Keys of drafts' configurations: computed, without effect, or refused by name.

The tables have the keys of published heads: those of Llama and Qwen3 configurations, of the EAGLE
repository, SGLang, SpecForge, DFlash, DeepSpec and speculators.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax.checkpoints import export_draft, open_draft, open_target
from specjax.checkpoints.block import open_block
from specjax.checkpoints.draft import open_draft_model, open_mtp
from specjax.models.block import BlockDraft
from specjax.models.eagle import build_head
from specjax.models.family import draft_kinds
from specjax.models.flat import FlatModel
from specjax.testing.files import write_folder

from ..support.block_files import BlockCase, publish, random_tensors, target_at
from ..support.checkpoint_files import (
    CONFIG,
    EAGLE_CONFIG,
    HEAD_CONFIG,
    PEAGLE,
    Tensors,
    add_biases,
    eagle_tensors,
    head_tensors,
    peagle_tensors,
    target_tensors,
    write_mimo,
)

# key -> another value, and what it changes in the configuration of a draft of one layer
COMPUTED: dict[str, tuple[Any, dict[str, Any]]] = {
    "head_dim": (8, {"head_dim": 8}),
    "hidden_act": ("gelu", {"activation": "gelu"}),
    "hidden_size": (32, {"hidden_size": 32}),
    "intermediate_size": (48, {"intermediate_size": 48}),
    "layer_types": (["full_attention"], {}),
    "max_position_embeddings": (256, {"max_position_embeddings": 256}),
    "num_attention_heads": (4, {"num_heads": 4}),
    "num_hidden_layers": (1, {"num_layers": 1}),
    "num_key_value_heads": (2, {"num_kv_heads": 2}),
    "partial_rotary_factor": (0.5, {"rotary_dim": 4}),
    "rms_norm_eps": (1e-3, {"rms_norm_eps": 1e-3}),
    "rope_parameters": ({"rope_theta": 7.0}, {"rope_theta": 7.0}),
    "rope_scaling": ({"type": "linear", "factor": 2.0}, {}),
    "rope_theta": (500.0, {"rope_theta": 500.0}),
    "target_hidden_size": (32, {"target_hidden_size": 32}),
    "vocab_size": (61, {"vocab_size": 61}),
}
# key -> value; a head of Llama or Qwen3, or a training framework, may have it
WITHOUT_EFFECT: dict[str, Any] = {
    "_name_or_path": "x",
    "architectures": ["LlamaForCausalLM"],
    "attention_dropout": 0.1,
    "auto_map": {"AutoModel": "x.Y"},
    "bos_token_id": 1,
    "draft_vocab_size": 20,
    "eos_token_id": [1, 2],
    "initializer_range": 0.02,
    "max_window_layers": 36,
    "num_anchors": 512,
    "pad_token_id": 0,
    "parallel_drafting": True,
    "pretraining_tp": 1,
    "qk_norm": True,
    "speculators_config": {"algorithm": "eagle3"},
    "speculators_version": "0.2.0",
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "use_sliding_window": False,
}
# key -> (a value that changes nothing, one that the networks of drafts lack)
REFUSED: dict[str, tuple[Any, Any]] = {
    "attn_temperature_tuning": (0, 1),
    "attention_bias": (False, True),
    "attention_chunk_size": (None, 8192),
    "attention_multiplier": (None, 0.25),
    "attention_sink_bias": (False, True),
    "attention_value_scale": (1.0, 0.707),
    "attn_logit_softcapping": (None, 50.0),
    "attn_output_gate": (False, True),
    "causal": (True, False),
    "clip_qkv": (None, 8.0),
    "dim_model_base": (None, 256),
    "embedding_multiplier": (1.0, 12.0),
    "ffn_type": (None, "moe"),
    "final_logit_softcapping": (None, 30.0),
    "final_logits_softcapping": (None, 30.0),
    "full_attn_mod": (1, 2),
    "gated_attention": (False, True),
    "input_embedding_scale": (1, 8.0),
    "is_causal": (True, False),
    "is_neox_style": (True, False),
    "lm_head_multiplier": (1.0, 0),
    "logit_scale": (1.0, 0.0625),
    "logit_temperature": (1.0, 2.0),
    "logits_scaling": (1, 8.0),
    "logits_soft_cap": (None, 30.0),
    "mlp_bias": (False, True),
    "mlp_type": (None, "gelu"),
    "mup_enabled": (False, True),
    "nope_layer_interval": (0, 4),
    "num_experts": (0, 8),
    "output_multiplier": (1, 2.0),
    "parallel_attn": (False, True),
    "query_pre_attn_scalar": (8, 256),
    "residual_multiplier": (1.0, 0.22),
    "residual_scale": (1.0, 0.5),
    "rope_interleaved": (False, True),
    "rope_is_neox_style": (True, False),
    "rope_local_base_freq": (None, 1e4),
    "scale_attn_weights": (True, False),
    "scale_emb": (1, 12),
    "sliding_window": (None, 8),
    "use_alibi": (False, True),
    "use_bidirectional_attention": (False, True),
    "use_final_norm": (True, False),
    "use_gemma_norm": (False, True),
    "use_input_layernorm_in_first_layer": (True, False),
    "use_last_layernorm": (True, False),
    "use_mup": (False, True),
    "use_mtp_layernorm": (False, True),
    "use_parallel_residual": (False, True),
    "use_rope": (True, False),
    "use_rotary_embedding": (True, False),
    "use_swa": (False, True),
}
# of those, block drafters compute these
OF_BLOCKS = {"causal", "is_causal", "use_swa"}
SLIDES = {"layer_types": ["sliding_attention"], "sliding_window": 4}
HEADS: dict[str, tuple[dict[str, Any], Callable[[], Tensors]]] = {
    "eagle": (EAGLE_CONFIG, eagle_tensors),
    "eagle3": (HEAD_CONFIG, head_tensors),
    "p-eagle": (PEAGLE, partial(peagle_tensors, 1)),
}


def changed(body: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Put keys where the format has those of the layers."""
    if "transformer_layer_config" in body:
        return body | {"transformer_layer_config": body["transformer_layer_config"] | changes}
    return body | changes


class Opened:
    """Opens a draft with changes of its ``config.json``."""

    def __init__(self, path: Path, kind: str) -> None:
        self.kind, self.path = kind, path / "draft"
        if kind in HEADS:
            self.target: Any = open_target(write_folder(path / "target", CONFIG, {}))
            self.body, tensors = HEADS[kind][0], HEADS[kind][1]()
            write_folder(self.path, self.body, tensors)
        else:
            case = BlockCase(format=5 if kind == "speculators" else 1, layers=1, head_dim=8)
            self.target = target_at(path)
            publish(case, random_tensors(case, {}, seed=1), self.path)
            self.body = json.loads((self.path / "config.json").read_text())

    def __call__(self, changes: dict[str, Any], nested: str = "") -> Any:
        body = self.body | {nested: self.body.get(nested, {}) | changes} if nested else {}
        text = json.dumps(body or changed(self.body, changes))
        (self.path / "config.json").write_text(text)
        return (open_draft if self.kind in HEADS else open_block)(self.path, self.target)


KINDS = [*HEADS, "dflash", "speculators"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_key_has_its_treatment(tmp_path: Path, kind: str) -> None:
    draft = Opened(tmp_path, kind)
    plain, is_block = draft({}).config, kind not in HEADS
    for key, (value, expected) in COMPUTED.items():
        if is_block and key in ("partial_rotary_factor", *SIZES):
            continue
        config = draft({key: value}).config
        if key == "rope_scaling":
            assert config.rope_scaling.factor == 2.0
        for name, wanted in expected.items():
            found = getattr(config, name)
            assert found == wanted or (is_block and name == "max_position_embeddings")
            assert name not in CHANGED or found != getattr(plain, name)
    without = dict(WITHOUT_EFFECT)
    if is_block:
        del without["architectures"], without["draft_vocab_size"]
    assert draft(without).config == plain
    table = {x: pair for x, pair in REFUSED.items() if not (is_block and x in OF_BLOCKS)}
    assert draft({key: neutral for key, (neutral, _) in table.items()}).config == plain
    for key, (_, other) in table.items():
        if key == "sliding_window" and kind in ("dflash", "speculators"):
            continue  # Qwen's layers have no window without use_sliding_window
        if is_block and key in ("attention_bias", "mlp_bias"):
            with pytest.raises(ValueError, match=r"lacks \d tensor.*bias"):
                draft({key: other}).check_weights()
            continue
        with pytest.raises(ValueError, match=rf"config\.json.*{key}={other!r}"):
            draft({key: other})


SIZES = ("hidden_size", "intermediate_size", "target_hidden_size", "vocab_size")
CHANGED = ("activation", "rms_norm_eps", "rope_theta", "rotary_dim")


@pytest.mark.parametrize(
    ("kind", "place"),
    [("eagle3", "eagle_config"), ("dflash", "dflash_config"), ("dflash", "dspark_config")],
)
def test_nested_keys_are_not_ignored(tmp_path: Path, kind: str, place: str) -> None:
    draft = Opened(tmp_path, kind)
    for key in ("logit_scale", "final_logit_softcapping", "residual_multiplier"):
        with pytest.raises(ValueError, match=f"{place}: {key}=0.5 is not supported"):
            draft({key: 0.5}, place)
    assert draft({"hidden_act": "gelu"}, place).config.activation == "gelu"
    if kind == "dflash":
        for is_causal in (True, False):
            assert draft({"is_causal": is_causal}, place).config.causal == (is_causal,)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        (SLIDES, 4),
        (SLIDES | {"use_sliding_window": True, "max_window_layers": 9}, 4),
        ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}, 4),
        ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}, 0),
        ({"sliding_window": 4, "use_sliding_window": False}, 0),
        ({"sliding_window": 4, "layer_types": ["full_attention"]}, 0),
        ({"sliding_window": None, "use_sliding_window": True}, 0),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_windows(tmp_path: Path, kind: str, changes: dict[str, Any], window: int) -> None:
    config = Opened(tmp_path, kind)(changes).config
    [layer] = draft_kinds(config)
    assert (layer.window or 0) == window
    assert any(config.windows) == bool(window)


def test_windows_that_are_refused(tmp_path: Path) -> None:
    draft = Opened(tmp_path, "eagle3")
    for changes, message in (
        (SLIDES | {"sliding_window": None}, "need sliding_window"),
        ({"sliding_window": 4}, "sliding_window=4 needs layer_types, or use_sliding_window"),
        (SLIDES | {"layer_types": ["chunked"]}, r"layer_types=.*kinds \['chunked'\]"),
        (SLIDES | {"layer_types": ["full_attention"] * 2}, "must name the kinds of 1 layers"),
    ):
        with pytest.raises(ValueError, match=message):
            draft(changes)
    rope = {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 9.0}}
    with pytest.raises(ValueError, match=r"rope_parameters: sliding_attention=.* is not supported"):
        draft(SLIDES | {"rope_parameters": rope})


def test_layers_of_a_p_eagle_head_differ(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention"]
    body = changed(PEAGLE, {"layer_types": kinds, "sliding_window": 4})
    path = write_folder(tmp_path / "head", body, peagle_tensors(2))
    target = open_target(write_folder(tmp_path / "target", CONFIG, {}))
    opened = open_draft(path, target)
    assert opened.config.windows == (0, 4)
    assert [kind.window for kind in draft_kinds(opened.config)] == [None, 4]
    flat = FlatModel.of(partial(build_head, opened.config))
    assert set(opened.load_weights()) == set(flat.names)


def test_windows_are_not_exported_without_a_word(tmp_path: Path) -> None:
    opened = Opened(tmp_path, "eagle3")(SLIDES)
    with pytest.raises(ValueError, match=r"cannot export windows=\(4,\)"):
        export_draft(tmp_path / "copy", opened.config, opened.load_weights())


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_biases_are_those_of_the_tensors(tmp_path: Path, kind: str) -> None:
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    body = HEADS[kind][0] | {"attention_bias": True, "mlp_bias": True}
    tensors = add_biases(HEADS[kind][1](), names)
    path = write_folder(tmp_path / "head", body, tensors)
    opened = open_draft(path, open_target(write_folder(tmp_path / "target", CONFIG, {})))
    weights, layer = opened.load_weights(), "layers.0" if kind == "eagle" else "midlayer"
    assert set(weights) == set(FlatModel.of(partial(build_head, opened.config)).names)
    prefix = "layers.0." if kind == "eagle" else ""
    for weight, name in {
        "attention.output": "self_attn.o_proj",
        "mlp.down": "mlp.down_proj",
    }.items():
        np.testing.assert_array_equal(
            weights[f"{prefix}{weight}.bias"], tensors[f"{layer}.{name}.bias"]
        )


def test_a_block_drafter_may_have_biases_in_its_feed_forward(tmp_path: Path) -> None:
    case = BlockCase(format=1, add={"mlp_bias": True})
    names = ("gate_proj", "up_proj", "down_proj")
    tensors = add_biases(random_tensors(case, {}, seed=1), names)
    opened = open_block(publish(case, tensors, tmp_path / "draft"), target_at(tmp_path))
    names = FlatModel.of(partial(BlockDraft, opened.config)).names
    assert set(opened.load_weights()) == set(names)
    assert "layers.1.mlp.down.bias" in names


def test_draft_models_and_modules(tmp_path: Path) -> None:
    """A key is refused if the family does not read it; layers with a window may be named."""
    target = open_target(write_folder(tmp_path / "target", CONFIG, {}))
    path, tensors = tmp_path / "draft", target_tensors()
    write_folder(path, CONFIG, tensors)
    act = partial(open_draft_model, path, target, with_tokenizer=False)
    modules = write_mimo(tmp_path / "modules")
    opened_modules = partial(open_mtp, None, open_target(modules), num_modules=2)
    for folder, act_of, computed in (
        (path, act, {"attention_bias", "mlp_bias"}),
        (modules, opened_modules, {"attention_bias"}),
    ):
        body, plain = json.loads((folder / "config.json").read_text()), act_of().config
        unread = REFUSED.keys() - computed
        without = WITHOUT_EFFECT | {key: REFUSED[key][0] for key in unread}
        without = without | {"sliding_window": 8, "max_window_layers": 0}  # they are off
        (folder / "config.json").write_text(json.dumps(without | body))
        assert act_of().config == plain
        for key in unread:
            (folder / "config.json").write_text(json.dumps(body | {key: REFUSED[key][1]}))
            if key == "sliding_window" and folder == modules:
                assert act_of().config == plain  # of Qwen: off without use_sliding_window
                continue
            with pytest.raises(ValueError, match=rf"config\.json: {key}=.* is not supported"):
                act_of()
    write_folder(path, CONFIG | {"attention_bias": True, "mlp_bias": True}, tensors)
    with pytest.raises(ValueError, match=r"lacks \d+ tensor.*bias"):
        act().check_weights()
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    named = {"layer_types": kinds, "sliding_window": 4}
    write_folder(path, CONFIG | named, tensors)
    assert act().config.windows == (4, 0, 4)
    olmo = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
    write_folder(path, CONFIG | named | olmo, tensors)
    with pytest.raises(ValueError, match=r"layer_types=.* is not supported"):
        act()
    window = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}
    mimo = write_mimo(tmp_path / "mimo", **window)
    assert open_mtp(None, open_target(mimo), num_modules=2).config.windows == (4, 4)
    mixed = write_mimo(tmp_path / "mixed", **window | {"max_window_layers": 1})
    with pytest.raises(ValueError, match=r"config\.json: layer_types differs between layers"):
        open_mtp(None, open_target(mixed), num_modules=2)
