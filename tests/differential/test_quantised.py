"""Quantised targets and KV: engines with drafts produce the tokens of plain decoding."""

import numpy as np
import pytest

from .draws import ALGORITHMS, Options
from .rows import SEEN, Row, drafting, serving
from .trial import Reference, Trial

FORMATS: dict[str, Options] = {
    "fp8": {"quantization": "fp8"},
    "fp8 activations": {"quantization": "fp8", "quantize_activations": True},
    # the products of integers are exact, so that no key or value is rounded another way
    "int8 activations": {
        "quantization": "int8",
        "quantize_activations": True,
        "kv_cache_dtype": "fp8_e4m3",
    },
    "int4": {"quantization": "int4"},
}
ROWS: list[tuple[str, Row]] = [
    ("int4", ("NGRAM", "chain", "ahead", 1, "here", "fixed", 1)),
    ("fp8", ("EAGLE3", "tree", "in turn", 4, "split", "fixed", 1)),
    ("fp8 activations", ("EAGLE3", "cut chain", "ahead", 16, "here", "adaptive", 1)),
    ("int8 activations", ("EAGLE", "tree", "ahead", 16, "here", "fixed", 1)),
    ("int4", ("DFLASH", "chain", "in turn", 1, "here", "adaptive", 1)),
    ("fp8", ("DSPARK", "chain", "ahead", 16, "here", "fixed", 1)),
    ("int4", ("STANDALONE", "cut chain", "ahead", 4, "split", "fixed", 1)),
    ("fp8 activations", ("MULTI_LAYER_EAGLE", "chain", "in turn", 16, "here", "adaptive", 1)),
    ("int8 activations", ("markov", "chain", "in turn", 4, "split", "adaptive", 3)),
    ("int4", ("P-EAGLE", "cut chain", "ahead", 4, "split", "fixed", 3)),
]
BATCHES = 2


def test_every_algorithm_is_in_the_table() -> None:
    assert {row[0] for _, row in ROWS} == set(ALGORITHMS)
    assert {name for name, _ in ROWS} == set(FORMATS)


OFTEN = (0, 2)  # rows with weights of both sizes, and with activations of 8 bits
RUNS = [
    pytest.param(*one, marks=() if i in OFTEN else pytest.mark.long, id=f"{one[0]}-{one[1][0]}-cpu")
    for i, one in enumerate(ROWS)
] + [
    pytest.param(*one, marks=pytest.mark.gpu, id=f"{one[0]}-{one[1][0]}-gpu")
    for one in ROWS
    if one[0] != "fp8 activations"
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "row"), RUNS)
def test_engines_equal_plain_decoding(files, drafts, name, row) -> None:
    """With 64 and more rows, activations of 8 bits go through another product.

    On a GPU, sums of floats depend on the number of rows. In as many tokens as here, a code flips,
    and texts differ from there on, see ``test_flipped_codes``. Sums of integers are exact.
    """
    rng = np.random.default_rng(ROWS.index((name, row)))
    options = drafting(row, drafts) | serving(row) | FORMATS[name]
    crosses = "activations" in name
    if crosses:
        options |= {"chunked_prefill_size": 64, "max_running_requests": 16, "batch_buckets": (16,)}
        options["max_total_tokens"] = 256
    if "prefill" in options:
        options["prefill"] |= FORMATS[name]
    plain = Reference.of(files, **FORMATS[name], chunked_prefill_size=64 if crosses else 16)
    try:
        counts = Trial(files, plain, rng, options).run(BATCHES)
    finally:
        plain.close()
    for each in SEEN:
        assert counts[each] > 0 or (each == "retractions" and crosses), each
