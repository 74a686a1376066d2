import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from specjax.adaptive import AdaptiveConfig, AdaptiveSlot, load_adaptive_config
from specjax.types import DraftShape

WRONG = [
    ({"candidate_steps": []}, "candidate_steps=[]"),
    ({"candidate_steps": None}, "candidate_steps=None"),
    ({"candidate_steps": 3}, "candidate_steps=3"),
    ({"candidate_steps": [1, -1]}, "-1"),
    ({"candidate_steps": [1, True]}, "True"),
    ({"ema_alpha": 0}, "ema_alpha=0"),
    ({"ema_alpha": 1.01}, "ema_alpha=1.01"),
    ({"ema_alpha": None}, "ema_alpha=None"),
    ({"warmup_batches": -1}, "warmup_batches=-1"),
    ({"update_interval": 0}, "update_interval=0"),
    ({"max_probe_interval": 0}, "max_probe_interval=0"),
    ({"down_hysteresis": -math.inf}, "down_hysteresis=-inf"),
    ({"up_hysteresis": math.inf}, "up_hysteresis=inf"),
    ({"up_hysteresis": -0.3}, "up_hysteresis=-0.3"),
    ({"down_hysteresis": 0.1}, "down_hysteresis=0.1"),
    ({"alpha": 0.2}, "'alpha'=0.2"),
    ({"policy": "greedy"}, "policy='greedy'"),
    ({"policy": None}, "policy=None"),
    ({"budget": {"probe_budget": 0.02}}, "unknown key 'budget'={'probe_budget': 0.02}"),
    ({"strategy": "ema"}, "unknown key 'strategy'='ema'"),
    ({"ceiling_coeff": 1.5}, "unknown key 'ceiling_coeff'=1.5"),
    ({"8": {"strategy": "ema"}}, "unknown key '8.strategy'='ema'"),
    ({"8": []}, "slot '8'=[]"),
    ({"0": {}}, "unknown key '0'={}"),
    ({"08": {}}, "unknown key '08'={}"),
    ({"1" * 10: {}}, "unknown key '1111111111'={}"),
    ({"-8": {}}, "'-8'"),
    ({"٣": {}}, "'٣'"),
    ({"1": {}, "8": {"update_interval": 0}}, "slot '8': update_interval=0"),
    ({"1": {}, "8": {"interval": 4}}, "'8.interval'=4"),
    ({"8": {"policy": "ema"}}, "'8.policy'='ema'"),
    ({"8": {"16": {}}}, "'8.16'"),
    ({"ema_alpha": 5, "1": {"ema_alpha": 0.2}}, "ema_alpha=5"),
    ({"candidate_steps": [-1], "1": {"candidate_steps": [1]}}, "-1"),
    ({"up_hysteresis": "0", "1": {"up_hysteresis": 0.2}}, "up_hysteresis='0'"),
    ({"up_hysteresis": 0.1, "1": {}, "8": {"down_hysteresis": 0.2}}, "slot '8': up_hysteresis=0.1"),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=[str(w[0])[:40] for w in WRONG])
def test_a_wrong_value_is_named_in_a_file_as_in_a_mapping(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    path = tmp_path / "adaptive.json"
    path.write_text(json.dumps(values))
    for source in (values, json.dumps(values), path, str(path)):
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            load_adaptive_config(source)
        assert (str(path) in str(caught.value)) == (source in (path, str(path)))


def test_keys_of_mappings_are_strings() -> None:
    with pytest.raises(ValueError, match="unknown key 8="):
        load_adaptive_config({8: {}})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "text", ["", "[1]", "{", "\xff", '{"1": {}, "1": {}}', "[" * 100_000, '{"a": ' + "1" * 5000]
)
def test_a_file_without_a_json_object_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "adaptive.json"
    path.write_bytes(text.encode("latin-1"))
    for broken in (path, tmp_path, tmp_path / "missing.json"):
        with pytest.raises(ValueError, match=broken.name):
            load_adaptive_config(broken)


