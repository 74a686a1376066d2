"""Messages between a decode process, which sends jobs, and a prefill process, which runs them.

An array is anything with ``__array__``. The sender may pass device arrays; the receiver gets numpy
arrays. Types, ranges and sizes are checked before a message is delivered. The receiver checks
whether shapes and dtypes of arrays match the model.
"""

from typing import TYPE_CHECKING, Annotated, Any, Protocol, runtime_checkable

from msgspec import Meta, Struct

if TYPE_CHECKING:
    Array = Any
else:

    @runtime_checkable
    class Array(Protocol):
        """Type that msgspec passes to the hooks of :mod:`~specjax.disaggregation.frames`."""

        def __array__(self) -> Any: ...


Natural = Annotated[int, Meta(ge=0)]  # msgpack has no integers above 2**64 - 1


class WireError(ValueError):
    """Bytes or values that are not a valid message; the connection must be closed."""


class _Struct(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    pass


class Hello(_Struct, frozen=True):
    """The first message of each side: ``KVTransfer.facts`` and the fingerprint ``weights``."""

    facts: dict[str, Any]


class Job(_Struct, frozen=True):
    """Request from the decode side to prefill a prompt and send its KV rows.

    Attributes:
        id: identifies the job in all messages of this connection.
        rid: the request's id, for logs and traces.
        input_ids: i32 [n], the whole prompt.
        start: first token whose KV rows are needed; the decode side has the earlier ones.
        params: sampling parameters as JSON values.
        top_logprobs: top tokens to return per token; ``None`` for no log-probabilities.
        logprob_start_len: first prompt token to return log-probabilities for; ``None`` for none.
        timeout: seconds until the job is no longer needed; ``None`` for no limit.
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
    """Cancellation of a job by the decode side."""

    id: Natural


class Piece(_Struct, frozen=True):
    """KV rows of tokens ``start`` to ``start + count - 1``, then padding; one array per pool."""

    id: Natural
    start: Natural
    count: Natural
    kv: tuple[Array, ...]


class Prefilled(_Struct, frozen=True):
    """End of a job: the prompt is prefilled and all its pieces were sent.

    Attributes:
        weights: fingerprint of the weights that computed the whole prompt.
        logprobs: log-probability of the first token, then top tokens and their values.
        hidden: hidden states of the prompt's last token.
        rows: inputs of the first round in addition to the token.
        cached_tokens: prompt tokens that the prefill side served from its prefix cache.
        seconds: time from the job's arrival at the prefill side to its first token.
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
    """Notice that the prefill side does not run or finish a job."""

    id: Natural
    reason: str


class Weights(_Struct, frozen=True):
    """Notice that this side's weights have changed; ``weights`` is their fingerprint."""

    weights: str


Message = Hello | Job | Cancel | Piece | Prefilled | Refused | Weights
Arrival = Piece | Prefilled | Refused  # messages from a prefill side about one job


# Messages that only the channel itself uses.


class Open(_Struct, frozen=True):
    """The first message on each lane of a decode side, with one random ``token`` for all lanes."""

    token: Annotated[bytes, Meta(min_length=16, max_length=16)]
    lane: Natural
    facts: dict[str, Any]


class Taken(_Struct, frozen=True):
    """Acknowledgement of ``count`` more frames by the decode side."""

    count: Natural
