"""Messages between a decode process, which sends jobs, and a prefill process, which runs them.

An array is anything with ``__array__``. The sender may pass device arrays; the receiver gets numpy
arrays. Types, ranges and sizes are checked before a message is delivered. The receiver checks
whether shapes and dtypes of arrays match the model.

The first frame of a message is msgpack, with dtype and shape in place of each array. The bytes of
the arrays follow in order: little endian, C order, at most ``FRAME_BYTES`` per frame. A frame never
contains bytes from more than one array.
"""

import math
from collections import deque
from typing import TYPE_CHECKING, Annotated, Any, Protocol, runtime_checkable

import ml_dtypes
import msgspec
import numpy as np
from msgspec import Meta, Struct

if TYPE_CHECKING:
    Array = Any
else:

    @runtime_checkable
    class Array(Protocol):
        """Type that msgspec passes to the hooks of encoder and decoder."""

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
    """Request from the decode side to prefill a prompt and send its KV rows."""

    id: Natural  # identifies the job in all messages of this connection
    rid: str  # the request's id, for logs and traces
    input_ids: Array  # i32 [n], the whole prompt
    start: Natural  # first token whose KV rows are needed; the decode side has the earlier ones
    params: dict[str, Any]  # sampling parameters as JSON values
    seed: Natural
    end_token_ids: list[Natural]
    top_logprobs: int | None  # top tokens to return per token; ``None`` for no log-probabilities
    logprob_start_len: int | None  # first prompt token to return log-probabilities for
    return_hidden_states: bool
    timeout: float | None  # seconds for which the job is needed; ``None`` for no limit
    mask: Array | None = None  # i32 [V / 32], bits of the tokens that a grammar allows first


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
    """End of a job: the prompt is prefilled and all its pieces were sent."""

    id: Natural
    weights: str  # fingerprint of the weights that computed the whole prompt
    token: Natural
    logprobs: tuple[Array, ...] | None  # of the token, then top tokens and their values
    hidden: Array | None  # hidden states of the prompt's last token
    rows: tuple[Array, ...] | None  # inputs of the first round in addition to the token
    prompt_logprobs: tuple[Array, ...] | None
    cached_tokens: Natural  # prompt tokens that the prefill side served from its prefix cache
    seconds: float  # time from the job's arrival at the prefill side to its first token


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


SCHEMA = 6  # raise this number with every change to a message or a frame
# libzmq moves 2.9 GB/s between two cores in frames of this size, and 1.7 GB/s in frames of 64 MiB
FRAME_BYTES = 2**20
MAX_ARRAYS = 4096  # per message
MAX_RANK = 8

_NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in _NAMES.split()}
DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)  # always in the host's byte order

AnyMessage = Message | Open | Taken
Frame = bytes | memoryview


def encode(message: AnyMessage) -> list[Frame]:
    """Encode a message into frames; contiguous arrays become views, not copies.

    Blocks until the arrays are on the host. Raises WireError if a value is not supported.
    """
    arrays: list[np.ndarray] = []

    def pack_array(value: Any) -> list[Any]:
        if isinstance(value, np.generic) or not hasattr(value, "__array__"):
            raise WireError(f"a message cannot contain {type(value).__name__} values")
        array = np.asarray(value)
        if array.dtype.name not in DTYPES or array.ndim > MAX_RANK:
            raise WireError(f"a message cannot contain {array.dtype.name}{[*array.shape]} arrays")
        arrays.append(np.ascontiguousarray(array, DTYPES[array.dtype.name]))
        return [array.dtype.name, list(array.shape)]

    try:
        head = msgspec.msgpack.encode(message, enc_hook=pack_array)
        _checker.decode(head)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(f"{type(message).__name__} cannot be sent: {error}") from error
    if len(head) > FRAME_BYTES:
        size = f"{len(head)} bytes excluding arrays"
        raise WireError(f"a message has {size}; the limit is {FRAME_BYTES}")
    if len(arrays) > MAX_ARRAYS:
        raise WireError(f"{len(arrays)} arrays exceed the limit of {MAX_ARRAYS}")
    return [head, *(view for array in arrays for view in _views(array))]


class Assembler:
    """Assembles messages from the frames in one direction of a connection.

    All arrays of a message together may have ``max_bytes``. Discard an assembler after a WireError.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._decoder = msgspec.msgpack.Decoder(AnyMessage, dec_hook=self._make_array)
        self._message: AnyMessage | None = None
        self._arrays: list[np.ndarray] = []
        self._views: deque[memoryview] = deque()  # parts of arrays that have not arrived yet
        self._num_bytes = 0

    def feed(self, frame: memoryview) -> AnyMessage | None:
        """Add the next frame; return the message that it completes."""
        if self._message is None:
            self._begin(frame)
        else:
            view = self._views.popleft()
            if len(frame) != len(view):
                raise WireError(f"a frame has {len(frame)} bytes; expected {len(view)}")
            np.copyto(np.asarray(view), np.asarray(frame))  # slices would block other threads
        if self._views:
            return None
        for array in self._arrays:
            if array.dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
                raise WireError(f"a bool must be 0 or 1, not {array.view(np.uint8).max()}")
        message, self._message, self._arrays = self._message, None, []
        return message

    def _begin(self, frame: memoryview) -> None:
        self._num_bytes = 0
        try:
            self._message = self._decoder.decode(frame)
        except (ValueError, RecursionError) as error:
            raise WireError(f"a frame is not a valid message: {error}") from None
        self._views.extend(view for array in self._arrays for view in _views(array))

    def _make_array(self, kind: type, value: Any) -> np.ndarray:
        dtype, shape = _check_spec(value)
        self._num_bytes += math.prod(shape) * dtype.itemsize
        if self._num_bytes > self._max_bytes:
            raise ValueError(f"{self._num_bytes} bytes of arrays exceed {self._max_bytes}")
        if len(self._arrays) == MAX_ARRAYS:
            raise ValueError(f"a message can have at most {MAX_ARRAYS} arrays")
        array = np.empty(shape, dtype)
        self._arrays.append(array)
        return array


def _check_spec(value: Any) -> tuple[np.dtype, tuple[int, ...]]:
    """Return dtype and shape of an array; raise ValueError if they are not valid."""
    name, shape = msgspec.convert(value, tuple[str, list[int]])
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r:.40} must be one of {', '.join(DTYPES)}")
    if len(shape) > MAX_RANK or not all(0 <= size < 2**62 for size in shape):
        raise ValueError(f"an array must have at most {MAX_RANK} axes of 0 to 2**62 - 1")
    return DTYPES[name], tuple(shape)


def _views(array: np.ndarray) -> list[memoryview]:
    """Split the bytes of a contiguous array into frames."""
    data = array.reshape(-1).view(np.uint8).data
    return [data[start : start + FRAME_BYTES] for start in range(0, len(data), FRAME_BYTES)]


def _check_array(kind: type, value: Any) -> np.ndarray:
    _check_spec(value)
    return np.empty(0)


_checker = msgspec.msgpack.Decoder(AnyMessage, dec_hook=_check_array)
