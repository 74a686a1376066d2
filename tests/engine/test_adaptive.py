"""Engines with adaptive drafting: texts, metrics, start-up, and a live climb."""

import json
import logging
import shutil
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import generate_latest

from specjax import Engine
from specjax.adaptive import BudgetPolicy
from specjax.adaptive.cost import CONTEXTS
from specjax.compiling.cache import FOLDER
from specjax.engine import build
from specjax.engine.args import EngineArgs
from specjax.engine.plan import plan_engine
from specjax.runtime import timing
from specjax.types import DraftShape

from ..support.runners import chains

PROMPTS_TINY = ["abc", "specjax!"]
GREEDY = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
SEEDED = GREEDY | {"temperature": 0.9, "sampling_seed": 3}
# moves at every round, down to 0 and up again by probes
JUMPY = {
    "policy": "ema",
    "candidate_steps": [0, 1, 3],
    "ema_alpha": 1.0,
    "warmup_batches": 0,
    "update_interval": 1,
}
COST = {"policy": "budget", "candidate_steps": [0, 1, 3]}
ROUND_TIMES = "round of"


def adaptive(files: Any, config: Any, **changes: Any) -> Engine:
    return files.small(speculative_adaptive=True, speculative_adaptive_config=config, **changes)


@pytest.fixture(scope="module")
def plain_ids(files):
    """Completions of plain decoding, by parameters and prompt."""
    with files.small(speculative=False) as engine:
        return {
            is_seeded: [engine.generate(prompt, params)["output_ids"] for prompt in PROMPTS_TINY]
            for is_seeded, params in ((False, GREEDY), (True, SEEDED))
        }


def samples(engine: Engine) -> dict[str, float]:
    """The engine's metrics by name, without prefix and label."""
    lines = generate_latest(engine.metrics.registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.split("{")[0].removeprefix("specjax:"): float(value) for name, value in pairs}


@pytest.mark.slow
def test_texts_are_plain_and_metrics_agree(files, plain_ids, monkeypatch):
    """The other policy is in the table of tests/differential."""
    # fixed times that make drafts costly, since measured ones depend on the machine's load
    seconds = dict(zip(product(chains(0, 1, 3), [1]), (1.0, 1.3, 1.9), strict=True))
    monkeypatch.setattr(build, "round_seconds", lambda *_: seconds)
    metas = []
    with adaptive(files, COST, speculative_num_steps=0) as engine:
        for is_seeded, params in ((False, GREEDY), (True, SEEDED)):
            outputs = [engine.generate(prompt, params) for prompt in PROMPTS_TINY]
            assert [out["output_ids"] for out in outputs] == plain_ids[is_seeded]
            metas += [out["meta_info"] for out in outputs]
        info = engine.get_server_info()
        metrics = samples(engine)
        # a batch that wants no drafts pays for none
        engine._controller.policy.chosen, used, run = chains(3)[0], [], engine.runner.round
        monkeypatch.setattr(
            engine.runner, "round", lambda slots, tier: used.append(tier) or run(slots, tier)
        )
        plainly = GREEDY | {"speculative": False}
        assert engine.generate(PROMPTS_TINY[0], plainly)["output_ids"] == plain_ids[False][0]
        assert set(used) == set(chains(0))
        used.clear()
        engine.generate(PROMPTS_TINY[0], GREEDY)
        assert set(used) != set(chains(0))
    json.dumps(info)
    (state,) = info["internal_states"]
    figures = state["adaptive"]

    # several tiers ran, and each round counts for its tier
    rounds: dict[str, int] = {}
    for meta in metas:
        for steps, count in meta["spec_rounds_by_steps"].items():
            rounds[steps] = rounds.get(steps, 0) + count
    assert len(rounds) > 1
    assert rounds == {steps: tier["rounds"] for steps, tier in figures["tiers"].items()}
    for meta in metas:
        by_steps = {int(steps): n for steps, n in meta["spec_rounds_by_steps"].items()}
        verifies = sum(n for steps, n in by_steps.items() if steps)
        assert meta["spec_verify_ct"] == verifies
        proposed = sum(steps * n for steps, n in by_steps.items())
        assert proposed - 3 <= meta["spec_num_proposed_drafts"] <= proposed  # cut at the end
        assert meta["spec_num_steps"] in by_steps
        assert meta["spec_num_switches"] >= len(by_steps) - 1
        # prefill gives the first token and a plain round one
        speculated = meta["completion_tokens"] - by_steps.get(0, 0)
        if verifies:
            assert meta["spec_accept_length"] == pytest.approx(speculated / verifies)
    assert metas[-1]["spec_ema_accept_len"] == figures["ema_accept_len"]

    # server info and metrics have the sums
    assert figures["policy"] == "budget"
    assert figures["candidate_steps"] == [0, 1, 3]
    assert figures["speculative_num_steps"] in (0, 1, 3)
    assert figures["num_verify_rounds"] == state["spec_verify_ct"]
    assert figures["switches"] >= sum(meta["spec_num_switches"] for meta in metas)
    assert state["spec_num_proposed_drafts"] == sum(m["spec_num_proposed_drafts"] for m in metas)
    steps = figures["speculative_num_steps"]
    assert info["speculative_num_steps"] == state["speculative_num_steps"] == steps
    assert info["speculative_num_draft_tokens"] == steps + 1
    assert (metrics["spec_num_steps"], metrics["spec_num_draft_tokens"]) == (steps, steps + 1)
    assert metrics["spec_ema_accept_len"] == figures["ema_accept_len"]
    assert metrics["spec_num_switches_total"] == figures["switches"]
    assert metrics["spec_wasted_drafts_total"] == figures["wasted_drafts"]
    assert metrics["spec_plain_rounds_total"] == figures["num_plain_rounds"] == rounds["0"]
    assert metrics["spec_rounds_total"] == sum(rounds.values())
    drafts = sum(steps * rounds.get(str(steps), 0) for steps in (1, 3))
    assert sum(state["spec_verified_drafts"]) == drafts  # in full, also if cut at the end
    assert state["spec_verified_rows"] == drafts + sum(rounds.values())
    assert metrics["spec_realised_tokens_total"] == figures["realised_tokens"] > 0
    assert metrics["spec_expected_tokens_total"] == figures["expected_tokens"] > 0
    assert "spec_calibration_error" not in metrics  # no packed tier


