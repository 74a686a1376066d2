"""Describe a model family, and the checkpoint tensors that make up each weight."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from specjax.config import BlockConfig, DraftConfig, Dtypes, ModelConfig, Rope, TransformerConfig
from specjax.json_file import Fields, Flag, Size
from specjax.models.layers import LayerKind
from specjax.models.rope import rotated_rows
from specjax.models.weights import QuantLayout


@dataclass(frozen=True)
class Part:
    """A checkpoint tensor that fills a slice of a weight; ``shape`` is that of the tensor.

    ``rows`` is the order in which the weight has the tensor's rows, if it differs. ``factor``, a
    power of two, multiplies it.
    """

    name: str
    shape: tuple[int, ...]
    rows: np.ndarray | None = field(default=None, compare=False)
    factor: float = 1.0

    def arranged(self, tensor: np.ndarray) -> np.ndarray:
        """The tensor with its rows in the order of the weight, times the factor."""
        found = tensor if self.rows is None else tensor[self.rows]
        return found if self.factor == 1.0 else found * np.asarray(self.factor, found.dtype)


@dataclass(frozen=True)
class Recipe:
    """How to build a weight: its parts are concatenated on the output axis.

    A transposed weight is ``[in, out]`` and consists of parts ``[out_i, in]``. Any other weight
    concatenates its parts unchanged on the first axis, and ``layout`` cuts the result if it belongs
    to a quantised matrix. ``dtype`` is the dtype of the weight; ``None`` means that of activations.
    """

    parts: tuple[Part, ...]
    transpose: bool = False
    dtype: str | None = None
    layout: QuantLayout | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, before ``layout`` cuts it."""
        width, rest = sum(part.shape[0] for part in self.parts), self.parts[0].shape[1:]
        return (*rest, width) if self.transpose else (width, *rest)


Recipes = Mapping[str, Recipe]
# A quantised matrix X has its scales in X_scale, and for zero points -zero * scale in X_offset.
SCALE, OFFSET = "_scale", "_offset"
# prefix of the tensors of multi-token prediction modules
MTP_PREFIX = "model.mtp_layers."


def draft_recipes(config: DraftConfig) -> Recipes:
    """Recipes for all weights of a draft head, by weight name; tensors have canonical names."""
    size, dtypes, kind = config.hidden_size, config.dtypes, LayerKind.of(config)
    fc_in = config.feature_size + (0 if config.fuses_features else size)
    recipes = linear("fc", {"fc": size}, fc_in, dtypes, bias=config.fc_bias)
    recipes |= vocabulary_recipes(config)
    if config.fuses_features:
        norms = {"input_norm": "midlayer.input_layernorm", "hidden_norm": "midlayer.hidden_norm"}
        norms |= {"norm": "norm", "post_attention_norm": "midlayer.post_attention_layernorm"}
        recipes |= vectors(size, norms) | _projections(config, kind, "", "midlayer.", 2 * size)
        for i in range(1, config.num_layers):
            recipes |= decoder_layer(config, kind, f"layers.{i - 1}.", f"layers.{i}.")
        if config.mask_token_id is not None:
            part = Part("mask_hidden", (1, 1, config.feature_size))
            recipes["mask_hidden"] = Recipe((part,))
        if config.norm_before_fc:
            recipes |= vectors(config.feature_size, {"feature_norm": "input_norm"})
        if config.has_fc_norm:
            each = {f"fc_norms.{i}": f"fc_norm.{i}" for i in range(len(config.feature_layers))}
            recipes |= vectors(config.target_hidden_size, each)
        return recipes
    for i in range(config.num_layers):
        recipes |= decoder_layer(config, kind, f"layers.{i}.", f"layers.{i}.")
    del recipes["layers.0.input_norm.scale"]  # the first layer has no input norm
    return recipes


def draft_kinds(config: DraftConfig | BlockConfig) -> tuple[LayerKind, ...]:
    """The kinds of a draft's layers, which differ only in their windows."""
    windows = config.windows or (0,) * config.num_layers
    return tuple(LayerKind.of(config, window=window or None) for window in windows)


def vocabulary_recipes(config: DraftConfig | BlockConfig) -> dict[str, Recipe]:
    """Recipes for a draft's own embeddings, output head and vocabulary map."""
    recipes, size = dict[str, Recipe](), config.hidden_size
    if config.has_own_embedding:
        part = Part("embed_tokens.weight", (config.vocab_size, size))
        recipes["embedding.table"] = Recipe((part,))
    if config.has_own_lm_head and not config.ties_lm_head:
        head = {"lm_head": config.draft_vocab_size}
        recipes |= linear("lm_head", head, size, config.dtypes)
    if config.draft_vocab_size != config.vocab_size:
        recipes["d2t"] = Recipe((Part("d2t", (config.draft_vocab_size,)),), dtype="int32")
    return recipes


def vectors(size: int, names: Mapping[str, str]) -> dict[str, Recipe]:
    """Recipes for norm scales ``[size]``; ``names`` maps weight names to tensor names."""
    return {
        f"{flat}.scale": Recipe((Part(f"{name}.weight", (size,)),)) for flat, name in names.items()
    }


