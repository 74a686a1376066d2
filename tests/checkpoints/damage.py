"""Damage files at random: an act on them succeeds, or its error names the location."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRONG: list[Any] = [
    None,
    True,
    -1,
    0,
    2**31,
    10**400,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x" * 400,
    "\0",
    "\u2028",
    [],
    [1, "a"],
    [[]],
    {},
    {"a": {"b": []}},
]


def damaged(value: Any, rng: random.Random) -> Any:
    """Copy a value and change the type of one part, drop it, or put it in another's position."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if rng.random() < 0.1:
            return value | {key: value[rng.choice(list(value))]}
        return value | {key: damaged(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        i = rng.randrange(len(value))
        return [*value[:i], damaged(value[i], rng), *value[i + 1 :]]
    return rng.choice(WRONG)


def damage_json(file: Path, rng: random.Random) -> None:
    text = file.read_text()
    if rng.random() < 0.1:
        file.write_text(text[: rng.randrange(len(text))])
    else:
        file.write_text(json.dumps(damaged(json.loads(text), rng)))


def fuzz(
    folder: Path,
    names: list[str],
    damage: Callable[[Path, random.Random], None],
    act: Callable[[str], Any],
    count: int,
) -> int:
    """Damage one file at a time: ``act(name)`` succeeds, or its error names the location.

    Returns the number of successes.
    """
    whole = {name: (folder / name).read_bytes() for name in names}
    num_opened = 0
    for seed in range(count):
        rng = random.Random(seed)
        name = rng.choice(names)
        damage(folder / name, rng)
        before, refusal = time.monotonic(), str(folder)
        try:
            act(name)
            num_opened += 1
        except ValueError as error:
            refusal = str(error)
        assert str(folder) in refusal
        assert time.monotonic() - before < 5
        (folder / name).write_bytes(whole[name])
    return num_opened
