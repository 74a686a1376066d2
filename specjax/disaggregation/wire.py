"""Frames: how a message becomes bytes, and what has to hold before bytes become a message.

A frame is a fixed header, a JSON part, an HMAC-SHA256 of both and the arrays::

    magic 4s, schema u16, JSON bytes u32, array bytes u64, sequence number u64
    {"kind": "Cancel", "fields": {"id": 7}}          an array: [dtype, shape, checksum]
    HMAC-SHA256 with the key of this connection and direction
    arrays in the order of the fields, little endian, C order, nothing between them

A checksum is that of :mod:`~specjax.disaggregation.checksum`, whose chunks belong to the schema.

All that decides what is allocated for arrays is authenticated first. Their own bytes are covered by
checksums only, which tell accidents, not somebody on the way who means it.
"""

import hmac
import json
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from specjax.disaggregation.checksum import Checksum, checksum, chunks
from specjax.disaggregation.fields import (
    DTYPES,
    FIELDS,
    KINDS,
    MAX_ARRAYS,
    Field,
    Heartbeat,
    Spec,
    check_dtype,
    check_shape,
    check_total,
    parse,
)
from specjax.disaggregation.messages import Message
from specjax.disaggregation.values import WireError, wrong

SCHEMA = 2  # to be raised with every change of a message or a frame
MAGIC = b"SJXF"
HEADER = struct.Struct("<4sHIQQ")
MAC_BYTES = 32
MAX_JSON_BYTES = 16 * 2**20

Buffers = list[bytes | memoryview]


class Packed(NamedTuple):
    """A frame that lacks nothing but its place in a connection."""

    text: bytes  # the JSON part
    arrays: list[memoryview]  # of bytes; none is empty


def check(message: Message | Heartbeat) -> int:
    """Bytes of a message's arrays; WireError for wrong values. Waits for no device."""
    values = [a for field, value in _fields(message).items() for a in field.arrays(value)]
    if len(values) > MAX_ARRAYS:
        raise WireError(f"{len(values)} arrays are more than {MAX_ARRAYS}")
    return sum(int(getattr(array, "nbytes", 0)) for array in values)


def pack(message: Message | Heartbeat) -> Packed:
    """The parts of a frame; waits for arrays that a device still computes or copies."""
    check(message)
    arrays: list[memoryview] = []
    values = {}
    for field, value in _fields(message).items():

        def pack_array(source: Any, name: str = field.name) -> list[Any]:
            array = np.asarray(source)
            dtype = array.dtype.name
            check_dtype(name, dtype)
            check_shape(name, array.shape, dtype)
            data = np.ascontiguousarray(array, DTYPES[dtype]).reshape(-1).view(np.uint8)
            if data.size:
                arrays.append(data.data)
            return [dtype, list(array.shape), checksum(data.data)]

        values[field.name] = field.packed(value, pack_array)
    frame = {"kind": type(message).__name__, "fields": values}
    text = json.dumps(frame, allow_nan=False, separators=(",", ":")).encode("ascii")
    if len(text) > MAX_JSON_BYTES:
        raise WireError(f"{len(text)} bytes of JSON are more than {MAX_JSON_BYTES}")
    return Packed(text, arrays)


def seal(packed: Packed, sequence: int, key: bytes) -> Buffers:
    """The buffers of the frame with this number; those of contiguous arrays are no copies."""
    size = sum(view.nbytes for view in packed.arrays)
    head = HEADER.pack(MAGIC, SCHEMA, len(packed.text), size, sequence) + packed.text
    return [head + hmac.digest(key, head, "sha256"), *packed.arrays]


def encode(message: Message | Heartbeat, sequence: int, key: bytes) -> Buffers:
    """The buffers of a message's frame; WireError for wrong values."""
    return seal(pack(message), sequence, key)


def decode(frame: bytes, sequence: int, key: bytes, *, max_bytes: int) -> Message | Heartbeat:
    """The message of exactly one frame."""
    rest = memoryview(frame)

    def read_into(view: memoryview) -> None:
        nonlocal rest
        if len(rest) < len(view):
            raise WireError(f"the frame ends {len(view) - len(rest)} bytes too early")
        view[:], rest = rest[: len(view)], rest[len(view) :]

    message = Reader(read_into, key=key, max_bytes=max_bytes, sequence=sequence).read()
    if rest:
        raise WireError(f"{len(rest)} bytes lie behind the frame")
    return message


class Reader:
    """Messages of one direction of a connection, in order.

    ``read_into`` fills a view of bytes or raises. Nothing larger is allocated than
    ``MAX_JSON_BYTES``, and ``max_bytes`` for all arrays of a frame together.
    """

    def __init__(
        self,
        read_into: Callable[[memoryview], None],
        *,
        key: bytes,
        max_bytes: int,
        sequence: int = 0,
    ) -> None:
        self._read_into = read_into
        self._key = key
        self._max_bytes = max_bytes
        self._sequence = sequence

    def read(self) -> Message | Heartbeat:
        """The next message; a reader that has raised is not to be asked again."""
        head = self._read(HEADER.size)
        num_text, num_arrays = self._check_header(head)
        text = self._read(num_text)
        mac = self._read(MAC_BYTES)
        if not hmac.compare_digest(mac, hmac.digest(self._key, head + text, "sha256")):
            raise WireError("the frame's MAC is wrong: it was altered or made with another key")
        kind, values = parse(text)
        fields = FIELDS[kind]
        specs = [spec for field in fields for spec in field.specs(values[field.name])]
        check_total(specs, num_arrays)
        arrays = iter([self._read_array(spec) for spec in specs])
        self._sequence += 1
        return KINDS[kind](**{f.name: f.unpacked(values[f.name], arrays) for f in fields})

    def _check_header(self, head: bytearray) -> tuple[int, int]:
        """Bytes of the JSON part and of the arrays."""
        magic, schema, num_text, num_arrays, sequence = HEADER.unpack(head)
        if magic != MAGIC:
            raise WireError(f"a frame starts with {MAGIC!r}, and not with {magic!r}")
        if schema != SCHEMA:
            raise WireError(f"the frame is of schema {schema}, and this side of {SCHEMA}")
        if sequence != self._sequence:
            raise WireError(f"frame {sequence} came where {self._sequence} was due")
        if num_text > MAX_JSON_BYTES:
            raise WireError(f"{num_text} bytes of JSON are more than {MAX_JSON_BYTES}")
        if num_arrays > self._max_bytes:
            raise WireError(f"{num_arrays} bytes of arrays are more than {self._max_bytes}")
        return num_text, num_arrays

    def _read(self, count: int) -> bytearray:
        buffer = bytearray(count)
        self._read_into(memoryview(buffer))
        return buffer

    def _read_array(self, spec: Spec) -> np.ndarray:
        array = np.empty(spec.shape, DTYPES[spec.dtype])
        data = array.reshape(-1).view(np.uint8)
        found = Checksum()
        for chunk in chunks(data.data):
            self._read_into(chunk)
            found.add(chunk)
        if (crc := found.value()) != spec.crc:
            raise WireError(f"an array has the checksum {crc:#x}, and not {spec.crc:#x}")
        if spec.dtype == "bool" and data.size and data.max() > 1:
            raise WireError(f"{data.max()} is no value of a bool")
        return array


def _fields(message: Message | Heartbeat) -> dict[Field, Any]:
    kind = type(message)
    if KINDS.get(kind.__name__) is not kind:
        raise wrong("message", message, f"one of {', '.join(KINDS)}")
    return {field: getattr(message, field.name) for field in FIELDS[kind.__name__]}
