"""Tiny random block drafters as published: DFlash and DSpark files in every spelling.

Each case states what a file means (the fields of :class:`BlockCase`) and how it spells that (the
last fields). Formats are numbered as in docs/algorithms.md: 1 DFlash, 2 and 3 DeepSpec without and
with a Markov head, 4 DSpark of SpecForge, 5 and 6 DFlash and DSpark of speculators.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from specjax.checkpoints import TargetCheckpoint
from specjax.config import ModelConfig
from specjax.testing import letter_tokenizer
from specjax.testing.files import write_folder

from .checkpoint_files import normal, write_sharded

VOCAB, HIDDEN, TARGET_LAYERS = 131, 48, 7
MODEL = ModelConfig(
    model_type="qwen3",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=64,
    num_layers=TARGET_LAYERS,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=512,
)
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class BlockCase:
    """A drafter of ``drafts`` tokens per round, and the spelling of its files.

    ``taps`` are the target layers whose outputs it reads, counted from 0; -1 is the embedding.
    ``windows`` and ``causal`` have one entry per draft layer. ``confidence`` is None, ``"plain"``
    (reads the hidden state) or ``"markov"`` (and the embedding of the previous token).
    ``add``, ``move`` and ``drop`` edit the usual config.json; keys are dotted paths.
    """

    format: int
    drafts: int = 3
    is_fill_in: bool | None = None
    taps: tuple[int, ...] = (1, 4)
    mask: int = 129
    vocab: int = VOCAB
    draft_vocab: int | None = None
    target_hidden: int = HIDDEN
    target_layers: int = TARGET_LAYERS
    hidden: int = HIDDEN
    inner: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 2
    eps: float = 1e-5
    theta: float = 1e6
    windows: tuple[int | None, ...] = ()
    causal: tuple[bool, ...] = ()
    bias: bool = False
    markov: str | None = None
    rank: int = 6
    confidence: str | None = None
    dtype: str = "float32"
    add: Mapping[str, Any] = field(default_factory=dict)
    move: Mapping[str, str] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    prefix: str = ""
    rename: Mapping[str, str] = field(default_factory=dict)
    copies: tuple[str, ...] = ()
    shards: int = 1

    @property
    def fills_in(self) -> bool:
        """Whether row j predicts its own position, so that the anchor's row predicts nothing."""
        return self.format in (1, 5) if self.is_fill_in is None else self.is_fill_in

    @property
    def rows(self) -> int:
        return self.drafts + self.fills_in

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        return self.windows or (None,) * self.layers

    @property
    def layer_causal(self) -> tuple[bool, ...]:
        return self.causal or (False,) * self.layers


