"""Messages between a decode process, which asks, and a prefill process, which computes prompts.

An array is anything with ``__array__``. The sender may give arrays of a device. The receiver gets
those of numpy. Types, ranges and sizes are checked before a message is delivered. Whether shapes
and dtypes of arrays are those of the model is for the receiver to check.
"""

from typing import TYPE_CHECKING, Annotated, Any, Protocol, runtime_checkable

from msgspec import Meta, Struct

if TYPE_CHECKING:
    Array = Any
else:

    @runtime_checkable
    class Array(Protocol):
        """What msgspec hands to the hooks of :mod:`~specjax.disaggregation.frames`."""

        def __array__(self) -> Any: ...


Natural = Annotated[int, Meta(ge=0)]  # msgpack has no integers above 2**64 - 1


class WireError(ValueError):
    """Bytes or values that are not a message; a connection that brought them is of no more use."""


class _Struct(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    pass


class Hello(_Struct, frozen=True):
    """The first message of each side.

    Attributes:
        facts: JSON values that both sides have to agree on. Its ``weights``, a string, is the
            fingerprint of this side's weights, as in :class:`Weights`.
    """

    facts: dict[str, Any]


class Job(_Struct, frozen=True):
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
        return_hidden_states: whether hidden states of the first token are requested.
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


class Cancel(_Struct, frozen=True):
    """The decode side says: nobody waits for this job any more."""

    id: Natural


class Piece(_Struct, frozen=True):
    """The prefill side sends KV rows of the tokens ``start`` to ``start + count - 1``.

    Attributes:
        kv: one array for each pool of rows, in the dtype of the pool; rows after the first
            ``count`` are padding.
    """

    id: Natural
    start: Natural
    count: Natural
    kv: tuple[Array, ...]


class Prefilled(_Struct, frozen=True):
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


class Refused(_Struct, frozen=True):
    """The prefill side will not do a job, or not to its end."""

    id: Natural
    reason: str


class Weights(_Struct, frozen=True):
    """This side's weights have changed; ``weights`` is their fingerprint."""

    weights: str


Message = Hello | Job | Cancel | Piece | Prefilled | Refused | Weights
Arrival = Piece | Prefilled | Refused  # what a prefill side says of one job


# Messages of the connection itself, which nobody else sees.


class Open(_Struct, frozen=True):
    """The first message of each lane: a decode side has several connections.

    Attributes:
        token: random, and the same for all lanes of a decode side.
        lane: number of the lane.
        facts: those of :class:`Hello`.
    """

    token: Annotated[bytes, Meta(min_length=16, max_length=16)]
    lane: Natural
    facts: dict[str, Any]


class Taken(_Struct, frozen=True):
    """The decode side has taken this many more frames."""

    count: Natural
