"""JSON bodies of requests: their fields, decoded as they are taken, and what is refused of them.

A field stays JSON text until it is taken with its type, so that a large body of wrong values costs
nothing.
"""

import itertools
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from specjax.checks import CONTEXT_LENGTH_EXCEEDED, ParameterError, is_integer, short
from specjax.engine.requests import refuse_length
from specjax.sampling.params import SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")
# A message may quote a value of the request, which may be as long as the request.
MAX_MESSAGE = 1000
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# A value of any type: commas and brackets of a long one, and nesting. 2**19 objects take 120 MB.
LONG_VALUE, MAX_PARTS, MAX_DEPTH = 2**20, 2**19, 64
QUOTED_BYTES = 80
MAX_FIELDS = 256  # of one object, known and unknown
INPUTS = "a text, a list of token ids, or a list of either"
_NULL = Raw(b"null")
_INPUTS = re.compile(rb'\s*(\[?)\s*(["\[]?)')
# a quoted value of a message, or a word
_WORD = re.compile(r"""(?<!\w)(["'])(?:\\.|(?!\1)[^\\])*\1|\w+""", re.DOTALL)

MAX_NAMES, MAX_NAME = 32, 64  # names that are logged, and characters of one
LIKENESS = 0.8  # of a misspelt name, up to 1
MAX_COMPARED = 16  # unknown names of a request that are compared with known ones, 70 us each
# Fields with the name that the engine has for them.
NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    **{
        name: name
        for name in "temperature top_p top_k min_p frequency_penalty presence_penalty "
        "repetition_penalty logit_bias n stop stop_token_ids ignore_eos speculative no_stop_trim "
        "skip_special_tokens".split()
    },
    "include_stop_str_in_output": "no_stop_trim",
}
CLIENT_NAMES = {theirs: ours for ours, theirs in NAMES.items()}
# about the caller, the account or the transport: the text would be the same
IGNORED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "parallel_tool_calls prediction separate_reasoning stream_reasoning log_metrics "
    "no_logs priority request_id".split()
)
_GRAMMAR = "constrained decoding is not supported"
_TOOLS = "tool calls are not supported; with tool_choice 'none' the template sees tools"
_TEXT = "only text is supported"
_BEAM = "beam search is not supported"
_PROCESSORS = "custom logit processors are not supported"
_TEMPLATE = "give it in chat_template_kwargs"
_SCORES = "give return_logprob and top_logprobs_num"
# Why a field is refused, and the values that ask for nothing.
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    name: (reason, neutral)
    for names, reason, neutral in (
        ("response_format", _GRAMMAR, ({"type": "text"},)),
        ("guided_json guided_regex guided_choice guided_grammar", _GRAMMAR, ()),
        ("structured_outputs json_schema regex ebnf structural_tag grammar", _GRAMMAR, ()),
        ("allowed_token_ids", _GRAMMAR, ()),
        ("tools functions", _TOOLS, ([],)),
        ("tool_choice function_call", _TOOLS, ("none", "auto")),
        ("web_search_options", _TOOLS, ()),
        ("audio image_data audio_data video_data", _TEXT, ([],)),
        ("multi_modal_data input_embeds", _TEXT, ([],)),
        ("modalities", _TEXT, (["text"],)),
        ("mm_processor_kwargs", _TEXT, ({},)),
        ("prompt_embeds", _TEXT, ()),
        ("suffix", "text is only continued at its end", ("",)),
        ("use_beam_search", _BEAM, (False,)),
        ("length_penalty", _BEAM, (1, 1.0)),
        ("prompt_logprobs", "give echo and logprobs, or use /generate with logprob_start_len", ()),
        ("truncate_prompt_tokens", "prompts are not cut; shorten them", ()),
        ("bad_words", "give their tokens a logit_bias of -100", ([],)),
        ("logits_processors", _PROCESSORS, ([],)),
        ("custom_logit_processor", _PROCESSORS, ()),
        ("stop_regex", "stop takes plain strings", ([],)),
        ("spaces_between_special_tokens", "the tokenizer decides", (True, False)),
        (
            "typical_p top_a top_n_sigma tfs mirostat mirostat_mode dry_multiplier "
            "xtc_probability epsilon_cutoff eta_cutoff dynatemp_range",
            "this way to sample is not supported",
            (0, 0.0),
        ),
        ("lora_path lora_request", "adapters are not supported", ()),
        ("chat_template", "the checkpoint's own is used", ()),
        ("documents", "give them in chat_template_kwargs", ([],)),
        ("reasoning_effort reasoning thinking enable_thinking verbosity", _TEMPLATE, ()),
        ("do_sample", "give temperature, which is 0 for the likeliest tokens", ()),
        ("session_params", "a request has its whole text", ()),
        ("token_ids_logprob", _SCORES, ([],)),
        ("return_entropy", _SCORES, (False,)),
        ("return_hidden_states", "they are not sent over HTTP", (False,)),
        ("return_bytes", "answers are text", (False,)),
        ("background", "an answer is waited for", (False,)),
        ("return_tokens_as_token_ids", "logprobs name tokens by their text", (False,)),
    )
    for name in names.split()
}
# Fields that one route takes and another does not.
SAMPLING = frozenset((*NAMES, *NAMES.values()))
ELSEWHERE = SAMPLING | frozenset(
    "prompt messages text input_ids sampling_params echo logprobs top_logprobs return_logprob "
    "top_logprobs_num logprob_start_len max_completion_tokens".split()
)