def random_tensors(case: BlockCase, target: Mapping[str, np.ndarray], seed: int) -> Tensors:
    """Random tensors under their usual names: sharp attention, uneven norms, large biases.

    ``target`` has ``embed_tokens.weight`` and ``lm_head.weight``, for copies.
    """
    rng = np.random.default_rng(seed)
    noise = partial(normal, rng)

    def matrix(rows: int, columns: int, scale: float = 1.5) -> np.ndarray:
        return noise(rows, columns) * np.float32(scale * columns**-0.5)

    def norm(size: int) -> np.ndarray:
        return 1 + np.float32(0.3) * noise(size)

    h, r, dim = case.hidden, case.rank, case.head_dim
    width = {"q": case.heads * dim, "k": case.kv_heads * dim, "v": case.kv_heads * dim}
    vocab = case.draft_vocab or case.vocab
    out: Tensors = {
        "fc.weight": matrix(h, len(case.taps) * case.target_hidden),
        "hidden_norm.weight": norm(h),
        "norm.weight": norm(h),
    }
    for i in range(case.layers):
        layer = f"layers.{i}."
        for letter, rows in width.items():
            out[f"{layer}self_attn.{letter}_proj.weight"] = matrix(rows, h)
            if case.bias:
                out[f"{layer}self_attn.{letter}_proj.bias"] = 0.5 * noise(rows)
        out[f"{layer}self_attn.o_proj.weight"] = matrix(h, width["q"])
        if case.bias:
            out[f"{layer}self_attn.o_proj.bias"] = 0.5 * noise(h)
        for name, size in (
            ("self_attn.q_norm", dim),
            ("self_attn.k_norm", dim),
            ("input_layernorm", h),
            ("post_attention_layernorm", h),
        ):
            out[f"{layer}{name}.weight"] = norm(size)
        out[f"{layer}mlp.gate_proj.weight"] = matrix(case.inner, h)
        out[f"{layer}mlp.up_proj.weight"] = matrix(case.inner, h)
        out[f"{layer}mlp.down_proj.weight"] = matrix(h, case.inner)
    if case.markov:
        # terms as large as the logits, so that an error in one changes tokens
        out["markov_head.markov_w1.weight"] = noise(case.vocab, r)
        out["markov_head.markov_w2.weight"] = matrix(vocab, r, 4)
    if case.markov == "gated":
        out["markov_head.gate_proj.weight"] = matrix(r, h + r, 2)
        out["markov_head.gate_proj.bias"] = noise(r)
    if case.markov == "rnn":
        out["markov_head.joint_proj.weight"] = matrix(3 * r, 2 * r + h, 2)
        out["markov_head.joint_proj.bias"] = noise(3 * r)
    if case.confidence:
        out["confidence_head.proj.weight"] = matrix(1, h + r * (case.confidence == "markov"))
        out["confidence_head.proj.bias"] = noise(1)
    if case.draft_vocab:
        ids = np.sort(rng.permutation(case.vocab)[: case.draft_vocab])
        out["d2t"] = ids - np.arange(case.draft_vocab)
        out["t2d"] = np.isin(np.arange(case.vocab), ids)
        out["lm_head.weight"] = matrix(case.draft_vocab, h)
    out |= {name: target[name].copy() for name in case.copies}
    float_type = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))
    return {k: x.astype(float_type) if x.dtype.kind == "f" else x for k, x in out.items()}


def published_config(case: BlockCase) -> dict[str, Any]:
    """Contents of ``config.json``."""
    body: dict[str, Any] = {
        "attention_bias": case.bias,
        "head_dim": case.head_dim,
        "hidden_act": "silu",
        "hidden_size": case.hidden,
        "intermediate_size": case.inner,
        "max_position_embeddings": 64,
        "model_type": "qwen3",
        "num_attention_heads": case.heads,
        "num_hidden_layers": case.layers,
        "num_key_value_heads": case.kv_heads,
        "rms_norm_eps": case.eps,
        "rope_scaling": None,
        "rope_theta": case.theta,
        "tie_word_embeddings": False,
        "vocab_size": case.vocab,
    }
    dtype = {"dtype": case.dtype, "transformers_version": "5.3.0"}
    reader = {"mask_token_id": case.mask, "target_layer_ids": list(case.taps)}
    heads = {
        "markov_rank": case.rank if case.markov else 0,
        "enable_confidence_head": case.confidence is not None,
    }
    if case.markov:
        heads["markov_head_type"] = case.markov
    if case.confidence:
        heads["confidence_head_with_markov"] = case.confidence == "markov"
    size = {"block_size": case.rows, "num_target_layers": case.target_layers}
    if case.format == 1:
        names = {"architectures": ["DFlashDraftModel"], "dflash_config": reader}
        config = names | body | size | dtype
    elif case.format in (2, 3):
        names = {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
        config = names | body | size | dtype | reader | heads
    elif case.format == 4:
        nested = {"projector_type": "dspark"} | reader | heads
        names = {"architectures": ["DSparkDraftModel"], "dflash_config": nested}
        config = names | body | size | dtype
    else:
        kind = {5: "dflash", 6: "dspark"}[case.format]
        config = dtype | {
            "architectures": [{5: "DFlashSpeculator", 6: "DSparkSpeculator"}[case.format]],
            "speculators_model_type": kind,
            "speculators_version": "0.9.0",
            "transformer_layer_config": body,
            "draft_vocab_size": case.draft_vocab or case.vocab,
            "block_size": case.rows,
            "aux_hidden_state_layer_ids": [k + 1 for k in case.taps],
            "mask_token_id": case.mask,
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": case.drafts}
                ],
                "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "target"},
            },
        }
        if case.format == 6:
            config |= {"sample_from_anchor": not case.fills_in} | heads
    if case.draft_vocab:
        config["draft_vocab_size"] = case.draft_vocab
    for old, new in case.move.items():
        _set(config, new, _pop(config, old))
    for path, value in case.add.items():
        _set(config, path, value)
    for path in case.drop:
        _pop(config, path)
    return config


