"""Fields that limit a completion by a grammar: OpenAI's ``response_format``, and vLLM's name."""

import json
from collections.abc import Mapping
from typing import Any

from specjax.checks import short
from specjax.sampling.params import GRAMMARS
from specjax.server.fields import ApiError, Body

ANY_OBJECT = {"type": "object"}
# vLLM's name in structured_outputs -> the sampling parameter, if it has another name
_STRUCTURED = {"json": "json_schema", "grammar": "ebnf"}


def take_grammar(
    body: Body, given: Mapping[str, Any], of_tools: Mapping[str, Any]
) -> dict[str, Any]:
    """Take ``response_format`` and ``structured_outputs``; return sampling parameters.

    ``given`` are other sampling parameters, and ``of_tools`` those that the tools demand. Raises
    ApiError if there is more than one grammar.
    """
    sources = [name for name in GRAMMARS if name in given] + ["tools"] * bool(of_tools)
    body.sources.update(dict.fromkeys(of_tools, "tools"))
    found = dict(of_tools)
    for name, read in (("response_format", _format), ("structured_outputs", _structured)):
        if name in body and (more := read(body.take(name))):
            sources.append(name)
            found |= more
            body.sources.update(dict.fromkeys(more, name))
    if len(sources) > 1:
        raise ApiError(400, f"give only one of {', '.join(sources)}", param=sources[1])
    return found


def _format(value: Any) -> dict[str, Any]:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": ANY_OBJECT}
    if kind == "structural_tag":
        return {"structural_tag": value}
    schema = value.get("json_schema") if isinstance(value, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict) or schema.get("schema") is None:
        raise ApiError(
            400,
            f"response_format={short(value)} must have the type text, json_object, structural_tag "
            "or json_schema, the last with json_schema.schema",
            param="response_format",
        )
    return {"json_schema": schema["schema"]}


def _structured(value: Any) -> dict[str, Any]:
    names = ("json", "regex", "grammar", "structural_tag", "choice", "json_object")
    given = {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else {}
    if len(given) != 1 or not set(given) <= set(names):
        message = f"structured_outputs={short(value)} must have one of {', '.join(names)}"
        raise ApiError(400, message, param="structured_outputs")
    ((name, limit),) = given.items()
    if name == "json_object":
        return {"json_schema": ANY_OBJECT} if limit is True else {}
    if name == "choice":
        if not isinstance(limit, list) or not limit or not all(isinstance(x, str) for x in limit):
            message = f"choice={short(limit)} must be a list of strings"
            raise ApiError(400, message, param="structured_outputs")
        return {"ebnf": f"start: {' | '.join(map(json.dumps, limit))}"}
    return {_STRUCTURED.get(name, name): limit}