def linear(
    flat: str, parts: Mapping[str, int], in_size: int, dtypes: Dtypes, *, bias: bool = False
) -> dict[str, Recipe]:
    """Recipes for a projection; ``parts`` maps its stored projections to their output widths."""
    kernels = tuple(Part(f"{name}.weight", (size, in_size)) for name, size in parts.items())
    recipes = {f"{flat}.kernel": Recipe(kernels, transpose=True)}
    if (format := dtypes.quantization) is not None:
        layout = QuantLayout.of(format, in_size, sum(parts.values()))
        names = {"scale": (SCALE, "float32" if format.group is None else None)}
        if format.has_zeros:
            names["offset"] = OFFSET, "float32"
        recipes = {f"{flat}.kernel.values": Recipe(kernels, dtype=format.dtype.name, layout=layout)}
        for leaf, (suffix, dtype) in names.items():
            stored = tuple(
                Part(f"{name}.weight{suffix}", (size, layout.parts * layout.groups))
                for name, size in parts.items()
            )
            recipes[f"{flat}.kernel.{leaf}"] = Recipe(stored, dtype=dtype, layout=layout)
    if bias:
        biases = tuple(Part(f"{name}.bias", (size,)) for name, size in parts.items())
        recipes[f"{flat}.bias"] = Recipe(biases)
    return recipes


def decoder_layer(
    config: TransformerConfig, kind: LayerKind, flat: str, prefix: str
) -> dict[str, Recipe]:
    """Recipes for the weights of a target layer, with the tensor names of most families."""
    before = {"input_norm": "input", "post_attention_norm": "post_attention"}
    if kind.post_norm:
        before["post_attention_norm"] = "pre_feedforward"
    after = {"attention_output_norm": "post_attention", "mlp_output_norm": "post_feedforward"}
    norms = (before if kind.pre_norm else {}) | (after if kind.post_norm else {})
    names = {flat + ours: f"{prefix}{theirs}_layernorm" for ours, theirs in norms.items()}
    recipes = vectors(config.hidden_size, names)
    recipes |= _projections(config, kind, flat, prefix, config.hidden_size)
    if kind.sinks:
        part = Part(f"{prefix}self_attn.sinks", (config.num_heads,))
        recipes[f"{flat}attention.sinks"] = Recipe((part,))
    return recipes


def _projections(
    config: TransformerConfig, kind: LayerKind, flat: str, prefix: str, in_size: int
) -> dict[str, Recipe]:
    size, inner, dtypes = config.hidden_size, config.intermediate_size, kind.dtypes.without
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    widths = {"q": q_size, "k": kv_size, "v": kv_size}
    qkv = {f"{prefix}self_attn.{letter}_proj": width for letter, width in widths.items()}
    gate_up = {f"{prefix}mlp.{name}_proj": inner for name in ("gate", "up")}
    output, down = {f"{prefix}self_attn.o_proj": size}, {f"{prefix}mlp.down_proj": size}
    norms: dict[str, Recipe] = {}
    if kind.qk_norm or kind.joint_qk_norm:
        for x, width in ("q", q_size), ("k", kv_size):
            name = {f"{flat}attention.{x}_norm": f"{prefix}self_attn.{x}_norm"}
            norms |= vectors(config.head_dim if kind.qk_norm else width, name)
    joined = linear(f"{flat}attention.qkv", qkv, in_size, dtypes("qkv"), bias=kind.qkv_bias)
    if config.rotary_dim is not None:
        rotated(config, joined)
    return (
        joined
        | linear(f"{flat}attention.output", output, q_size, dtypes("output"), bias=kind.output_bias)
        | linear(f"{flat}mlp.gate_up", gate_up, size, dtypes("gate_up"), bias=kind.mlp_bias)
        | linear(f"{flat}mlp.down", down, inner, dtypes("down"), bias=kind.mlp_bias)
        | norms
    )


def scaled_kv(
    recipes: dict[str, Recipe], flat: str, kind: LayerKind, exponents: tuple[int, int]
) -> None:
    """Make a layer's attention store keys and values divided by powers of two.

    Its queries and its output projection are multiplied instead, so that its output is the same. A
    layer whose file has queries, keys and values in one tensor, or a norm of keys with an offset,
    stores them as they are.
    """
    key, value = (2.0**exponent for exponent in exponents)
    has_norms = kind.qk_norm or kind.joint_qk_norm
    if any(len(r.parts) == 1 for name, r in recipes.items() if name.startswith(f"{flat}qkv.")):
        return
    if has_norms and kind.norm_offset:
        key = 1.0
    factors = {
        "qkv": (1.0, 1.0, 1 / value) if has_norms else (key, 1 / key, 1 / value),
        "output": (value,),
        "q_norm": (key,),
        "k_norm": (1 / key,),
    }
    for weight, recipe in recipes.items():
        name = weight.removeprefix(flat)
        own = factors.get(name.partition(".")[0])
        # the values of a quantised matrix have scales, which are multiplied
        if own is None or name.endswith(".values") or name == "output.bias":
            continue
        pairs = zip(recipe.parts, own, strict=True)
        parts = tuple(replace(part, factor=factor) for part, factor in pairs)
        recipes[weight] = replace(recipe, parts=parts)


