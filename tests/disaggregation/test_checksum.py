"""Checksums of arrays, against CRC-32 of the CRC-32s of their chunks."""

import struct
import subprocess
import sys
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
    data[0] = 7
    first, second, *rest = chunks(memoryview(bytes(data)))
    other = checksum(memoryview(b"".join([first, second, *rest])))
    assert checksum(memoryview(b"".join([second, first, *rest]))) != other


def test_in_a_forked_process() -> None:
    code = f"""
import os, zlib
from specjax.disaggregation.checksum import checksum
data = memoryview(bytes({CHUNK} * 8))
before = [checksum(data) for _ in range(5)][0]
child = os.fork()
if child == 0:
    os._exit(checksum(data) != before)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


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