class ApiError(Exception):
    """An error answer: an HTTP status, and what OpenAI's ``error`` object says."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def json(self) -> bytes:
        message = str(self)
        if len(message) > MAX_MESSAGE:
            message = message[:MAX_MESSAGE] + "..."
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = KINDS.get(self.status, kind)
        error = {"message": message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


class _Name(str):
    """The name of a field; decoding counts the names of an object by this type."""


_OBJECT = dict[_Name, Raw]


def parse_object(data: bytes | bytearray) -> dict[str, Any]:
    """The fields of a JSON object as JSON text; ApiError if it is not an object of valid JSON."""
    try:
        return _decode(data, _OBJECT)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise ApiError(400, f"the body must be a JSON object: {error}") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


class Body:
    """Fields of a JSON object, each taken once; null counts as absent.

    Every method raises an ApiError of status 400 that names the field if its value does not fit.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        absent = (None, _NULL)
        self._left = {name: value for name, value in values.items() if value not in absent}
        self.known: set[str] = set()  # names that were asked for

    def __contains__(self, name: str) -> bool:
        self.known.add(name)
        return name in self._left

    @property
    def left(self) -> tuple[str, ...]:
        return tuple(self._left)

    def take(self, name: str, default: Any = None) -> Any:
        """A value of any type, bounded in size and depth."""
        value = self._pop(name, default)
        if not isinstance(value, Raw):
            return value
        _check_parts(name, value, MAX_PARTS, b",", b"[", b"{")
        value = self._decode(name, value, Any, "a JSON value")
        _check_depth(name, value, MAX_DEPTH)
        return value

    def put(self, name: str, value: Any) -> None:
        """Add a field that came under another name, or that was only looked at."""
        if value is not None:
            self._left[name] = value

    def flag(self, name: str, default: bool = False) -> bool:
        return self._typed(name, default, bool, "true or false")

    def text(self, name: str, default: str | None = None) -> Any:
        return self._typed(name, default, str, "a string")

    def fields(self, name: str) -> "Body":
        """A nested object, empty if it is absent."""
        return Body(self._typed(name, {}, _OBJECT, f"an object of at most {MAX_FIELDS} fields"))

    def integer(self, name: str, default: Any = None, *, at_least: int, at_most: int) -> Any:
        limits = f"an integer from {at_least} to {at_most}"
        value = self._typed(name, default, int, limits)
        if value is not default and not at_least <= value <= at_most:
            raise ApiError(400, f"{name}={value} must be {limits}", param=name)
        return value

    def inputs(self, name: str, *, max_ids: int, max_rows: int) -> Any:
        """A text, a list of token ids, or a list of either; ``None`` if it is absent.

        Args:
            name: the field.
            max_ids: token ids of one input. ValueError for more, before they are decoded.
            max_rows: inputs in a list of lists.
        """
        value = self._pop(name)
        if not isinstance(value, Raw):
            return value
        found = _INPUTS.match(value)
        assert found is not None  # it matches any text
        if not found[1]:
            return self._decode(name, value, str, INPUTS)
        if found[2] == b'"':
            _check_parts(name, value, MAX_PARTS, b'",')
            return self._decode(name, value, list[str], INPUTS)
        if found[2] != b"[":
            return self._ids(name, value, max_ids)
        _check_parts(name, value, max_rows + 1, b"[")
        rows = self._decode(name, value, list[Raw], INPUTS)
        return [self._ids(name, row, max_ids) for row in rows]

    def _ids(self, name: str, value: Raw, max_ids: int) -> Any:
        # An id and its comma take two bytes.
        if len(value) // 2 > max_ids and (count := bytes(value).count(b",") + 1) > max_ids:
            refuse_length(count, max_ids)
        return self._decode(name, value, list[int], INPUTS)

    def _pop(self, name: str, default: Any = None) -> Any:
        self.known.add(name)
        return self._left.pop(name, default)

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
            raise ValueError(f"more than {MAX_FIELDS} fields")
        return _Name(name)

    return msgspec.json.decode(data, type=kind, dec_hook=take_name)