def renamed(recipes: Mapping[str, Recipe], names: Mapping[str, str]) -> dict[str, Recipe]:
    """Replace parts of dotted tensor names, all at once."""

    def name_of(part: Part) -> str:
        return ".".join(names.get(word, word) for word in part.name.split("."))

    return {
        flat: replace(recipe, parts=tuple(replace(p, name=name_of(p)) for p in recipe.parts))
        for flat, recipe in recipes.items()
    }


def fused(recipes: dict[str, Recipe], flat: str, name: str) -> None:
    """Read the weights ``flat.*`` from one stored projection ``name`` instead of several."""
    for weight in [weight for weight in recipes if weight.startswith(f"{flat}.")]:
        parts = recipes[weight].parts
        kind, sizes = parts[0].name.rpartition(".")[2], [part.shape[0] for part in parts]
        starts = np.cumsum([0, *sizes[:-1]])
        orders = [
            np.arange(n) if p.rows is None else p.rows for n, p in zip(sizes, parts, strict=True)
        ]
        rows = None
        if any(part.rows is not None for part in parts):
            rows = np.concatenate(
                [start + order for start, order in zip(starts, orders, strict=True)]
            )
        joined = Part(f"{name}.{kind}", (sum(sizes), *parts[0].shape[1:]), rows)
        recipes[weight] = replace(recipes[weight], parts=(joined,))


def rotated(
    config: TransformerConfig, recipes: dict[str, Recipe], *, interleaved: bool = False
) -> None:
    """Reorder the stored queries and keys of a layer as the rotation expects them."""
    dim, counts = config.head_dim, (config.num_heads, config.num_kv_heads)
    size = dim if config.rotary_dim is None else config.rotary_dim
    orders = [rotated_rows(n, dim, size, interleaved=interleaved) for n in counts]
    for weight in [weight for weight in recipes if ".qkv." in f".{weight}"]:
        query, key, value = recipes[weight].parts
        parts = (replace(query, rows=orders[0]), replace(key, rows=orders[1]), value)
        recipes[weight] = replace(recipes[weight], parts=parts)


def alike(config: ModelConfig, **differences: Any) -> tuple[LayerKind, ...]:
    """Describe layers that differ only in their windows and rotary embeddings."""
    options = {"scale": config.attention_scale, "softcap": config.attention_softcap}

    def kind(window: int, rope: Rope | None) -> LayerKind:
        own = {"window": window or None, "rope": rope or config.rope}
        return LayerKind.of(config, **{**options, **own, **differences})

    windows = config.windows or (0,) * config.num_layers
    ropes = config.layer_ropes or (None,) * config.num_layers
    return tuple(kind(*pair) for pair in zip(windows, ropes, strict=True))


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family: its configuration reader, layer kinds and tensor recipe."""

    architecture: str  # the transformers class whose weights the family reads
    # reads the fields of a configuration that only this family has
    read: Callable[[Fields], dict[str, Any]]
    layers: Callable[[ModelConfig], tuple[LayerKind, ...]] = alike
    # recipe(config, kind, flat, prefix): the weights of a layer. The names of weights begin with
    # ``flat``, and the names of stored tensors with ``prefix``
    recipe: Callable[[ModelConfig, LayerKind, str, str], dict[str, Recipe]] = decoder_layer
    config: type[ModelConfig] = ModelConfig
    defaults: Mapping[str, Any] = field(default_factory=dict)  # keys that config.json may omit
    # order of query and key rows in GGUF files: "halves" or "interleaved"; None: not supported
    gguf: str | None = None


def attention_biases(config: Fields) -> dict[str, Any]:
    has_bias = config.get("attention_bias", Flag, False)
    return {"qkv_bias": has_bias, "output_bias": has_bias}


def sliding_layers(config: Fields, slides: Callable[[int], bool]) -> list[bool]:
    """Read which layers have a window; ``slides(i)`` decides without ``layer_types``."""
    kinds, count = config.get("layer_types", list[str], []), config.get("num_hidden_layers", Size)
    if unknown := sorted(set(kinds) - {"sliding_attention", "full_attention"}):
        raise config.wrong("layer_types", f"has kinds {unknown} that are not supported")
    if kinds and len(kinds) != count:
        raise config.wrong("layer_types", f"must name the kinds of {count} layers")
    return [kind == "sliding_attention" for kind in kinds] or [slides(i) for i in range(count)]


def layer_windows(config: Fields, slides: Callable[[int], bool]) -> dict[str, Any]:
    """Read the windows of layers, as for :func:`sliding_layers`."""
    window, are = config.get("sliding_window", Size, 0), sliding_layers(config, slides)
    if not window or not any(are):
        return {}
    return {"windows": tuple(window if is_local else 0 for is_local in are)}
