"""Options of requests in OpenAI's fields: sampling parameters with their grammar, and output."""

from collections.abc import Mapping
from typing import Any

from specjax.checks import is_integer, short
from specjax.sampling.params import GRAMMARS, SamplingParams, choice_grammar
from specjax.server.fields import NAMES, ApiError, Body, bad_value, get
from specjax.text.parts import ANY_OBJECT

# vLLM's name in structured_outputs -> the sampling parameter, if it has another name
_STRUCTURED = {"json": "json_schema", "grammar": "ebnf"}


def take_output(body: Body) -> tuple[bool, dict[str, bool]]:
    """Take ``stream`` and the flags of optional output: usage, drafts and token ids."""
    is_stream = body.flag("stream")
    has_options = "stream_options" in body
    options = body.fields("stream_options")
    if has_options and not is_stream:
        raise ApiError(400, "stream_options needs stream=true", param="stream_options")
    flags = {name: options.flag(name) for name in ("include_usage", "include_drafts")}
    for ignored in ("include_obfuscation", "continuous_usage_stats"):
        options.take(ignored)
    if options.unread:
        message = f"stream_options: unknown field {options.unread[0]!r}"
        raise ApiError(400, message, param="stream_options", code="unknown_field")
    return is_stream, flags | {"return_ids": body.flag("return_token_ids")}


def take_routes(body: Body) -> dict[str, Any]:
    """Take the options of the engine that report the experts of tokens."""
    start = body.integer("routed_experts_start_len", 0, at_least=0, at_most=2**31 - 1)
    wants = body.flag("return_routed_experts")
    return {"return_routed_experts": wants, "routed_experts_start_len": start}


def take_params(
    body: Body, max_tokens: int, of_tools: Mapping[str, Any] | None = None
) -> SamplingParams:
    """Read sampling parameters from OpenAI's fields; ``max_tokens`` is used if none is sent.

    ``of_tools`` are those that the tools demand.
    """
    values: dict[str, Any] = {NAMES[name]: body.take(name) for name in NAMES if name in body}
    values |= _take_grammar(body, values, of_tools or {})
    values.setdefault("max_new_tokens", max_tokens)
    if values.get("top_k") == 0 and is_integer(values["top_k"]):
        values["top_k"] = -1  # vLLM also accepts 0 to turn it off
    seed = values.get("sampling_seed")
    if isinstance(seed, int) and -(2**63) <= seed < 0:
        values["sampling_seed"] = seed % 2**64
    params = SamplingParams(**values)
    best_of = body.take("best_of", params.n)
    if best_of != params.n or isinstance(best_of, bool):
        demand = f"must equal n={params.n}; samples are not ranked"
        raise bad_value("best_of", best_of, demand, code="unsupported_field")
    return params


def _take_grammar(
    body: Body, params: Mapping[str, Any], of_tools: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Take ``response_format`` and ``structured_outputs``; return sampling parameters.

    ``params`` are other sampling parameters. A grammar of calls that are forced, or of calls and
    ``response_format``, replaces a schema in that field. Raises ApiError if there is more than one
    grammar.
    """
    sources, grammar = [name for name in GRAMMARS if params.get(name) not in (None, [])], of_tools
    if of_tools:
        sources.append("tools")
        body.sources.update(dict.fromkeys(of_tools, "tools"))
    for name, read in (("response_format", _format), ("structured_outputs", _structured)):
        if name in body and (limits := read(body.take(name))):
            if name == "response_format" and "ebnf" in of_tools and "json_schema" in limits:
                sources[sources.index("tools")] = f"tools with {name}"
                continue
            sources.append(name)
            grammar = limits
            body.sources.update(dict.fromkeys(limits, name))
    if len(sources) > 1:
        raise ApiError(400, f"give only one of {', '.join(sources)}", param=sources[1])
    return grammar


def answer_format(body: Body) -> dict[str, Any]:
    """The sampling parameter that ``response_format`` demands, if it does; it stays in the body."""
    value = body.take("response_format")
    body.put("response_format", value)
    return {} if value is None else _format(value)


def _format(value: Any) -> dict[str, Any]:
    kind, schema = get(value, "type"), get(value, "json_schema", "schema")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": ANY_OBJECT}
    if kind == "structural_tag":
        return {"structural_tag": value}
    if kind != "json_schema" or schema is None:
        raise bad_value(
            "response_format",
            value,
            "must have the type text, json_object, structural_tag or json_schema, the last with "
            "json_schema.schema",
        )
    return {"json_schema": schema}


def _structured(value: Any) -> dict[str, Any]:
    names = ("json", "regex", "grammar", "structural_tag", "choice", "json_object")
    limits = {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else {}
    if len(limits) != 1 or not set(limits) <= set(names):
        raise bad_value("structured_outputs", value, f"must have one of {', '.join(names)}")
    ((name, limit),) = limits.items()
    if name == "json_object":
        return {"json_schema": ANY_OBJECT} if limit is True else {}
    if name == "choice":
        if not isinstance(limit, list) or not limit or not all(isinstance(x, str) for x in limit):
            message = f"choice={short(limit)} must be a list of strings"
            raise ApiError(400, message, param="structured_outputs")
        return {"ebnf": choice_grammar(limit)}
    return {_STRUCTURED.get(name, name): limit}
