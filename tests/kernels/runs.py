"""The forms that every kernel case runs in."""

import pytest

# keyword arguments of the public functions
INTERPRET = {"implementation": "pallas", "interpret": True}
DEVICE = {"implementation": "pallas", "interpret": False}
RUNS = [
    pytest.param({"implementation": "xla"}, id="reference"),
    pytest.param(INTERPRET, id="interpret"),
    pytest.param(DEVICE, id="gpu", marks=pytest.mark.gpu),
]
