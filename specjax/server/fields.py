"""JSON request bodies. Fields are decoded when they are read; unsupported fields are refused."""

import itertools
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from specjax.checks import CONTEXT_EXCEEDED, ParameterError, short
from specjax.engine.requests import LIMITS, refuse_length
from specjax.sampling.params import ALIASES

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Maximum characters of an error message, which may quote a value as long as the request.
MAX_MESSAGE = 1000
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# A value over LONG_VALUE bytes has at most MAX_PARTS commas or brackets (2**19 objects: 120 MB).
LONG_VALUE, MAX_PARTS, MAX_DEPTH = 2**20, 2**19, 64
QUOTED_BYTES = 80
MAX_FIELDS = 256  # known and unknown fields of one object
INPUTS = "a string, a list of token ids, or a list of either"
_NULL = Raw(b"null")
_INPUTS = re.compile(rb'\s*(\[?)\s*(["\[]?)')
# a word or a quoted value in a message
_WORD = re.compile(r"""(?<!\w)(["'])(?:\\.|(?!\1)[^\\])*\1|\w+""", re.DOTALL)

MAX_NAMES, MAX_NAME = 32, 64  # maximum number of logged names, and of characters in each
LIKENESS = 0.8  # minimum similarity (0 to 1) that makes an unknown name a misspelling
MAX_COMPARED = 16  # maximum unknown names per request that are compared with known ones, 70 us each
# OpenAI's field name -> the engine's name
NAMES = {
    **ALIASES,
    **{
        name: name
        for name in "temperature top_p top_k min_p frequency_penalty presence_penalty "
        "repetition_penalty logit_bias n stop stop_token_ids ignore_eos speculative no_stop_trim "
        "skip_special_tokens simulate_acceptance json_schema regex ebnf structural_tag "
        "allowed_token_ids bad_words cache_salt thinking_token_budget".split()
    },
    "include_stop_str_in_output": "no_stop_trim",
}
CLIENT_NAMES = {theirs: ours for ours, theirs in NAMES.items()}
# fields with a grammar, which takes time to compile
GRAMMAR_FIELDS = (
    *LIMITS,
    "response_format",
    "structured_outputs",
    "tools",
    "output_config",
    "output_format",
)
# fields about the caller, the account or the transport; they do not change the text
IGNORED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "prompt_cache_options prediction stream_reasoning log_metrics "
    "no_logs request_id".split()
)
_GRAMMAR = "use response_format or structured_outputs"
_TOOLS = "use tools and tool_choice in /v1/chat/completions"
_TEXT = "only text is supported"
_BEAM = "beam search is not supported"
_PROCESSORS = "custom logit processors are not supported"
_TEMPLATE = "pass it in chat_template_kwargs"
_SCORES = "use return_logprob and top_logprobs_num"
# Reason to refuse a field, and the values that are accepted because they request nothing.
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    name: (reason, neutral)
    for names, reason, neutral in (
        ("guided_json guided_regex guided_choice guided_grammar", _GRAMMAR, ()),
        ("grammar", "it is called ebnf here", ()),
        ("functions", _TOOLS, ([],)),
        ("function_call", _TOOLS, ("none", "auto")),
        ("web_search_options", _TOOLS, ()),
        ("audio image_data audio_data video_data", _TEXT, ([],)),
        ("multi_modal_data input_embeds", _TEXT, ([],)),
        ("modalities", _TEXT, (["text"],)),
        ("mm_processor_kwargs", _TEXT, ({},)),
        ("prompt_embeds", _TEXT, ()),
        ("suffix", "text is only appended to the prompt", ("",)),
        ("use_beam_search", _BEAM, (False,)),
        ("length_penalty", _BEAM, (1, 1.0)),
        ("prompt_logprobs", "set echo and logprobs, or use /generate with logprob_start_len", ()),
        ("truncate_prompt_tokens", "prompts are not truncated; shorten them", ()),
        ("logits_processors", _PROCESSORS, ([],)),
        ("custom_logit_processor", _PROCESSORS, ()),
        ("stop_regex", "use plain strings in stop", ([],)),
        ("spaces_between_special_tokens", "the tokenizer decides it", (True, False)),
        (
            "typical_p top_a top_n_sigma tfs mirostat mirostat_mode dry_multiplier "
            "xtc_probability epsilon_cutoff eta_cutoff dynatemp_range",
            "use temperature, top_p, top_k or min_p",
            (0, 0.0),
        ),
        ("lora_path lora_request", "adapters are not supported", ()),
        ("chat_template", "the checkpoint's template is used", ()),
        ("documents", "pass them in chat_template_kwargs", ([],)),
        ("reasoning thinking verbosity", _TEMPLATE, ()),
        ("do_sample", "set temperature; 0 decodes greedily", ()),
        ("session_params", "each request has its whole text", ()),
        ("token_ids_logprob", _SCORES, ([],)),
        ("return_entropy", _SCORES, (False,)),
        ("return_hidden_states", "HTTP answers do not have them", (False,)),
        ("return_bytes", "answers are text", (False,)),
        ("priority", "callers take turns, and no request passes the others", (0,)),
        ("background", "requests are synchronous", (False,)),
        ("return_tokens_as_token_ids", "logprobs name tokens by their text", (False,)),
    )
    for name in names.split()
}
# Fields that some routes accept and others do not.
SAMPLING = frozenset((*NAMES, *NAMES.values(), "response_format", "structured_outputs"))
ELSEWHERE = SAMPLING | frozenset(
    "prompt messages text input_ids sampling_params echo logprobs top_logprobs return_logprob "
    "top_logprobs_num logprob_start_len max_completion_tokens enable_thinking "
    "reasoning_effort chat_template_kwargs return_routed_experts routed_experts_start_len".split()
)


