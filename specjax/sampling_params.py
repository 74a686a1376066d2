"""Sampling parameters of a request, with SGLang's names and defaults."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

# below this SGLang treats a temperature as greedy
GREEDY_TEMPERATURE = 1e-6


def _check(condition: bool, name: str, value: Any, limit: str) -> None:
    if not condition:
        raise ValueError(f"{name}={value!r} must be {limit}")


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
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None

    def __post_init__(self) -> None:
        n = self.max_new_tokens
        _check(_is_int(n) and n >= 1, "max_new_tokens", n, "an integer of at least 1")
        t = self.temperature
        is_number = isinstance(t, (int, float)) and not isinstance(t, bool)
        _check(is_number and math.isfinite(t) and t >= 0, "temperature", t, "finite and at least 0")
        p = self.top_p
        _check(isinstance(p, (int, float)) and 0 < p <= 1, "top_p", p, "in (0, 1]")
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
        unknown = sorted(set(params) - set(names))
        if unknown:
            raise ValueError(f"sampling parameters {unknown} are not supported; supported: {names}")
        return cls(**params)
