"""Conversion of values to types, and its errors."""

import math
import pickle
from decimal import Decimal
from typing import Annotated, Any

import numpy as np
import pytest
from msgspec import Meta

from specjax.checks import Natural, ParameterError, Positive, convert

Share = Annotated[float, Meta(gt=0, le=1)]
Flag = Annotated[bool, Meta(description="true or false")]


@pytest.mark.parametrize(
    ("value", "kind", "message", "limit"),
    [
        (0, Positive, "x=0 must be an integer of at least 1", 1),
        (True, Positive, "x=True must be an integer of at least 1", None),
        (1.0, Natural | None, "x=1.0 must be an integer of at least 0", None),
        (2**70, Annotated[int, Meta(ge=0, le=9)], f"x={2**70} must be an integer from 0 to 9", 9),
        (True, int, "x=True must be an integer", None),
        (0, Share, "x=0 must be above 0 and at most 1", 0),
        (1.5, Share | None, "x=1.5 must be above 0 and at most 1", 1),
        ("1", Share, "x='1' must be a finite number and above 0 and at most 1", None),
        (math.nan, float, "x=nan must be a finite number", None),
        (-math.inf, float | None, "x=-inf must be a finite number", None),
        (False, float, "x=False must be a finite number", None),
        (10**400, float, f"x={10**400} must be a finite number", None),
        (Decimal(1), float, "x=Decimal('1') must be a finite number", None),
        (1, bool, "x=1 must be a bool", None),
        (1, Flag | None, "x=1 must be true or false", None),
        (None, str, "x=None must be a string", None),
    ],
)
def test_refused(value: Any, kind: Any, message: str, limit: float | None) -> None:
    with pytest.raises(ParameterError) as caught:
        convert("x", value, kind)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (str(error), error.param, error.limit, error.code) == (message, "x", limit, None)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (10**30, Positive),
        (np.float64(0.5), Share),
        (1, Share),
        (None, Natural | None),
        ([1, 2], list[int]),
        ({"a": [None]}, dict[str, Any]),
    ],
)
def test_accepted(value: Any, kind: Any) -> None:
    assert convert("x", value, kind) == value
