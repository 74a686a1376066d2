"""Random grammars that try to take long, to use much memory or to break the compiler."""

import json
import random
import string
from typing import Any

WORDS = ["a", "id", "name", "größe", "名前", "😀", '"', "\\", "\n", "$ref", "x" * 40]
ATOMS = ["a", "b", ".", r"\d", r"\w", r"\p{L}", "[^x]", "[a-z0-9é]", "(?i:q)", "(?:)", "☃", r"\\"]
COUNTS = ["*", "+", "?", "{0,3}", "{5}", "{1,200}", "{100}", "{0,100000}", "{3,1}"]
CATASTROPHES = [
    "(a+)+b",
    "(a|a)*c",
    "(a|aa)+$",
    "([a-z]+)*[0-9]{50}",
    ".*a.{12}.*b.{12}",
    "((a{1,100}){1,100}){1,100}",
    "(.*)(.*)(.*)(.*)(.*)x",
    r"(\p{L}{1,50} ){1,50}",
]
NUMBERS = [0, 1, -1, 7, 0.1, 1e-9, 1e308, -(2**63), 2**64, 10**30, 9999, 99999989]


def fuzzed(seed: int) -> dict[str, Any]:
    """The sampling parameter of a random grammar, valid or not."""
    rng = random.Random(seed)
    kind = rng.choice(["json_schema", "json_schema", "regex", "ebnf", "structural_tag"])
    if kind == "json_schema":
        text = _damaged(rng, json.dumps(_schema(rng, rng.choice([2, 4, 6]))))
    elif kind == "regex":
        text = _regex(rng, rng.choice([1, 3, 5]))
        text = _damaged(rng, text)
    elif kind == "ebnf":
        text = _damaged(rng, _ebnf(rng))
    else:
        begin = rng.choice(["<f>", "<", "", "ab", "\n"])
        one = {"begin": begin + rng.choice(["", "x"]), "schema": _schema(rng, 2), "end": ">"}
        tag = {"structures": [one] * rng.randint(1, 3), "triggers": [begin]}
        text = _damaged(rng, json.dumps(tag))
    return {kind: text}


def _damaged(rng: random.Random, text: str) -> str:
    """The text, or sometimes one with a few other characters."""
    if rng.random() < 0.7 or not text:
        return text
    characters = list(text)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(characters))
        characters[at] = rng.choice(["", characters[at] * 3, rng.choice(string.printable), "é"])
    return "".join(characters)


def _schema(rng: random.Random, depth: int) -> Any:
    draw = rng.random()
    if draw < 0.05:
        return _deep(rng.choice([10, 200, 3000]))
    if draw < 0.09:
        count = rng.choice([50, 1000])
        return {"type": "object", "properties": {f"k{i}": _leaf(rng) for i in range(count)}}
    if draw < 0.12:
        count = rng.choice([100, 3000])
        return {"enum": [f"{rng.getrandbits(64):x}" for _ in range(count)]}
    if depth == 0 or draw < 0.35:
        return _leaf(rng)
    if draw < 0.6:
        names = rng.sample(WORDS, rng.randint(0, 4))
        found: dict[str, Any] = {
            "type": "object",
            "properties": {name: _schema(rng, depth - 1) for name in names},
        }
        if rng.random() < 0.6:
            found["required"] = rng.sample(names, rng.randint(0, len(names)))
        if rng.random() < 0.6:
            found["additionalProperties"] = rng.choice([False, True, {"type": "integer"}])
        return found
    if draw < 0.75:
        low, high = rng.choice([(0, 3), (2, 2), (5, 1), (0, 10**6), (10**6, 10**7)])
        items = _schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": high}
    if draw < 0.9:
        join = rng.choice(["anyOf", "anyOf", "oneOf", "allOf"])
        return {join: [_schema(rng, depth - 1) for _ in range(rng.randint(1, 5))]}
    node = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}, _schema(rng, depth - 1)]}
    return {"$ref": rng.choice(["#/$defs/n", "#/$defs/m", "#"]), "$defs": {"n": node}}


def _leaf(rng: random.Random) -> Any:
    number = rng.choice(NUMBERS)
    return rng.choice(
        [
            {"type": "string"},
            {"type": "string", "pattern": _regex(rng, 2)},
            {"type": "string", "maxLength": rng.choice([0, 3, 10**6])},
            {"type": "string", "format": rng.choice(["date", "uuid", "email", "nothing"])},
            {"type": "integer", "minimum": number, "maximum": rng.choice(NUMBERS)},
            {"type": "number", "exclusiveMinimum": number},
            {"type": "integer", "multipleOf": number},
            {"type": rng.choice(["boolean", "null", "nothing", 3, ["string", "null"]])},
            {"const": rng.choice([None, number, {"a": [number]}, "é"])},
            {},
            rng.choice([True, False]),
        ]
    )


def _deep(depth: int) -> Any:
    found: Any = {"type": "null"}
    for _ in range(min(depth, 300)):
        found = {"type": "array", "items": found}
    return found


def _regex(rng: random.Random, depth: int) -> str:
    if rng.random() < 0.1:
        return rng.choice(CATASTROPHES)
    if depth == 0:
        return rng.choice(ATOMS)
    parts = [_regex(rng, depth - 1) for _ in range(rng.randint(1, 4))]
    text = rng.choice(["", "|"]).join(parts)
    return f"({text}){rng.choice(COUNTS)}" if rng.random() < 0.7 else text


def _ebnf(rng: random.Random) -> str:
    names = ["start"] + [f"r{i}" for i in range(rng.choice([1, 4, 200]))]
    rules = []
    for name in names:
        parts = []
        for _ in range(rng.randint(1, 4)):
            part = rng.choice(
                [
                    rng.choice(names),
                    json.dumps(rng.choice(WORDS)),
                    f"/{rng.choice([*CATASTROPHES, *ATOMS])}/",
                    f"({rng.choice(names)} | {rng.choice(names)})*",
                    f"{rng.choice(names)}{{0,{rng.choice([3, 1000])}}}",
                    f"%json {json.dumps(_schema(rng, 1))}",
                ]
            )
            parts.append(part)
        rules.append(f"{name}: {rng.choice([' ', ' | ']).join(parts)}")
    return "\n".join(rules)
