"""Configuration of adaptive speculation: validated values for each batch-size slot."""

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from specjax.checks import check_integer, check_number
from specjax.json_file import read_json

MOST_DIGITS = 9  # of a slot's batch size
# Tiers that a policy chooses from where the configuration names none.
DEFAULT_CANDIDATES = {"ema": (1, 3, 7), "cost": (0, 1, 3, 7)}


@dataclass(frozen=True, kw_only=True)
class AdaptiveSlot:
    """Tiers and thresholds for batches of ``min_batch_size`` rows and more.

    Args:
        min_batch_size: the smallest batch that uses this slot; the next slot's is its end.
        candidate_steps: drafted tokens a round, 0 for no speculation, ascending. ``None`` stands
            for the policy's own default.
        ema_alpha: weight of the newest batch in the moving average, in (0, 1].
        warmup_batches: non-empty batches before the first decision.
        update_interval: non-empty batches between decisions.
        down_hysteresis: added to the threshold for fewer steps; negative makes it harder.
        up_hysteresis: added to the threshold for more steps; not below ``down_hysteresis``.
        max_probe_interval: most rounds that speculation stays off between two probes.

    Raises:
        ValueError: naming the key, its value and the limit.
    """

    min_batch_size: int = 1
    candidate_steps: tuple[int, ...] | None = None
    ema_alpha: float = 0.2
    warmup_batches: int = 10
    update_interval: int = 5
    down_hysteresis: float = -0.25
    up_hysteresis: float = 0.0
    max_probe_interval: int = 320

    def __post_init__(self) -> None:
        check_integer("min_batch_size", self.min_batch_size, at_least=1)
        if self.candidate_steps is not None:
            steps = _candidates(self.candidate_steps)
            if steps != self.candidate_steps:
                raise ValueError(f"candidate_steps={self.candidate_steps!r} must be {steps}")
        alpha = check_number("ema_alpha", self.ema_alpha)
        if not 0.0 < alpha <= 1.0:
            raise ValueError(f"ema_alpha={self.ema_alpha!r} must be above 0 and at most 1")
        check_integer("warmup_batches", self.warmup_batches, at_least=0)
        check_integer("update_interval", self.update_interval, at_least=1)
        check_integer("max_probe_interval", self.max_probe_interval, at_least=1)
        down = check_number("down_hysteresis", self.down_hysteresis)
        up = check_number("up_hysteresis", self.up_hysteresis)
        if up < down:
            raise ValueError(
                f"up_hysteresis={self.up_hysteresis!r} is below "
                f"down_hysteresis={self.down_hysteresis!r}; the tier would oscillate"
            )


@dataclass(frozen=True, kw_only=True)
class CostSettings:
    """Settings of the cost-aware policy, the same for every slot.

    The defaults come from simulations of stationary and changing acceptance with the round times
    of an 8B and a 135M model on an H200.

    Args:
        acceptance_window: rounds over which the weight of old counts falls to 1/e.
        rate_hysteresis: relative gain in tokens a second below which the tier stays.
        probe_budget: share of the time that probes may lose; in (0, 1).
        min_probe_interval: results between two probes at first.
        max_probe_interval: results between two probes after many that failed.
        max_deficit_rounds: loss to plain decoding, in plain rounds, that turns speculation off.
        max_credit_rounds: gain on plain decoding, in plain rounds, that later losses may use.

    Raises:
        ValueError: naming the key, its value and the limit.
    """

    acceptance_window: float = 16.0
    rate_hysteresis: float = 0.02
    probe_budget: float = 0.02
    min_probe_interval: int = 8
    max_probe_interval: int = 64
    max_deficit_rounds: float = 10.0
    max_credit_rounds: float = 40.0

    def __post_init__(self) -> None:
        for key, limit in (("acceptance_window", 1), ("max_deficit_rounds", 0)):
            if not check_number(key, getattr(self, key)) > limit:
                raise ValueError(f"{key}={getattr(self, key)!r} must be above {limit}")
        for key in ("rate_hysteresis", "max_credit_rounds"):
            if check_number(key, getattr(self, key)) < 0:
                raise ValueError(f"{key}={getattr(self, key)!r} must be at least 0")
        if not 0 < check_number("probe_budget", self.probe_budget) < 1:
            raise ValueError(f"probe_budget={self.probe_budget!r} must be above 0 and below 1")
        check_integer("min_probe_interval", self.min_probe_interval, at_least=1)
        check_integer("max_probe_interval", self.max_probe_interval, at_least=1)
        if self.max_probe_interval < self.min_probe_interval:
            raise ValueError(
                f"max_probe_interval={self.max_probe_interval!r} is below "
                f"min_probe_interval={self.min_probe_interval!r}"
            )


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig:
    """Slots in ascending order of batch size, and the policy that uses them.

    Args:
        slots: at least one; the first also serves smaller batches.
        policy: ``"ema"``, ``"cost"``, or ``None`` for the caller's choice.
        cost: settings of the cost-aware policy.
    """

    slots: tuple[AdaptiveSlot, ...] = field(default=(AdaptiveSlot(),))
    policy: str | None = None
    cost: CostSettings = field(default=CostSettings())

    def __post_init__(self) -> None:
        sizes = [slot.min_batch_size for slot in self.slots]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError(f"slots with min_batch_size={sizes} must ascend, one at least")
        if self.policy is not None and self.policy not in DEFAULT_CANDIDATES:
            raise ValueError(f"policy={self.policy!r} is not one of {sorted(DEFAULT_CANDIDATES)}")

    def resolve(self, policy: str) -> "AdaptiveConfig":
        """The same with ``policy`` set and its default candidates filled in.

        Raises:
            ValueError: if the configuration asks for another policy.
        """
        if self.policy not in (None, policy):
            raise ValueError(f"policy={self.policy!r} in the configuration is not {policy!r}")
        slots = tuple(
            replace(slot, candidate_steps=DEFAULT_CANDIDATES[policy])
            if slot.candidate_steps is None
            else slot
            for slot in self.slots
        )
        return replace(self, slots=slots, policy=policy)

    def slot_index(self, batch_size: int) -> int:
        """The last slot whose ``min_batch_size`` is within ``batch_size``, or the first."""
        check_integer("batch_size", batch_size, at_least=1)
        return max(0, bisect_right(self.slots, batch_size, key=lambda s: s.min_batch_size) - 1)

    @property
    def candidate_steps(self) -> tuple[int, ...]:
        """The tiers of all slots of a resolved configuration, ascending."""
        return tuple(sorted({steps for slot in self.slots for steps in slot.candidate_steps or ()}))


