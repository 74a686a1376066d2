"""From OpenAI's sampling fields, and the usual extensions of them, to the engine's."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specjax.checks import is_integer
from specjax.sampling.params import SamplingParams
from specjax.server.body import Body
from specjax.server.errors import ApiError

# fields with the name that the engine has for them
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
_CLIENT_NAMES = {theirs: ours for ours, theirs in NAMES.items() if ours != theirs}
_ENGINE_NAMES = re.compile(rf"\b({'|'.join(_CLIENT_NAMES)})\b")


def take_sampling(body: Body, max_tokens: int) -> SamplingParams:
    """Sampling parameters of a request, ``max_tokens`` at most where it does not say."""
    given: dict[str, Any] = {NAMES[name]: body.take(name) for name in NAMES if name in body}
    given.setdefault("max_new_tokens", max_tokens)
    if given.get("top_k") == 0 and is_integer(given["top_k"]):
        given["top_k"] = -1  # vLLM's other way to turn it off
    seed = given.get("sampling_seed")
    if isinstance(seed, int) and -(2**63) <= seed < 0:
        given["sampling_seed"] = seed % 2**64
    with client_names():
        return SamplingParams(**given)


@contextmanager
def client_names(
    source: str | None = None, *, is_native: bool = False, **others: str
) -> Iterator[None]:
    """A ValueError about an engine's name becomes one about OpenAI's name of it.

    Args:
        source: the field that the prompt comes from.
        is_native: the client uses the engine's names.
        **others: further names of the engine with the client's.
    """
    try:
        yield
    except ValueError as error:
        message = str(error)
        if not is_native:
            message = _ENGINE_NAMES.sub(lambda found: _CLIENT_NAMES[found[0]], message)
        for ours, theirs in others.items():
            message = message.replace(ours, theirs)
        first = re.match(r"\w+", message)
        known = () if is_native else {*NAMES, *others.values()}
        param = first[0] if first is not None and first[0] in known else None
        code = None
        if "leaves no room" in message:
            param, code = source, "context_length_exceeded"
            # by these words clients know the error, and turn to another model or a shorter prompt
            limit = re.search(r"context_length=(\d+)", message)
            if limit is not None:
                message = f"This model's maximum context length is {limit[1]} tokens; {message}"
        raise ApiError(400, message, param=param, code=code) from error
