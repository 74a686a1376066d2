"""The compiled functions and their order."""

import itertools
from dataclasses import replace

from specjax.runtime.runner import ModelRunner
from specjax.runtime.runner_config import RunnerConfig
from specjax.sampling.accept_draws import COUPLED, Acceptance
from specjax.testing import EAGLE3
from specjax.types import DraftShape

from ..runners import chains, make_runner


def test_rounds_of_each_number_of_rows_are_compiled_first(monkeypatch) -> None:
    """Functions compiled at the same time would each autotune the same products."""
    monkeypatch.setattr(RunnerConfig, "on_gpu", True)
    made = make_runner(EAGLE3, 4)
    tiers = (*chains(0, 1, 3), DraftShape.chain(3)._replace(packed=3))
    config = replace(made.config, shapes=tiers, batch_buckets=(1, 2, 4), reads_confidence=True)
    runner, keys = ModelRunner(made.networks, config), []
    monkeypatch.setattr(runner.compiled, "add", lambda key, *_: keys.append(key))
    monkeypatch.setattr(runner.compiled, "compile", lambda **_: None)
    runner.compile(show_progress=False)

    names = [key[0] for key in keys]
    first = keys[: names.index("prefill")]
    assert [name for name, *_ in first] == ["greedy_round"] * len(first)
    rows = [tier.verified * batch for _, tier, batch in first]
    assert sorted(rows) == [1, 2, 4, 6, 8, 12, 16]
    assert ("greedy_round", DraftShape.chain(3), 1) in first  # the deepest tier with four rows
    rounds = list(itertools.product(("greedy_round", "round"), config.shapes, (1, 2, 4)))
    # a packed round of one request could only verify fewer of its drafts
    rounds = [(name, tier, batch) for name, tier, batch in rounds if batch > 1 or not tier.packed]
    assert sorted(key for key in keys if key[0].endswith("round")) == sorted(rounds)
    assert len(keys) == len(set(keys)) == len(rounds) + 3


def test_rounds_of_greedy_batches_know_nothing_of_acceptance(monkeypatch) -> None:
    """Greedy rounds trace to the same functions; other rounds do not."""
    monkeypatch.setattr(RunnerConfig, "on_gpu", True)
    made, traced = make_runner(EAGLE3, 4), {}
    for acceptance in (COUPLED, Acceptance(True), Acceptance(threshold_acc=0.5)):
        config = replace(made.config, shapes=chains(2), acceptance=acceptance)
        runner, jobs = ModelRunner(made.networks, config), {}
        monkeypatch.setattr(
            runner.compiled, "add", lambda key, *job, jobs=jobs: jobs.update({key[0]: job})
        )
        monkeypatch.setattr(runner.compiled, "compile", lambda **_: None)
        runner.compile(show_progress=False)
        for name in ("greedy_round", "round"):
            function, arguments, _ = jobs[name]
            traced.setdefault(name, set()).add(str(function.trace(*arguments).jaxpr))
    assert [len(traced[name]) for name in ("greedy_round", "round")] == [1, 3]