def _check_parts(name: str, value: Raw, limit: int, *marks: bytes) -> None:
    """Refuse a long value of too many parts before it is decoded, by the marks of a part."""
    if len(value) > LONG_VALUE and sum(map(bytes(value).count, marks)) > limit:
        raise ApiError(400, f"{name} has more than {limit} values", param=name)


def _check_depth(name: str, value: Any, left: int) -> None:
    if not isinstance(value, dict | list):
        return
    if not left:
        raise ApiError(400, f"{name} is nested deeper than {MAX_DEPTH} levels", param=name)
    for item in value.values() if isinstance(value, dict) else value:
        _check_depth(name, item, left - 1)


def take_sampling(body: Body, max_tokens: int) -> SamplingParams:
    """Sampling parameters from OpenAI's fields; ``max_tokens`` applies if the request has none."""
    given: dict[str, Any] = {NAMES[name]: body.take(name) for name in NAMES if name in body}
    given.setdefault("max_new_tokens", max_tokens)
    if given.get("top_k") == 0 and is_integer(given["top_k"]):
        given["top_k"] = -1  # vLLM's other way to turn it off
    seed = given.get("sampling_seed")
    if isinstance(seed, int) and -(2**63) <= seed < 0:
        given["sampling_seed"] = seed % 2**64
    return SamplingParams(**given)


@contextmanager
def client_names(prompt: str | None = None, **others: str) -> Iterator[None]:
    """Turn a ValueError into status 400, with OpenAI's names of fields; decorates readers too.

    Names inside quoted values of a message stay.

    Args:
        prompt: the field that the prompt comes from; ``None`` keeps the engine's names.
        **others: further names of the engine with the client's.
    """
    try:
        yield
    except ValueError as error:
        message, param, code = str(error), None, None
        names = {} if prompt is None else {prompt: prompt} | CLIENT_NAMES | others
        message = _WORD.sub(lambda word: names.get(word[0], word[0]), message)
        if isinstance(error, ParameterError):
            param, code = names.get(error.param or ""), error.code
            if code == CONTEXT_LENGTH_EXCEEDED:
                # by these words clients know the error, and turn to another model or shorten it
                message = f"This model's maximum context length is {error.limit} tokens; {message}"
                param = prompt
        raise ApiError(400, message, param=param, code=code) from error


class IgnoredFields:
    """Counts unknown fields of requests, and logs the first names once each."""

    def __init__(self) -> None:
        self.count = 0
        self._names: set[str] = set()

    def add(self, name: str) -> None:
        self.count += 1
        name = name[:MAX_NAME]
        if len(self._names) < MAX_NAMES and name not in self._names:
            self._names.add(name)
            logger.warning("the field %r of requests is unknown and ignored", name)


def is_neutral(name: str, value: Any) -> bool:
    if name in REFUSED:
        choices = REFUSED[name][1]
        return any(value == one and type(value) is type(one) for one in choices)
    return name not in SAMPLING and not value  # such as false, 0, "" or []


def finish_fields(body: Body, ignored: IgnoredFields) -> None:
    """Ignore the fields that nobody has taken, but refuse those that would change the answer.

    What looks like a misspelt name of a known field is refused too.
    """
    is_native = "sampling_params" in body.known
    known = {*body.known, *REFUSED}
    elsewhere = "give it in sampling_params" if is_native else "other routes do"
    num_compared = 0
    for name in body.left:
        value = body.take(name)
        if name in REFUSED or name in ELSEWHERE:
            if is_neutral(name, value):
                continue
            message = f"this route does not take {name}; {elsewhere}"
            if name in REFUSED:
                message = f"{name} is not supported: {REFUSED[name][0]}"
            raise ApiError(400, message, param=name, code="unsupported_field")
        if name in IGNORED:
            continue
        num_compared += 1
        if num_compared <= MAX_COMPARED and (
            near := get_close_matches(name[:MAX_NAME], known, 1, LIKENESS)
        ):
            message = f"unknown field {short(name)}; did you mean {near[0]!r}?"
            raise ApiError(400, message, param=name, code="unknown_field")
        ignored.add(name)
