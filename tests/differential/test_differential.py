"""Random engines write what plain decoding writes, whatever happens to them meanwhile.

More of them: ``DIFFERENTIAL_TOKENS=100000 DIFFERENTIAL_SEED=7 pytest -n 0 -s tests/differential``.
With code that XLA has optimised, ``XLA_FLAGS=--xla_backend_optimization_level=1``, an engine takes
three times as long to compile and a third of the time to run. What fails names its seed and, as
``DIFFERENTIAL_FIRST``, the engine to begin with.
"""

import os
from collections import Counter

import numpy as np
import pytest

from .draws import ALGORITHMS, draw_engine
from .trial import Reference, Trial

SEED = int(os.environ.get("DIFFERENTIAL_SEED", "2"))
FIRST = int(os.environ.get("DIFFERENTIAL_FIRST", "0"))
TOKENS = int(os.environ.get("DIFFERENTIAL_TOKENS", "2500"))
# so that no run passes without having seen them, for each 1,000 tokens
LEAST = {
    "retractions": 1,
    "aborts": 1,
    "cached tokens": 50,
    "accepted drafts": 100,
    "flush": 0.1,
    "other weights": 0.5,
    "samples of two sets of weights": 0.5,
    "new draft": 0.2,
}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_random_engines_write_what_plain_decoding_writes(files, drafts, device) -> None:
    counts: Counter[str] = Counter()
    plain = Reference.of(files)
    index = FIRST
    try:
        while counts["tokens"] < TOKENS or index - FIRST < len(ALGORITHMS):
            rng = np.random.default_rng((SEED, index))
            algorithm = list(ALGORITHMS)[index % len(ALGORITHMS)]
            trial = Trial(files, plain, rng, draw_engine(rng, algorithm, drafts))
            try:
                counts += trial.run(max(4, TOKENS // 2000))
            except BaseException as error:
                error.add_note(
                    f"DIFFERENTIAL_SEED={SEED} DIFFERENTIAL_FIRST={index} "
                    f"DIFFERENTIAL_TOKENS={TOKENS}: {trial.options}"
                )
                raise
            print(index, dict(trial.counts), trial.options, flush=True)
            index += 1
    finally:
        plain.close()
        print(dict(counts), flush=True)
    for name, least in LEAST.items():
        assert counts[name] >= least * counts["tokens"] / 1000, name