def test_a_string_that_begins_with_a_brace_is_json() -> None:
    assert load_adaptive_config(' {"policy": "budget"}').policy == "budget"
    for text in ('{"policy": budget}', "{", '{"1": {}, "1": {}}'):
        with pytest.raises(ValueError, match=r"adaptive config '\{.* is not valid JSON: "):
            load_adaptive_config(text)


def test_an_impossible_file_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'a\\x00b' "):
        load_adaptive_config("a\0b")


def test_thresholds_are_ordered_within_a_slot() -> None:
    config = load_adaptive_config({"up_hysteresis": -0.5, "1": {"down_hysteresis": -0.6}})
    assert (config.slots[0].down_hysteresis, config.slots[0].up_hysteresis) == (-0.6, -0.5)


def test_other_sources_are_refused() -> None:
    with pytest.raises(ValueError, match="must be a path or a mapping"):
        load_adaptive_config(5)  # type: ignore[arg-type]


def test_candidates_are_sorted_and_unique() -> None:
    config = load_adaptive_config({"candidate_steps": [7, 1, 3, 1]})
    assert config.slots[0].candidate_steps == (1, 3, 7)
    assert AdaptiveSlot(candidate_steps=(7, 1, 7)).candidate_steps == (1, 7)
    with pytest.raises(ValueError, match=r"candidate_steps=\(1, -7\)"):
        AdaptiveSlot(candidate_steps=(1, -7))


def test_equal_hysteresis_is_allowed() -> None:
    (slot,) = load_adaptive_config({"up_hysteresis": 1, "down_hysteresis": 1}).slots
    assert (slot.up_hysteresis, slot.down_hysteresis) == (1, 1)


def test_slots_inherit_common_keys() -> None:
    config = load_adaptive_config(
        {
            "32": {"candidate_steps": [0, 1]},
            "ema_alpha": 0.5,
            "4": {"ema_alpha": 0.25},
            "policy": "ema",
        }
    )
    assert config == AdaptiveConfig(
        slots=(
            AdaptiveSlot(min_batch_size=4, ema_alpha=0.25),
            AdaptiveSlot(min_batch_size=32, ema_alpha=0.5, candidate_steps=(0, 1)),
        ),
        policy="ema",
    )
    assert [config.slot_index(n) for n in (1, 4, 31, 32, 33)] == [0, 0, 0, 1, 1]
    with pytest.raises(ValueError, match="batch_size=0"):
        config.slot_index(0)
    resolved = config.resolve("ema")
    assert [slot.candidate_steps for slot in resolved.slots] == [(1, 3, 7), (0, 1)]
    assert resolved.candidate_steps == (0, 1, 3, 7)
    assert config.candidate_steps == (0, 1)


def test_default_candidates_without_a_tier_are_dropped() -> None:
    config = load_adaptive_config({"1": {}, "8": {"candidate_steps": [0, 5]}})
    tiers = [DraftShape.chain(steps) for steps in (0, 1, 3, 5)]
    assert [s.candidate_steps for s in config.resolve("ema", tiers).slots] == [(1, 3), (0, 5)]
    for steps, missing in (((0, 1, 3), [5]), ((0, 5), [1, 3, 7])):
        with pytest.raises(ValueError, match=re.escape(f"candidate_steps={missing} have no tier")):
            config.resolve("ema", map(DraftShape.chain, steps))


def test_a_policy_refuses_the_configuration_of_another() -> None:
    assert load_adaptive_config({}).resolve("budget").candidate_steps == (0, 1, 3, 7)
    with pytest.raises(ValueError, match="policy='budget'"):
        load_adaptive_config({"policy": "budget"}).resolve("ema")


def test_no_configuration_means_the_default() -> None:
    assert load_adaptive_config(None) == load_adaptive_config({}) == AdaptiveConfig()
    config = AdaptiveConfig()
    assert load_adaptive_config(config) is config


@pytest.mark.parametrize("sizes", [[], [2, 1], [4, 4]])
def test_slots_ascend(sizes: list[int]) -> None:
    slots = tuple(AdaptiveSlot(min_batch_size=size) for size in sizes)
    with pytest.raises(ValueError, match="must ascend"):
        AdaptiveConfig(slots=slots)
