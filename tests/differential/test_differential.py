"""Random engines produce the tokens of plain decoding, whatever happens to them in between.

Run it before and after a large change: ``pytest -n 0 -s -m long tests/differential``. It takes two
minutes, or ``DIFFERENTIAL_SECONDS``. Its seed is the date and time, or ``DIFFERENTIAL_SEED``. Each
engine prints one line, which begins with the variables that repeat only this engine; a failure
prints the command.

``XLA_FLAGS=--xla_backend_optimization_level=1`` runs optimised code: an engine takes three times as
long to compile and a third of the time to run.
"""

import os
import time
from collections import Counter

import numpy as np
import pytest

from ..conftest import drop_executables
from .draws import ALGORITHMS, draw_engine
from .trial import Reference, Trial

SECONDS = float(os.environ.get("DIFFERENTIAL_SECONDS", "120"))
SEED = int(os.environ.get("DIFFERENTIAL_SEED", time.strftime("%Y%m%d%H%M%S")))
FIRST = int(os.environ.get("DIFFERENTIAL_FIRST", "0"))
# minimum occurrences per 1,000 tokens in a run of this many tokens
MANY = 20_000
LEAST = {
    "retractions": 1,
    "aborts": 1,
    "timeouts": 0.1,
    "quiet batches": 0.05,
    "cached tokens": 50,
    "accepted drafts": 100,
    "tokens prefilled elsewhere": 50,
    "flush": 0.1,
    "other weights": 0.5,
    "samples of two sets of weights": 0.5,
    "new draft": 0.2,
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_random_engines_equal_plain_decoding(files, drafts, device) -> None:
    counts: Counter[str] = Counter()
    plain = Reference.of(files)
    index, end = FIRST, time.monotonic() + SECONDS
    try:
        while index == FIRST or time.monotonic() < end:
            rng = np.random.default_rng((SEED, index))
            algorithm = list(ALGORITHMS)[index % len(ALGORITHMS)]
            options = draw_engine(rng, algorithm, drafts)
            same = f"DIFFERENTIAL_SEED={SEED} DIFFERENTIAL_FIRST={index} DIFFERENTIAL_SECONDS=0"
            # printed first, because a crash ends this process
            print(same, options, end=" ", flush=True)
            try:
                found = Trial(files, plain, rng, options).run(int(rng.integers(4, 13)))
            except BaseException as error:
                error.add_note(f"{same} pytest -n 0 -s -m long tests/differential: {options}")
                raise
            print(dict(found), flush=True)
            counts += found
            index += 1
            drop_executables()
    finally:
        plain.close()
        print(f"{index - FIRST} engines: {dict(counts)}", flush=True)
    if counts["tokens"] >= MANY:
        for name, least in LEAST.items():
            assert counts[name] >= least * counts["tokens"] / 1000, name
