"""Fields of messages: of which types and within which limits values may cross the wire."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import ml_dtypes
import numpy as np

from specjax.checks import is_integer
from specjax.disaggregation.messages import Message
from specjax.disaggregation.values import CHECKS, WireError, in_range, wrong

MAX_ARRAYS = 4096
MAX_RANK = 8
MAX_ARRAY_BYTES = 2**62  # with every empty axis counted as one, as numpy does

_NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in _NAMES.split()}
DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)  # in the order of the host: it has no other


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Says that its sender lives; channels keep it to themselves."""


class Spec(NamedTuple):
    """An array as the JSON part tells of it."""

    dtype: str
    shape: tuple[int, ...]
    crc: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Field:
    """What an annotation of a message says of a value, on either side.

    Attributes:
        check: a JSON value as it is sent, or WireError; ``None`` for arrays.
    """

    name: str
    is_optional: bool
    is_tuple: bool
    check: Callable[[str, Any], Any] | None

    @classmethod
    def of(cls, name: str, hint: Any) -> "Field":
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        (kind,) = (option for option in options if option is not NoneType)
        is_tuple = kind == tuple[Any, ...]
        check = None if is_tuple or kind is Any else CHECKS[kind]
        return cls(name, NoneType in options, is_tuple, check)

    def is_absent(self, value: Any) -> bool:
        return value is None and self.is_optional

    def arrays(self, value: Any) -> tuple[Any, ...]:
        """The arrays of a value that is to be sent; refuses one of another type."""
        if self.is_absent(value):
            return ()
        if self.check is not None:
            self.check(self.name, value)
            return ()
        if self.is_tuple and not isinstance(value, tuple):
            raise wrong(self.name, value, "a tuple of arrays")
        arrays = value if self.is_tuple else (value,)
        for array in arrays:
            if not hasattr(array, "__array__"):
                raise wrong(self.name, array, "an array")
        return arrays

    def specs(self, value: Any) -> list[Spec]:
        """The arrays of a value that was received; refuses one of another type."""
        if self.is_absent(value):
            return []
        if self.check is not None:
            self.check(self.name, value)
            return []
        if self.is_tuple and not isinstance(value, list):
            raise wrong(self.name, value, "a list of arrays")
        return [_spec(self.name, array) for array in (value if self.is_tuple else [value])]

    def packed(self, value: Any, pack: Callable[[Any], list[Any]]) -> Any:
        """The JSON value of a checked value; ``pack`` makes that of an array."""
        if self.is_absent(value):
            return None
        if self.check is not None:
            return self.check(self.name, value)
        return [pack(array) for array in value] if self.is_tuple else pack(value)

    def unpacked(self, value: Any, arrays: Iterator[np.ndarray]) -> Any:
        """The value of a checked JSON value; its arrays are the next ones."""
        if self.is_absent(value):
            return None
        if self.check is not None:
            return self.check(self.name, value)
        return tuple(next(arrays) for _ in value) if self.is_tuple else next(arrays)


def parse(data: bytearray) -> tuple[str, dict[str, Any]]:
    """Kind and JSON values of a JSON part; their types are unchecked."""
    try:
        frame = json.loads(
            data.decode("ascii"),
            parse_float=_finite,
            parse_constant=_finite,
            object_pairs_hook=_unique,
        )
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame's JSON part is wrong: {error}") from None
    if not isinstance(frame, dict) or frame.keys() != {"kind", "fields"}:
        raise wrong("JSON part", frame, "an object of kind and fields")
    kind, values = frame["kind"], frame["fields"]
    if not isinstance(kind, str) or kind not in KINDS:
        raise wrong("kind", kind, f"one of {', '.join(KINDS)}")
    names = [field.name for field in FIELDS[kind]]
    if not isinstance(values, dict) or values.keys() != set(names):
        raise wrong(f"fields of {kind}", values, f"an object of exactly {names}")
    return kind, values


def check_total(specs: list[Spec], num_bytes: int) -> None:
    """Refuse arrays that are too many or do not make up ``num_bytes`` together."""
    if len(specs) > MAX_ARRAYS:
        raise WireError(f"{len(specs)} arrays are more than {MAX_ARRAYS}")
    if (total := sum(spec.num_bytes for spec in specs)) != num_bytes:
        raise WireError(f"the arrays have {total} bytes, and their part of the frame {num_bytes}")


def check_shape(name: str, shape: Any, dtype: str) -> None:
    """Refuse what cannot be the shape of an array."""
    if len(shape) > MAX_RANK or not all(is_integer(n) and n >= 0 for n in shape):
        raise wrong(name, shape, f"a shape of at most {MAX_RANK} axes")
    if math.prod(max(n, 1) for n in shape) * DTYPES[dtype].itemsize > MAX_ARRAY_BYTES:
        raise wrong(name, shape, f"a shape of at most {MAX_ARRAY_BYTES} bytes")


def check_dtype(name: str, dtype: Any) -> None:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise wrong(name, dtype, f"one of the dtypes {', '.join(DTYPES)}")


def _spec(name: str, value: Any) -> Spec:
    if not isinstance(value, list) or len(value) != 3 or not isinstance(value[1], list):
        raise wrong(name, value, "the dtype, shape and checksum of an array")
    dtype, shape, crc = value
    check_dtype(name, dtype)
    check_shape(name, shape, dtype)
    in_range(name, crc, 0, 2**32 - 1)
    return Spec(dtype, tuple(shape), crc)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text:.40} is no finite number")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key is given twice")
    return values


KINDS: dict[str, type] = {kind.__name__: kind for kind in (*get_args(Message), Heartbeat)}
FIELDS: dict[str, list[Field]] = {
    name: [Field.of(*hint) for hint in get_type_hints(kind, include_extras=True).items()]
    for name, kind in KINDS.items()
}
