"""The configuration of adaptive speculation, with settings per range (slot) of batch sizes."""

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, TypeAlias

from msgspec import Meta

from specjax.checks import Natural, Positive, annotations, check_integer, convert, refused
from specjax.json_file import read_object
from specjax.types import DraftShape

_BATCH_SIZE = re.compile("[1-9][0-9]{0,8}")
# the steps of each policy's default tiers, used if the configuration has no candidates
DEFAULT_CANDIDATES = {"ema": (1, 3, 7), "budget": (0, 1, 3, 7)}
# rows of the smallest tier that the budget policy also runs packed
LEAST_PACKED_NODES = 5
# On a GPU, packed rounds need weights of this size. Smaller models gain nothing, and confidences of
# drafts cost them time: 0.3 of 1.4 ms with seven drafts and eight requests (SmolLM2-135M, H100).
LEAST_PACKED_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class AdaptiveSlot:
    """Tiers and thresholds for batches of at least ``min_batch_size`` rows, padding included.

    docs/adaptive_decoding.md explains every key. All keys except ``candidate_steps`` are for the
    EMA policy. Without candidates, the policy's default applies. Candidates ascend, and so do their
    ``tiers``, which a resolved configuration has.

    Raises ValueError with the key, its value and the limit.
    """

    min_batch_size: Positive = 1
    candidate_steps: tuple[int, ...] = ()
    ema_alpha: Annotated[float, Meta(gt=0, le=1)] = 0.2
    warmup_batches: Natural = 10
    update_interval: Positive = 5
    down_hysteresis: float = -0.25
    up_hysteresis: float = 0.0
    max_probe_interval: Positive = 320
    tiers: tuple[DraftShape, ...] = ()

    def __post_init__(self) -> None:
        for name in ("min_batch_size", *_KEYS):
            if (value := getattr(self, name)) != ():
                object.__setattr__(self, name, _check(name, value))
        if self.up_hysteresis < self.down_hysteresis:
            raise ValueError(
                f"up_hysteresis={self.up_hysteresis!r} must be at least "
                f"down_hysteresis={self.down_hysteresis!r}, or the tier would oscillate"
            )


# keys of a slot in the configuration file
_KEYS = tuple(f.name for f in fields(AdaptiveSlot) if f.name not in ("min_batch_size", "tiers"))


