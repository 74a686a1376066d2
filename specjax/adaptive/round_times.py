"""Measured seconds of one round, for each tier and batch bucket."""

import json
import os
import tempfile
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.checks import check_integer, check_number
from specjax.json_file import read_json


class RoundTimes:
    """Seconds of a round by (steps, batch bucket); a batch counts as the smallest bucket it fits.

    Args:
        seconds: a positive time for every pair of a tier and a bucket.

    Raises:
        ValueError: for a missing pair, or a key or time out of range.
    """

    def __init__(self, seconds: Mapping[tuple[int, int], float]) -> None:
        if not seconds:
            raise ValueError("round times are empty; measure at least one tier and bucket")
        self._seconds: dict[tuple[int, int], float] = {}
        for (steps, bucket), value in seconds.items():
            check_integer("steps", steps, at_least=0)
            check_integer("batch bucket", bucket, at_least=1)
            key = f"round time of steps={steps}, batch bucket={bucket}"
            time = check_number(key, value)
            if time <= 0.0:
                raise ValueError(f"{key} is {value!r}; it must be above 0 seconds")
            self._seconds[steps, bucket] = time
        self.steps = tuple(sorted({steps for steps, _ in self._seconds}))
        self.buckets = tuple(sorted({bucket for _, bucket in self._seconds}))
        missing = [(s, b) for s in self.steps for b in self.buckets if (s, b) not in self._seconds]
        if missing:
            raise ValueError(f"round times lack (steps, batch bucket) {missing}")
        self._by_bucket = {
            bucket: {steps: self._seconds[steps, bucket] for steps in self.steps}
            for bucket in self.buckets
        }

    def bucket(self, batch_size: int) -> int:
        """The smallest bucket that holds ``batch_size`` rows.

        Raises:
            ValueError: if none does.
        """
        index = bisect_left(self.buckets, check_integer("batch_size", batch_size, at_least=1))
        if index == len(self.buckets):
            raise ValueError(
                f"batch_size={batch_size} is above the largest measured bucket {self.buckets[-1]}"
            )
        return self.buckets[index]

    def by_steps(self, batch_size: int) -> Mapping[int, float]:
        """Seconds of a round of ``batch_size`` rows for each tier.

        Raises:
            ValueError: for a batch that was not measured.
        """
        # most batches are a bucket
        found = self._by_bucket.get(batch_size) if type(batch_size) is int else None
        return self._by_bucket[self.bucket(batch_size)] if found is None else found

    def seconds(self, steps: int, batch_size: int) -> float:
        """Seconds of a round of ``batch_size`` rows with ``steps``.

        Raises:
            ValueError: for a tier or a batch that was not measured.
        """
        if steps not in self.steps:
            raise ValueError(f"steps={steps} has no measured round time; measured: {self.steps}")
        return self.by_steps(batch_size)[steps]

    def to_json(self) -> dict[str, Any]:
        """An object of the form ``{"seconds": {steps: {bucket: seconds}}}``."""
        return {
            "seconds": {
                str(s): {str(b): self._seconds[s, b] for b in self.buckets} for s in self.steps
            }
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "RoundTimes":
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: for any other form.
        """
        table = value.get("seconds")
        if set(value) != {"seconds"} or not isinstance(table, Mapping):
            raise ValueError(f"round times need the one key 'seconds', not {sorted(value)}")
        seconds = {}
        for steps, row in table.items():
            if not isinstance(row, Mapping):
                raise ValueError(f"round times of steps={steps!r} are {row!r}, not an object")
            for bucket, time in row.items():
                seconds[_digits("steps", steps), _digits("batch bucket", bucket)] = time
        return cls(seconds)

    @classmethod
    def load(cls, path: "str | os.PathLike[str]") -> "RoundTimes":
        """The times that :meth:`store` wrote.

        Raises:
            ValueError: naming the file, if it is missing or holds something else.
        """
        file = Path(path)
        values = read_json(file)
        try:
            return cls.from_json(values)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    def store(self, path: "str | os.PathLike[str]") -> None:
        """Write the times as JSON, whole or not at all."""
        file = Path(path)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(self.to_json(), stream, indent=1)
            os.replace(name, file)
        except BaseException:
            os.unlink(name)
            raise


def _digits(key: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{key} {text!r} of the round times must be digits")
    return int(text)
