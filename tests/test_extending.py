"""Run the algorithm of docs/extending.md as extracted from the page."""

import re
import sys
import tomllib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.speculative import catalog
from specjax.speculative.algorithm import SpeculativeAlgorithm, register_algorithm
from specjax.speculative.tree import chain_input
from specjax.testing import Files
from specjax.testing.files import CONFIG
from specjax.types import DraftShape

STAGES = ("prefill", "extend")
PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_line_count_matches_the_page() -> None:
    module = blocks("python")[0]
    assert len(module.splitlines()) <= 60


@pytest.mark.parametrize(
    ("module", "names"), re.findall(r"^\| `(specjax[\w.]*)` \| (.*) \|$", PAGE, re.MULTILINE)
)
def test_stable_names_exist(module: str, names: str) -> None:
    found = import_module(module)
    assert [name for name in re.findall(r"`(\w+)`", names) if not hasattr(found, name)] == []


@dataclass(frozen=True)
class Probe(SpeculativeAlgorithm):
    """Drafts nothing. The state has what the last chunk and round of each slot saw."""

    def draft_shape(self, args, steps=None):
        return DraftShape.chain(2)

    def abstract_state(self, networks, sizes):
        assert networks.target_config.vocab_size == CONFIG.vocab_size
        return {name: jax.ShapeDtypeStruct((sizes.num_slots, 6), jnp.int32) for name in STAGES}

    def abstract_rows(self, networks, sizes):
        return jax.ShapeDtypeStruct((sizes.num_slots,), jnp.int32)

    def prefill(self, batch, state, rows, chunks, features):
        assert batch.target.config.vocab_size == CONFIG.vocab_size
        padding = jnp.where(chunks.segments.is_real, 0, chunks.tokens[0] + chunks.positions[0])
        total = jnp.broadcast_to(jnp.sum(padding, dtype=jnp.int32), rows.shape)
        sampled = chunks.next_tokens[0, chunks.last]
        lens = batch.seq_lens, chunks.num_cached, rows, sampled, total
        state = self.record(state, "prefill", batch, lens)
        return state, jnp.full_like(rows, 7)

    def propose(self, batch, state, rows, shape):
        tokens = jnp.repeat(batch.bonus_tokens[:, None], shape.nodes, axis=1)
        return chain_input(tokens, batch.seq_lens, jnp.zeros_like(rows)), state

    def extend(self, batch, state, rows, verified, shape):
        history = jnp.take_along_axis(batch.history, batch.seq_lens[:, None], axis=1)[:, 0]
        tokens = batch.bonus_tokens, verified.accept_tokens[:, 0], verified.bonus_tokens, history
        later = jnp.sum(verified.accept_tokens[:, 1:], axis=1, dtype=jnp.int32)
        later += jnp.sum(verified.features[:, 1:], axis=(1, 2)).astype(jnp.int32)
        return self.record(state, "extend", batch, (*tokens, later)), rows + 1

    def record(self, state, stage, batch, values):
        seen = jnp.stack([*values, batch.seq_lens], axis=1)
        return state | {stage: state[stage].at[batch.slots].set(seen)}


def make_probe(args: Any) -> Probe:
    return Probe("PROBE")


@pytest.mark.slow
def test_drafters_see_what_the_page_says(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "custom", dict(catalog.custom))
    register_algorithm("probe", supports_overlap=True)(make_probe)
    prompt, sampling = (
        [7, 8, 9, 10, 11],
        {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
    )
    options: Any = {"speculative": False, "speculative_algorithm": "probe"}
    with files.engine(**options) as engine:

        def state() -> Any:
            on_device = engine.runner.on_device
            return jax.device_get((on_device.pools.draft, on_device.future.rows))

        initial = state()
        assert not any(leaf.any() for leaf in jax.tree.leaves(initial))
        tokens = engine.generate(input_ids=prompt, sampling_params=sampling)["output_ids"]
        seen, rows = state()
        (slot,) = np.flatnonzero(seen["prefill"][1:, 3]) + 1
        assert seen["prefill"][slot].tolist() == [0, 0, 0, tokens[0], 0, 0]
        root, last = tokens[-2:]
        end = len(prompt) + len(tokens) - 2
        assert seen["extend"][slot].tolist() == [root, last, last, root, 0, end]
        assert seen["extend"][0].tolist() == [0, 0, 0, seen["extend"][0, 3], 0, 0]
        assert rows[slot] == 7 + len(tokens) - 1
        engine.flush_cache()
        kept, _ = state()
        assert all((kept[name] == seen[name]).all() for name in STAGES)
        # another request of the slot: rows of the first, and after a cached page its own start
        for _ in range(2):
            engine.generate(input_ids=prompt, sampling_params=sampling)
            again, rows = state()
            (slot,) = np.flatnonzero(again["prefill"][1:, 3]) + 1
        start, num_cached, left, *_ = again["prefill"][slot]
        assert start == num_cached == 4
        assert left == 7 + len(tokens) - 1
        weights = {engine.runner.networks.target.names[0]: engine.runner.weights[0][0]}
        engine.update_weights_from_tensor(weights)
        assert not any(leaf.any() for leaf in jax.tree.leaves(state()))


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin is installed under its entry point and passes its own test."""
    module, test, _ = blocks("python")
    (source,) = blocks("toml")
    settings = tomllib.loads(source)
    ((name, package),) = settings["project"]["entry-points"][catalog.GROUP].items()
    assert settings["tool"]["setuptools"]["py-modules"] == [package]
    (tmp_path / f"{package}.py").write_text(module)
    info = tmp_path / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{catalog.GROUP}]\n{name} = {package}\n")
    monkeypatch.setattr(catalog, "custom", {})
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}
    exec(test, names)
    try:
        names["test_lookup"](tmp_path)
    finally:
        sys.modules.pop(package, None)
