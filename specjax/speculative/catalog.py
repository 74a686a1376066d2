"""Names of algorithms, found without importing the algorithms or JAX."""

from importlib.metadata import entry_points
from typing import Any

PLAIN = "NONE"
DEFAULT = "EAGLE3"
# names in SGLang (the first) and vLLM
ALIASES = {"NEXTN": "EAGLE", "DRAFT_MODEL": "STANDALONE", "MTP": "MULTI_LAYER_EAGLE"}
# group of entry points: each has an algorithm's name and the module that registers it
GROUP = "specjax.algorithms"

# maps a name to the location of the instance, which is imported on first use
FACTORIES = {
    PLAIN: "specjax.speculative.algorithm:PLAIN",
    "EAGLE": "specjax.speculative.eagle:EAGLE",
    "EAGLE3": "specjax.speculative.eagle:EAGLE3",
    "NGRAM": "specjax.speculative.ngram:NGRAM",
    "STANDALONE": "specjax.speculative.standalone:STANDALONE",
    "MULTI_LAYER_EAGLE": "specjax.speculative.multi_layer_eagle:MULTI_LAYER_EAGLE",
    "DFLASH": "specjax.speculative.block:DFLASH",
    "DSPARK": "specjax.speculative.block:DSPARK",
    "FROZEN_KV_MTP": "specjax.speculative.frozen_kv_mtp:FROZEN_KV_MTP",
}
# names that other packages must not use
RESERVED = (*FACTORIES, *ALIASES)
# algorithms that other packages have registered, as specjax/speculative/registry.py describes
custom: dict[str, Any] = {}


def names() -> tuple[str, ...]:
    """All available names, found without importing packages."""
    installed = (point.name.upper() for point in entry_points(group=GROUP))
    return tuple(dict.fromkeys((*FACTORIES, *custom, *sorted(installed))))


def key_of(name: str | None) -> str:
    """The key of a name in upper or lower case; that of plain decoding for ``None``."""
    key = PLAIN if name is None else name.upper() if isinstance(name, str) else ""
    return ALIASES.get(key, key)


def check_name(name: str | None) -> None:
    """Raise ValueError if neither specjax nor an installed package has an algorithm's name."""
    key = key_of(name)
    if key not in FACTORIES and key not in names():
        choices = f"{list(names())} or None; is the package of this plugin installed?"
        raise ValueError(f"speculative_algorithm={name!r} is not one of {choices}")
