"""Block drafters: what each spelling of each format means, and what is refused."""

import dataclasses
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from specjax.checkpoints import export_draft, open_draft, open_target
from specjax.checkpoints.block import open_block
from specjax.checkpoints.draft import open_mtp
from specjax.checkpoints.presets import PRESETS, preset_algorithm, write_preset
from specjax.config import BlockConfig, RopeScaling
from specjax.models.block import BlockDraft
from specjax.models.flat import FlatModel
from specjax.testing import random_weights

from ..support.block_files import (
    CASES,
    HIDDEN,
    SPARK,
    VOCAB,
    BlockCase,
    publish,
    random_tensors,
    target_at,
    write_block,
)
from .damage import damage_json, fuzz


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_spelling_means_what_it_says(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    opened = open_block(write_block(tmp_path / "draft", case), target_at(tmp_path))
    opened.check_weights()
    config = opened.config
    assert (config.num_drafts, config.anchor_first) == (case.drafts, not case.fills_in)
    assert (config.block, config.feature_layers) == (case.rows, case.taps)
    assert (config.mask_token_id, config.rope_theta) == (case.mask, case.theta)
    assert config.windows == tuple(window or 0 for window in case.layer_windows)
    assert config.causal == case.layer_causal
    assert (config.qkv_bias, config.output_bias) == (case.bias, case.bias)
    assert config.draft_vocab_size == (case.draft_vocab or VOCAB)
    assert config.markov_head == case.markov
    assert config.markov_rank == (case.rank if case.markov else 0)
    assert config.has_confidence_head == (case.confidence is not None)
    assert config.confidence_with_markov == (case.confidence == "markov")
    assert config.max_position_embeddings >= 512
    assert config.dtype == "float32"
    line = opened.describe()
    for part in (
        config.checkpoint_format,
        "fill-in" if case.fills_in else "anchor-first",
        f"{case.drafts} drafts per round from {case.rows} rows",
        f"mask token {case.mask}",
        f"rope_theta={case.theta:g}",
        f"features of layers {list(case.taps)}",
    ):
        assert part in line
    flat = FlatModel.of(partial(BlockDraft, config))
    weights = flat.order(opened.load_weights())
    assert [x.shape for x in weights] == [leaf.shape for leaf in flat.abstract]


def test_the_context_has_the_keys_and_values_of_all_layers(tmp_path: Path) -> None:
    opened = open_block(write_block(tmp_path / "draft", BlockCase(format=1)), target_at(tmp_path))
    weights = opened.load_weights()
    kernels = [weights[f"layers.{i}.attention.qkv.kernel"] for i in range(2)]
    keys, values = zip(*(np.split(x[:, 64:], 2, axis=1) for x in kernels), strict=True)
    joined = np.concatenate((*keys, *values), axis=1)
    np.testing.assert_array_equal(weights["context.kernel"], joined)


SWA = "dflash_config.use_swa"
REFUSED: dict[str, tuple[BlockCase, str]] = {
    "domino": (BlockCase(format=1, add={"architectures": ["DominoDraftModel"]}), "format Domino"),
    "domino projector": (
        BlockCase(format=1, add={"dflash_config.projector_type": "domino"}),
        "format Domino",
    ),
    "dflash2": (BlockCase(format=1, add={"selector_rank": 64}), "format DFlash2"),
    "lilicorr": (BlockCase(format=1, add={"architectures": ["LiLiCorrDraftModel"]}), "LiLiCorr"),
    "xpress": (BlockCase(format=5, add={"speculators_model_type": "xpress"}), "format XPress"),
    "nemotron": (
        BlockCase(format=1, add={"has_embed_tokens": True, "has_lm_head": False}),
        "format Nemotron",
    ),
    "p-eagle": (BlockCase(format=5, add={"speculators_model_type": "peagle"}), "'EAGLE3'"),
    "unknown wrapper": (BlockCase(format=5, add={"speculators_model_type": "mlp"}), "='mlp' is"),
    "either layout": (
        BlockCase(format=2, add={"architectures": ["Other"]}),
        "own position.* or DSpark .*set sample_from_anchor",
    ),
    "either layout, DFlash with a Markov head": (
        BlockCase(format=1, add={"markov_rank": 4}),
        "set sample_from_anchor to false or true",
    ),
    "either number of drafts": (
        BlockCase(format=6, add={"block_size": 9}, drop=("sample_from_anchor",), **SPARK),
        "block_size=9 and speculative_tokens=3 may mean 9 drafts .* or 8 .*set sample_from_anchor",
    ),
    "more drafts than rows": (
        BlockCase(format=6, add={"sample_from_anchor": False}, **SPARK),
        "speculative_tokens=3 exceeds the 2 drafts",
    ),
    "sinks": (BlockCase(format=1, add={"dflash_config.attention_sink_bias": True}), "sink_bias=T"),
    "value scale": (
        BlockCase(format=1, add={"dflash_config.attention_value_scale": 0.5}),
        "attention_value_scale=0.5 is not supported",
    ),
    "interleaved": (BlockCase(format=1, add={"rope_is_neox_style": False}), "rope_is_neox_style=F"),
    "gemma": (BlockCase(format=1, add={"use_gemma_norm": True}), "use_gemma_norm=True is not"),
    "logit scale": (BlockCase(format=1, add={"logit_scale": 2.0}), "logit_scale=2.0 is not"),
    "rope dim": (BlockCase(format=1, add={"rope_scaling": {"rope_dim": 8}}), "rope_dim"),
    "rope dim of transformers 5": (
        BlockCase(format=1, add={"rope_parameters": {"rope_dim": 8}}),
        "rope_parameters: rope_dim=8 is not",
    ),
    "partial rotation": (
        BlockCase(format=1, add={"dflash_config.partial_rotary_factor": 0.5}),
        "dflash_config: partial_rotary_factor=0.5 is not",
    ),
    "layer types": (BlockCase(format=1, add={"layer_types": ["full_attention"]}), "layer_types="),
    "no window": (BlockCase(format=1, add={SWA: True}), "need sliding_window"),
    "mask token": (
        BlockCase(format=1, drop=("dflash_config.mask_token_id",)),
        r"has none of \['mask_token_id'.*no token '<\|MASK\|>'; set mask_token_id",
    ),
    "mask outside": (
        BlockCase(format=1, mask=VOCAB),
        "mask_token_id=131 must be an integer from 0 to 130",
    ),
    "layers": (BlockCase(format=1, taps=(1, 7)), "must be layers of the target, which has 7"),
    "counted layers": (BlockCase(format=5, taps=(-2, 1)), "must be layers of the target"),
    "target layers": (BlockCase(format=1, target_layers=9), "num_target_layers=9"),
    "fc": (
        BlockCase(format=1, add={"dflash_config.target_layer_ids": [1]}),
        "'fc.weight' .*1 features of the target's hidden_size=48 make 48 inputs",
    ),
    "vocabulary": (BlockCase(format=1, vocab=140), "the head has vocab_size=140"),
    "width": (BlockCase(format=1, hidden=32), "hidden_size=32 differs from the target's 48"),
    "quantised": (
        BlockCase(format=1, add={"quantization_config": {"quant_method": "modelopt"}}),
        "quantization_config: quant_method='modelopt'",
    ),
    **{
        f"block {size} of {format}": (
            BlockCase(format=format, add={"block_size": size}),
            f"config.json: block_size={size} must be an integer from {limits}",
        )
        for format, size, limits in (
            (1, 65, "2 to 64"),
            (1, 1, "2 to 64"),
            (5, 100, "2 to 64"),
            (2, 64, "1 to 63"),
        )
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_reason(tmp_path: Path, name: str) -> None:
    case, message = REFUSED[name]
    path = write_block(tmp_path / "draft", case)
    with pytest.raises(ValueError, match=message):
        open_block(path, target_at(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1-sliding", "3-gated", "4-dspark-config", "6-reduced"])
def test_damaged_configurations(tmp_path: Path, name: str) -> None:
    """Any damage raises a ValueError that names the file."""
    path, target = write_block(tmp_path / "draft", CASES[name]), target_at(tmp_path)
    act = partial(open_block, path, target)
    assert fuzz(path, ["config.json"], damage_json, lambda _: act().check_weights(), 200) > 10


def test_other_files_of_a_drafter_are_refused(tmp_path: Path) -> None:
    path = write_block(tmp_path / "draft", BlockCase(format=1))
    (path / "mask_embedding.pt").touch()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"embedding in mask_embedding.pt is not supported"):
            open_block(path, target_at(tmp_path))
        (path / "mask_embedding.pt").unlink()
        (path / "mask_embedding.pt").symlink_to(tmp_path / "none")
    body = {"architectures": ["LlamaForCausalLM"], "pard_token": 5, "vocab_size": VOCAB}
    (path / "config.json").write_text(json.dumps(body))
    (path / "model.safetensors").unlink()
    save_file({"model.norm.weight": np.ones(HIDDEN, np.float32)}, path / "model.safetensors")
    with pytest.raises(ValueError, match="the format PARD is not supported"):
        open_block(path, target_at(tmp_path))


@pytest.mark.parametrize("name", PRESETS)
def test_presets(tmp_path: Path, name: str) -> None:
    """The written files are read as the preset's configurations, and take no space."""
    folder, draft = write_preset(name, tmp_path)
    target, algorithm = open_target(folder), preset_algorithm(name)
    has_block, has_module = algorithm in ("DFLASH", "DSPARK"), name.startswith("qwen3.5")
    opened: Any
    if has_module:
        opened = open_mtp(draft, target, num_modules=1)
    else:
        opened = (open_block if has_block else open_draft)(draft, target)
    assert (target.config, opened.config) == PRESETS[name]
    opened.check_weights()
    weights = draft / "model.safetensors"
    assert weights.stat().st_size > 2**28
    assert weights.stat().st_blocks * 512 < 2**20
    if has_block:
        assert algorithm == ("DSPARK" if opened.config.markov_head else "DFLASH")
        assert f"b{opened.config.block}" == name.rpartition("-")[2]
    assert preset_algorithm("qwen3-8b") is preset_algorithm(None) is None


def test_other_algorithms_name_the_one_that_drafts_with_it(tmp_path: Path) -> None:
    for prefix in ("", "model."):
        path = write_block(tmp_path / f"draft{prefix}", BlockCase(format=1, prefix=prefix))
        with pytest.raises(ValueError, match="is a block drafter; set speculative_algorithm='DSP"):
            open_draft(path, target_at(tmp_path))


def test_a_mixture_with_a_p_eagle_head_is_refused(tmp_path: Path) -> None:
    case = BlockCase(format=1)
    tensors = random_tensors(case, {}, seed=1) | {"mask_hidden": np.ones(3, np.float32)}
    path = publish(case, tensors, tmp_path / "draft")
    for act in (open_block, open_draft):
        with pytest.raises(ValueError, match="both 'hidden_norm"):
            act(path, target_at(tmp_path))


def test_default_layers_need_four_layers(tmp_path: Path) -> None:
    path = write_block(tmp_path / "draft", CASES["1-default-three-layers"])
    assert open_block(path, target_at(tmp_path, num_layers=4)).config.feature_layers == (1, 1, 1)
    for count in (1, 2, 3):
        with pytest.raises(ValueError, match=f"target_layer_ids=None .* 4 or more .* of {count}"):
            open_block(path, target_at(tmp_path, num_layers=count))


@pytest.mark.parametrize(
    ("case", "name", "anchor_first"),
    [
        (BlockCase(format=3, drop=("markov_rank",), **SPARK), "DSpark of DeepSpec", True),
        (
            BlockCase(format=3, drop=("markov_rank", "architectures"), **SPARK),
            "DSpark of DeepSpec",
            True,
        ),
        (
            BlockCase(format=2, add={"architectures": ["Foo"], "sample_from_anchor": True}),
            "DFlash of DeepSpec",
            True,
        ),
        (
            BlockCase(format=1, add={"architectures": ["Foo"], "sample_from_anchor": False}),
            "DFlash",
            False,
        ),
        (
            BlockCase(
                format=4,
                add={"architectures": ["Foo"], "dflash_config.projector_type": ""},
                **SPARK,
            ),
            "",
            True,
        ),
        (BlockCase(format=1, drop=("architectures",)), "DFlash", False),
    ],
)
def test_tensors_and_keys_name_the_format(
    tmp_path: Path, case: BlockCase, name: str, anchor_first: bool
) -> None:
    path = write_block(tmp_path / "draft", case)
    if not name:
        with pytest.raises(ValueError, match="with markov_rank=6 may be DFlash"):
            open_block(path, target_at(tmp_path))
        return
    config = open_block(path, target_at(tmp_path)).config
    assert (config.checkpoint_format, config.anchor_first) == (name, anchor_first)
    assert (config.markov_head is not None) == name.startswith("DSpark")


def test_stray_tensors_are_refused(tmp_path: Path) -> None:
    case = BlockCase(format=1)
    tensors = random_tensors(case, {}, seed=1) | {"extra.weight": np.ones(3, np.float32)}
    opened = open_block(publish(case, tensors, tmp_path / "draft"), target_at(tmp_path))
    with pytest.raises(ValueError, match=r"1 tensors that the model does not use: 'extra.weight'"):
        opened.check_weights()


def test_the_mask_token_may_be_a_string(tmp_path: Path) -> None:
    case = BlockCase(
        format=1, move={"dflash_config.mask_token_id": "x"}, add={"dflash_config.mask_token": "b"}
    )
    config = open_block(write_block(tmp_path / "draft", case), target_at(tmp_path)).config
    assert config.mask_token_id == 1


def test_a_drafter_in_a_targets_checkpoint_is_found(tmp_path: Path) -> None:
    target = target_at(tmp_path)
    with pytest.raises(ValueError, match=r"draft=None, .* no block drafter: neither a folder"):
        open_block(None, target)
    write_block(tmp_path / "dspark", BlockCase(format=3, **SPARK))
    opened = open_block(None, target)
    assert opened.path == tmp_path / "dspark"
    assert open_block(None, target, rope_theta=5.0).config.rope_theta == 5.0


def test_a_drafter_in_a_targets_repository_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only when it is asked for, at the commit of the target."""
    asked = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.append((repo_id, options["revision"], options["allow_patterns"]))
        if len(asked) == 1:
            write_block(tmp_path / "snapshots/abc/dspark", BlockCase(format=3, **SPARK))
        return str(tmp_path / "snapshots/abc")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    target = dataclasses.replace(target_at(tmp_path / "snapshots/abc"), name="owner/name")
    assert open_block(None, target).path == tmp_path / "snapshots/abc/dspark"
    assert open_block(None, target).config.num_drafts == 3
    files = ("*.json", "*.jinja", "*.safetensors", "mask_embedding.pt")
    wanted = [f"dspark/{name}" for name in files]
    assert asked == [("owner/name", "abc", wanted)] * 2


MARKOV = {"markov_head": "rnn", "markov_rank": 4}
EXPORTED: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash anchor-first": {"anchor_first": True},
    "sliding": {"windows": (0, 8), "causal": (False, True)},
    "sliding non-causal": {"windows": (8, 8)},
    "causal": {"causal": (True, True)},
    "bias": {"qkv_bias": True, "output_bias": True},
    "reduced": {"draft_vocab_size": 50, "has_own_lm_head": True},
    "dspark": {
        "checkpoint_format": "DSpark of speculators",
        "markov_head": "rnn",
        "markov_rank": 4,
        "has_confidence_head": True,
        "confidence_with_markov": True,
        "anchor_first": True,
    },
}


DFLASH = BlockConfig(
    checkpoint_format="DFlash of speculators",
    vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    hidden_size=HIDDEN,
    target_hidden_size=HIDDEN,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    feature_layers=(-1, 3),
    num_drafts=5,
    anchor_first=False,
    mask_token_id=7,
    max_position_embeddings=512,
)


@pytest.mark.parametrize("name", EXPORTED)
def test_exported_drafters_open_again(tmp_path: Path, name: str) -> None:
    config = dataclasses.replace(DFLASH, **EXPORTED[name])
    flat = FlatModel.of(partial(BlockDraft, config))
    weights = dict(zip(flat.names, map(np.asarray, random_weights(flat, 2)), strict=True))
    ends = (64, 96)
    kernels = [weights[f"layers.{i}.attention.qkv.kernel"] for i in range(2)]
    _, keys, values = zip(*(np.split(x, ends, axis=1) for x in kernels), strict=True)
    weights["context.kernel"] = np.concatenate((*keys, *values), axis=1)
    export_draft(tmp_path / "published", config, weights)
    opened = open_block(tmp_path / "published", target_at(tmp_path))
    assert opened.config == config
    loaded = opened.load_weights()
    assert loaded.keys() == weights.keys()
    for key, value in weights.items():
        np.testing.assert_array_equal(loaded[key], value, err_msg=key)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"windows": (4, 8)}, "windows=(4, 8)"),
        ({"causal": (True, False)}, "causal=(True, False)"),
        ({"windows": (4, 0), "causal": (False, True)}, "causal=(False, True)"),
        ({"qkv_bias": True}, "output_bias=False"),
        ({"output_bias": True}, "output_bias=True"),
        ({"qk_norm": False}, "qk_norm=False"),
        ({"has_own_lm_head": True}, "has_own_lm_head=True"),
        (MARKOV | {"confidence_with_markov": True}, "confidence_with_markov=True"),
        ({"rope_scaling": RopeScaling(rope_type="linear", low_freq_factor=3.0)}, "rope_scaling="),
        ({"target_hidden_size": 32}, "hidden_size=48 differs from the target's 32"),
    ],
)
def test_only_what_the_format_expresses_is_exported(
    tmp_path: Path, changes: dict[str, Any], name: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(name)):
        export_draft(tmp_path, dataclasses.replace(DFLASH, **changes), {})
    assert not list(tmp_path.iterdir())


def test_a_refused_export_names_its_output(tmp_path: Path) -> None:
    path = tmp_path / "draft"
    with pytest.raises(ValueError, match=re.escape(f"{path}/config.json: hidden_act='foo'")):
        export_draft(path, dataclasses.replace(DFLASH, activation="foo"), {})
    assert not path.exists()


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"windows": (1,)}, r"windows=\(1,\) must have one value for each"),
    ({"feature_layers": ()}, "needs feature_layers"),
    ({"num_drafts": 64}, "num_drafts=64 must be an integer from 1 to 63"),
    ({"draft_vocab_size": 50}, "needs its own lm_head"),
    ({"draft_vocab_size": 0}, "draft_vocab_size=0"),
    ({"markov_head": "other", "markov_rank": 4}, "markov_head_type='other'"),
    ({"markov_rank": 4}, "markov_rank=4 must be above 0 if"),
    ({"has_confidence_head": True, "confidence_with_markov": True}, "needs a markov_rank"),
)


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_configurations_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DFLASH, **changes)