def _set(config: dict[str, Any], path: str, value: Any) -> None:
    *folders, key = path.split(".")
    for name in folders:
        config = config.setdefault(name, {})
    config[key] = value


def _pop(config: dict[str, Any], path: str) -> Any:
    *folders, key = path.split(".")
    for name in folders:
        config = config[name]
    return config.pop(key)


def publish(case: BlockCase, tensors: Tensors, path: Path) -> Path:
    """Write the drafter to the directory ``path``."""
    named = {}
    for name, tensor in tensors.items():
        new = next((n + name[len(o) :] for o, n in case.rename.items() if name.startswith(o)), name)
        outside = name in ("d2t", "t2d", "lm_head.weight")
        named[new if outside else case.prefix + new] = tensor
    config = published_config(case)
    if case.shards > 1:
        return write_sharded(path, config, named, case.shards)
    return write_folder(path, config, named)


def _layer_types(*kinds: str, window: int = 4, at: str = "") -> dict[str, Any]:
    types = [{"f": "full_attention", "s": "sliding_attention"}[kind] for kind in "".join(kinds)]
    return {f"{at}layer_types": types, f"{at}sliding_window": window}


LAYER = "transformer_layer_config."
COPIES = ("embed_tokens.weight", "lm_head.weight")
ALIASES = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
_MIXED: dict[str, Any] = {"windows": (4, None), "causal": (True, False)}
SPARK: dict[str, Any] = {"markov": "vanilla", "confidence": "markov"}
_IN_DSPARK = {
    f"dflash_config.{key}": f"dspark_config.{key}"
    for key in ("markov_rank", "markov_head_type", "enable_confidence_head")
}
_TO_TOP = {f"dflash_config.{key}": key for key in ("mask_token_id", "target_layer_ids")}
_RENAMED_THETA = {"rope_theta": "rope_parameters.rope_theta"}

