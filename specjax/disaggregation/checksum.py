"""Checksums of arrays that cross a network, by several threads.

One thread reaches 3 GB/s on a server's core, about as much as a connection.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

CHUNK = 4 * 2**20  # bytes of one part
INLINE = 2**16  # bytes that are not worth another thread
THREADS = 4

_pool: ThreadPoolExecutor


def _start() -> None:
    global _pool
    _pool = ThreadPoolExecutor(THREADS, thread_name_prefix="specjax-checksum")


_start()
os.register_at_fork(after_in_child=_start)  # the threads are the parent's


def chunks(data: memoryview) -> Iterator[memoryview]:
    """Parts of an array's bytes, in order."""
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]


class Checksum:
    """CRC-32 over the CRC-32s of an array's :func:`chunks`; what has been added must stay."""

    def __init__(self) -> None:
        self._parts: list[Future[int] | int] = []

    def add(self, chunk: memoryview) -> None:
        """The next chunk; it may be read until :meth:`value` returns."""
        if len(chunk) > INLINE:
            try:
                self._parts.append(_pool.submit(zlib.crc32, chunk))
                return
            except RuntimeError:  # the interpreter ends, and starts no work any more
                pass
        self._parts.append(zlib.crc32(chunk))

    def value(self) -> int:
        """Of all chunks."""
        parts = [part if isinstance(part, int) else part.result() for part in self._parts]
        return zlib.crc32(struct.pack(f"<{len(parts)}I", *parts))


def checksum(data: memoryview) -> int:
    """Of an array's bytes."""
    found = Checksum()
    for chunk in chunks(data):
        found.add(chunk)
    return found.value()
