"""Messages between a decode process, which asks, and a prefill process, which does prompts.

An array is anything with ``__array__``: the sender may give arrays of a device, the receiver gets
those of numpy. The wire checks types, ranges and sizes; that shapes and dtypes of arrays are those
of the model is for the receiver to check.
"""

from dataclasses import dataclass
from typing import Annotated, Any

Array = Any
Natural = Annotated[int, "from 0 to 2**64 - 1"]


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The first message of each side.

    Attributes:
        facts: JSON values that both sides have to agree on. Its ``weights``, a string, is the
            fingerprint of this side's weights, as in :class:`Weights`.
    """

    facts: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The decode side asks: prefill this prompt, and send its KV rows.

    Attributes:
        id: names the job in all messages of this connection.
        rid: the request's id, for logs and traces.
        input_ids: i32 [n], the whole prompt.
        start: the token from which KV rows are to be sent; those before it are there already.
        params: sampling parameters, JSON values.
        seed: of the request's random numbers.
        end_token_ids: tokens that end the request.
        top_logprobs: how many of the likeliest tokens to give with each token; ``None`` for no
            log probabilities at all.
        logprob_start_len: the prompt's token from which on it has log probabilities too; ``None``
            for none of them.
        return_hidden_states: whether hidden states of the first token are wanted.
        timeout: seconds after which nobody waits for it any more; ``None`` for no limit.
    """

    id: Natural
    rid: str
    input_ids: Array
    start: Natural
    params: dict[str, Any]
    seed: Natural
    end_token_ids: list[Natural]
    top_logprobs: int | None
    logprob_start_len: int | None
    return_hidden_states: bool
    timeout: float | None


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """The decode side says: nobody waits for this job any more."""

    id: Natural


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The prefill side sends KV rows of the tokens ``start`` to ``start + count - 1``.

    Attributes:
        kv: one array for each pool of rows, in the dtype of the pool; what lies behind ``count``
            tokens is padding.
    """

    id: Natural
    start: Natural
    count: Natural
    kv: tuple[Array, ...]


@dataclass(frozen=True, kw_only=True)
class Prefilled:
    """The prefill side says: the prompt is done, and all its pieces are sent.

    Attributes:
        weights: fingerprint of the weights that did all of it.
        token: the first token.
        logprobs: the first token's log probability and the likeliest tokens with theirs.
        hidden: hidden states of the prompt's last token.
        rows: what the first round starts from, besides the token.
        prompt_logprobs: log probabilities of the prompt, as asked for.
        cached_tokens: tokens of the prompt that the prefill side had in its prefix cache.
        seconds: from the job's arrival at the prefill side to its first token.
    """

    id: Natural
    weights: str
    token: Natural
    logprobs: tuple[Array, ...] | None
    hidden: Array | None
    rows: tuple[Array, ...] | None
    prompt_logprobs: tuple[Array, ...] | None
    cached_tokens: Natural
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The prefill side will not do a job, or not to its end."""

    id: Natural
    reason: str


@dataclass(frozen=True, kw_only=True)
class Weights:
    """This side's weights have changed; ``weights`` is their fingerprint."""

    weights: str


Message = Hello | Job | Cancel | Piece | Prefilled | Refused | Weights
Arrival = Piece | Prefilled | Refused  # what a prefill side says of one job