CASES = {
    "1": BlockCase(format=1),
    "1-block-16": BlockCase(format=1, drafts=15),
    "1-one-draft": BlockCase(format=1, drafts=1),
    "1-nested-block-size": BlockCase(format=1, move={"block_size": "dflash_config.block_size"}),
    "1-default-block-size": BlockCase(format=1, drafts=15, drop=("block_size",)),
    "1-top-level": BlockCase(format=1, move=_TO_TOP, drop=("dflash_config",)),
    "1-default-layers": BlockCase(format=1, drop=("dflash_config.target_layer_ids",)),
    "1-default-one-layer": BlockCase(
        format=1, layers=1, taps=(3,), drop=("dflash_config.target_layer_ids",)
    ),
    "1-default-three-layers": BlockCase(
        format=1,
        layers=3,
        taps=(1, 2, 4),
        drop=("dflash_config.target_layer_ids", "num_target_layers"),
    ),
    "1-last-layers": BlockCase(format=1, taps=(0, 5, 6)),
    "1-three-layers-one-tap": BlockCase(format=1, layers=3, taps=(2,)),
    "1-noise-token": BlockCase(
        format=1, mask=3, move={"dflash_config.mask_token_id": "dspark_noise_token_id"}
    ),
    "1-pard-token": BlockCase(format=1, mask=3, move={"dflash_config.mask_token_id": "pard_token"}),
    "1-ptd-token": BlockCase(
        format=1, mask=3, move={"dflash_config.mask_token_id": "ptd_token_id"}
    ),
    "1-mask-zero": BlockCase(format=1, mask=0),
    "1-prefix": BlockCase(format=1, prefix="model."),
    "1-aliases": BlockCase(format=1, rename=ALIASES),
    "1-shards": BlockCase(format=1, shards=3, prefix="model."),
    "1-bfloat16": BlockCase(format=1, dtype="bfloat16"),
    "1-bias": BlockCase(format=1, bias=True),
    "1-rope-parameters": BlockCase(
        format=1,
        move=_RENAMED_THETA,
        add={"rope_parameters.rope_type": "default"},
        drop=("rope_scaling",),
    ),
    "1-default-theta": BlockCase(format=1, theta=10000.0, drop=("rope_theta",)),
    "1-copies": BlockCase(format=1, copies=COPIES),
    "1-reduced": BlockCase(format=1, draft_vocab=50),
    "1-reduced-prefix": BlockCase(format=1, draft_vocab=50, prefix="model.", shards=2),
    "1-other-heads": BlockCase(format=1, heads=6, kv_heads=6, head_dim=8),
    "1-full": BlockCase(format=1, add=_layer_types("ff")),
    "1-sliding": BlockCase(format=1, **_MIXED, add=_layer_types("sf")),
    "1-sliding-wide": BlockCase(
        format=1, windows=(64, None), causal=(True, False), add=_layer_types("sf", window=64)
    ),
    "1-sliding-non-causal": BlockCase(
        format=1, windows=(4, None), add=_layer_types("sf") | {"is_causal": False}
    ),
    "1-causal": BlockCase(format=1, causal=(True, True), add={"is_causal": True}),
    "1-nested-causal": BlockCase(format=1, causal=(True, True), add={"dflash_config.causal": True}),
    "1-nested-non-causal": BlockCase(
        format=1, windows=(None, 4), add=_layer_types("fs") | {"dflash_config.causal": False}
    ),
    "1-use-swa": BlockCase(
        format=1,
        windows=(4, 4),
        add={"dflash_config.use_swa": True, "dflash_config.swa_window_size": 4},
    ),
    "1-two-windows": BlockCase(
        format=1, **_MIXED, add=_layer_types("sf") | {"dflash_config.swa_window_size": 2}
    ),
    "1-theta-of-its-own": BlockCase(format=1, theta=500.0, eps=1e-2),
    "2": BlockCase(format=2, copies=COPIES),
    "2-no-copies": BlockCase(format=2, drafts=7),
    "2-sliding": BlockCase(format=2, **_MIXED, add=_layer_types("sf")),
    "3": BlockCase(format=3, copies=COPIES, **SPARK),
    "3-embedding": BlockCase(format=3, taps=(-1, 3), **SPARK),
    "3-seven": BlockCase(format=3, drafts=7, **SPARK),
    "3-gated": BlockCase(format=3, copies=COPIES, markov="gated", confidence="markov"),
    "3-rnn": BlockCase(format=3, markov="rnn", confidence="markov"),
    "3-no-confidence": BlockCase(format=3, markov="vanilla"),
    "3-plain-confidence": BlockCase(format=3, markov="gated", confidence="plain"),
    "3-unstated-confidence": BlockCase(
        format=3, markov="vanilla", confidence="plain", drop=("confidence_head_with_markov",)
    ),
    "3-unstated-markov": BlockCase(
        format=3, **SPARK, drop=("confidence_head_with_markov", "markov_head_type")
    ),
    "3-prefix": BlockCase(format=3, prefix="model.", shards=2, copies=COPIES, **SPARK),
    "4": BlockCase(format=4, **SPARK),
    "4-top-level": BlockCase(
        format=4,
        markov="gated",
        move=_TO_TOP | {f"dflash_config.{k}": k for k in ("markov_rank", "markov_head_type")},
    ),
    "4-dspark-config": BlockCase(format=4, markov="rnn", move=_IN_DSPARK),
    "4-from-anchor": BlockCase(format=4, **SPARK, add={"dflash_config.sample_from_anchor": True}),
    "4-sliding": BlockCase(format=4, **SPARK, **_MIXED, add=_layer_types("sf")),
    "5": BlockCase(format=5),
    "5-reduced": BlockCase(format=5, draft_vocab=50),
    "5-defaults": BlockCase(
        format=5,
        eps=1e-6,
        theta=10000.0,
        head_dim=128,
        heads=32,
        kv_heads=32,
        drop=tuple(
            LAYER + key
            for key in (
                "attention_bias",
                "head_dim",
                "hidden_act",
                "max_position_embeddings",
                "num_attention_heads",
                "num_key_value_heads",
                "rms_norm_eps",
                "rope_scaling",
                "rope_theta",
                "tie_word_embeddings",
            )
        ),
    ),
    "5-rope-parameters": BlockCase(
        format=5, move={f"{LAYER}rope_theta": f"{LAYER}rope_parameters.rope_theta"}
    ),
    "5-embedding": BlockCase(format=5, taps=(-1, 6)),
    "5-first-layer": BlockCase(format=5, taps=(0, 6)),
    "5-not-from-anchor": BlockCase(format=5, add={"sample_from_anchor": False}),
    "5-sliding": BlockCase(format=5, **_MIXED, add=_layer_types("sf", at=LAYER)),
    "5-sliding-causal": BlockCase(
        format=5,
        **_MIXED,
        add=_layer_types("sf", at=LAYER) | {"sliding_window_non_causal": False},
    ),
    "5-sliding-non-causal": BlockCase(
        format=5,
        windows=(4, None),
        add=_layer_types("sf", at=LAYER) | {"sliding_window_non_causal": True},
    ),
    "5-unstated-vocabulary": BlockCase(format=5, draft_vocab=50, drop=("draft_vocab_size",)),
    "6": BlockCase(format=6, **SPARK),
    "6-fill-in": BlockCase(format=6, is_fill_in=True, **SPARK),
    "6-unstated-anchor": BlockCase(format=6, **SPARK, drop=("sample_from_anchor",)),
    "6-unstated-fill-in": BlockCase(
        format=6, is_fill_in=True, **SPARK, drop=("sample_from_anchor",)
    ),
    "6-reduced": BlockCase(format=6, draft_vocab=50, **SPARK),
    "6-reduced-gated": BlockCase(format=6, draft_vocab=50, markov="gated", shards=2),
    "6-reduced-rnn": BlockCase(format=6, draft_vocab=50, markov="rnn", confidence="plain"),
    "6-no-markov": BlockCase(format=6),
    "6-sliding": BlockCase(format=6, **SPARK, **_MIXED, add=_layer_types("sf", at=LAYER)),
}


def target_at(path: Path, **changes: Any) -> TargetCheckpoint:
    """A target without weights."""
    config = replace(MODEL, **changes)
    return TargetCheckpoint(config, path, None, str(path), letter_tokenizer)  # type: ignore[arg-type]


def write_block(path: Path, case: BlockCase) -> Path:
    """Write a drafter with random tensors."""
    rng = np.random.default_rng(0)
    shared = normal(rng, VOCAB, HIDDEN)
    copies = {"embed_tokens.weight": shared, "lm_head.weight": shared}
    return publish(case, random_tensors(case, copies, seed=1), path)
