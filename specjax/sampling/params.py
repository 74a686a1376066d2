"""Sampling parameters of a request, with SGLang's names and defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

# below this SGLang treats a temperature as greedy
GREEDY_TEMPERATURE = 1e-6
FLOAT32_MAX = 3.4028235e38

# parameters of SGLang that are refused, with the reason
_GRAMMAR = "constrained decoding is not supported"
REFUSED = {
    "json_schema": _GRAMMAR,
    "regex": _GRAMMAR,
    "ebnf": _GRAMMAR,
    "structural_tag": _GRAMMAR,
    "stop_regex": "stop takes plain strings; patterns are not supported",
    "no_stop_trim": "stop strings are always cut from the text",
    "skip_special_tokens": "special tokens are always left out of the text",
    "spaces_between_special_tokens": "special tokens are always left out of the text",
    "custom_params": "custom logit processors are not supported",
    "stream_interval": "a stream yields as soon as there is something new",
}
# what other engines call a parameter
OTHER_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}


def _check(condition: bool, name: str, value: Any, limit: str) -> None:
    if not condition:
        raise ValueError(f"{name}={value!r} must be {limit}")


def _is_number(value: Any) -> bool:
    """Whether a value is a real number that float32 can hold."""
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and abs(value) <= FLOAT32_MAX


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen and when it ends.

    Attributes:
        max_new_tokens: completion tokens at most; the context limit may end a request earlier.
        temperature: 0 (or below 1e-6) is greedy.
        top_k: keep the k most likely tokens; -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        min_p: keep tokens at least this many times as likely as the best one; 0 keeps all.
        repetition_penalty: divides positive logits of tokens in prompt or completion, and
            multiplies negative ones; 1 changes nothing.
        frequency_penalty: taken off a logit for every time that its token is in the completion.
        presence_penalty: taken off once if it is there at all.
        logit_bias: added to the logits of these tokens, by token id, an integer or its digits.
        min_new_tokens: completion tokens before an end token may come; stop strings are not held
            back.
        n: completions of each prompt.
        stop: strings that end the request; they are cut from the text.
        stop_token_ids: token ids that end the request, beside the model's own end tokens.
        ignore_eos: do not stop at the model's own end tokens.
        sampling_seed: with a seed the output of a request depends on nothing but the request.

    Raises:
        ValueError: for a value outside its range.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int | str, float] | None = None
    min_new_tokens: int = 0
    n: int = 1
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None

    def __post_init__(self) -> None:
        n = self.max_new_tokens
        _check(_is_int(n) and n >= 1, "max_new_tokens", n, "an integer of at least 1")
        least = self.min_new_tokens
        limit = f"an integer from 0 to max_new_tokens={n}"
        _check(_is_int(least) and 0 <= least <= n, "min_new_tokens", least, limit)
        _check(_is_int(self.n) and self.n >= 1, "n", self.n, "an integer of at least 1")
        t = self.temperature
        _check(_is_number(t) and t >= 0, "temperature", t, "finite and at least 0")
        p = self.top_p
        _check(_is_number(p) and 0 < p <= 1, "top_p", p, "in (0, 1]")
        p = self.min_p
        _check(_is_number(p) and 0 <= p <= 1, "min_p", p, "in [0, 1]")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _check(_is_number(value) and -2 <= value <= 2, name, value, "in [-2, 2]")
        value = self.repetition_penalty
        _check(_is_number(value) and 0 < value <= 2, "repetition_penalty", value, "in (0, 2]")
        self._check_bias()
        k = self.top_k
        _check(_is_int(k) and (k == -1 or k >= 1), "top_k", k, "-1 (off) or at least 1")
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            allowed = (str, list, tuple) if name == "stop" else (list, tuple)
            kind = "strings" if name == "stop" else "integers"
            _check(value is None or isinstance(value, allowed), name, value, f"a list of {kind}")
        for text in self.stop_strings:
            _check(isinstance(text, str) and text != "", "stop", self.stop, "non-empty strings")
        ids = self.stop_token_ids or ()
        _check(all(_is_int(i) for i in ids), "stop_token_ids", ids, "integers")
        _check(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "a bool")
        seed = self.sampling_seed
        _check(
            seed is None or (_is_int(seed) and 0 <= seed < 2**64),
            "sampling_seed",
            seed,
            "an integer in [0, 2**64)",
        )

    def _check_bias(self) -> None:
        bias = self.logit_bias
        if bias is None:
            return
        _check(isinstance(bias, Mapping), "logit_bias", bias, "a mapping of token ids to numbers")
        for token, value in bias.items():
            # SGLang and OpenAI write the ids as digits, since JSON knows no other keys
            is_id = token.isdecimal() if isinstance(token, str) else _is_int(token) and token >= 0
            _check(is_id, "logit_bias", bias, f"keyed by token ids, which {token!r} is not")
            _check(_is_number(value), "logit_bias", bias, f"of finite numbers, not {value!r}")
        _check(len(self.biases) == len(bias), "logit_bias", bias, "without a token given twice")

    @property
    def biases(self) -> dict[int, float]:
        """``logit_bias`` by token id."""
        return {int(token): float(value) for token, value in (self.logit_bias or {}).items()}

    @property
    def has_penalties(self) -> bool:
        """Whether tokens are charged for what came before them."""
        return (
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @classmethod
    def of(cls, params: "SamplingParams | Mapping[str, Any] | None") -> "SamplingParams":
        """Accept an instance, a mapping with the same names, or ``None`` for the defaults.

        Raises:
            ValueError: for names that are not supported.
        """
        if params is None:
            return cls()
        if isinstance(params, cls):
            return params
        if not isinstance(params, Mapping):
            raise ValueError(
                f"sampling_params={params!r} must be a SamplingParams, a mapping or None"
            )
        names = [f.name for f in fields(cls)]
        unknown = sorted(map(str, set(params) - set(names)))
        for name in unknown:
            if name in REFUSED:
                raise ValueError(f"{name}={params[name]!r} is not supported: {REFUSED[name]}")
            if name in OTHER_NAMES:
                raise ValueError(f"{name!r} is called {OTHER_NAMES[name]!r} here")
        if unknown:
            raise ValueError(f"sampling parameters {unknown} are not supported; supported: {names}")
        return cls(**params)
