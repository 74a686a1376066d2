"""Checksums of arrays, against CRC-32 of the CRC-32s of their chunks."""

import struct
import zlib

import pytest

from specjax.disaggregation import checksum as module
from specjax.disaggregation.checksum import CHUNK, INLINE, Checksum, checksum, chunks

DATA = bytes(range(256)) * (CHUNK // 128 + 3)


@pytest.mark.parametrize("size", [0, 1, INLINE, INLINE + 1, CHUNK, CHUNK + 1, len(DATA)])
def test_of_any_size(size: int) -> None:
    data = DATA[:size]
    parts = [zlib.crc32(data[at : at + CHUNK]) for at in range(0, size, CHUNK)]
    assert checksum(memoryview(data)) == zlib.crc32(struct.pack(f"<{len(parts)}I", *parts))
    assert b"".join(chunks(memoryview(data))) == data


def test_one_bit_or_another_order_is_another_one() -> None:
    data = bytearray(DATA)
    before = checksum(memoryview(data))
    data[CHUNK] ^= 1
    assert checksum(memoryview(data)) != before
    data[CHUNK] ^= 1
    first, second, *rest = chunks(memoryview(bytes(data[:CHUNK])[::-1] + bytes(data[CHUNK:])))
    assert checksum(memoryview(b"".join([second, first, *rest]))) != before


def test_without_threads(monkeypatch) -> None:
    """As at the interpreter's end."""

    def submit(*call: object) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    before = checksum(memoryview(DATA))
    monkeypatch.setattr(module._pool, "submit", submit)
    found = Checksum()
    for chunk in chunks(memoryview(DATA)):
        found.add(chunk)
    assert found.value() == before