SLOT_KEYS = tuple(f.name for f in fields(AdaptiveSlot) if f.name != "min_batch_size")
COST_KEYS = tuple(f.name for f in fields(CostSettings))


def load_adaptive_config(
    source: "str | os.PathLike[str] | Mapping[str, Any] | AdaptiveConfig | None",
) -> AdaptiveConfig:
    """A validated configuration from a JSON file or from values given directly.

    Keys of digits, such as ``"8"``, open a slot for batches of that size and more; keys outside
    of slots are inherited by every slot. Without slots the configuration serves every batch.

    Args:
        source: the path of a JSON object, the object itself, or ``None`` for the defaults.

    Raises:
        ValueError: naming the key and its value, for a file that is not a JSON object, unknown
            keys, types, ranges and orders.
    """
    if source is None:
        return AdaptiveConfig()
    if isinstance(source, AdaptiveConfig):
        return source
    if isinstance(source, Mapping):
        return _parse(source)
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"adaptive config {source!r} is neither a path nor a mapping")
    path = Path(source)
    try:
        values = read_json(path, is_strict=True)
    except OSError as error:
        raise ValueError(f"adaptive config {str(path)!r} cannot be read: {error}") from error
    try:
        return _parse(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _candidates(values: Any) -> tuple[int, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not values:
        raise ValueError(f"candidate_steps={values!r} must be a non-empty list of integers")
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"candidate_steps={values!r} holds {value!r}, not an integer from 0")
    return tuple(sorted(set(values)))


def _parse(values: Mapping[str, Any]) -> AdaptiveConfig:
    slots: dict[int, Mapping[str, Any]] = {}
    common: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(key, str) and key.isascii() and key.isdecimal():
            if key.startswith("0") or len(key) > MOST_DIGITS:
                raise ValueError(
                    f"slot {key[: 2 * MOST_DIGITS]!r} must be a batch size from 1 with at most "
                    f"{MOST_DIGITS} digits, without leading zeros"
                )
            slots[int(key)] = _object(f"slot {key!r}", value)
        elif key == "policy":
            if not isinstance(value, str):
                raise ValueError(f"policy={value!r} is not one of {sorted(DEFAULT_CANDIDATES)}")
            shared[key] = value
        elif key == "cost":
            shared[key] = _cost_settings(_object(key, value))
        else:
            _check_known(key, value, SLOT_KEYS, ("policy", "cost", *SLOT_KEYS))
            common[key] = value
    if not slots:
        return AdaptiveConfig(slots=(_slot(1, common),), **shared)
    for key, value in common.items():
        # also where every slot has its own; the order of the thresholds is that of a whole slot
        if key.endswith("hysteresis"):
            check_number(key, value)
        else:
            _slot(1, {key: value})
    for size, own in slots.items():
        for key, value in own.items():
            _check_known(f"{size}.{key}", value, [f"{size}.{k}" for k in SLOT_KEYS], SLOT_KEYS)
    parsed = []
    for size in sorted(slots):
        try:
            parsed.append(_slot(size, {**common, **slots[size]}))
        except ValueError as error:
            raise ValueError(f"slot {str(size)!r}: {error}") from None
    return AdaptiveConfig(slots=tuple(parsed), **shared)


def _object(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{key}={value!r} must be an object")
    return value


def _check_known(key: Any, value: Any, keys: Sequence[str], shown: Sequence[str]) -> None:
    if key not in keys:
        raise ValueError(
            f"unknown key {key!r}={value!r}; known: {', '.join(shown)}, and outside of slots batch "
            "sizes in digits, such as '8'"
        )


def _cost_settings(values: Mapping[str, Any]) -> CostSettings:
    for key, value in values.items():
        _check_known(f"cost.{key}", value, [f"cost.{k}" for k in COST_KEYS], COST_KEYS)
    return CostSettings(**values)


def _slot(size: int, values: Mapping[str, Any]) -> AdaptiveSlot:
    merged = dict(values)
    if "candidate_steps" in merged:
        merged["candidate_steps"] = _candidates(merged["candidate_steps"])
    return AdaptiveSlot(min_batch_size=size, **merged)
