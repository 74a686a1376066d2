import json
import math
from pathlib import Path
from typing import Any

import pytest

from specjax.adaptive import RoundTimes

TIMES = RoundTimes({(0, 1): 1e-3, (3, 1): 2e-3, (0, 4): 1.5e-3, (3, 4): 2.5e-3})


def test_a_batch_takes_the_smallest_bucket_that_holds_it() -> None:
    assert (TIMES.steps, TIMES.buckets) == ((0, 3), (1, 4))
    assert [TIMES.bucket(n) for n in (1, 2, 3, 4)] == [1, 4, 4, 4]
    assert [TIMES.seconds(3, n) for n in (1, 2, 4)] == [2e-3, 2.5e-3, 2.5e-3]
    with pytest.raises(ValueError, match="batch_size=5 is above the largest measured bucket 4"):
        TIMES.seconds(0, 5)
    with pytest.raises(ValueError, match=r"steps=1 has no measured round time; .*\(0, 3\)"):
        TIMES.seconds(1, 1)
    for wrong in (True, 1.0, 0, "1"):
        with pytest.raises(ValueError, match="batch_size"):
            TIMES.seconds(3, wrong)


def test_stored_times_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    TIMES.store(path)
    loaded = RoundTimes.load(path)
    assert loaded.to_json() == TIMES.to_json()
    assert loaded.seconds(3, 2) == 2.5e-3
    assert [file.name for file in tmp_path.iterdir()] == ["times.json"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "'seconds'"),
        ({"seconds": []}, "'seconds'"),
        ({"seconds": {}}, "empty"),
        ({"seconds": {"0": 3}}, "steps='0' are 3"),
        ({"seconds": {"x": {"1": 1.0}}}, "steps 'x'"),
        ({"seconds": {"0": {"-1": 1.0}}}, "batch bucket '-1'"),
        ({"seconds": {"0": {"0": 1.0}}}, "batch bucket=0"),
        ({"seconds": {"0": {"1": 0}}}, "is 0; it must be above 0"),
        ({"seconds": {"0": {"1": -1.0}}}, "-1.0"),
        ({"seconds": {"0": {"1": math.nan}}}, "nan"),
        ({"seconds": {"0": {"1": True}}}, "True"),
        ({"seconds": {"0": {"1": "1"}}}, "'1'"),
        ({"seconds": {"0": {"1": 1.0}, "1": {"2": 1.0}}}, "[(0, 2), (1, 1)]"),
        ({"seconds": {"0": {"1": 1.0}}, "more": 1}, "'more'"),
    ],
)
def test_damaged_times_are_refused_with_the_file(
    tmp_path: Path, value: dict[str, Any], message: str
) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=str(path)) as caught:
        RoundTimes.load(path)
    assert message in str(caught.value)