@pytest.mark.slow
def test_fixed_engines_report_no_adaptation(files):
    with files.small() as engine:
        meta = engine.generate("abc", GREEDY)["meta_info"]
        assert "adaptive" not in engine.get_server_info()["internal_states"][0]
        assert "spec_num_switches_total" not in samples(engine)
    assert "spec_ema_accept_len" not in meta
    assert meta["spec_num_switches"] == 0
    assert set(meta["spec_rounds_by_steps"]) == {"3"}


class Cache:
    """A cache that keeps one value."""

    def __init__(self, value):
        self.value = value

    def load_json(self, name):
        return self.value

    def store_json(self, name, value):
        self.value = value


@pytest.mark.parametrize(
    "value",
    [None, {}, {"tier 1, batch 2": 1.0}, {"tier 1, batch 2": [1.0], "tier 3, batch 2": ["1"]}],
)
def test_round_times_that_are_missing_or_damaged_are_measured(value, monkeypatch, caplog):
    seconds = dict(zip(product(chains(1, 3), [2]), ([0.5, 0.5], [0.75, 0.8]), strict=True))
    monkeypatch.setattr(timing, "measure_round_seconds", lambda *_: seconds)
    runner = SimpleNamespace(
        compiled=SimpleNamespace(cache=Cache(value)),
        config=SimpleNamespace(rounds=tuple(seconds)),
    )
    assert timing.round_seconds(runner, CONTEXTS) == seconds
    assert ("measuring round times again" in caplog.text) == (value is not None)
    monkeypatch.delattr(timing, "measure_round_seconds")
    assert timing.round_seconds(runner, CONTEXTS) == seconds


def test_the_start_tier_is_the_nearest_candidate(files):
    with adaptive(files, JUMPY, speculative_num_steps=2) as engine:
        state = engine.get_server_info()["internal_states"][0]
        assert state["adaptive"]["speculative_num_steps"] == 3
        assert state["adaptive"]["tiers"] == {}