class ApiError(Exception):
    """An error response: an HTTP status and the content of OpenAI's ``error`` object."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def message(self) -> str:
        """The message, which may quote a value as long as the request, cut to a length."""
        message = str(self)
        return message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."

    def json(self) -> bytes:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = KINDS.get(self.status, kind)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def bad_value(name: str, value: Any, demand: str, *, code: str | None = None) -> ApiError:
    """Make the error for a value that is not accepted. ``name`` may be a path within a field."""
    param = name.partition(".")[0]
    return ApiError(400, f"{name}={short(value)} {demand}", param=param, code=code)


def get(value: Any, *path: str) -> Any:
    """Return the value at a path of nested objects; ``None`` if there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


class _Name(str):
    """A field name. The decoder calls a hook for each one, and the hook counts the fields."""


_OBJECT = dict[_Name, Raw]


def parse_object(data: bytes | bytearray) -> dict[str, Any]:
    """Split a JSON object into fields, which stay JSON text. Raises ApiError for invalid JSON."""
    try:
        return _decode(data, _OBJECT)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        message = f"the body must be a JSON object of at most {MAX_FIELDS} fields: {error}"
        raise ApiError(400, message) from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


class Body:
    """The fields of a JSON object. Each can be read once, and null counts as absent.

    Methods raise an ApiError with status 400 and the field's name if a value is not accepted.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        absent = (None, _NULL)
        self._unread = {name: value for name, value in values.items() if value not in absent}
        self.looked_up: set[str] = set()
        self.sources: dict[str, str] = {}  # parameters of the engine -> fields that set them

    def __contains__(self, name: str) -> bool:
        self.looked_up.add(name)
        return name in self._unread

    @property
    def unread(self) -> tuple[str, ...]:
        return tuple(self._unread)

    def take(self, name: str, default: Any = None) -> Any:
        """Take a value of any type; refuse one that is too large or nested too deeply."""
        value = self._pop(name, default)
        if not isinstance(value, Raw):
            return value
        _check_parts(name, value, MAX_PARTS, b",", b"[", b"{")
        value = self._decode(name, value, Any, "a JSON value")
        _check_depth(name, value, MAX_DEPTH)
        return value

    def put(self, name: str, value: Any) -> None:
        """Add a field that came under another name, or put back one that was only read."""
        if value is not None:
            self._unread[name] = value

    def flag(self, name: str, default: bool = False) -> bool:
        return self._typed(name, default, bool, "true or false")

    def text(self, name: str, default: str | None = None) -> Any:
        return self._typed(name, default, str, "a string")

    def fields(self, name: str) -> "Body":
        """Take a nested object; return an empty one if the field is absent."""
        return Body(self._typed(name, {}, _OBJECT, f"an object of at most {MAX_FIELDS} fields"))

    def integer(self, name: str, default: Any = None, *, at_least: int, at_most: int) -> Any:
        limits = f"an integer from {at_least} to {at_most}"
        value = self._typed(name, default, int, limits)
        if value is not default and not at_least <= value <= at_most:
            raise ApiError(400, f"{name}={value} must be {limits}", param=name)
        return value

    def inputs(self, name: str, *, max_ids: int, max_rows: int) -> Any:
        """Take a string, a list of token ids, or a list of either; ``None`` if it is absent.

        Args:
            max_ids: maximum token ids per input. A longer input raises ValueError before decoding.
            max_rows: maximum number of inputs in a list of lists.
        """
        value = self._pop(name)
        if not isinstance(value, Raw):
            return value
        opening = _INPUTS.match(value)
        assert opening is not None  # it matches any text
        if not opening[1]:
            return self._decode(name, value, str, INPUTS)
        if opening[2] == b'"':
            _check_parts(name, value, MAX_PARTS, b'",')
            return self._decode(name, value, list[str], INPUTS)
        if opening[2] != b"[":
            return self._ids(name, value, max_ids)
        _check_parts(name, value, max_rows + 1, b"[")
        rows = self._decode(name, value, list[Raw], INPUTS)
        return [self._ids(name, row, max_ids) for row in rows]

    def _ids(self, name: str, value: Raw, max_ids: int) -> Any:
        # An id and its comma take at least two bytes.
        if len(value) // 2 > max_ids and (count := bytes(value).count(b",") + 1) > max_ids:
            refuse_length(count, max_ids)
        return self._decode(name, value, list[int], INPUTS)

    def _pop(self, name: str, default: Any = None) -> Any:
        self.looked_up.add(name)
        return self._unread.pop(name, default)

    def _typed(self, name: str, default: Any, kind: Any, meaning: str) -> Any:
        return self._decode(name, self._pop(name, default), kind, meaning)

    def _decode(self, name: str, value: Any, kind: Any, meaning: str) -> Any:
        if not isinstance(value, Raw):
            return value
        try:
            return _decode(value, kind)
        except (ValueError, RecursionError):
            quoted = bytes(memoryview(value)[:QUOTED_BYTES]).decode(errors="replace")
            quoted += "..." if len(value) > QUOTED_BYTES else ""
            raise ApiError(400, f"{name}={quoted} must be {meaning}", param=name) from None


def _decode(data: Any, kind: Any) -> Any:
    names = itertools.count()

    def take_name(_: type, name: str) -> _Name:
        if next(names) == MAX_FIELDS:
            raise ValueError(f"it has more than {MAX_FIELDS} fields")
        return _Name(name)

    return msgspec.json.decode(data, type=kind, dec_hook=take_name)


def _check_parts(name: str, value: Raw, limit: int, *marks: bytes) -> None:
    """Refuse a long value before it is decoded if it has more than ``limit`` of the ``marks``."""
    if len(value) > LONG_VALUE and sum(map(bytes(value).count, marks)) > limit:
        raise ApiError(400, f"{name} has more than {limit} values", param=name)


def _check_depth(name: str, value: Any, levels: int) -> None:
    if not isinstance(value, dict | list):
        return
    if not levels:
        raise ApiError(400, f"{name} is nested deeper than {MAX_DEPTH} levels", param=name)
    for item in value.values() if isinstance(value, dict) else value:
        _check_depth(name, item, levels - 1)


@contextmanager
def client_names(
    prompt: str | None = None, sources: Mapping[str, str] = MappingProxyType({}), **renames: str
) -> Iterator[None]:
    """Turn a ValueError into status 400 with OpenAI's field names; also works as a decorator.

    Quoted values in the message are not changed.

    Args:
        prompt: the field that holds the prompt; ``None`` keeps the engine's names.
        sources: :attr:`Body.sources`, which may grow within the context.
        **renames: the client's names for more parameters; keywords are the engine's names.
    """
    try:
        yield
    except ValueError as error:
        # cut the message first: search time grows with the square of the number of open quotes
        message, param, code = str(error)[: MAX_MESSAGE + 1], None, None
        names = {} if prompt is None else {prompt: prompt} | CLIENT_NAMES | renames
        names |= {name: renames.get(field, field) for name, field in sources.items()}
        message = _WORD.sub(lambda word: names.get(word[0], word[0]), message)
        if isinstance(error, ParameterError):
            param, code = names.get(error.param or ""), error.code
            if code == CONTEXT_EXCEEDED:
                # clients recognise this wording, then shorten the prompt or use another model
                message = f"This model's maximum context length is {error.limit} tokens; {message}"
                param = prompt
        raise ApiError(400, message, param=param, code=code) from error


class IgnoredFields:
    """Counts unknown request fields, and logs each of the first ``MAX_NAMES`` names once."""

    def __init__(self) -> None:
        self.count = 0
        self._names: set[str] = set()

    def add(self, name: str) -> None:
        self.count += 1
        name = name[:MAX_NAME]
        if len(self._names) < MAX_NAMES and name not in self._names:
            self._names.add(name)
            logger.warning("ignoring unknown request field %r", name)


def is_neutral(name: str, value: Any) -> bool:
    if name in REFUSED:
        choices = REFUSED[name][1]
        return any(value == choice and type(value) is type(choice) for choice in choices)
    return name not in SAMPLING and not value  # for example false, 0, "" or []


def finish_fields(body: Body, ignored: IgnoredFields) -> None:
    """Ignore unknown fields; refuse misspelled ones and those that would change the response."""
    is_native = "sampling_params" in body.looked_up
    candidates = {*body.looked_up, *REFUSED}
    elsewhere = "pass it in sampling_params" if is_native else "other routes do"
    num_compared = 0
    for name in body.unread:
        value = body.take(name)
        if name in REFUSED or name in ELSEWHERE:
            if is_neutral(name, value):
                continue
            message = f"this route does not accept {name}; {elsewhere}"
            if name in REFUSED:
                message = f"{name} is not supported: {REFUSED[name][0]}"
            raise ApiError(400, message, param=name, code="unsupported_field")
        if name in IGNORED:
            continue
        num_compared += 1
        if num_compared <= MAX_COMPARED and (
            near := get_close_matches(name[:MAX_NAME], candidates, 1, LIKENESS)
        ):
            message = f"unknown field {short(name)}; did you mean {near[0]!r}?"
            raise ApiError(400, message, param=name, code="unknown_field")
        ignored.add(name)
