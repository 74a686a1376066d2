"""Keys of configurations that change a network: each is read, or refused by name."""

import re
from collections.abc import Sequence
from typing import Any

from specjax.json_file import Fields

# keys that change a network, and the value with which each changes nothing
_ZERO = "attention_sink_bias attn_logit_softcapping final_logit_softcapping rope_interleaved \
use_gemma_norm"
_ONE = "attention_value_scale embedding_multiplier full_attn_mod input_embedding_scale \
is_neox_style logit_scale logits_scaling output_multiplier partial_rotary_factor \
residual_multiplier rope_is_neox_style use_input_layernorm_in_first_layer use_last_layernorm"
NEUTRAL: dict[str, Any] = dict.fromkeys(_ZERO.split(), 0) | dict.fromkeys(_ONE.split(), 1)
# Words in the names of further keys that may change the layers of a draft. Tensors show the others:
# names and shapes of experts, heads, biases and norms must fit.
_WORDS = re.compile(
    r"scal(e|ing)|multiplier|soft_?cap|_bias$|norm|rope|rotary|attn|attention|window|sliding|swa|"
    r"sink|(^|_)act(ivation)?(_|$)|residual|alibi|clip|causal|bidirectional|parallel|expert|gated|"
    r"(^|_)(nope|mup)(_|$)|logit_|^dim_model_base$|^(mlp|ffn)_type$"
)
# of these, 1 changes nothing
_FACTORS = re.compile("scal(e|ing)|multiplier|logit_temperature")
# of these, true or 1 is what the networks do, and false or 0 is a change
_SWITCHES = re.compile(
    r"(is_|use_)?causal(_attention|_mask)?|(use|apply|has|with)_(rope|rotary(_\w+)?|residual|"
    r"(final|last|output|input)_(layer_?)?norm|gated_mlp)|scale_att(n_weights|ention_scores)"
)
# names with such a word that do not change the network, or whose tensors decide
_HARMLESS = re.compile(
    r"^_|dropout|pdrop|implementation|backend|flash|grad|loss|^(use_)?qk_norm$|"
    r"^(attention|qkv)_bias$|"
    r"^max_window_layers$|^parallel_drafting$|(tensor|model|pipeline|data)_parallel"
)


class ReadFields(Fields):
    """Fields that record the keys that were read, those of nested objects too."""

    def __init__(self, values: Any, where: object, keys_read: set[str] | None = None) -> None:
        super().__init__(values, where)
        self.keys = set[str]() if keys_read is None else keys_read

    def get(self, key: str, kind: Any, default: Any = ...) -> Any:
        self.keys.add(key)
        return super().get(key, kind, default)

    def fields(self, key: str) -> "ReadFields":
        nested = super().fields(key)
        return ReadFields(nested.values, nested.where, self.keys)


def refuse_unread(
    sections: Sequence[Fields], keys_read: set[str], head_dim: int, *, of_draft: bool
) -> None:
    """Raise ValueError for a key that was not read and may change the network.

    ``of_draft`` also refuses unknown keys that a word in their name makes likely to change it.
    """
    neutral = NEUTRAL | dict.fromkeys(("rope_dim", "query_pre_attn_scalar"), head_dim)
    neutral["attention_multiplier"] = head_dim**-0.5
    names = "rope_parameters", "rope_scaling"
    ropes = [x.fields(n) for x in sections for n in names if isinstance(x.values.get(n), dict)]
    ropes += [x.fields("full_attention") for x in ropes if "full_attention" in x]
    for section, has_words in [*((x, of_draft) for x in sections), *((x, False) for x in ropes)]:
        for key, value in section.values.items():
            if value is None or key in keys_read:
                continue
            if key == "sliding_window" and section.values.get("use_sliding_window") is False:
                continue
            if key == "layer_types":
                is_refused = not isinstance(value, list) or {*map(str, value)} != {"full_attention"}
            elif key == "sliding_attention":
                is_refused = value != section.values.get("full_attention")
            elif key in neutral:
                is_refused = value != neutral[key]
            else:
                is_word = has_words and _WORDS.search(key) and not _HARMLESS.search(key)
                is_factor = type(value) in (int, float) and _FACTORS.search(key)
                is_neutral = value == 1 if is_factor or _SWITCHES.fullmatch(key) else not value
                is_refused = bool(is_word and not is_neutral)
            if is_refused:
                demand = "is not supported; use another model, or remove it if it has no effect"
                raise section.wrong(key, demand)