@pytest.mark.slow
def test_round_times_are_measured_once(files, tmp_path, caplog):
    # functions of earlier tests, without their measurements
    others = shutil.ignore_patterns("round_seconds*", ".tmp-*")
    (files.cache / FOLDER).mkdir(mode=0o700, exist_ok=True)
    shutil.copytree(files.cache / FOLDER, tmp_path / "cache" / FOLDER, ignore=others)
    tables = []
    for is_measured in (True, False, True):
        caplog.clear()
        with (
            caplog.at_level(logging.INFO, "specjax"),
            adaptive(files, COST, compile_cache_dir=tmp_path / "cache") as engine,
        ):
            assert engine._controller is not None
            policy = engine._controller.policy
            assert isinstance(policy, BudgetPolicy)
            tables.append(policy.table._seconds)
        measured = [r for r in caplog.records if r.getMessage().startswith(ROUND_TIMES)]
        assert len(measured) == (len(tables[0]) if is_measured else 0)
        # a table that lacks a pair is measured again
        (path,) = (tmp_path / "cache").glob("*/round_seconds*.json")
        kept = json.loads(path.read_text())
        if len(tables) == 2:
            del kept["value"]["tier 3, batch 1"]
        path.write_text(json.dumps(kept))
    assert tables[0] == tables[1]
    assert [set(table) for table in tables] == [set(tables[0])] * 3
    assert {tier for tier, _ in tables[0]} == set(chains(0, 1, 3))


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (None, "1, 3 or 7 drafted tokens per round, adaptive (ema)"),
        (
            {"policy": "budget", "candidate_steps": [0, 2]},
            "0 or 2 drafted tokens per round, adaptive (budget)",
        ),
        ({"candidate_steps": [4]}, "4 drafted tokens per round, adaptive (ema)"),
    ],
)
def test_the_start_line_names_the_tiers(files, config, line):
    plan = plan_engine(
        EngineArgs(**files.arguments(speculative_adaptive=True, speculative_adaptive_config=config))
    )
    assert any(line in described for described in plan.describe())


@pytest.mark.parametrize(("name", "hints"), [(None, True), ("NONE", False), ("none", False)])
def test_the_start_line_suggests_drafts_unless_plain_decoding_was_chosen(files, name, hints):
    plan = plan_engine(EngineArgs(**files.arguments(speculative=False, speculative_algorithm=name)))
    (line,) = (line for line in plan.describe() if "plain decoding" in line)
    assert ("for drafts set draft" in line) == hints


@pytest.mark.slow
def test_packed_rounds_give_plain_texts_and_learn(files, plain_ids, monkeypatch, caplog):
    """The budget policy also runs 5 of 8 of the deepest tier's rows, shared out by survival."""
    tiers = (*chains(0, 7), DraftShape(7, 1, 8, packed=5))
    seconds = dict(zip(product(tiers, [2]), (1.0, 3.0, 1.1), strict=True))
    monkeypatch.setattr(build, "round_seconds", lambda *_: seconds)
    config = {"policy": "budget", "candidate_steps": [0, 7]}
    options = {"speculative_num_steps": 7, "max_running_requests": 2, "batch_buckets": [2]}
    with adaptive(files, config, **options) as engine:
        assert engine.runner.config.shapes == tiers
        engine._controller.policy.chosen, sent = tiers[-1], []
        set_calibration = engine.runner.set_calibration
        monkeypatch.setattr(
            engine.runner, "set_calibration", lambda *a: sent.append(a) or set_calibration(*a)
        )
        for is_seeded, params in ((False, GREEDY), (True, SEEDED)):
            outputs = engine.generate(PROMPTS_TINY, params)
            assert [out["output_ids"] for out in outputs] == plain_ids[is_seeded]
        (state,), gauges = engine.get_server_info()["internal_states"], samples(engine)
    figures, by_position = state["adaptive"], state["spec_verified_drafts"]
    rounds = {tier: counts["rounds"] for tier, counts in figures["tiers"].items()}
    assert rounds["7p5"] > 3
    # a batch of two shares 10 rows, so that seldom all drafts are verified, but any may be
    assert by_position == sorted(by_position, reverse=True)
    assert by_position[0] > by_position[-1]
    rows = {"0": 2, "7": 16, "7p5": 10}
    assert state["spec_verified_rows"] <= sum(rows[tier] * n for tier, n in rounds.items())
    assert gauges["spec_calibration_error"] == figures["calibration_error"]
    assert "the adaptive policy failed" not in caplog.text
    # what the policy learned about the requests' drafts was sent
    slope, intercepts, offsets, slots = sent[-1]
    assert intercepts[0] != 0.85
    assert offsets.shape == (len(slots),)
    assert np.isfinite(offsets).all()
    assert 0.0 < figures["calibration_error"] < 1.0
    assert slope >= 0.0
