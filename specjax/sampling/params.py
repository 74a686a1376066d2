"""Sampling parameters of a request, with SGLang's names and defaults."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Annotated, Any, get_args

import numpy as np
from msgspec import Meta

from specjax.checks import (
    Natural,
    ParameterError,
    Positive,
    annotations,
    check_integer,
    check_number,
    convert,
    is_integer,
    refused,
    short,
)

# as in SGLang, temperatures below this are greedy
GREEDY_TEMPERATURE = 1e-6
# limits, because the search for stop strings after every token delays all requests
MAX_STOP_STRINGS = 128
MAX_STOP_LENGTH = 256
INT32_MAX = np.iinfo(np.int32).max
FLOAT32_MAX = float(np.finfo(np.float32).max)

# Limits that the library's own limits on work permit with real vocabularies: 200 words of 8.
MAX_BAD_WORDS, MAX_BAD_CHARACTERS = 128, 1024

# parameters that limit a text by a grammar
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag", "allowed_token_ids", "bad_words")
# parameters in SGLang that are rejected here, with the reason
REFUSED = {
    "stop_regex": "stop takes plain strings; patterns are not supported",
    "spaces_between_special_tokens": "the tokenizer decides how special tokens are written",
    "custom_params": "custom logit processors are not supported",
    "stream_interval": "a stream yields as soon as there are new tokens",
}
# grammars that are lists -> their items
LISTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "allowed_token_ids": ("token id", lambda item: is_integer(item) and item >= 0),
    "bad_words": ("string that is not empty", lambda item: isinstance(item, str) and item != ""),
}
# names of the same parameters in other engines
ALIASES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters that decide how the tokens of a request are chosen and when it ends.

    Attributes:
        max_new_tokens: maximum completion tokens; the context limits it too. 0 scores the prompt.
        temperature: 0 (or below 1e-6) means greedy.
        top_k: keep the k most likely tokens; -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        min_p: keep tokens with at least this fraction of the best one's probability; 0 keeps all.
        repetition_penalty: divides positive logits of tokens in the prompt or completion, and
            multiplies negative ones, from 0.01 to 2; 1 has no effect.
        frequency_penalty: subtracted from a logit per occurrence in the completion, from -2 to 2.
        presence_penalty: subtracted once if the token occurs in the completion, from -2 to 2.
        logit_bias: added to token logits, from -100 to 100, by token id (an integer or its digits).
        min_new_tokens: minimum completion tokens before an end token; stop strings still apply.
        n: number of completions per prompt.
        stop: strings that end the request, at most 128 of at most 256 characters (one per --stop);
            they are removed from the text. A string that is a special token stops at this token.
        no_stop_trim: keep the stop string or end token that ended the request in the text.
        skip_special_tokens: leave special tokens out of the text.
        stop_token_ids: token ids that end the request, in addition to the model's end tokens.
        ignore_eos: do not stop at the model's own end tokens.
        sampling_seed: random seed of this request; with it, the output depends only on the request.
        speculative: use drafts if the engine has them; with lossless settings, texts stay the same.
        json_schema: JSON schema (text, a mapping or True) that the completion must match. At most
            one of this and the next three; they need the engine option ``grammar_backend``.
        regex: regular expression (Rust syntax) that the whole completion must match.
        ebnf: grammar, in Lark's or llama.cpp's (GBNF) notation, that the completion must match.
        structural_tag: tags in free text after which a JSON schema holds, as in SGLang.
        allowed_token_ids: token ids that the completion may have; without an end token among them
            it ends at a stop string or at its maximum length.
        bad_words: strings that the completion must not contain, however they are split into tokens;
            at most 128 with 1,024 characters together. End tokens end the text.
        cache_salt: text of at most 256 characters; the prefix cache shares pages only among
            requests with the same salt, so nobody else can find out by time what they asked.
        thinking_token_budget: maximum tokens of reasoning, after which its end is forced; needs the
            engine options ``reasoning_parser`` and ``grammar_backend``.
        simulate_acceptance: from 0 to 1, replaces the engine option of this name, if that is set.

    Arguments are copied. Raises ValueError for a value outside its range.
    """

    max_new_tokens: Natural = 128
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: int = -1
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=2)] = 1.0
    logit_bias: Mapping[int | str, float] | None = None
    min_new_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] = 0
    n: Positive = 1
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    sampling_seed: int | None = None
    speculative: bool = True
    simulate_acceptance: Annotated[float, Meta(ge=0, le=1)] | None = None
    json_schema: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: tuple[str, ...] | list[str] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None

    def __post_init__(self) -> None:
        for name, kind in _kinds().items():
            convert(name, getattr(self, name), kind)
        if self.min_new_tokens > self.max_new_tokens:
            demand = f"must be at most max_new_tokens={self.max_new_tokens}"
            raise refused("min_new_tokens", self.min_new_tokens, demand, self.max_new_tokens)
        check_number("temperature", self.temperature, at_most=FLOAT32_MAX)
        if not is_integer(self.top_k) or (self.top_k < 1 and self.top_k != -1):
            raise refused("top_k", self.top_k, "must be -1 (off) or an integer of at least 1")
        if self.cache_salt is not None and not _is_unicode(self.cache_salt):
            raise refused("cache_salt", self.cache_salt, "must be valid Unicode")
        if self.sampling_seed is not None:
            check_integer("sampling_seed", self.sampling_seed, 0, 2**64 - 1)
        self._copy_stops()
        self._copy_biases()
        self._copy_grammars()

    def _copy_stops(self) -> None:
        stop, ids = self.stop, self.stop_token_ids
        if isinstance(stop, list | tuple):
            object.__setattr__(self, "stop", tuple(stop))
        elif stop is not None and not isinstance(stop, str):
            raise refused("stop", stop, "must be a string or a list of strings")
        strings = self.stop_strings
        if len(strings) > MAX_STOP_STRINGS:
            raise ParameterError(
                f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS} are supported",
                param="stop",
                limit=MAX_STOP_STRINGS,
            )
        for text in strings:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
                demand = f"must have 1 to {MAX_STOP_LENGTH} characters each"
                raise refused("stop", stop, demand, MAX_STOP_LENGTH)
        if ids is not None:
            if not isinstance(ids, list | tuple) or not all(map(is_integer, ids)):
                raise refused("stop_token_ids", ids, "must be a list of integers")
            object.__setattr__(self, "stop_token_ids", tuple(ids))

    def _copy_biases(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise refused("logit_bias", self.logit_bias, "must map token ids to biases")
        bias = dict(self.logit_bias)
        object.__setattr__(self, "logit_bias", bias)
        for token, value in bias.items():
            # SGLang and OpenAI write the ids as digits, because JSON keys must be strings
            is_id = token.isdecimal() if isinstance(token, str) else is_integer(token)
            if not is_id or int(token) < 0:
                message = f"logit_bias={short(bias)}: {short(token)} is not a token id"
                raise ParameterError(message, param="logit_bias")
            check_number(f"logit_bias[{short(token)}]", value, at_least=-100, at_most=100)
        if len(dict(self.biases)) < len(self.biases):
            raise refused("logit_bias", bias, "must not contain a token twice")

    def _copy_grammars(self) -> None:
        if isinstance(self.bad_words, list | tuple) and not self.bad_words:
            object.__setattr__(self, "bad_words", None)
        grammars = [name for name in GRAMMARS if getattr(self, name) is not None]
        for name in grammars:
            value = getattr(self, name)
            kinds = {"json_schema": Mapping | bool, "structural_tag": Mapping}.get(name, ())
            if name in LISTS:
                kind, is_item = LISTS[name]
                if not isinstance(value, list | tuple) or not value or not all(map(is_item, value)):
                    raise refused(name, value, f"must be a list of at least one {kind}")
                object.__setattr__(self, name, tuple(value))
            elif isinstance(value, kinds):
                try:
                    object.__setattr__(self, name, json.dumps(value))
                except (TypeError, ValueError, RecursionError) as error:
                    raise refused(name, value, f"must be JSON: {error}") from error
            elif not isinstance(value, str):
                raise refused(name, value, "must be a string")
        if (words := self.bad_words) is not None:
            counts = (
                ("words", len(words), MAX_BAD_WORDS),
                (
                    "characters",
                    sum(map(len, words)),
                    MAX_BAD_CHARACTERS,
                ),
            )
            for unit, count, limit in counts:
                if count > limit:
                    message = f"bad_words has {count} {unit}; at most {limit} are supported"
                    raise ParameterError(message, param="bad_words", limit=limit)
            if self.ignore_eos:
                demand = "needs ignore_eos=False, because end tokens end the text"
                raise refused("bad_words", words, demand)
        if len(grammars) > 1:
            raise ParameterError(f"give at most one of {grammars}", param=grammars[1])
        if grammars and self.min_new_tokens:
            demand = f"must be 0 with {grammars[0]}, which decides where the text may end"
            raise refused("min_new_tokens", self.min_new_tokens, demand, 0)

    @property
    def grammar(self) -> tuple[str, str] | None:
        """Name and text of the grammar, if there is one; the text of a list is JSON."""
        for name in GRAMMARS:
            if (value := getattr(self, name)) is not None:
                if name == "allowed_token_ids":
                    value = sorted(set(value))
                return name, json.dumps(value) if name in LISTS else value
        return None

    @cached_property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as pairs of token id and value, as given at construction."""
        return tuple((int(token), float(value)) for token, value in (self.logit_bias or {}).items())

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on which tokens occurred before."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @classmethod
    def of(cls, params: "SamplingParams | Mapping[str, Any] | None") -> "SamplingParams":
        """Accept an instance, a mapping with the same names, or ``None`` for the defaults."""
        if params is None:
            return cls()
        if isinstance(params, cls):
            return params
        if not isinstance(params, Mapping):
            raise refused("sampling_params", params, "must be SamplingParams, a mapping or None")
        names = [f.name for f in fields(cls)]
        unknown = sorted(map(str, set(params) - set(names)))
        for name in unknown:
            if name in REFUSED:
                raise refused(name, params[name], f"is not supported: {REFUSED[name]}")
            if name in ALIASES:
                message = f"{short(name)} is not supported; use {ALIASES[name]!r}"
                raise ParameterError(message, param=name)
        if unknown:
            raise ParameterError(
                f"sampling parameters {short(unknown)} are not supported; supported: {names}"
            )
        return cls(**params)


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar, in Lark's notation, of texts that equal one of ``choices``."""
    return f"start: {' | '.join(map(json.dumps, choices))}"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


@cache
def _kinds() -> dict[str, Any]:
    """The type hints that fully describe the values that their parameter may have."""
    hints = annotations(SamplingParams).items()
    full = {n for n, hint in hints for x in (hint, *get_args(hint)) if hasattr(x, "__metadata__")}
    return {name: hint for name, hint in hints if hint is bool or name in full}
