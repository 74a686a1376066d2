"""The configurations of models, frozen and validated."""

import logging
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, NamedTuple

import jax.numpy as jnp

from specjax.checks import check_integer, check_number

logger = logging.getLogger(__name__)

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies: ``linear`` or ``llama3`` (Llama 3.1 and later)."""

    rope_type: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.rope_type not in ("linear", "llama3"):
            raise ValueError(
                f"rope_type={self.rope_type!r} is not supported; supported: 'linear', 'llama3' "
                "(and 'default', without scaling)"
            )
        if not self.factor >= 1.0:
            raise ValueError(f"rope factor={self.factor} must be at least 1.0")
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


class Dtypes(NamedTuple):
    """The data types of a network."""

    weights: jnp.dtype  # matrices; 8 bits mean quantised
    activations: jnp.dtype  # activations, embeddings, norms and biases
    kv: jnp.dtype  # the KV pool


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The sizes of Llama-style decoder layers, for targets and draft heads."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for own in fields(TransformerConfig):
            if own.type is int:
                limit = 1024 if own.name == "num_layers" else None
                check_integer(own.name, getattr(self, own.name), 1, limit)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary embeddings")
        check_number("rms_norm_eps", self.rms_norm_eps, at_least=0.0)
        check_number("rope_theta", self.rope_theta, above=0.0)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not one of {sorted(DTYPES)}")

    @property
    def dtypes(self) -> Dtypes:
        return Dtypes(*[jnp.dtype(DTYPES[self.dtype])] * 3)

    @property
    def rope(self) -> Rope:
        return Rope(self.head_dim, self.rope_theta, self.rope_scaling)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
    """A target language model, or its multi-token prediction modules.

    ``model_type`` is the family in ``specjax/models/registry.py``.
    """

    model_type: str
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def context_limit(self) -> int:
        """Maximum length of a text in tokens; it must not exceed the sliding window."""
        return min(
            self.max_position_embeddings, self.sliding_window or self.max_position_embeddings
        )

    def context_length(self, asked: int | None) -> int:
        """Return ``asked``, or else the model's limit; raise ValueError if ``asked`` exceeds it."""
        limit, longest = self.context_limit, self.max_position_embeddings
        what = f"limit of {limit} (max_position_embeddings)"
        if limit < longest:
            what = f"sliding window of {limit}, beyond which attention is not supported"
            if asked is None:
                text = "context_length set to %d although the model allows %d, because of the %s"
                logger.warning(text, limit, longest, what)
        if asked is not None and asked > limit:
            raise ValueError(
                f"context_length={asked} exceeds the model's {what}; lower context_length"
            )
        return asked or limit

    def within(self, length: int) -> "ModelConfig":
        """The same model for texts of at most ``length`` tokens; drops a window that holds them."""
        if self.sliding_window is None or length > self.sliding_window:
            return self
        return replace(self, sliding_window=None)

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
    target_hidden_size: int
    draft_vocab_size: int
    feature_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("draft_vocab_size", self.draft_vocab_size, 1, self.vocab_size)

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
    qkv_bias: bool = False
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
    windows: tuple[int, ...] = ()  # attention window of each layer; 0, or empty, for none
    causal: tuple[bool, ...] = ()  # whether each layer is causal in the block; if empty, none is
    qkv_bias: bool = False
    output_bias: bool = False
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
            if len(getattr(self, name)) != self.num_layers:
                raise ValueError(
                    f"{name}={getattr(self, name)} must have one value for each of "
                    f"num_layers={self.num_layers}"
                )
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


# maximum number of rows per verify in one attention tile, without the root
MAX_STEPS = 63
# maximum number of rows in a verified tree, including the root
MAX_NODES = 64
