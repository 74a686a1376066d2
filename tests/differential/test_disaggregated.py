"""Two sides that serve as one engine write what plain decoding writes, with every algorithm."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from specjax import DisaggregatedEngine

from ..disaggregation.process import ApartEngine
from .draws import ALGORITHMS, draw_engine, one_of
from .trial import Reference, Trial

PLUGIN = Path(__file__).parents[2] / "examples" / "specjax-markov"
BATCHES = 4


@pytest.fixture(scope="module")
def plain(files):
    reference = Reference.of(files)
    yield reference
    reference.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "sides",
    [
        "devices",
        pytest.param("gpus", marks=pytest.mark.gpu),
        pytest.param("processes", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "markov"])
def test_both_sides_write_what_plain_decoding_writes(
    files, drafts, plain, algorithm, sides, monkeypatch
) -> None:
    """Pages and chunks differ on the two sides; weights change on both, one behind the other."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    import_module("specjax_markov")
    rng = np.random.default_rng((5, *algorithm.encode()))
    known = algorithm if algorithm in ALGORITHMS else "NGRAM"
    options = draw_engine(rng, known, drafts)
    if known != algorithm:
        names = [name for name in options if name.startswith("speculative_")]
        options = {name: value for name, value in options.items() if name not in names}
        options["speculative_algorithm"] = algorithm
    options |= {
        "kind": DisaggregatedEngine,
        "prefill": {
            "page_size": one_of(rng, (1, 4, 16)),
            "chunked_prefill_size": one_of(rng, (5, 16, 24)),
            "max_total_tokens": 400,
        },
    }
    if sides == "processes":
        monkeypatch.setenv("PYTHONPATH", str(PLUGIN))
        options |= {"kind": ApartEngine, "modules": ["specjax_markov"]}
    trial = Trial(files, plain, rng, options)
    counts = trial.run(BATCHES)
    print(algorithm, options, dict(counts))
    if sides == "processes":
        assert trial.engine.prefilled_there > 100
    assert counts["aborts"] > 0
    assert counts["accepted drafts"] > 100
    assert counts["samples of two sets of weights"] > 0