def _check(name: str, value: Any) -> Any:
    if name == "policy":
        if value not in tuple(DEFAULT_CANDIDATES):
            raise refused(name, value, f"must be one of {sorted(DEFAULT_CANDIDATES)}")
        return value
    if name != "candidate_steps":
        return convert(name, value, annotations(AdaptiveSlot)[name])
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise refused(name, value, "must be a non-empty list of integers")
    return tuple(sorted({check_integer(f"{name}={value!r}: a step", v, at_least=0) for v in value}))


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig:
    """A policy, and one slot per range of batch sizes; the first also serves smaller batches.

    The policy is ``"ema"``, ``"budget"``, or ``None`` to let the caller choose. Slots must ascend.
    """

    slots: tuple[AdaptiveSlot, ...] = (AdaptiveSlot(),)
    policy: str | None = None

    def __post_init__(self) -> None:
        sizes = [slot.min_batch_size for slot in self.slots]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError(f"slots must ascend by min_batch_size and not be empty; got {sizes}")
        if self.policy is not None:
            _check("policy", self.policy)

    def resolve(self, policy: str, tiers: Iterable[DraftShape] = ()) -> "AdaptiveConfig":
        """Return a copy with ``policy``, with its default candidates if none are set, and tiers.

        A candidate number of steps selects the tiers in ``tiers`` with as many steps; without
        ``tiers``, a chain of that length. Default candidates without a tier are dropped, but one
        with drafts must remain. Raises ValueError if a named one has none or the policy differs.
        """
        if self.policy not in (None, policy):
            raise ValueError(
                f"the configuration sets policy={self.policy!r}, but the engine was given "
                f"{policy=}; make them equal"
            )
        tiers = sorted(set(tiers))
        # block drafters also verify whole blocks
        default = {*DEFAULT_CANDIDATES[policy], *(tier.steps for tier in tiers[-1:] if tier.block)}
        numbers = [slot.candidate_steps or default for slot in self.slots]
        tiers = tiers or sorted({DraftShape.chain(n) for steps in numbers for n in steps})
        slots = []
        for slot, steps in zip(self.slots, numbers, strict=True):
            selected = tuple(tier for tier in tiers if tier.steps in steps)
            available = tuple(tier.steps for tier in selected)
            missing = sorted(set(steps) - set(available))
            if missing and (slot.candidate_steps or not any(available)):
                raise ValueError(f"candidate_steps={missing} have no tier; available {tiers=}")
            slots.append(replace(slot, candidate_steps=available, tiers=selected))
        return AdaptiveConfig(slots=tuple(slots), policy=policy)

    def packed_tiers(
        self, deepest: DraftShape, batch: int, weight_bytes: int | None
    ) -> tuple[DraftShape, ...]:
        """The packed tier of the budget policy: the deepest tier with 5/8 of its verified rows.

        ``batch`` is the largest bucket; ``weight_bytes`` are those of a GPU, ``None`` on a CPU.
        """
        is_possible = self.policy == "budget" and deepest.nodes >= LEAST_PACKED_NODES and batch > 1
        if not is_possible or (weight_bytes is not None and weight_bytes < LEAST_PACKED_BYTES):
            return ()
        return (deepest._replace(packed=5 * deepest.nodes // 8),)

    def slot_index(self, batch_size: int) -> int:
        """Index of the last slot with ``min_batch_size <= batch_size``, or 0 if there is none."""
        check_integer("batch_size", batch_size, at_least=1)
        return max(0, bisect_right(self.slots, batch_size, key=lambda s: s.min_batch_size) - 1)

    @property
    def tiers(self) -> tuple[DraftShape, ...]:
        return tuple(sorted({tier for slot in self.slots for tier in slot.tiers}))

    @property
    def candidate_steps(self) -> tuple[int, ...]:
        """The candidates of all slots; without defaults until the configuration is resolved."""
        return tuple(sorted({count for slot in self.slots for count in slot.candidate_steps}))


ConfigSource: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | AdaptiveConfig | None


def nearest(tiers: Iterable[DraftShape], initial_steps: int) -> DraftShape:
    """The tier whose steps are nearest to ``initial_steps``; of two equally near, the larger."""
    check_integer("initial_steps", initial_steps, at_least=0)
    return min(tiers, key=lambda tier: (abs(tier.steps - initial_steps), -tier.steps, -tier.nodes))


def load_adaptive_config(source: ConfigSource) -> AdaptiveConfig:
    """Load and validate a configuration; None stands for the defaults.

    ``source`` is a mapping, a string with a JSON object, or the path of a JSON file.
    A key of digits, such as ``"8"``, holds the slot for batches of at least that size. Other keys
    apply to all slots, or without slots to every batch.

    Raises ValueError, which names the file, or the key and its value.
    """
    if isinstance(source, AdaptiveConfig):
        return source
    values, path = read_object({} if source is None else source, "adaptive config ")
    try:
        return _parse(values)
    except ValueError as error:
        if path is None:
            raise
        raise ValueError(f"{path}: {error}") from None


def _parse(values: Mapping[str, Any]) -> AdaptiveConfig:
    sizes = [key for key in values if isinstance(key, str) and _BATCH_SIZE.fullmatch(key)]
    common = {key: value for key, value in values.items() if key not in sizes}
    _check_keys(common, ("policy", *_KEYS))
    common = {key: _check(key, value) for key, value in common.items()}
    policy = common.pop("policy", None)
    slots = [_parse_slot(size, values[size], common) for size in sorted(sizes, key=int)]
    return AdaptiveConfig(slots=tuple(slots) or (AdaptiveSlot(**common),), policy=policy)


def _parse_slot(size: str, values: Any, common: Mapping[str, Any]) -> AdaptiveSlot:
    if not isinstance(values, Mapping):
        raise ValueError(f"batch-size slot {size!r}={values!r} must be an object")
    _check_keys(values, _KEYS, f"{size}.")
    try:
        return AdaptiveSlot(min_batch_size=int(size), **{**common, **values})
    except ValueError as error:
        raise ValueError(f"batch-size slot {size!r}: {error}") from None


def _check_keys(values: Mapping[Any, Any], keys: Iterable[str], where: str = "") -> None:
    for key, value in values.items():
        if key not in keys:
            name = f"{where}{key}" if where else key
            raise ValueError(
                f"unknown key {name!r}={value!r}; allowed: {', '.join(keys)}. At the top level, a "
                "batch size of up to 9 digits, such as '8', is also allowed"
            )
